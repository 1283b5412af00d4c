"""Exact, deterministic top-k of index scores: ties go to the lowest position, missing entries are -1.

The jnp form keeps a running selection while the context streams by in chunks, so that no [tokens, context] array is
ever held. ``jax.lax.top_k`` is stable: equal scores come lowest index first, and the running selection (earlier
positions) stands before the new chunk, so the lowest position wins (spec/jax.md section 2).
"""

import jax
import jax.numpy as jnp
import numpy as np

NEG_INF = -jnp.inf


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, best first.

    Args:
      scores: [..., S] float32; -inf marks what may not be chosen.
      k: how many.

    Returns:
      values [..., k] float32 (-inf where there are fewer than k) and positions [..., k] int32 (-1 there).
    """
    size = scores.shape[-1]
    values, positions = jax.lax.top_k(scores, min(k, size))
    positions = jnp.where(values > NEG_INF, positions, -1)
    if size < k:
        pad = [(0, 0)] * (scores.ndim - 1) + [(0, k - size)]
        values = jnp.pad(values, pad, constant_values=NEG_INF)
        positions = jnp.pad(positions, pad, constant_values=-1)
    return values, positions


def merge_top_k(
    values: jax.Array, positions: jax.Array, scores: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds one chunk of the context to a running selection.

    Args:
      values, positions: [..., k] of the chunks before, as ``top_k`` returns them.
      scores: [..., C] of the positions first .. first + C - 1.
      first: scalar int32.

    Returns:
      the selection over all chunks so far.
    """
    k, chunk = values.shape[-1], scores.shape[-1]
    new = jnp.broadcast_to(first + jnp.arange(chunk, dtype=jnp.int32), scores.shape)
    candidates = jnp.concatenate([values, scores], axis=-1)
    best, where = jax.lax.top_k(candidates, k)
    chosen = jnp.take_along_axis(jnp.concatenate([positions, new], axis=-1), where, axis=-1)
    return best, jnp.where(best > NEG_INF, chosen, -1)


def top_k_numpy(scores: np.ndarray, k: int) -> np.ndarray:
    """NumPy twin of ``top_k``: positions [..., k] int32, best first, ties to the lowest, -1 for missing."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int32)
    found = np.take_along_axis(scores, order, axis=-1) > -np.inf
    order = np.where(found, order, -1)
    missing = k - order.shape[-1]
    return np.pad(order, [(0, 0)] * (scores.ndim - 1) + [(0, missing)], constant_values=-1)
