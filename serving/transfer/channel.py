"""The side channel: one question and one answer over TCP, for handshakes and leases. The only file here with sockets.

A frame is its length, four bytes, and a msgpack map. Every call is a connection of its own, so that neither side has to
notice that the other was restarted. Peers are trusted: bind it to a network that only engines are on.
"""

import logging
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from glmjax.errors import ConfigError
from glmjax.serving.clock import Clock
from glmjax.serving.transfer.interface import TransferError

log = logging.getLogger(__name__)

Message = dict[str, Any]
Answer = Callable[[Message], Message]

MAX_FRAME = 64 << 20  # bytes; a peer cannot make the other hold more
_HEAD = struct.Struct(">I")


class ChannelServer:
    """Answers calls, each in a thread of its own, until closed. ConfigError if there is no listening there.

    Attributes:
      port: where; chosen by the system if 0 was asked for.
    """

    def __init__(self, host: str, port: int, answer: Answer, clock: Clock, timeout: float):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                deadline = clock.monotonic() + timeout
                try:
                    message = _receive(self.request, clock, deadline)
                    _send(self.request, _answered(answer, message), clock, clock.monotonic() + timeout)
                except (OSError, TransferError) as error:
                    log.info("a call from %s ended early: %s", self.client_address, error)

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"the connector cannot listen on {host}:{port}: {error}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="kv-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def call(host: str, port: int, message: Message, clock: Clock, timeout: float) -> Message:
    """Asks a peer and returns what it answers, within so many seconds.

    Raises:
      TransferError: it cannot be reached, is too slow, breaks off, or answers with an error.
    """
    deadline = clock.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            _send(connection, message, clock, deadline)
            reply = _receive(connection, clock, deadline)
    except OSError as error:
        raise TransferError(f"no answer from the engine at {host}:{port}: {error}") from error
    if "error" in reply:
        raise TransferError(str(reply["error"]))
    return reply


class _Server(socketserver.ThreadingTCPServer):
    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


def _answered(answer: Answer, message: Message) -> Message:
    try:
        return answer(message)
    except TransferError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("a call could not be answered")
        return {"error": f"the peer failed: {type(error).__name__}: {error}"}


def _send(connection: socket.socket, message: Message, clock: Clock, deadline: float) -> None:
    data = msgspec.msgpack.encode(message)
    connection.settimeout(_left(clock, deadline))
    connection.sendall(_HEAD.pack(len(data)) + data)


def _receive(connection: socket.socket, clock: Clock, deadline: float) -> Message:
    (size,) = _HEAD.unpack(_read(connection, _HEAD.size, clock, deadline))
    if size > MAX_FRAME:
        raise TransferError(f"a message of {size} bytes; at most {MAX_FRAME} are taken")
    try:
        return msgspec.msgpack.decode(_read(connection, size, clock, deadline), type=Message)
    except msgspec.MsgspecError as error:
        raise TransferError(f"a message that is none: {error}") from None


def _read(connection: socket.socket, size: int, clock: Clock, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(_left(clock, deadline))
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise TransferError(f"the connection broke off after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)


def _left(clock: Clock, deadline: float) -> float:
    """Seconds left, for one more operation; what is past its time is not begun."""
    left = deadline - clock.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
