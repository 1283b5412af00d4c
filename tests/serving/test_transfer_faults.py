"""Slow reads, lost messages, leases that run out, requests given up: right rows or an error, and nothing is left."""

import numpy as np
import pytest
from transfer_case import clone, content, same, write
from transfer_pair import BLOCKS, Pair

from glmjax.serving.blocks import BlockPool
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.local import LocalConnector


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
