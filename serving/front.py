"""One OpenAI API before a prefill and a decode engine, each a server of its own: every call goes through both.

The prefill engine gets the call with ``max_tokens=1`` and answers where the prompt's KV is (``kv_transfer_params``).
With that the decode engine gets the call as it came, and its answer is the client's. Prompts of which the decode engine
has cached all but a few tokens go to it at once. The front keeps nothing between calls, so it can be restarted at any
time.
"""

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glmjax.errors import RequestError
from glmjax.serving import asgi, replies
from glmjax.serving.asgi import ApiError
from glmjax.serving.handoff import OnFailure
from glmjax.serving.http import OPEN_PATHS
from glmjax.serving.metrics import CONTENT_TYPE
from glmjax.serving.transfer.params import PARAM

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0

# The prefill engine computes the prompt; what it would sample, and how it would answer, is not used.
_PROMPT_ONLY = {"max_tokens": 1, "n": 1, "temperature": 0, "stream": False, PARAM: {"do_remote_decode": True}}
_OUTPUT_FIELDS = (
    *("stream_options", "max_completion_tokens", "min_tokens", "best_of", "stop", "stop_token_ids", "echo"),
    *("logprobs", "top_logprobs", "return_token_ids"),
)
_HANDED_ON = ("authorization", "content-type", "x-request-id")


@dataclasses.dataclass(frozen=True)
class Pair:
    """URLs of the engines that serve a call."""

    prefill: str
    decode: str


Router = Callable[[Mapping[str, Any]], Pair]  # from a call's body to the engines that are to serve it


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """How calls are passed on.

    Attributes:
      min_prefill_tokens: calls whose prompts all have fewer uncached tokens skip the prefill engine.
      on_failure: without the prefill engine "recompute" prompts on the decode engine, or "fail" the call.
      prefill_timeout: seconds that the prefill engine may take for a call.
      api_keys: if any, clients must send one as a Bearer token; it is handed on to the engines.
      max_body_bytes: larger bodies get a 413.
    """

    min_prefill_tokens: int = 64
    on_failure: OnFailure = "recompute"
    prefill_timeout: float = 600.0
    api_keys: Sequence[str] = ()
    max_body_bytes: int = 64 << 20


