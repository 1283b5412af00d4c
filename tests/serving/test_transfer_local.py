"""The verbs of a connector and all that can go wrong with them, in one process and on a clock that stands still."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transfer_case import clone, content, noise, peer, same, table_for, write

from glmjax.errors import ConfigError
from glmjax.serving.blocks import BlockPool
from glmjax.serving.clock import Clock, ManualClock
from glmjax.serving.transfer.device import move_rows
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.local import LocalConnector

TOKENS = 37
BLOCKS = 24
PREFILL = {"dcp": 4, "interleave": 2}


class Pair:
    """Two engines with random memories, and a request of 37 tokens in the first."""

    def __init__(self, prefill=PREFILL, decode=None, consumer=LocalConnector, **settings):
        self.clock, self.hub = ManualClock(), {}
        self.settings = Settings(**{"inline": True, "piece_bytes": 1} | settings)
        self.p, self.d = peer("p", **prefill), peer("d", **decode or {})
        self.rows, self.mine = noise(self.p, BLOCKS, 0), noise(self.d, BLOCKS, 1)
        self.producer = make_connector(self.p, self.rows, self.clock, self.settings, self.hub)
        self.consumer = consumer(self.d, self.mine, self.clock, self.settings, self.hub)
        self.values = content(self.p, TOKENS, 2)
        self.table, self.into = table_for(self.p, TOKENS, BLOCKS, 3), table_for(self.d, TOKENS, BLOCKS, 4)
        write(self.p, self.rows, self.table, self.values, range(TOKENS))
        self.before = clone(self.mine)

    def offer(self, name="r"):
        return self.producer.offer(name, self.table, TOKENS)

    def expected(self, first=0, last=TOKENS):
        rows = clone(self.before)
        write(self.d, rows, self.into, self.values, range(first, last))
        return rows

    def ends(self):
        for connector in (self.producer, self.consumer):
            connector.check()
        return [(lease.request_id, lease.state) for lease in self.producer.collect()]

    def refused(self, fetch, message):
        """Nothing was moved, the message is clear, and the producer holds nothing after its lease."""
        assert fetch.poll() == "failed"
        assert isinstance(fetch.error, TransferError)
        assert message in str(fetch.error), fetch.error
        assert fetch.bytes_moved == 0
        assert same(self.mine, self.before)
        self.nothing_is_left()

    def nothing_is_left(self):
        self.clock.advance(self.settings.lease_seconds)
        self.ends()
        assert self.producer.held() == []
        assert self.consumer.stats()["fetches_running"] == 0


def test_rows_are_fetched_and_the_lease_ends():
    pair = Pair()
    offer = pair.offer()
    assert (offer.engine_id, offer.num_tokens, offer.dcp, offer.lease_seconds) == ("p", TOKENS, 4, 30.0)
    fetch = pair.consumer.fetch(offer, pair.into)
    assert (fetch.poll(), fetch.error) == ("done", None)
    assert same(pair.mine, pair.expected())
    assert fetch.bytes_moved == TOKENS * pair.p.token_bytes
    assert pair.ends() == [("r", "done")]
    assert pair.producer.stats()["leases_done"] == 1
    assert pair.consumer.stats()["bytes_fetched"] == fetch.bytes_moved


@given(
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, TOKENS),
    st.integers(0, 2),
)
def test_any_sharding_to_any_other_behind_any_prefix(dcp, interleave, to_dcp, to_interleave, first, group):
    pair = Pair({"dcp": dcp, "interleave": interleave}, {"dcp": to_dcp, "interleave": to_interleave, "dp": 3})
    rows = clone(pair.before)
    write(pair.d, rows, pair.into, pair.values, range(first, TOKENS), group)
    fetch = pair.consumer.fetch(pair.offer(), pair.into, first=first, group=group)
    assert fetch.poll() == "done", fetch.error
    assert same(pair.mine, rows)
    assert fetch.bytes_moved == (TOKENS - first) * pair.d.token_bytes
    assert pair.ends() == [("r", "done")]


def test_all_here_already_moves_nothing_and_frees_the_producer():
    pair = Pair(decode={"kv_cache_dtype": "float32"})  # not even hands are shaken
    fetch = pair.consumer.fetch(pair.offer(), pair.into, first=TOKENS)
    assert (fetch.poll(), fetch.bytes_moved) == ("done", 0)
    assert same(pair.mine, pair.before)
    assert pair.ends() == [("r", "done")]


def test_chunks_are_fetched_under_one_lease():
    pair = Pair()
    offer = pair.offer()
    for first, last in ((0, 11), (11, 12), (12, TOKENS)):
        assert pair.ends() == []
        fetch = pair.consumer.fetch(offer, pair.into, first=first, last=last, final=last == TOKENS)
        assert fetch.poll() == "done", fetch.error
        assert same(pair.mine, pair.expected(0, last))
    assert pair.ends() == [("r", "done")]


def test_without_a_thread_of_its_own_a_fetch_would_block():
    pair = Pair(inline=False, timeout=60.0)
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    assert fetch.wait(60) == "done", fetch.error
    assert same(pair.mine, pair.expected())
    pair.consumer.close()


OTHER = [("kv_cache_dtype", "bfloat16"), ("model", "large"), ("speculation", False), ("glmjax_version", "9")]


@pytest.mark.parametrize(("field", "value"), OTHER)
def test_another_kind_of_engine_is_refused_before_any_byte_moves(field, value):
    pair = Pair(decode={field: value})
    message = f"engine d cannot exchange KV with p: {field} is {value!r} there and {getattr(pair.p, field)!r} here"
    pair.refused(pair.consumer.fetch(pair.offer(), pair.into), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "never"}, "request 'never' is not on offer: its lease is unknown"),
        ({"engine_id": "gone"}, "no engine gone in this process"),
        ({"blocks": (0, 1, 2, 3, 4)}, "is offered as"),
        ({"num_tokens": TOKENS - 1}, "is offered as"),
        ({"group": 1}, "is offered as"),
        ({"dcp": 1}, "is offered as"),
    ],
)
def test_an_offer_that_the_producer_did_not_make_is_refused(change, message):
    """It has passed through a client: changed block ids would read other requests' rows."""
    pair = Pair()
    pair.refused(pair.consumer.fetch(dataclasses.replace(pair.offer(), **change), pair.into), message)


