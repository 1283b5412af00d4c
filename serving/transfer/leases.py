"""Blocks that a producer keeps until the consumer has read them: who may still read what, and for how long.

    offered --begin--> fetching --done--> done
       |                  |---fail--> failed
       |------------------|---time--> expired

A lease ends once. Word of one that has ended, or that nobody knows, changes nothing and is answered with what is known.
Time is handed in; a deadline counts from the moment it has passed, noticed or not. Law, restated by ``check``: every
lease ever offered is live, or ended and not yet collected, or collected, and is in one of these only.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from glmjax.serving.transfer.interface import Lease, LeaseState, TransferError

Known = LeaseState | Literal["unknown"]

_LIVE = ("offered", "fetching")


class LeaseBook:
    """Leases of one producer.

    Args:
      seconds: a lease lasts this long after the offer and after every sign of life.
      remembered: collected leases of which the end is remembered, the latest.
    """

    def __init__(self, seconds: float, remembered: int = 4096):
        self.seconds = seconds
        self.remembered = remembered
        self.counts: collections.Counter[str] = collections.Counter()
        self._live: dict[str, Lease] = {}
        self._ended: dict[str, Lease] = {}  # not collected, in the order of their ends
        self._past: collections.OrderedDict[str, LeaseState] = collections.OrderedDict()

    def offer(
        self,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        group: int,
        now: float,
        *,
        prompt: str = "",
        first: int = 0,
    ) -> Lease:
        """Begins a lease. ValueError for a name that was used before."""
        if self.state(request_id) != "unknown":
            raise ValueError(f"request {request_id!r} was offered before")
        lease = Lease(request_id, tuple(blocks), num_tokens, group, "offered", now + self.seconds, prompt, first)
        self._live[request_id] = lease
        self.counts["offered"] += 1
        return lease

    def begin(self, request_id: str, now: float) -> Lease:
        """Takes note that it is being read, and extends it. May be said again.

        Raises:
          TransferError: there is no such lease any more.
        """
        self.expire(now)
        if request_id not in self._live:
            raise TransferError(f"request {request_id!r} is not on offer: its lease is {self.state(request_id)}")
        return self._extend(request_id, now, "fetching")

    def heartbeat(self, request_id: str, now: float) -> Known:
        """Extends a lease that lives; returns its state."""
        self.expire(now)
        if request_id in self._live:
            self._extend(request_id, now, self._live[request_id].state)
        return self.state(request_id)

    def done(self, request_id: str, now: float) -> Known:
        """Ends a lease whose rows have been read; "done" is returned if it lived until then."""
        return self._finish(request_id, "done", now)

    def fail(self, request_id: str, now: float) -> Known:
        """Ends a lease that nobody will read any more."""
        return self._finish(request_id, "failed", now)

    def withdraw(self, request_id: str, now: float) -> bool:
        """Ends a lease unless it is being read; whether it did."""
        self.expire(now)
        if self.state(request_id) != "offered":
            return False
        self._end(request_id, "failed")
        return True

    def expire(self, now: float) -> None:
        """Ends the leases whose time is up."""
        for request_id in [r for r, lease in self._live.items() if lease.deadline <= now]:
            self._end(request_id, "expired")

    def end_all(self) -> None:
        """Ends all of them: the engine closes."""
        for request_id in list(self._live):
            self._end(request_id, "failed")

    def collect(self, now: float) -> tuple[Lease, ...]:
        """Leases that ended since the last call, in that order."""
        self.expire(now)
        ended = tuple(self._ended.values())
        self._ended.clear()
        for lease in ended:
            self._past[lease.request_id] = lease.state
        while len(self._past) > self.remembered:
            self._past.popitem(last=False)
        self.counts["collected"] += len(ended)
        return ended

    def state(self, request_id: str) -> Known:
        """Where a lease stands, or how it ended."""
        lease = self._live.get(request_id) or self._ended.get(request_id)
        return lease.state if lease else self._past.get(request_id, "unknown")

    def held(self) -> Iterable[tuple[int, ...]]:
        """The blocks of each lease that is not collected: their holders, for ``BlockPool.check``."""
        return [lease.blocks for lease in (*self._live.values(), *self._ended.values())]

    def __len__(self) -> int:
        """Leases not collected."""
        return len(self._live) + len(self._ended)

    def check(self) -> None:
        """Raises AssertionError unless the law holds."""
        _require(not self._live.keys() & self._ended.keys(), "a lease both lives and has ended")
        _require(not self._past.keys() & (self._live.keys() | self._ended.keys()), "a collected lease is back")
        _require(all(lease.state in _LIVE for lease in self._live.values()), "a live lease is in an end state")
        _require(all(lease.state not in _LIVE for lease in self._ended.values()), "an ended lease is in a live state")
        _require(self.counts["offered"] == len(self) + self.counts["collected"], "a lease is lost")
        ends = sum(self.counts[state] for state in ("done", "expired", "failed"))
        _require(ends == len(self._ended) + self.counts["collected"], "a lease ended twice")
        _require(len(self._past) == min(self.remembered, self.counts["collected"]), "an end is forgotten")

    def _extend(self, request_id: str, now: float, state: LeaseState) -> Lease:
        lease = self._live[request_id]
        deadline = max(lease.deadline, now + self.seconds)
        self._live[request_id] = lease = dataclasses.replace(lease, state=state, deadline=deadline)
        return lease

    def _finish(self, request_id: str, state: LeaseState, now: float) -> Known:
        self.expire(now)
        if request_id in self._live:
            self._end(request_id, state)
        return self.state(request_id)

    def _end(self, request_id: str, state: LeaseState) -> None:
        self._ended[request_id] = dataclasses.replace(self._live.pop(request_id), state=state)
        self.counts[state] += 1


def _require(ok: bool, fault: str) -> None:
    if not ok:
        raise AssertionError(f"lease book: {fault}")
