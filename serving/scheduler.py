"""Decides what every step computes: one token budget, no phases.

Requests stand in one order of precedence, (priority,) arrival.  Running ones are served in that
order, then waiting ones are admitted in that order.  A running request that lacks a block takes it
from the last running one, which loses its blocks and waits again at its old place in the order.

Invariants, restated by ``check``:
- ``running`` and ``waiting`` are sorted by precedence; only running requests hold blocks.
- A running request holds blocks for every token it knows, and a slot of its own.
- ``schedule`` counts as computed what it plans, so it can be called again before ``commit``; plans are started and
  committed in the order in which they were made.  A block that is freed while a step in flight writes to it can be
  given away at once: whatever its next owner does comes later on the device.
- Results of a request that has lost its blocks since are passed over; they come again, since noise goes by position.
No livelock: the first running request can take blocks from all others and alone fits the pool
(``check_fits``), so every step brings it forward.
"""

import bisect
import itertools
from collections.abc import Collection, Sequence

from glmjax.errors import RequestError
from glmjax.serving.blocks import BlockPool, extend_digests
from glmjax.serving.chunks import next_chunk
from glmjax.serving.draft_counts import DraftCounts
from glmjax.serving.handoff import Handoff
from glmjax.serving.offload import Offloading
from glmjax.serving.plan import Chunk, Plan, Results, Sampled
from glmjax.serving.request import Request, Status, Update, complete
from glmjax.serving.scheduler_check import check_scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.transfer.interface import Offer


