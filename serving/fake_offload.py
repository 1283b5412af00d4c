"""The runner without a model, with its records in two tiers: pages of a device and blocks of a host."""

from collections.abc import Callable
from typing import Any

from glmjax.serving.fake import FakeRunner
from glmjax.serving.plan import Chunk, Move, Plan, Results, Sampled

ON_HOST = 1 << 60


class FakeOffloadRunner(FakeRunner):
    """Reads a record where the plan says it is, and refuses to read or write what a device could not.

    Args:
      fails: told of every copy, says which are to fail: nothing is copied then.
    """

    def __init__(self, block_size: int, *args: Any, fails: Callable[[Move], bool] = lambda move: False, **kwargs: Any):
        super().__init__(block_size, *args, **kwargs)
        self._fails = fails
        self._pages: dict[int, Any] = {}
        self._broken: set[Move] = set()  # loads that failed, as long as their page is their block's
        self.host_reads = 0  # records read from the host one by one

    def start(self, plan: Plan) -> Any:
        self._pages = dict(enumerate(plan.page_of))
        failed_loads = tuple(move for move in plan.loads if self._fails(move))
        still = {m for m in self._broken if plan.page_of[m.rank][m.block] == m.page and m not in plan.loads}
        self._broken = still | {*failed_loads}
        for move in plan.loads:
            if move in failed_loads:
                self._spoil(move.rank, move.page)
            else:
                self._copy(move, to_host=False)
        for chunk in plan.chunks:
            self._check_region(chunk)
        return super().start(plan), plan.write_backs, failed_loads

    def finish(self, started: Any) -> Results:
        """Copies to the host are as late as can be: another plan may have started."""
        sampled, write_backs, failed_loads = started
        failed = tuple(move for move in write_backs if self._fails(move))
        for move in write_backs:
            if move not in failed:
                self._copy(move, to_host=True)
        return Results(sampled, failed, failed_loads)

    def _read(self, chunk: Chunk) -> list[int]:
        # The result of a chunk whose page was not loaded does not count.
        if any(move.rank == chunk.rank and move.block in chunk.blocks for move in self._broken):
            return [0] * chunk.start
        return super()._read(chunk)

    def _slot(self, chunk: Chunk, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        page = int(self._pages[chunk.rank][chunk.blocks[block]])
        if page >= 0:
            return (chunk.rank << 40) + page * self._block_size + offset
        if not (chunk.staged or chunk.region):
            raise AssertionError(
                f"{chunk.request_id} is neither staged nor has a region, and block {block} has no page"
            )
        self.host_reads += 1
        return ON_HOST + (chunk.rank << 40) + chunk.blocks[block] * self._block_size + offset

    def _write(self, chunk: Chunk, prefix: list[int], token: int) -> None:
        if self._slot(chunk, len(prefix)) >= ON_HOST:
            raise AssertionError(f"{chunk.request_id} writes to position {len(prefix)}, which has no page")
        super()._write(chunk, prefix, token)

    def _sample(self, chunk: Chunk, prefix: list[int]) -> Sampled:
        sampled = super()._sample(chunk, prefix)
        for page in chunk.region:
            self._spoil(chunk.rank, page)
        return sampled

    def _spoil(self, rank: int, page: int) -> None:
        for offset in range(self._block_size):
            self._records[(rank << 40) + page * self._block_size + offset] = (-1, -1, 0)

    def _check_region(self, chunk: Chunk) -> None:
        if not set(chunk.region).isdisjoint(self._pages[chunk.rank].tolist()):
            raise AssertionError(f"{chunk.request_id}: its hot region has pages of blocks")
        if bool(chunk.region) != (chunk.lease > 0):
            raise AssertionError(f"{chunk.request_id}: region {chunk.region} under lease {chunk.lease}")

    def _copy(self, move: Move, *, to_host: bool) -> None:
        for offset in range(self._block_size):
            page = (move.rank << 40) + move.page * self._block_size + offset
            block = ON_HOST + (move.rank << 40) + move.block * self._block_size + offset
            source, target = (page, block) if to_host else (block, page)
            self._records[target] = self._records.get(source, (-1, -1, 0))
