"""Where the tokens of a rectangle stand: positions, padding and slots."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from glmjax.batch import TokenBatch, contiguous_batch, slots_numpy

BLOCKS, WIDTH, Q = 12, 4, 5


@st.composite
def batches(draw):
    """Two requests with blocks of their own, anywhere in the pool."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    tables = np.array(draw(st.permutations(range(BLOCKS))))[: 2 * WIDTH].reshape(2, WIDTH)
    length = np.array([draw(st.integers(0, min(Q, WIDTH * block_size))) for _ in range(2)])
    start = np.array([draw(st.integers(0, WIDTH * block_size - n)) for n in length])
    arrays = (jnp.asarray(x, jnp.int32) for x in (np.zeros((2, Q)), start, length, tables))
    return TokenBatch(*arrays, block_size)


@given(batches())
def test_write_slots_equal_the_twin_and_skip_padding(batch):
    slots, tables = np.asarray(batch.write_slots), np.asarray(batch.block_tables)
    for r in range(2):
        start, length = int(batch.start[r]), int(batch.length[r])
        expected = slots_numpy(tables[r], np.arange(start, start + length), batch.block_size)
        assert slots[r, :length].tolist() == expected.tolist()
        assert (slots[r, length:] == -1).all()


@given(batches())
def test_no_two_tokens_share_a_slot(batch):
    slots = np.asarray(batch.write_slots)
    used = slots[slots >= 0].tolist()
    assert len(set(used)) == len(used)


@given(batches())
def test_every_position_has_a_slot_of_the_requests_own_blocks(batch):
    positions = np.arange(WIDTH * batch.block_size)
    slots = np.asarray(batch.slots(jnp.asarray(np.stack([positions, positions]))))
    for r in range(2):
        own = np.asarray(batch.block_tables)[r, :, None] * batch.block_size + np.arange(batch.block_size)
        assert slots[r].tolist() == own.reshape(-1).tolist()


@given(batches())
def test_positions_count_from_the_start(batch):
    assert (np.asarray(batch.positions) == np.asarray(batch.start)[:, None] + np.arange(Q)).all()
    assert (np.asarray(batch.valid).sum(axis=1) == np.asarray(batch.length)).all()


def test_contiguous_batch_lays_requests_one_after_another():
    batch = contiguous_batch(jnp.ones((3, 4), jnp.int32))
    assert np.asarray(batch.write_slots).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert np.asarray(batch.positions).tolist() == [[0, 1, 2, 3]] * 3
