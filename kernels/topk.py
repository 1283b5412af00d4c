"""Exact, deterministic top-k of index scores: ties go to the lowest position, missing entries are -1.

The jnp form keeps a running selection while the context streams by in chunks, so no [tokens, context] array is ever
held.  Beyond a few short rows it finds the k-th largest score by bisecting the bits of the floats and then compacts,
all of it vectorised over rows; XLA's own top-k sorts each row on one core (spec/jax.md section 2).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.kernels import few_rows
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.index_limits import row_obstacle

SORT_SCORES = 8192  # up to here, of all rows together, jax.lax.top_k is faster
CHUNK = 8192  # scores of a row that are added to a selection at once, at most
GROUP = 16  # words of 32 entries that are counted together
SPAN = 64  # numbers that are summed at once


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
      ConfigError: the implementation is unknown, or asked for and not for these arguments.
    """
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
      scores: [N, S] float32; -inf is never selected.

    Returns:
      [N, k] int32.
    """
    key = _ordered(scores)
    threshold = _kth_largest(key, k)[:, None]
    above, equal = key > threshold, key == threshold
    room = k - jnp.sum(above, axis=-1, keepdims=True)
    chosen = (above | (equal & (_running_sum(equal.astype(jnp.float32)) <= room))) & (scores > -jnp.inf)
    return compact(chosen, k)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 that compare as the floats do, with -0 equal to 0."""
    bits = _bits(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _bits(x: jax.Array) -> jax.Array:
    """int32, of 0 for -0. Told by its bits: a program that may add in any order takes both zeros for the same."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)


def _kth_largest(key: jax.Array, k: int) -> jax.Array:
    """The largest t with at least k entries >= t, two bits at a time from the top; [N, S] int32 -> [N]."""

    def decide(i: jax.Array, t: jax.Array) -> jax.Array:
        candidates = [t + (jnp.int32(step) << (30 - 2 * i)) for step in (1, 2, 3)]
        # Three counts are one loop on a CPU. A single one is a call of a library, for which the comparisons are stored.
        counts = few_rows.sums([(key >= candidate[:, None]).astype(jnp.int32) for candidate in candidates], axis=1)
        for candidate, count in zip(candidates, counts, strict=True):
            t = jnp.where(count >= k, candidate, t)
        return t

    least = jnp.full(key.shape[:-1], jnp.iinfo(jnp.int32).min, jnp.int32)
    return jax.lax.fori_loop(0, 16, decide, least)


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
    """Indices of the first k True of each row [N, S] in ascending order; -1 (last) where there are fewer.

    The row becomes words of 32 bits. A wanted entry's word is found by comparing counts, first those of groups of words
    and then those within the group, and its bit by halving the word: there are gathers but no scatter.
    """
    N, S = mask.shape
    bits = jnp.pad(mask, ((0, 0), (0, -S % (32 * GROUP)))).astype(jnp.float32).reshape(N, -1, 2, 16)
    halves = (bits @ (2.0 ** jnp.arange(16))).astype(jnp.uint32)  # exact: below 2^16
    words = halves[..., 0] | (halves[..., 1] << 16)
    count = jax.lax.population_count(words).astype(jnp.float32)
    through = _running_sum(count)
    wanted = jnp.arange(1, k + 1, dtype=jnp.float32)
    groups = through.reshape(N, -1, GROUP)
    # XLA's CPU backend stores what these sums are of: [N, k, words] at once would be larger than any cache.
    group = jnp.sum((groups[:, None, :, -1] < wanted[:, None]).astype(jnp.float32), axis=-1).astype(jnp.int32)
    inside = jnp.minimum(group, groups.shape[1] - 1)
    own = jax.vmap(lambda of_row, i: of_row.at[i].get(mode="promise_in_bounds"))(groups, inside)  # [N, k, GROUP]
    at = inside * GROUP + jnp.sum((own < wanted[:, None]).astype(jnp.float32), axis=-1).astype(jnp.int32)
    at = jnp.minimum(at, words.shape[1] - 1)
    word = jnp.take_along_axis(words, at, axis=-1)
    rank = (wanted - 1 - jnp.take_along_axis(through - count, at, axis=-1)).astype(jnp.uint32)
    bit = jnp.zeros_like(word)
    for width in (16, 8, 4, 2, 1):
        low = jax.lax.population_count(word & jnp.uint32((1 << width) - 1))
        skip = rank >= low
        rank = jnp.where(skip, rank - low, rank)
        word = jnp.where(skip, word >> width, word)
        bit = jnp.where(skip, bit + width, bit)
    return jnp.where(group < groups.shape[1], at * 32 + bit.astype(jnp.int32), -1)


def top_k_numpy(scores: np.ndarray, k: int) -> np.ndarray:
    """NumPy twin: positions [..., k] of the largest in ascending order, ties to the lowest, -1 for missing."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    size = scores.shape[-1]
    order = np.sort(np.where(np.take_along_axis(scores, order, axis=-1) > -np.inf, order, size), axis=-1)
    missing = [(0, 0)] * (scores.ndim - 1) + [(0, k - order.shape[-1])]
    return np.pad(np.where(order < size, order, -1), missing, constant_values=-1).astype(np.int32)
