"""What moves when KV goes from one DCP sharding to another, say from a prefill to a decode engine; NumPy only."""

import dataclasses
import math

import numpy as np

from glmjax.errors import ConfigError
from glmjax.sharding.cp import check_interleave, local_slots, owner


@dataclasses.dataclass(frozen=True)
class KVSharding:
    """How paged KV is dealt out to DCP ranks.

    Attributes:
      ranks: DCP degree.
      interleave: tokens in a row that go to one rank.
      block_size: tokens of a block on one rank.

    Raises:
      ConfigError: a value below 1, or ``interleave`` does not divide ``block_size`` though there are several ranks.
    """

    ranks: int
    interleave: int
    block_size: int

    def __post_init__(self) -> None:
        for field in ("ranks", "block_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, got {getattr(self, field)}")
        check_interleave(self.block_size, self.ranks, self.interleave)

    @property
    def grain(self) -> int:
        """Tokens that always lie side by side in one rank's pool, counted from position 0."""
        return self.block_size if self.ranks == 1 else self.interleave

    def locate(self, block_table: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rank and slot, int64 [P], of positions [P] within a table [B]; -1 for the slot outside it."""
        rank = owner(positions, self.ranks, self.interleave)
        slots = local_slots(block_table[None], positions[None], self.block_size, self.ranks, rank, self.interleave)
        return rank, slots[0].astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class TransferRuns:
    """Copies of `count` slots in a row, sorted by source rank, target rank and source slot.

    Attributes:
      source_rank, source_slot, target_rank, target_slot, count: [runs] int64, wide enough to be multiplied by the bytes
        of a row.
    """

    source_rank: np.ndarray
    source_slot: np.ndarray
    target_rank: np.ndarray
    target_slot: np.ndarray
    count: np.ndarray

    def __len__(self) -> int:
        return len(self.count)


def relayout(
    source: KVSharding,
    target: KVSharding,
    source_block_table: np.ndarray,
    target_block_table: np.ndarray,
    first: int,
    last: int,
) -> TransferRuns:
    """The fewest runs that move each of the tokens first .. last - 1 of a request exactly once.

    Where both sides keep blocks of one size whole, these are whole blocks or more, but for the ends of the range.

    Args:
      source_block_table, target_block_table: [B] block ids of the request, each side its own; an entry stands for
        ``block_size * ranks`` tokens of that side.

    Raises:
      ValueError: the range is not within both tables.
    """
    end = min(
        len(source_block_table) * source.block_size * source.ranks,
        len(target_block_table) * target.block_size * target.ranks,
    )
    if not 0 <= first <= last <= end:
        raise ValueError(f"tokens must satisfy 0 <= first <= last <= {end}, got first={first} and last={last}")

    # Pieces that are contiguous on both sides whatever the tables; far fewer than tokens when interleaves are large.
    grain = math.gcd(source.grain, target.grain)
    start = np.maximum(np.arange(first // grain * grain, last, grain), first)
    start = start[start < last]
    count = np.diff(start, append=last)
    source_rank, source_slot = source.locate(source_block_table, start)
    target_rank, target_slot = target.locate(target_block_table, start)

    order = np.lexsort((source_slot, target_rank, source_rank))
    source_rank, source_slot, target_rank, target_slot, count = (
        x[order] for x in (source_rank, source_slot, target_rank, target_slot, count)
    )
    # A piece goes on with the run of the one before if only the slots change, and by just that one's length.
    goes_on = (np.diff(source_rank) == 0) & (np.diff(target_rank) == 0)
    goes_on &= (np.diff(source_slot) == count[:-1]) & (np.diff(target_slot) == count[:-1])
    heads = np.flatnonzero(np.append(True, ~goes_on)[: len(count)])
    return TransferRuns(
        source_rank=source_rank[heads],
        source_slot=source_slot[heads],
        target_rank=target_rank[heads],
        target_slot=target_slot[heads],
        count=np.add.reduceat(count, heads),
    )
