"""From the engine's thread to the event loop: requests of one HTTP call and their deltas.

The engine's thread only appends to a deque; one wake-up of the loop hands on all that has come, so a
thousand streams cost one wake-up a step.  A ``Generation`` that is closed early aborts what is left.
"""

import asyncio
import collections
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from glmjax.serving.disaggregated import AnyEngine
from glmjax.serving.handle import EngineError
from glmjax.serving.request import OutputDelta
from glmjax.types import SamplingParams

Watch = Callable[[OutputDelta], None]


class Mailbox:
    """Deltas on their way to a loop.  ``post`` may be called from any thread.

    Attributes:
      num_live: sequences that were submitted and have not ended, as the loop knows it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_live = 0
        self._loop = loop
        self._waiting: collections.deque[tuple[asyncio.Queue[OutputDelta], OutputDelta]] = collections.deque()
        self._called = False

    def post(self, queue: asyncio.Queue[OutputDelta], delta: OutputDelta) -> None:
        self._waiting.append((queue, delta))
        if not self._called and not self._loop.is_closed():
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: whoever posts from now on calls again
        while self._waiting:
            queue, delta = self._waiting.popleft()
            queue.put_nowait(delta)


class Generation:
    """The engine requests of one HTTP call.  Iterating gives (place of the prompt, delta)."""

    def __init__(self, engine: AnyEngine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._queue: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._places: dict[str, int] = {}
        self._watches: dict[str, Watch] = {}
        self._live: dict[str, int] = {}  # sequences that have not ended

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        watch: Watch | None = None,
        **transfer: Any,
    ) -> None:
        """Queue one prompt; ``watch`` sees its deltas too, and ``transfer`` is for ``Engine.submit``."""
        self._engine.submit(
            prompt_ids,
            sampling,
            request_id,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            on_output=functools.partial(self._mailbox.post, self._queue),
            **transfer,
        )
        self._places[request_id] = len(self._places)
        self._live[request_id] = sampling.n
        self._mailbox.num_live += sampling.n
        if watch is not None:
            self._watches[request_id] = watch

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        while self._live:
            delta = await self._queue.get()
            if delta.finish_reason is not None:
                self._end(delta.request_id, 1)
            if delta.request_id in self._watches:
                self._watches[delta.request_id](delta)
            if isinstance(delta.error, EngineError):
                raise delta.error
            if delta.error is not None:
                raise EngineError(f"the engine has failed: {delta.error}") from delta.error
            yield self._places[delta.request_id], delta

    def close(self) -> None:
        """Abort what has not ended.  May be called again."""
        for request_id, num_live in list(self._live.items()):
            self._engine.abort(request_id)
            self._end(request_id, num_live)

    def _end(self, request_id: str, count: int) -> None:
        self._mailbox.num_live -= count
        self._live[request_id] -= count
        if not self._live[request_id]:
            del self._live[request_id]
