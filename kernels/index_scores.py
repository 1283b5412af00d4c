"""Scores of the lightning indexer: I[t, s] = scale[s] * sum_h w[t, h] * relu(q[t, h] . k[s]) (spec/model.md 2.4)."""

import jax
import jax.numpy as jnp
import numpy as np


def index_scores(
    query: jax.Array,
    head_weights: jax.Array,
    keys: jax.Array,
    key_scale: jax.Array | None,
    query_position: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Scores of one chunk of the context; positions after the query are -inf.

    Args:
      query: [R, Q, H, d], of R requests with Q tokens each.
      head_weights: [R, Q, H] float32; every constant factor and the query's own scale are folded in.
      keys: [R, C, d] of each request.
      key_scale: [R, C] float32, or None for unscaled keys.
      query_position: [R, Q] int32.
      positions: [C] int32 of the keys.

    Returns:
      [R, Q, C] float32.
    """
    keys = keys.astype(query.dtype)
    scores = _all_heads(query, head_weights, keys) if query.shape[1] == 1 else _by_head(query, head_weights, keys)
    if key_scale is not None:
        scores = scores * key_scale[:, None]
    return jnp.where(positions <= query_position[..., None], scores, -jnp.inf)


def _all_heads(query: jax.Array, head_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """One query per request: a product of the keys with its heads, then one with the heads' weights."""
    product = jnp.einsum("rcd,rhd->rch", keys, query[:, 0], preferred_element_type=jnp.float32)
    # The barrier keeps the two products apart: fused, they run at half the speed on a CPU.
    product = jax.lax.optimization_barrier(jax.nn.relu(product))
    return jnp.einsum("rch,rh->rc", product, head_weights[:, 0], precision="highest")[:, None]


def _by_head(query: jax.Array, head_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Many queries: one head after the other, so that no [Q, heads, C] array is made."""
    R, Q, H, _ = query.shape

    def add(h: jax.Array, scores: jax.Array) -> jax.Array:
        product = jnp.einsum("rqd,rcd->rqc", query[:, :, h], keys, preferred_element_type=jnp.float32)
        return scores + jax.nn.relu(product) * head_weights[:, :, h, None]

    return jax.lax.fori_loop(0, H, add, jnp.zeros((R, Q, keys.shape[1]), jnp.float32))


def index_scores_numpy(
    query: np.ndarray, head_weights: np.ndarray, keys: np.ndarray, query_position: np.ndarray
) -> np.ndarray:
    """Float64 twin for one request: [Q, H, d], [Q, H], [S, d], [Q] -> [Q, S]."""
    product = np.maximum(np.einsum("qhd,sd->qhs", query.astype(np.float64), keys.astype(np.float64)), 0)
    scores = np.einsum("qhs,qh->qs", product, head_weights.astype(np.float64))
    return np.where(np.arange(keys.shape[0]) <= query_position[:, None], scores, -np.inf)
