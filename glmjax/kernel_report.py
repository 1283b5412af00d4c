"""What the kernels are made of, and how far from the hardware's limits: the table of ``glmjax kernels``.

Every kernel is compiled for an H200 at the shapes in use, which needs no GPU; where there is a Hopper GPU it is timed
as well.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from glmjax.errors import ConfigError
from glmjax.kernels.choose import HOPPER, target_device
from glmjax.kernels.machine_code import COPIES, TENSOR_CORES, KernelCode, machine_code
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import roofline_us
from glmjax.kernels.row_format import HostRows
from glmjax.sharding.aot import H200Program, compile_for_h200, h200_devices

WARM_UP, REPEATS = 3, 50
KERNELS = (
    *("index_scores", "index_top_k", "top_k", "sparse_mla", "kv_insert", "row_fetch"),
    *("grouped_matmul", "block_fp8_matmul"),
)
SHOWN = TENSOR_CORES | COPIES | {"LDG.E.128", "STG.E.128"}  # of the instructions, in the table


@dataclass(frozen=True)
class KernelReport:
    """A kernel at one shape. Where several kernels make up an operation, the worst of them or their sum.

    Attributes:
      kernel, implementation, shape, stages, bytes, host_bytes, flops: of the case.
      kernels: launched for it, those that XLA generates around them left out.
      registers, stack, local, shared_bytes: the most of any of the kernels.
      spills: loads and stores of spilled registers in all of them.
      threads, blocks: of the launch with the most blocks.
      instructions: tensor-core, copy and other telling instructions in all of them.
      roofline_us: least time on an H200.
      measured_us: on this machine's GPU; None without one.
    """

    kernel: str
    implementation: str
    shape: str
    stages: int
    kernels: int
    registers: int
    stack: int
    local: int
    spills: int
    shared_bytes: int
    threads: int
    blocks: int
    instructions: Mapping[str, int]
    bytes: int
    host_bytes: int
    flops: int
    roofline_us: float
    measured_us: float | None = None

    @property
    def roofline_percent(self) -> float | None:
        """How much of the hardware's limit is reached."""
        return None if self.measured_us is None else 100 * self.roofline_us / self.measured_us

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "instructions": dict(self.instructions), "roofline_percent": self.roofline_percent}


def all_cases() -> tuple[Case, ...]:
    """Every kernel at every shape in use.

    Raises:
      ConfigError: Triton is not installed.
    """
    try:
        from glmjax.kernels import index_topk_triton, kv_insert_triton, row_fetch_triton, topk_triton
    except ImportError as error:
        raise ConfigError("the kernels need Triton, also to be looked at: pip install 'glmjax[aot]'") from error
    from glmjax.kernels import grouped_matmul_hopper, index_scores_hopper, sparse_mla_hopper

    selection, rows = (index_topk_triton, topk_triton), (kv_insert_triton, row_fetch_triton)
    modules = (index_scores_hopper, *selection, sparse_mla_hopper, *rows, grouped_matmul_hopper)
    return tuple(case for module in modules for case in module.cases())


def check_names(names: Iterable[str], known: Iterable[str] = KERNELS) -> None:
    """ConfigError unless there are kernels of these names; needs no Triton."""
    if unknown := sorted({*names} - {*known}):
        raise ConfigError(f"no kernel {', '.join(map(repr, unknown))}: there are {', '.join(sorted(known))}")


def select_cases(cases: Iterable[Case], names: Iterable[str]) -> tuple[Case, ...]:
    """The cases of kernels with these names; all of them if there are none.

    Raises:
      ConfigError: there is no such kernel.
    """
    cases, wanted = tuple(cases), set(names)
    check_names(wanted, {case.kernel for case in cases})
    return tuple(case for case in cases if not wanted or case.kernel in wanted)


def report(case: Case, clock: Callable[[], float] | None = None) -> KernelReport:
    """Compiles a case for an H200 and counts; times it on this machine's GPU if there is a clock.

    Raises:
      ConfigError: what compiles or reads machine code is not installed.
    """
    codes = own_kernels(case, compile_program(case))
    largest = max(codes, key=lambda code: code.blocks or 0)
    instructions: Counter[str] = Counter()
    for code in codes:
        instructions.update(code.instructions)
    return KernelReport(
        kernel=case.kernel,
        implementation=case.implementation,
        shape=case.shape,
        stages=case.stages,
        kernels=len(codes),
        registers=max(code.registers for code in codes),
        stack=max(code.stack for code in codes),
        local=max(code.local for code in codes),
        spills=sum(code.spills for code in codes),
        shared_bytes=max(code.shared_bytes for code in codes),
        threads=largest.threads or 0,
        blocks=largest.blocks or 0,
        instructions=dict(sorted(instructions.items())),
        bytes=case.bytes,
        host_bytes=case.host_bytes,
        flops=case.flops,
        roofline_us=roofline_us(case.bytes, case.flops, case.arithmetic, case.host_bytes),
        measured_us=None if clock is None else measure_us(case, clock),
    )


def compile_program(case: Case) -> H200Program:
    """The case compiled for an H200, with the arguments donated that it updates in place."""
    mesh = h200_mesh()
    place = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in case.arguments]
    return compile_for_h200(case.function, *arguments, mesh=mesh, donate=case.donate)


