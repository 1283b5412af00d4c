"""Residency against its own law, and against a model that moves rows and looks for them where it is told to."""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from glmjax.serving.residency import NO_PAGE, Residency


def write_back(residency, blocks):
    """Seal blocks and copy all that is queued, so that they are durable."""
    residency.seal(blocks)
    for block, _ in residency.start_write_backs(residency.pending):
        residency.finish_write_back(block)


def cached(residency, blocks):
    """Blocks of a request that came and went: unpinned, the first of them to stay longest."""
    residency.place(blocks)
    write_back(residency, blocks)
    residency.unpin(blocks)


def order_of_loss(residency, blocks):
    """``blocks`` in the order in which they lose their pages to new ones (from 50 on)."""
    lost = []
    for new in itertools.count(50):
        before = [b for b in blocks if residency.is_resident(b)]
        if not before:
            return lost
        residency.place([new])
        lost += [b for b in before if not residency.is_resident(b)]


def state_of(residency):
    snapshot = residency.snapshot().tolist()
    durable = [residency.is_durable(b) for b in range(residency.num_blocks)]
    return snapshot, durable, residency.gauges()


@pytest.fixture
def pool():
    """Four pages, hot regions of two."""
    return Residency(num_blocks=100, num_pages=4, region_pages=2)


def test_placed_blocks_have_a_page_each_and_no_host_copy(pool):
    pool.place([7, 3])
    assert sorted(pool.page_of[[7, 3]]) == [0, 1]
    assert not pool.is_durable(7)
    assert pool.free_pages == 2
    pool.check([[7, 3]])


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([20, 21, 22, 23], "4 pages with 3 free"),
        ([20, 0], "block 0 holds rows"),
        ([20, 1], "block 1 holds rows"),
        ([20, 20], "given twice"),
    ],
    ids=["too many", "resident", "on host", "twice"],
)
def test_refused_place_changes_nothing(pool, blocks, fault):
    pool.place([0])
    pool.arrived([1])
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=fault):
        pool.place(blocks)
    assert state_of(pool) == before
    pool.check([[0]])


def test_dirty_and_writing_pages_are_never_taken(pool):
    pool.place([0, 1, 2, 3])
    pool.seal([1, 2])
    pool.start_write_backs(1)
    pool.unpin([1, 2])
    assert pool.free_pages == 0
    with pytest.raises(RuntimeError, match="1 pages with 0 free"):
        pool.place([9])
    with pytest.raises(RuntimeError, match="2 pages with 0 free"):
        pool.lease_region()


def test_clean_pages_with_pins_are_never_taken(pool):
    pool.place([0, 1, 2, 3])
    write_back(pool, [0, 1, 2, 3])
    assert pool.free_pages == 0


def test_unpinned_block_is_resident_until_its_page_is_taken(pool):
    cached(pool, [0])
    page = pool.page_of[0]
    pool.place([1, 2, 3])
    assert pool.page_of[0] == page
    pool.place([4])
    assert (pool.page_of[0], pool.page_of[4]) == (NO_PAGE, page)
    assert pool.is_durable(0)
    pool.check([[1, 2, 3, 4]])


def test_least_recently_unpinned_goes_first_and_a_tail_before_its_head(pool):
    cached(pool, [0, 1])
    cached(pool, [2, 3])
    assert order_of_loss(pool, range(4)) == [1, 0, 3, 2]


def test_pin_makes_content_recently_used(pool):
    for block in range(4):
        cached(pool, [block])
    pool.pin([0])
    pool.unpin([0])
    assert order_of_loss(pool, range(4)) == [1, 2, 3, 0]


def test_pin_saves_what_is_resident_and_counts_what_is_not(pool):
    cached(pool, [0, 1])
    pool.arrived([2])
    assert pool.pin([0, 1, 2]) == 1
    assert pool.free_pages == 2
    pool.check([[0, 1]])


def test_shared_page_stays_until_the_last_pin(pool):
    cached(pool, [0])
    pool.pin([0])
    pool.pin([0])
    pool.unpin([0])
    assert pool.free_pages == 3
    pool.unpin([0])
    assert pool.free_pages == 4


def test_unpin_without_a_pin_raises(pool):
    cached(pool, [0])
    with pytest.raises(RuntimeError, match="block 0 unpinned without a pin"):
        pool.unpin([0])


def test_num_unpinned_counts_what_pins_take_from_the_free_pages(pool):
    cached(pool, [0, 1])
    pool.place([2])
    pool.arrived([3])
    assert pool.num_unpinned([0, 1, 2, 3]) == 2


