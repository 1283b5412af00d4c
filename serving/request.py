"""One sequence on the host, the rule that ends it, and the values its owner gets.

A request is (computed, known) tokens; prefill, chunk, decode and resume are all the same difference.

    tokens    [ prompt ............ | output ..... ]
    computed  [ KV in blocks ............. )            num_computed <= num_tokens
    a step    computes tokens[num_computed : num_computed + n] and samples if that reaches the end

Steps are planned before the ones before them are finished.  ``num_computed`` counts what is planned; of new tokens that
are still to come back the host knows that there is at least one a step, and how many there are at most.

Only the scheduler changes a ``Request``.  A prompt with ``n`` completions is ``n`` requests.
"""

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import Any

from glmjax.serving.plan import TokenLogprobs
from glmjax.serving.transfer.interface import Offer
from glmjax.types import FinishReason, Logprob, SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """State of one sequence.

    Attributes:
      max_tokens: new tokens at most, never None.
      arrival: order of arrival; set by the scheduler.
      token_ids: prompt and output.
      num_computed: leading tokens whose KV is in ``blocks``, or will be after the steps in flight.
      continues: it has sampled since its admission, so the device knows its last token.
      in_flight: steps that sampled and are not finished; most_in_flight: new tokens that they bring at most.
      slot: place in the device's state while running.
      admission: number of its last admission.
      num_cached_tokens: prefix cache hit of the first admission; None before it.
      blocks: leased blocks in order of position; empty unless running.
      digests: chain digests of the leading full blocks of known tokens.
      num_published: leading blocks that were offered to, or came from, the prefix cache.
      rank: data-parallel rank that it is for; None: any.
      send: its KV is offered to another engine once its prompt is computed.
      send_from: so many leading tokens the other engine has, whose KV need not be.
      offer: where the KV of its prompt can be fetched; None once that is under way.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int = 0
    priority: int = 0
    cache_salt: str | None = None
    arrival: int = 0
    status: Status = Status.WAITING
    token_ids: list[int] = dataclasses.field(init=False)
    num_computed: int = 0
    continues: bool = False
    in_flight: int = 0
    most_in_flight: int = 0
    slot: int = 0
    admission: int = 0
    num_cached_tokens: int | None = None
    blocks: tuple[int, ...] = ()
    digests: list[bytes] = dataclasses.field(default_factory=list)
    num_published: int = 0
    rank: int | None = None
    send: bool = False
    send_from: int = 0
    offer: Offer | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def remaining(self) -> int:
        """Known tokens still to compute."""
        return len(self.token_ids) - self.num_computed

    @property
    def horizon(self) -> int:
        """Positions that can ever need KV: the last token to come is never computed."""
        return len(self.prompt_ids) + self.max_tokens - 1


@dataclasses.dataclass(frozen=True)
class Completion:
    """How many of some new tokens count, and why the sequence ends with the last of them, if so."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclasses.dataclass(frozen=True)
class Update:
    """What a step did for one request: new tokens, and how they end it, if they do; ``error`` says why it had to."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


def complete(request: Request, new_ids: Sequence[int], eos_ids: Collection[int], max_model_len: int) -> Completion:
    """Apply the rule to tokens that arrive together: nothing past the first that ends it counts."""
    params = request.sampling
    for count, token in enumerate(new_ids, 1):
        num_output = request.num_output_tokens + count
        if num_output > params.min_tokens:
            if token in eos_ids and not params.ignore_eos:
                return Completion(count, "stop")
            if token in params.stop_token_ids:
                return Completion(count, "stop", token)
        num_tokens = request.num_prompt_tokens + num_output
        if num_output >= request.max_tokens or num_tokens >= max_model_len:
            return Completion(count, "length")
    return Completion(len(new_ids))


def banned_ids(request: Request, eos_ids: Collection[int]) -> tuple[int, ...]:
    """Tokens that may not come next because ``min_tokens`` are not out yet."""
    params = request.sampling
    if request.num_output_tokens >= params.min_tokens:
        return ()
    eos = () if params.ignore_eos else eos_ids
    return tuple(sorted({*eos, *params.stop_token_ids}))


@dataclasses.dataclass
class RequestMetrics:
    """Moments of a request's life on the monotonic clock, over all its completions."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """What one step added to one completion.

    Attributes:
      index: which of the ``n`` completions.
      text: new text; may lag behind the tokens, and catches up with the last delta.
      token_ids: new tokens; empty for an abort.
      logprobs: one dict per new token; None unless asked for.
      finish_reason: set in the completion's last delta.
      finished: every completion of the request is done; ``metrics`` is set.
      time: when this was made, on the monotonic clock.
      error: the engine failed and the completion ends here.
      kv_transfer_params: with the last delta, where another engine can fetch the prompt's KV, if that was asked for.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    finished: bool = False
    num_prompt_tokens: int
    num_cached_tokens: int
    time: float
    metrics: RequestMetrics | None = None
    error: Exception | None = None
    kv_transfer_params: dict[str, Any] | None = None