def own_kernels(case: Case, program: H200Program) -> tuple[KernelCode, ...]:
    """The kernels of a case's program that XLA did not generate."""
    own = tuple(code for code in machine_code(program.executable) if code.blocks is not None)
    if not own:
        raise AssertionError(f"{case.kernel}, {case.shape}: the program launches no kernel of ours")
    return own


@functools.cache
def h200_mesh() -> Mesh:
    """One H200 that is not there."""
    return Mesh(np.array(h200_devices(1)), ("x",))


def can_measure() -> bool:
    """Whether this process runs on a GPU that the kernels are for."""
    platform, kind = target_device()
    return platform != "cpu" and bool(HOPPER.search(kind))


def measure_us(case: Case, clock: Callable[[], float]) -> float:
    """Mean time of a call, in microseconds, of calls one after the other within one program.

    Args:
      clock: seconds, as ``time.perf_counter``.
    """
    pools = {at: _host_pool(size) for at, size in case.host_pools.items()}
    addresses = {at: HostRows.at(pool.unsafe_buffer_pointer(), 1).address for at, pool in pools.items()}
    arguments = tuple(
        jnp.asarray(addresses[at]) if at in addresses else _example(case, at) for at in range(len(case.arguments))
    )
    run = jax.jit(functools.partial(_repeat, case), donate_argnums=0)
    for _ in range(WARM_UP):
        arguments, _ = run(arguments)
    jax.block_until_ready(arguments)
    start = clock()
    done = run(arguments)
    jax.block_until_ready(done)
    return 1e6 * (clock() - start) / REPEATS


def _host_pool(size: int) -> jax.Array:
    """Bytes in pinned memory, which the GPU may read in place."""
    device = jax.devices()[0]
    return jax.device_put(np.zeros(size, np.uint8), SingleDeviceSharding(device, memory_kind="pinned_host"))


def _repeat(case: Case, arguments: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], Any]:
    """Calls a case over and over; arrays updated in place go into the next call."""

    def call(_: jax.Array | int, state: tuple[tuple[jax.Array, ...], Any]) -> tuple[tuple[jax.Array, ...], Any]:
        arguments, _ = state
        results = jax.tree.leaves(case.function(*arguments))
        renewed = list(arguments)
        for at, new in zip(case.donate, results, strict=False):
            renewed[at] = new
        # No call may be left out or taken out of the loop: each waits for the one before.
        return jax.lax.optimization_barrier((tuple(renewed), results[len(case.donate) :]))

    return jax.lax.fori_loop(1, REPEATS, call, call(0, (arguments, None)))


def _example(case: Case, at: int) -> jax.Array:
    """An argument to time a case with: whole numbers below the case's limit, other numbers around zero."""
    argument, key = case.arguments[at], jax.random.key(at)
    if at in case.donate:
        return jnp.zeros(argument.shape, argument.dtype)
    if at in case.limits:
        return jax.random.randint(key, argument.shape, 0, case.limits[at], argument.dtype)
    if argument.dtype == jnp.uint8:
        return jax.random.bits(key, argument.shape, jnp.uint8) & 0x77  # as fp8: small and no NaN
    if jnp.issubdtype(argument.dtype, jnp.floating):
        return jax.random.normal(key, argument.shape, jnp.bfloat16).astype(argument.dtype)
    return jnp.zeros(argument.shape, argument.dtype)


def as_table(reports: Iterable[KernelReport]) -> Any:
    """A ``rich`` table of the reports, a section to a kernel."""
    from rich.table import Table

    reports = tuple(reports)
    measured = any(one.measured_us is not None for one in reports)
    table = Table(title="Kernels compiled for an H200", caption=CAPTION, caption_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("shape", min_width=12, overflow="fold")
    for name in ("regs", "spills", "shared\nKiB", "stages", "blocks x\nthreads"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instructions", min_width=12, overflow="fold")
    for name in ("MB", "GFLOP", "roofline\nus", *(("measured\nus", "%") if measured else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for i, one in enumerate(reports):
        times = (one.measured_us, one.roofline_percent) if measured else ()
        table.add_row(
            one.kernel,
            f"{one.shape} ({one.implementation})",
            str(one.registers),
            f"{one.spills} ({one.stack} B)" if one.stack else str(one.spills),
            f"{one.shared_bytes / 1024:.1f}",
            str(one.stages),
            f"{one.blocks} x {one.threads}",
            " ".join(f"{name}:{n}" for name, n in one.instructions.items() if name in SHOWN),
            f"{(one.bytes + one.host_bytes) / 1e6:.2f}",
            f"{one.flops / 1e9:.1f}" if one.flops else "",
            f"{one.roofline_us:.2f}",
            *("" if time is None else f"{time:.1f}" for time in times),
            end_section=i + 1 == len(reports) or reports[i + 1].kernel != one.kernel,
        )
    return table


CAPTION = (
    "Roofline: memory traffic at 4.8 TB/s, from host memory at 63 GB/s, or arithmetic at 989 (bf16) or 1979 TFLOP/s "
    "(fp8), whichever takes longest. HGMMA and QGMMA are the tensor cores in bf16 and fp8; UTMALDG, UBLKCP and LDGSTS "
    "load asynchronously."
)
