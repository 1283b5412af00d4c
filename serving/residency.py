"""Owner of the device's row pages under HiSparse: which block has its KV rows on the device, the host, or both.

A block (``blocks`` says who holds it) has room for its rows in the host pool, under its own number.  A page is room for
one block's rows in the smaller row pool of the device.  Each block is in exactly one state:

    empty     no page, no host copy       holds nothing: ``place`` or ``arrived`` fill it
    dirty     page, no host copy          the only rows there are, so the page stays; ``seal`` queues it for write-back
    writing   page, host copy under way   the page stays until ``finish_write_back``
    clean     page and host copy, pins    stays on the device
    unpinned  page and host copy, none    readable until its page is taken, least recently unpinned first
    on host   no page, host copy          read by row through a request's hot region; ``load`` gives it a page again,
                                          ``reopen`` too, and makes it dirty

A pin says that a running request wants a page to stay; a dirty or writing block may have none, and stays all the same.
A page is free, a block's, or part of a hot region, which is leased to one request whole.

Only the scheduler's side calls it, and moves no rows itself: the device does, in the order of the plans.  So a page can
be given away while a step in flight still reads it; whatever its next owner does comes later on the device.
Law, restated by ``check``: free + blocks' + hot = all pages, each once; queued and writing blocks are those without
a host copy, unpinned ones are exactly those with both copies and no pins, and a block with pins has a page.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

NO_PAGE = -1


class Residency:
    """Gives pages to blocks and to hot regions, and takes back those whose rows the host has too."""

    def __init__(self, num_blocks: int, num_pages: int, region_pages: int, watermark: int | None = None):
        """A pool of empty blocks and free pages.

        Args:
          num_blocks: blocks of the ``BlockPool`` beside it, and places in the host pool.
          num_pages: pages of the device's row pool.
          region_pages: pages of one hot region.
          watermark: with fewer pages to be had, ``is_tight``; None: one region or a tenth of all, whichever is more.
        """
        self.num_blocks = num_blocks
        self.num_pages = num_pages
        self.region_pages = region_pages
        self.watermark = max(region_pages, num_pages // 10) if watermark is None else watermark
        self._page_of = np.full(num_blocks + 1, NO_PAGE, np.int32)  # [num_blocks + 1]
        self._page_of[num_blocks] = num_pages  # padding: the spare block has the spare page
        self._pins = [0] * num_blocks
        self._durable = [False] * num_blocks
        self._free = deque(range(num_pages))
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # blocks, next to lose its page first
        self._queued: OrderedDict[int, None] = OrderedDict()  # blocks, next to be written first
        self._writing: set[int] = set()
        self._regions: set[tuple[int, ...]] = set()
        self.page_of = self._page_of.view()  # [num_blocks + 1] int32, live and read-only; NO_PAGE: none
        self.page_of.flags.writeable = False

    @property
    def free_pages(self) -> int:
        """Pages that can be had now: free ones, and those of unpinned blocks."""
        return len(self._free) + len(self._unpinned)

    @property
    def is_tight(self) -> bool:
        return self.free_pages < self.watermark

    @property
    def pending(self) -> int:
        """Blocks queued for write-back or in it; their pages can be had afterwards, if nobody pins them."""
        return len(self._queued) + len(self._writing)

    def snapshot(self) -> np.ndarray:
        """``page_of`` as it is now, [num_blocks + 1] int32, for a plan to keep."""
        return self._page_of.copy()

    def is_resident(self, block: int) -> bool:
        """Whether it has a page."""
        return bool(self._page_of[block] != NO_PAGE)

    def is_pinned(self, block: int) -> bool:
        """Whether a running request wants its page to stay."""
        return self._pins[block] > 0

    def is_durable(self, block: int) -> bool:
        """Whether its host copy is complete."""
        return self._durable[block]

    def durable_prefix(self, blocks: Sequence[int], start: int = 0) -> int:
        """Length of the longest run at the head of ``blocks`` with complete host copies; ``start`` are known to be."""
        length = start
        while length < len(blocks) and self._durable[blocks[length]]:
            length += 1
        return length

    def num_unpinned(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are unpinned, so that pinning them takes their pages from the free ones."""
        return sum(block in self._unpinned for block in blocks)

    def place(self, blocks: Sequence[int]) -> None:
        """Give each of some empty blocks a page and one pin: they are dirty.

        Raises:
          RuntimeError: there are not as many free pages, or a block is not empty; nothing has changed then.
        """
        if len(blocks) > self.free_pages:
            raise RuntimeError(f"asked for {len(blocks)} pages with {self.free_pages} free")
        self._require_empty(blocks)
        for block in blocks:
            self._page_of[block] = self._take_page()
            self._pins[block] = 1

    def arrived(self, blocks: Sequence[int]) -> None:
        """Enter that a transfer has filled the host rows of empty blocks.  RuntimeError if one is not empty."""
        self._require_empty(blocks)
        for block in blocks:
            self._durable[block] = True

    def pin(self, blocks: Iterable[int]) -> int:
        """Add a pin to those of ``blocks`` that have a page, and return how many have none."""
        absent = 0
        for block in blocks:
            if self.is_resident(block):
                self._unpinned.pop(block, None)
                self._pins[block] += 1
            else:
                absent += 1
        return absent

    def load(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Give each of some blocks on the host a page and one pin: (block, page) pairs to be copied to the device.

        Raises:
          RuntimeError: there are not as many free pages, or a block is not on the host only; nothing has changed then.
        """
        if len(blocks) > self.free_pages:
            raise RuntimeError(f"asked for {len(blocks)} pages with {self.free_pages} free")
        for block in blocks:
            if self.is_resident(block) or not self._durable[block]:
                raise RuntimeError(f"block {block} is not on the host only")
        _require_distinct(blocks)
        for block in blocks:
            self._page_of[block] = self._take_page()
            self._pins[block] = 1
        return [(block, int(self._page_of[block])) for block in blocks]

    def reopen(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """As ``load``, for blocks that their request is about to write to: host copies are void, they are dirty."""
        loads = self.load(blocks)
        for block in blocks:
            self._durable[block] = False
        return loads

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take one pin off each of ``blocks``, given in order of position: the tail is taken before the head.

        A block that is not clean yet keeps its page until its write-back has finished.  If it is not even sealed, its
        rows are worth nothing without their request, and the caller forgets it.
        """
        for block in reversed(blocks):
            if self._pins[block] < 1:
                raise RuntimeError(f"block {block} unpinned without a pin")
            self._pins[block] -= 1
            self._offer(block)

    def seal(self, blocks: Iterable[int]) -> None:
        """Queue for write-back those of ``blocks`` that are dirty and not queued: no step will write to them again."""
        for block in blocks:
            if self.is_resident(block) and not self._durable[block] and block not in self._writing:
                self._queued.setdefault(block)

    def start_write_backs(self, limit: int) -> list[tuple[int, int]]:
        """Up to ``limit`` pairs of (block, page) to be copied to the host, first sealed first; they are writing now."""
        count = min(limit, len(self._queued))
        blocks = [self._queued.popitem(last=False)[0] for _ in range(count)]
        self._writing.update(blocks)
        return [(block, int(self._page_of[block])) for block in blocks]

    def finish_write_back(self, block: int, ok: bool = True) -> None:
        """Enter the end of a copy.  After a failed one the block is dirty: the caller seals it again or gives it up."""
        if block not in self._writing:
            raise RuntimeError(f"block {block} is not being written")
        self._writing.remove(block)
        self._durable[block] = ok
        self._offer(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Make blocks empty whatever they hold, and free their pages.

        Raises:
          RuntimeError: a block is pinned, or being written (the caller leases it in the ``BlockPool`` until that ends);
            nothing has changed then.
        """
        for block in blocks:
            if self._pins[block]:
                raise RuntimeError(f"block {block} is pinned")
            if block in self._writing:
                raise RuntimeError(f"block {block} is being written")
        for block in blocks:
            self._queued.pop(block, None)
            self._unpinned.pop(block, None)
            self._durable[block] = False
            if self.is_resident(block):
                self._free.append(self._drop_page(block))

    def evict(self, blocks: Sequence[int]) -> None:
        """Take the pages of unpinned blocks: they are on the host only.  Others are passed over."""
        for block in blocks:
            if block in self._unpinned:
                del self._unpinned[block]
                self._free.append(self._drop_page(block))

    def lease_region(self) -> tuple[int, ...]:
        """Pages of a new hot region.  RuntimeError if there are not enough."""
        if self.region_pages > self.free_pages:
            raise RuntimeError(f"asked for {self.region_pages} pages with {self.free_pages} free")
        pages = tuple(self._take_page() for _ in range(self.region_pages))
        self._regions.add(pages)
        return pages

    def release_region(self, pages: Sequence[int]) -> None:
        """End the lease of a hot region, given as ``lease_region`` returned it."""
        region = tuple(pages)
        if region not in self._regions:
            raise RuntimeError(f"no hot region has the pages {region}")
        self._regions.remove(region)
        self._free.extend(region)

    def reset(self, held: Iterable[int]) -> None:
        """Forget what only the prefix cache could have found: blocks with a host copy, no pins, and not in ``held``.

        Args:
          held: blocks of running requests, which still read them, those without pins from the host.
        """
        kept = set(held)
        self.forget([b for b in range(self.num_blocks) if self._durable[b] and not self._pins[b] and b not in kept])

    def gauges(self) -> dict[str, int]:
        """What ``Engine.stats`` says of pages: those with nothing in them, unpinned ones and hot ones are disjoint."""
        return {
            "hisparse_pages_free": len(self._free),
            "hisparse_pages_unpinned": len(self._unpinned),
            "hisparse_pages_hot": len(self._regions) * self.region_pages,
            "hisparse_pending_page_transfers": self.pending,
        }

    def check(self, pinned: Iterable[Sequence[int]] | None = None) -> None:
        """Raise unless the law holds; with ``pinned``, unless pins are exactly those, and no other page is stuck.

        Args:
          pinned: for each request, the blocks that it has pinned.
        """
        page_of = self._page_of[: self.num_blocks].tolist()
        resident = {b for b, page in enumerate(page_of) if page != NO_PAGE}
        durable = {b for b, done in enumerate(self._durable) if done}
        with_pins = {b for b, n in enumerate(self._pins) if n}
        pages = [*self._free, *(page_of[b] for b in resident), *(page for region in self._regions for page in region)]
        _require(sorted(pages) == list(range(self.num_pages)), "a page is lost or in two places")
        _require(self._page_of[self.num_blocks] == self.num_pages, "the spare block has lost its page")
        _require(all(len(region) == self.region_pages for region in self._regions), "a region has the wrong size")
        _require(min(self._pins, default=0) >= 0, "a negative number of pins")
        _require(with_pins <= resident, "a block without a page is pinned")
        _require(self._writing.isdisjoint(self._queued), "a block is both queued and being written")
        to_write = self._writing | set(self._queued)
        _require(to_write <= resident - durable, "a block to be written has no page, or a host copy already")
        _require(set(self._unpinned) == (resident & durable) - with_pins, "unpinned blocks are miscounted")
        if pinned is not None:
            counts = Counter(b for blocks in pinned for b in blocks)
            wrong = [b for b, n in enumerate(self._pins) if n != counts[b]]
            _require(not wrong, f"pins miscounted for blocks {wrong}")
            stuck = resident - durable - with_pins - to_write
            _require(not stuck, f"nobody wants the dirty blocks {sorted(stuck)}, and nobody forgot them")

    def _require_empty(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.is_resident(block) or self._durable[block]:
                raise RuntimeError(f"block {block} holds rows: forget it first")
        _require_distinct(blocks)

    def _take_page(self) -> int:
        """A free page, else that of the least recently unpinned block, which is on the host only from now on."""
        if self._free:
            return self._free.popleft()
        return self._drop_page(self._unpinned.popitem(last=False)[0])

    def _drop_page(self, block: int) -> int:
        page = int(self._page_of[block])
        self._page_of[block] = NO_PAGE
        return page

    def _offer(self, block: int) -> None:
        """Let its page be taken, if the host has its rows and nobody pins it."""
        if self._durable[block] and not self._pins[block]:
            self._unpinned[block] = None


def _require_distinct(blocks: Sequence[int]) -> None:
    if len(set(blocks)) < len(blocks):
        raise RuntimeError("a block is given twice")


def _require(ok: bool, fault: str) -> None:
    if not ok:
        raise AssertionError(f"residency: {fault}")
