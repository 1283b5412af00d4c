"""KV offload to host memory, on the scheduler's side: which blocks of a request have pages, and what is copied when.

Every block of the ``BlockPool`` has a place in the host's pool, so that pool bounds what can run; pages of the device's
row pool come and go (``residency``). Full blocks are copied to the host as soon as nothing will write to them again,
and the prefix cache only knows blocks whose copies are complete.

With hot regions (HiSparse) a request keeps all its pages until free ones get scarce. From then on it lets go of
those that the host has too; to decode it then needs a region, which is leased to it until it ends. Without regions
(plain offload) a running request keeps all its pages, and blocks of a prefix hit are loaded before it starts.

Rows that come from another engine go to the host. Their request has blocks while it waits for them, and starts once
they have come and there are pages for it: till then it holds none, so that what waits is bounded by the host's pool.

The scheduler calls the methods at the points that their names say. Invariants, restated by ``check``:
- a running request without a region, and not spilled, has pages for all of its leading ``placed`` blocks;
- a request that has not started has no pages, and once its rows have come the host has all of them;
- a block that is being copied has a lease of its own, and so have the blocks of an ended request that are still to be.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from glmjax.serving.blocks import BlockPool, extend_digests
from glmjax.serving.plan import Move, Plan, Results
from glmjax.serving.request import Request
from glmjax.serving.residency import Residency
from glmjax.serving.scheduler_config import SchedulerConfig


@dataclasses.dataclass
class Held:
    """What a running request holds beside its blocks.

    Attributes:
      placed: leading blocks that have got a page, or came full from the prefix cache or another engine.
      sealed: leading blocks that nothing writes to any more.
      pinned: blocks whose pages it keeps, in order of position.
      spilled: some of its rows may be on the host only.
      region: pages of its hot region; lease: the number that it was leased under, 0 without one.
      phase: whether it waits for rows from another engine, or for pages to start with, or has started.
    """

    placed: int
    sealed: int
    pinned: dict[int, None]
    spilled: bool
    region: tuple[int, ...] = ()
    lease: int = 0
    phase: Literal["arriving", "ready", "started"] = "started"


@dataclasses.dataclass
class Leaving:
    """Full blocks of a request that has ended, leased until the host has all of them and they can be published."""

    blocks: Sequence[int]
    digests: Sequence[bytes]
    published: int


class Offloading:
    """Decides over pages for one scheduler.

    Args:
      pool: of the scheduler; its blocks are those of the host's pool.
      config: of the scheduler, with ``num_pages``.
      max_write_backs: pages that a plan copies to the host at most.
    """

    def __init__(self, pool: BlockPool, config: SchedulerConfig, max_write_backs: int = 64):
        assert config.num_pages is not None
        self.pool, self.config = pool, config
        self.max_write_backs = max_write_backs
        self._sizes = pool.num_blocks, config.num_pages, config.region_pages
        self.residency = Residency(*self._sizes)
        self._held: dict[str, Held] = {}
        self._leaving: list[Leaving] = []
        self._copying: set[int] = set()  # leased here too
        self._loads: list[Move] = []
        self._is_waited_for = False  # a request could start if others let go of pages, as the last plan was made
        self._was_short = False  # the same of the plan at hand
        self._leases = itertools.count(1)

    @property
    def region_pages(self) -> int:
        return self.residency.region_pages

    @property
    def has_work(self) -> bool:
        """Whether copies are wanted or under way."""
        return self.residency.pending > 0 or bool(self._leaving)

    @property
    def will_free_pages(self) -> bool:
        """Whether copies under way free pages by themselves, without anybody's preemption."""
        unwanted = bool(self._leaving) or not all(map(self.residency.is_pinned, self._copying))
        return self.residency.pending > 0 and (self.region_pages > 0 or unwanted)

    def gauges(self) -> dict[str, int]:
        return {
            **self.residency.gauges(),
            "hisparse_total_pages": self.residency.num_pages,
            "hisparse_host_blocks": self.pool.num_blocks,
            "hisparse_host_blocks_used": self.pool.num_blocks - self.pool.free_blocks,
        }

    # A request starts, grows and ends.

    def claimed(self, blocks: Sequence[int]) -> None:
        """The pool has handed these blocks out anew: what they held before is void."""
        self.residency.forget(blocks)

    def steady_pages(self, num_blocks: int) -> int:
        """Pages that a request of so many blocks needs to go on however scarce they are."""
        return min(num_blocks, self.region_pages + 2) if self.region_pages else num_blocks

    def can_start(
        self, request: Request, hit: Sequence[int], need: int, budget: int, running: Sequence[Request], ahead: int
    ) -> bool:
        """Whether pages will do for one request more, none ahead of it wanting them.

        Args:
          hit: the request's leading blocks whose rows are there; need: how many more it has, or will have.
          budget: tokens that it may compute at once.
          running: requests in order, of which so many are ``ahead`` of this one.
        """
        residency, first_blocks = self.residency, self._first_blocks(need, budget)
        if any(self._held[r.request_id].phase == "ready" for r in running[:ahead]):
            return False
        if not self.region_pages:
            return first_blocks + self._pages_to_keep(hit) <= residency.free_pages
        started = [r for r in running if self._held[r.request_id].phase == "started"]
        steady = sum(self.steady_pages(self._most_blocks(r)) for r in (*started, request))
        at_once = first_blocks + (self.region_pages if hit else 0)
        is_short = at_once > residency.free_pages
        self._was_short |= is_short
        return steady + first_blocks <= residency.num_pages and not is_short

    def admitted(self, request: Request, hit: Sequence[int], need: int, budget: int, *, comes: bool = False) -> None:
        """The request has its blocks, and starts unless rows of the others than ``hit`` come from another engine."""
        if comes:
            self._held[request.request_id] = Held(len(hit), len(hit), {}, spilled=True, phase="arriving")
        else:
            self._start(request, hit, need, budget)

    def arrived(self, request: Request) -> None:
        """The host has the rows of all that is computed of a request, or its rows do not come: it may start."""
        held, size = self._held[request.request_id], self.pool.block_size
        self.residency.arrived(request.blocks[held.placed : self.pool.blocks_for(request.num_computed)])
        held.placed, held.phase = request.num_computed // size, "ready"

    def waits(self, request: Request, budget: int, running: Sequence[Request]) -> bool:
        """Let the request start if its rows have come and there are pages for it; whether it still waits for either.

        Arguments as in ``can_start``.
        """
        held = self._held[request.request_id]
        if held.phase == "ready":
            hit, need = request.blocks[: held.placed], len(request.blocks) - held.placed
            if self.can_start(request, hit, need, budget, running, running.index(request)):
                self._start(request, hit, need, budget)
        return self._held[request.request_id].phase != "started"

    def is_arriving(self, request: Request) -> bool:
        """Whether its rows are on their way."""
        return self._held[request.request_id].phase == "arriving"

    def victims(self, request: Request, running: Sequence[Request], planned: Collection[str]) -> list[Request]:
        """The request, and those behind it whose end would free pages, but for those that are planned."""
        behind = running[running.index(request) :]
        return [r for r in behind if r.request_id not in planned and (r is request or self._holds_pages(r))]

    def _holds_pages(self, request: Request) -> bool:
        held = self._held[request.request_id]
        return bool(held.pinned or held.region)

    def _most_blocks(self, request: Request) -> int:
        """Blocks that it may come to use."""
        return self.pool.blocks_for(min(request.horizon, self.config.max_model_len - 1))

    def _first_blocks(self, need: int, budget: int) -> int:
        """Of ``need`` blocks that are to be written, those that take pages at once."""
        chunk = min(budget, self.config.max_prefill_chunk or budget)
        most = self.pool.blocks_for(chunk + self.config.num_speculative_tokens) + 1
        return min(need, most) if self.region_pages else need

    def _start(self, request: Request, hit: Sequence[int], need: int, budget: int) -> None:
        residency = self.residency
        room = residency.free_pages - self._first_blocks(need, budget)
        held = Held(len(hit), len(hit), {}, spilled=False)
        if not self.region_pages:
            away = [block for block in hit if not residency.is_resident(block)]
            residency.pin(hit)
            self._loads += (Move(*pair) for pair in residency.load(away))
            held.pinned = dict.fromkeys(hit)
        elif not hit or residency.num_unpinned(hit) + self.region_pages <= room:
            held.pinned = dict.fromkeys(block for block in hit if residency.is_resident(block))
            held.spilled = residency.pin(hit) > 0
        else:
            held.spilled = True
        self._held[request.request_id] = held

    def prepared(self, request: Request, num_blocks: int, *, single: bool, others_wait: bool = False) -> bool:
        """See to it that the request's next chunk can run; False if pages are lacking.

        Args:
          num_blocks: leading blocks that the chunk may write to or read.
          single: it runs among the rows that decode, which read what is not in pages through a region.
          others_wait: there are requests that have no blocks yet.
        """
        held = self._held[request.request_id]
        if held.spilled or self.residency.is_tight or (self._is_waited_for and (others_wait or self._any_ready)):
            self._let_go(held)
        new = request.blocks[held.placed : num_blocks]
        needs_region = single and held.spilled and not held.region
        if len(new) + (self.region_pages if needs_region else 0) > self.residency.free_pages:
            return False
        # The last block of what came from another engine, if it is not full.
        unfinished = [block for block in new if self.residency.is_durable(block)]
        self._loads += (Move(*pair) for pair in self.residency.reopen(unfinished))
        self.residency.place(new[len(unfinished) :])
        held.pinned |= dict.fromkeys(new)
        held.placed = max(held.placed, num_blocks)
        if needs_region:
            held.region, held.lease = self.residency.lease_region(), next(self._leases)
        return True

    def spill(self, requests: Iterable[Request]) -> bool:
        """Let one of the requests, the first that can, go of pages that the host has too; False if none can."""
        return bool(self.region_pages) and any(self._let_go(self._held[r.request_id]) for r in requests)

    def _pages_to_keep(self, hit: Sequence[int]) -> int:
        """Free pages that it takes to have all these blocks on the device, and to keep them there."""
        absent = sum(not self.residency.is_resident(block) for block in hit)
        return absent + self.residency.num_unpinned(hit)

    def _is_staged(self, request: Request) -> bool:
        """Whether a chunk of the request reads rows that are on the host only."""
        held = self._held[request.request_id]
        return held.spilled and bool((self.residency.page_of[list(request.blocks[: held.placed])] < 0).any())

    def region_of(self, request: Request) -> tuple[tuple[int, ...], int]:
        """Pages of its hot region, and the lease; () and 0 without one."""
        held = self._held[request.request_id]
        return held.region, held.lease

    def can_seal(self, request: Request, num_blocks: int) -> bool:
        """Whether ``computed`` has not been told yet of so many blocks."""
        return num_blocks > self._held[request.request_id].sealed

    def computed(self, request: Request, num_blocks: int, published: int) -> int:
        """The leading blocks are full and final: copy them; returns how many the host has already.

        Args:
          published: leading blocks that it is known to have.
        """
        held = self._held[request.request_id]
        self.residency.seal(request.blocks[held.sealed : num_blocks])
        held.sealed = max(held.sealed, num_blocks)
        return self.residency.durable_prefix(request.blocks[:num_blocks], published)

    def ended(self, request: Request, *, keep: bool) -> Sequence[int]:
        """The request gives up its blocks; returns those that the scheduler releases now.

        Args:
          keep: blocks that are full but not on the host yet stay leased until they are, and are published then.
        """
        held = self._held.pop(request.request_id)
        if held.region:
            self.residency.release_region(held.region)
        self.residency.unpin(list(held.pinned))
        full = request.blocks[: held.sealed]
        lost = list(request.blocks[held.sealed : held.placed])
        durable = self.residency.durable_prefix(full, request.num_published)
        if keep and durable < len(full):
            extend_digests(request.digests, request.token_ids, self.pool.block_size, request.cache_salt)
            self._leaving.append(Leaving(full, request.digests[: held.sealed], request.num_published))
            self.residency.forget(lost)
            return request.blocks[held.sealed :]
        unwritten = (b for b in full[durable:] if not self.residency.is_durable(b) and b not in self._copying)
        self.residency.forget([*unwritten, *lost])
        return request.blocks

    # A plan is made, and its results are entered.

    def planned(self, plan: Plan, requests: Mapping[str, Request]) -> Plan:
        """The plan at hand, with the page of every block, pages to load before it, and pages to copy after.

        Args:
          requests: by request id, those that the chunks are of.
        """
        loads, self._loads = tuple(self._loads), []
        self._is_waited_for, self._was_short = self._was_short, False
        write_backs = tuple(Move(*pair) for pair in self.residency.start_write_backs(self.max_write_backs))
        blocks = [move.block for move in write_backs]
        self.pool.share(blocks)
        self._copying.update(blocks)
        # Only now it is known whose pages are left.
        chunks = tuple(
            dataclasses.replace(c, staged=len(c.token_ids) > 1 and self._is_staged(requests[c.request_id]))
            for c in plan.chunks
        )
        page_of = (self.residency.snapshot(),)
        return dataclasses.replace(plan, chunks=chunks, page_of=page_of, loads=loads, write_backs=write_backs)

    def copied(self, write_backs: Iterable[Move], results: Results, running: Sequence[Request]) -> dict[str, str]:
        """Copies of a plan have ended; returns why they end some of the running requests, by request id."""
        failed = set(results.failed)
        errors: dict[str, str] = {}
        for move in write_backs:
            self._copying.remove(move.block)
            self.residency.finish_write_back(move.block, ok=move not in failed)
            self.pool.release([move.block])
        self._settle({move.block for move in failed})
        # Those that nobody has any more, and that a request has will be when it ends.
        lost = (move.block for move in failed)
        self.residency.forget([b for b in lost if not self.residency.is_pinned(b) and not self.residency.is_durable(b)])
        for moves, where in ((results.failed, "to"), (results.failed_loads, "from")):
            if blocks := {move.block for move in moves}:
                why = f"a copy of its KV rows {where} the host failed"
                errors |= {r.request_id: why for r in running if not blocks.isdisjoint(r.blocks)}
        return errors

    def not_loaded(self, moves: Iterable[Move]) -> None:
        """Pages that loads should have filled hold nothing, and the requests that wanted them have ended."""
        self.residency.evict([move.block for move in moves])

    def clear(self) -> None:
        """The device's pool is gone, and no request is left: give back every lease."""
        for leaving in self._leaving:
            self.pool.release(leaving.blocks)
        for block in self._copying:
            self.pool.release([block])
        self._leaving, self._copying, self._loads = [], set(), []
        self.residency = Residency(*self._sizes)

    def reset_prefix_cache(self, running: Iterable[Sequence[int]]) -> None:
        """Nothing that was computed before will be found again; ``running`` requests keep what they hold."""
        for leaving in self._leaving:
            self.pool.release(leaving.blocks)
        self._leaving = []
        self.residency.reset([b for blocks in (*running, tuple(self._copying)) for b in blocks])

    def holders(self) -> list[Sequence[int]]:
        """Leases of blocks beside those of running requests."""
        return [*(leaving.blocks for leaving in self._leaving), *([block] for block in self._copying)]

    def check(self, running: Iterable[Request]) -> None:
        """Raise unless every invariant holds."""
        running = list(running)
        if {r.request_id for r in running} != set(self._held):
            raise AssertionError("offload: a request has pages and does not run, or runs without a record")
        self.residency.check([list(held.pinned) for held in self._held.values()])
        for request in running:
            held = self._held[request.request_id]
            away = [b for b in request.blocks[: held.placed] if not self.residency.is_resident(b)]
            if away and not held.spilled:
                raise AssertionError(f"offload: {request.request_id} lacks pages of {away} and is not spilled")
            if held.phase == "ready":
                away += request.blocks[held.placed : self.pool.blocks_for(request.num_computed)]
            if lost := [b for b in away if not self.residency.is_durable(b)]:
                raise AssertionError(f"offload: blocks {lost} of {request.request_id} are nowhere")
            if held.phase != "started" and self._holds_pages(request):
                raise AssertionError(f"offload: {request.request_id} has pages and has not started")

    @property
    def _any_ready(self) -> bool:
        return any(held.phase == "ready" for held in self._held.values())

    def _let_go(self, held: Held) -> bool:
        """Unpin what the host has too; whether there was anything."""
        if not self.region_pages:
            return False
        clean = [block for block in held.pinned if self.residency.is_durable(block)]
        for block in clean:
            del held.pinned[block]
        self.residency.unpin(clean)
        held.spilled |= bool(clean)
        return bool(clean)

    def _settle(self, failed: set[int]) -> None:
        """Publish and release blocks of ended requests that the host has by now; give up those whose copy failed."""
        staying = []
        for leaving in self._leaving:
            durable = self.residency.durable_prefix(leaving.blocks, leaving.published)
            new = slice(leaving.published, durable)
            self.pool.publish(leaving.blocks[new], leaving.digests[new])
            leaving.published = durable
            lost = [b for b in leaving.blocks[durable:] if not self.residency.is_durable(b) and b not in self._copying]
            if durable == len(leaving.blocks):
                self.pool.release(leaving.blocks)
            elif not failed.isdisjoint(leaving.blocks):
                self.residency.forget(lost)
                self.pool.release(leaving.blocks)
            else:
                staying.append(leaving)
        self._leaving = staying
