"""Which tile of tokens goes to which expert: index maths on the device, with a NumPy twin.

Pairs (token, choice) are sorted by expert, and each expert's group starts at a tile of its own, so that every tile has
one expert; experts that nobody chose have no tile.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

SMALL_GROUP = 8
MOST_ROWS = 160  # of a tile on a CPU
SPREAD = 1.2  # standard deviations: seven of eight groups are no larger, if every expert is as likely


def tile_rows(pairs: int, num_experts: int, *, in_place: bool = False) -> int:
    """Rows of a tile on a CPU: 2 or 4 for small groups if such tiles read weights in place, else a multiple of 8.

    A tile in place costs by its rows and little for its weights, which for an expert's second tile are in the cache.
    Else padding costs as much as rows do, and a small tile as much as its expert's weights. So most groups, of random
    sizes about the mean, should fill one tile, or a few if they are large.
    """
    mean = pairs / num_experts
    if in_place and mean <= SMALL_GROUP:
        return 2 if mean <= SMALL_GROUP / 2 else 4
    large = mean + SPREAD * math.sqrt(mean)
    tiles = math.ceil(large / MOST_ROWS)
    return 8 * max(1, math.ceil(large / (8 * tiles)))


def tile_tokens(pairs: int, num_experts: int) -> int:
    """Tokens of a tile on a GPU: a power of two of 8 to 128, from twice the mean group.

    Padding is cheap there and a second tile reads its expert's weights again, so nearly all groups should be one tile.
    """
    twice_mean = -(-2 * pairs // num_experts)
    return min(128, max(8, 1 << (twice_mean - 1).bit_length()))


def group_by_expert(
    expert_ids: jax.Array, num_experts: int, tile: int, at_once: int = 1
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Places pairs so that each expert's pairs stand together, in order, from the start of a tile.

    Args:
      expert_ids: [P] int32, -1 for pairs to skip.
      tile: rows of a tile.
      at_once: max tiles is a multiple of it.

    Returns:
      place of each pair [P] int32 (out of range for skipped ones), expert of each tile [max tiles] int32, number of
      tiles in use, and max tiles.
    """
    pairs = expert_ids.shape[0]
    most = (pairs + min(num_experts, pairs) * (tile - 1)) // tile  # the worst routing
    most += -most % at_once
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
