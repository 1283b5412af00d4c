"""Runs an application on a port: uvicorn in a thread, with a handle to stop it.

The port is bound before the thread starts, so a port that is taken is an error at once and port 0
becomes a real one.  Signals are handled only where somebody waits in the main thread.
"""

import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from glmjax.errors import GlmjaxError

log = logging.getLogger(__name__)

ABORT_SECONDS = 5  # in which answers must be over once they are aborted
QUIET_SECONDS = 1  # of waiting that needs no word
BACKLOG = 2048


class Server:
    """A running server.

    Args:
      app: what answers.
      host, port: where to listen; port 0 takes a free one.
      on_close: called once when the server takes no more calls, e.g. to close the engine: answers that are still
        under way after the grace period end with that.
      fault: says what has gone wrong for good, if anything has: whoever waits is told.
      grace_s: seconds that answers in flight get to end when the server closes; then their
        requests are aborted.
      log_level: of uvicorn; access lines come at "info" if ``access_log``.

    Attributes:
      url: where it answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        on_close: Callable[[], None] | None = None,
        fault: Callable[[], str | None] = lambda: None,
        grace_s: int = 5,
        log_level: str = "warning",
        access_log: bool = False,
    ) -> None:
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{_in_url(host)}:{self.port}"
        self._on_close, self.fault, self._grace = on_close, fault, grace_s
        self._closing = threading.Lock()
        self._closed = False
        config = uvicorn.Config(
            app,
            log_level=log_level,
            access_log=access_log,
            server_header=False,
            timeout_graceful_shutdown=grace_s + ABORT_SECONDS,
            timeout_keep_alive=75,
        )
        self._uvicorn = _Uvicorn(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        self._uvicorn.ready.wait()
        if not self._uvicorn.started:
            self.close()
            raise GlmjaxError(f"the server on {self.url} did not start")

    def wait(self) -> None:
        """Block until the server ends; Ctrl-C or SIGTERM closes it, a second one at once.

        Raises:
          GlmjaxError: it can answer no more calls, as it says; it is closed then.
        """
        ask = threading.Event()
        old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():

            def stop(number: int, frame: object) -> None:
                for each, handler in old.items():
                    signal.signal(each, handler)
                ask.set()

            for number in (signal.SIGINT, signal.SIGTERM):
                old[number] = signal.signal(number, stop)
        try:
            while self._thread.is_alive() and not ask.wait(0.2) and not self.fault():
                pass
            fault = None if ask.is_set() else self.fault()
        finally:
            self.close()
        if fault:
            raise GlmjaxError(fault)

    def close(self) -> None:
        """Stop listening, let answers end within the grace period, abort the rest, join."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._uvicorn.should_exit = True
            self._thread.join(min(self._grace, QUIET_SECONDS))
            if self._thread.is_alive():
                log.info("closing: answers that are under way have %d s to end", self._grace)
                self._thread.join(max(0, self._grace - QUIET_SECONDS))
            # Answers that are still under way are ended properly by who gives them.
            if self._on_close is not None:
                self._on_close()
            self._thread.join()
            self._socket.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._uvicorn.ready.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it is up; in a thread it leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def check_port(host: str, port: int) -> None:
    """GlmjaxError if there can be no server now, for who has much to do before it starts one."""
    _bind(host, port).close()


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise GlmjaxError(f"port must be in [0, 65535], got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise GlmjaxError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise GlmjaxError(f"port {port} on {host} is in use; choose another one") from None
        raise GlmjaxError(f"cannot listen on {host}:{port}: {error}") from None
    return listener


def _in_url(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown
