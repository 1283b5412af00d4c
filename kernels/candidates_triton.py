"""Lists of candidates for an exact top-k, in Triton: what the streaming kernels of top-k and of the indexer share.

Rows are cut into parts so that all multiprocessors work, and a program streams the scores of one part. It appends those
that reach a threshold, with their positions, to a list; when the list is nearly full it keeps the k best and raises the
threshold, which is found by bisecting the bits of the floats.

    scores of parts  ->  lists, each in order of position  ->  merge_triton  ->  the k best in order

A list is always in order of position and no atomics are used. Of equal scores the first seen wins, because a later one
has to exceed the k-th best and not just equal it. So the result is exact and deterministic, and ties go to the lowest
position; sorted or tied scores cost time, never exactness.

Parts tell each other how far they are: whenever a part has seen twice as much as before, it publishes the worst of its
share of the k best so far. When every part has published, k scores of the row are as good as the worst published one,
so nothing below it can be among the k best. All look again every few blocks, for the last part to publish is the one
that tells the others something. A stale or missing value makes the threshold lower and the work longer, not the result
another.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from glmjax.kernels.roofline import MULTIPROCESSORS

# A candidate is one int64, the float's bits above and the position below: one store adds it to a list. (JAX has no
# int64 by default: outside, a list is an array of pairs of int32.) `least` is the smallest score that enters a list.
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf and NaN never enter
MISSING = tl.constexpr(-2147483648)  # below every ordered score


@triton.jit
def pack(score, position):
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | position.to(tl.int64)


@triton.jit
def score_of(candidate):
    return (candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def ordered(score):
    """int32 that compare as the scores do, -0 equal to 0."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def threshold_for(keys, k):
    """A t with at least k keys >= t and at most k above it; MISSING if there are fewer than k.

    Bit by bit from the top, until t is the k-th largest key or just k keys are left.
    """
    t, bit, count = tl.full((), MISSING, tl.int32), tl.full((), 31, tl.int32), tl.full((), 0, tl.int32)
    while (bit >= 0) & (count != k):
        candidate = t + (tl.full((), 1, tl.int32) << bit)  # the first step wraps from the least integer to 0
        at_least = tl.sum((keys >= candidate).to(tl.int32), 0)
        t = tl.where(at_least >= k, candidate, t)
        count = tl.where(at_least >= k, at_least, count)
        bit -= 1
    return t


@triton.jit
def load_keys(list_ptr, count, SIZE: tl.constexpr):
    """Ordered scores of a list, MISSING after its end."""
    tl.debug_barrier()  # other threads have written the list
    i = tl.arange(0, SIZE)
    return tl.where(i < count, ordered(score_of(tl.load(list_ptr + i))), MISSING)  # no mask, so that loads are wide


