"""Which tile of tokens goes to which expert: index maths on the device, with a NumPy twin.

Pairs (token, choice) are sorted by expert, and each expert's group starts at a tile of its own, so that every tile has
one expert; experts that nobody chose have no tile.
"""

import jax
import jax.numpy as jnp
import numpy as np


def tile_rows(pairs: int, num_experts: int) -> int:
    """Rows of a tile on a CPU: a power of two from 8, near the mean group.

    Small tiles cost as much as their expert's weights, so most groups should be one tile; large ones cost padding.
    """
    mean = -(-pairs // num_experts)
    return min(128, max(8, 1 << (mean - 1).bit_length()))


def tile_tokens(pairs: int, num_experts: int) -> int:
    """Tokens of a tile on a GPU: a power of two of 8 to 128, from twice the mean group.

    Padding is cheap there and a second tile reads its expert's weights again, so nearly all groups should be one tile.
    """
    return tile_rows(2 * pairs, num_experts)


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
    # By comparing with all: a binary search is a loop of kernels on a GPU.
    tile_experts = jnp.sum((last <= jnp.arange(most, dtype=jnp.int32)[:, None]).astype(jnp.int32), axis=1)
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
