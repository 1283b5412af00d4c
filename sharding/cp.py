"""Who computes which query token and who holds which key, under context parallelism (spec/system.md 2 and 3).

Prefill context parallelism (PCP) splits the new tokens of a request over the ranks in a zig-zag, so that causal work is
even. Decode context parallelism (DCP) deals the KV cache out to the ranks, `interleave` tokens at a time.

One implementation serves the device and the host: JAX arrays, traced or not, give JAX arrays, and NumPy arrays give
NumPy arrays. Degrees and widths are static; lengths, positions and ranks may be traced. A rank is a scalar, as from
``jax.lax.axis_index``, or an array that broadcasts as its function says.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.errors import ConfigError


def array_namespace(*arrays: Any) -> Any:
    """``jax.numpy`` if any of the arrays is JAX's, else ``numpy``."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


NARROW = 8  # tokens of a request that decodes, at most: one and seven drafts


def splits_by_row(tokens: int, ranks: int) -> bool:
    """Whether a rectangle with up to ``tokens`` new tokens a request is split by row, not by token.

    So are those of requests that decode, and what is too short to cut into 2 x ranks.
    """
    return tokens <= NARROW or tokens < 2 * ranks or ranks == 1


def may_gather_keys(tokens: int, ranks: int) -> bool:
    """Whether DCP may bring the keys to the queries of a rectangle with up to ``tokens`` new tokens a request.

    Requests that decode have too few queries for it, and split by row a device has only some of the requests.
    """
    return tokens > NARROW and (ranks == 1 or not splits_by_row(tokens, ranks))


