"""Data parallelism for the engine: one scheduler for each rank, seen as one.

Ranks share nothing but the step: each has its own requests, blocks and prefix cache, and the limits of the
configuration hold for each.  A request stays with the rank that it was given to.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from glmjax.serving.blocks import extend_digests
from glmjax.serving.handoff import Handoff
from glmjax.serving.plan import Chunk, Handover, Move, Plan, Results
from glmjax.serving.request import Request, Update
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.transfer.interface import Offer


class DataParallelScheduler:
    """The interface of ``Scheduler`` over several; see ``best_rank`` for where a new request goes."""

    def __init__(
        self,
        config: SchedulerConfig,
        ranks: int,
        eos_ids: Collection[int] = (),
        handoffs: Sequence[Handoff | None] | None = None,
    ):
        self.config = config
        self.ranks = tuple(Scheduler(config, eos_ids, handoff) for handoff in handoffs or [None] * ranks)
        self._rank_of: dict[str, int] = {}

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.ranks[0].eos_ids

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self.ranks)

    @property
    def max_sequence_tokens(self) -> int:
        return self.ranks[0].max_sequence_tokens

    def gauges(self) -> dict[str, int]:
        """Sums over the ranks."""
        total: Counter[str] = Counter()
        for scheduler in self.ranks:
            total.update(scheduler.gauges())
        return dict(total)

    def reset_prefix_cache(self) -> None:
        for scheduler in self.ranks:
            scheduler.reset_prefix_cache()

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.ranks[0].check_fits(num_prompt_tokens, max_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request at a rank."""
        if self.config.enable_prefix_caching:
            extend_digests(request.digests, request.token_ids, self.config.block_size, request.cache_salt)
        rank = best_rank(self.ranks, request.digests)[0] if request.rank is None else request.rank
        self.ranks[rank].add(request)
        self._rank_of[request.request_id] = rank

    def abort(self, request_id: str) -> bool:
        rank = self._rank_of.pop(request_id, None)
        return rank is not None and self.ranks[rank].abort(request_id)

    def clear(self) -> None:
        for scheduler in self.ranks:
            scheduler.clear()
        self._rank_of.clear()

    def tick(self, now: float) -> None:
        for scheduler in self.ranks:
            scheduler.tick(now)

    def take_handoffs(self) -> tuple[list[Update], dict[str, Offer]]:
        failures: list[Update] = []
        offers: dict[str, Offer] = {}
        for scheduler in self.ranks:
            failed, offered = scheduler.take_handoffs()
            failures += failed
            offers |= offered
        for update in failures:
            del self._rank_of[update.request.request_id]
        return failures, offers

    def schedule(self) -> Plan:
        """The ranks' plans as one."""
        chunks: list[Chunk] = []
        pages: list[np.ndarray] = []
        loads: list[Move] = []
        write_backs: list[Move] = []
        sends: list[Handover] = []
        receives: list[Handover] = []
        for rank, scheduler in enumerate(self.ranks):
            own = scheduler.schedule()
            chunks += (dataclasses.replace(chunk, rank=rank) for chunk in own.chunks)
            pages += own.page_of
            loads += (dataclasses.replace(move, rank=rank) for move in own.loads)
            write_backs += (dataclasses.replace(move, rank=rank) for move in own.write_backs)
            sends += (dataclasses.replace(move, rank=rank) for move in own.sends)
            receives += (dataclasses.replace(move, rank=rank) for move in own.receives)
        return Plan(tuple(chunks), tuple(pages), tuple(loads), tuple(write_backs), tuple(sends), tuple(receives))

    def commit(self, plan: Plan, results: Results) -> list[Update]:
        updates = []
        for rank, scheduler in enumerate(self.ranks):
            mine = {c.request_id for c in plan.chunks if c.rank == rank}
            own = Plan(
                tuple(c for c in plan.chunks if c.rank == rank),
                write_backs=_of_rank(plan.write_backs, rank),
                sends=tuple(m for m in plan.sends if m.rank == rank),
                receives=tuple(m for m in plan.receives if m.rank == rank),
            )
            errors = {name: why for name, why in results.errors.items() if name in mine}
            failed, failed_loads = _of_rank(results.failed, rank), _of_rank(results.failed_loads, rank)
            updates += scheduler.commit(own, Results(results.sampled, failed, failed_loads, errors))
        for update in updates:
            if update.finish_reason is not None:
                del self._rank_of[update.request.request_id]
        return updates

    def check(self) -> None:
        """Raise unless every invariant holds."""
        for rank, scheduler in enumerate(self.ranks):
            scheduler.check()
            mine = {request_id for request_id, r in self._rank_of.items() if r == rank}
            if mine != {r.request_id for r in (*scheduler.running, *scheduler.waiting)}:
                raise AssertionError(f"data parallelism: rank {rank} has lost or kept a request")


def best_rank(ranks: Sequence[Scheduler], digests: Sequence[bytes]) -> tuple[int, int]:
    """The rank for a prompt, and how many of its blocks are cached there.

    The one with most of them, if it has not much more to do than the least loaded one; then the least loaded one.
    """
    cached = [len(rank.pool.match(digests)) for rank in ranks]
    load = [rank.load for rank in ranks]
    most = min(load) + max(1, ranks[0].config.max_num_seqs // 2)
    chosen = min(range(len(ranks)), key=lambda r: (load[r] > most, -cached[r] if load[r] <= most else 0, load[r], r))
    return chosen, cached[chosen]


def find_rank(ranks: Sequence[Scheduler], token_ids: Sequence[int], salt: str | None = None) -> tuple[int, int]:
    """Where a prompt would go now, and how many of its leading tokens are cached there.  For any thread."""
    digests: list[bytes] = []
    size = ranks[0].config.block_size
    if ranks[0].config.enable_prefix_caching:
        extend_digests(digests, token_ids, size, salt)
    rank, blocks = best_rank(ranks, digests)
    return rank, blocks * size


def _of_rank(moves: Iterable[Move], rank: int) -> tuple[Move, ...]:
    """A rank's moves, as its scheduler made them."""
    return tuple(dataclasses.replace(move, rank=0) for move in moves if move.rank == rank)
