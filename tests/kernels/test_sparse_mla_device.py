"""Sparse MLA's Hopper kernel where the simulator runs another form: scattered copies, merging in a cluster, sums.

The compiled program's code is followed, thread by thread: what is copied where, and in which order a thread does what
others rely on. No value of a row is worked out.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import pytest
from device_addresses import PEER, Values, asm_of, compiled_kernel, factors, follow, name_of, shared_array
from h200_code import compile_program, needs_plugin

from glmjax.kernels.scattered_rows import UNIT, WARPGROUP
from glmjax.kernels.sparse_mla_hopper import cases, default_config
from glmjax.kernels.sparse_mla_kernel import COLUMNS, SHARES
from glmjax.kernels.sparse_mla_kernel import SLOTS as KEPT
from glmjax.kernels.sparse_mla_shapes import HEADS, LATENT, ROPE, TILE

QUERIES, LAYERS, SLOTS = 8, 2, 1 << 28  # every layer of a pool is 2^32 bytes or more
SAMPLE = (0, 37, 77, WARPGROUP - 1)  # threads of a warpgroup
PIECES = HEADS // 8 * COLUMNS // 64  # of 8 heads x 64 columns, of a warpgroup's share of the output
HEADS_SHAPE = f"3x{HEADS}xf32"  # factor of the sums, factor of the output, log-sum-exp


class Kernel(NamedTuple):
    launch: Any
    quantized: bool
    blocks: int  # of a cluster
    stages: int

    @property
    def steps(self) -> int:
        """Copies of a tile."""
        return 2 if self.quantized else 1

    def values(self, warpgroup, thread, *, peer=0, tiles=0):
        """Of a thread in a cluster whose blocks have so many tiles each, and every third row missing."""
        of_arrays = {"memref<1xi32>": LAYERS - 1, f"memref<{QUERIES}xi32>": tiles * self.blocks}
        return Values(
            WARPGROUP * warpgroup + thread, of_arrays.__getitem__, shared=slot_of, block=peer, blocks=self.blocks
        )


def slot_of(entry):
    """Of an entry of the tiles of slots that a block keeps: the last ones of a pool."""
    return -1 if entry % 3 == 1 else SLOTS - 1 - entry


@pytest.fixture(scope="module", params=[True, False], ids=["fp8", "bf16"])
def kernel(request):
    """As 8 queries of 64 heads have it at decode, over larger pools."""
    quantized = request.param
    (case,) = (x for x in cases() if x.shape == f"decode T={QUERIES} H={HEADS} K=2048 {'fp8' if quantized else 'bf16'}")
    queries, pools, rest = case.arguments[:2], case.arguments[2:-2], case.arguments[-2:]
    pools = tuple(jax.ShapeDtypeStruct((LAYERS, SLOTS, pool.shape[-1]), pool.dtype) for pool in pools)
    program = compile_program(dataclasses.replace(case, arguments=(*queries, *pools, *rest)))
    config = default_config(QUERIES, HEADS, 2048, quantized)
    with compiled_kernel(program.hlo) as launch:
        yield Kernel(launch, quantized, config.splits, config.stages)


FP8 = pytest.mark.parametrize("kernel", [True], ids=["fp8"], indirect=True)


# Copies of scattered rows, by warpgroup 2.


class Copy(NamedTuple):
    source: int
    target: int
    bytes: int
    array: str
    start: int  # of the array


@functools.cache
def copies_of(kernel, thread):
    """Of each step, as many as make every buffer come round."""
    values = kernel.values(SHARES, thread, tiles=-(-(kernel.stages + 1) // kernel.steps))
    steps = [[]]
    for operation in follow(kernel.launch, values):
        if "cp.async.cg.shared.global" in asm_of(operation):
            array, start = shared_array(operation.operands[0])
            numbers = [values.of(x) for x in list(operation.operands)]
            target, source, read = numbers
            steps[-1].append(Copy(source, target, read, array, values.of(start)))
        elif name_of(operation) == "nvvm.cp.async.commit.group":
            steps.append([])
    assert steps.pop() == [] and len(steps) > kernel.stages
    return steps


def wanted_copies(kernel, thread):
    """Of each step: (entry of the kept slots, bytes of a pool's row, byte in it, array, byte in the array)."""
    rows, stages = TILE // kernel.steps, kernel.stages
    if kernel.quantized:
        raw = [(LATENT, "i8", LATENT), (LATENT // 128, "f32", 16), (ROPE, "bf16", 128)]
        parts = [(width, 0, width, f"{stages}x{rows}x{values}x{kind}", 0, 1) for values, kind, width in raw]
    else:
        tiled = f"{TILE // 8}x{{}}x8x64xbf16"
        key = f"{stages}x{SHARES}x{tiled.format(COLUMNS // 64)}"
        parts = [(2 * LATENT, 2 * COLUMNS * i, 2 * COLUMNS, key, i, SHARES) for i in range(SHARES)]
        parts.append((2 * ROPE, 0, 2 * ROPE, f"{stages}x{tiled.format(1)}", 0, 1))
    for step in range(len(copies_of(kernel, thread))):
        found = []
        for stride, begin, width, array, share, shares in parts:
            buffer = (step % stages * shares + share) * rows * width
            for unit in range(thread, rows * width // UNIT, WARPGROUP):
                row, byte = divmod(unit * UNIT, width)
                entry = step // kernel.steps % KEPT * TILE + step % kernel.steps * rows + row
                within = buffer + (row * width + byte if kernel.quantized else in_tiles(row, byte, width))
                found.append((entry, stride, begin + byte, array, within))
        yield found


def in_tiles(row, byte, width):
    """Of a matrix in tiles of 8 rows x 128 bytes, without a swizzle."""
    return (row // 8 * (width // 128) + byte // 128) * 1024 + row % 8 * 128 + byte % 128


def swizzle(address):
    """Where wgmma reads what belongs at an address: bits 4 to 6 change with bits 7 to 9 (PTX, 128-byte swizzle)."""
    return address ^ (address >> 7 & 7) << 4


def copies_and_wanted(kernel):
    for thread in SAMPLE:
        for found, wanted in zip(copies_of(kernel, thread), wanted_copies(kernel, thread), strict=True):
            yield from zip(found, wanted, strict=True)


@needs_plugin
def test_slots_beyond_2_to_the_31_bytes(kernel):
    for copy, (entry, stride, byte, *_) in copies_and_wanted(kernel):
        slot = max(slot_of(entry), 0)  # an address in the pool too where nothing is read
        assert copy.source == ((LAYERS - 1) * SLOTS + slot) * stride + byte


@needs_plugin
def test_nothing_is_read_of_a_missing_row(kernel):
    """Its 16 bytes become zeros, whatever stands in the pool."""
    read = {(slot_of(entry) >= 0, copy.bytes) for copy, (entry, *_) in copies_and_wanted(kernel)}
    assert read == {(True, UNIT), (False, 0)}


@needs_plugin
def test_rows_land_where_they_are_read(kernel):
    for copy, (*_, array, within) in copies_and_wanted(kernel):
        assert copy.array == array
        assert copy.target == (copy.start + within if kernel.quantized else swizzle(copy.start + within))


@needs_plugin
@pytest.mark.parametrize("tiles", [0, 1, 5])
def test_rows_have_landed_when_others_are_told(kernel, tiles):
    """At each arrival every copy of its step is waited for, and seen by the tensor cores; one step is under way."""
    values = kernel.values(SHARES, 0, tiles=tiles)
    begun = landed = told = 0
    visible = met = False
    for operation in follow(kernel.launch, values):
        match name_of(operation), asm_of(operation).split(" ")[0]:
            case "nvvm.cp.async.commit.group", _:
                begun += 1
            case "nvvm.cp.async.wait.group", _:
                landed, visible, met = begun - operation.attributes["n"].value, False, False
            case "nvvm.fence.proxy", _:
                visible = True
            case _, "bar.sync":  # each thread waits for its own copies, and one arrives for all
                met = visible
            case _, "mbarrier.arrive.release.cta.shared::cta.b64":
                told += 1
                assert landed == told and met
                assert begun == min(told + 1, tiles * kernel.steps)
                _, start = shared_array(operation.operands[0])
                assert values.of(operation.operands[0]) - values.of(start) == 8 * ((told - 1) % kernel.stages)
    assert told == begun == tiles * kernel.steps


# Merging in a cluster.

USES = {  # of peers' parts and of meetings, and the number of the pointer among an instruction's operands
    "nvvm.cluster.arrive": ("arrive", None),
    "nvvm.cluster.wait": ("wait", None),
    "nvvm.stmatrix": ("write", None),
    "llvm.store": ("write", (1, "!llvm.ptr<3>")),  # shared memory of the block
    "llvm.load": ("read", (0, "!llvm.ptr<7>")),  # of any in the cluster
}


def at_meetings(operation):
    """What a cluster's blocks have to do with each other: meetings, and use of shared memory that peers read."""
    use, pointer = USES.get(name_of(operation), (None, None))
    return use if pointer is None or str(operation.operands[pointer[0]].type) == pointer[1] else None


@needs_plugin
@pytest.mark.parametrize("tiles", [0, 1])
def test_blocks_meet_before_they_read_each_other_and_before_they_leave(kernel, tiles):
    for warpgroup, peer in itertools.product(range(SHARES + 1), (0, kernel.blocks - 1)):
        values = kernel.values(warpgroup, 0, peer=peer, tiles=tiles)
        found = filter(None, map(at_meetings, follow(kernel.launch, values)))
        order = [what for what, _ in itertools.groupby(found)]
        if warpgroup == SHARES:  # a meeting is for every thread
            assert order == ["arrive", "wait", "arrive", "wait"]
        else:
            assert order == ["write", "arrive", "wait", "read", "arrive", "wait"]


def reads_of_peers(kernel, share, thread, peer):
    """(Address in shared memory, block that it is read from) of what is loaded, by type."""
    found = {}
    values = kernel.values(share, thread, peer=peer)
    for operation in follow(kernel.launch, values):
        if at_meetings(operation) == "read":
            block, address = divmod(values.of(operation.operands[0]), PEER)
            found.setdefault(str(operation.results[0].type), []).append((address, block))
    return found


def array_starts(kernel):
    """Of the arrays in shared memory, by shape and type."""
    values = kernel.values(0, 0)
    views = (one for one in follow(kernel.launch, values) if name_of(one) == "memref.view")
    return {shape: values.of(start) for shape, start in (shared_array(one.results[0]) for one in views)}


@needs_plugin
@FP8  # bf16 rows are merged by the same code
def test_every_piece_is_merged_once_from_all_blocks(kernel):
    """By what the first thread of each warpgroup reads of a piece."""
    starts = array_starts(kernel)
    parts, log_sums = starts[f"{SHARES}x{HEADS // 8}x{COLUMNS // 64}x8x64xbf16"], starts[HEADS_SHAPE] + 2 * 4 * HEADS
    for share, peer in itertools.product(range(SHARES), (0, 5, kernel.blocks - 1)):
        found = reads_of_peers(kernel, share, 0, peer)
        assert len(found) == 2
        for kind in found.values():
            for i in range(0, len(kind), kernel.blocks):
                of_piece = kind[i : i + kernel.blocks]
                assert sorted(block for _, block in of_piece) == list(range(kernel.blocks))
                assert len({address for address, _ in of_piece}) == 1
        addresses = [address for address, _ in found["vector<4xbf16>"][:: kernel.blocks]]
        own = range(peer, PIECES, kernel.blocks)  # in turn: all blocks together have each once
        assert addresses == [parts + 1024 * (share * PIECES + piece) for piece in own]
        heads = [(address - log_sums) // 4 for address, _ in found["vector<1xf32>"][:: kernel.blocks]]
        assert heads == [piece // (COLUMNS // 64) * 8 for piece in own]


@needs_plugin
@FP8  # bf16 rows are merged by the same code
def test_threads_read_their_heads_and_columns_of_a_part(kernel):
    starts = array_starts(kernel)
    parts, log_sums = starts[f"{SHARES}x{HEADS // 8}x{COLUMNS // 64}x8x64xbf16"], starts[HEADS_SHAPE] + 2 * 4 * HEADS
    for thread in SAMPLE:
        found = reads_of_peers(kernel, 0, thread, 0)
        head = thread // 16  # a half-warp has one, each of its threads four columns
        assert found["vector<4xbf16>"][0][0] == swizzle(parts + 128 * head + 8 * (thread % 16))
        assert found["vector<1xf32>"][0][0] == log_sums + 4 * head


# Sums of the online softmax.


@needs_plugin
def test_a_tile_is_added_to_sums_that_its_softmax_has_scaled(kernel):
    """Each accumulator of the output starts as what was carried, times the factor of its head, and is carried on."""
    loops = [one for one in walk(kernel.launch) if name_of(one) == "scf.for" and len(one.operands) > 3]
    assert len(loops) == SHARES
    factor_start = array_starts(kernel)[HEADS_SHAPE]
    for share, loop in enumerate(loops):
        (body,) = loop.regions[0].blocks
        products = [one.operation for one in body if f".m64n{COLUMNS}k16." in asm_of(one.operation)]
        registers = HEADS * COLUMNS // WARPGROUP
        *_, handed_on = body
        carried = {}  # accumulator -> the loop's argument, and which element of it
        for number, value in enumerate(handed_on.operands):
            if "vector<2x" in str(value.type):
                for element, (of_product,) in enumerate(factors(value)):
                    assert of_product[:2] == ("made", products[-1])
                    carried[of_product[2]] = ("carried", number + 1, element)
        assert sorted(carried) == list(range(registers))
        for before, product in itertools.pairwise([None, *products]):
            for i, value in enumerate(list(product.operands)[:registers]):
                (start,) = factors(value)
                if before is not None:
                    assert start == {("made", before, i)}
                    continue
                (loaded,) = start - {carried[i]}
                assert len(start) == 2 and loaded[0] == "loaded"
                for thread in SAMPLE:
                    head = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)  # PTX: accumulators of wgmma
                    assert kernel.values(share, thread).of(loaded[1]) == factor_start + 4 * head


def walk(operation):
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from walk(inner.operation)
