"""``jax.lax.ragged_all_to_all``, which XLA cannot do on a CPU, told by its documentation and done by an all-gather.

What is against the documentation (a slice beyond its array, sizes of sender and receiver that differ, a row written
twice) fills the result with NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Takes what the real one takes, inside ``shard_map``; rows are floats."""
    slices = jnp.stack([input_offsets, send_sizes, output_offsets, recv_sizes])
    operands, slices = (jax.lax.all_gather(x, axis_name) for x in (operand, slices))
    return received(jnp, operands, output, slices, jax.lax.axis_index(axis_name))


def received(xp, operands, output, slices, rank):
    """What one rank has afterwards: [M, D].

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      operands: [W, N, D] of all ranks; output: [M, D] of this one.
      slices: [W, 4, W] of all ranks: input offsets, send sizes, output offsets and receive sizes.
    """
    (ranks, sent_rows), room = operands.shape[:2], len(output)
    row, result, writers, right = xp.arange(room), output, 0, True
    for sender in range(ranks):
        start, size, target = (slices[sender, i, rank] for i in range(3))
        inside = row - target
        here = (inside >= 0) & (inside < size)
        result = xp.where(here[:, None], operands[sender][xp.clip(start + inside, 0, sent_rows - 1)], result)
        writers = writers + here
        right &= (size == slices[rank, 3, sender]) & (start + size <= sent_rows) & (target + size <= room)
    return xp.where(right & xp.all(writers <= 1), result, np.nan)
