"""Requests that go to another engine after their prompt, or come from one: the scheduler's side of a handoff.

Rows travel through the *stage*, memory in blocks of its own (``exchange``), so that the pool's blocks are free at
once, and what a connector reads or writes is never a block that somebody computes in. A stage block is in exactly one
state: free, kept for a request that is to be sent, on its way there, under a lease of the connector, filled by a fetch,
or on its way into the pool. Law, restated by ``check``: these are all of them.

A request that comes needs all tokens but the last of its prompt, less what the prefix cache has; the last is computed
here, which gives the first token. If they cannot be fetched, the request is computed here, or fails: a choice.
Where KV rows are in two tiers they go to the host's, and ``offload`` says when the request gets pages.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from glmjax.errors import RequestError
from glmjax.serving.blocks import prompt_digest
from glmjax.serving.plan import Handover
from glmjax.serving.request import Request
from glmjax.serving.transfer.interface import Connector, Fetch, Lease, Offer, TransferError

OnFailure = Literal["recompute", "fail"]


class Collector:
    """Leases that have ended, for each data-parallel rank of one connector."""

    def __init__(self, connector: Connector, groups: int = 1):
        self.connector = connector
        self._ended: list[list[Lease]] = [[] for _ in range(groups)]

    def ended(self, group: int) -> list[Lease]:
        for lease in self.connector.collect():
            self._ended[lease.group].append(lease)
        found, self._ended[group] = self._ended[group], []
        return found


@dataclasses.dataclass
class Arrival:
    """A request whose rows are fetched: into which stage blocks, and up to which token."""

    fetch: Fetch
    stage: tuple[int, ...]
    first_block: int
    num_tokens: int


class Handoff:
    """Leases the stage's blocks, and speaks with the connector.  One thread calls it, the scheduler's.

    Args:
      group: data-parallel rank of the scheduler.
      on_failure: what becomes of a request whose rows cannot be fetched.
    """

    def __init__(
        self,
        collector: Collector,
        stage_blocks: int,
        block_size: int,
        group: int = 0,
        on_failure: OnFailure = "recompute",
    ):
        self.connector, self.on_failure = collector.connector, on_failure
        self.stage_blocks, self.block_size = stage_blocks, block_size
        self._collector, self._group = collector, group
        self._free = list(range(stage_blocks))
        self._kept: dict[str, tuple[int, ...]] = {}  # for running requests that are to be sent
        self._sends: list[Handover] = []
        self._sending: dict[str, tuple[Handover, Sequence[int]]] = {}  # and their prompts
        self._leased: dict[str, tuple[int, ...]] = {}
        self._arriving: dict[str, Arrival] = {}
        self._draining: list[Arrival] = []  # nobody waits for these fetches any more
        self._receives: list[Handover] = []
        self._receiving: dict[str, tuple[int, ...]] = {}
        self._beats: dict[str, float] = {}
        self.num_recomputed = 0

    @property
    def has_work(self) -> bool:
        """Whether blocks are on their way; a lease is not work of ours."""
        going = self._sends or self._sending
        return bool(going or self._arriving or self._draining or self._receives or self._receiving)

    @property
    def has_leases(self) -> bool:
        """Whether others may be reading the stage: ``planned`` takes back what has ended."""
        return bool(self._leased)

    @property
    def waits(self) -> bool:
        """Whether all there is to do is to wait for fetches."""
        return bool(self._arriving or self._draining) and not (self._sends or self._receives)

    def gauges(self) -> dict[str, int]:
        """The connector's are those of all ranks, and the first says them."""
        of_all = self.connector.stats() if self._group == 0 else {}
        return {
            **{f"kv_transfer_{name}": value for name, value in of_all.items()},
            "kv_transfer_recomputed": self.num_recomputed,
            "kv_transfer_stage_free": len(self._free),
        }

    # A request goes.

    def starts(self, request: Request, num_cached: int) -> bool:
        """Lease what it takes to send a request that is about to start, or begin to fetch it; False: no room now."""
        return self.keep(request) and self.fetch(request, num_cached)

    def check_fits(self, num_prompt_tokens: int, send_from: int = 0) -> None:
        """RequestError for a prompt that is too long to be sent ever."""
        blocks = len(self._to_send(num_prompt_tokens, send_from))
        if blocks > self.stage_blocks:
            raise RequestError(
                f"a prompt of {num_prompt_tokens} tokens needs {blocks} blocks on its way to another engine, and there "
                f"is room for {self.stage_blocks}: raise connector_stage_gib",
                "prompt",
            )

    def keep(self, request: Request) -> bool:
        """Keep stage blocks for a request that is to be sent, before it starts; False if there are too few now."""
        if request.send and request.request_id not in self._kept:
            stage = self._take(len(self._to_send(request.num_prompt_tokens, request.send_from)))
            if stage is None:
                return False
            self._kept[request.request_id] = stage
        return True

    def send(self, request: Request) -> None:
        """Its prompt is computed: copy its blocks with the next plan, which may give them away."""
        stage = self._kept.pop(request.request_id)
        places = self._to_send(request.num_prompt_tokens, request.send_from)
        move = Handover(request.request_id, tuple(request.blocks[place] for place in places), stage)
        self._sends.append(move)
        self._sending[request.request_id] = (move, request.prompt_ids)

    def withdraw(self, offer: Offer) -> bool:
        """Gives up an offer of this engine that nobody has begun to fetch; False if it is not one. For any thread."""
        return offer.engine_id == self.connector.info.engine_id and self.connector.withdraw(offer.request_id)

    def dropped(self, request: Request) -> None:
        """It ended some other way, or lost its blocks."""
        if (stage := self._kept.pop(request.request_id, None)) is not None:
            self._free += stage
        if (arrival := self._arriving.pop(request.request_id, None)) is not None:
            arrival.fetch.cancel()
            self._draining.append(arrival)
        if request.offer is not None:
            self.connector.failed(request.offer, "the request was given up")
            request.offer = None

    # A request comes.

    def lacks(self, request: Request, num_cached: int) -> int:
        """Blocks to be fetched of a request that is offered, beside ``num_cached`` leading ones that are here."""
        if request.offer is None or request.num_output_tokens:
            return 0
        return max(0, -(-(request.num_prompt_tokens - 1) // self.block_size) - num_cached)

    def fetch(self, request: Request, num_cached: int) -> bool:
        """Start to fetch what the prefix cache has not; False if the stage has no room now.

        Args:
          num_cached: leading blocks that are here.
        """
        offer, last = request.offer, request.num_prompt_tokens - 1
        if offer is None or request.num_output_tokens:
            return True
        count = self.lacks(request, num_cached)
        if count == 0:
            self.connector.done(offer)
            request.offer = None
            return True
        if count > self.stage_blocks:
            fetch = Fetch(offer, 0)
            fetch.end(
                TransferError(f"{count} blocks are lacking, and on their way there is room for {self.stage_blocks}")
            )
            self.connector.failed(offer, str(fetch.error))
            self._arriving[request.request_id] = Arrival(fetch, (), num_cached, last)
            return True
        stage = self._take(count)
        if stage is None:
            return False
        first = num_cached * self.block_size
        table = (*[stage[0]] * num_cached, *stage)
        fetch = self.connector.fetch(offer, table, first=first, last=last, group=self._group)
        self._arriving[request.request_id] = Arrival(fetch, stage, num_cached, last)
        return True

    def is_arriving(self, request: Request) -> bool:
        return request.request_id in self._arriving

    def arrived(self, requests: Iterable[Request]) -> list[tuple[Request, TransferError | None]]:
        """Those of the requests whose fetch has ended: they go on, with ``num_computed`` tokens or with an error."""
        ended: list[tuple[Request, TransferError | None]] = []
        for request in requests:
            arrival = self._arriving.get(request.request_id)
            if arrival is None or arrival.fetch.poll() == "running":
                continue
            del self._arriving[request.request_id]
            request.offer = None
            if arrival.fetch.poll() == "done":
                blocks = tuple(request.blocks[arrival.first_block :][: len(arrival.stage)])
                self._receives.append(Handover(request.request_id, blocks, arrival.stage))
                request.num_computed = arrival.num_tokens
                ended.append((request, None))
                continue
            self._free += arrival.stage
            self.num_recomputed += self.on_failure == "recompute"
            ended.append((request, arrival.fetch.error if self.on_failure == "fail" else None))
        return ended

    def tick(self, now: float, waiting: Iterable[Request]) -> None:
        """Extend leases of requests that wait to be fetched; ``now`` in seconds on any steady clock."""
        beats = {}
        for request in waiting:
            if request.offer is not None:
                last = self._beats.get(request.request_id, now)
                if now - last >= request.offer.lease_seconds / 6:
                    self.connector.heartbeat(request.offer)
                    last = now
                beats[request.request_id] = last
        self._beats = beats

    # A plan is made, and its results are entered.

    def planned(self) -> tuple[tuple[Handover, ...], tuple[Handover, ...]]:
        """What the plan at hand copies: to the stage, and from it."""
        for lease in self._collector.ended(self._group):
            self._free += self._leased.pop(lease.request_id)
        running = [a for a in self._draining if a.fetch.poll() == "running"]
        for arrival in self._draining:
            if arrival not in running:
                self._free += arrival.stage
        self._draining = running
        sends, receives = tuple(self._sends), tuple(self._receives)
        self._sends, self._receives = [], []
        self._receiving |= {move.request_id: move.stage for move in receives}
        return sends, receives

    def copied(self, sends: Sequence[Handover], receives: Sequence[Handover]) -> dict[str, Offer]:
        """A plan's copies are done; what can be fetched now, by request."""
        for move in receives:
            self._free += self._receiving.pop(move.request_id)
        offers = {}
        for move in sends:
            _, prompt = self._sending.pop(move.request_id)
            first = -(-len(prompt) // self.block_size) - len(move.stage)
            offers[move.request_id] = self.connector.offer(
                move.request_id,
                (*[move.stage[0]] * first, *move.stage),
                len(prompt),
                self._group,
                prompt=prompt_digest(prompt),
                first=first * self.block_size,
            )
            self._leased[move.request_id] = move.stage
        return offers

    def clear(self) -> None:
        """The device's pool is gone: nothing comes and nothing goes any more."""
        for arrival in self._arriving.values():
            arrival.fetch.cancel()
            self._draining.append(arrival)
        for stage in (*(m.stage for m, _ in self._sending.values()), *self._kept.values(), *self._receiving.values()):
            self._free += stage
        self._free += [block for move in self._receives for block in move.stage]
        self._kept, self._sends, self._sending, self._arriving = {}, [], {}, {}
        self._receives, self._receiving = [], {}

    def check(self) -> None:
        """Raise unless the law holds."""
        held = [
            *self._free,
            *(b for stage in (*self._kept.values(), *self._leased.values()) for b in stage),
            *(b for move, _ in self._sending.values() for b in move.stage),
            *(b for a in (*self._arriving.values(), *self._draining) for b in a.stage),
            *(b for move in self._receives for b in move.stage),
            *(b for stage in self._receiving.values() for b in stage),
        ]
        if sorted(held) != list(range(self.stage_blocks)):
            raise AssertionError("handoff: a block of the stage is lost or in two states")
        self.connector.check()

    def _to_send(self, num_prompt_tokens: int, send_from: int) -> range:
        """Which of a prompt's blocks the other engine lacks; one at least."""
        blocks = -(-num_prompt_tokens // self.block_size)
        return range(min(send_from // self.block_size, blocks - 1), blocks)

    def _take(self, count: int) -> tuple[int, ...] | None:
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return tuple(taken)
