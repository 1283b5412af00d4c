"""One OpenAI API before a prefill and a decode engine, each a server of its own: every call goes through both.

The prefill engine gets the call with ``max_tokens=1`` and answers where the prompt's KV is (``kv_transfer_params``).
With that the decode engine gets the call as it came, and its answer is the client's. Prompts of which the decode engine
has cached all but a few tokens go to it at once, and so do calls with several prompts: their KV would wait on the
prefill engine for that of the last one. The front keeps nothing between calls, so it can be restarted at any time.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glmjax import __version__
from glmjax.errors import ConfigError, RequestError
from glmjax.serving import asgi, protocol, replies
from glmjax.serving.asgi import ApiError
from glmjax.serving.handoff import OnFailure
from glmjax.serving.http import OPEN_PATHS
from glmjax.serving.metrics import CONTENT_TYPE
from glmjax.serving.transfer.params import PARAM

log = logging.getLogger(__name__)

PREFILL_METRICS = "/metrics/prefill"
CONNECT_SECONDS = 5.0
REST_SECONDS = 10.0  # for which a prefill engine that cannot be reached is not tried again
# A peer whose host is gone says nothing: the system finds out by asking, or by what it has sent not being taken, for
# which by itself it would wait a quarter of an hour.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 30),
            ("TCP_KEEPINTVL", 10),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 60_000),
        )
        if hasattr(socket, name)
    ),
)

# The prefill engine computes the prompt; what it would sample, and how it would answer, is not used.
_PROMPT_ONLY = {"max_tokens": 1, "n": 1, "temperature": 0, "stream": False}
_OUTPUT_FIELDS = (
    *("stream_options", "max_completion_tokens", "min_tokens", "best_of", "stop", "stop_token_ids", "echo"),
    *("logprobs", "top_logprobs", "return_token_ids"),
)
_HANDED_ON = ("authorization", "content-type", "x-request-id", "traceparent", "tracestate", "baggage")
_OF_DECODE_ENGINE = {
    "GET": ("/v1/models", "/v1/models/{name:path}", "/load", "/tokenizer_info"),
    "POST": ("/tokenize", "/detokenize"),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """URLs of the engines that serve a call."""

    prefill: str
    decode: str


# From a call's path, headers and body to the engines that are to serve it; for what is no call the body is empty.
Router = Callable[[str, Mapping[str, str], Mapping[str, Any]], Awaitable[Pair]]


def one_pair(pair: Pair) -> Router:
    """The router where there is nothing to choose."""

    async def choose(path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Pair:
        return pair

    return choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """How calls are passed on.

    Attributes:
      min_prefill_tokens: prompts with fewer uncached tokens skip the prefill engine.
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

    def __post_init__(self) -> None:
        if self.min_prefill_tokens < 1:
            raise ConfigError(f"min_prefill_tokens must be at least 1, got {self.min_prefill_tokens}")
        if not self.prefill_timeout > 0:
            raise ConfigError(f"prefill_timeout must be a positive number of seconds, got {self.prefill_timeout}")
        if not all(self.api_keys):
            raise ConfigError("api_key is empty: leave it out to serve without a key")


