"""Which rows move where, for any two shardings: against rows placed one by one, over whole memories."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_case import KINDS, clone, content, noise, peer, same, table_for, write

from glmjax.errors import ConfigError
from glmjax.serving.transfer.interface import INDEX, MLA
from glmjax.serving.transfer.job import Peer
from glmjax.serving.transfer.memory import Region, check_memory, empty_memory
from glmjax.serving.transfer.nixl import HOST, Link, places, reads
from glmjax.serving.transfer.plan import Side, check_side, copy, plan_transfer

BLOCKS = 64  # one token each at least, and the longest range ends at 60


@st.composite
def engines(draw, name):
    interleave = draw(st.sampled_from([1, 2, 4]))
    return peer(
        name,
        dcp=draw(st.sampled_from([1, 2, 3, 8])),
        interleave=interleave,
        block_size=interleave * draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 2)),
    )


@given(engines("p"), engines("d"), st.integers(0, 30), st.integers(1, 30), st.integers(0, 2**31), st.data())
def test_every_token_arrives_at_its_place_and_nothing_else_changes(source, target, first, length, seed, data):
    last = first + length
    from_group, to_group = data.draw(st.integers(0, source.dp - 1)), data.draw(st.integers(0, target.dp - 1))
    table, into = table_for(source, last, BLOCKS, seed), table_for(target, last, BLOCKS, seed + 1, spare=1)
    theirs, mine = noise(source, BLOCKS, seed + 2), noise(target, BLOCKS, seed + 3)
    values, expected = content(source, last, seed + 4), clone(mine)
    write(source, theirs, table, values, range(last), from_group)
    write(target, expected, into, values, range(first, last), to_group)

    plan = plan_transfer(source, Side.of(source, table, from_group), Side.of(target, into, to_group), first, last)
    copy(plan, theirs, mine)
    assert same(mine, expected)
    assert plan.num_bytes == length * (3 * 20 + 2 * 12) == length * source.token_bytes


@given(engines("p"), engines("d"), st.integers(0, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_by_way_of_packed_rows_or_of_a_staging_buffer_is_the_same(source, target, first, length, seed):
    last = first + length
    table, into = table_for(source, last, BLOCKS, seed), table_for(target, last, BLOCKS, seed + 1)
    theirs, mine = noise(source, BLOCKS, seed + 2), noise(target, BLOCKS, seed + 3)
    here, there = Side.of(target, into), Side.of(source, table)
    expected = clone(mine)
    copy(plan_transfer(source, there, here, first, last), theirs, expected)

    entries = -(-last // source.entry_tokens) - first // source.entry_tokens
    one_rank = peer("m", block_size=1)
    single = peer("s", dcp=source.dcp, interleave=source.interleave, block_size=source.block_size)
    for way, between in (
        (Side.packed(first, last), empty_memory(one_rank, length)),
        (there.entries(first, last), empty_memory(single, entries * source.block_size)),
    ):
        result = clone(mine)
        copy(plan_transfer(source, there, way, first, last), theirs, between)
        copy(plan_transfer(source, way, here, first, last), between, result)
        assert same(result, expected)


@given(engines("p"), engines("d"), st.integers(0, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_what_nixl_is_asked_to_read_is_the_plan(source, target, first, length, seed):
    """Carried out here with plain copies of memory, by address."""
    last = first + length
    theirs, mine = noise(source, BLOCKS, seed), noise(target, BLOCKS + 3, seed + 1)
    expected = clone(mine)
    here = Side.of(target, table_for(target, last, BLOCKS, seed + 2), target.dp - 1)
    plan = plan_transfer(source, Side.of(source, table_for(source, last, BLOCKS, seed + 3)), here, first, last)
    copy(plan, theirs, expected)

    slots = [{name: region.slots for name, region in rows.items()} for rows in (theirs, mine)]
    here, there = (
        {name: [copies[0] for copies in each] for name, each in places(rows).items()} for rows in (mine, theirs)
    )
    into, out_of = reads(plan, Peer(source, slots[0], Link("p", HOST, there)), here, slots[1])
    assert len(into) == plan.num_copies and int(into[:, 1].sum()) == plan.num_bytes
    assert np.array_equal(into[:, 1:], out_of[:, 1:])
    for (to, size, _), (at, _, _) in zip(into.tolist(), out_of.tolist(), strict=True):
        ctypes.memmove(to, at, size)
    assert same(mine, expected)


@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (2, 1), (8, 1), (8, 4), (2, 2)])
def test_bytes_are_missing_blocks_times_bytes_per_block(dcp, interleave):
    source, target = peer("p", dcp=8, interleave=4), peer("d", dcp=dcp, interleave=interleave)
    tokens, hit = 8 * 32, 3 * target.entry_tokens
    table, into = table_for(source, tokens, BLOCKS, 0), table_for(target, tokens, 200, 1)
    missing = (len(into) - 3) * dcp  # on all ranks together
    plan = plan_transfer(source, Side.of(source, table), Side.of(target, into), hit, tokens)
    assert plan.num_bytes == missing * target.block_size * (3 * 20 + 2 * 12)
    assert {part.name: part.num_bytes for part in plan.parts} == {
        MLA: missing * target.block_size * 3 * 20,
        INDEX: missing * target.block_size * 2 * 12,
    }


def test_tails_count_by_token():
    source, target = peer("p", dcp=2, interleave=2), peer("d")
    plan = plan_transfer(source, Side.of(source, [3, 1]), Side.of(target, [0, 1, 2]), 5, 11)
    assert plan.num_bytes == 6 * source.token_bytes
    assert plan.num_tokens == 6


def test_whole_blocks_are_one_copy_for_each_layer():
    source, target = peer("p", dcp=8, interleave=4), peer("d")
    plan = plan_transfer(source, Side.of(source, [2, 5]), Side.of(target, list(range(16))[::-1]), 0, 64)
    assert plan.num_copies == 16 * (3 + 2)


def test_round_robin_is_staged_in_few_copies():
    source, target = peer("p", dcp=8, interleave=1), peer("d")
    there = Side.of(source, list(range(8)))
    assert plan_transfer(source, there, Side.of(target, list(range(64))), 0, 256).num_copies == 256 * 5
    assert plan_transfer(source, there, there.entries(0, 256), 0, 256).num_copies == 8 * 5


def test_kinds_of_rows_may_have_tables_of_their_own():
    """With HiSparse MLA rows go to the host pool's pages, index keys to the device's blocks."""
    source, target = peer("p", dcp=2, interleave=4), peer("d")
    tables = {MLA: [9, 8, 7, 6], INDEX: [0, 2, 4, 5]}
    theirs, mine = noise(source, 8, 0), empty_memory(target, 40)
    values, expected = content(source, 15, 1), empty_memory(target, 40)
    write(source, theirs, [5, 2], values, range(15))
    write(target, expected, tables, values, range(15))
    copy(plan_transfer(source, Side.of(source, [5, 2]), Side.of(target, tables), 0, 15), theirs, mine)
    assert same(mine, expected)


@pytest.mark.parametrize(
    ("table", "last", "message"),
    [
        ([1, 2], 9, "2 blocks of 4 tokens do not hold 9 tokens"),
        ([1, 9], 8, r"block ids of mla must be in \[0, 9\), got 1 .. 9"),
        ([-1, 2], 8, r"must be in \[0, 9\), got -1 .. 2"),
        ({MLA: [1]}, 1, "block tables must be given for 'mla' and 'index'"),
    ],
)
def test_tables_that_do_not_hold_the_tokens_are_refused(table, last, message):
    with pytest.raises(ValueError, match=message):
        check_side(Side.of(peer("d"), table), dict.fromkeys(KINDS, 36), last)


def test_blocks_after_the_last_token_need_not_be_there():
    check_side(Side.of(peer("d"), [1, 99]), dict.fromkeys(KINDS, 36), 4)


def test_memory_that_is_not_the_engines_is_refused():
    info = peer("d", dcp=2, interleave=4)
    rows = empty_memory(info, 8)
    check_memory(info, rows)
    with pytest.raises(ConfigError, match=r"region mla of engine d has .* \(2, 3, 20\), not \(2, 4, 20\)"):
        check_memory(peer("d", dcp=2, interleave=4, layers=4), rows)
    with pytest.raises(ConfigError, match="8 slots are no whole blocks of 16"):
        check_memory(peer("d", dcp=2, interleave=4, block_size=16), rows)
    for wrong in (np.zeros((3, 8, 20), np.int8), np.zeros((8, 20), np.uint8), np.zeros((20, 8, 3), np.uint8).T):
        with pytest.raises(ConfigError, match="must be contiguous uint8"):
            Region(MLA, (wrong,))
    with pytest.raises(ConfigError, match="ranks of shapes"):
        Region(MLA, (np.zeros((3, 8, 20), np.uint8), np.zeros((3, 4, 20), np.uint8)))