@triton.jit
def keep_best(list_ptr, count, least, K: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Shortens a list to its K best, in place; the new count, and the score that a later one has to reach."""
    if count > K:
        all_keys = load_keys(list_ptr, count, CAPACITY)
        threshold = threshold_for(all_keys, K)
        room = K - tl.sum((all_keys > threshold).to(tl.int32), 0)  # for those equal to the threshold
        end, count = count, tl.full((), 0, tl.int32)
        i = tl.arange(0, STEP)
        for start in range(0, end, STEP):
            candidates = tl.load(list_ptr + start + i)
            keys = tl.where(start + i < end, ordered(score_of(candidates)), MISSING)
            above, equal = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
            counts = tl.cumsum(above + (equal << 16), 0)  # two counts below 2^15 in one scan
            among_equals = counts >> 16
            chosen = above + equal * (among_equals <= room).to(tl.int32)
            place = count + (counts & 0xFFFF) + tl.minimum(among_equals, room) - 1
            tl.debug_barrier()  # a place may be one that was read just now
            tl.store(list_ptr + place, candidates, mask=chosen > 0)
            count += tl.sum(chosen, 0)
            room = tl.maximum(room - tl.sum(equal, 0), 0)
        least = unordered(threshold + 1)
    return count, least


@triton.jit
def make_room(list_ptr, count, least, room, K: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Shortens a list that has fewer free places than asked for."""
    if count > CAPACITY - room:
        count, least = keep_best(list_ptr, count, least, K, CAPACITY, STEP)
    return count, least


@triton.jit
def append(list_ptr, count, scores, positions, enters):
    """Adds scores to a list in their order; the new count."""
    place = count + tl.cumsum(enters.to(tl.int32), 0) - 1
    tl.store(list_ptr + place, pack(scores, positions), mask=enters)
    return count + tl.sum(enters.to(tl.int32), 0)


@triton.jit
def append_columns(list_ptrs, counts, scores, positions, enters, shift):
    """Adds the columns of a tile of scores, each to its own list; the new counts.

    How many of a column enter is counted in a byte, ``shift`` bits up in an integer: at most 255, of up to 8 columns.
    """
    entering = tl.sum(enters.to(shift.dtype) << shift, 1)
    rank = (tl.cumsum(entering, 0)[:, None] >> shift).to(tl.int32) & 255
    tl.store(list_ptrs + (counts + rank - 1), pack(scores, positions), mask=enters)
    return counts + ((tl.sum(entering, 0) >> shift).to(tl.int32) & 255)


@triton.jit
def part_size_of(extent, parts, BLOCK: tl.constexpr):
    """Scores of a part of a row with so many scores: whole blocks, as many to each part."""
    return tl.cdiv(tl.cdiv(extent, parts), BLOCK) * BLOCK


@triton.jit
def publish(published_ptr, list_ptr, count, length, visible, K: tl.constexpr, CAPACITY: tl.constexpr):
    """Tells the other parts the worst of this part's share of the K best, if it has as many; 0 is nothing yet."""
    share = (K * length.to(tl.int64) + visible - 1) // visible
    key = threshold_for(load_keys(list_ptr, count, CAPACITY), share.to(tl.int32))
    before = tl.load(published_ptr) ^ MISSING  # better if what this part has was below the floor
    tl.store(published_ptr, tl.maximum(key, before) ^ MISSING)


@triton.jit
def floors_of(published_ptrs, visible, parts, part_size, PARTS_PADDED: tl.constexpr):
    """Of each row, the score that its K best all reach, as far as its parts have published.

    To be called under a condition: else the loads would be copied ahead, through a cache that others' stores bypass.
    """
    p = tl.arange(0, PARTS_PADDED)[None, :]
    in_use = (p < parts) & (p * part_size < visible[:, None])
    keys = tl.load(published_ptrs[:, None] + p, mask=in_use, other=-1, volatile=True) ^ MISSING
    worst = tl.min(keys, 1)
    return tl.where(worst == MISSING, LOWEST, unordered(worst))


@triton.jit
def floor_of(published_ptr, visible, parts, part_size, PARTS_PADDED: tl.constexpr):
    """As ``floors_of``, of one row."""
    one = tl.arange(0, 1)
    return tl.max(floors_of(published_ptr + one, visible + one, parts, part_size, PARTS_PADDED), 0)


# How far apart parts start, as is assumed where bytes are counted: by as much as an H200 reads in two microseconds for
# one of two programs on every multiprocessor.
APART_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True)
class Parts:
    """How rows are cut, and the lists of their parts.

    Attributes:
      rows: N.
      parts: of each row, which they share evenly whatever the row's length.
      block: parts are of whole blocks of so many scores.
      k: how many are chosen.
      capacity: of a part's list.
    """

    rows: int
    parts: int
    block: int
    k: int
    capacity: int

    @classmethod
    def cut(cls, rows: int, size: int, *, groups: int, block: int, k: int, capacity: int, shortest: int = 0) -> "Parts":
        """Up to two programs for every multiprocessor, but no more parts than a row of full size has blocks.

        Parts may be smaller than k: what they lack of their share of the k best, others have.

        Args:
          size: of the longest row.
          groups: programs that the rows take for one part.
          shortest: with fewer scores in a part, one program for every multiprocessor has to do.
        """
        parts = 2 * MULTIPROCESSORS // groups
        if size < shortest * parts:
            parts = -(-MULTIPROCESSORS // groups)
        parts = max(1, min(parts, -(-size // block)))
        return cls(rows, parts, block, k, capacity)

    @property
    def pieces(self) -> int:
        """Programs that merge a row: up to two for every multiprocessor, and one where the rows are as many."""
        return max(1, 2 * MULTIPROCESSORS // self.rows)

    @property
    def constants(self) -> dict[str, int]:
        """Parameters of every kernel over parts."""
        return {
            "K": self.k,
            "PARTS_PADDED": next_power_of_two(self.parts),
            "CAPACITY": self.capacity,
            "STEP": min(512, self.capacity),
            "BLOCK": self.block,
        }

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of a kernel that fills lists: what the parts published, their lists, and how long these are."""
        return (
            jax.ShapeDtypeStruct((self.rows, self.parts), jnp.int32),
            jax.ShapeDtypeStruct((self.rows, self.parts, self.capacity, 2), jnp.int32),
            jax.ShapeDtypeStruct((self.rows, self.parts), jnp.int32),
        )

    def bytes(self, size: int, *, early: int, refresh: int, apart: int) -> int:
        """Of the candidates, each written once and read once, and of the result, for full rows in random order.

        What is read and written again to shorten lists and to merge them is not counted: it is there in the cache.

        Args:
          early, refresh: scores after which a part first publishes, and after which it looks again.
          apart: scores that the first part has seen when the last one starts.
        """
        entries = self.entries(size, early=early, refresh=refresh, apart=apart)
        return self.rows * (16 * int(entries) + 8 * self.k)

    def entries(self, size: int, *, early: int, refresh: int, apart: int) -> float:
        """Expected candidates that enter the lists of a full row in random order, ``bytes`` says for which arguments.

        Parts start evenly over the time that ``apart`` scores take, the last one last, and are as fast as each other:
        what all have published is what the last one has. Even those in step look before the last one has published.
        """
        length = -(-size // self.parts // self.block) * self.block
        starts = range(0, size, length)
        entered = 0.0
        for i, first in enumerate(starts):
            end = min(first + length, size)
            behind = max(1, apart) * (1 - i / max(1, len(starts) - 1))  # scores that the last part has seen fewer
            at, count, rate, due = first, 0.0, 1.0, early
            while at < end:
                if count > self.capacity - (self.capacity - self.k) // 4:
                    count, rate = float(self.k), min(rate, self.k / (at - first))
                stop = min(end, at + int(self.capacity - count) // self.block * self.block)
                if self.parts > 1:
                    stop, due = min(stop, first + due), due * (1 + (stop >= first + due))
                for start in range(at, stop, self.block):
                    if self.parts > 1 and start % refresh == 0 and start - first - behind >= early:
                        published = early << (int(start - first - behind) // early).bit_length() - 1
                        rate = min(rate, self._worst_share(size, length, len(starts), published))
                    entering = rate * (min(start + self.block, end) - start)
                    entered, count = entered + entering, count + entering
                at = stop
        return entered

    def _worst_share(self, size: int, length: int, parts: int, seen: int) -> float:
        """Share of scores that reach what all parts have published, the worst being expected of so many parts."""
        share = -(-self.k * length // size)
        if share > seen:
            return 1.0
        # Ranks among random scores are distributed as a gamma variable is, whose cube root is nearly normal.
        spread = statistics.NormalDist().inv_cdf((parts - 0.375) / (parts + 0.25)) / 3 * (1 - share / seen) ** 0.5
        return min(1.0, share / seen * (1 - 1 / (9 * share) + spread / share**0.5) ** 3)


def nothing_published(parts: Parts) -> jax.Array:
    return jnp.zeros((parts.rows, parts.parts), jnp.int32)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
