"""Values that cross between the layers of glmjax: sampling parameters and requests' outputs."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from glmjax.errors import RequestError
from glmjax.vllm_names import SAMPLING_IN_PYTHON, nearest, refusal

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20  # top alternatives a request may ask for, as in OpenAI's API
MAX_TOP_K = 1 << 20
GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM


def _with_fields_of_vllm[T](cls: type[T]) -> type[T]:
    """Lets a dataclass take vLLM's other fields where they ask for nothing, and say of others why not."""
    made: Any = cls
    init, fields = made.__init__, [field.name for field in dataclasses.fields(made)]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if refused := refusal(given, SAMPLING_IN_PYTHON):
            field, why = refused
            raise RequestError(why, field)
        for name in given:
            if name not in fields and name not in SAMPLING_IN_PYTHON:
                near = nearest(name, fields)
                told = f"did you mean {near}?" if near else f"there are {', '.join(fields)}"
                raise RequestError(f"unknown sampling parameter {name!r}: {told}", name)
        init(self, *args, **{name: value for name, value in given.items() if name in fields})

    made.__init__ = __init__
    return cls


@_with_fields_of_vllm
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.  Names, defaults and rules follow vLLM (spec/system.md 6.3).

    vLLM's other fields, such as ``frequency_penalty``, are taken where they ask for nothing.

    Raises:
      RequestError: a value is out of range or cannot be honoured, or a name is unknown.

    Attributes:
      n: number of completions per prompt.
      temperature: softmax temperature in [0, 2]; 0 is greedy.
      top_p: smallest set of tokens whose probability reaches this, in (0, 1].
      top_k: keep this many tokens; 0 or -1 keeps all.
      min_p: drop tokens less likely than this times the likeliest, in [0, 1].
      seed: makes sampling repeatable, whatever else is in the batch; None draws one.
      stop: strings that end the output; the text is cut before the earliest to complete.
      stop_token_ids: token ids that end the output, besides the model's own.
      include_stop_str_in_output: keep the stop string in the text.
      ignore_eos: go on past the model's end-of-sequence tokens.
      max_tokens: new tokens at most; None means up to the model's context limit.
      min_tokens: end-of-sequence and stop tokens are banned until this many are out.
      logprobs: return log-probabilities of the chosen and this many likeliest tokens (0 to 20); None: no.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: build text at all.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _check(self) -> None:
        def need(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{field} must be {rule}, got {getattr(self, field)!r}", field)

        def whole(field: str) -> None:
            value = getattr(self, field)
            need(isinstance(value, int) and not isinstance(value, bool), field, "a whole number")

        def number(field: str) -> None:
            value = getattr(self, field)
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            need(real and math.isfinite(value), field, "a finite number")

        for field in ("n", "top_k", "min_tokens"):
            whole(field)
        for field in ("temperature", "top_p", "min_p"):
            number(field)
        need(1 <= self.n <= 128, "n", "in [1, 128]")
        need(0 <= self.temperature <= 2, "temperature", "in [0, 2]")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(-1 <= self.top_k <= MAX_TOP_K, "top_k", "0 or -1 for all, or a positive number of tokens")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        if self.seed is not None:
            whole("seed")
            need(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        if self.max_tokens is not None:
            whole("max_tokens")
            need(self.max_tokens >= 1, "max_tokens", "at least 1")
            need(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens={self.max_tokens}")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        if self.logprobs is not None:
            whole("logprobs")
            need(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"in [0, {MAX_LOGPROBS}]")
        strings = all(isinstance(s, str) and s for s in self.stop)
        need(strings, "stop", "a non-empty string or a list of them")
        ids = all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in self.stop_token_ids)
        need(ids, "stop_token_ids", "a list of token ids")
        if self.greedy and self.n > 1:
            raise RequestError(f"n must be 1 with greedy sampling (temperature 0), got {self.n}", "n")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the model's own distribution (before temperature and filters)."""

    logprob: float
    rank: int  # 1 is the likeliest token
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      index: which of the ``n`` completions.
      text: detokenised output so far.
      token_ids: generated ids, the stop token included.
      finish_reason: None while running.
      stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
      logprobs: per token, {token id: Logprob}; None unless asked for.
      cumulative_logprob: sum over the chosen tokens; None unless logprobs were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclasses.dataclass
class RequestOutput:
    """All completions of one prompt, as ``LLM.generate`` returns them.

    Attributes:
      num_cached_tokens: prompt tokens whose KV came from the prefix cache (largest over the completions).
      kv_transfer_params: where another engine can fetch the prompt's KV, if it was asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
