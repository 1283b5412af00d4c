"""Rows from one engine's devices to another's, without the host: both have their stage on devices of this process.

The rows that a source rank has for a target rank are packed there, sent to every device of the target rank by
``jax.device_put``, a copy between two devices, and spread over their slots. Lists of rows are padded to the length that
a program was compiled for; ranks that have no tokens in common send each other nothing.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.plan import TransferPlan
from glmjax.sharding.cp import owner
from glmjax.sharding.relayout import KVSharding
from glmjax.stage import Stage, compile_pack, compile_spread, num_ranks, packed_like

PIECES = 64, 1024  # tokens that are moved at a time, about: little padding, or few programs to run


class DeviceWay:
    """From the stage of one engine to that of another. Its programs are compiled when it is constructed.

    Args:
      source_sharding, target_sharding: how the tokens of a request lie on either side.

    Attributes:
      tokens: that are moved at a time, at most: between two multiples of it.
    """

    def __init__(
        self, source: DeviceMemory, target: DeviceMemory, source_sharding: KVSharding, target_sharding: KVSharding
    ):
        self._source, self._target = source, target
        self._ranks = source_sharding.ranks, target_sharding.ranks
        # Pairs of ranks come in the same order again after so many tokens.
        turn = math.lcm(source_sharding.ranks * source_sharding.grain, target_sharding.ranks * target_sharding.grain)
        pieces = [turn * max(1, tokens // turn) for tokens in PIECES]
        self.tokens = pieces[-1]
        counts = {_most(source_sharding, target_sharding, tokens) for tokens in pieces}
        self._programs = [_Programs(source.like, target.like, self._ranks, count) for count in sorted(counts)]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """A range of tokens in parts that can be moved at a time."""
        while first < last:
            stop = min(last, (first // self.tokens + 1) * self.tokens)
            yield first, stop
            first = stop

    def move(self, plan: TransferPlan, source_first: int, target_first: int) -> jax.Array:
        """Starts to move the rows of one piece; what is returned is there once they are in their places.

        Args:
          source_first, target_first: the first rank of the request's data-parallel group on either side.

        Raises:
          ValueError: the two kinds of rows are not in the same blocks.
        """
        runs = plan.parts[0].runs
        if any(part.runs is not runs for part in plan.parts):
            raise ValueError("a stage on devices has one block table for both kinds of rows")
        source_ranks, target_ranks = self._ranks
        pair = np.repeat((runs.source_rank - source_first) * target_ranks + runs.target_rank - target_first, runs.count)
        within = np.arange(runs.count.sum()) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
        found, wanted = (np.repeat(slot, runs.count) + within for slot in (runs.source_slot, runs.target_slot))
        counts = np.bincount(pair, minlength=source_ranks * target_ranks)  # pairs are in ascending order in runs
        place = np.arange(len(pair)) - (np.cumsum(counts) - counts)[pair]

        programs = next(p for p in self._programs if p.count >= counts.max())
        here, there = pair // target_ranks, pair % target_ranks
        take = np.zeros((programs.num_sources, target_ranks, programs.count), np.int32)
        put = np.full((programs.num_targets, source_ranks, programs.count), -1, np.int32)
        take[source_first + here, there, place] = found
        put[target_first + there, here, place] = wanted
        packed = self._source.read(lambda stage: programs.pack(stage, take))
        sent = programs.send(packed, counts.reshape(source_ranks, target_ranks) > 0, source_first, target_first)
        return self._target.replace(lambda stage: programs.spread(stage, sent, put))


class _Programs:
    """What moves up to ``count`` rows between any two ranks."""

    def __init__(self, source: Stage, target: Stage, ranks: tuple[int, int], count: int):
        self.count, self.num_sources, self.num_targets = count, num_ranks(source[0]), num_ranks(target[0])
        self._pack, self._spread = compile_pack(source, ranks[1], count), compile_spread(target, ranks[0], count)
        self._take = self._pack.input_shardings[0][1]
        self._put = self._spread.input_shardings[0][2]
        self._shapes = packed_like(target, count)
        self._nothing = [_zeros(shape) for shape in self._shapes]

    def pack(self, stage: Stage, slots: np.ndarray) -> list[Stage]:
        return self._pack(stage, jax.device_put(slots, self._take))

    def spread(self, stage: Stage, packed: list[Stage], slots: np.ndarray) -> tuple[Stage, jax.Array]:
        return self._spread(stage, packed, jax.device_put(slots, self._put))

    def send(self, packed: list[Stage], pairs: np.ndarray, source_first: int, target_first: int) -> list[Stage]:
        """Rows by target rank, on the source's devices -> rows by source rank, on the target's.

        Args:
          pairs: [source ranks, target ranks] bool, of which something is sent.
        """
        rows, devices, places = [], [], []
        for kind, shape in enumerate(self._shapes):
            receivers = _by_rank(shape.sharding.devices_indices_map(shape.shape).items(), self.count)
            for there, arrays in enumerate(packed):
                senders = _by_rank(((s.data, s.index) for s in arrays[kind].addressable_shards), self.count)
                for here in np.flatnonzero(pairs[:, there]).tolist():
                    copies = senders[source_first + here]
                    for i, device in enumerate(receivers[target_first + there]):
                        rows.append(copies[i % len(copies)])
                        devices.append(device)
                        places.append((kind, here, device))
        arrived = dict(zip(places, jax.device_put(rows, devices), strict=True))

        def of_rank(kind: int, here: int) -> jax.Array:
            nothing, shape = self._nothing[kind], self._shapes[kind]
            each = [arrived.get((kind, here, device), zeros) for device, zeros in nothing.items()]
            return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, each)

        return [(of_rank(0, here), of_rank(1, here)) for here in range(len(pairs))]


def _zeros(shape: jax.ShapeDtypeStruct) -> dict[Any, jax.Array]:
    """Each device's part of an array of zeros."""
    assert shape.sharding is not None
    part = shape.sharding.shard_shape(shape.shape)
    return {device: jnp.zeros(part, shape.dtype, device=device) for device in shape.sharding.device_set}


def _by_rank(parts: Iterable[tuple[Any, Any]], count: int) -> dict[int, list[Any]]:
    """What has each rank's ``count`` rows, by rank; parts come with their places in the whole."""
    found: dict[int, list[Any]] = {}
    for what, index in parts:
        found.setdefault((index[1].start or 0) // count, []).append(what)
    return found


def _most(source: KVSharding, target: KVSharding, tokens: int) -> int:
    """Of so many tokens, the most that any two ranks have in common."""
    positions = np.arange(tokens)
    here, there = (owner(positions, s.ranks, s.grain) for s in (source, target))
    return int(np.bincount(here * target.ranks + there).max())
