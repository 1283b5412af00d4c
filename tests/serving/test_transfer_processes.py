"""KV moved between two real processes by each transport, and peers that are wrong, slow, stuck or dead."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from transfer_case import clone, content, noise, peer, same, table_for, write
from transfer_on_devices import on_devices, on_host

from glmjax.serving.clock import Clock
from glmjax.serving.transfer import job as transfer_job
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.params import from_params, to_params

WORKER = Path(__file__).parents[1] / "transfer_worker.py"
WAIT = 15
BLOCKS = 64

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="nixl is not installed: pip install --no-deps nixl-cu12==1.5.1"
)
TRANSPORTS = [pytest.param("nixl", marks=needs_nixl), "jax"]
WIDE = {"mla_row_bytes": 65536}  # 3 layers: a megabyte for 5 tokens


class Worker:
    """The process that offers, and what it says."""

    def __init__(self, kind, settings=None, on_device=False, **engine):
        description = {"engine_id": f"p-{os.urandom(4).hex()}", "connector": kind, **engine}
        job = {"peer": description, "blocks": BLOCKS, "settings": settings or {}, "on_device": on_device}
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(WORKER.parents[1])}
        self.info = peer(**description)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._said = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.next("ready")

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith("@"):
                self._said.put(json.loads(line[1:]))

    def next(self, key):
        message = self._said.get(timeout=WAIT)
        assert key in message, message
        return message

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def offer(self, name, tokens, seed, table=None):
        self.ask(name=name, tokens=tokens, seed=seed, table=table)
        return from_params(self.next("offer")["offer"])

    def leave(self):
        self.process.stdin.close()
        last = self.next("held")
        assert self.process.wait(WAIT) == 0
        return last

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT)


@contextlib.contextmanager
def pair(kind, prefill=None, decode=None, blocks=BLOCKS * 8, **settings):
    """A worker and a connector of this process."""
    limits = {"call_timeout": 2.0, "timeout": 20.0} | settings
    worker = Worker(kind, limits, **prefill or {})
    connector = None
    try:
        info = peer(f"d-{os.urandom(4).hex()}", connector=kind, **decode or {})
        connector = make_connector(info, noise(info, blocks, 1), Clock(), Settings(**limits))
        yield worker, connector
    finally:
        worker.kill()
        if connector is not None:
            connector.close()
            connector.check()
            assert connector.stats()["fetches_running"] == 0


def fetched(worker, connector, offer, seed, first=0):
    """Fetches, and checks that every row is where it should be and no other byte has changed."""
    info = connector.info
    into = table_for(info, offer.num_tokens, connector.rows["mla"].slots // info.block_size, seed + 100)
    expected = clone(connector.rows)
    write(info, expected, into, content(worker.info, offer.num_tokens, seed), range(first, offer.num_tokens))
    fetch = connector.fetch(offer, into, first=first)
    assert fetch.wait(WAIT) == "done", fetch.error
    assert fetch.bytes_moved == (offer.num_tokens - first) * info.token_bytes
    assert same(connector.rows, expected)


def refused(fetch, message, within):
    start = time.monotonic()
    assert fetch.wait(WAIT) == "failed"
    assert time.monotonic() - start < within
    assert isinstance(fetch.error, TransferError)
    assert message in str(fetch.error), fetch.error


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"dcp": 8, "interleave": 4}, {}),
        ({"dcp": 8, "interleave": 1}, {}),
        ({"dcp": 8, "interleave": 2}, {"dcp": 2, "interleave": 1, "block_size": 8}),
        ({}, {"dcp": 4, "interleave": 1}),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 64 << 20])
def test_rows_move_between_processes(kind, prefill, decode, piece_bytes):
    with pair(kind, prefill, decode, piece_bytes=piece_bytes) as (worker, connector):
        for seed, (tokens, first) in enumerate([(1, 0), (150, 0), (203, 64), (77, 76), (64, 64)]):
            fetched(worker, connector, worker.offer(f"r{seed}", tokens, seed), seed, first)
            assert worker.next("ended") == {"ended": f"r{seed}", "state": "done"}
        last = worker.leave()
        assert (last["held"], last["stats"]["leases_done"], last["stats"]["leases_offered"]) == (0, 5, 5)


@needs_nixl
@pytest.mark.parametrize(
    ("prefill", "decode"), [({"dcp": 4, "interleave": 4}, {}), ({"dcp": 2, "interleave": 1}, {"dp": 2, "dcp": 2})]
)
@pytest.mark.parametrize("sides", ["prefill", "decode", "both"])
def test_nixl_reads_from_devices_and_into_them(prefill, decode, sides):
    """A CPU's, here: the addresses are those of JAX's arrays."""
    with pair("nixl", prefill | {"on_device": sides != "decode"}, decode) as (worker, other):
        info = dataclasses.replace(other.info, engine_id=f"{other.info.engine_id}-too")
        rows = noise(info, 128, 1)
        mine = clone(rows) if sides == "prefill" else on_devices(rows, 0, info)
        connector = make_connector(info, mine, Clock(), other.settings)
        with contextlib.closing(connector):
            for seed, (tokens, first) in enumerate([(1, 0), (150, 0), (77, 40)]):
                offer, into = worker.offer(f"r{seed}", tokens, seed), table_for(info, tokens, 128, seed + 100)
                fetch = connector.fetch(offer, into, first=first, group=info.dp - 1)
                assert fetch.wait(WAIT) == "done", fetch.error
                assert fetch.bytes_moved == (tokens - first) * info.token_bytes
                write(info, rows, into, content(worker.info, tokens, seed), range(first, tokens), info.dp - 1)
                assert same(mine if sides == "prefill" else on_host(mine), rows)
                assert worker.next("ended") == {"ended": f"r{seed}", "state": "done"}


@needs_nixl
def test_nixl_does_not_write_to_one_of_several_copies():
    info = peer("d", connector="nixl")
    connector = make_connector(info, on_devices(noise(info, 8, 0), 0, info, copies=2), Clock(), Settings(inline=True))
    with contextlib.closing(connector), pair("nixl") as (worker, _):
        fetch = connector.fetch(worker.offer("r", 9, 0), range(3))
        assert "several devices have the same KV" in str(fetch.error)


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("interleave", [1, 4])
def test_requests_move_at_the_same_time_and_some_are_cancelled(kind, interleave):
    with pair(kind, {"dcp": 8, "interleave": interleave}, piece_bytes=4096) as (worker, connector):
        rng = np.random.default_rng(interleave)
        names = [f"r{n}" for n in range(21)]
        places, expected = rng.permutation(512), clone(connector.rows)
        offers = [worker.offer(name, 90, n, table=[3 * n, 3 * n + 2, 3 * n + 1]) for n, name in enumerate(names)]
        fetches = {}
        for n, name in enumerate(names):
            table = places[23 * n : 23 * n + 23].tolist()
            fetches[name] = connector.fetch(offers[n], table), table, n
            if n % 4 == 0:
                fetches[name][0].cancel()
        states = {name: fetch.wait(WAIT) for name, (fetch, _, _) in fetches.items()}
        assert all(states[name] == "done" for name in names if name not in names[::4]), states
        left = set(range(512 * 4))  # slots that no cancelled request may have written to
        for name, (_, table, n) in fetches.items():
            if states[name] == "done":
                write(connector.info, expected, table, content(worker.info, 90, n), range(90))
            else:
                left -= {block * 4 + i for block in table for i in range(4)}
        at = sorted(left)
        for row, region in expected.items():
            assert np.array_equal(connector.rows[row].ranks[0][:, at], region.ranks[0][:, at])
        ended = {}
        while len(ended) < len(names):
            message = worker.next("ended")
            ended[message["ended"]] = message["state"]
        assert ended == {name: "done" if states[name] == "done" else "failed" for name in names}


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_another_kind_of_engine_is_refused(kind):
    with pair(kind, {"kv_cache_dtype": "float32"}) as (worker, connector):
        before = clone(connector.rows)
        fetch = connector.fetch(worker.offer("r", 9, 0), range(3))
        refused(fetch, "kv_cache_dtype is 'fp8_ds_mla' at", 10)
        assert fetch.bytes_moved == 0
        assert same(connector.rows, before)
        assert worker.next("ended") == {"ended": "r", "state": "failed"}


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_producer_dies_before_and_between(kind):
    with pair(kind) as (worker, connector):
        first, second = worker.offer("a", 30, 0), worker.offer("b", 30, 1)
        table = range(8)
        assert connector.fetch(first, table, last=4, final=False).wait(WAIT) == "done"
        worker.kill()
        refused(connector.fetch(second, table), "no answer from the engine at 127.0.0.1", 10)
    with pair(kind) as (worker, connector):
        offer = worker.offer("a", 30, 0)
        worker.kill()
        refused(connector.fetch(offer, table), "no answer from the engine at 127.0.0.1", 10)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_producer_dies_during(kind, monkeypatch):
    """Killed when the first read is under way: over TCP, since shared memory outlives its owner."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pair(kind, WIDE, WIDE, piece_bytes=256 << 20, blocks=BLOCKS, timeout=10.0) as (worker, connector):
        offer = worker.offer("a", 4 * BLOCKS, 0)
        pause, killed = transfer_job.Guard.pause, threading.Event()

        def kill_first(guard, *seconds):
            if not killed.is_set():
                killed.set()
                worker.kill()
            pause(guard, *seconds)

        monkeypatch.setattr(transfer_job.Guard, "pause", kill_first)
        refused(connector.fetch(offer, range(BLOCKS)), "", 25)
        assert killed.is_set()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_producer_dies_after(kind):
    with pair(kind) as (worker, connector):
        offer = worker.offer("a", 30, 0)
        fetched(worker, connector, offer, 0)
        worker.kill()
        connector.done(offer)
        connector.heartbeat(offer)
        assert connector.stats()["fetches_done"] == 1


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_consumer_dies_in_the_middle_of_a_read(kind, monkeypatch):
    """The lease runs out, what was packed for it is freed, and another consumer is served."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    info, tokens = peer("p", connector=kind, **WIDE), 4 * BLOCKS
    rows = noise(info, 2 * BLOCKS, 0)
    settings = Settings(lease_seconds=2.0, call_timeout=2.0, piece_bytes=256 << 20)
    with contextlib.closing(make_connector(info, rows, Clock(), settings)) as producer:
        for name, first, hang in (("a", 0, True), ("b", BLOCKS, False)):
            table = range(first, first + BLOCKS)
            write(info, rows, table, content(info, tokens, first), range(tokens))
            consumer = Worker(kind, **WIDE)
            try:
                offer = producer.offer(name, table, tokens)
                consumer.ask(fetch=to_params(offer), seed=first, hang=hang)
                if hang:
                    assert consumer.next("reading") == {"reading": name}
                    consumer.kill()
                else:
                    assert consumer.next("fetched") == {"fetched": name, "state": "done", "right": True}
                ended = ()
                until = time.monotonic() + WAIT
                while not ended and time.monotonic() < until:
                    ended = producer.collect()
                    time.sleep(0.01)
                assert [(lease.request_id, lease.state) for lease in ended] == [(name, "expired" if hang else "done")]
            finally:
                consumer.kill()
        assert producer.held() == []
        assert getattr(producer, "_packed", {}) == {}


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_consumer_goes_without_a_word_and_the_lease_expires(kind):
    with pair(kind, lease_seconds=1.0) as (worker, connector):
        offer = worker.offer("a", 30, 0)
        assert connector.fetch(offer, range(8), last=10, final=False).wait(WAIT) == "done"
        connector.close()
        assert worker.next("ended") == {"ended": "a", "state": "expired"}
        assert worker.leave()["held"] == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_producer_that_hangs_is_given_up(kind):
    with pair(kind, call_timeout=1.0) as (worker, connector):
        offer = worker.offer("a", 30, 0)
        worker.process.send_signal(signal.SIGSTOP)
        refused(connector.fetch(offer, range(8)), "timed out", 10)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_nothing_is_written_after_a_fetch_has_failed(kind, monkeypatch):
    """The producer stops when the read is under way and goes on when the fetch has been given up."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pair(kind, WIDE, WIDE, piece_bytes=256 << 20, blocks=BLOCKS, timeout=2.0) as (worker, connector):
        offer = worker.offer("a", 4 * BLOCKS, 0)
        pause, stopped = transfer_job.Guard.pause, threading.Event()

        def stop_first(guard, *seconds):
            if not stopped.is_set():
                stopped.set()
                worker.process.send_signal(signal.SIGSTOP)
            pause(guard, *seconds)

        monkeypatch.setattr(transfer_job.Guard, "pause", stop_first)
        refused(connector.fetch(offer, range(BLOCKS)), "the fetch took too long", 15)
        assert stopped.is_set()
        before = clone(connector.rows)
        worker.process.send_signal(signal.SIGCONT)
        assert worker.next("ended")["ended"] == "a"
        time.sleep(0.5)
        assert same(connector.rows, before)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_fetch_that_is_cancelled_ends(kind, monkeypatch):
    with pair(kind, WIDE, WIDE, piece_bytes=256 << 20, blocks=BLOCKS) as (worker, connector):
        offer = worker.offer("a", 4 * BLOCKS, 0)
        fetch = connector.fetch(offer, range(BLOCKS))
        fetch.cancel()
        refused(fetch, "cancelled", 15)
        assert worker.next("ended") == {"ended": "a", "state": "failed"}
