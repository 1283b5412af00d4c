"""Rows moved from device to device within a process, beside the same plan carried out on the host."""

import ctypes
import gc
import itertools
import weakref

import jax
import numpy as np
import pytest
from transfer_case import KINDS, clone, content, noise, peer, same, table_for, write
from transfer_on_devices import on_devices, on_host

from glmjax.errors import ConfigError
from glmjax.serving.clock import ManualClock
from glmjax.serving.transfer.device import DeviceWay
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.job import Settings

BLOCKS, TOKENS = 24, 37


class Case:
    """A request of 37 tokens on its way from the devices of one engine to those of another."""

    def __init__(self, prefill, decode, copies=(1, 1), apart=True, rows=None, **settings):
        self.p, self.d = peer("p", **prefill), peer("d", **decode)
        self.rows, self.before = rows or noise(self.p, BLOCKS, 0), noise(self.d, BLOCKS, 1)
        self.values = content(self.p, TOKENS, 2)
        self.table, self.into = table_for(self.p, TOKENS, BLOCKS, 3), table_for(self.d, TOKENS, BLOCKS, 4)
        if rows is None:
            write(self.p, self.rows, self.table, self.values, range(TOKENS))
        self.hub, clock, settings = {}, ManualClock(), Settings(**{"inline": True} | settings)
        self.theirs = on_devices(self.rows, 0, self.p, copies[0])
        self.mine = on_devices(self.before, 4 if apart else 0, self.d, copies[1])
        self.producer = make_connector(self.p, self.theirs, clock, settings, self.hub)
        self.consumer = make_connector(self.d, self.mine, clock, settings, self.hub)
        self.offers = itertools.count()

    def offer(self):
        return self.producer.offer(f"r{next(self.offers)}", self.table, TOKENS)


ONE = {"dcp": 1}
SHARDINGS = [
    (ONE, ONE, (1, 1)),
    ({"dcp": 4, "interleave": 1}, {"dp": 4}, (1, 1)),
    ({"dcp": 4, "interleave": 2}, {"dcp": 2, "interleave": 4}, (1, 2)),
    ({"dcp": 2, "interleave": 4}, {"dcp": 4, "interleave": 4}, (2, 1)),
    (ONE, {"dcp": 2, "dp": 2}, (4, 1)),
    ({"dcp": 2}, ONE, (1, 4)),
]


@pytest.mark.parametrize(("prefill", "decode", "copies"), SHARDINGS)
def test_rows_come_from_device_to_device_as_they_would_by_the_host(prefill, decode, copies):
    case = Case(prefill, decode, copies)
    group, rows = case.d.dp - 1, clone(case.before)
    for first, last in ((8, 20), (TOKENS - 1, TOKENS), (0, TOKENS)):
        fetch = case.consumer.fetch(case.offer(), case.into, first=first, last=last, group=group)
        assert fetch.poll() == "done", fetch.error
        assert fetch.bytes_moved == (last - first) * case.d.token_bytes
        write(case.d, rows, case.into, case.values, range(first, last), group)
        assert same(on_host(case.mine), rows)


def test_both_engines_may_be_on_one_device():
    case = Case(ONE, ONE, apart=False)
    fetch = case.consumer.fetch(case.offer(), case.into, first=5)
    assert fetch.poll() == "done", fetch.error
    rows = clone(case.before)
    write(case.d, rows, case.into, case.values, range(5, TOKENS))
    assert same(on_host(case.mine), rows)


def test_more_tokens_than_a_piece_are_moved_piece_by_piece(monkeypatch):
    monkeypatch.setattr("glmjax.serving.transfer.device.PIECES", (4, 12))
    case = Case({"dcp": 4, "interleave": 1}, {"dcp": 2, "interleave": 2})
    way = DeviceWay(case.theirs, case.mine, case.p.sharding, case.d.sharding)
    assert list(way.pieces(3, TOKENS)) == [(3, 12), (12, 24), (24, 36), (36, TOKENS)]
    fetch = case.consumer.fetch(case.offer(), case.into, first=3)
    assert fetch.poll() == "done", fetch.error
    rows = clone(case.before)
    write(case.d, rows, case.into, case.values, range(3, TOKENS))
    assert same(on_host(case.mine), rows)


