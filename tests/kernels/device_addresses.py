"""What a thread of a compiled Mosaic kernel does: the way it takes, and the numbers it works out on it.

The operations behind an operand are worked out for given values of what the kernel reads, each wrapped to its type: a
byte offset of 32 bits comes out wrong beyond 2^31. Nothing is loaded, stored or multiplied.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from jax.experimental.mosaic.gpu import dialect
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from glmjax.kernels.launches import CALL, MODULE, _operations, _unescape

PREFIX = "stable_mosaic_gpu"  # of the operations' names while they travel
THREADS = 384  # of a block
POINTER = 0  # where every array in device memory starts, and the shared memory of a block
PEER = 1 << 32  # bytes from the shared memory of a cluster's block to that of the next, as ``mapa`` gives its address
ARGUMENT = "mosaic_gpu.original_kernel_arg"  # marks arrays that the kernel is called with
START, OFFSET = 1, 2  # fields of an array's descriptor: its address and, in elements, where a part of it begins
COMPARISONS = (int.__eq__, int.__ne__, int.__lt__, int.__le__, int.__gt__, int.__ge__)  # arith.cmpi's predicates
SIGNED = len(COMPARISONS)  # after them come <, <=, > and >= of numbers without a sign


@contextlib.contextmanager
def compiled_kernel(hlo: str) -> Iterator[Any]:
    """The launch of a program's first Mosaic kernel, with its code; it lives within the context."""
    call = CALL.search(hlo)
    assert call is not None and call[1].startswith("mosaic")
    config = MODULE.search(hlo, call.end())
    assert config is not None
    # Python classes of the operations, which there are none of, are else looked for on the disk at each use of one.
    classes = mock.patch.dict(sys.modules, {f"jaxlib.mlir.dialects.{PREFIX}": ModuleType(PREFIX)})
    with make_ir_context() as context, classes:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(_unescape(config[1]))
        (launch,) = (one for one in _operations(module.operation) if name_of(one) == "gpu.launch")
        yield launch


@contextlib.contextmanager
def instructions(hlo: str, asm: str) -> Iterator[list[Any]]:
    """Inline instructions that contain some text, of a program's first Mosaic kernel; they live within the context."""
    with compiled_kernel(hlo) as launch:
        yield [one for one in _operations(launch) if asm in asm_of(one)]


def name_of(operation: Any) -> str:
    return operation.name.removeprefix(f"{PREFIX}.")


def asm_of(operation: Any) -> str:
    """Text of an inline instruction; of any other operation none."""
    return str(operation.attributes["asm_string"].value) if name_of(operation) == "llvm.inline_asm" else ""


