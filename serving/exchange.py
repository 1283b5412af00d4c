"""Rows between the devices' pools and the host memory that a connector reads and writes: a runner's part of a handoff.

The host memory, the *stage*, is made of blocks of its own, which the scheduler leases; a block of the pool is copied
into one before it is offered, and out of one after it was fetched. So the pool's blocks are free at once.

With rows in two tiers a block that was fetched goes into the host's pool, and its index keys into the devices'. Such
blocks are not offered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from glmjax.errors import ConfigError
from glmjax.handoff import BlockCopies
from glmjax.programs import Programs
from glmjax.serving.plan import Handover
from glmjax.serving.transfer.memory import Memory, memory

COPIED_BLOCKS = 16  # that one program copies into two tiers


@dataclasses.dataclass(frozen=True)
class Leaving:
    """Blocks on their way into the stage: of each rank the stage's blocks, and the rows, still on the devices."""

    stage: Sequence[Sequence[int]]
    rows: tuple[jax.Array, jax.Array]


class Exchange:
    """Copies whole blocks, with compiled programs.

    Args:
      size: from the bytes of a block, on all DCP ranks, to the blocks of the stage of each data-parallel rank.

    Attributes:
      stage_blocks: those blocks.
      memory: MLA and index rows of every rank, as connectors want them.
    """

    def __init__(self, programs: Programs, size: Callable[[int], int]):
        layout = programs.layout
        self._tiers = programs.offload is not None
        self._copies = _copies_into_tiers(programs) if self._tiers else programs.block_copies()
        self._block_size, self._dp, self._dcp = programs.block_size, layout.dp, layout.dcp
        (layers, indexers), (mla, index) = self._copies.stacks, self._copies.row_bytes
        self.stage_blocks = size((layers * mla + indexers * index) * programs.block_size * layout.dcp)
        slots = self.stage_blocks * programs.block_size

        def rows(stack: int, width: int) -> list[np.ndarray]:
            return [np.zeros((stack, slots, width), np.uint8) for _ in range(layout.dp * layout.dcp)]

        self._rows = rows(layers, mla), rows(indexers, index)
        self.memory: Memory = memory(*self._rows)

    def send(self, cache: Any, moves: Sequence[Handover]) -> list[Leaving]:
        """Starts to copy blocks of the pool into the stage; ``arrive`` ends it.

        Raises:
          ConfigError: rows are in two tiers.
        """
        if moves and self._tiers:
            raise ConfigError("requests whose rows are in two tiers are not handed over to other engines")
        leaving = []
        for part in self._parts(moves):
            rows = self._copies.read(cache, [[block for block, _ in own] for own in part])
            for x in rows:
                x.copy_to_host_async()
            leaving.append(Leaving([[stage for _, stage in own] for own in part], rows))
        return leaving

    def arrive(self, leaving: Sequence[Leaving]) -> None:
        """Waits for the rows, and puts them where a connector finds them."""
        for one in leaving:
            for regions, rows in zip(self._rows, one.rows, strict=True):
                by_rank = self._by_rank(np.asarray(rows))
                for place, (rank, shard) in enumerate(np.ndindex(self._dp, self._dcp)):
                    for i, stage in enumerate(one.stage[rank]):
                        regions[place][:, self._slots(stage)] = by_rank[:, rank, shard, i]

    def receive(self, cache: Any, host: jax.Array | None, moves: Sequence[Handover]) -> tuple[Any, jax.Array | None]:
        """Copies blocks of the stage into the pool, or the two tiers' pools, which are consumed; returns them."""
        for part in self._parts(moves):
            packed = []
            for regions in self._rows:
                stack, _, width = regions[0].shape
                shape = (stack, self._dp, self._dcp, self._copies.most, self._block_size, width)
                rows = np.zeros(shape, np.uint8)
                for place, (rank, shard) in enumerate(np.ndindex(self._dp, self._dcp)):
                    for i, (_, stage) in enumerate(part[rank]):
                        rows[:, rank, shard, i] = regions[place][:, self._slots(stage)]
                packed.append(rows.reshape(stack, -1, self._block_size, width))
            blocks, (mla, index) = [[block for block, _ in own] for own in part], packed
            if host is None:
                cache = self._copies.write(cache, blocks, mla, index)
            else:
                cache, host = self._copies.receive(cache, host, blocks, mla, index)
        return cache, host

    def _parts(self, moves: Sequence[Handover]) -> list[list[list[tuple[int, int]]]]:
        """Pairs of each rank, as many at a time as the programs copy."""
        each: list[list[tuple[int, int]]] = [[] for _ in range(self._dp)]
        for move in moves:
            each[move.rank] += zip(move.blocks, move.stage, strict=True)
        most = self._copies.most
        longest = max(map(len, each), default=0)
        return [[own[first : first + most] for own in each] for first in range(0, longest, most)]

    def _by_rank(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(rows.shape[0], self._dp, self._dcp, self._copies.most, *rows.shape[2:])

    def _slots(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)


def _copies_into_tiers(programs: Programs) -> BlockCopies:
    assert programs.transfers is not None
    copies = BlockCopies(
        programs.abstract_cache(),
        programs.block_size,
        COPIED_BLOCKS,
        programs.layout,
        programs.mesh,
        programs.transfers.compiler_options,
        programs.abstract_host(),
    )
    programs.compilations += 1
    return copies
