"""Lists of candidates become the k best of each row, in Triton: the last step of the streaming top-k kernels.

    lists of parts  ->  count_candidates  ->  gather_candidates  ->  a row's list  ->  merge_piece  ->  the k best

What was published last serves again when the lists are merged: as pivots, of which each part counts how many of its
candidates reach them. The best pivot that k of the row reach is close below the k-th best score even where the parts
differ, as they do if late positions score highest; and with the counts every part knows where its candidates stand in
the row's list. Of that list, little more than k long, as many pieces are made as programs fill the machine. All of them
look for the threshold in the whole of it, which costs no traffic with memory: it is in the L2 cache, 264 times 16 kB.

Lists are read by asynchronous copies that run ahead, for what is read goes to another place. Only a list of more than k
is shortened in place first, and read plainly for that.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from glmjax.kernels.candidates_triton import LOWEST, MISSING, Parts, keep_best, next_power_of_two, ordered, score_of
from glmjax.kernels.triton_call import triton_call

MOST_PIVOTS = 64
MERGE_CAPACITY = 4096  # keys of a row's list that a program holds in registers
COUNT_BLOCK, GATHER_BLOCK, MERGE_BLOCK = 128, 512, 1024  # candidates of a step, at most
STAGES = 4  # copies of a list under way, and the one in use


@triton.jit
def pivots_of(published_ptr, parts, PIVOTS: tl.constexpr, STRIDE: tl.constexpr):
    """Ordered scores among which a row's threshold is looked for: what some parts published, and one below all."""
    part = tl.arange(0, PIVOTS) * STRIDE
    published = tl.load(published_ptr + part, mask=part < parts, other=0) ^ MISSING
    return tl.maximum(published, MISSING + 1)  # not equal to what stands for no key


@triton.jit
def load_ahead(list_ptr, i, end):
    """Candidates of a list and their keys, MISSING from ``end`` on; in a loop, copied 16 bytes at a time."""
    candidates = tl.load(list_ptr + i, mask=i < tl.cdiv(end, 16) * 16, other=0)
    return candidates, tl.where(i < end, ordered(score_of(candidates)), MISSING)


