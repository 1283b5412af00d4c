"""Partial results of DCP ranks made whole: attention by log-sum-exp, exact top-k (spec/system.md 3.3 and 3.4).

The attention functions take NumPy arrays as well as JAX arrays and answer in kind.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.sharding.cp import array_namespace


def merge_attention[A: (jax.Array, np.ndarray)](outputs: A, lse: A) -> tuple[A, A]:
    """Attention over all shards from attention over each.

    A shard that has seen no key says so by an lse of -inf, +inf or NaN; its output may then be anything, NaN included.

    Args:
      outputs: [W, ..., d] float32.
      lse: [W, ...] float32, the log-sum-exp of the scores, base e.

    Returns:
      output [..., d] and log-sum-exp [...]; 0 and -inf where no shard has seen a key.
    """
    xp = array_namespace(outputs, lse)
    weights, merged = _weights(lse)
    return xp.sum(weigh(outputs, weights), axis=0), merged


def shard_weight[A: (jax.Array, np.ndarray)](lse: A, rank: A | int) -> A:
    """Weight of one shard's output in the merged attention: the sum of ``weigh(output, weight)`` over ranks is whole.

    Args:
      lse: [W, ...] float32 of all ranks, as gathered.
      rank: scalar.

    Returns:
      [...] float32 in [0, 1]; 0 for a shard that has seen no key.
    """
    return _weights(lse)[0][rank]


def weigh[A: (jax.Array, np.ndarray)](output: A, weight: A) -> A:
    """Output [..., d] times weight [...]; zero weight gives 0 whatever the output, for 0 * NaN is NaN."""
    xp = array_namespace(output, weight)
    weight = weight[..., None]
    return xp.where(weight == 0, 0, output) * weight


def _weights(lse: Any) -> tuple[Any, Any]:
    """Softmax over shards, [W, ...], and the merged lse [...]; zeros and -inf where no lse is finite."""
    xp = array_namespace(lse)
    lse = xp.where(xp.isfinite(lse), lse, -xp.inf)
    top = xp.max(lse, axis=0)
    top = xp.where(top > -xp.inf, top, 0)
    weights = xp.exp(lse - top)
    total = xp.sum(weights, axis=0)
    some = total > 0
    total = xp.where(some, total, 1)
    return weights / total, xp.where(some, top + xp.log(total), -xp.inf)


def merge_candidates(scores: jax.Array, positions: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k best of all ranks' candidates, of equal scores the lowest positions; exact if each rank sends its k best.

    Args:
      scores: [..., C] float32 without NaN; 0 and -0 are equal.
      positions: [..., C] int32 global positions, all different; -1 marks a missing candidate. C is at least k.

    Returns:
      scores [..., k] and positions [..., k], best first; -inf and -1, last, where candidates run out.
    """
    missing, beyond = positions < 0, jnp.iinfo(jnp.int32).max  # missing ones also go after a score of -inf
    keys = jnp.where(missing, jnp.inf, -scores), jnp.where(missing, beyond, positions)
    negated, chosen = (x[..., :k] for x in jax.lax.sort(keys, dimension=-1, num_keys=2))
    return -negated, jnp.where(chosen == beyond, -1, chosen)


def merge_candidates_numpy(scores: np.ndarray, positions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """NumPy twin of ``merge_candidates``."""
    missing = positions < 0
    scores = np.where(missing, -np.inf, scores)
    order = np.lexsort((positions, -scores, missing), axis=-1)[..., :k]
    return np.take_along_axis(scores, order, axis=-1), np.take_along_axis(positions, order, axis=-1)
