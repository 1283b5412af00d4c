"""Re-layout of KV between shardings: pools filled on one side, moved run by run, read back on the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import ConfigError
from glmjax.sharding.cp import local_position, owner
from glmjax.sharding.relayout import KVSharding, relayout

shardings = st.builds(
    lambda ranks, interleave, blocks: KVSharding(ranks, interleave, interleave * blocks),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
)


def table_for(sharding, tokens, rng):
    """Block ids for so many tokens, all in a row but for two that changed places."""
    entries = -(-tokens // (sharding.block_size * sharding.ranks)) + 1
    table = rng.integers(100) + np.arange(entries)
    swap = rng.integers(entries, size=2)
    table[swap] = table[swap[::-1]]
    return table


def place(sharding, table, position):
    """Rank and slot of a token: the owner's l-th token stands in its l-th place over the table's blocks."""
    local = local_position(position, sharding.ranks, sharding.interleave)
    slot = table[local // sharding.block_size] * sharding.block_size + local % sharding.block_size
    return owner(position, sharding.ranks, sharding.interleave), slot


def run_list(runs):
    return list(
        zip(runs.source_rank, runs.source_slot, runs.target_rank, runs.target_slot, runs.count.tolist(), strict=True)
    )


@given(shardings, shardings, st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_runs_move_every_token_exactly_once_and_cannot_be_joined(source, target, first, length, seed):
    rng, last = np.random.default_rng(seed), first + length
    source_table, target_table = table_for(source, last, rng), table_for(target, last, rng)
    runs = run_list(relayout(source, target, source_table, target_table, first, last))

    moved = [
        (source_rank, source_slot + i, target_rank, target_slot + i)
        for source_rank, source_slot, target_rank, target_slot, count in runs
        for i in range(count)
    ]
    expected = [place(source, source_table, t) + place(target, target_table, t) for t in range(first, last)]
    assert sorted(moved) == sorted(expected)

    ends = {(a, b + count, c, d + count) for a, b, c, d, count in runs}
    assert not ends & {run[:4] for run in runs}


def test_equal_block_interleaves_move_whole_blocks():
    source, target = KVSharding(8, 64, 64), KVSharding(1, 64, 64)
    runs = relayout(source, target, np.array([9, 4]), np.arange(16)[::-1] * 2, 0, 1024)
    assert runs.count.tolist() == [64] * 16
    assert (runs.source_slot % 64 == 0).all() and (runs.target_slot % 64 == 0).all()


def test_same_sharding_moves_one_run_a_rank_where_blocks_follow_each_other():
    round_robin = KVSharding(4, 1, 16)
    runs = relayout(round_robin, round_robin, np.array([2, 3, 4]), np.array([7, 8, 9]), 0, 192)
    assert run_list(runs) == [(rank, 32, rank, 112, 48) for rank in range(4)]


def test_one_rank_to_one_rank_is_a_single_run_whatever_the_interleaves():
    runs = relayout(KVSharding(1, 1, 16), KVSharding(1, 48, 64), np.array([5, 6, 7, 8]), np.array([3]), 3, 50)
    assert run_list(runs) == [(0, 83, 0, 195, 47)]


def test_slots_that_go_on_from_one_rank_to_the_next_are_two_runs():
    runs = relayout(KVSharding(2, 4, 4), KVSharding(1, 4, 4), np.array([6, 5]), np.array([0, 4, 3]), 4, 12)
    assert run_list(runs) == [(0, 20, 0, 12, 4), (1, 24, 0, 16, 4)]


def test_runs_are_sorted_by_source_rank_target_rank_and_source_slot():
    runs = relayout(KVSharding(2, 1, 4), KVSharding(4, 1, 4), np.array([3, 0, 2, 1]), np.array([1, 0]), 0, 32)
    keys = list(zip(runs.source_rank, runs.target_rank, runs.source_slot, strict=True))
    assert keys == sorted(keys)
    assert {key[:2] for key in keys} == {(0, 0), (0, 2), (1, 1), (1, 3)}


def test_grain_is_the_interleave_or_the_whole_block_of_a_single_rank():
    assert (KVSharding(8, 4, 64).grain, KVSharding(1, 4, 64).grain) == (4, 64)


@pytest.mark.parametrize("at", [0, 5, 64])
def test_empty_range_moves_nothing(at):
    runs = relayout(KVSharding(2, 4, 8), KVSharding(4, 8, 16), np.arange(4), np.array([0]), at, at)
    assert len(runs) == 0
    assert runs.count.shape == runs.source_slot.shape == (0,)


def test_columns_are_wide_enough_for_byte_offsets():
    runs = relayout(KVSharding(2, 1, 4), KVSharding(1, 1, 4), np.array([0]), np.arange(2, dtype=np.int32), 0, 8)
    columns = (runs.source_rank, runs.source_slot, runs.target_rank, runs.target_slot, runs.count)
    assert {column.dtype for column in columns} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("first", "last"), [(-1, 4), (5, 4), (0, 17)])
def test_range_outside_the_tables_is_refused(first, last):
    with pytest.raises(ValueError, match=f"<= 16, got first={first} and last={last}"):
        relayout(KVSharding(2, 4, 8), KVSharding(1, 8, 8), np.array([0]), np.arange(3), first, last)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 8), "ranks must be at least 1, got 0"),
        ((2, 1, 0), "block_size must be at least 1, got 0"),
        ((2, 0, 8), "block_size=8, got 0"),
        ((2, 3, 8), "block_size=8, got 3"),
    ],
)
def test_impossible_sharding_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        KVSharding(*values)
