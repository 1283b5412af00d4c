"""Which addresses a compiled Mosaic kernel computes: its index arithmetic, followed with the widths that it is done in.

The operations behind an operand are worked out for given values of what the kernel reads, each wrapped to its type: a
byte offset of 32 bits comes out wrong beyond 2^31. Nothing else of the kernel runs.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.mosaic.gpu import dialect
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from glmjax.kernels.launches import CALL, MODULE, _operations, _unescape

THREADS = 384  # of a block
POINTER = 0  # where every array of the kernel starts


@contextlib.contextmanager
def instructions(hlo: str, asm: str) -> Iterator[list[Any]]:
    """Inline instructions that contain some text, of a program's first Mosaic kernel; they live within the context."""
    call = CALL.search(hlo)
    assert call is not None and call[1].startswith("mosaic")
    config = MODULE.search(hlo, call.end())
    assert config is not None
    with make_ir_context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(_unescape(config[1]))
        inline = [one for one in _operations(module.operation) if one.name.endswith("llvm.inline_asm")]
        yield [one for one in inline if asm in ir.StringAttr(one.attributes["asm_string"]).value]


class Values:
    """Works out operands.

    Args:
      thread: number in the block.
      loaded: for a scalar load, given the type of the array it is from: the value.
    """

    def __init__(self, thread: int, loaded: Callable[[str], int]):
        self.thread, self.loaded = thread, loaded

    def of(self, value: Any) -> int:
        """The value, wrapped to its type."""
        bits = re.fullmatch(r"i(\d+)", str(value.type))
        width = int(bits[1]) if bits else 64  # an index or a pointer
        owner = value.owner
        if isinstance(owner, ir.Block):  # carried by a loop: what the iteration before hands on
            *_, handed_on = owner
            return self.of(handed_on.operands[ir.BlockArgument(value).arg_number - 1])
        number = self._of(owner, value) % (1 << width)
        return number - (1 << width) if number >= 1 << (width - 1) else number

    def _of(self, operation: Any, value: Any) -> int:
        name = operation.name.removeprefix("stable_mosaic_gpu.")
        attributes, operands = operation.attributes, list(operation.operands)
        match name:
            case "arith.constant":
                return ir.IntegerAttr(attributes["value"]).value
            case "gpu.thread_id":
                return self.thread if "dim<x>" in str(attributes["dimension"]) else 0
            case "gpu.block_dim":
                return THREADS if "dim<x>" in str(attributes["dimension"]) else 1
            case "memref.load":
                return self.loaded(str(operands[0].type))
            case "memref.subview":  # in elements, from the array's start
                return self._subview(operation)
            case "llvm.extractvalue":
                source = operands[0].owner.operands[0]  # through a cast of the array to its descriptor
                field = int(str(attributes["position"]).split(":")[1].strip(" >"))
                return POINTER if field == 1 or source.owner.name.endswith("cast") else self.of(source)
            case "llvm.getelementptr":
                assert str(attributes["elem_type"]) == "i8"
                return self.of(operands[0]) + self.of(operands[1])
        numbers = [self.of(operand) for operand in operands]
        match name.split(".")[-1]:
            case "addi" | "add":
                return numbers[0] + numbers[1]
            case "muli" | "mul":
                return numbers[0] * numbers[1]
            case "maxsi":
                return max(numbers)
            case "divui" | "remui" | "divsi" | "remsi":
                assert numbers[0] >= 0 < numbers[1]
                return numbers[0] // numbers[1] if name.split(".")[-1].startswith("div") else numbers[0] % numbers[1]
            case "extui":
                return numbers[0] % (1 << ir.IntegerType(operands[0].type).width)
            case "index_cast" | "ptrtoint" | "inttoptr":
                return numbers[0]
        raise NotImplementedError(f"{name}: {value}")

    def _subview(self, operation: Any) -> int:
        source, *dynamic = operation.operands
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        dynamic_mark = ir.ShapedType.get_dynamic_stride_or_offset()
        offset, rest = 0, iter(dynamic)
        static = [int(x) for x in re.findall(r"-?\d+", str(operation.attributes["static_offsets"]).split(":")[1])]
        for start, stride in zip(static, strides, strict=True):
            offset += (self.of(next(rest)) if start == dynamic_mark else start) * stride
        return offset
