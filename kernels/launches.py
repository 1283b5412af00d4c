"""How a compiled program launches its kernels: grid, threads, dynamic shared memory, which machine code does not say.

They stand in the custom calls of the program's HLO. A Pallas kernel for Mosaic GPU travels there as an MLIR module
whose ``gpu.launch`` has them as operands, a Triton kernel as a compressed protocol buffer (jaxlib/gpu/triton.proto).
"""

import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glmjax.kernels.riegeli import varint

CALL = re.compile(r'custom_call_target="(mosaic_gpu\w*|triton_kernel_call\w*)"')
STRING = r'"((?:[^"\\]|\\.)*)"'
MODULE = re.compile(rf"\bmodule = {STRING}", re.DOTALL)
OPAQUE = re.compile(rf"\bopaque = {STRING}", re.DOTALL)
ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """One launch: name of the kernel, blocks of the grid, threads of a block, bytes of dynamic shared memory."""

    kernel: str
    blocks: int
    threads: int
    dynamic_shared_bytes: int


def launches(hlo: str) -> tuple[Launch, ...]:
    """Launches of Pallas and Triton kernels in the order of a compiled program's text."""
    found = []
    for call in CALL.finditer(hlo):
        mosaic = call[1].startswith("mosaic")
        config = (MODULE if mosaic else OPAQUE).search(hlo, call.end())
        assert config is not None  # every call to these targets brings it
        read = _of_mosaic if mosaic else _of_triton
        found.append(read(_unescape(config[1])))
    return tuple(found)


def _unescape(text: str) -> bytes:
    """Bytes of a string as LLVM prints it: what is not printable as a backslash and two hexadecimal digits."""
    return ESCAPE.sub(lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1], text.encode("latin-1"))


def _of_mosaic(bytecode: bytes) -> Launch:
    from jax.experimental.mosaic.gpu import dialect
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    with make_ir_context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True  # operations travel under names of their own
        module = ir.Module.parse(bytecode)
        (launch,) = (op for op in _operations(module.operation) if op.name.endswith("gpu.launch"))
        # Operands: dependencies, grid, block, optionally cluster, and the size of the shared memory last.
        sizes = [_constant(value) for value in launch.operands if not str(value.type).startswith("!gpu")]
        host_function = ir.StringAttr(launch.parent.attributes["sym_name"]).value
        return Launch(f"{host_function}_kernel", math.prod(sizes[:3]), math.prod(sizes[3:6]), sizes[-1])


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _constant(value: Any) -> int:
    return int(value.owner.attributes["value"].value)


def _of_triton(opaque: bytes) -> Launch:
    call = dict(_fields(dict(_fields(zlib.decompress(opaque)))[1]))  # TritonAnyKernelCall.kernel_call
    kernel = dict(_fields(call[1]))
    return Launch(kernel[1].decode(), math.prod(call[n] for n in (2, 3, 4)), 32 * kernel[2], kernel.get(3, 0))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields: whole numbers, or bytes."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
            yield key >> 3, value
        else:
            size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
