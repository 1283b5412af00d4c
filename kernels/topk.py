"""Exact, deterministic top-k of index scores: ties go to the lowest position, missing entries are -1.

The jnp form keeps a running selection while the context streams by in chunks, so no [tokens, context] array is ever
held.  Beyond a few short rows it looks for the k-th largest score by counting how many reach a few pivots at a time,
and then compacts, all of it vectorised over rows; XLA's own top-k sorts each row on one core (spec/jax.md section 2).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.kernels import few_rows
from glmjax.kernels.check import FLOAT32, INT32, check_arrays, check_count
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.index_limits import row_obstacle

SORT_SCORES = 8192  # up to here, of all rows together, jax.lax.top_k is faster
CHUNK = 8192  # scores of a row that are added to a selection at once, at most
SPAN = 64  # numbers that are summed at once
# Floats as int32 in their order: the least number, the first above infinity, and 1.
LEAST_KEY, BEYOND_KEYS, ONE_KEY = -0x7F800000, 0x7F800001, 0x3F800000


def top_k(
    scores: jax.Array, k: int, *, visible: jax.Array | None = None, implementation: Implementation = "auto"
) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row in ascending order of position, ties to the lowest.

    Args:
      scores: [N, S] float32; -inf and NaN are never chosen.
      k: how many.
      visible: [N] int32, only the first so many scores of a row are looked at; None for all.
      implementation: "auto", "jnp" or "triton".

    Returns:
      scores [N, k] float32 and positions [N, k] int32, missing ones (-inf, -1) last.

    Raises:
      ConfigError: other shapes or types, or the implementation is unknown, or asked for and not for these arguments.
    """
    arguments = {"scores": (scores, "N S", FLOAT32), "visible": (visible, "N", INT32)}
    check_arrays("top_k", arguments, optional=("visible",))
    check_count("top_k", "k", k)
    if choose("top_k", implementation, kernel="triton", obstacle=row_obstacle(scores, k)) == "triton":
        from glmjax.kernels.topk_triton import top_k_triton

        return top_k_triton(scores, k, visible)
    N, S = scores.shape
    chunks = max(1, -(-S // CHUNK))
    size = max(1, -(-S // chunks))
    scores = jnp.pad(scores, ((0, 0), (0, chunks * size - S)), constant_values=-jnp.inf)

    def add(i: jax.Array | int, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.dynamic_slice_in_dim(scores, i * size, size, axis=1)
        positions = i * size + jnp.arange(size, dtype=jnp.int32)
        if visible is not None:
            part = jnp.where(positions < visible[:, None], part, -jnp.inf)
        return merge_top_k(*best, part, positions)

    start = (jnp.full((N, k), -jnp.inf), jnp.full((N, k), -1, jnp.int32))
    return in_order(*jax.lax.fori_loop(0, chunks, add, start))


def in_order(scores: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A selection [..., k] in ascending order of position, missing entries (-1) last."""
    order = jnp.argsort(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=-1)
    return jnp.take_along_axis(scores, order, axis=-1), jnp.take_along_axis(positions, order, axis=-1)


def merge_top_k(
    values: jax.Array, positions: jax.Array, scores: jax.Array, new: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds one chunk of the context to a running selection.

    Args:
      values, positions: [..., k] of the chunks before: float32 scores and int32 positions, in any order but with equal
        scores in order of position, missing entries (-inf, -1) last.  Start with all entries missing.
      scores: [..., C] float32; -inf marks what may not be chosen.
      new: [C] int32, the positions of the scores, ascending and beyond all before.

    Returns:
      the selection over all chunks so far, of the same form.
    """
    places = jnp.concatenate([positions, jnp.broadcast_to(new, scores.shape)], axis=-1)
    return best_of(jnp.concatenate([values, scores], axis=-1), places, values.shape[-1])


def best_of(scores: jax.Array, places: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best scores [..., S] and their places [..., S], in the form that ``merge_top_k`` goes on with."""
    rows, size = math.prod(scores.shape[:-1]), scores.shape[-1]
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)  # NaN compares false, and is never chosen
    if k <= size and rows * size <= SORT_SCORES:
        # Stable: of equal scores the first, which is the lowest position, comes first.  It ranks -0 below 0.
        best, where = jax.lax.top_k(jax.lax.bitcast_convert_type(_bits(scores), jnp.float32), k)
    else:
        where = select_top_k(scores.reshape(rows, -1), k).reshape(*scores.shape[:-1], k)
        best = jnp.take_along_axis(scores, jnp.maximum(where, 0), axis=-1)
        best = jnp.where(where >= 0, best, -jnp.inf)
    chosen = jnp.take_along_axis(places, jnp.maximum(where, 0), axis=-1)
    return best, jnp.where(best > -jnp.inf, chosen, -1)


def select_top_k(scores: jax.Array, k: int) -> jax.Array:
    """Indices of the k largest of each row in ascending order, ties to the lowest; -1 (last) for missing entries.

    Args:
      scores: [N, S] float32 without NaN; -inf is never selected.

    Returns:
      [N, k] int32.
    """
    key = _ordered(scores)
    threshold, reaching = _threshold(key, k)
    threshold = threshold[:, None]

    def first_of_equals() -> jax.Array:
        above, equal = key > threshold, key == threshold
        room = k - jnp.sum(above, axis=-1, keepdims=True)
        return _words(above | (equal & (_running_sum(equal.astype(jnp.float32)) <= room)))

    return _set_bits(jax.lax.cond(jnp.any(reaching > k), first_of_equals, lambda: _words(key >= threshold)), k)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 that compare as the floats do, with -0 equal to 0."""
    bits = _bits(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _bits(x: jax.Array) -> jax.Array:
    """int32, of 0 for -0. Told by its bits: a program that may add in any order takes both zeros for the same."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)


def _threshold(key: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Of each row of keys [N, S] int32 a t that k or more reach and fewer than k exceed, and how many reach it.

    A row with fewer than k above the key of -inf has the least of those as t, and 0. The search ends where just k are
    left, which is before the last bit unless scores are equal.
    """

    def narrow(found: tuple[jax.Array, ...], *pivots: jax.Array) -> tuple[jax.Array, ...]:
        """k or more keys reach ``least``, fewer reach ``beyond``."""
        least, count, beyond = found
        # Three counts are one loop on a CPU. A single one is a call of a library, for which the comparisons are stored.
        counts = few_rows.sums([(key >= pivot[:, None]).astype(jnp.int32) for pivot in pivots], axis=1)
        for pivot, reaching in zip(pivots, counts, strict=True):  # ascending
            beyond = jnp.where((reaching < k) & (beyond > pivot), pivot, beyond)
            least, count = jnp.where(reaching >= k, pivot, least), jnp.where(reaching >= k, reaching, count)
        return least, count, beyond

    def undecided(found: tuple[jax.Array, ...]) -> jax.Array:
        least, count, beyond = found
        return jnp.any((count > k) & (_between(least, beyond) > least))

    def quarter(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        least, _, beyond = found
        middle = _between(least, beyond)
        return narrow(found, _between(least, middle), middle, _between(middle, beyond))

    def every(value: int) -> jax.Array:
        return jnp.full(key.shape[:-1], value, jnp.int32)

    found = every(LEAST_KEY), every(0), every(BEYOND_KEYS)
    least, count, _ = jax.lax.while_loop(undecided, quarter, narrow(found, every(LEAST_KEY), every(0), every(ONE_KEY)))
    return least, count


def _between(a: jax.Array, b: jax.Array) -> jax.Array:
    """The mean of two int32, rounded down, without overflow."""
    return (a & b) + ((a ^ b) >> 1)


def _running_sum(x: jax.Array) -> jax.Array:
    """Inclusive sums along each row of whole numbers [N, S] float32, by products with small triangles of ones.

    The triangles are constants of NumPy's: XLA would compute others anew in every turn of a loop.
    """
    N, S = x.shape
    if S <= SPAN:
        return jnp.matmul(x, np.triu(np.ones((S, S), np.float32)), precision="highest")
    spans = jnp.pad(x, ((0, 0), (0, -S % SPAN))).reshape(-1, SPAN)
    within = _running_sum(spans).reshape(N, -1, SPAN)
    total = within[..., -1]
    return (within + (_running_sum(total) - total)[..., None]).reshape(N, -1)[:, :S]


def compact(mask: jax.Array, k: int) -> jax.Array:
    """Indices of the first k True of each row [N, S] in ascending order; -1 (last) where there are fewer."""
    return _set_bits(_words(mask), k)


def _words(mask: jax.Array) -> jax.Array:
    """[N, S] bool -> [N, ceil(S / 32)] uint32, the first entry in the lowest bit."""
    words = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % 32))).astype(jnp.uint32)
    for width in (1, 2, 4, 8, 16):
        words = words[:, 0::2] | (words[:, 1::2] << width)
    return words


def _set_bits(words: jax.Array, k: int) -> jax.Array:
    """Indices of the first k set bits of each row [N, W] uint32 in ascending order; -1 (last) where there are fewer.

    A bit's word is the number of words that end before it. Within the word the bit is found by halving.
    """
    N, W = words.shape
    count = jax.lax.population_count(words).astype(jnp.float32)
    through = _running_sum(count)
    ends = through.astype(jnp.int32)
    ending = jnp.zeros((N, k), jnp.float32).at[jnp.arange(N)[:, None], ends].add(1, mode="drop")
    of_word = jnp.minimum(_running_sum(ending).astype(jnp.int32), W - 1)
    word = jnp.take_along_axis(words, of_word, axis=-1)
    wanted = jnp.arange(k, dtype=jnp.int32)
    before = jnp.take_along_axis((through - count).astype(jnp.int32), of_word, axis=-1)
    rank = (wanted - before).astype(jnp.uint32)
    bit = jnp.zeros_like(word)
    for width in (16, 8, 4, 2, 1):
        low = jax.lax.population_count(word & jnp.uint32((1 << width) - 1))
        skip = rank >= low
        rank = jnp.where(skip, rank - low, rank)
        word = jnp.where(skip, word >> width, word)
        bit = jnp.where(skip, bit + width, bit)
    return jnp.where(wanted < ends[:, -1:], of_word * 32 + bit.astype(jnp.int32), -1)


def top_k_numpy(scores: np.ndarray, k: int) -> np.ndarray:
    """NumPy twin: positions [..., k] of the largest in ascending order, ties to the lowest, -1 for missing."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    size = scores.shape[-1]
    order = np.sort(np.where(np.take_along_axis(scores, order, axis=-1) > -np.inf, order, size), axis=-1)
    missing = [(0, 0)] * (scores.ndim - 1) + [(0, k - order.shape[-1])]
    return np.pad(np.where(order < size, order, -1), missing, constant_values=-1).astype(np.int32)