class Values:
    """Works out operands.

    Args:
      thread: number in the block.
      loaded: for a scalar load, given the type of the array it is from: the value.
      shared: for one from shared memory instead, given the number of the element in the array.
      block: number in the grid.
      blocks: of a cluster.
    """

    def __init__(
        self,
        thread: int,
        loaded: Callable[[str], int],
        *,
        shared: Callable[[int], int] | None = None,
        block: int = 0,
        blocks: int = 1,
    ):
        self.thread, self.loaded, self.shared, self.block, self.blocks = thread, loaded, shared, block, blocks
        self._turns: dict[Any, int] = {}  # of the loops that the thread is in
        self._known: dict[Any, int] = {}  # behind one operand: loops go on, and kernels come and go

    def begin_turn(self, argument: Any, index: int) -> None:
        self._turns[argument] = index

    def of(self, value: Any) -> int:
        """The value, wrapped to its type."""
        self._known.clear()
        return self._value(value)

    def _value(self, value: Any) -> int:
        if value not in self._known:
            width = _width(str(value.type))
            number = self._number(value) % (1 << width)
            self._known[value] = number - (1 << width) if number >= 1 << (width - 1) else number
        return self._known[value]

    def _number(self, value: Any) -> int:
        owner = value.owner
        if not isinstance(owner, ir.Block):
            return self._of(owner, value)
        if (argument := ir.BlockArgument(value)) in self._turns:
            return self._turns[argument]
        *_, handed_on = owner  # carried by a loop: what the iteration before hands on
        return self._value(handed_on.operands[argument.arg_number - 1])

    def _of(self, operation: Any, value: Any) -> int:
        name = name_of(operation)
        attributes, operands = operation.attributes, list(operation.operands)
        match name:
            case "arith.constant":
                return ir.IntegerAttr(attributes["value"]).value
            case "gpu.thread_id":
                return self.thread if "dim<x>" in str(attributes["dimension"]) else 0
            case "gpu.block_dim":
                return THREADS if "dim<x>" in str(attributes["dimension"]) else 1
            case "gpu.cluster_block_id":
                return self.block % self.blocks if "dim<x>" in str(attributes["dimension"]) else 0
            case "gpu.block_id":
                return self.block if "dim<x>" in str(attributes["dimension"]) else 0
            case "gpu.cluster_dim_blocks":
                return self.blocks if "dim<x>" in str(attributes["dimension"]) else 1
            case "memref.load":
                return self._load(*operands)
            case "memref.subview":
                return self._descriptor(value, OFFSET)
            case "llvm.extractvalue":
                return self._descriptor(operands[0], _position(operation))
            case "llvm.getelementptr":
                (constant,) = _numbers(attributes["rawConstantIndices"])
                index = self._value(operands[1]) if len(operands) > 1 else constant
                return self._value(operands[0]) + index * _bytes(attributes["elem_type"])
            case "nvvm.shfl.sync":  # of a number that is the same in all of a warp
                assert "idx" in str(attributes["kind"])
                return self._value(operands[1])
            case "llvm.inline_asm" if "mapa.shared::cluster" in asm_of(operation):
                return self._value(operands[0]) + PEER * self._value(operands[1])
            case "llvm.inline_asm" if asm_of(operation) == "mov.u32 $0, 0;":
                return 0
        numbers = [self._value(operand) for operand in operands]
        match name.split(".")[-1]:
            case "addi" | "add":
                return numbers[0] + numbers[1]
            case "subi":
                return numbers[0] - numbers[1]
            case "muli" | "mul":
                return numbers[0] * numbers[1]
            case "maxsi":
                return max(numbers)
            case "divui" | "remui" | "divsi" | "remsi":
                assert numbers[0] >= 0 < numbers[1]
                return numbers[0] // numbers[1] if name.split(".")[-1].startswith("div") else numbers[0] % numbers[1]
            case "shrui":
                assert numbers[0] >= 0
                return numbers[0] >> numbers[1]
            case "andi":
                return numbers[0] & numbers[1]
            case "xori":
                return numbers[0] ^ numbers[1]
            case "cmpi":
                predicate = ir.IntegerAttr(attributes["predicate"]).value
                assert predicate < SIGNED or min(numbers) >= 0
                return COMPARISONS[predicate if predicate < SIGNED else predicate - SIGNED + 2](*numbers)
            case "select":
                return numbers[1] if numbers[0] else numbers[2]
            case "extui":
                return numbers[0] % (1 << ir.IntegerType(operands[0].type).width)
            case "index_cast" | "index_castui" | "ptrtoint" | "inttoptr":
                return numbers[0]
        raise NotImplementedError(f"{name}: {value}")

    def _load(self, array: Any, *indices: Any) -> int:
        if self.shared is None or "workgroup" not in str(array.type):
            return self.loaded(str(_whole(array).type))
        strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
        within = sum(self._value(index) * stride for index, stride in zip(indices, strides, strict=True))
        return self.shared(self._descriptor(array, OFFSET) + within)

    def _descriptor(self, array: Any, field: int) -> int:
        """Address of an array or where in it a part begins, behind casts between an array and its descriptor."""
        operation = array.owner
        match "" if isinstance(operation, ir.Block) else name_of(operation):
            case "llvm.insertvalue" if _position(operation) == field:
                return self._value(operation.operands[1])
            case "llvm.insertvalue" | "memref.expand_shape" | "memref.transpose":
                return self._descriptor(operation.operands[0], field)
            case "builtin.unrealized_conversion_cast" if ARGUMENT not in operation.attributes:
                return self._descriptor(operation.operands[0], field)
            case "memref.subview":
                begin = self._descriptor(operation.operands[0], field)
                return begin + self._subview(operation) if field == OFFSET else begin
            case "memref.view" if field == START:  # of the block's shared memory
                return POINTER + self._value(operation.operands[1])
        return POINTER if field == START else 0

    def _subview(self, operation: Any) -> int:
        source, *dynamic = operation.operands
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        dynamic_mark = ir.ShapedType.get_dynamic_stride_or_offset()
        offset, rest = 0, iter(dynamic)
        for start, stride in zip(_numbers(operation.attributes["static_offsets"]), strides, strict=True):
            offset += (self._value(next(rest)) if start == dynamic_mark else start) * stride
        return offset