class Scheduler:
    """Owns the requests and, through the pool, their blocks.  Not thread-safe: one thread calls it."""

    def __init__(self, config: SchedulerConfig, eos_ids: Collection[int] = (), handoff: Handoff | None = None):
        self.config, self.handoff = config, handoff
        self.eos_ids = frozenset(eos_ids)
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.offload: Offloading | None = None
        if config.num_pages is not None:
            self.offload = Offloading(self.pool, config)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # tokens looked up at first admissions
        self.prefix_cache_hits = 0  # and those found
        self.drafts = DraftCounts(config.num_speculative_tokens)
        self.failures: list[Update] = []
        self.offers: dict[str, Offer] = {}
        self.requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._admissions = itertools.count(1)
        self.free_slots = list(range(config.max_num_seqs))

    @property
    def ranks(self) -> tuple["Scheduler"]:
        """As several data-parallel ones have it: itself."""
        return (self,)

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or any(part.has_work for part in (self.offload, self.handoff) if part is not None)

    @property
    def load(self) -> int:
        """What there is to do, for choosing between schedulers: waiting requests weigh more than running ones."""
        return 4 * len(self.waiting) + len(self.running)

    def gauges(self) -> dict[str, int]:
        """What ``Engine.stats`` says of requests and blocks."""
        return {
            "free_blocks": self.pool.free_blocks,
            "total_blocks": self.pool.num_blocks,
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "num_preemptions": self.num_preemptions,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            **self.drafts.gauges(),
            **({} if self.offload is None else self.offload.gauges()),
            **({} if self.handoff is None else self.handoff.gauges()),
        }

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV; running requests keep theirs."""
        self.pool.reset()
        if self.offload is not None:
            self.offload.reset_prefix_cache(r.blocks for r in self.running)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt with output that context limit and pool allow."""
        config = self.config
        return min(config.max_model_len, config.max_blocks * config.block_size + 1)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise unless such a request could run alone.  Reads only the configuration."""
        blocks = self.pool.blocks_for(num_prompt_tokens + max_tokens - 1)
        if blocks > self.config.max_blocks:
            size = "hisparse_host_gib" if self.config.region_pages else "num_device_blocks"
            raise RequestError(
                f"a prompt of {num_prompt_tokens} tokens with max_tokens={max_tokens} needs "
                f"{blocks} KV blocks of {self.config.block_size} tokens, and the pool has "
                f"{self.config.max_blocks}; lower max_tokens or raise {size}",
                "max_tokens" if num_prompt_tokens < self.max_sequence_tokens else "prompt",
            )

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        self.check_fits(request.num_prompt_tokens, request.max_tokens)
        request.arrival = next(self._arrivals)
        self.requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=self.precedence)

    def abort(self, request_id: str) -> bool:
        """Take a request out at any stage and free what it holds; False if it is not here."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._retire(request)
        return True

    def clear(self) -> None:
        """Take every request out and forget all cached KV: the device's cache is gone."""
        for request in list(self.requests.values()):
            self._retire(request)
        if self.offload is not None:
            self.offload.clear()
        if self.handoff is not None:
            self.handoff.clear()
        self.pool.reset()

    def tick(self, now: float) -> None:
        """Time goes on: ``now`` in seconds of any steady clock."""
        if self.handoff is not None:
            self.handoff.tick(now, self.waiting)

    def schedule(self) -> Plan:
        """Choose the tokens of the next step and lease the blocks that they need."""
        self._take_arrivals()
        budget = self.config.max_num_batched_tokens
        preemptions = self.num_preemptions
        chunks: list[Chunk] = []
        planned: set[str] = set()  # their chunks go by the pages and blocks that they have

        place = 0
        while budget > 0 and place < len(self.running):
            request = self.running[place]
            place += 1
            if self._ends_in_flight(request) or self._waits(request, budget):
                continue
            size = self._chunk_size(request, budget)
            if size == 0:
                budget = 0  # what is left is not for those behind it
            elif not self._grow(request, self._reach(request, size)) or not self._place(request, size, planned):
                budget = 0
            else:
                chunks.append(self._chunk(request, size))
                planned.add(request.request_id)
                budget -= size

        if self.num_preemptions == preemptions:
            while budget > 0 and self.waiting and self._admit(self.waiting[0], budget):
                request = self.waiting.pop(0)
                bisect.insort(self.running, request, key=self.precedence)
                if self._waits(request, budget):
                    continue
                size = self._chunk_size(request, budget)
                if not self._place(request, size, planned):
                    break
                chunks.append(self._chunk(request, size))
                planned.add(request.request_id)
                budget -= size
        sends, receives = ((), ()) if self.handoff is None else self.handoff.planned()
        plan = Plan(tuple(chunks), sends=sends, receives=receives)
        return plan if self.offload is None else self.offload.planned(plan, self.requests)

    def commit(self, plan: Plan, results: Results) -> list[Update]:
        """Enter a step's results; requests aborted meanwhile are passed over."""
        updates = self._commit_copies(plan, results)
        outputs = results.sampled
        for chunk in plan.chunks:
            request = self.requests.get(chunk.request_id)
            if request is None or request.status is not Status.RUNNING or request.admission != chunk.admission:
                continue
            update = self._accept(request, chunk, outputs[chunk.request_id]) if chunk.samples else None
            self._publish(request)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    if request.send and self.handoff is not None:
                        self.handoff.send(request)
                    self._retire(request)
        if plan.write_backs:
            for request in self.running:
                self._publish(request)
        return updates

    def _take_arrivals(self) -> None:
        """Let requests go on whose rows have come, or cannot."""
        if self.handoff is None:
            return
        for request, error in self.handoff.arrived(self.running):
            if error is not None:
                self._retire(request, keep=False)
                self.failures.append(Update(request, (), (), "abort", error=str(error)))
                continue
            if self.offload is not None:
                self.offload.arrived(request)
            self._publish(request)

    def take_handoffs(self) -> tuple[list[Update], dict[str, Offer]]:
        """Requests that failed since the last call, and offers of those that can be fetched now, by request."""
        failures, offers = self.failures, self.offers
        self.failures, self.offers = [], {}
        return failures, offers

    def _commit_copies(self, plan: Plan, results: Results) -> list[Update]:
        """Enter which pages the host has now, and end the requests whose rows it did not get or give."""
        updates: list[Update] = []
        errors = dict(results.errors)
        if self.handoff is not None:
            self.offers |= self.handoff.copied(plan.sends, plan.receives)
        if self.offload is not None:
            errors |= self.offload.copied(plan.write_backs, results, self.running)
        admissions = {chunk.request_id: chunk.admission for chunk in plan.chunks}
        for request_id, why in errors.items():
            request = self.requests.get(request_id)
            if request is not None and request.admission == admissions.get(request_id, request.admission):
                self._retire(request, keep=False)
                updates.append(Update(request, (), (), "abort", error=why))
        if self.offload is not None:
            self.offload.not_loaded(results.failed_loads)
        return updates

    def check(self) -> None:
        """Raise unless every invariant holds."""
        check_scheduler(self)

    def precedence(self, request: Request) -> tuple[int, int]:
        """What the queues are sorted by."""
        by_priority = self.config.policy == "priority"
        return (request.priority if by_priority else 0, request.arrival)

    def _horizon(self, request: Request) -> int:
        """Positions that can ever need KV."""
        return min(request.horizon, self.config.max_model_len - 1)

    def _ends_in_flight(self, request: Request) -> bool:
        """Whether the steps in flight bring its last token for sure."""
        return request.num_tokens + request.in_flight > self._horizon(request)

    def _chunk_size(self, request: Request, budget: int) -> int:
        """Tokens of its next chunk, at most; 0 if the budget does not hold them."""
        if request.continues:
            size = 1 + self.config.num_speculative_tokens
            return size if size <= budget else 0
        return min(request.remaining, budget, self.config.max_prefill_chunk or budget)

    def _reach(self, request: Request, size: int) -> int:
        """Positions before this one may be written by its next chunk, drafts included."""
        drafts = max(0, self.config.num_speculative_tokens - 1)  # those that the MTP layer writes for the next ones
        if request.continues:
            return request.num_tokens - 1 + request.most_in_flight + size + drafts
        end = request.num_computed + size
        return end + drafts if end == request.num_tokens else end

    def _blocks_to_reach(self, request: Request, end: int) -> int:
        """Blocks for positions before ``end``, but none that it can never use."""
        return self.pool.blocks_for(min(end, self._horizon(request)))

    def _place(self, request: Request, size: int, planned: Collection[str]) -> bool:
        """With KV offload, get pages for its next chunk, at the cost of the last in order; False if it has to wait."""
        if self.offload is None:
            return True
        blocks, single = self._blocks_to_reach(request, self._reach(request, size)), request.continues or size == 1
        while not self.offload.prepared(request, blocks, single=single, others_wait=bool(self.waiting)):
            behind = self.offload.victims(request, self.running, planned)
            if self.offload.spill(reversed(behind)):
                continue
            victim = behind[-1]
            if self.offload.will_free_pages or self._ends_in_flight(victim):
                return False
            # A step in flight may need less than it was given room for, or leave blocks to be copied.
            if victim is request and (request.in_flight or self.offload.can_seal(request, self._num_full(request))):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _chunk(self, request: Request, size: int) -> Chunk:
        """Plan its next tokens, and count them as computed."""
        blocks = request.blocks[: self._blocks_to_reach(request, self._reach(request, size))]
        return next_chunk(
            request,
            size,
            blocks,
            room=len(blocks) * self.config.block_size,
            horizon=self._horizon(request),
            eos_ids=self.eos_ids,
            region=((), 0) if self.offload is None else self.offload.region_of(request),
        )

    def _grow(self, request: Request, end: int) -> bool:
        """Lease blocks up to ``end``, at the cost of the last in order; False if the request has to wait.

        It does if it is the last itself, or if the last ends with a step in flight and will free its blocks then.
        """
        need = self._blocks_to_reach(request, end) - len(request.blocks)
        while need > self.pool.free_blocks:
            victim = self.running[-1]
            if self._ends_in_flight(victim):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        if need > 0:
            request.blocks += self._allocate(need)
        return True

    def _allocate(self, count: int) -> tuple[int, ...]:
        blocks = tuple(self.pool.allocate(count))
        if self.offload is not None:
            self.offload.claimed(blocks)
        return blocks

    def _admit(self, request: Request, budget: int) -> bool:
        """Lease blocks for all known tokens, cached ones first; False if it has to wait.

        The hit leaves at least one token to compute, so that no shared block is written.  Each
        running request keeps one spare block, or growth would soon undo the admission.
        """
        if len(self.running) >= self.config.max_num_seqs:
            return False
        hit: list[int] = []
        if self.config.enable_prefix_caching:
            size = self.config.block_size
            extend_digests(request.digests, request.token_ids, size, request.cache_salt)
            shareable = request.digests[: (request.num_tokens - 1) // size]
            hit = self.pool.match(shareable)
            if len(hit) < len(shareable) and self._being_computed(shareable[len(hit)], len(hit)):
                return False
        end = request.num_tokens + max(0, self.config.num_speculative_tokens - 1)
        need = self._blocks_to_reach(request, end) - len(hit)
        if need + len(self.running) > self.pool.free_blocks - self.pool.num_idle(hit):
            return False
        comes = self.handoff is not None and self.handoff.lacks(request, len(hit)) > 0
        if self.offload is not None and not comes:
            ahead = bisect.bisect(self.running, self.precedence(request), key=self.precedence)
            if not self.offload.can_start(request, hit, need, budget, self.running, ahead):
                return False
        if self.handoff is not None and not self.handoff.starts(request, len(hit)):
            return False
        self.pool.share(hit)
        request.blocks = (*hit, *self._allocate(need))
        if self.offload is not None:
            self.offload.admitted(request, hit, need, budget, comes=comes)
        request.num_published = len(hit)
        request.num_computed = len(hit) * self.config.block_size
        request.slot, request.admission = self.free_slots.pop(), next(self._admissions)
        request.status = Status.RUNNING
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += request.num_computed
        return True

    def _waits(self, request: Request, budget: int) -> bool:
        """Whether a running request waits for rows from another engine, or for pages to start with."""
        if self.offload is not None:
            return self.offload.waits(request, budget, self.running)
        return self.handoff is not None and self.handoff.is_arriving(request)

    def _being_computed(self, digest: bytes, index: int) -> bool:
        """Whether a running request is about to publish this block: then it is cheaper to wait."""
        return any(r.num_published <= index and digest in r.digests[index : index + 1] for r in self.running)

    def _accept(self, request: Request, chunk: Chunk, sampled: Sampled) -> Update:
        """Append new tokens.  All but the last were drafts, so their KV is computed too."""
        new_ids, most = sampled.token_ids, chunk.most or 1
        if not 1 <= len(new_ids) <= most:
            raise RuntimeError(
                f"{len(new_ids)} tokens came back for {request.request_id}, and there may be 1 to {most}"
            )
        self.drafts.add(sampled)
        end = complete(request, new_ids, self.eos_ids, self.config.max_model_len)
        new_ids = new_ids[: end.num_kept]
        request.token_ids.extend(new_ids)
        request.in_flight -= 1
        request.most_in_flight -= most
        # A step in flight computes the last token too, unless that is the last to come.
        request.num_computed = min(request.num_tokens - 1 + request.in_flight, self._horizon(request))
        logprobs = sampled.logprobs[: len(new_ids)]
        return Update(request, new_ids, logprobs, end.finish_reason, end.stop_reason)

    def _num_full(self, request: Request) -> int:
        """Leading blocks that nothing writes to any more once the steps in flight are done."""
        return min(request.num_computed, request.num_tokens) // self.config.block_size

    def _publish(self, request: Request) -> None:
        size = self.config.block_size
        done = self._num_full(request)
        if self.offload is not None:
            done = self.offload.computed(request, done, request.num_published)
        if not self.config.enable_prefix_caching or done <= request.num_published:
            return
        extend_digests(request.digests, request.token_ids, size, request.cache_salt)
        new = slice(request.num_published, done)
        self.pool.publish(request.blocks[new], request.digests[new])
        request.num_published = done

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request, keep=False)
        request.status = Status.WAITING
        bisect.insort(self.waiting, request, key=self.precedence)
        self.num_preemptions += 1

    def _retire(self, request: Request, *, keep: bool = True) -> None:
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        self._free(request, keep=keep and self.config.enable_prefix_caching)
        request.status = Status.FINISHED
        del self.requests[request.request_id]

    def _free(self, request: Request, *, keep: bool) -> None:
        """Give up its slot and blocks; with ``keep`` those that are still to be copied to the host later."""
        blocks: Sequence[int] = request.blocks
        if request.status is Status.RUNNING:
            self.free_slots.append(request.slot)
            if self.offload is not None:
                blocks = self.offload.ended(request, keep=keep)
        if self.handoff is not None:
            self.handoff.dropped(request)
        self.pool.release(blocks)
        request.blocks = ()
        request.num_computed = request.in_flight = request.most_in_flight = 0
        request.continues = False
