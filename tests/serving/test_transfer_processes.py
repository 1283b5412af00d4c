"""KV moved between two real processes by each transport, and peers that are wrong, slow, stuck or dead."""

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from transfer_case import clone, content, noise, peer, same, table_for, write

from glmjax.serving.clock import Clock
from glmjax.serving.transfer import job as transfer_job
from glmjax.serving.transfer.channel import ChannelServer, call
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import TransferError
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.params import from_params

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

    def __init__(self, kind, settings=None, **engine):
        description = {"engine_id": f"p-{os.urandom(4).hex()}", "connector": kind, **engine}
        job = {"peer": description, "blocks": BLOCKS, "settings": settings or {}}
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

    def offer(self, name, tokens, seed):
        self.process.stdin.write(json.dumps({"name": name, "tokens": tokens, "seed": seed}) + "\n")
        self.process.stdin.flush()
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


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_requests_move_at_the_same_time(kind):
    with pair(kind, {"dcp": 8, "interleave": 1}, piece_bytes=4096) as (worker, connector):
        offers = [worker.offer(f"r{seed}", 90, seed) for seed in range(12)]
        order, expected = table_for(connector.info, 24 * 4 * 12, 512, 9), clone(connector.rows)
        tables = [order[24 * n : 24 * n + 23] for n in range(12)]
        # All of them are in the producer's blocks at random, so only the last to be written is whole.
        write(connector.info, expected, tables[11], content(worker.info, 90, 11), range(90))
        fetches = [connector.fetch(offer, table) for offer, table in zip(offers, tables, strict=True)]
        assert [fetch.wait(WAIT) for fetch in fetches] == ["done"] * 12, [f.error for f in fetches]
        own = tables[11]
        size = connector.info.block_size
        for kind_of_row, region in expected.items():
            for block in own:
                at = slice(block * size, (block + 1) * size)
                assert (connector.rows[kind_of_row].ranks[0][:, at] == region.ranks[0][:, at]).all()
        assert {worker.next("ended")["state"] for _ in range(12)} == {"done"}


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_another_kind_of_engine_is_refused(kind):
    with pair(kind, {"kv_cache_dtype": "float32"}) as (worker, connector):
        before = clone(connector.rows)
        fetch = connector.fetch(worker.offer("r", 9, 0), range(3))
        refused(fetch, "kv_cache_dtype is 'fp8_ds_mla' there and 'float32' here", 10)
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
def test_the_consumer_dies_and_the_lease_expires(kind):
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
def test_a_fetch_that_is_cancelled_ends(kind, monkeypatch):
    with pair(kind, WIDE, WIDE, piece_bytes=256 << 20, blocks=BLOCKS) as (worker, connector):
        offer = worker.offer("a", 4 * BLOCKS, 0)
        fetch = connector.fetch(offer, range(BLOCKS))
        fetch.cancel()
        refused(fetch, "cancelled", 15)
        assert worker.next("ended") == {"ended": "a", "state": "failed"}


# The side channel alone.


@contextlib.contextmanager
def peer_that_says(data, linger=0.0):
    """The port of a peer that answers anything with these bytes, then hangs up."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(data)
                    time.sleep(linger)

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("data", "linger", "message"),
    [
        (b"", 0, "broke off after 0 of 4 bytes"),
        (b"\0\0", 0, "broke off after 2 of 4 bytes"),
        (struct.pack(">I", 100) + b"x" * 60, 0, "broke off after 60 of 100 bytes"),
        (struct.pack(">I", 1 << 31), 0, "at most 67108864 are taken"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", 0, "a message that is none"),
        (struct.pack(">I", 1) + b"\x01", 0, "a message that is none"),
        (b"\0\0", 3, "timed out"),
    ],
)
def test_answers_cut_short_or_wrong_are_errors(data, linger, message):
    with peer_that_says(data, linger) as port:
        start = time.monotonic()
        with pytest.raises(TransferError, match=message):
            call("127.0.0.1", port, {"verb": "hello"}, Clock(), 0.5)
        assert time.monotonic() - start < 2


def test_the_server_outlives_bad_calls():
    def answer(message):
        if message["verb"] == "fault":
            raise ZeroDivisionError("oops")
        if message["verb"] == "no":
            raise TransferError("refused")
        return {"got": message}

    server = ChannelServer("127.0.0.1", 0, answer, Clock(), 0.5)
    ask = {"verb": "hello", "bytes": b"\0\xff", "list": [1, 2]}
    try:
        for data in (b"", b"\0", struct.pack(">I", 1 << 31), struct.pack(">I", 1) + b"\xc1", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                connection.sendall(data)
        assert call("127.0.0.1", server.port, ask, Clock(), 5) == {"got": ask}
        with pytest.raises(TransferError, match=r"^refused$"):
            call("127.0.0.1", server.port, {"verb": "no"}, Clock(), 5)
        with pytest.raises(TransferError, match="the peer failed: ZeroDivisionError: oops"):
            call("127.0.0.1", server.port, {"verb": "fault"}, Clock(), 5)
    finally:
        server.close()
    with pytest.raises(TransferError, match="no answer from the engine"):
        call("127.0.0.1", server.port, ask, Clock(), 1)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"verb": "hello"}, "protocol is None there and 1 here"),
        ({"verb": "hello", "protocol": 2}, "protocol is 2 there and 1 here"),
        ({"verb": "hello", "protocol": 1, "info": {"engine_id": "x"}}, "does not say who it is"),
        ({"verb": "begin", "engine": "d", "request": "r"}, "'r' is not on offer"),
        ({"verb": "dance", "engine": "d", "request": "r"}, "'r' is not on offer"),
        ({"verb": "begin", "engine": "e"}, "engine e is not here, but d"),
        ({}, "engine None is not here, but d"),
    ],
)
def test_messages_that_make_no_sense_are_refused(message, error):
    info = peer("d", connector="jax")
    with contextlib.closing(make_connector(info, noise(info, 2, 0), Clock())) as connector:
        with pytest.raises(TransferError, match=error):
            call("127.0.0.1", connector.port, message, Clock(), 5)
        connector.offer("r", [0], 4)
        for verb, text in (("dance", "unknown verb 'dance'"), ("pack", "tokens 0 .. 5 of 4 were asked for")):
            request = {"verb": verb, "engine": "d", "request": "r", "first": 0, "last": 5}
            with pytest.raises(TransferError, match=text):
                call("127.0.0.1", connector.port, request, Clock(), 5)


def test_messages_are_msgpack():
    data = msgspec.msgpack.encode({"verb": "hello"})
    with peer_that_says(struct.pack(">I", len(data)) + data) as port:
        assert call("127.0.0.1", port, {}, Clock(), 5) == {"verb": "hello"}