@triton.jit
def count_candidates(
    lists_ptr, counts_ptr, published_ptr, parts, reaching_ptr,
    K: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr, PIVOTS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Shortens a part's list to its K best and counts those that reach each pivot of the row. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = row * parts + part
    list_ptr = lists_ptr.to(tl.pointer_type(tl.int64)) + one * CAPACITY
    least = tl.full((), LOWEST, tl.float32)
    count, least = keep_best(list_ptr, tl.load(counts_ptr + one), least, K, CAPACITY, STEP)
    tl.store(counts_ptr + one, count)
    tl.debug_barrier()  # other threads have written the list
    pivots = pivots_of(published_ptr + row * parts, parts, PIVOTS, STRIDE)
    i = tl.arange(0, BLOCK)
    reaching = tl.zeros((PIVOTS, BLOCK), tl.int32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        _, keys = load_ahead(list_ptr, start + i, count)
        reaching += (keys[None, :] >= pivots[:, None]).to(tl.int32)
    tl.store(reaching_ptr + one * PIVOTS + tl.arange(0, PIVOTS), tl.sum(reaching, 1))


@triton.jit
def gather_candidates(
    lists_ptr, counts_ptr, published_ptr, reaching_ptr, parts, gathered_ptr, sizes_ptr, bounds_ptr,
    K: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, PIVOTS: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copies what reaches the best pivot that K of the row reach, the bound, to the row's list. Grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = row * parts + part
    pivots = pivots_of(published_ptr + row * parts, parts, PIVOTS, STRIDE)
    j, other = tl.arange(0, PIVOTS), tl.arange(0, 16)
    total, before = tl.zeros((PIVOTS,), tl.int32), tl.zeros((PIVOTS,), tl.int32)
    for start in tl.range(0, parts, 16, num_stages=STAGES):
        p = (start + other)[:, None]
        reaching = tl.load(reaching_ptr + (row * parts + p) * PIVOTS + j, mask=p < parts, other=0)
        total += tl.sum(reaching, 0)
        before += tl.sum(tl.where(p < part, reaching, 0), 0)
    bound = tl.max(tl.where(total >= K, pivots, MISSING + 1), 0)  # with fewer than K all are copied
    place = tl.max(tl.where(pivots == bound, before, 0), 0)
    tl.store(sizes_ptr + row, tl.max(tl.where(pivots == bound, total, 0), 0), mask=part == 0)
    tl.store(bounds_ptr + row, bound, mask=part == 0)
    list_ptr = lists_ptr.to(tl.pointer_type(tl.int64)) + one * CAPACITY
    gathered_ptr = gathered_ptr.to(tl.pointer_type(tl.int64)) + row * WIDTH
    count, i = tl.load(counts_ptr + one), tl.arange(0, BLOCK)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        candidates, keys = load_ahead(list_ptr, start + i, count)
        enters = (keys >= bound).to(tl.int32)
        tl.store(gathered_ptr + place + tl.cumsum(enters, 0) - 1, candidates, mask=enters > 0)
        place += tl.sum(enters, 0)


@triton.jit
def count_list(list_ptr, size, first, key, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of a list longer than registers hold: how many reach a key, and of them those before ``first``."""
    i = tl.arange(0, BLOCK)
    reaching, before = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        _, keys = load_ahead(list_ptr, start + i, size)
        reaching += (keys >= key).to(tl.int32)
        before += ((keys >= key) & (start + i < first)).to(tl.int32)
    return tl.sum(reaching, 0), tl.sum(before, 0)


@triton.jit
def count_keys(keys, key):
    return tl.sum(tl.sum((keys >= key).to(tl.int32), 1), 0)


@triton.jit
def merge_piece(
    list_ptr, sizes_ptr, bounds_ptr, pieces, scores_ptr, positions_ptr,
    K: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One piece's share of the K best of a row's list. Grid (rows, pieces).

    Every piece finds the row's threshold, and writes what it chooses of its own span of the list: where, it knows from
    how many it chooses of the spans before.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    list_ptr = list_ptr.to(tl.pointer_type(tl.int64)) + row * WIDTH
    scores_ptr += row * K
    positions_ptr += row * K
    size = tl.load(sizes_ptr + row)
    span = tl.cdiv(tl.cdiv(size, pieces), 16) * 16  # copies are of 16 bytes
    first = tl.minimum(piece * span, size)

    # The threshold: the K-th best key, or one that just K reach.
    least, room = tl.full((), MISSING + 1, tl.int32), tl.full((), 0, tl.int32)
    above_before, equal_before = first, tl.full((), 0, tl.int32)
    if size > K:
        few = size <= CAPACITY
        chunk = tl.arange(0, CAPACITY // BLOCK)[:, None]
        index = chunk * BLOCK + tl.arange(0, BLOCK)[None, :]
        keys = tl.full((CAPACITY // BLOCK, BLOCK), MISSING, tl.int32)
        for start in tl.range(0, tl.where(few, size, 0), BLOCK, num_stages=CAPACITY // BLOCK + 1):  # all at once
            _, found = load_ahead(list_ptr, start + tl.arange(0, BLOCK), size)
            keys = tl.where(chunk * BLOCK == start, found[None, :], keys)
        # Bisect: K or more reach `least`, fewer reach `beyond`.
        beyond = tl.full((), 0x7F800001, tl.int32)  # above infinity
        if few:
            beyond = tl.max(tl.max(keys, 1), 0) + 1
        if bounds_ptr is None:
            least = tl.min(tl.min(tl.where(keys == MISSING, beyond, keys), 1), 0)
        else:
            least = tl.load(bounds_ptr + row)
        count, middle = size, (least & beyond) + ((least ^ beyond) >> 1)  # their mean, without overflow
        if not few:  # most likely because many are equal to the threshold
            middle = least + 1
        while (middle > least) & (count != K):
            if few:
                reaching = count_keys(keys, middle)
            else:
                reaching, _ = count_list(list_ptr, size, first, middle, BLOCK, STAGES)
            least = tl.where(reaching >= K, middle, least)
            count = tl.where(reaching >= K, reaching, count)
            beyond = tl.where(reaching >= K, beyond, middle)
            middle = (least & beyond) + ((least ^ beyond) >> 1)
        if few:
            earlier = tl.where(index < first, keys, MISSING)
            above, above_before = count_keys(keys, least + 1), count_keys(earlier, least + 1)
            reaching_before = count_keys(earlier, least)
        else:
            above, above_before = count_list(list_ptr, size, first, least + 1, BLOCK, STAGES)
            _, reaching_before = count_list(list_ptr, size, first, least, BLOCK, STAGES)
        equal_before = reaching_before - above_before
        room = K - above  # for those equal to the threshold

    end, i = tl.minimum(first + span, size), tl.arange(0, OWN)
    for start in tl.range(first, end, OWN, num_stages=STAGES):
        candidates, keys = load_ahead(list_ptr, start + i, end)
        above, equal = (keys > least).to(tl.int32), (keys == least).to(tl.int32)
        counts = tl.cumsum(above + (equal << 16), 0)  # two counts below 2^15 in one scan
        among_equals = equal_before + (counts >> 16)
        chosen = (keys > least) | ((keys == least) & (among_equals <= room))
        place = above_before + (counts & 0xFFFF) + tl.minimum(among_equals, room) - 1
        tl.store(scores_ptr + place, score_of(candidates), mask=chosen)
        tl.store(positions_ptr + place, candidates.to(tl.int32), mask=chosen)
        above_before += tl.sum(above, 0)
        equal_before += tl.sum(equal, 0)
    for start in range(size + piece * OWN, K, pieces * OWN):
        tl.store(scores_ptr + start + i, tl.full((OWN,), float("-inf"), tl.float32), mask=start + i < K)
        tl.store(positions_ptr + start + i, tl.full((OWN,), -1, tl.int32), mask=start + i < K)


def merge_lists(
    parts: Parts,
    published: jax.Array,
    lists: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The k best of each row in order of position.

    Args:
      published, lists, counts: what the kernel that fills the lists gives.

    Returns:
      scores [rows, k] float32 and positions [rows, k] int32, missing ones (-inf, -1) last.
    """
    rows, sizes, bounds, width, capacity = lists, counts, None, parts.capacity, parts.capacity
    if parts.parts > 1:
        rows, sizes, bounds = _gather(parts, published, lists, counts)
        width, capacity = rows.shape[1], MERGE_CAPACITY
    pieces = parts.pieces
    scores, positions = triton_call(
        rows, sizes, bounds, pieces,
        kernel=merge_piece,
        results=(
            jax.ShapeDtypeStruct((parts.rows, parts.k), jnp.float32),
            jax.ShapeDtypeStruct((parts.rows, parts.k), jnp.int32),
        ),
        grid=(parts.rows, pieces),
        num_warps=max(4, capacity // 512),
        K=parts.k, WIDTH=width, CAPACITY=capacity, BLOCK=capacity // 8,
        OWN=min(MERGE_BLOCK, max(128, next_power_of_two(-(-parts.k // pieces)))), STAGES=STAGES,
    )  # fmt: skip
    return scores, positions


def sample(parts: int) -> tuple[int, int]:
    """How many pivots there are, and of every how-manieth part: the last is of no part, and so below every score."""
    stride = -(-parts // (MOST_PIVOTS - 1))
    return next_power_of_two(-(-parts // stride) + 1), stride


def _gather(parts: Parts, published: jax.Array, lists: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
    """Each row's candidates for its k best in one list.

    Returns:
      lists [rows, width, 2] int32 in order of position; how many they hold [rows] int32; the key that just these reach
      [rows] int32, where they are k or more.
    """
    pivots, stride = sample(parts.parts)
    width = -(-parts.parts * parts.k // 16) * 16
    size = jax.ShapeDtypeStruct((parts.rows,), jnp.int32)
    shared: dict[str, Any] = {
        "grid": (parts.rows, parts.parts),
        "K": parts.k,
        "CAPACITY": parts.capacity,
        "PIVOTS": pivots,
        "STRIDE": stride,
        "STAGES": STAGES,
    }
    lists, counts, reaching = triton_call(
        lists, counts, published, parts.parts,
        kernel=count_candidates,
        results=(*parts.results[1:], jax.ShapeDtypeStruct((parts.rows, parts.parts, pivots), jnp.int32)),
        in_place={0: 0, 1: 1},
        num_warps=8,
        STEP=min(512, parts.capacity),
        BLOCK=COUNT_BLOCK,
        **shared,
    )  # fmt: skip
    return triton_call(
        lists, counts, published, reaching, parts.parts,
        kernel=gather_candidates,
        results=(jax.ShapeDtypeStruct((parts.rows, width, 2), jnp.int32), size, size),
        num_warps=4,
        WIDTH=width,
        BLOCK=min(GATHER_BLOCK, parts.capacity),
        **shared,
    )  # fmt: skip