def follow(launch: Any, values: Values) -> Iterator[Any]:
    """Operations that a thread comes by, in order; while it is at one, ``values`` works out what it has there."""
    yield from _follow(launch.regions[0], values)


def _follow(region: Any, values: Values) -> Iterator[Any]:
    for block in region:
        for operation in (one.operation for one in block):
            match name_of(operation):
                case "scf.for":
                    body = operation.regions[0]
                    for index in range(*(values.of(x) for x in list(operation.operands)[:3])):
                        values.begin_turn(body.blocks[0].arguments[0], index)
                        yield from _follow(body, values)
                case "scf.if":
                    yield from _follow(operation.regions[0 if values.of(operation.operands[0]) else 1], values)
                case "scf.index_switch":
                    taken = values.of(operation.operands[0])
                    default, *regions = operation.regions
                    cases = _numbers(operation.attributes["cases"])
                    yield from _follow(dict(zip(cases, regions, strict=True)).get(taken, default), values)
                case name:
                    if len(operation.regions):
                        raise NotImplementedError(name)
                    yield operation


def shared_array(value: Any) -> tuple[str, Any]:
    """Shape and element type, such as 3x32x512xi8, of the array in shared memory that an address is in, and its start.

    The start is a value that ``Values`` works out.
    """
    while name_of(operation := value.owner) != "memref.view":
        value = operation.operands[0]
    shape = re.fullmatch(r"memref<([^,]*), #gpu.address_space<workgroup>>", str(value.type))
    assert shape is not None
    return shape[1], operation.operands[1]


def factors(value: Any) -> list[frozenset[Any]]:
    """What the elements of a float, vector or struct are products of, followed through moves between registers.

    A factor is a loop's carried argument or an instruction's result, with the number of the element, or the address
    that a float was loaded from.
    """
    owner = value.owner
    if isinstance(owner, ir.Block):
        count = ir.VectorType(value.type).shape[0]
        return [frozenset([("carried", ir.BlockArgument(value).arg_number, i)]) for i in range(count)]
    operands = list(owner.operands)
    match name_of(owner).split(".")[-1]:
        case "mulf":
            return [a | b for a, b in zip(*map(factors, operands), strict=True)]
        case "bitcast":
            return factors(operands[0])
        case "insertelement":  # into a vector of one
            return factors(operands[1])
        case "extract":
            return [factors(operands[0])[_numbers(owner.attributes["static_position"])[0]]]
        case "extract_strided_slice":
            first, size = (int(re.findall(r"\d+", str(owner.attributes[key]))[0]) for key in ("offsets", "sizes"))
            return factors(operands[0])[first : first + size]
        case "shuffle":
            both = factors(operands[0]) + factors(operands[1])
            return [both[i] for i in _numbers(owner.attributes["mask"])]
        case "load":
            return [frozenset([("loaded", operands[0])])]
        case "extractvalue":
            made, at = operands[0].owner, _position(owner)
            if not asm_of(made):  # only keeps the compiler from moving what passes through
                return factors(made.operands[at])
            return [frozenset([("made", made, at)])]
    raise NotImplementedError(str(owner))


def _whole(array: Any) -> Any:
    """The array that a part is of."""
    while not isinstance(array.owner, ir.Block) and name_of(array.owner) == "memref.subview":
        array = array.owner.operands[0]
    return array


def _position(operation: Any) -> int:
    return _numbers(operation.attributes["position"])[0]


def _numbers(attribute: Any) -> list[int]:
    """Of an array such as ``array<i64: 0, 8>``."""
    return [int(x) for x in re.findall(r"-?\d+", str(attribute).split(":")[-1])]


@functools.cache
def _width(type_: str) -> int:
    """Bits of i32 and the like, an index or a pointer."""
    bits = re.fullmatch(r"i(\d+)", type_)
    return int(bits[1]) if bits else 64


def _bytes(attribute: Any) -> int:
    """Of a type such as i8 or vector<4xbf16>."""
    count, bits = re.fullmatch(r"(?:vector<(\d+)x)?b?[if](\d+)>?", str(attribute)).groups()  # type: ignore[union-attr]
    return int(count or 1) * int(bits) // 8