def test_a_producer_that_was_restarted_is_another():
    pair = Pair()
    offer = pair.offer()
    assert pair.consumer.fetch(offer, pair.into, last=1, final=False).poll() == "done"
    pair.before = clone(pair.mine)
    pair.producer.close()
    assert pair.ends() == [("r", "failed")]
    again = make_connector(peer("p2", **PREFILL), pair.rows, pair.clock, pair.settings, pair.hub)
    pair.hub["p"] = again  # at the old one's address
    pair.refused(pair.consumer.fetch(offer, pair.into), "engine p is not here, but p2: restarted?")


def test_a_lease_that_has_expired_is_not_read():
    pair = Pair()
    offer = pair.offer()
    pair.clock.advance(30)
    pair.refused(pair.consumer.fetch(offer, pair.into), "its lease is expired")


def test_heartbeats_keep_a_waiting_request():
    pair = Pair()
    offer = pair.offer()
    for _ in range(5):
        pair.clock.advance(29)
        pair.consumer.heartbeat(offer)
        assert pair.ends() == []
    assert pair.consumer.fetch(offer, pair.into).poll() == "done"


class Slow(LocalConnector):
    """Takes some time for every piece, and some before it tells; others go on meanwhile."""

    piece = after = 0.0

    def meanwhile(self):
        pass

    def _read(self, job):
        guard, check = job.guard, job.guard.check

        def slowly():
            self.clock.advance(self.piece)
            self.meanwhile()
            check()

        guard.check = slowly
        super()._read(job)
        self.clock.advance(self.after)
        self.meanwhile()


def test_a_slow_fetch_keeps_its_lease_alive():
    pair = Pair(consumer=Slow, timeout=1e6)
    pair.consumer.piece = 25.0
    assert pair.consumer.fetch(pair.offer(), pair.into).poll() == "done"
    assert pair.clock.monotonic() > 50
    assert same(pair.mine, pair.expected())
    assert pair.ends() == [("r", "done")]


def test_rows_read_after_the_lease_are_not_used():
    pair = Pair(consumer=Slow, timeout=1e6)
    pair.consumer.after = 30.0
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    assert fetch.poll() == "failed"
    assert "the lease ended (expired) before all was read" in str(fetch.error)
    assert pair.ends() == [("r", "expired")]


def test_a_lease_lost_in_the_middle_ends_the_fetch():
    pair = Pair(consumer=Slow, timeout=1e6)
    pair.consumer.piece = 31.0
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    assert fetch.poll() == "failed"
    assert "the lease ended (expired) while it was read" in str(fetch.error)