def test_fetches_do_not_disturb_each_other_nor_who_writes_to_other_blocks_meanwhile():
    p, scribble = peer("p", dcp=2), jax.jit(lambda stage: tuple(x.at[:, :4].add(1) for x in stage), donate_argnums=0)
    # Each request has a block for itself on either side. Block 0 of the first rank is written to all the time.
    values, theirs = content(p, 8, 5), noise(p, BLOCKS, 0)
    for block in range(1, BLOCKS):
        write(p, theirs, [block], values, range(8))
    case = Case({"dcp": 2}, {"dcp": 4}, rows=theirs, inline=False)
    case.consumer.meet("p")
    rows, fetches = clone(case.before), []
    for block in range(1, BLOCKS):
        offer = case.producer.offer(str(block), [block], 8)
        fetches.append(case.consumer.fetch(offer, [block]))
        write(case.d, rows, [block], values, range(8))
        case.theirs.replace(lambda stage: (scribble(stage), None))
    for fetch in fetches:
        assert fetch.wait(60) == "done", fetch.error
    assert same(on_host(case.mine), rows)


def test_a_program_that_copies_the_stage_is_found_out():
    """Others may read from, and write to, the addresses that it had."""
    case = Case(ONE, ONE)
    with pytest.raises(RuntimeError, match="copied the stage"):
        case.mine.replace(lambda stage: (jax.tree.map(lambda x: x + 0, stage), None))


def fails(stage):
    jax.jit(lambda stage: jax.tree.map(lambda x: x + 1, stage), donate_argnums=0)(stage)
    raise ValueError("out of luck")


def test_a_stage_that_is_lost_or_freed_is_a_transfer_error():
    lost, freed = Case(ONE, ONE), Case(ONE, ONE)
    with pytest.raises(ValueError, match="out of luck"):
        lost.theirs.replace(fails)
    freed.producer.close()
    for case, why in ((lost, "lost"), (freed, "freed")):
        with pytest.raises(TransferError, match=f"stage on the devices is gone: {why}"):
            case.theirs.read(lambda stage: stage)
    fetch = lost.consumer.fetch(lost.offer(), lost.into)
    assert "the stage on the devices is gone: lost" in str(fetch.error)


def test_a_connector_that_is_closed_gives_the_devices_memory_back():
    case = Case(ONE, ONE)
    assert case.consumer.fetch(case.offer(), case.into).poll() == "done"
    arrays = [weakref.ref(x) for memory in (case.theirs, case.mine) for x in memory.read(lambda stage: stage)]
    case.producer.close()
    case.consumer.close()
    gc.collect()
    assert [array() for array in arrays] == [None] * 4


def test_addresses_are_those_of_the_ranks_in_order():
    case = Case({"dcp": 4}, {"dp": 2}, copies=(1, 2))
    arrays = case.theirs.read(lambda stage: stage)
    for kind, array in zip(KINDS, arrays, strict=True):
        places = case.theirs.places(kind)
        assert [len(copies) for copies in places] == [1] * 4
        for rank, ((address, _),) in enumerate(places):
            size = case.rows[kind].ranks[rank].nbytes
            found = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
            assert np.array_equal(found, case.rows[kind].ranks[rank].reshape(-1))
        assert array.shape[1] == 4 * case.theirs[kind].slots
    assert [len(copies) for copies in case.mine.places(KINDS[0])] == [2, 2]


def test_memory_of_two_kinds_does_not_go_together():
    case = Case(ONE, ONE)
    info = peer("h")
    other = make_connector(info, noise(info, BLOCKS, 1), ManualClock(), Settings(inline=True), case.hub)
    fetch = other.fetch(case.offer(), case.into)
    assert "must have the same kv_buffer_device" in str(fetch.error)


def test_connector_jax_moves_host_memory():
    case = Case(ONE, ONE)
    with pytest.raises(ConfigError, match="use kv_buffer_device='host'"):
        make_connector(peer("x", connector="jax"), case.mine, ManualClock())
