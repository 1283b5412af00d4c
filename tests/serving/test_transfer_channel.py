"""The side channel: messages that are whole, cut short, wrong, or never come."""

import contextlib
import socket
import struct
import threading
import time

import msgspec
import pytest
from transfer_case import noise, peer

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.channel import ChannelServer, call
from glmjax.serving.transfer.factory import make_connector
from glmjax.serving.transfer.interface import PROTOCOL, TransferError


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
        ({"verb": "hello"}, f"protocol is None there and {PROTOCOL} here"),
        ({"verb": "hello", "protocol": 1}, f"protocol is 1 there and {PROTOCOL} here"),
        ({"verb": "hello", "protocol": PROTOCOL, "info": {"engine_id": "x"}}, "does not say who it is"),
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
