"""KV offload to host memory, on the scheduler's side: which blocks of a request have pages, and what is copied when.

Every block of the ``BlockPool`` has a place in the host's pool, so that pool bounds what can run; pages of the device's
row pool come and go (``residency``). Full blocks are copied to the host as soon as nothing will write to them again,
and the prefix cache only knows blocks whose copies are complete.

With hot regions (HiSparse) a request keeps all its pages until free ones get scarce. From then on it lets go of
those that the host has too; to decode it then needs a region, which is leased to it until it ends. Without regions
(plain offload) a running request keeps all its pages, and blocks of a prefix hit are loaded before it starts.

The scheduler calls the methods at the points that their names say. Invariants, restated by ``check``:
- a running request without a region, and not spilled, has pages for all of its leading ``placed`` blocks;
- a block that is being copied has a lease of its own, and so have the blocks of an ended request that are still to be.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from glmjax.serving.blocks import BlockPool, extend_digests
from glmjax.serving.plan import Move
from glmjax.serving.request import Request
from glmjax.serving.residency import Residency


@dataclasses.dataclass
class Held:
    """What a running request holds beside its blocks.

    Attributes:
      placed: leading blocks that have got a page, or came from the prefix cache.
      sealed: leading blocks that nothing writes to any more.
      pinned: blocks whose pages it keeps, in order of position.
      spilled: some of its rows may be on the host only.
      region: pages of its hot region; lease: the number that it was leased under, 0 without one.
    """

    placed: int
    sealed: int
    pinned: dict[int, None]
    spilled: bool
    region: tuple[int, ...] = ()
    lease: int = 0


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
      num_pages, region_pages: see ``glmjax.tiers.Offload``.
      max_write_backs: pages that a plan copies to the host at most.
    """

    def __init__(self, pool: BlockPool, num_pages: int, region_pages: int, max_write_backs: int = 64):
        self.pool = pool
        self.max_write_backs = max_write_backs
        self._sizes = pool.num_blocks, num_pages, region_pages
        self.residency = Residency(*self._sizes)
        self._held: dict[str, Held] = {}
        self._leaving: list[Leaving] = []
        self._copying: set[int] = set()  # leased here too
        self._loads: list[Move] = []
        self._is_waited_for = False  # a request could start if others let go of pages
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

    def can_start(self, running: Iterable[int], hit: Sequence[int], num_blocks: int, first_blocks: int) -> bool:
        """Whether pages will do for one request more.

        Args:
          running: blocks that each running request may come to use.
          hit: the request's blocks of the prefix cache; num_blocks: all that it may come to use; first_blocks: those
            that it needs pages for at once, beside the hit.
        """
        residency = self.residency
        if not self.region_pages:
            return first_blocks + self._pages_to_keep(hit) <= residency.free_pages
        steady = sum(map(self.steady_pages, running)) + self.steady_pages(num_blocks)
        at_once = first_blocks + (self.region_pages if hit else 0)
        self._is_waited_for = at_once > residency.free_pages
        return steady + first_blocks <= residency.num_pages and not self._is_waited_for

    def started(self, request: Request, hit: Sequence[int], first_blocks: int) -> None:
        """The request has its blocks, of which ``hit`` came from the prefix cache; the rest as in ``can_start``."""
        residency = self.residency
        room = residency.free_pages - first_blocks
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
          others_wait: there are requests that have not started.
        """
        held = self._held[request.request_id]
        if held.spilled or self.residency.is_tight or (others_wait and self._is_waited_for):
            self._let_go(held)
        new = request.blocks[held.placed : num_blocks]
        needs_region = single and held.spilled and not held.region
        if len(new) + (self.region_pages if needs_region else 0) > self.residency.free_pages:
            return False
        self.residency.place(new)
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

    def is_staged(self, request: Request) -> bool:
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

    def planned(self) -> tuple[np.ndarray, tuple[Move, ...], tuple[Move, ...]]:
        """What the plan at hand goes by: the page of every block, pages to load before it, and pages to copy after."""
        loads, self._loads = tuple(self._loads), []
        write_backs = tuple(Move(*pair) for pair in self.residency.start_write_backs(self.max_write_backs))
        blocks = [move.block for move in write_backs]
        self.pool.share(blocks)
        self._copying.update(blocks)
        return self.residency.snapshot(), loads, write_backs

    def copied(self, write_backs: Iterable[Move], failed: Iterable[Move] = ()) -> None:
        """Copies of a plan have ended."""
        failed = set(failed)
        for move in write_backs:
            self._copying.remove(move.block)
            self.residency.finish_write_back(move.block, ok=move not in failed)
            self.pool.release([move.block])
        self._settle({move.block for move in failed})
        # Those that nobody has any more, and that a request has will be when it ends.
        lost = (move.block for move in failed)
        self.residency.forget([b for b in lost if not self.residency.is_pinned(b) and not self.residency.is_durable(b)])

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
            if lost := [b for b in away if not self.residency.is_durable(b)]:
                raise AssertionError(f"offload: blocks {lost} of {request.request_id} are nowhere")

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
