"""The engine: requests in, steps, outputs out.  No HTTP, no device code.

One thread at a time calls ``step`` and owns scheduler and runner: the loop thread after ``start``,
or the caller (``while engine.has_work: engine.step()``).  ``submit`` and ``abort`` may come from any
thread; they check, then leave a command that the next step carries out in order.

Invariants:
- A submitted request gets exactly one last delta per completion, whatever happens: stop, length,
  abort, failure of the runner, or close.  Then it holds nothing.
- After a failure nothing is left in scheduler and pool, and the engine takes no more requests.
- One plan at most is in flight: the next is started before its results are entered, so that the device does not wait
  for the host. A request that ended is found out one step late, and what that step did for it is passed over.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from glmjax.errors import RequestError
from glmjax.serving.blocks import prompt_digest
from glmjax.serving.clock import Clock
from glmjax.serving.data_parallel import DataParallelScheduler, find_rank
from glmjax.serving.detokenize import TextStream, special_ids
from glmjax.serving.handle import EngineError, OnOutput, RequestHandle
from glmjax.serving.plan import Plan, Runner
from glmjax.serving.request import Request, Update
from glmjax.serving.request_check import check_request
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.transfer.interface import Offer
from glmjax.serving.transfer.params import PARAM, to_params
from glmjax.types import SamplingParams

log = logging.getLogger(__name__)

TRANSFER_POLL = 0.001, 0.05  # seconds between looks at transfers while there is nothing else to do: at first, at most
LEASE_POLL = 0.2  # seconds between looks at leases while there are no requests

_COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens")
_FINISHED = ("finished_stop", "finished_length", "finished_abort", "finished_error")


class Engine:
    """Steps a scheduler and a runner, and turns their tokens into what users get.

    Attributes:
      vocab_size: ids that the model knows are below this.
      max_banned_ids: end and stop tokens of a request with ``min_tokens``, at most; the runner's limit.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        vocab_size: int,
        max_banned_ids: int = 64,
        seed: int = 0,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.clock = clock
        self.vocab_size = vocab_size
        self.max_banned_ids = max_banned_ids
        self._special = special_ids(tokenizer) if tokenizer is not None else frozenset()
        self._counters: collections.Counter[str] = collections.Counter()
        self._live: dict[str, tuple[RequestHandle, int]] = {}  # by sequence, while in the scheduler
        self._in_flight: tuple[Plan, Any] | None = None  # started, results not entered
        self._leaving: dict[str, tuple[RequestHandle, int, Update, str]] = {}  # their last delta waits for an offer

        self._poll = TRANSFER_POLL[0]
        self._wake = threading.Condition()  # guards what follows
        self._seeds = random.Random(seed)
        self._serial = itertools.count()
        self._handles: dict[str, RequestHandle] = {}
        self._held: set[str] = set()  # by request; not in the scheduler
        self._commands: collections.deque[Callable[[], object]] = collections.deque()
        self._resets = 0  # of the prefix cache, asked for and not done
        self._error: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    # The step.

    def step(self) -> None:
        """Carry out commands, start a plan, and enter the results of the one before, while the device works on.

        A failure ends every request instead of raising.
        """
        try:
            self._take_commands()
            self.scheduler.tick(self.clock.monotonic())
            plan = self.scheduler.schedule()
            self._note_scheduled(plan)
            before, self._in_flight = self._in_flight, None
            if not plan.is_empty:
                self._poll = TRANSFER_POLL[0]
                self._in_flight = plan, self.runner.start(plan)
            if before is not None:
                plan, started = before
                self._deliver(self.scheduler.commit(plan, self.runner.finish(started)))
            elif plan.is_empty and self.scheduler.has_work:
                self._wait_for_transfers()
            self._deliver_handoffs()
        except Exception as error:
            log.exception("a step failed; the engine takes no more requests")
            self._fail(error)

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self._in_flight is not None or self.scheduler.has_work

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return self._error is None and not self._closing

    @property
    def fault(self) -> str | None:
        """Why it serves no requests any more, if that is for good."""
        return None if self._error is None else f"the engine has failed: {self._error}"

    def stats(self) -> dict[str, int]:
        """Gauges and counters, the runner's included.  May be called from any thread."""
        return {
            **self.scheduler.gauges(),
            **{name: self._counters[name] for name in (*_COUNTERS, *_FINISHED)},
            **self.runner.stats(),
        }

    # The front, for any thread.

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
        send: bool = False,
        send_from: int = 0,
        offer: Offer | None = None,
        held: bool = False,
    ) -> RequestHandle:
        """Check and queue a request; RequestError at once if it cannot be served as asked.

        ``send`` offers its KV to another engine, which has ``send_from`` tokens of it, once its prompt is computed, and
        ``offer`` says where this engine can fetch it (the first completion does, others find it in the prefix cache).
        ``held`` leaves it out of the queue until ``go_on``.

        ``on_output`` gets every delta in the stepping thread and should only pass it on.  A sequence
        id carries a serial number, so that the runner never sees one twice.
        """
        arrival = self.clock.monotonic()
        prompt_ids, max_tokens = self.check_request(prompt_token_ids, sampling)
        ranks = len(self.scheduler.ranks)
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < ranks:
            raise RequestError(
                f"data_parallel_rank must be in [0, {ranks}), got {data_parallel_rank}", "data_parallel_rank"
            )
        handoff = self.scheduler.ranks[0].handoff
        if send and handoff is not None:
            handoff.check_fits(len(prompt_ids), send_from)
        if offer is not None:
            offer = _for_prompt(offer, prompt_ids)
        streams = [self._text_stream(sampling) for _ in range(sampling.n)]
        with self._wake:
            self._refuse_if_down()
            request_id = self._check_request_id(request_id)
            base = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
            requests = [
                Request(
                    request_id=f"{request_id}#{next(self._serial)}",
                    prompt_ids=prompt_ids,
                    sampling=sampling,
                    max_tokens=max_tokens,
                    seed=_int64(base + index),
                    priority=priority,
                    cache_salt=cache_salt,
                    rank=data_parallel_rank,
                )
                for index in range(sampling.n)
            ]
            handle = RequestHandle(request_id, prompt, requests, streams, arrival, on_output)
            requests[0].send, requests[0].send_from, requests[0].offer = send, send_from, offer
            self._handles[request_id] = handle
            if held:
                self._held.add(request_id)
            else:
                self._command(functools.partial(self._admit, handle))
        return handle

    def go_on(self, request_id: str, offer: Offer | None = None, *, error: str | None = None) -> bool:
        """Queue a request that was held, whose KV may be fetched now, or end it with an error.

        False if it has been aborted meanwhile.
        """
        with self._wake:
            if request_id not in self._held:
                return False
            handle = self._handles[request_id]
            if error is not None:
                handle.error = EngineError(error)
                self._command(functools.partial(self._abort, handle))
                return True
            self._held.remove(request_id)
            request = handle.requests[0]
            request.offer = None if offer is None else _for_prompt(offer, request.prompt_ids)
            self._command(functools.partial(self._admit, handle))
            return True

    def abort(self, request_id: str) -> bool:
        """End a request at the next step; False if there is none of this id (any more)."""
        with self._wake:
            handle = self._handles.get(request_id)
            if handle is None:
                return False
            self._command(functools.partial(self._abort, handle))
        return True

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV at the next step; running requests keep theirs."""
        with self._wake:
            self._resets += 1
            self._command(self._reset)

    def find_rank(self, prompt_ids: Sequence[int], cache_salt: str | None = None) -> tuple[int, int]:
        """Data-parallel rank that a prompt would go to now, and how many of its leading tokens are cached there."""
        rank, cached = find_rank(self.scheduler.ranks, prompt_ids, cache_salt)
        return rank, 0 if self._resets else cached

    def start(self) -> None:
        """Step in a thread of its own from now on."""
        with self._wake:
            self._refuse_if_down()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
                self._thread.start()

    def close(self, drain: bool = False, *, keep_connector: bool = False) -> None:
        """Finish (``drain``) or abort what is there, stop the thread and close the runner.

        The connector to other engines is closed too, unless they are still to fetch from it.
        """
        with self._wake:
            if self._closing:
                return
            self._closing = True
            for handle in () if drain else self._handles.values():
                self._command(functools.partial(self._abort, handle))
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        while self.has_work:
            self.step()
        self.runner.close()
        handoff = self.scheduler.ranks[0].handoff
        if handoff is not None and not keep_connector:
            handoff.connector.close()

    def _loop(self) -> None:
        while True:
            with self._wake:
                leased = any(rank.handoff is not None and rank.handoff.has_leases for rank in self.scheduler.ranks)
                self._wake.wait_for(lambda: self.has_work or self._closing, LEASE_POLL if leased else None)
                if self._closing and not self.has_work:
                    return
            self.step()

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._wake.notify()

    # Checks of a request.

    def _refuse_if_down(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error
        if self._closing:
            raise EngineError("the engine is closed")

    def _check_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return next(i for n in self._serial if (i := f"req-{n}") not in self._handles)
        if request_id in self._handles:
            raise RequestError(f"request_id {request_id!r} is in use", "request_id")
        return request_id

    def check_request(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> tuple[list[int], int]:
        """The prompt and the limit on new tokens of a request; RequestError if it cannot be served as asked."""
        return check_request(self, prompt_token_ids, sampling)

    def _text_stream(self, sampling: SamplingParams) -> TextStream | None:
        if self.tokenizer is None or not sampling.detokenize:
            return None
        return TextStream(self.tokenizer, self._special, sampling)

    # Commands and results, in the stepping thread.

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        with self._wake:
            self._resets -= 1

    def _admit(self, handle: RequestHandle) -> None:
        for index, request in enumerate(handle.requests):
            self._live[request.request_id] = (handle, index)
            self.scheduler.add(request)

    def _abort(self, handle: RequestHandle) -> None:
        with self._wake:
            held = handle.request_id in self._held
            self._held.discard(handle.request_id)
        for index, request in enumerate(handle.requests):
            if held or self._leaving.pop(request.request_id, None) is not None:
                self._cut_short(handle, index)
            if self._live.pop(request.request_id, None) is not None:
                self.scheduler.abort(request.request_id)
                self._cut_short(handle, index)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._error = error
            handles = list(self._handles.values())
            self._commands.clear()
            self._held.clear()
        self.scheduler.clear()
        self._live.clear()
        self._leaving.clear()
        self._in_flight = None
        for handle in handles:
            handle.error = error
            for index, completion in enumerate(handle.output.outputs):
                if completion.finish_reason is None:
                    self._cut_short(handle, index)

    def _note_scheduled(self, plan: Plan) -> None:
        now = self.clock.monotonic()
        for chunk in plan.chunks:
            handle, index = self._live[chunk.request_id]
            if handle.note_scheduled(index, now):
                self._counters["prompt_tokens"] += len(handle.output.prompt_token_ids)
                self._counters["cached_tokens"] += handle.output.num_cached_tokens

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Make text of new tokens, end what a stop string ends, and pass everything on."""
        for update in updates:
            sequence_id = update.request.request_id
            if sequence_id not in self._live:
                continue  # another completion of the request has ended it
            handle, index = self._live[sequence_id]
            stream = handle.streams[index]
            text = ""
            if stream is not None:
                piece = stream.push(update.token_ids, update.finish_reason)
                text = piece.text
                if piece.stop is not None:
                    self.scheduler.abort(sequence_id)
                    update = dataclasses.replace(
                        update,
                        token_ids=update.token_ids[: piece.num_tokens],
                        logprobs=update.logprobs[: piece.num_tokens],
                        finish_reason="stop",
                        stop_reason=piece.stop,
                    )
            if update.error is not None:
                handle.error = EngineError(update.error)
            if update.finish_reason is not None:
                del self._live[sequence_id]
            # One that a stop string ends is not sent: the scheduler knows nothing of it.
            sent = update.request.send and update.error is None and (stream is None or piece.stop is None)
            if update.finish_reason is not None and sent:
                self._leaving[sequence_id] = handle, index, update, text
                continue
            self._emit(handle, index, update, text)
            if update.error is not None:
                self._abort(handle)  # the other completions of the request

    def _deliver_handoffs(self) -> None:
        """Tell owners of requests that can be fetched now, and of those that could not."""
        failures, offers = self.scheduler.take_handoffs()
        self._deliver(failures)
        for sequence_id, offer in offers.items():
            if sequence_id not in self._leaving:  # aborted meanwhile, or ended by a stop string
                handoff = self.scheduler.ranks[0].handoff
                assert handoff is not None
                handoff.connector.withdraw(offer.request_id)
                continue
            handle, index, update, text = self._leaving.pop(sequence_id)
            handle.output.kv_transfer_params = to_params(offer)
            self._emit(handle, index, update, text)

    def _wait_for_transfers(self) -> None:
        """Nothing can be computed until rows have come from elsewhere, or others have read theirs."""
        with self._wake:
            self._wake.wait(self._poll)
        self._poll = min(1.2 * self._poll, TRANSFER_POLL[1])

    def _cut_short(self, handle: RequestHandle, index: int) -> None:
        """End a completion that gets no further token, with the text held back unless the engine failed."""
        stream = handle.streams[index]
        text = "" if stream is None or handle.error is not None else stream.flush()
        self._emit(handle, index, Update(handle.requests[index], (), (), "abort"), text)

    def _emit(self, handle: RequestHandle, index: int, update: Update, text: str) -> None:
        delta = handle.add(index, update, text, self.clock.monotonic(), self.tokenizer)
        self._counters["generation_tokens"] += len(update.token_ids)
        if update.finish_reason is not None:
            self._counters["finished_error" if handle.error else f"finished_{update.finish_reason}"] += 1
        if delta.finished:
            with self._wake:
                del self._handles[handle.request_id]
        if not handle.deliver(delta):
            self.abort(handle.request_id)


def _for_prompt(offer: Offer, prompt_ids: Sequence[int]) -> Offer:
    """An offer as it is wanted: with the KV of this prompt. RequestError if it cannot have that."""
    if offer.num_tokens < len(prompt_ids) - 1:
        raise RequestError(
            f"{PARAM}: the KV of {offer.num_tokens} tokens is offered for a prompt of {len(prompt_ids)} tokens", PARAM
        )
    return dataclasses.replace(offer, prompt=prompt_digest(prompt_ids))


def _int64(value: int) -> int:
    """Wrap around into the signed 64-bit range."""
    return (value + 2**63) % 2**64 - 2**63
