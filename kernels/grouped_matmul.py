"""Experts' SwiGLU over tokens grouped by expert: every expert multiplies just the tokens that chose it.

The jnp form sorts the (token, choice) pairs by expert, cuts each expert's group into tiles of a fixed number of
rows and loops over the tiles in use, so the work follows the routing and no token is ever dropped.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

UNROLL_PAIRS = 8  # up to here pairs are not grouped
ExpertFunction = Callable[[jax.Array, jax.Array], jax.Array]  # (expert id, rows [B, D]) -> [B, D]


def grouped_apply(x: jax.Array, expert_ids: jax.Array, num_experts: int, apply: ExpertFunction) -> jax.Array:
    """Applies to each token the experts it chose.

    Args:
      x: [T, D].
      expert_ids: [T, k] int32 in [0, num_experts); -1 skips the pair, and its output is zero.
      num_experts: E.
      apply: one expert on a tile of rows.

    Returns:
      [T, k, D]: output of token t's j-th expert.
    """
    T, k = expert_ids.shape
    if T * k <= UNROLL_PAIRS:
        return _apply_pairs(x, expert_ids, apply)
    tile = tile_rows(T * k, num_experts)
    places, tile_experts, num_tiles, max_tiles = group_by_expert(expert_ids.reshape(-1), num_experts, tile)
    # Row of x for every place of the tiled order; unused places read row 0 and are never read back.
    source = jnp.zeros(max_tiles * tile, jnp.int32)
    source = source.at[places].set(jnp.arange(T * k, dtype=jnp.int32) // k, mode="drop")

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = x[jax.lax.dynamic_slice_in_dim(source, i * tile, tile)]
        return jax.lax.dynamic_update_slice_in_dim(out, apply(tile_experts[i], rows), i * tile, axis=0)

    out = jax.lax.fori_loop(0, num_tiles, one, jax.lax.empty((max_tiles * tile, x.shape[1]), x.dtype))
    return out.at[places].get(mode="fill", fill_value=0).reshape(T, k, -1)


def _apply_pairs(x: jax.Array, expert_ids: jax.Array, apply: ExpertFunction) -> jax.Array:
    """Pair by pair, unrolled: the experts' weights are then read by all cores at once, not one expert after another."""
    T, k = expert_ids.shape
    out = [apply(jnp.maximum(expert_ids[t, j], 0), x[t : t + 1]) for t in range(T) for j in range(k)]
    return jnp.where(expert_ids[..., None] >= 0, jnp.concatenate(out).reshape(T, k, -1), 0)


def tile_rows(pairs: int, num_experts: int) -> int:
    """Rows of a tile: a power of two from 8, near the mean group.

    Small tiles cost as much as their expert's weights, so most groups should be one tile; large ones cost padding.
    """
    mean = -(-pairs // num_experts)
    return min(128, max(8, 1 << (mean - 1).bit_length()))


def group_by_expert(expert_ids: jax.Array, num_experts: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Places pairs so that each expert's pairs stand together, in order, from the start of a tile.

    Args:
      expert_ids: [P] int32, -1 for pairs to skip.

    Returns:
      place of each pair [P] int32 (out of range for skipped ones), expert of each tile [max tiles] int32, number of
      tiles in use, and max tiles.
    """
    pairs = expert_ids.shape[0]
    most = (pairs + min(num_experts, pairs) * (tile - 1)) // tile  # the worst routing
    chosen = expert_ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32)  # [P, E]
    count = jnp.cumsum(chosen.astype(jnp.int32), axis=0)
    rank = jnp.sum(jnp.where(chosen, count - 1, 0), axis=1)  # among the pairs of the same expert
    tiles = (count[-1] + tile - 1) // tile  # [E]
    last = jnp.cumsum(tiles)
    first = last - tiles
    place = jnp.sum(jnp.where(chosen, first, 0), axis=1) * tile + rank
    place = jnp.where(expert_ids >= 0, place, most * tile)
    tile_experts = jnp.searchsorted(last, jnp.arange(most, dtype=jnp.int32), side="right").astype(jnp.int32)
    return place, jnp.minimum(tile_experts, num_experts - 1), last[-1], most


def group_by_expert_numpy(expert_ids: np.ndarray, num_experts: int, tile: int) -> tuple[np.ndarray, list[int]]:
    """NumPy twin: places of the pairs and the expert of each tile in use."""
    places = np.full(expert_ids.shape, -1, np.int32)
    experts: list[int] = []
    for e in range(num_experts):
        pairs = np.flatnonzero(expert_ids == e)
        places[pairs] = len(experts) * tile + np.arange(len(pairs))
        experts += [e] * -(-len(pairs) // tile)
    return places, experts
