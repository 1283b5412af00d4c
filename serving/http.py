"""The OpenAI-compatible HTTP API: routes, checks at the door, streams, errors.

A call is decoded and checked, its prompts are submitted to the engine, and a writer turns deltas into
the answer, event by event or at once.  Whoever hangs up is noticed while waiting, and what is left of
the call is aborted.  Every error has OpenAI's shape.  Runs in one event loop.
"""

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glmjax.errors import RequestError
from glmjax.serving import asgi, protocol, replies
from glmjax.serving.asgi import ApiError
from glmjax.serving.chat import ChatTemplate, check_tools, opens_reasoning
from glmjax.serving.disaggregated import AnyEngine
from glmjax.serving.metrics import CONTENT_TYPE, Metrics
from glmjax.serving.parsers import Parser, keeps_tags
from glmjax.serving.stream import Generation, Mailbox
from glmjax.serving.tokenizer import Tokenizer
from glmjax.serving.transfer.params import PARAM, Role, from_params, read_params
from glmjax.serving.writers import ChatWriter, CompletionWriter, Tally, Writer
from glmjax.types import SamplingParams

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
_DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How the API presents itself.

    Attributes:
      model_names: what clients may call the model; the first is the one that answers carry.
      version: answer of ``/version``.
      api_keys: if any, clients must send one as a Bearer token.
      max_num_queued_requests: sequences that may wait for the engine; more get a 503.
      max_body_bytes: larger bodies get a 413.
      sampling_defaults: values for ``SamplingParams`` fields that a request leaves out.
      role: "prefill" offers the KV of prompts to other engines, "decode" fetches it; None takes no kv_transfer_params.
    """

    model_names: Sequence[str]
    version: str = "0"
    api_keys: Sequence[str] = ()
    max_num_queued_requests: int | None = None
    max_body_bytes: int = 64 << 20
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    role: Role | None = None


def build_app(
    engine: AnyEngine,
    tokenizer: Tokenizer,
    options: HttpOptions,
    template: ChatTemplate | None = None,
) -> Starlette:
    """The application around a started engine.

    Args:
      engine: steps in a thread of its own; closing it is the caller's.
      tokenizer: of the same model.
      options: names, keys and limits.
      template: of conversations; None takes the tokenizer's own, else GLM-5.3's.
    """
    if template is None:
        template = ChatTemplate(tokenizer.chat_template, engine.clock)
    api = _Api(engine, tokenizer, options, template)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info),
        Route("/health", api.health),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/version", api.version),
        Route("/load", api.load),
        Route("/metrics", api.metrics_text),
    ]
    if options.role == "prefill":
        routes += [Route("/v1/kv_transfer/withdraw", api.withdraw, methods=["POST"])]
    if options.role == "decode":
        routes += [
            Route("/v1/completions/uncached_tokens", api.uncached_in_completion, methods=["POST"]),
            Route("/v1/chat/completions/uncached_tokens", api.uncached_in_chat, methods=["POST"]),
        ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(asgi.Gate, api_keys=options.api_keys, open_paths=OPEN_PATHS)],
        exception_handlers=asgi.ERROR_HANDLERS,
    )


class _Api:
    """The endpoints."""

    def __init__(self, engine: AnyEngine, tokenizer: Tokenizer, options: HttpOptions, template: ChatTemplate) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._template = template
        self._started = int(engine.clock.time())
        self._in_flight = 0
        self._mailbox: Mailbox | None = None  # made in the loop that serves
        config = engine.scheduler.config
        self._max_model_len = config.max_model_len
        self._metrics = Metrics(
            engine.stats,
            options.model_names[0],
            {
                "block_size": config.block_size,
                "num_gpu_blocks": config.num_blocks,
                "enable_prefix_caching": config.enable_prefix_caching,
            },
        )
        self._hidden_tokens = () if keeps_tags(tokenizer) else tuple(tokenizer.special_tokens)

    async def completions(self, request: Request) -> Response:
        asked, sampling, token_ids, texts = await self._completion_call(request)
        writer = CompletionWriter(
            self._tokenizer,
            sampling,
            len(token_ids),
            texts if asked.echo else None,
            token_ids if asked.return_token_ids else None,
        )
        return await self._answer(request, asked, sampling, token_ids, texts, writer)

    async def chat(self, request: Request) -> Response:
        asked, sampling, text, token_ids = await self._chat_call(request)
        hidden: Sequence[str] = ()
        if sampling.skip_special_tokens and self._hidden_tokens:
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
            hidden = self._hidden_tokens
        tools = [] if asked.tool_choice == "none" else check_tools(asked.tools)
        reasoning = opens_reasoning(text)
        writer = ChatWriter(
            self._tokenizer,
            sampling,
            [Parser(reasoning=reasoning, tools=tools, drop=hidden) for _ in range(sampling.n)],
            include_reasoning=asked.include_reasoning is not False,
            parallel_calls=asked.parallel_tool_calls is not False,
            return_ids=bool(asked.return_token_ids),
        )
        return await self._answer(request, asked, sampling, [token_ids], [text], writer)

    async def uncached_in_completion(self, request: Request) -> Response:
        asked, sampling, token_ids, _ = await self._completion_call(request)
        return await self._uncached(asked, sampling, token_ids)

    async def uncached_in_chat(self, request: Request) -> Response:
        asked, sampling, _, token_ids = await self._chat_call(request)
        return await self._uncached(asked, sampling, [token_ids])

    async def withdraw(self, request: Request) -> Response:
        """Gives up an offer of which nobody has heard: who has begun to fetch it goes on."""
        body = protocol.decode_object(await asgi.read_body(request, self._options.max_body_bytes))
        offer, handoff = from_params(body.get(PARAM)), self._engine.scheduler.ranks[0].handoff
        done = offer is not None and handoff is not None and handoff.withdraw(offer)
        return asgi.json_response({"withdrawn": done})

    async def models(self, request: Request) -> Response:
        return asgi.json_response({"object": "list", "data": [self._card(name) for name in self._options.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return asgi.json_response(self._card(name))

    async def tokenize(self, request: Request) -> Response:
        body = await asgi.read_body(request, self._options.max_body_bytes)
        asked = protocol.decode(body, protocol.TokenizeRequest)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if asked.prompt is not None:
            ids = await asgi.off_loop(len(body), self._tokenizer.encode, asked.prompt)
        else:
            ids = (await asgi.off_loop(len(body), self._prepare_chat, asked))[1]
        strings = [self._tokenizer.token_piece(i) for i in ids] if asked.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": self._max_model_len}
        return asgi.json_response(counts | {"tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = await asgi.read_body(request, self._options.max_body_bytes)
        asked = protocol.decode(body, protocol.DetokenizeRequest)
        self._check_model(asked.model)
        self._tokenizer.check_ids(asked.tokens, "tokens")
        return asgi.json_response({"prompt": await asgi.off_loop(len(body), self._tokenizer.decode, asked.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        info = dict(self._tokenizer.config)
        info.setdefault("tokenizer_class", type(self._tokenizer).__name__)
        info["vocab_size"] = self._tokenizer.vocab_size
        info["model_max_length"] = self._max_model_len
        return asgi.json_response(info | {"chat_template": self._template.source})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.healthy else 503)

    async def version(self, request: Request) -> Response:
        role = {} if self._options.role is None else {"role": self._options.role}
        return asgi.json_response({"version": self._options.version, **role})

    async def load(self, request: Request) -> Response:
        return asgi.json_response({"server_load": self._in_flight})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._options.model_names:
            message = f"the model {name!r} does not exist"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "glmjax",
            "root": self._options.model_names[0],
            "parent": None,
            "max_model_len": self._max_model_len,
        }

    async def _completion_call(
        self, request: Request
    ) -> tuple[protocol.CompletionRequest, SamplingParams, list[list[int]], list[str | None]]:
        """A call as asked, and token ids and texts of its prompts."""
        body = await asgi.read_body(request, self._options.max_body_bytes)
        asked = protocol.decode(body, protocol.CompletionRequest, check=protocol.refuse_unsupported)
        with self._giving_up(asked):
            self._check_model(asked.model)
            sampling = protocol.completion_sampling(asked, self._options.sampling_defaults)
            prompts = protocol.prompts_of(asked.prompt)
            return asked, sampling, *await asgi.off_loop(len(body), self._prepare_prompts, prompts, bool(asked.echo))

    async def _chat_call(self, request: Request) -> tuple[protocol.ChatRequest, SamplingParams, str, list[int]]:
        """A call as asked, and text and token ids of its conversation."""
        body = await asgi.read_body(request, self._options.max_body_bytes)
        asked = protocol.decode(body, protocol.ChatRequest, check=protocol.refuse_unsupported)
        with self._giving_up(asked):
            self._check_model(asked.model)
            protocol.check_chat(asked)
            sampling = protocol.chat_sampling(asked, self._options.sampling_defaults)
            return asked, sampling, *await asgi.off_loop(len(body), self._prepare_chat, asked)

    async def _uncached(
        self, asked: protocol.GenerateRequest, sampling: SamplingParams, token_ids: Sequence[list[int]]
    ) -> Response:
        """For who routes a call: how long its prompts are, and how much of them would have to be computed here."""

        def look(ids: list[int]) -> tuple[int, int]:
            self._engine.check_request(ids, sampling)
            return self._engine.find_rank(ids, asked.cache_salt)

        found = [await asgi.off_loop(4 * len(ids), look, ids) for ids in token_ids]
        answer = {
            "prompt_tokens": [len(ids) for ids in token_ids],
            "uncached_tokens": [len(ids) - cached for ids, (_, cached) in zip(token_ids, found, strict=True)],
            "data_parallel_rank": [rank for rank, _ in found],
        }
        return asgi.json_response(answer)

    def _prepare_prompts(
        self, prompts: Sequence[str | list[int]], need_text: bool
    ) -> tuple[list[list[int]], list[str | None]]:
        token_ids: list[list[int]] = []
        texts: list[str | None] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                token_ids.append(self._tokenizer.encode(prompt))
                texts.append(prompt)
            else:
                token_ids.append(prompt)
                if need_text:
                    self._tokenizer.check_ids(prompt, "prompt")
                texts.append(self._tokenizer.decode(prompt) if need_text else None)
        return token_ids, texts

    def _prepare_chat(self, asked: protocol.ChatRequest | protocol.TokenizeRequest) -> tuple[str, list[int]]:
        text = self._template.render(asked.messages or [], asked.tools, **protocol.template_arguments(asked))
        return text, self._tokenizer.encode(text)

    def _admit(self) -> Mailbox:
        """The way to the engine, unless too much waits for it already."""
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        limit = self._options.max_num_queued_requests
        if limit is not None:
            num_waiting = self._mailbox.num_live - self._engine.stats()["num_running"]
            if num_waiting >= limit:
                self._metrics.reject()
                message = f"{num_waiting} requests are waiting already, try again later"
                raise ApiError(503, message, "service_unavailable", None, "queue_full")
        return self._mailbox

    async def _answer(
        self,
        request: Request,
        asked: protocol.GenerateRequest,
        sampling: SamplingParams,
        token_ids: Sequence[list[int]],
        texts: Sequence[str | None],
        writer: Writer,
    ) -> Response:
        """Submit the prompts and answer with what the writer makes of them."""
        transfer = read_params(asked.kv_transfer_params, len(token_ids), self._options.role)
        if (rank := request.headers.get("x-data-parallel-rank")) is not None:
            if not rank.isdecimal():
                raise RequestError(f"X-data-parallel-rank must be a whole number, got {rank!r}", "data_parallel_rank")
            transfer["data_parallel_rank"] = int(rank)
        if asked.stream and transfer.get("send"):
            raise RequestError("kv_transfer_params with do_remote_decode needs stream=false", "kv_transfer_params")
        given = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex
        name = f"{writer.prefix}-{given}"
        with self._giving_up(asked):
            generation = Generation(self._engine, self._admit())
            try:
                for place, (ids, text) in enumerate(zip(token_ids, texts, strict=True)):
                    generation.submit(
                        ids,
                        sampling,
                        name if len(token_ids) == 1 else f"{name}-{place}",
                        prompt=text,
                        priority=asked.priority or 0,
                        cache_salt=asked.cache_salt,
                        watch=self._metrics.watch(sampling),
                        **transfer,
                    )
            except BaseException as error:
                generation.close()
                if isinstance(writer, ChatWriter) and isinstance(error, RequestError) and error.param == "prompt":
                    raise RequestError(str(error), "messages") from None
                raise
        reply = replies.Reply(
            id=name,
            object=writer.chunk_object if asked.stream else writer.whole_object,
            created=int(self._engine.clock.time()),
            model=asked.model or self._options.model_names[0],
            choices=[],
        )
        if isinstance(writer, ChatWriter) and asked.return_token_ids:
            reply.prompt_token_ids = token_ids[0]
        tally = Tally(sum(map(len, token_ids)))
        if asked.stream:
            events = _events(generation, writer, reply, tally, asked)
            return asgi.EventStream(self._while_counted(events), generation.close)
        try:
            with self._counted():
                whole = _collect(generation, writer, reply, tally)
                await asgi.while_connected(request.receive, whole)
        except asgi.HungUpError:
            return Response(status_code=499)
        finally:
            generation.close()
        return asgi.json_response(reply)

    @contextlib.contextmanager
    def _giving_up(self, asked: protocol.GenerateRequest) -> Iterator[None]:
        """If a call is refused, tells the engine that offered its KV, which would keep it until the lease runs out."""
        try:
            yield
        except (RequestError, ApiError) as error:
            handoff = self._engine.scheduler.ranks[0].handoff
            # A call whose name is in use may be the one before, sent again: that is reading the very lease.
            if self._options.role == "decode" and handoff is not None and getattr(error, "param", None) != "request_id":
                with contextlib.suppress(RequestError):  # what is no offer cannot be given up
                    if (offer := from_params(asked.kv_transfer_params)) is not None:
                        handoff.connector.failed(offer, str(error))
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _while_counted(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        with self._counted():
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event


async def _collect(generation: Generation, writer: Writer, reply: replies.Reply, tally: Tally) -> None:
    """Fill in an answer in one piece."""
    async for place, delta in generation:
        tally.add(place, delta)
        writer.add(place, delta)
        if delta.kv_transfer_params is not None:
            reply.kv_transfer_params = delta.kv_transfer_params
    reply.choices = writer.choices()
    reply.usage = tally.usage()


async def _events(
    generation: Generation,
    writer: Writer,
    reply: replies.Reply,
    tally: Tally,
    asked: protocol.GenerateRequest,
) -> AsyncGenerator[bytes]:
    """The answer piece by piece; ``reply`` is the head that all events share."""
    if asked.include_usage:
        reply.usage = None

    def event(choices: Sequence[Any]) -> bytes:
        reply.choices = list(choices)
        if asked.continuous_usage:
            reply.usage = tally.usage()
        data = asgi.event(reply)
        reply.prompt_token_ids = UNSET
        return data

    try:
        for choice in writer.opening():
            yield event([choice])
        async for place, delta in generation:
            tally.add(place, delta)
            piece = writer.choice(place, delta)
            if piece is not None:
                yield event([piece])
        if asked.include_usage:
            reply.usage = tally.usage()
            yield event([])
    except Exception as error:
        log.error("stream %s broke off: %s", reply.id, error)
        yield asgi.event(replies.error(str(error), "internal_server_error", code=500))
    yield _DONE
