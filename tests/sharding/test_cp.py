"""Context-parallel index maths: the zig-zag split over all lengths, ownership against tokens dealt out by hand.

What runs on the device is the same code as on the host, so most tests are NumPy's and some compare a jitted call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from glmjax.errors import ConfigError
from glmjax.sharding.cp import (
    gathered_index,
    global_position,
    local_length,
    local_position,
    local_slots,
    local_width,
    owner,
    restore_index,
    zigzag_gather_index,
    zigzag_positions,
)

LONGEST = 4096
LENGTHS = np.arange(1, LONGEST + 1, dtype=np.int32)
DEGREES = [2, 4, 8]
ranks_of_any_degree = st.sampled_from([1, *DEGREES])


@pytest.fixture(scope="module", params=DEGREES)
def split(request):
    """Degree N and the positions [N, lengths, width] of every rank for every length."""
    ranks = request.param
    every_rank = np.arange(ranks, dtype=np.int32)[:, None]
    return ranks, zigzag_positions(LENGTHS, ranks, every_rank, local_width(LONGEST, ranks))


def zigzag_by_hand(length, ranks):
    """Tokens of each rank, from parts cut one after the other."""
    base, extra = divmod(length, 2 * ranks)
    longer = range(extra) if extra <= ranks else range(2 * ranks - extra, 2 * ranks)
    tokens = iter(range(length))
    parts = [[next(tokens) for _ in range(base + (i in longer))] for i in range(2 * ranks)]
    return [parts[r] + parts[2 * ranks - 1 - r] for r in range(ranks)]


def test_split_covers_every_token_exactly_once(split):
    _, positions = split
    tokens = np.zeros((LONGEST, LONGEST + 1), np.int8)
    for shares in positions:
        np.put_along_axis(tokens, np.where(shares >= 0, shares, LONGEST), 1, axis=1)
    assert (tokens[:, :LONGEST] == (np.arange(LONGEST) < LENGTHS[:, None])).all()
    assert (np.sum(positions >= 0, axis=(0, 2)) == LENGTHS).all()


def test_parts_differ_by_one_token_at_most_and_none_is_empty(split):
    ranks, positions = split
    enough = 2 * ranks <= LENGTHS
    starts = positions[:, enough, 0]
    ends = np.max(positions[:, enough], axis=-1) + 1
    smallest = LENGTHS[enough] // (2 * ranks)
    # Rank r's first token starts part r, its last ends part 2N - 1 - r; where the middle two parts meet is not seen.
    outer = np.concatenate([np.diff(starts, axis=0), -np.diff(ends, axis=0)])
    assert ((outer >= smallest) & (outer <= smallest + 1)).all()
    assert (np.abs(ends[-1] - starts[-1] - 2 * smallest - 1) <= 1).all()


def test_causal_work_is_even_from_64_tokens_a_rank_on(split):
    ranks, positions = split
    work = np.sum(positions[:, 64 * ranks <= LENGTHS] + 1, axis=-1, dtype=np.int64)
    assert (work.max(axis=0) <= 1.014 * work.mean(axis=0)).all()


def test_local_order_is_ascending_and_padding_comes_last(split):
    _, positions = split
    real = positions >= 0
    assert (np.diff(positions, axis=-1)[real[..., 1:]] > 0).all()
    assert (real[..., :-1] | ~real[..., 1:]).all()


def test_local_width_holds_every_share(split):
    ranks, positions = split
    largest = np.sum(positions >= 0, axis=-1).max(axis=0)
    assert (largest <= [local_width(int(length), ranks) for length in LENGTHS]).all()


@given(st.integers(0, 200), ranks_of_any_degree)
def test_split_equals_the_one_by_hand(length, ranks):
    for rank, expected in enumerate(zigzag_by_hand(length, ranks)):
        positions = zigzag_positions(np.array(length), ranks, rank, local_width(length, ranks))
        assert positions[positions >= 0].tolist() == expected


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4), ranks_of_any_degree)
def test_restore_undoes_the_gather(lengths, ranks):
    lengths, width = np.array(lengths), local_width(100, ranks)
    gathered = zigzag_gather_index(lengths, ranks, width)
    places = restore_index(lengths, ranks, width, 100)
    offsets = np.broadcast_to(np.arange(100), places.shape)
    real = offsets < lengths[:, None]
    assert (np.take_along_axis(gathered, places, axis=1)[real] == offsets[real]).all()
    assert ((places >= 0) & (places < ranks * width)).all()


def test_gather_index_is_every_rank_s_positions_in_turn():
    lengths = np.array([[3, 17], [40, 0]])
    gathered = zigzag_gather_index(lengths, 4, 10)
    assert gathered.shape == (2, 2, 40)
    for rank in range(4):
        assert (gathered[..., rank * 10 : rank * 10 + 10] == zigzag_positions(lengths, 4, rank, 10)).all()


@pytest.mark.parametrize("ranks", [1, 8])
def test_zigzag_functions_give_the_same_under_jit(ranks):
    lengths = np.array([0, 1, 2, 15, 16, 17, 25, 31, 33, 64], np.int32)
    width = local_width(64, ranks)
    traced = jax.jit(lambda length, rank: zigzag_positions(length, ranks, rank, width))
    calls = [(traced(lengths, rank), zigzag_positions(lengths, ranks, rank, width)) for rank in range(ranks)]
    for function, static in ((zigzag_gather_index, (ranks, width)), (restore_index, (ranks, width, 64))):
        traced = jax.jit(function, static_argnums=range(1, len(static) + 1))
        calls.append((traced(lengths, *static), function(lengths, *static)))
    for device, host in calls:
        assert isinstance(device, jax.Array) and isinstance(host, np.ndarray)
        assert device.dtype == host.dtype == np.int32
        assert (np.asarray(device) == host).all()


def test_ranks_take_their_tokens_and_the_gathered_rows_are_restored():
    ranks, total = 4, 24
    mesh = jax.make_mesh((ranks,), ("pcp",), devices=jax.devices()[:ranks])
    width = local_width(total, ranks)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P()), out_specs=P("pcp"))
    def round_trip(rows, length):
        mine = zigzag_positions(length, ranks, jax.lax.axis_index("pcp"), width)
        local = jnp.take_along_axis(rows, jnp.maximum(mine, 0), axis=1)
        gathered = jax.lax.all_gather(local, "pcp", axis=1, tiled=True)
        return jnp.take_along_axis(gathered, restore_index(length, ranks, width, total), axis=1)

    lengths = np.array([24, 13, 1])
    rows = np.random.default_rng(0).integers(0, 1000, (3, total))
    restored = np.asarray(round_trip(rows, lengths)).reshape(ranks, 3, total)
    real = np.arange(total) < lengths[:, None]
    assert (restored == rows)[:, real].all()


def dealt(length, ranks, interleave):
    """Positions that each rank holds, in order, from dealing them out one by one."""
    shards = [[] for _ in range(ranks)]
    for position in range(length):
        shards[position // interleave % ranks].append(position)
    return shards


ownership = given(st.integers(0, 100), ranks_of_any_degree, st.sampled_from([1, 2, 3, 8]))


@ownership
def test_owner_and_local_position_are_those_of_the_deal(length, ranks, interleave):
    for rank, shard in enumerate(dealt(length, ranks, interleave)):
        positions = np.array(shard, np.int32)
        assert (owner(positions, ranks, interleave) == rank).all()
        assert local_position(positions, ranks, interleave).tolist() == list(range(len(shard)))


@ownership
def test_local_length_counts_the_deal(length, ranks, interleave):
    expected = [len(shard) for shard in dealt(length, ranks, interleave)]
    assert local_length(np.array(length), ranks, np.arange(ranks), interleave).tolist() == expected


@ownership
def test_global_position_undoes_local_position(length, ranks, interleave):
    positions = np.arange(length)
    local, rank = local_position(positions, ranks, interleave), owner(positions, ranks, interleave)
    assert (global_position(local, ranks, rank, interleave) == positions).all()


@ownership
def test_gathered_index_finds_positions_in_padded_shards(length, ranks, interleave):
    shards = dealt(length, ranks, interleave)
    rows = len(shards[0]) + 3
    gathered = np.array([shard + [-1] * (rows - len(shard)) for shard in shards]).reshape(-1)
    positions = np.arange(length)
    assert (gathered[gathered_index(positions, ranks, interleave, rows)] == positions).all()


def test_ownership_functions_give_the_same_under_jit():
    lengths, local = np.arange(70, dtype=np.int32), np.arange(20, dtype=np.int32)

    def every(lengths, local, rank):
        return (
            owner(lengths, 4, 2),
            local_position(lengths, 4, 2),
            global_position(local, 4, rank, 2),
            local_length(lengths, 4, rank, 2),
            gathered_index(lengths, 4, 2, 30),
        )

    for device, host in zip(jax.jit(every)(lengths, local, 3), every(lengths, local, 3), strict=True):
        assert isinstance(device, jax.Array) and isinstance(host, np.ndarray)
        assert device.dtype == host.dtype == np.int32
        assert (np.asarray(device) == host).all()


@given(ranks_of_any_degree, st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1))
def test_local_slots_fill_each_rank_s_blocks_in_order(ranks, interleave, seed):
    block_size, entries = 4, 3
    tables = np.random.default_rng(seed).permutation(10)[: 2 * entries].reshape(2, entries)
    span = entries * block_size * ranks
    positions = np.broadcast_to(np.arange(span), (2, span))
    for rank, shard in enumerate(dealt(span, ranks, interleave)):
        slots = local_slots(tables, positions, block_size, ranks, rank, interleave)
        in_order = tables[:, :, None] * block_size + np.arange(block_size)
        assert (slots[:, shard] == in_order.reshape(2, -1)).all()
        assert np.sum(slots >= 0) == 2 * len(shard)


def test_positions_outside_the_table_have_no_slot():
    positions = np.array([[-1, -64, 2 * 64, 10_000]])
    for rank in range(8):
        assert (local_slots(np.array([[5, 6]]), positions, 8, 8, rank, 1) == -1).all()


def test_rank_may_differ_by_position():
    positions = np.arange(24).reshape(1, 4, 6)
    slots = local_slots(np.array([[2, 0, 1]]), positions, 4, 2, owner(positions, 2, 4), 4)
    assert slots.shape == (1, 4, 6)
    assert slots.reshape(-1, 2, 4)[:, 0].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_local_slots_give_the_same_under_jit():
    tables = np.array([[3, 1, 4], [0, 2, 5]], np.int32)
    positions = np.arange(-8, 2 * 56 - 8, dtype=np.int32).reshape(2, 7, 8)
    traced = jax.jit(local_slots, static_argnums=(2, 3, 5))
    for rank in range(4):
        device, host = traced(tables, positions, 4, 4, rank, 2), local_slots(tables, positions, 4, 4, rank, 2)
        assert isinstance(host, np.ndarray) and device.dtype == host.dtype == np.int32
        assert (np.asarray(device) == host).all()


@pytest.mark.parametrize("interleave", [0, 48, 128])
def test_interleave_that_cuts_blocks_is_refused(interleave):
    with pytest.raises(ConfigError, match=f"block_size=64, got {interleave}"):
        local_slots(np.array([[0]]), np.array([[0]]), 64, 2, 0, interleave)


def test_one_rank_takes_any_interleave():
    assert local_slots(np.array([[7]]), np.array([[0, 63]]), 64, 1, 0, 48).tolist() == [[448, 511]]
