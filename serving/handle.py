"""What the owner of a request holds: output so far, moments of its life, and how it ended.

The engine's stepping thread writes through ``add``; the owner reads when finished, or listens with
``on_output``, which gets every addition as an ``OutputDelta`` in the stepping thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from glmjax.errors import GlmjaxError
from glmjax.serving.detokenize import TextStream
from glmjax.serving.plan import TokenLogprobs
from glmjax.serving.request import OutputDelta, Request, RequestMetrics, Update
from glmjax.types import CompletionOutput, Logprob, RequestOutput

log = logging.getLogger(__name__)

OnOutput = Callable[[OutputDelta], None]


class EngineError(GlmjaxError):
    """The engine has failed or is closed; no request can be served."""


class RequestHandle:
    """A submitted request, as its owner sees it.

    Attributes:
      requests: its sequences, one per completion.
      streams: their text; None where no text is wanted.
      output: everything so far; read it when ``finished``.
      metrics: moments of its life.
      error: why the engine could not serve it; None if all went well.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        streams: Sequence[TextStream | None],
        arrival: float,
        on_output: OnOutput | None,
    ):
        self.requests = requests
        self.streams = streams
        self.metrics = RequestMetrics(arrival)
        self.error: Exception | None = None
        with_logprobs = requests[0].sampling.logprobs is not None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(requests[0].prompt_ids),
            outputs=[
                CompletionOutput(i, logprobs=[], cumulative_logprob=0.0) if with_logprobs else CompletionOutput(i)
                for i in range(len(requests))
            ],
            finished=False,
        )
        self._on_output = on_output
        self._done = threading.Event()

    @property
    def request_id(self) -> str:
        return self.output.request_id

    @property
    def finished(self) -> bool:
        """The last delta is out."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait until finished (a thread must be stepping); raise what the engine failed with."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        if self.error is not None:
            raise EngineError(f"request {self.request_id}: {self.error}") from self.error
        return self.output

    def note_scheduled(self, index: int, now: float) -> bool:
        """Enter that a completion is in a plan; True the first time for the request."""
        first = self.metrics.first_scheduled is None
        if first:
            self.metrics.first_scheduled = now
        cached = self.requests[index].num_cached_tokens or 0
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, cached)
        return first

    def add(self, index: int, update: Update, text: str, now: float, tokenizer: Tokenizer | None) -> OutputDelta:
        """Extend a completion; return the addition for ``deliver``."""
        completion = self.output.outputs[index]
        completion.text += text
        completion.token_ids.extend(update.token_ids)
        logprobs = None
        if completion.logprobs is not None:
            pairs = zip(update.token_ids, update.logprobs, strict=True)
            logprobs = [named_logprobs(token_id, entry, tokenizer) for token_id, entry in pairs]
            completion.logprobs.extend(logprobs)
            gain = sum(entry.logprob for entry in update.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + gain
        completion.finish_reason, completion.stop_reason = update.finish_reason, update.stop_reason

        finished = all(c.finish_reason is not None for c in self.output.outputs)
        self.output.finished = finished
        moments = self.metrics
        if update.token_ids:
            moments.first_token = now if moments.first_token is None else moments.first_token
            moments.last_token = now
        if finished:
            moments.finished = now
        return OutputDelta(
            request_id=self.request_id,
            index=index,
            text=text,
            token_ids=update.token_ids,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            finished=finished,
            num_prompt_tokens=len(self.output.prompt_token_ids),
            num_cached_tokens=self.output.num_cached_tokens,
            time=now,
            metrics=moments if finished else None,
            error=self.error,
            kv_transfer_params=self.output.kv_transfer_params if finished else None,
        )

    def deliver(self, delta: OutputDelta) -> bool:
        """Hand an addition to the owner; False if its callback failed, which is not called again."""
        try:
            if self._on_output is not None:
                self._on_output(delta)
            return True
        except Exception:
            log.exception("on_output of request %s failed", self.request_id)
            self._on_output = None
            return False
        finally:
            if delta.finished:
                self._done.set()


def named_logprobs(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token, then the likeliest."""

    def text(of: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([of], skip_special_tokens=False)

    named = {token_id: Logprob(entry.logprob, entry.rank, text(token_id))}
    for rank, (top_id, logprob) in enumerate(entry.top, 1):
        if top_id not in named:
            named[top_id] = Logprob(logprob, rank, text(top_id))
    return named
