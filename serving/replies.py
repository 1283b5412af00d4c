"""Answers of OpenAI's HTTP API as values, and how log-probabilities are written in its two dialects.

A field left ``UNSET`` does not appear in the JSON, one that is None appears as null.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from glmjax.serving.tokenizer import Tokenizer
from glmjax.types import Logprob


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float]] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] = msgspec.field(default_factory=list)


class Function(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class Reply(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: Any = UNSET  # where the prompt's KV was to be offered to another engine


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptDetails(cached_tokens))


def error(message: str, kind: str, param: str | None = None, code: Any = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob]],
    num_top: int,
    offset: int,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """Tokens in the form of ``/v1/completions``; ``offset`` is the first one's place in the text."""
    out = CompletionLogprobs()
    for token_id, row in zip(token_ids, rows, strict=True):
        text = tokenizer.token_text(token_id)
        chosen = row[token_id]
        out.tokens.append(text)
        out.token_logprobs.append(_finite(chosen.logprob))
        likeliest = {tokenizer.token_text(t): _finite(p.logprob) for t, p in _top(row, num_top)}
        out.top_logprobs.append({text: _finite(chosen.logprob), **likeliest})
        out.text_offset.append(offset)
        offset += len(text)
    return out


def chat_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[Mapping[int, Logprob]],
    num_top: int,
    tokenizer: Tokenizer,
) -> ChatLogprobs:
    """Tokens in the form of ``/v1/chat/completions``."""

    def entry(token_id: int, value: Logprob) -> tuple[str, float, list[int]]:
        raw = tokenizer.token_bytes(token_id)
        return raw.decode("utf-8", errors="replace"), _finite(value.logprob), list(raw)

    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        top = [TopLogprob(*entry(t, p)) for t, p in _top(row, num_top)]
        content.append(TokenLogprob(*entry(token_id, row[token_id]), top))
    return ChatLogprobs(content)


def _top(row: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    likeliest = sorted(row.items(), key=lambda item: item[1].rank)
    return [(t, p) for t, p in likeliest if p.rank <= num_top][:num_top]


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; this is the floor that OpenAI names