def local_width(max_length: int, ranks: int) -> int:
    """Width that holds a rank's share of any chunk of up to ``max_length`` tokens."""
    return 2 * -(-max_length // (2 * ranks))


def zigzag_positions[A: (jax.Array, np.ndarray)](length: A, ranks: int, rank: A | int, width: int) -> A:
    """The tokens of a prefill chunk that a rank computes: parts ``rank`` and ``2 * ranks - 1 - rank`` of 2 * ranks.

    The parts differ by at most one token. From 64 tokens a rank on, no rank has more than 1.014 times the mean causal
    work (the sum of position + 1 over its tokens, nothing cached) for up to 8 ranks.

    Args:
      length: [...] int32 tokens of the chunk.
      rank: broadcasts against ``length``.
      width: ``local_width`` of the largest length.

    Returns:
      [..., width] int32 offsets within the chunk in ascending order, -1 (last) for padding.
    """
    xp = array_namespace(length, rank)
    length, rank = xp.asarray(length, xp.int32)[..., None], xp.asarray(rank, xp.int32)[..., None]
    front, back = _part_start(rank, length, ranks), _part_start(2 * ranks - 1 - rank, length, ranks)
    front_count = _part_start(rank + 1, length, ranks) - front
    back_count = _part_start(2 * ranks - rank, length, ranks) - back
    column = xp.arange(width, dtype=xp.int32)
    offset = xp.where(column < front_count, front + column, back + column - front_count)
    return xp.where(column < front_count + back_count, offset, -1)


def zigzag_gather_index[A: (jax.Array, np.ndarray)](length: A, ranks: int, width: int) -> A:
    """Which token of the chunk stands at each place of the all-gathered shares, rank-major.

    Returns:
      [..., ranks * width] int32 offsets for lengths [...], -1 for padding.
    """
    xp = array_namespace(length)
    every_rank = xp.arange(ranks, dtype=xp.int32)
    positions = zigzag_positions(length[..., None], ranks, every_rank, width)
    return positions.reshape(*positions.shape[:-2], ranks * width)


def restore_index[A: (jax.Array, np.ndarray)](length: A, ranks: int, width: int, total: int) -> A:
    """Where each token of the chunk stands in the all-gathered shares: the inverse of ``zigzag_gather_index``.

    For rows x of [R, width, ...] on each rank, ``all_gather(x, axis_name, axis=1, tiled=True)`` is what it indexes.

    Args:
      length: [...] int32 tokens of the chunk, each at most ``total``.

    Returns:
      [..., total] int32 places in ranks * width; 0 for offsets from ``length`` on.
    """
    xp = array_namespace(length)
    length = xp.asarray(length, xp.int32)[..., None]
    offset = xp.arange(total, dtype=xp.int32)
    starts = _part_start(xp.arange(1, 2 * ranks, dtype=xp.int32), length, ranks)
    part = xp.sum(offset[:, None] >= starts[..., None, :], axis=-1, dtype=xp.int32)
    rank = xp.minimum(part, 2 * ranks - 1 - part)
    front_count = _part_start(rank + 1, length, ranks) - _part_start(rank, length, ranks)
    column = offset - _part_start(part, length, ranks) + xp.where(part >= ranks, front_count, 0)
    return xp.where(offset < length, rank * width + column, 0)


def _part_start(part: Any, length: Any, ranks: int) -> Any:
    """First token of a zig-zag part, 0 .. 2 * ranks; its arguments broadcast.

    The first `extra` parts get one token more or, when those are more than half, the first of all get one fewer: what
    is uneven is then at early positions, which cost least. That halves the worst imbalance.
    """
    xp = array_namespace(part, length)
    base, extra = length // (2 * ranks), length % (2 * ranks)
    shorter = xp.where(extra > ranks, 2 * ranks - extra, 0)
    return part * base + xp.clip(part - shorter, 0, extra)


def check_interleave(block_size: int, ranks: int, interleave: int) -> None:
    """Refuses an interleave that would cut blocks; a single rank holds every token, whatever it is.

    Raises:
      ConfigError: ``interleave`` is not a positive divisor of ``block_size``.
    """
    if interleave < 1 or (ranks > 1 and block_size % interleave):
        raise ConfigError(f"interleave must be a positive divisor of block_size={block_size}, got {interleave}")


def owner[A: (jax.Array, np.ndarray, int)](position: A, ranks: int, interleave: int) -> A:
    """The DCP rank that holds the KV of a position, any shape."""
    return position // interleave % ranks


def local_position[A: (jax.Array, np.ndarray, int)](position: A, ranks: int, interleave: int) -> A:
    """How many of the owner's positions come before this one, any shape."""
    return position // (interleave * ranks) * interleave + position % interleave


def global_position[A: (jax.Array, np.ndarray, int)](local: A, ranks: int, rank: A | int, interleave: int) -> A:
    """The position that a rank holds as its ``local``-th, any shape; ``rank`` broadcasts."""
    return (local // interleave * ranks + rank) * interleave + local % interleave


def local_length[A: (jax.Array, np.ndarray)](length: A, ranks: int, rank: A | int, interleave: int) -> A:
    """How many of the positions 0 .. length - 1 a rank holds, any shape; ``rank`` broadcasts."""
    xp = array_namespace(length, rank)
    cycle = interleave * ranks
    return length // cycle * interleave + xp.clip(length % cycle - rank * interleave, 0, interleave)


def local_slots[A: (jax.Array, np.ndarray)](
    block_tables: A, positions: A, block_size: int, ranks: int, rank: A | int, interleave: int
) -> A:
    """Slots of positions in a rank's pool.

    Block ids are the same on all ranks: one entry of a table stands for ``block_size * ranks`` tokens, of which each
    rank holds ``block_size``.

    Args:
      block_tables: [R, B] int32.
      positions: [R, ...] int32.
      rank: broadcasts against ``positions``.

    Returns:
      [R, ...] int32; -1 where the rank does not hold the position and for positions outside the table.

    Raises:
      ConfigError: ``interleave`` does not divide ``block_size``.
    """
    check_interleave(block_size, ranks, interleave)
    xp = array_namespace(block_tables, positions, rank)
    positions = xp.asarray(positions, xp.int32)
    entry = positions // (block_size * ranks)
    within = local_position(positions % (block_size * ranks), ranks, interleave)
    flat = xp.clip(entry, 0, block_tables.shape[1] - 1).reshape(positions.shape[0], -1)
    block = xp.take_along_axis(xp.asarray(block_tables, xp.int32), flat, axis=1).reshape(positions.shape)
    held = (positions >= 0) & (entry < block_tables.shape[1]) & (owner(positions, ranks, interleave) == rank)
    return xp.where(held, block * block_size + within, -1)


def gathered_index[A: (jax.Array, np.ndarray, int)](positions: A, ranks: int, interleave: int, shard_rows: int) -> A:
    """Rows of positions, any shape, in the rank-major concatenation of the shards, each padded to ``shard_rows``."""
    return owner(positions, ranks, interleave) * shard_rows + local_position(positions, ranks, interleave)
