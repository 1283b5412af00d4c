"""Rows between the devices' pools and the memory that a connector reads and writes: a runner's part of a handoff.

That memory, the *stage*, is made of blocks of its own, which the scheduler leases; a block of the pool is copied into
one before it is offered, and out of one after it was fetched. So the pool's blocks are free at once. It is on the host,
or on the devices beside the pools (``glmjax.stage``).

With rows in two tiers a block that was fetched goes into the host's pool, and its index keys into the devices'. Such
blocks are not offered.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.errors import ConfigError
from glmjax.programs import Programs
from glmjax.serving.plan import Handover
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.memory import AnyMemory, Memory, memory

Moves = list[list[tuple[int, int]]]  # of each data-parallel rank, (block, block of the stage)


class Exchange(Protocol):
    """Copies whole blocks, with compiled programs.

    Attributes:
      stage_blocks: blocks of the stage of each data-parallel rank.
      memory: the stage as connectors want it.
    """

    @property
    def stage_blocks(self) -> int: ...

    @property
    def memory(self) -> AnyMemory: ...

    def send(self, cache: Any, moves: Sequence[Handover]) -> Sequence[Any]:
        """Starts to copy blocks of the pool into the stage; ``arrive`` ends it.

        Raises:
          ConfigError: rows are in two tiers.
        """
        ...

    def arrive(self, leaving: Sequence[Any]) -> None:
        """Waits until what ``send`` started is where a connector finds it."""
        ...

    def receive(
        self, cache: Any, host: jax.Array | None, moves: Sequence[Handover]
    ) -> tuple[Any, jax.Array | None, Sequence[jax.Array]]:
        """Copies blocks of the stage into the pool, or the two tiers' pools, which are consumed.

        Returns:
          the pools, and arrays that are there once the stage has been read.
        """
        ...


class HostExchange:
    """By way of the host: packed rows in NumPy arrays."""

    def __init__(self, programs: Programs, stage_blocks: int):
        layout = programs.layout
        self.stage_blocks = stage_blocks
        self._tiers = programs.offload is not None
        self._copies = programs.block_copies()
        self._block_size, self._dp, self._dcp = programs.block_size, layout.dp, layout.dcp
        slots = stage_blocks * programs.block_size
        self._rows = tuple(
            [np.zeros((stack, slots, width), np.uint8) for _ in range(layout.dp * layout.dcp)]
            for stack, width in zip(self._copies.stacks, self._copies.row_bytes, strict=True)
        )
        mla, index = self._rows
        self.memory: Memory = memory(mla, index)

    def send(self, cache: Any, moves: Sequence[Handover]) -> list[tuple[Moves, tuple[jax.Array, jax.Array]]]:
        leaving = []
        for part in parts(moves, self._dp, self._copies.most, self._tiers):
            rows = self._copies.read(cache, [[block for block, _ in own] for own in part])
            for x in rows:
                x.copy_to_host_async()
            leaving.append((part, rows))
        return leaving

    def arrive(self, leaving: Sequence[tuple[Moves, tuple[jax.Array, jax.Array]]]) -> None:
        for part, both in leaving:
            for regions, rows in zip(self._rows, both, strict=True):
                by_rank = self._by_rank(np.asarray(rows))
                for place, (rank, shard) in enumerate(np.ndindex(self._dp, self._dcp)):
                    for i, (_, stage) in enumerate(part[rank]):
                        regions[place][:, self._slots(stage)] = by_rank[:, rank, shard, i]

    def receive(
        self, cache: Any, host: jax.Array | None, moves: Sequence[Handover]
    ) -> tuple[Any, jax.Array | None, Sequence[jax.Array]]:
        for part in parts(moves, self._dp, self._copies.most):
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
        return cache, host, ()  # what was read is a copy of its own

    def _by_rank(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(rows.shape[0], self._dp, self._dcp, self._copies.most, *rows.shape[2:])

    def _slots(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)


class DeviceExchange:
    """On the devices: pools and stage are beside each other, and no row comes to the host."""

    def __init__(self, programs: Programs, stage_blocks: int):
        self.stage_blocks = stage_blocks
        self._dp, self._tiers = programs.layout.dp, programs.offload is not None
        stage = programs.abstract_stage(stage_blocks)
        self._copies = programs.stage_copies(stage)
        mla, index = (jnp.zeros(x.shape, x.dtype, device=x.sharding) for x in stage)
        self.memory = DeviceMemory((mla, index))

    def send(self, cache: Any, moves: Sequence[Handover]) -> list[jax.Array]:
        some = parts(moves, self._dp, self._copies.most, self._tiers)
        return [self.memory.replace(functools.partial(self._copies.save, cache, moves=part)) for part in some]

    def arrive(self, leaving: Sequence[jax.Array]) -> None:
        jax.block_until_ready(leaving)

    def receive(
        self, cache: Any, host: jax.Array | None, moves: Sequence[Handover]
    ) -> tuple[Any, jax.Array | None, Sequence[jax.Array]]:
        done = []
        for part in parts(moves, self._dp, self._copies.most):
            cache, host, read = self.memory.read(functools.partial(self._copies.load, cache, host, moves=part))
            done.append(read)
        return cache, host, done


def parts(moves: Sequence[Handover], dp: int, most: int, tiers: bool = False) -> list[Moves]:
    """Pairs of blocks of each data-parallel rank, as many at a time as the programs copy.

    Raises:
      ConfigError: there are moves out of pools of two tiers.
    """
    if moves and tiers:
        raise ConfigError("requests whose rows are in two tiers are not handed over to other engines")
    each: Moves = [[] for _ in range(dp)]
    for move in moves:
        each[move.rank] += zip(move.blocks, move.stage, strict=True)
    longest = max(map(len, each), default=0)
    return [[own[first : first + most] for own in each] for first in range(0, longest, most)]
