"""Which rows go where: the runs of ``sharding.relayout`` for every kind of rows, their bytes, and the copy itself.

A run is a number of slots in a row on one rank here and there, the same in every layer.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from glmjax.serving.transfer.interface import INDEX, MLA, PeerInfo, Tables
from glmjax.serving.transfer.memory import Memory
from glmjax.sharding.relayout import KVSharding, TransferRuns, relayout

FEW = 8  # tokens: shorter runs are copied by index, longer ones as slices
PACKED = KVSharding(ranks=1, interleave=1, block_size=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """What moves of one kind of rows; ranks count through all data-parallel groups, as in ``Region``."""

    name: str
    runs: TransferRuns
    layers: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return int(self.runs.count.sum()) * self.layers * self.row_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """Copies that together move each token of a range exactly once, in every layer and indexer."""

    parts: tuple[Part, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_copies(self) -> int:
        """Pieces of memory that lie in a row on both sides."""
        return sum(len(part.runs) * part.layers for part in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """A request's rows in an engine: how they lie, its block tables by kind, and the first of its ranks."""

    sharding: KVSharding
    tables: Mapping[str, np.ndarray]
    first_rank: int = 0

    @classmethod
    def of(cls, info: PeerInfo, blocks: Tables, group: int = 0) -> "Side":
        return cls(info.sharding, by_kind(blocks), group * info.dcp)

    @classmethod
    def packed(cls, first: int, last: int) -> "Side":
        """Rows of tokens ``first .. last - 1`` one after another, on one rank."""
        table = np.maximum(np.arange(last) - first, 0)
        return cls(PACKED, {MLA: table, INDEX: table})

    def entries(self, first: int, last: int) -> "Side":
        """A buffer with those entries of the tables alone, one after another: each rank's blocks lie in a row."""
        tokens = self.sharding.block_size * self.sharding.ranks
        table = np.maximum(np.arange(-(-last // tokens)) - first // tokens, 0)
        return Side(self.sharding, {MLA: table, INDEX: table})


def by_kind(blocks: Tables) -> dict[str, np.ndarray]:
    """Block tables as arrays; one for all rows stands for each kind."""
    if isinstance(blocks, Mapping):
        if set(blocks) != {MLA, INDEX}:
            raise ValueError(f"block tables must be given for {MLA!r} and {INDEX!r}, got {sorted(blocks)}")
        return {name: np.asarray(table, np.int64) for name, table in blocks.items()}
    table = np.asarray(blocks, np.int64)
    return {MLA: table, INDEX: table}


def check_side(side: Side, slots: Mapping[str, int], last: int) -> None:
    """Raises ValueError unless the blocks of tokens before ``last`` are there and within so many slots, by kind."""
    tokens = side.sharding.block_size * side.sharding.ranks
    for name, table in side.tables.items():
        if last > len(table) * tokens:
            raise ValueError(f"{len(table)} blocks of {tokens} tokens do not hold {last} tokens of {name}")
        most = slots[name] // side.sharding.block_size
        used = table[: -(-last // tokens)]
        if used.size and not (used.min() >= 0 and used.max() < most):
            raise ValueError(f"block ids of {name} must be in [0, {most}), got {int(used.min())} .. {int(used.max())}")


def plan_transfer(info: PeerInfo, source: Side, target: Side, first: int, last: int) -> TransferPlan:
    """How tokens ``first .. last - 1`` get from one side to the other.

    Args:
      info: of either engine: rows are the same in both.

    Raises:
      ValueError: a table is too short.
    """
    sizes = {MLA: (info.layers, info.mla_row_bytes), INDEX: (info.indexers, info.index_row_bytes)}
    parts, found = [], {}
    for name, (layers, row_bytes) in sizes.items():
        tables = source.tables[name], target.tables[name]
        key = id(tables[0]), id(tables[1])
        if key not in found:
            runs = relayout(source.sharding, target.sharding, *tables, first, last)
            found[key] = dataclasses.replace(
                runs,
                source_rank=runs.source_rank + source.first_rank,
                target_rank=runs.target_rank + target.first_rank,
            )
        parts.append(Part(name, found[key], layers, row_bytes))
    return TransferPlan(tuple(parts), last - first)


def copy(plan: TransferPlan, source: Memory, target: Memory) -> None:
    """Carries out a plan within one process."""
    for part in plan.parts:
        copy_runs(part.runs, source[part.name].ranks, target[part.name].ranks)


def copy_runs(runs: TransferRuns, source: Sequence[np.ndarray], target: Sequence[np.ndarray]) -> None:
    """Copies runs of slots between ranks' rows [layers, slots, row bytes]."""
    bounds = np.flatnonzero((np.diff(runs.source_rank) != 0) | (np.diff(runs.target_rank) != 0)) + 1
    for at in np.split(np.arange(len(runs)), bounds) if len(runs) else ():
        rows, into = source[runs.source_rank[at[0]]], target[runs.target_rank[at[0]]]
        starts, stops, counts = runs.source_slot[at], runs.target_slot[at], runs.count[at]
        if counts.mean() >= FEW:
            for start, stop, count in zip(starts, stops, counts, strict=True):
                into[:, stop : stop + count] = rows[:, start : start + count]
        else:
            # As items of a row's size, so that NumPy moves rows and not bytes.
            item = np.dtype(f"V{rows.shape[2]}")
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            chosen, places = np.repeat(starts, counts) + within, np.repeat(stops, counts) + within
            into.view(item)[:, places, 0] = rows.view(item)[:, chosen, 0]