def test_write_backs_start_in_the_order_of_seals_up_to_the_limit(pool):
    pool.place([3, 1, 2])
    pool.seal([3])
    pool.seal([2, 1])
    assert pool.start_write_backs(2) == [(3, pool.page_of[3]), (2, pool.page_of[2])]
    assert pool.start_write_backs(2) == [(1, pool.page_of[1])]
    assert pool.pending == 3


def test_seal_queues_once(pool):
    pool.place([0, 1])
    pool.seal([0, 1])
    pool.seal([1, 0])
    assert [b for b, _ in pool.start_write_backs(9)] == [0, 1]
    pool.seal([0, 1])
    pool.finish_write_back(0)
    pool.seal([0, 1])
    assert pool.pending == 1


def test_seal_passes_over_what_has_no_rows_on_the_device(pool):
    pool.arrived([0])
    pool.seal([0, 1])
    assert pool.pending == 0


def test_request_that_ends_early_gives_its_pages_when_they_are_written(pool):
    pool.place([0, 1])
    pool.seal([0, 1])
    pool.start_write_backs(1)
    pool.unpin([0, 1])
    assert (pool.free_pages, pool.pending) == (2, 2)
    pool.finish_write_back(0)
    assert (pool.free_pages, pool.pending) == (3, 1)
    pool.check([])


def test_failed_write_back_leaves_a_dirty_block_that_can_be_sealed_again(pool):
    pool.place([0])
    pool.seal([0])
    pool.start_write_backs(1)
    pool.finish_write_back(0, ok=False)
    assert (pool.is_resident(0), pool.is_durable(0), pool.pending) == (True, False, 0)
    pool.check([[0]])
    write_back(pool, [0])
    assert pool.is_durable(0)


def test_failed_write_back_without_pins_frees_nothing(pool):
    pool.place([0])
    pool.seal([0])
    pool.start_write_backs(1)
    pool.unpin([0])
    pool.finish_write_back(0, ok=False)
    assert pool.free_pages == 3
    with pytest.raises(AssertionError, match=r"nobody wants the dirty blocks \[0\]"):
        pool.check([])
    pool.forget([0])
    pool.check([])


def test_only_what_is_being_written_can_finish(pool):
    pool.place([0])
    pool.seal([0])
    with pytest.raises(RuntimeError, match="block 0 is not being written"):
        pool.finish_write_back(0)


def test_durable_prefix_ends_at_the_first_block_without_a_host_copy(pool):
    pool.arrived([5, 6])
    pool.place([7])
    pool.arrived([8])
    assert pool.durable_prefix([6, 5, 7, 8]) == 2
    assert pool.durable_prefix([6, 5]) == 2
    assert pool.durable_prefix([6, 5, 8, 7], start=2) == 3
    assert pool.durable_prefix([7, 5, 8], start=1) == 3  # what lies before start is not looked at


def test_arrived_blocks_are_on_the_host_only(pool):
    pool.arrived([0])
    assert (pool.is_resident(0), pool.is_durable(0), pool.free_pages) == (False, True, 4)


@pytest.mark.parametrize("blocks", [[2, 0], [2, 1], [2, 2]], ids=["resident", "on host", "twice"])
def test_refused_arrival_changes_nothing(pool, blocks):
    pool.place([0])
    pool.arrived([1])
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=r"holds rows|given twice"):
        pool.arrived(blocks)
    assert state_of(pool) == before


def test_loaded_blocks_are_clean_in_pages_that_can_be_had(pool):
    cached(pool, [0, 1])
    pool.arrived([2, 3, 4])
    pool.pin([0])
    loads = pool.load([4, 2, 3])
    assert loads == [(4, pool.page_of[4]), (2, pool.page_of[2]), (3, pool.page_of[3])]
    assert not pool.is_resident(1)
    pool.check([[0, 4, 2, 3]])
    pool.unpin([4, 2, 3])
    assert pool.free_pages == 3


def test_reopened_blocks_are_dirty_until_they_are_written_back_again(pool):
    pool.arrived([2, 3])
    assert pool.reopen([3]) == [(3, pool.page_of[3])]
    assert (pool.is_durable(3), pool.is_pinned(3), pool.free_pages) == (False, True, 3)
    pool.check([[3]])
    write_back(pool, [3])
    pool.unpin([3])
    assert pool.is_durable(3) and pool.free_pages == 4


