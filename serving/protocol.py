"""Requests of OpenAI's HTTP API, as vLLM extends it: their schemas, checks and sampling parameters.

A field that would change the answer but that glmjax cannot honour is refused by name; a field that
nobody knows is ignored with a warning in the log, as vLLM does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from glmjax.errors import RequestError
from glmjax.serving import bad_fields
from glmjax.types import MAX_LOGPROBS, SamplingParams
from glmjax.vllm_names import NO_GRAMMAR, SAMPLING, Refused, refusal


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    kv_transfer_params: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest, kw_only=True):
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16


class ChatRequest(GenerateRequest, kw_only=True):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    clear_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    clear_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


# Field -> (values that ask for nothing, why not).
_REFUSED: Refused = {
    **SAMPLING,
    "suffix": (("",), "the model continues text, it fills nothing in"),
    "chat_template": ((), "the server's own template is used"),
    "documents": (([],), "put them into messages"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "audio": ((), "the model reads and writes text only"),
    "modalities": ((["text"], []), "the model reads and writes text only"),
    "web_search_options": ((), "the server searches nothing"),
}

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "detokenize",
)


def decode[T: msgspec.Struct](body: bytes, kind: type[T], check: Callable[[Any], None] | None = None) -> T:
    """A request out of an HTTP body, or a ``RequestError`` that names the field."""
    raw = decode_object(body)
    if check is not None:
        check(raw)
    try:
        asked = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise bad_fields.type_error(error, raw) from None
    bad_fields.warn_of_unknown(raw, kind, _REFUSED)
    return asked


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object out of an HTTP body, or a ``RequestError``."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
        raise RequestError(f"the body is not valid JSON: {said[:1].lower()}{said[1:]}") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    return raw


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if refused := refusal(raw, _REFUSED):
        field, why = refused
        raise RequestError(why, field)


def completion_sampling(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    _check_stream(request)
    _check_format(request)
    if request.echo and request.logprobs is not None:
        raise RequestError("echo with logprobs is not supported", "logprobs")
    return _sampling(request, defaults, max_tokens=request.max_tokens, logprobs=request.logprobs)


def chat_sampling(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    _check_stream(request)
    if request.top_logprobs is not None:
        if request.top_logprobs > 0 and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {request.top_logprobs}",
                "top_logprobs",
            )
    if request.detokenize is False:
        raise RequestError("chat needs text, detokenize cannot be false", "detokenize")
    asked = request.max_completion_tokens
    if asked is not None and asked < 1:
        raise RequestError(f"max_completion_tokens must be at least 1, got {asked}", "max_completion_tokens")
    return _sampling(
        request,
        defaults,
        max_tokens=request.max_tokens if asked is None else asked,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def check_chat(request: ChatRequest) -> None:
    """Refuse what would need a grammar."""
    _check_format(request)
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if choice == "required" or isinstance(choice, dict):
        raise RequestError(
            f"tool_choice {'required' if choice == 'required' else 'of a named tool'} "
            f"{NO_GRAMMAR}; use 'auto' or 'none'",
            "tool_choice",
        )
    raise RequestError(f"tool_choice must be 'none' or 'auto', got {choice!r}", "tool_choice")


def _check_format(request: GenerateRequest) -> None:
    wanted = (request.response_format or {}).get("type", "text")
    if wanted != "text":
        raise RequestError(f"response_format of type {wanted!r} {NO_GRAMMAR}", "response_format")


def template_arguments(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Keyword arguments of ``ChatTemplate.render``, the messages and tools aside.

    A field of the request itself goes before the same name in ``chat_template_kwargs``.
    """
    given = dict(request.chat_template_kwargs or {})
    for taken in ("self", "messages", "tools"):
        if taken in given:
            raise RequestError(f"chat_template_kwargs cannot replace {taken}", "chat_template_kwargs")
    for name in ("reasoning_effort", "clear_thinking", "add_generation_prompt", "continue_final_message"):
        value = getattr(request, name)
        if value is not None:
            given[name] = value
    return given


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: a text, a list of texts, token ids, or a list of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
            return list(prompt)
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids, and not empty",
        "prompt",
    )


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in items)


def _check_stream(request: GenerateRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")


def _sampling(
    request: GenerateRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    given = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    chosen = dict(defaults) | {name: v for name, v in given.items() if v is not None}
    return SamplingParams(**chosen | {"max_tokens": max_tokens, "logprobs": logprobs})