def build_front(router: Router, options: FrontOptions) -> Starlette:
    """The application.

    Args:
      router: chooses among engines; ``one_pair`` where there is one of each.
    """
    front = _Front(router, options)
    routes = [
        Route("/v1/completions", front.generate, methods=["POST"]),
        Route("/v1/chat/completions", front.generate, methods=["POST"]),
        Route("/health", front.health),
        Route("/ping", front.health, methods=["GET", "POST"]),
        Route("/version", front.version),
        Route("/metrics", front.metrics),
        Route(PREFILL_METRICS, front.prefill_metrics),
        *(Route(path, front.hand_on, methods=[verb]) for verb, paths in _OF_DECODE_ENGINE.items() for path in paths),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(asgi.Gate, api_keys=options.api_keys, open_paths=OPEN_PATHS | {PREFILL_METRICS})],
        exception_handlers=asgi.ERROR_HANDLERS,
        lifespan=front.lifespan,
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A client's call for output."""

    path: str
    raw: bytes
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class _PrefillError(Exception):
    """The prefill engine did not compute a prompt; ``answer`` is what it said."""

    def __init__(self, message: str, answer: httpx.Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class _Front:
    """The endpoints."""

    def __init__(self, router: Router, options: FrontOptions) -> None:
        self._router, self._options = router, options
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            headers={"accept-encoding": "identity"},
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=256), socket_options=_KEEP_ALIVE
            ),
        )
        self._resting: dict[str, float] = {}  # prefill engines that cannot be reached, until when
        self._registry = prometheus_client.CollectorRegistry()
        self._calls = prometheus_client.Counter(
            "glmjax:front_calls", "Calls by what became of their prompts.", ["prompt"], registry=self._registry
        )
        self._seconds = prometheus_client.Histogram(
            "glmjax:front_time_to_answer_seconds",
            "From a call to the first piece of its answer, by what became of its prompt.",
            ["prompt", "stream"],
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500),
            registry=self._registry,
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self._client:
            yield

    async def generate(self, request: Request) -> Response:
        began = _now()
        call = await self._call(request)
        pair = await self._router(call.path, call.headers, call.body)
        params = None
        try:
            params, prompt, rank = await asgi.while_connected(request.receive, self._prefill(pair, call))
            self._calls.labels(prompt).inc()
            content = call.raw
            if params is not None:
                content = await asgi.off_loop(len(call.raw), msgspec.json.encode, {**call.body, PARAM: params})
            headers = dict(call.headers) if rank is None else {**call.headers, "x-data-parallel-rank": str(rank)}
            onward = self._client.build_request("POST", pair.decode + call.path, content=content, headers=headers)
            streams = bool(call.body.get("stream"))
            response = await asgi.while_connected(request.receive, self._ask_decode(onward, stream=streams))
        except (asgi.HungUpError, ApiError) as error:
            if params is not None:
                await self._withdraw(pair, call, params)
            if isinstance(error, ApiError):
                raise
            return Response(status_code=499)
        if not streams:
            self._seconds.labels(prompt, "no").observe(_now() - began)
            return _passed_on(response)
        seen = self._seconds.labels(prompt, "yes")
        return asgi.EventStream(_relayed(response, lambda: seen.observe(_now() - began)), response.aclose)

    async def hand_on(self, request: Request) -> Response:
        """What is not about output, and the decode engine's to answer."""
        raw = await asgi.read_body(request, self._options.max_body_bytes)
        headers = _handed_on(request)
        url = (await self._router(request.url.path, headers, {})).decode + request.url.path
        onward = self._client.build_request(
            request.method, url, params=request.query_params, content=raw, headers=headers
        )
        try:
            return _passed_on(await asgi.while_connected(request.receive, self._ask_decode(onward)))
        except asgi.HungUpError:
            return Response(status_code=499)

    async def health(self, request: Request) -> Response:
        """200 if calls can be served: the prefill engine may be missing where its prompts are computed elsewhere."""
        pair = await self._router(request.url.path, {}, {})
        needed = [pair.decode] if self._options.on_failure == "recompute" else [pair.decode, pair.prefill]
        healthy = all(await asyncio.gather(*map(self._is_healthy, needed)))
        return Response(status_code=200 if healthy else 503)

    async def version(self, request: Request) -> Response:
        """The front's own, and that it is no engine."""
        return asgi.json_response({"version": __version__, "role": "front"})

    async def metrics(self, request: Request) -> Response:
        """The decode engine's metrics, and the front's own."""
        content = prometheus_client.generate_latest(self._registry)
        pair = await self._router(request.url.path, {}, {})
        with contextlib.suppress(httpx.TransportError):
            response = await self._client.get(pair.decode + "/metrics", timeout=CONNECT_SECONDS)
            content = response.content + content
        return Response(content, media_type=CONTENT_TYPE)

    async def prefill_metrics(self, request: Request) -> Response:
        """The prefill engine's metrics, by themselves: they have the names of the decode engine's."""
        pair = await self._router(request.url.path, {}, {})
        try:
            return _passed_on(await self._client.get(pair.prefill + "/metrics", timeout=CONNECT_SECONDS))
        except httpx.TransportError as error:
            raise ApiError(503, f"the prefill engine cannot be reached: {_what(error)}", *_UNREACHABLE) from None

    async def _call(self, request: Request) -> _Call:
        raw = await asgi.read_body(request, self._options.max_body_bytes)
        body = await asgi.off_loop(len(raw), protocol.decode_object, raw)
        if body.get(PARAM) is not None:
            raise RequestError(f"{PARAM} is this server's own to set: ask the engines themselves", PARAM)
        return _Call(request.url.path, raw, body, {"x-request-id": uuid.uuid4().hex, **_handed_on(request)})

    async def _prefill(self, pair: Pair, call: _Call) -> tuple[Any, str, int | None]:
        """Where the KV of the call's prompt is, None if the decode engine is to compute it; what became of it; and for
        one prompt the rank of the decode engine that it was counted for."""
        counts = await self._counts(pair, call)
        if counts is None:
            return None, "refused", None
        length, uncached = (counts[name] for name in ("prompt_tokens", "uncached_tokens"))
        if len(uncached) != 1:
            return None, "decode", None
        (rank,) = counts["data_parallel_rank"]
        if uncached[0] < self._options.min_prefill_tokens:
            return None, "decode", rank
        try:
            return await self._offer(pair, call, length[0] - uncached[0]), "prefill", rank
        except _PrefillError as error:
            log.warning("prefill engine at %s: %s", pair.prefill, error)
            if self._options.on_failure == "recompute":
                return None, "recomputed", rank
            self._calls.labels("failed").inc()
            answer = error.answer
            if answer is not None and (answer.status_code == 503 or 400 <= answer.status_code < 500):
                raise ApiError.relayed(answer.status_code, answer.content) from None
            raise ApiError(502, f"the prompt was not computed: {error}", *_UNREACHABLE) from None

    async def _offer(self, pair: Pair, call: _Call, cached_tokens: int) -> Any:
        recompute = self._options.on_failure == "recompute"
        if recompute and self._resting.get(pair.prefill, 0.0) > _now():
            raise _PrefillError("it could not be reached a moment ago")
        # What the decode engine has may be gone by then, which costs a recompute where that is allowed.
        params = {"do_remote_decode": True, "cached_tokens": cached_tokens if recompute else 0}
        asked = {k: v for k, v in call.body.items() if k not in _OUTPUT_FIELDS} | _PROMPT_ONLY | {PARAM: params}
        content = await asgi.off_loop(len(call.raw), msgspec.json.encode, asked)
        try:
            async with asyncio.timeout(self._options.prefill_timeout):
                response = await self._client.post(pair.prefill + call.path, content=content, headers=call.headers)
        except (TimeoutError, httpx.TransportError) as error:
            late = isinstance(error, TimeoutError)
            if late or isinstance(error, (httpx.ConnectError, httpx.TimeoutException)):  # not for one that broke off
                self._resting[pair.prefill] = _now() + REST_SECONDS
            what = f"no answer after {self._options.prefill_timeout:g} s" if late else f"no connection: {_what(error)}"
            raise _PrefillError(what) from None
        if response.status_code != 200:
            raise _PrefillError(f"it answered {response.status_code}: {response.text[:500]}", response)
        try:
            offer = msgspec.json.decode(response.content).get(PARAM)
        except (msgspec.DecodeError, AttributeError):
            offer = None
        if offer is None:
            raise _PrefillError(f"its answer has no {PARAM}")
        return offer

    async def _withdraw(self, pair: Pair, call: _Call, params: Any) -> None:
        """Gives up an offer that the decode engine may never have heard of, and nobody would fetch."""
        content = msgspec.json.encode({PARAM: params})
        with contextlib.suppress(httpx.TransportError):  # then the lease runs out
            url = pair.prefill + "/v1/kv_transfer/withdraw"
            await self._client.post(url, content=content, headers=call.headers, timeout=CONNECT_SECONDS)

    async def _counts(self, pair: Pair, call: _Call) -> dict[str, list[int]] | None:
        """Tokens of each prompt, on the decode engine; None if the call is not one that it takes: it will say why."""
        url = f"{pair.decode}{call.path}/uncached_tokens"
        onward = self._client.build_request("POST", url, content=call.raw, headers=call.headers)
        response = await self._ask_decode(onward)
        if response.status_code == 404 and b"model_not_found" not in response.content:
            log.error("%s is not there: is that a glmjax server with --role decode?", url)
            message = "the decode engine counts no uncached tokens: it must be glmjax with --role decode"
            raise ApiError(502, message, *_UNREACHABLE)
        if response.status_code != 200:
            return None
        return msgspec.json.decode(response.content, type=dict[str, list[int]])

    async def _ask_decode(self, onward: httpx.Request, *, stream: bool = False) -> httpx.Response:
        """The decode engine's answer; ApiError if there is none. Streamed only if it is a stream of events."""
        try:
            response = await self._client.send(onward, stream=stream)
            if stream and response.status_code != 200:
                async with contextlib.aclosing(response):
                    await response.aread()
        except httpx.TransportError as error:
            log.error("decode engine at %s: %s", onward.url, _what(error))
            raise ApiError(503, f"the decode engine cannot be reached: {_what(error)}", *_UNREACHABLE) from None
        if stream and response.status_code != 200:
            raise ApiError.relayed(response.status_code, response.content)
        return response

    async def _is_healthy(self, url: str) -> bool:
        try:
            return (await self._client.get(url + "/health", timeout=CONNECT_SECONDS)).status_code == 200
        except httpx.TransportError:
            return False


_UNREACHABLE = ("service_unavailable", None, "engine_unreachable")


async def _relayed(response: httpx.Response, begun: Callable[[], None] | None) -> AsyncGenerator[bytes]:
    """Whole events of a stream as they come. If the engine is lost on the way, an error is the last one."""
    rest = b""
    try:
        async for piece in response.aiter_raw():
            whole, end, rest = (rest + piece).rpartition(b"\n\n")
            if end:
                if begun is not None:
                    begun()
                    begun = None
                yield whole + end
    except httpx.TransportError as error:
        log.error("a stream broke off: %s", _what(error))
        message = f"the decode engine was lost: {_what(error)}"
        yield asgi.event(replies.error(message, "internal_server_error", code=500)) + b"data: [DONE]\n\n"


def _passed_on(response: httpx.Response) -> Response:
    return Response(response.content, response.status_code, media_type=response.headers.get("content-type"))


def _handed_on(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name in _HANDED_ON}


def _what(error: Exception) -> str:
    return str(error) or type(error).__name__


def _now() -> float:
    """Seconds of the event loop's clock."""
    return asyncio.get_running_loop().time()
