"""What the HTTP API asks of ASGI: reading with a limit, event streams, hang-ups, keys, errors.

Nothing here knows of models or prompts.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from glmjax.errors import RequestError
from glmjax.serving import replies
from glmjax.serving.engine import EngineError

log = logging.getLogger(__name__)

_LARGE_BODY = 1 << 15  # bytes; what comes in larger bodies is worked on in a thread
_INVALID = "invalid_request_error"
_INTERNAL = "internal_server_error"
_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An error answer that is not about the value of a field."""

    def __init__(self, status: int, message: str, kind: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.body: Any = replies.error(message, kind, param, code)

    @classmethod
    def relayed(cls, status: int, body: bytes) -> "ApiError":
        """What another server has answered, as it is."""
        error = cls(status, "", "", None, "")
        error.body = msgspec.Raw(body)
        return error


class HungUpError(Exception):
    """The client is gone."""


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(value), status, dict(headers or {}), "application/json")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most ``limit`` bytes."""
    body = bytearray()
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > limit
    if not too_large:
        async for piece in request.stream():
            body += piece
            too_large = len(body) > limit
            if too_large:
                break
    if too_large:
        message = f"the body is larger than {limit} bytes"
        raise ApiError(413, message, _INVALID, None, "request_too_large")
    return bytes(body)


async def off_loop[**P, R](num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``work``, in a thread if it has much to do, so that other streams go on."""
    if num_bytes < _LARGE_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def while_connected[R](receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """The result of ``work``, which is cancelled with HungUpError once the client hangs up.

    The request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come.

    Args:
      events: closed in the end, whatever happens.
      close: called in the end, even if no event was ever asked for; awaited if it asks for it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], Awaitable[None] | None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(HungUpError, OSError):
                await while_connected(receive, self._send(send))
        finally:
            closing = self._close()
            if closing is not None:
                await closing

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events):
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gate:
    """Lets through who has a key, and everybody to ``open_paths``."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = (), open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = self._keys and scope["type"] == "http" and scope["path"] not in self._open_paths
        if closed and not self._has_key(scope):
            body = replies.error("a valid API key is needed", _INVALID, None, "invalid_api_key")
            await json_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


async def _on_request_error(request: Request, error: Exception) -> Response:
    param = error.param if isinstance(error, RequestError) else None
    message = str(error)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return json_response(replies.error(message, _INVALID, param), 400)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body, error.status)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    said = {
        404: (f"there is no {where}", "not_found"),
        405: (f"{where} is not allowed", "method_not_allowed"),
    }
    message, code = said.get(error.status_code, (str(error.detail), None))
    body = replies.error(message, _INVALID, None, code)
    return json_response(body, error.status_code, error.headers)


async def _on_hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_engine_error(request: Request, error: Exception) -> Response:
    return json_response(replies.error(str(error), _INTERNAL, None, "engine_failure"), 500)


async def _on_failure(request: Request, error: Exception) -> Response:
    return json_response(replies.error("internal error", _INTERNAL), 500)


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    RequestError: _on_request_error,
    ApiError: _on_api_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_hang_up,
    EngineError: _on_engine_error,
    Exception: _on_failure,
}
