"""Two engines as one: prompts are computed by one, outputs by the other.

The face is that of ``Engine``. A request is checked and held by the decode engine, which its owner knows; the prefill
engine computes its prompt and offers the KV, and with the offer the decode engine goes on. What that has cached, up to
a short rest, it computes itself. If prefill fails a request, the decode engine computes the prompt, or the request
fails: a choice.
"""

import threading
from collections.abc import Sequence
from typing import Any

from glmjax.serving.engine import Engine
from glmjax.serving.handle import OnOutput, RequestHandle
from glmjax.serving.handoff import OnFailure
from glmjax.serving.request import OutputDelta
from glmjax.serving.transfer.params import from_params
from glmjax.types import SamplingParams

DRAIN_POLL = 0.01  # seconds between looks whether all is done

PROMPT_ONLY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class DisaggregatedEngine:
    """Implements what users of ``Engine`` rely on.

    Args:
      prefill: computes prompts; its handoff offers them.
      decode: whose handoff can fetch what ``prefill`` offers.
      min_remote_tokens: prompts with fewer tokens that the decode engine has not cached are computed there.
      on_failure: what becomes of a request whose prompt ``prefill`` cannot compute.
    """

    def __init__(
        self, prefill: Engine, decode: Engine, min_remote_tokens: int = 1, on_failure: OnFailure = "recompute"
    ):
        self.prefill, self.decode = prefill, decode
        self.min_remote_tokens, self.on_failure = min_remote_tokens, on_failure
        self._lock = threading.Lock()
        self._prompts: dict[str, str] = {}  # request -> the prefill engine's request for it
        self._numbers = 0
        self._threaded = False

    @property
    def scheduler(self) -> Any:
        """The decode engine's, whose limits are the requests'."""
        return self.decode.scheduler

    @property
    def clock(self) -> Any:
        return self.decode.clock

    @property
    def tokenizer(self) -> Any:
        return self.decode.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.decode.vocab_size

    @property
    def has_work(self) -> bool:
        return self.prefill.has_work or self.decode.has_work

    @property
    def healthy(self) -> bool:
        return self.prefill.healthy and self.decode.healthy

    @property
    def fault(self) -> str | None:
        """Why no requests are served any more, if that is for good: without ``prefill`` prompts are computed here."""
        return self.decode.fault or (self.prefill.fault if self.on_failure == "fail" else None)

    def step(self) -> None:
        """A step of either engine that has something to do, if only to take back what has been fetched."""
        leased = any(rank.handoff is not None and rank.handoff.has_leases for rank in self.prefill.scheduler.ranks)
        if leased or self.prefill.has_work:
            self.prefill.step()
        if self.decode.has_work:
            self.decode.step()

    def stats(self) -> dict[str, int]:
        """The decode engine's, and the prefill engine's under names that begin with ``prefill_``."""
        return {**self.decode.stats(), **{f"prefill_{name}": value for name, value in self.prefill.stats().items()}}

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_output: OnOutput | None = None,
        data_parallel_rank: int | None = None,
    ) -> RequestHandle:
        """See ``Engine.submit``; the rank is the decode engine's."""
        ids, _ = self.check_request(prompt_token_ids, sampling)
        rank, cached = self.find_rank(ids, cache_salt) if data_parallel_rank is None else (data_parallel_rank, 0)
        handle = self.decode.submit(
            ids,
            sampling,
            request_id,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            on_output=on_output,
            data_parallel_rank=rank,
            held=True,
        )
        if len(ids) - 1 - cached < max(1, self.min_remote_tokens):
            self.decode.go_on(handle.request_id)
            return handle

        # What the decode engine has may be gone by then, which costs a recompute where that is allowed.
        send_from = cached if self.on_failure == "recompute" else 0

        def computed(delta: OutputDelta) -> None:
            if delta.finished:
                self._prompt_is_computed(handle.request_id, delta)

        with self._lock:
            self._numbers += 1
            name = f"{handle.request_id}/prompt-{self._numbers}"
            self._prompts[handle.request_id] = name
        try:
            self.prefill.submit(
                ids,
                PROMPT_ONLY,
                name,
                priority=priority,
                cache_salt=cache_salt,
                on_output=computed,
                send=True,
                send_from=send_from,
            )
        except BaseException:
            self.decode.abort(handle.request_id)
            raise
        return handle

    def check_request(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> tuple[list[int], int]:
        """See ``Engine.check_request``."""
        return self.decode.check_request(prompt_token_ids, sampling)

    def find_rank(self, prompt_ids: Sequence[int], cache_salt: str | None = None) -> tuple[int, int]:
        """See ``Engine.find_rank``, of the decode engine."""
        return self.decode.find_rank(prompt_ids, cache_salt)

    def abort(self, request_id: str) -> bool:
        """See ``Engine.abort``."""
        with self._lock:
            name = self._prompts.pop(request_id, None)
        if name is not None:
            self.prefill.abort(name)
        return self.decode.abort(request_id)

    def reset_prefix_cache(self) -> None:
        self.prefill.reset_prefix_cache()
        self.decode.reset_prefix_cache()

    def start(self) -> None:
        """Step both, each in a thread of its own."""
        self._threaded = True
        self.prefill.start()
        self.decode.start()

    def close(self, drain: bool = False) -> None:
        """See ``Engine.close``."""
        while drain and self.has_work and self.healthy:
            if self._threaded:
                threading.Event().wait(DRAIN_POLL)
            else:
                self.step()
        self.prefill.close(keep_connector=True)
        self.decode.close(drain)
        for scheduler in self.prefill.scheduler.ranks[:1]:
            if scheduler.handoff is not None:
                scheduler.handoff.connector.close()

    def _prompt_is_computed(self, request_id: str, last: OutputDelta) -> None:
        """In the prefill engine's thread: the request goes on, with an offer if there is one."""
        with self._lock:
            wanted = self._prompts.pop(request_id, None) is not None
        offer, error = from_params(last.kv_transfer_params), None
        if offer is None and self.on_failure == "fail":
            error = f"its prompt was not computed: {last.error or last.finish_reason}"
        goes_on = wanted and self.decode.go_on(request_id, offer, error=error)
        handoff = self.decode.scheduler.ranks[0].handoff
        if offer is not None and not goes_on and handoff is not None:
            handoff.connector.failed(offer, "the request was aborted")


AnyEngine = Engine | DisaggregatedEngine