@pytest.mark.parametrize("verb", ["load", "reopen"])
@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([2, 3, 4, 5], "4 pages with 3 free"),
        ([2, 0], "block 0 is not on the host only"),
        ([2, 1], "block 1 is not on the host only"),
        ([2, 2], "given twice"),
    ],
    ids=["too many", "clean", "empty", "twice"],
)
def test_refused_load_changes_nothing(pool, verb, blocks, fault):
    pool.arrived([2, 3, 4, 5])
    pool.place([0])
    write_back(pool, [0])
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=fault):
        getattr(pool, verb)(blocks)
    assert state_of(pool) == before
    pool.check([[0]])


def test_forgotten_blocks_are_empty(pool):
    cached(pool, [0])
    pool.arrived([1])
    pool.place([2])
    pool.seal([2])
    pool.unpin([2])
    pool.forget([0, 1, 2, 3])
    assert pool.gauges()["hisparse_pages_free"] == 4
    assert pool.start_write_backs(9) == []
    pool.place([0, 1, 2, 3])
    pool.check([[0, 1, 2, 3]])


def test_pinned_and_writing_blocks_are_not_forgotten(pool):
    cached(pool, [0])
    pool.place([1, 2])
    pool.seal([2])
    pool.start_write_backs(1)
    pool.unpin([2])
    before = state_of(pool)
    for block, fault in ((1, "is pinned"), (2, "is being written")):
        with pytest.raises(RuntimeError, match=f"block {block} {fault}"):
            pool.forget([0, block])
    assert state_of(pool) == before


