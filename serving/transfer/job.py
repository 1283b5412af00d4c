"""A fetch on its way: what bounds it in time, what it reads from whom, and how that is cut into pieces."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from glmjax.serving.clock import Clock
from glmjax.serving.transfer.interface import Fetch, PeerInfo, TransferError
from glmjax.serving.transfer.plan import Side, TransferPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How long, how much, and where.

    Attributes:
      host, port: where this engine answers others; port 0 takes a free one.
      lease_seconds: of a lease without a sign of life; signs are given at a sixth of it.
      timeout: seconds for a whole fetch.
      call_timeout: seconds for a message and its answer.
      piece_bytes: moved at a time where rows are packed or staged: what that takes in memory, at most.
      inline: a fetch is over when ``fetch`` returns, for tests and simulation.
    """

    host: str = "127.0.0.1"
    port: int = 0
    lease_seconds: float = 30.0
    timeout: float = 120.0
    call_timeout: float = 5.0
    piece_bytes: int = 64 << 20
    inline: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """A producer that hands were shaken with; ``link`` is what a kind of connector keeps of it."""

    info: PeerInfo
    slots: dict[str, int]
    link: Any


class Guard:
    """Limits of a running fetch: its time, its lease, and whether it is still wanted."""

    def __init__(self, fetch: Fetch, heartbeat: Callable[[], float], clock: Clock, settings: Settings):
        self._fetch, self._heartbeat, self._clock = fetch, heartbeat, clock
        self._every = settings.lease_seconds / 6
        self._deadline = clock.monotonic() + settings.timeout
        self._beat = clock.monotonic()
        self.valid_until = 0.0

    @property
    def valid(self) -> bool:
        """Whether the lease lives for sure."""
        return self._clock.monotonic() < self.valid_until

    def extend(self, asked: float, seconds: float) -> None:
        """The producer granted so much when it was asked at that time."""
        self.valid_until = max(self.valid_until, asked + seconds)
        self._every = min(self._every, seconds / 6)
        self._beat = asked

    def check(self) -> None:
        """To be called again and again while rows are read. TransferError if they should not be."""
        now = self._clock.monotonic()
        if self._fetch.cancelled:
            raise TransferError("the fetch was cancelled")
        if now >= self._deadline:
            raise TransferError("the fetch took too long")
        if now - self._beat >= self._every:
            self._beat = now
            try:
                self.extend(now, self._heartbeat())
            except Unheard as error:
                # One message may get lost. What is read until the lease runs out is right.
                if not self.valid:
                    raise TransferError(f"the lease could not be extended: {error}") from error

    def pause(self, seconds: float = 0.0005) -> None:
        """``check``, and let others run for a moment."""
        self.check()
        threading.Event().wait(seconds)


class Unheard(TransferError):
    """No answer: that says nothing of the lease."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Tokens ``first .. last - 1`` to be read from a peer."""

    fetch: Fetch
    peer: Peer
    source: Side
    target: Side
    first: int
    last: int
    final: bool
    guard: Guard

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """The range in pieces of at most so many bytes, cut between entries of the source's block table."""
        info = self.peer.info
        step = max(1, most_bytes // (info.token_bytes * info.entry_tokens)) * info.entry_tokens
        start = self.first
        while start < self.last:
            stop = min(self.last, (start // info.entry_tokens) * info.entry_tokens + step)
            yield start, stop
            start = stop

    def moved(self, plan: TransferPlan) -> None:
        self.fetch.bytes_moved += plan.num_bytes
