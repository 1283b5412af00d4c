"""Reads compiled HLO text of XLA's CPU and GPU backends: what a program sends, what runs meanwhile, what it holds.

    module = hlo.parse(jax.jit(f).lower(x).compile().as_text())
    sent = sum(c.received_bytes * c.runs for c in hlo.collectives(module))

A compiled module is one device's program, so shapes and bytes are per device. It is in scheduled order: the lines
between a collective's -start and its -done are what runs while it is under way.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"}
)
COMPUTE = frozenset({"dot", "convolution", "fusion", "custom-call", "sort", "while", "conditional", "call"})
CALLERS = frozenset({"while", "conditional", "call"})  # what they call runs line by line; a fusion's body does not
NO_BUFFER = CALLERS | {"parameter", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"  (?:ROOT )?%?([\w.-]+) = (.+)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(?:%([\w.-]+)|\{([^}]*)\})"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """An array: XLA's name of the dtype, its dimensions, and whether it lies in host memory."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn, s4
        size = int(bits[0]) if bits else 8 * (self.dtype == "pred")  # a token has none
        return -(-size * math.prod(self.dims) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      computation: name of the computation it stands in.
      shapes: the arrays of its result, a tuple's in order.
      operands: names of instructions of the same computation.
      attributes: what the line says after its operands.
    """

    computation: str
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def result_bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def is_compute(self) -> bool:
        """Keeps a device busy; what only counts a loop does not."""
        return self.opcode in COMPUTE and any(shape.dims for shape in self.shapes)

    def called(self) -> Iterator[tuple[str, str]]:
        """Pairs of a role, such as ``body``, and the computation called in it."""
        for role, one, several in _CALLED.findall(self.attributes):
            for name in [one] if one else _NAME.findall(several):
                yield role, name


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, each with its instructions in order."""

    name: str
    is_scheduled: bool
    num_devices: int
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]

    def opcodes(self, instruction: Instruction) -> frozenset[str]:
        """Opcode of an instruction and of all that it calls: whether a fusion or a loop holds a ``dot``, say."""
        called = (inner for _, name in instruction.called() for inner in self.computations[name])
        return frozenset({instruction.opcode}).union(*(self.opcodes(inner) for inner in called))

    @cached_property
    def _callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        callers: dict[str, list[tuple[str, Instruction]]] = {name: [] for name in self.computations}
        for instructions in self.computations.values():
            for instruction in instructions:
                for role, called in instruction.called():
                    callers[called].append((role, instruction))
        return callers

    def async_caller(self, computation: str) -> Instruction | None:
        """The line that runs a computation beside what follows, if there is one."""
        callers = (instruction for _, instruction in self._callers[computation])
        return next((caller for caller in callers if caller.opcode.endswith("-start")), None)

    def runs(self, computation: str) -> tuple[int | None, bool]:
        """How often a computation runs, and whether a conditional may skip it (it is then counted as always taken).

        The number is None if it hangs on a loop whose trip count XLA does not know.
        """
        if computation == self.entry:
            return 1, False
        total: int | None = 0
        conditional = False
        for role, instruction in self._callers[computation]:
            times, skipped = self.runs(instruction.computation)
            conditional |= skipped or instruction.opcode == "conditional"
            if instruction.opcode == "while":
                trips = _TRIP_COUNT.search(instruction.attributes)
                # The condition is asked once more than the body runs.
                factor = int(trips[1]) + (role == "condition") if trips else None
            else:
                factor = 1
            total = None if total is None or times is None or factor is None else total + times * factor
        return total, conditional


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      instruction: its line; the -start of a pair.
      start: the line that lets the program go on meanwhile: its own -start, or an async-start around several
        collectives; None if it is synchronous.
      kind: its opcode without -start or -done.
      operand_bytes: what a device puts in; of a ragged-all-to-all the whole array, whatever part of it is sent.
      result_bytes: what a device holds afterwards.
      group_size: devices that take part together; 2 for a collective-permute, a device and its source.
      runs: times it runs in the program; None if a loop's trip count is unknown.
      conditional: stands in a branch; ``runs`` then supposes that the branch is always taken.
    """

    instruction: Instruction
    start: Instruction | None
    kind: str
    operand_bytes: int
    result_bytes: int
    group_size: int
    runs: int | None
    conditional: bool

    @property
    def received_bytes(self) -> int:
        """Bytes that reach a device from others each time it runs.

        An all-reduce counts as a reduce-scatter and an all-gather around a ring.  For a ragged-all-to-all, whose
        traffic depends on the data, it is the most that the result has room for.
        """
        others, n = self.group_size - 1, self.group_size
        match self.kind:
            case "all-gather":
                return self.result_bytes * others // n
            case "all-reduce":
                return 2 * self.operand_bytes * others // n
            case "reduce-scatter" | "all-to-all":
                return self.operand_bytes * others // n
            case _:
                return self.result_bytes


@dataclass(frozen=True)
class Buffer:
    """An array that an instruction writes."""

    shape: Shape
    instruction: Instruction


def parse(text: str) -> Module:
    """Reads ``Compiled.as_text()``.

    Raises:
      ValueError: it is not the text of an HLO module.
    """
    header = re.match(r"HloModule ([\w.<>-]+)(.*)", text)
    if header is None:
        raise ValueError(f"not the text of an HLO module: {text[:80]!r}")
    entry, current = "", ""
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines()[1:]:
        if found := _INSTRUCTION.match(line):
            computations[current].append(_instruction(current, *found.groups()))
        elif found := _COMPUTATION.match(line):
            current = found[2]
            computations[current] = []
            entry = current if found[1] else entry
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header[2]))
    scheduled = "is_scheduled=true" in header[2]
    return Module(header[1], scheduled, devices, entry, {name: tuple(found) for name, found in computations.items()})


def collectives(module: Module) -> tuple[Collective, ...]:
    """Every collective, an asynchronous one once, in the order of the text."""
    found = []
    for computation, instructions in module.computations.items():
        by_name = {instruction.name: instruction for instruction in instructions}
        runs, conditional = module.runs(computation)
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            is_start = kind != instruction.opcode
            # A ragged-all-to-all's other operands are the array to write into and the sizes.
            operands = instruction.operands[: 1 if kind == "ragged-all-to-all" else None]
            collective = Collective(
                instruction=instruction,
                start=instruction if is_start else module.async_caller(computation),
                kind=kind,
                operand_bytes=sum(by_name[name].result_bytes for name in operands),
                result_bytes=(_done(instruction, module) if is_start else instruction).result_bytes,
                group_size=_group_size(instruction.attributes, module.num_devices),
                runs=runs,
                conditional=conditional,
            )
            found.append(collective)
    return tuple(found)


def overlapped(module: Module, collective: Collective) -> tuple[Instruction, ...]:
    """What is issued between a collective's -start and its -done; nothing for one that is not asynchronous.

    In a loop's body that is the work of the same iteration.  ``is_compute`` picks the lines that keep a device busy.

    Raises:
      ValueError: the module is not scheduled, so its order says nothing.
    """
    return meanwhile(module, collective.start)


def meanwhile(module: Module, start: Instruction | None) -> tuple[Instruction, ...]:
    """What is issued between any -start and its -done; see ``overlapped``."""
    if not module.is_scheduled:
        raise ValueError(f"{module.name} is not scheduled; compile it to see what overlaps")
    if start is None:
        return ()
    instructions = module.computations[start.computation]
    return instructions[instructions.index(start) + 1 : instructions.index(_done(start, module))]


def largest_temporaries(module: Module, limit_bytes: int) -> tuple[Buffer, ...]:
    """Arrays in device memory of more than ``limit_bytes`` that instructions write, largest first.

    Arguments and what only lives inside a fusion are not among them; results, and buffers updated in place, are.
    """
    found, todo, seen = [], [module.entry], {module.entry}
    while todo:
        for instruction in module.computations[todo.pop()]:
            if instruction.opcode in CALLERS:
                called = {name for _, name in instruction.called()} - seen
                seen |= called
                todo += sorted(called)
            if instruction.opcode not in NO_BUFFER and not instruction.opcode.endswith("-start"):
                found += [Buffer(shape, instruction) for shape in instruction.shapes if not shape.on_host]
    large = [buffer for buffer in found if buffer.shape.bytes > limit_bytes]
    return tuple(sorted(large, key=lambda buffer: -buffer.shape.bytes))


def _instruction(computation: str, name: str, text: str) -> Instruction:
    type_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode_end = text.index("(", type_end)
    operands_end = _closing(text, opcode_end)
    shapes = tuple(
        Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), "S(5)" in layout)
        for dtype, dims, layout in _ARRAY.findall(text[:type_end])
    )
    operands = tuple(_NAME.findall(text[opcode_end:operands_end]))
    return Instruction(
        computation, name, text[type_end:opcode_end].strip(), shapes, operands, text[operands_end:].lstrip(", ")
    )


def _closing(text: str, start: int) -> int:
    """Place after the bracket that closes the one at ``start``."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"unbalanced brackets in HLO: {text[:80]!r}")


def _done(start: Instruction, module: Module) -> Instruction:
    for instruction in module.computations[start.computation]:
        if instruction.opcode.endswith("-done") and start.name in instruction.operands:
            return instruction
    raise ValueError(f"{start.name} has no -done in {start.computation}")


def _group_size(attributes: str, num_devices: int) -> int:
    if "source_target_pairs=" in attributes:
        return 2
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):  # {{0,1},{2,3}}
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):  # [2,4]<=[4,2]T(1,0): two groups of four
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", attributes):  # mesh['x'=4,'y'=2] {'x'}
        sizes = dict(axis.rsplit("=", 1) for axis in found[1].split(","))
        axes = (axis.partition(":") for axis in found[2].split(","))
        # 'y':(2)2 is a part of an axis, of size 2.
        return math.prod(int(part.rpartition(")")[2] if part else sizes[whole]) for whole, _, part in axes)
    return num_devices