def test_a_fetch_ends_in_bounded_time():
    pair = Pair(consumer=Slow, timeout=40.0)
    pair.consumer.piece = 25.0
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    assert (fetch.poll(), str(fetch.error)) == ("failed", "the fetch took too long")
    assert pair.ends() == [("r", "failed")]


class Deaf(LocalConnector):
    """Loses messages of the kinds named."""

    lost = ()

    def _call(self, engine_id, host, port, message):
        if message["verb"] in self.lost:
            raise TransferError("no answer")
        return super()._call(engine_id, host, port, message)


def test_a_lost_last_message_costs_the_lease_and_not_the_rows():
    pair = Pair(consumer=Deaf)
    pair.consumer.lost = ("done",)
    assert pair.consumer.fetch(pair.offer(), pair.into).poll() == "done"
    assert same(pair.mine, pair.expected())
    assert pair.ends() == []
    pair.clock.advance(30)
    assert pair.ends() == [("r", "expired")]


class DeafAndSlow(Deaf, Slow):
    pass


def test_lost_heartbeats_are_borne_while_the_lease_lasts():
    pair = Pair(consumer=DeafAndSlow, timeout=1e6)
    pair.consumer.lost, pair.consumer.piece = ("heartbeat",), 6.0
    fetch = pair.consumer.fetch(pair.offer(), pair.into)  # three pieces, 18 of 30 seconds
    assert fetch.poll() == "done", fetch.error
    pair.consumer.piece = 16.0
    fetch = pair.consumer.fetch(pair.offer("s"), pair.into)
    assert (fetch.poll(), str(fetch.error)) == ("failed", "the lease could not be extended: no answer")


class Cancelling(LocalConnector):
    def _read(self, job):
        job.fetch.cancel()
        super()._read(job)


def test_a_cancelled_fetch_frees_both_sides():
    pair = Pair(consumer=Cancelling)
    pair.refused(pair.consumer.fetch(pair.offer(), pair.into), "the fetch was cancelled")
    assert pair.producer.stats()["leases_failed"] == 1


class Broken(LocalConnector):
    def _read(self, job):
        raise ZeroDivisionError("a fault of ours")


def test_whatever_fails_is_one_kind_of_error():
    pair = Pair(consumer=Broken)
    fetch = pair.consumer.fetch(pair.offer(), pair.into)
    pair.refused(fetch, "ZeroDivisionError: a fault of ours")
    assert isinstance(fetch.error.__cause__, ZeroDivisionError)


def test_done_failed_and_withdraw_free_the_blocks():
    pair = Pair()
    done, failed, withdrawn, kept = (pair.offer(name) for name in "abcd")
    for _ in range(2):  # a second time is harmless
        pair.consumer.done(done)
        pair.consumer.failed(failed, "aborted")
    pair.consumer.done(dataclasses.replace(done, engine_id="gone"))
    assert pair.producer.withdraw(withdrawn.request_id)
    assert pair.ends() == [("a", "done"), ("b", "failed"), ("c", "failed")]
    assert pair.producer.held() == [kept.blocks]


def test_one_that_is_read_cannot_be_withdrawn():
    pair = Pair()
    offer = pair.offer()
    pair.consumer.fetch(offer, pair.into, last=4, final=False)
    assert not pair.producer.withdraw("r")
    assert pair.consumer.fetch(offer, pair.into, first=4).poll() == "done"
    assert not pair.producer.withdraw("r")


