"""Runners without a model, with a stage: what another engine fetches are the records themselves."""

from typing import Any

import numpy as np

from glmjax.serving.fake import FakeRunner, Record
from glmjax.serving.fake_offload import ON_HOST, FakeOffloadRunner
from glmjax.serving.plan import Handover, Plan
from glmjax.serving.transfer.interface import PeerInfo
from glmjax.serving.transfer.memory import Memory, memory

WIDTH = 24  # bytes of a record: three int64
INDEX_WIDTH = 4  # of index rows, which hold nothing


class FakeHandoffRunner(FakeRunner):
    """Keeps the records of blocks that are handed over as rows of one layer, in the connector's memory.

    Attributes:
      memory: of every data-parallel rank.
    """

    def __init__(self, block_size: int, *args: Any, stage_blocks: int, ranks: int = 1, **kwargs: Any):
        super().__init__(block_size, *args, **kwargs)
        shape = (1, stage_blocks * block_size, WIDTH)
        self._stage = [np.zeros(shape, np.uint8) for _ in range(ranks)]
        self.memory: Memory = memory(
            self._stage, [np.zeros((1, shape[1], INDEX_WIDTH), np.uint8) for _ in range(ranks)]
        )

    def describe(self, engine_id: str, **changes: Any) -> PeerInfo:
        """What an engine with this runner says of itself."""
        return PeerInfo(
            **{
                "engine_id": engine_id,
                "connector": "local",
                "glmjax_version": "test",
                "model": "fake",
                "kv_cache_dtype": "float32",
                "speculation": False,
                "layers": 1,
                "indexers": 1,
                "mla_row_bytes": WIDTH,
                "index_row_bytes": INDEX_WIDTH,
                "block_size": self._block_size,
                **changes,
            }
        )

    def start(self, plan: Plan) -> Any:
        for move in plan.sends:
            for slot, row in self._places(move):
                known = self._records.get(slot, (-1, -1, 0))
                self._stage[move.rank][0, row] = np.asarray(known, np.int64).view(np.uint8)
        for move in plan.receives:
            for slot, row in self._places(move):
                position, token, digest = self._stage[move.rank][0, row].view(np.int64).tolist()
                record: Record = (position, token, digest)
                self._records[slot] = record
        return super().start(plan)

    def _places(self, move: Handover, where: int = 0) -> list[tuple[int, int]]:
        """Slots of the pool, which begins at slot ``where``, and rows of the stage."""
        size = self._block_size
        return [
            (where + (move.rank << 40) + block * size + offset, stage * size + offset)
            for block, stage in zip(move.blocks, move.stage, strict=True)
            for offset in range(size)
        ]


class FakeTieredHandoffRunner(FakeHandoffRunner, FakeOffloadRunner):
    """With its records in two tiers: what comes from the stage goes to the host's."""

    def start(self, plan: Plan) -> Any:
        if plan.sends:
            raise AssertionError("records in two tiers are not sent")
        return super().start(plan)

    def _places(self, move: Handover, where: int = ON_HOST) -> list[tuple[int, int]]:
        return super()._places(move, where)