def build_front(router: Router, options: FrontOptions) -> Starlette:
    """The application.

    Args:
      router: chooses among engines; for one pair ``lambda body: pair``. It is called in the event loop.
    """
    front = _Front(router, options)
    routes = [
        Route("/v1/completions", front.generate, methods=["POST"]),
        Route("/v1/chat/completions", front.generate, methods=["POST"]),
        Route("/health", front.health),
        Route("/ping", front.health, methods=["GET", "POST"]),
        Route("/metrics", front.metrics),
        Route("/{path:path}", front.hand_on, methods=["GET", "POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(asgi.Gate, api_keys=options.api_keys, open_paths=OPEN_PATHS)],
        exception_handlers=asgi.ERROR_HANDLERS,
        lifespan=front.lifespan,
    )


class _PrefillError(Exception):
    """The prefill engine did not compute a prompt."""


class _Front:
    """The endpoints."""

    def __init__(self, router: Router, options: FrontOptions) -> None:
        self._router, self._options = router, options
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )
        self._registry = prometheus_client.CollectorRegistry()
        self._calls = prometheus_client.Counter(
            "glmjax:front_calls", "Calls by what became of their prompts.", ["prompt"], registry=self._registry
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self._client:
            yield

    async def generate(self, request: Request) -> Response:
        raw = await asgi.read_body(request, self._options.max_body_bytes)
        body = await asgi.off_loop(len(raw), _decoded, raw)
        if body.get(PARAM) is not None:
            raise RequestError(f"{PARAM} is this server's own to set: ask the engines themselves", PARAM)
        pair = self._router(body)
        headers = {name: value for name, value in request.headers.items() if name in _HANDED_ON}
        headers.setdefault("x-request-id", uuid.uuid4().hex)  # the same for both engines
        path = request.url.path
        try:
            params = await asgi.while_connected(request.receive, self._prefill(pair, path, raw, body, headers))
        except asgi.HungUpError:
            return Response(status_code=499)
        content = raw if params is None else msgspec.json.encode(body | {PARAM: params})
        call = self._client.build_request("POST", pair.decode + path, content=content, headers=headers)
        if body.get("stream"):
            return await self._stream(call)
        return await self._whole(request, call)

    async def hand_on(self, request: Request) -> Response:
        """Whatever else there is, of the decode engine."""
        raw = await asgi.read_body(request, self._options.max_body_bytes)
        headers = {name: value for name, value in request.headers.items() if name in _HANDED_ON}
        url = self._router({}).decode + request.url.path
        return await self._whole(request, self._client.build_request(request.method, url, content=raw, headers=headers))

    async def health(self, request: Request) -> Response:
        """200 if calls can be served: the prefill engine may be missing where its prompts are computed elsewhere."""
        pair = self._router({})
        needed = [pair.decode] if self._options.on_failure == "recompute" else [pair.decode, pair.prefill]
        healthy = all(await asyncio.gather(*map(self._is_healthy, needed)))
        return Response(status_code=200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """The decode engine's metrics, and the front's own. The prefill engine answers for itself."""
        engine = await self._send(self._client.build_request("GET", self._router({}).decode + "/metrics"))
        own = prometheus_client.generate_latest(self._registry)
        return Response(engine.content + own, media_type=CONTENT_TYPE)

    async def _prefill(
        self, pair: Pair, path: str, raw: bytes, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Any:
        """Where the KV of the call's prompts is; None if the decode engine is to compute them."""
        if await self._uncached_tokens(pair, path, raw, headers) < self._options.min_prefill_tokens:
            self._calls.labels("decode").inc()
            return None
        asked = {k: v for k, v in body.items() if k not in _OUTPUT_FIELDS} | _PROMPT_ONLY
        try:
            params = await self._offer(pair, path, asked, headers)
        except _PrefillError as error:
            log.warning("prefill engine: %s", error)
            if self._options.on_failure == "fail":
                self._calls.labels("failed").inc()
                raise ApiError(502, f"the prompt was not computed: {error}", *_UNREACHABLE) from None
            self._calls.labels("recomputed").inc()
            return None
        self._calls.labels("prefill").inc()
        return params

    async def _offer(self, pair: Pair, path: str, asked: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        try:
            async with asyncio.timeout(self._options.prefill_timeout):
                response = await self._client.post(pair.prefill + path, json=asked, headers=headers)
        except TimeoutError:
            raise _PrefillError(f"no answer after {self._options.prefill_timeout:g} s") from None
        except httpx.TransportError as error:
            raise _PrefillError(f"{pair.prefill} cannot be reached: {_what(error)}") from None
        if response.status_code != 200:
            raise _PrefillError(f"it answered {response.status_code}: {response.text[:500]}")
        params = response.json().get(PARAM)
        if params is None:
            raise _PrefillError(f"its answer has no {PARAM}")
        return params

    async def _uncached_tokens(self, pair: Pair, path: str, raw: bytes, headers: Mapping[str, str]) -> int:
        """Of the longest prompt, on the decode engine; -1 if the call is not one that it takes: it will say why."""
        url = f"{pair.decode}{path}/uncached_tokens"
        response = await self._send(self._client.build_request("POST", url, content=raw, headers=headers))
        return max(response.json()["uncached_tokens"]) if response.status_code == 200 else -1

    async def _whole(self, request: Request, call: httpx.Request) -> Response:
        try:
            response = await asgi.while_connected(request.receive, self._send(call))
        except asgi.HungUpError:
            return Response(status_code=499)
        media_type = response.headers.get("content-type")
        return Response(response.content, response.status_code, media_type=media_type)

    async def _stream(self, call: httpx.Request) -> Response:
        response = await self._send(call, stream=True)
        if response.status_code != 200:
            async with contextlib.aclosing(response):
                content = await response.aread()
            return Response(content, response.status_code, media_type=response.headers.get("content-type"))
        return asgi.EventStream(_relayed(response))

    async def _send(self, call: httpx.Request, *, stream: bool = False) -> httpx.Response:
        """The decode engine's answer. ApiError if it cannot be reached."""
        try:
            return await self._client.send(call, stream=stream)
        except httpx.TransportError as error:
            url = f"{call.url.scheme}://{call.url.netloc.decode()}"
            raise ApiError(
                503, f"the decode engine at {url} cannot be reached: {_what(error)}", *_UNREACHABLE
            ) from None

    async def _is_healthy(self, url: str) -> bool:
        try:
            return (await self._client.get(url + "/health", timeout=CONNECT_SECONDS)).status_code == 200
        except httpx.TransportError:
            return False


_UNREACHABLE = ("service_unavailable", None, "engine_unreachable")


async def _relayed(response: httpx.Response) -> AsyncGenerator[bytes]:
    """A stream as it comes. If the engine is lost on the way, an error is the last event."""
    async with contextlib.aclosing(response):
        try:
            async for piece in response.aiter_raw():
                yield piece
        except httpx.TransportError as error:
            log.error("a stream broke off: %s", _what(error))
            message = f"the decode engine was lost: {_what(error)}"
            yield b"\n\n" + asgi.event(replies.error(message, "internal_server_error", code=500)) + b"data: [DONE]\n\n"


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _what(error: Exception) -> str:
    return str(error) or type(error).__name__