def test_region_takes_free_pages_before_those_of_blocks(pool):
    cached(pool, [0, 1])
    first = pool.lease_region()
    assert pool.is_resident(0) and pool.is_resident(1)
    second = pool.lease_region()
    assert not pool.is_resident(0) and not pool.is_resident(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.check([])


def test_released_region_is_free(pool):
    region = pool.lease_region()
    assert pool.gauges()["hisparse_pages_hot"] == 2
    pool.release_region(region)
    assert pool.gauges()["hisparse_pages_free"] == 4
    pool.check([])


@pytest.mark.parametrize("pages", [(0,), (2, 3), (1, 0)])
def test_only_whole_leased_regions_are_released(pool, pages):
    assert pool.lease_region() == (0, 1)
    with pytest.raises(RuntimeError, match="no hot region"):
        pool.release_region(pages)


def test_pool_is_tight_below_its_watermark():
    pool = Residency(9, 4, region_pages=2)
    pool.place([0, 1])
    assert not pool.is_tight
    pool.place([2])
    assert pool.is_tight
    write_back(pool, [2])
    pool.unpin([2])
    assert not pool.is_tight


@pytest.mark.parametrize(("given", "watermark"), [(None, 10), (3, 3), (0, 0)])
def test_watermark_is_a_tenth_of_the_pages_unless_given(given, watermark):
    assert Residency(9, 109, region_pages=4, watermark=given).watermark == watermark


def test_watermark_is_one_region_at_least():
    assert Residency(9, 109, region_pages=40).watermark == 40


def test_spare_block_has_the_spare_page(pool):
    assert (pool.page_of.shape, pool.page_of.dtype) == ((101,), "int32")
    assert (pool.page_of[:-1] == NO_PAGE).all() and pool.page_of[-1] == 4


def test_snapshot_stays_as_it_was_and_page_of_does_not(pool):
    snapshot = pool.snapshot()
    pool.place([0])
    assert (snapshot[0], pool.page_of[0]) == (NO_PAGE, 0)
    with pytest.raises(ValueError, match="read-only"):
        pool.page_of[0] = 3


def test_reset_keeps_what_is_held_pinned_or_not_written_yet(pool):
    cached(pool, [0, 1])
    pool.arrived([2, 3])
    pool.place([4, 5])
    write_back(pool, [4])
    pool.seal([5])
    pool.unpin([5])
    pool.reset(held=[1, 3])
    assert [b for b in range(6) if pool.is_durable(b)] == [1, 3, 4]
    assert [b for b in range(6) if pool.is_resident(b)] == [1, 4, 5]
    assert pool.pending == 1
    pool.check([[4]])


def test_gauges_are_disjoint(pool):
    cached(pool, [0])
    pool.place([1])
    pool.seal([1])
    pool.lease_region()
    assert pool.gauges() == {
        "hisparse_pages_free": 0,
        "hisparse_pages_unpinned": 1,
        "hisparse_pages_hot": 2,
        "hisparse_pending_page_transfers": 1,
    }


FAULTS = {
    "lost or in two places": lambda p: p._free.pop(),
    "lost or in two": lambda p: p._page_of.__setitem__(4, 0),
    "spare block": lambda p: p._page_of.__setitem__(100, NO_PAGE),
    "wrong size": lambda p: p._regions.update([(p._free.pop(),)]),
    "negative": lambda p: p._pins.__setitem__(0, -1),
    "without a page": lambda p: p._pins.__setitem__(9, 1),
    "both queued and": lambda p: p._writing.add(2),
    "to be written": lambda p: p._writing.add(0),
    "to be written has": lambda p: p._queued.update({9: None}),
    "unpinned blocks": lambda p: p._unpinned.clear(),
    "unpinned": lambda p: p._unpinned.update({1: None}),
    r"pins miscounted for blocks \[1\]": lambda p: p._pins.__setitem__(1, 2),
    "nobody wants": lambda p: p._queued.clear(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_sees(fault):
    pool = Residency(100, 6, 2)
    cached(pool, [0])
    pool.place([1, 2])
    pool.seal([2])
    pool.unpin([2])
    pool.lease_region()
    pool.check([[1]])
    FAULTS[fault](pool)
    with pytest.raises(AssertionError, match=f"residency: .*{fault}"):
        pool.check([[1]])


@dataclasses.dataclass
class Block:
    """What the model knows of a block that is not empty."""

    version: int  # of its rows
    has_page: bool = True
    durable: bool = False
    pins: int = 0
    queued: int | None = None  # when
    writing: int | None = None  # from which page
    unpinned: int = 0  # when last

    @property
    def can_lose_page(self):
        return self.has_page and self.durable and not self.pins

    @property
    def is_sealed(self):
        return self.durable or self.queued is not None or self.writing is not None


@dataclasses.dataclass(eq=False)
class Request:
    blocks: list[int]
    pinned: list[int]
    region: tuple[int, ...] = ()


class Serving:
    """Requests that share blocks come, spill and go, as a scheduler would have them; rows are moved and looked up."""

    NUM_BLOCKS = 20

    def __init__(self, seed):
        self.rng = random.Random(seed)
        num_pages, region_pages = self.rng.randint(4, 12), self.rng.randint(1, 3)
        self.seen = Counter()
        self.real = Residency(self.NUM_BLOCKS, num_pages, region_pages)
        self.clock = itertools.count()
        self.blocks: dict[int, Block] = {}
        self.requests: list[Request] = []
        self.chains: list[list[tuple[int, int]]] = []  # (block, version) along each request that there has been
        self.device = [None] * num_pages  # versions
        self.host: dict[int, int] = {}

    def step(self):
        """One thing that can happen now."""
        blocks = self.blocks.values()
        choice = [self.evict]
        if len(self.requests) < 4:
            choice += [self.transfer, *[self.admit] * 4]
        if self.requests:
            choice += [self.end, *[self.grow, self.spill, self.reopen] * 2, *[self.seal_head] * 4]
        if any(block.queued is not None for block in blocks):
            choice += [self.start_write_backs] * 6
        if any(block.writing is not None for block in blocks):
            choice += [self.finish_write_back] * 8
        if blocks:
            choice.append(self.misuse)
        if len(self.chains) > 8:
            choice.append(self.reset)
        self.rng.choice(choice)()

    @property
    def num_hot(self):
        return sum(len(r.region) for r in self.requests)

    @property
    def free_pages(self):
        """Pages without anything in them."""
        return self.real.num_pages - self.num_hot - sum(b.has_page for b in self.blocks.values())

    @property
    def to_lose(self):
        """Blocks that can lose their pages, next first."""
        return sorted(
            (b for b, block in self.blocks.items() if block.can_lose_page), key=lambda b: self.blocks[b].unpinned
        )

    @property
    def idle(self):
        held = {b for r in self.requests for b in r.blocks}
        writing = {b for b, block in self.blocks.items() if block.writing is not None}
        return [b for b in range(self.NUM_BLOCKS) if b not in held | writing]

    def take(self, what, count, action):
        """Do what takes pages, and say whether it could."""
        if count > self.free_pages + len(self.to_lose):
            self.seen[f"{what} refused"] += 1
            with pytest.raises(RuntimeError, match="pages with"):
                action()
            return False
        for block in self.to_lose[: max(0, count - self.free_pages)]:
            self.blocks[block].has_page = False
            self.seen["taken"] += 1
        self.seen[what] += 1
        action()
        return True

    def place(self, blocks):
        if not self.take("place", len(blocks), lambda: self.real.place(blocks)):
            return []
        for b in blocks:
            self.blocks[b] = Block(next(self.clock), pins=1)
            self.device[self.real.page_of[b]] = self.blocks[b].version
        return blocks

    def load(self, blocks):
        for b, page in self.real.load(blocks):
            self.device[page] = self.host[b]
        for b in blocks:
            self.blocks[b].has_page, self.blocks[b].pins = True, 1

    def unpin(self, request, blocks):
        self.real.unpin(blocks)
        request.pinned = [b for b in request.pinned if b not in blocks]
        for b in reversed(blocks):
            self.blocks[b].pins -= 1
            self.blocks[b].unpinned = next(self.clock)

    def seal(self, blocks):
        self.real.seal(blocks)
        for block in (self.blocks[b] for b in blocks):
            if block.has_page and not block.durable and block.queued is None and block.writing is None:
                block.queued = next(self.clock)

    def forget(self, blocks):
        self.real.forget(blocks)
        for b in blocks:
            self.blocks.pop(b, None)

    def retire(self, request):
        self.chains.append([(b, self.blocks[b].version) for b in request.blocks])
        self.unpin(request, list(request.pinned))
        self.forget([b for b in request.blocks if not self.blocks[b].is_sealed and not self.blocks[b].pins])
        if request.region:
            self.real.release_region(request.region)
        self.requests.remove(request)

    def hit(self, chain):
        """The head of a chain that is still there and sealed."""
        there = itertools.takewhile(
            lambda link: link[0] in self.blocks and self.blocks[link[0]].version == link[1], chain
        )
        return list(itertools.takewhile(lambda b: self.blocks[b].is_sealed, (b for b, _ in there)))

    def draw_idle(self, most, but=()):
        choice = [b for b in self.idle if b not in but]
        return self.rng.sample(choice, min(len(choice), self.rng.randint(1, most)))

    def admit(self):
        chains = self.chains + [[(b, self.blocks[b].version) for b in r.blocks] for r in self.requests]
        hit = self.hit(self.rng.choice(chains)) if chains else []
        pinned = [b for b in hit if self.blocks[b].has_page]
        unpinned = [b for b in hit if self.blocks[b].can_lose_page]
        assert self.real.num_unpinned(hit) == len(unpinned)
        assert self.real.pin(hit) == len(hit) - len(pinned)
        for b in pinned:
            self.blocks[b].pins += 1
        away = [b for b in hit if b not in pinned]
        if away and self.rng.random() < 0.5 and self.take("load", len(away), lambda: self.load(away)):
            pinned = hit
        self.seen["saved"] += len(unpinned)
        self.seen["adopted"] += len(hit) - len(away)
        self.seen["shared while written"] += sum(not self.blocks[b].durable for b in pinned)
        new = self.draw_idle(4, but=hit)
        self.forget(new)
        new = self.place(new)
        self.requests.append(Request(hit + new, pinned + new))

    def grow(self):
        request = self.rng.choice(self.requests)
        new = self.draw_idle(1)
        self.forget(new)
        new = self.place(new)
        request.blocks += new
        request.pinned += new

    def seal_head(self):
        request = self.rng.choice(self.requests)
        self.seal(request.blocks[: len(request.blocks) - self.rng.randint(0, 2)])

    def start_write_backs(self):
        limit = self.rng.choice([0, 1, 9])
        queue = sorted((block.queued, b) for b, block in self.blocks.items() if block.queued is not None)[:limit]
        started = self.real.start_write_backs(limit)
        assert started == [(b, self.real.page_of[b]) for _, b in queue]
        for b, page in started:
            self.blocks[b].queued, self.blocks[b].writing = None, page

    def finish_write_back(self):
        ok = self.rng.random() < 0.8
        b = self.rng.choice([b for b, block in self.blocks.items() if block.writing is not None])
        block = self.blocks[b]
        if ok:
            self.host[b] = self.device[block.writing]
            self.seen["written without pins"] += not block.pins
        self.seen["written" if ok else "failed"] += 1
        block.writing, block.durable, block.unpinned = None, ok, next(self.clock)
        self.real.finish_write_back(b, ok)
        if not ok and self.rng.random() < 0.5:
            self.seal([b])
        elif not block.is_sealed and not block.pins:
            self.forget([b])

    def spill(self):
        """A request gets a hot region, and gives up what is clean."""
        request = self.rng.choice(self.requests)
        if not request.region and not self.take("region", self.real.region_pages, lambda: self.lease(request)):
            return
        self.unpin(request, [b for b in request.pinned if self.blocks[b].durable])

    def lease(self, request):
        request.region = self.real.lease_region()
        for page in request.region:
            self.device[page] = None

    def end(self):
        self.retire(self.rng.choice(self.requests))

    def transfer(self):
        blocks = self.draw_idle(2)
        self.forget(blocks)
        self.real.arrived(blocks)
        for b in blocks:
            self.blocks[b] = Block(next(self.clock), has_page=False, durable=True)
            self.host[b] = self.blocks[b].version
        self.requests.append(Request(blocks, []))

    def reopen(self):
        """A request goes on to write to its last block, which is on the host and nobody else's."""
        request = self.rng.choice(self.requests)
        last = request.blocks[-1:]
        others = {b for r in self.requests if r is not request for b in r.blocks}
        if not last or last[0] in others or self.blocks[last[0]].has_page:
            return

        def action():
            ((b, page),) = self.real.reopen(last)
            self.device[page] = self.host[b]

        if self.take("reopen", 1, action):
            self.blocks[last[0]] = Block(next(self.clock), pins=1)
            self.device[self.real.page_of[last[0]]] = self.blocks[last[0]].version
            request.pinned += last

    def evict(self):
        self.forget(self.draw_idle(2))

    def reset(self):
        held = {b for r in self.requests for b in r.blocks}
        self.real.reset(held)
        self.seen["reset"] += 1
        self.blocks = {b: k for b, k in self.blocks.items() if b in held or not k.durable}
        self.chains.clear()

    def misuse(self):
        b = self.rng.choice(sorted(self.blocks))
        for verb in (self.real.place, self.real.arrived):
            with pytest.raises(RuntimeError):
                verb([b])
        if self.blocks[b].pins or self.blocks[b].writing is not None:
            with pytest.raises(RuntimeError):
                self.real.forget([b])

    def check(self):
        self.real.check(r.pinned for r in self.requests)
        self.check_rows()
        self.check_states()

    def check_rows(self):
        """Whoever looks where ``page_of`` says finds the rows of every block, and the host has what it is said to."""
        for b, block in self.blocks.items():
            page = self.real.page_of[b]
            assert (self.device[page] if page != NO_PAGE else self.host[b]) == block.version
            assert not block.durable or self.host[b] == block.version

    def check_states(self):
        empty = Block(0, has_page=False)
        for b in range(self.NUM_BLOCKS):
            block = self.blocks.get(b, empty)
            assert (self.real.is_resident(b), self.real.is_durable(b)) == (block.has_page, block.durable)
        for r in self.requests:
            prefix = list(itertools.takewhile(lambda b: self.blocks[b].durable, r.blocks))
            assert self.real.durable_prefix(r.blocks, len(prefix) // 2) == len(prefix)
        pending = sum(k.queued is not None or k.writing is not None for k in self.blocks.values())
        assert self.real.gauges() == {
            "hisparse_pages_free": self.free_pages,
            "hisparse_pages_unpinned": len(self.to_lose),
            "hisparse_pages_hot": self.num_hot,
            "hisparse_pending_page_transfers": pending,
        }
        assert self.real.free_pages == self.free_pages + len(self.to_lose)
        assert self.real.is_tight == (self.real.free_pages < self.real.watermark)

    def close(self):
        """All requests end, writes run dry, and then every page can be had and nothing is left."""
        for request in list(self.requests):
            self.retire(request)
        self.check()
        self.real.start_write_backs(self.NUM_BLOCKS)
        for b, block in self.blocks.items():
            if not block.durable:
                self.real.finish_write_back(b)
        self.real.check([])
        assert (self.real.free_pages, self.real.pending) == (self.real.num_pages, 0)
        self.real.reset(held=())
        assert self.real.gauges()["hisparse_pages_free"] == self.real.num_pages
        assert not any(self.real.is_durable(b) for b in range(self.NUM_BLOCKS))


def walk(seed, steps=200):
    """A random life of a pool, compared with the model after every step; says what has happened how often."""
    serving = Serving(seed)
    for _ in range(steps):
        serving.step()
        serving.check()
    serving.close()
    return serving.seen


def test_pool_is_as_the_model_whatever_requests_do():
    seen = sum((walk(seed) for seed in range(60)), Counter())
    assert min(seen.values()) >= 25 and len(seen) == 16, f"the walk hardly tries some of {seen}"
