"""Where the tokens of a rectangle stand: positions and padding.  Their slots are in test_share.py."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from glmjax.batch import TokenBatch, contiguous_batch

Q = 5
starts_and_lengths = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, Q)), min_size=1, max_size=3)


@given(starts_and_lengths)
def test_positions_count_from_the_start(rows):
    start, length = (jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True))
    zeros = jnp.zeros((len(rows), Q), jnp.int32)
    batch = TokenBatch(zeros, start, length, zeros, block_size=4)
    assert np.asarray(batch.positions).tolist() == [[s + i for i in range(Q)] for s, _ in rows]
    assert np.asarray(batch.valid).tolist() == [[i < n for i in range(Q)] for _, n in rows]


def test_contiguous_batch_starts_every_request_at_zero():
    batch = contiguous_batch(jnp.ones((3, 4), jnp.int32))
    assert np.asarray(batch.positions).tolist() == [[0, 1, 2, 3]] * 3
    assert np.asarray(batch.valid).all()