def test_arguments_of_ones_own_are_errors_at_once():
    pair = Pair(decode={"dp": 2})
    offer = pair.offer()
    for arguments, message in (
        ({"last": TOKENS + 1}, "within 0 .. 37, got 0 .. 38"),
        ({"first": 5, "last": 4}, "got 5 .. 4"),
        ({"blocks": pair.into[:-1]}, "do not hold 37 tokens"),
        ({"blocks": [BLOCKS] * 10}, "block ids of mla must be in"),
        ({"group": 2}, r"group must be in \[0, 2\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.consumer.fetch(offer, arguments.pop("blocks", pair.into), **arguments)
    for arguments, message in (
        (("s", pair.table, 97), "do not hold 97 tokens"),
        (("s", [BLOCKS], 1), "block ids of mla must be in"),
        (("s", pair.table, TOKENS, 1), r"group must be in \[0, 1\)"),
        (("r", pair.table, TOKENS), "was offered before"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.producer.offer(*arguments)
    assert pair.producer.held() == [offer.blocks]


def test_closing_is_final_and_leaves_nothing():
    pair = Pair(inline=False)
    offer = pair.offer()
    pair.consumer.close()
    with pytest.raises(ValueError, match="is closed"):
        pair.consumer.fetch(offer, pair.into)
    pair.producer.close()
    pair.producer.close()
    assert pair.ends() == [("r", "failed")]
    with pytest.raises(ValueError, match="is closed"):
        pair.offer("s")
    assert pair.hub == {}


def test_unknown_kinds_are_refused():
    pair = Pair()
    with pytest.raises(ConfigError, match="connector must be one of local, nixl, jax, got 'carrier pigeon'"):
        make_connector(peer("x", connector="carrier pigeon"), pair.mine, pair.clock)
    with pytest.raises(ConfigError, match="connector must be 'local' for this engine, got 'jax'"):
        LocalConnector(peer("x", connector="jax"), pair.mine, pair.clock, pair.settings, {})


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_requests_with_faults_leave_right_rows_or_errors_and_no_blocks(seed):
    """Messages lost, leases run out, requests aborted, in two block pools that must come out even."""
    rng = np.random.default_rng(seed)
    pair = Pair(consumer=DeafAndSlow, decode={"dcp": 2, "interleave": 1}, timeout=200.0)
    given_out, taken = BlockPool(BLOCKS, pair.p.block_size), BlockPool(BLOCKS, pair.d.block_size)
    held, outcomes = {}, set()

    def free():
        for lease in pair.producer.collect():
            given_out.release(held.pop(lease.request_id))
            for rank in (rank for region in pair.rows.values() for rank in region.ranks):
                for block in lease.blocks:  # the next request's rows
                    rank[:, block * pair.p.block_size : (block + 1) * pair.p.block_size] = rng.integers(256)

    pair.consumer.meanwhile = free
    for number in range(100):
        tokens = int(rng.integers(1, 70))
        while given_out.free_blocks < 3:
            pair.clock.advance(10)
            free()
        name, blocks = str(number), given_out.allocate(-(-tokens // pair.p.entry_tokens))
        held[name] = blocks
        values = content(pair.p, tokens, number)
        write(pair.p, pair.rows, blocks, values, range(tokens))
        offer = pair.producer.offer(name, blocks, tokens)
        pair.clock.advance(rng.choice([0, 0, 0, 31]))
        free()
        consumer = pair.consumer
        consumer.lost = [verb for verb in ("hello", "begin", "heartbeat", "done", "failed") if rng.random() < 0.1]
        consumer.piece, consumer.after = rng.choice([0, 0, 7, 29, 31]), rng.choice([0, 0, 29, 31])
        into = taken.allocate(-(-tokens // pair.d.entry_tokens))
        expected = clone(pair.mine)
        write(pair.d, expected, into, values, range(tokens))
        fetch = consumer.fetch(offer, into)
        outcomes.add(fetch.poll())
        assert fetch.poll() == "failed" or same(pair.mine, expected)
        taken.release(into)
        free()
        pair.producer.check()
        given_out.check(held.values())
    pair.clock.advance(31)
    free()
    given_out.check([])
    taken.check([])
    assert outcomes == {"done", "failed"}


@pytest.mark.parametrize(("dcp", "to"), [(4, 4), (4, 2), (1, 4), (2, 1)])
def test_rows_go_from_mesh_to_mesh(dcp, to):
    """Token-sharded rows to another order on other devices, without the host."""
    devices = jax.devices()
    source = NamedSharding(Mesh(np.array(devices[:dcp]), ("dcp",)), PartitionSpec(None, "dcp"))
    target = NamedSharding(Mesh(np.array(devices[4 : 4 + to]), ("ranks",)), PartitionSpec(None, "ranks"))
    rows = np.random.default_rng(0).integers(0, 256, (3, 32, 20), np.uint8)
    slots = np.random.default_rng(1).permutation(32)[:16].astype(np.int32)
    moved = move_rows(jax.device_put(rows, source), slots, target)
    assert moved.sharding == target
    assert np.array_equal(np.asarray(moved), rows[:, slots])


def test_the_real_clock_runs_too():
    with contextlib.closing(make_connector(peer("x"), noise(peer("x"), 2, 0), Clock())) as connector:
        connector.offer("r", [0], 4)
        assert connector.collect() == ()
        connector.check()
