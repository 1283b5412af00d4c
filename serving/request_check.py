"""What of a request depends on the engine: its vocabulary, context, pool and end tokens. Changes nothing."""

import operator
from collections.abc import Sequence
from typing import Any, Protocol

from glmjax.errors import RequestError
from glmjax.types import SamplingParams


class Limits(Protocol):
    """An engine, as far as requests are checked against it."""

    scheduler: Any
    tokenizer: Any
    vocab_size: int
    max_banned_ids: int


def check_request(engine: Limits, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> tuple[list[int], int]:
    """The prompt and the limit on new tokens of a request; RequestError if it cannot be served as asked."""
    prompt = _prompt(engine, prompt_token_ids)
    return prompt, _max_tokens(engine, len(prompt), sampling)


def _prompt(engine: Limits, token_ids: Sequence[int]) -> list[int]:
    try:
        ids = [operator.index(t) for t in token_ids]
    except TypeError:
        raise RequestError("a prompt must be a list of token ids", "prompt") from None
    if not ids:
        raise RequestError("the prompt is empty", "prompt")
    _check_in_vocabulary(engine, (min(ids), max(ids)), "prompt")
    context = engine.scheduler.config.max_model_len
    if len(ids) >= context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but the context is {context} tokens and at least one is for the output",
            "prompt",
        )
    return ids


def _check_in_vocabulary(engine: Limits, token_ids: Sequence[int], param: str) -> None:
    outside = [t for t in token_ids if not 0 <= t < engine.vocab_size]
    if outside:
        raise RequestError(f"token id {outside[0]} is outside the vocabulary of {engine.vocab_size} tokens", param)


def _max_tokens(engine: Limits, num_prompt: int, sampling: SamplingParams) -> int:
    if sampling.stop and engine.tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and the engine has none", "stop")
    _check_in_vocabulary(engine, sampling.stop_token_ids, "stop_token_ids")
    num_ends = len({*sampling.stop_token_ids, *engine.scheduler.eos_ids})
    if sampling.min_tokens > 0 and num_ends > engine.max_banned_ids:
        raise RequestError(
            f"min_tokens works with at most {engine.max_banned_ids} end and stop tokens, got {num_ends}",
            "stop_token_ids",
        )
    context = engine.scheduler.config.max_model_len
    room = max(1, engine.scheduler.max_sequence_tokens - num_prompt)
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if num_prompt + max_tokens > context:
        raise RequestError(
            f"the context is {context} tokens, but {num_prompt + max_tokens} were asked for: {num_prompt} in the "
            f"prompt and max_tokens={max_tokens}",
            "max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens={sampling.min_tokens}, but the prompt leaves room for {max_tokens}", "min_tokens"
        )
    engine.scheduler.check_fits(num_prompt, max_tokens)
    return max_tokens
