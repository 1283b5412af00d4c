"""What a compiled program's kernels became: registers, spills, shared memory and instructions, without a GPU.

The machine code stands as cubins in the serialized executable, one for every Pallas and Triton kernel and one for all
that XLA generated itself. ``cuobjdump`` and ``nvdisasm``, which come with Triton, read it; how the kernels are launched
stands in the program's HLO.
"""

import importlib.util
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from glmjax.errors import ConfigError
from glmjax.kernels.launches import Launch, launches
from glmjax.kernels.riegeli import MAGIC, find_records

RESERVED_SHARED_BYTES = 1024  # of every block on Hopper, for the driver; tools count them as the kernel's
ELF = re.compile(rb"\x7fELF\x02\x01")
ELF_MACHINE_OFFSET, ELF_CUDA = 18, 190
FUNCTION = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
TENSOR_CORES = frozenset({"HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA"})
COPIES = frozenset({"UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "LDGSTS"})  # in bulk, or asynchronous
OTHERS = frozenset({"LDSM", "STSM", "ATOMG", "ATOMS", "REDG", "LDL", "STL"})  # matrices, atomics, spills


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a compiled program.

    Attributes:
      registers: of a thread.
      stack, local: bytes of a thread that live in memory; more than zero says that registers spilled.
      shared_bytes: shared memory of a block, static and dynamic, without the kilobyte that the driver keeps.
      threads, blocks: of a block and of the grid; None for kernels that XLA generated.
      instructions: how often those that say how a kernel computes and copies stand in its code. Names are those of the
        machine code; loads and stores of device memory carry their width in bits: ``LDG.E.128``, ``STG.E.32``.
    """

    name: str
    registers: int
    stack: int
    local: int
    shared_bytes: int
    threads: int | None
    blocks: int | None
    instructions: Mapping[str, int] = field(repr=False)

    @property
    def spills(self) -> int:
        """Loads and stores of a thread's own memory in the code."""
        return self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)


def machine_code(executable: jax.stages.Compiled) -> tuple[KernelCode, ...]:
    """Kernels of a program for NVIDIA GPUs: those of Pallas and Triton first, as they are launched, then XLA's own.

    Args:
      executable: a compiled program, such as ``glmjax.sharding.aot.compile_for_h200(...).executable``.

    Raises:
      ConfigError: the tools to read machine code are not installed, or the program is not for NVIDIA GPUs.
    """
    tools = _tools()
    hlo = executable.as_text()
    payload = serialize_executable.serialize(executable)[0]
    waiting = list(launches(hlo or ""))
    ours: list[KernelCode] = []
    generated: list[KernelCode] = []
    for cubin in _cubins(payload):
        for name, usage, instructions in _disassemble(cubin, tools):
            launch = next((launch for launch in waiting if launch.kernel == name), None)
            if launch is not None:
                waiting.remove(launch)
            (generated if launch is None else ours).append(_kernel(name, usage, instructions, launch))
    if not ours and not generated:
        raise ConfigError("the program has no machine code for NVIDIA GPUs: compile it with compile_for_h200")
    return (*ours, *generated)


def _kernel(name: str, usage: Mapping[str, int], instructions: Mapping[str, int], launch: Launch | None) -> KernelCode:
    static = max(0, usage["shared"] - RESERVED_SHARED_BYTES)
    return KernelCode(
        name=name,
        registers=usage["registers"],
        stack=usage["stack"],
        local=usage["local"],
        shared_bytes=static + (launch.dynamic_shared_bytes if launch else 0),
        threads=launch.threads if launch else None,
        blocks=launch.blocks if launch else None,
        instructions=instructions,
    )


def _tools() -> tuple[Path, Path]:
    """cuobjdump and nvdisasm."""
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    found = [
        Path(folder, "backends/nvidia/bin", name) for folder in folders or () for name in ("cuobjdump", "nvdisasm")
    ]
    if len(found) < 2 or not all(tool.exists() for tool in found):
        raise ConfigError(
            "reading machine code needs cuobjdump and nvdisasm, which come with Triton for Linux: "
            "pip install 'glmjax[aot]'"
        )
    return found[0], found[1]


def _cubins(payload: bytes) -> Iterator[bytes]:
    """ELF images for NVIDIA GPUs in a serialized executable, whose records nest."""
    for record in find_records(payload):
        if MAGIC in record:  # a file in the file; what looks like an ELF image there is compressed
            yield from _cubins(record)
            continue
        for start in ELF.finditer(record):
            image = record[start.start() :]
            (machine,) = struct.unpack_from("<H", image, ELF_MACHINE_OFFSET)
            if machine == ELF_CUDA:
                yield image


def _disassemble(cubin: bytes, tools: tuple[Path, Path]) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Name, resources and counted instructions of every kernel of a cubin."""
    cuobjdump, nvdisasm = tools
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    _, *sections = SECTION.split(text)
    code = dict(zip(sections[::2], sections[1::2], strict=True))
    for name, *sizes in FUNCTION.findall(usage):
        resources = dict(zip(("registers", "stack", "shared", "local"), map(int, sizes), strict=True))
        yield name, resources, count_instructions(code[name])


def count_instructions(disassembly: str) -> dict[str, int]:
    """Counts what ``KernelCode.instructions`` holds in the text that nvdisasm prints of a kernel, by name."""
    counts: Counter[str] = Counter()
    for opcode in INSTRUCTION.findall(disassembly):
        base, *modifiers = opcode.split(".")
        if base in ("LDG", "STG"):
            width = next((m for m in modifiers if m in ("128", "64", "U8", "S8", "U16", "S16")), "32")
            counts[f"{base}.E.{width.lstrip('US')}"] += 1
        elif base in TENSOR_CORES | COPIES | OTHERS:
            counts[base] += 1
    return dict(sorted(counts.items()))
