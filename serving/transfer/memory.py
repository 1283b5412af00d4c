"""Host memory that KV rows are moved from and into: packed rows, by kind and rank.

An engine hands over its pinned host pool as it is, or a buffer into which it copies what it offers; a block id is
then a place in that buffer. Kinds may have pools of different sizes: with HiSparse, MLA rows are in a larger one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from glmjax import __version__
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.interface import INDEX, MLA, PeerInfo, fingerprint
from glmjax.sharding.relayout import KVSharding


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Rows of one kind.

    Attributes:
      name: ``MLA`` or ``INDEX``.
      ranks: for each data-parallel rank its DCP ranks, [layers or indexers, slots, row bytes] uint8, contiguous.
    """

    name: str
    ranks: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks:
            raise ConfigError(f"region {self.name}: no ranks")
        for rank, rows in enumerate(self.ranks):
            if rows.dtype != np.uint8 or rows.ndim != 3 or not rows.flags.c_contiguous:
                raise ConfigError(
                    f"region {self.name}, rank {rank}: must be contiguous uint8 [layers, slots, row bytes], got "
                    f"{rows.dtype} {rows.shape}"
                )
            if rows.shape != self.ranks[0].shape:
                raise ConfigError(f"region {self.name}: ranks of shapes {rows.shape} and {self.ranks[0].shape}")

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def layers(self) -> int:
        return int(self.ranks[0].shape[0])

    @property
    def slots(self) -> int:
        return int(self.ranks[0].shape[1])

    @property
    def row_bytes(self) -> int:
        return int(self.ranks[0].shape[2])


Memory = dict[str, Region]
AnyMemory = Memory | DeviceMemory


def memory(mla: Sequence[np.ndarray], index: Sequence[np.ndarray]) -> Memory:
    """Both kinds of rows of an engine."""
    return {MLA: Region(MLA, tuple(mla)), INDEX: Region(INDEX, tuple(index))}


def empty_memory(info: PeerInfo, slots: int) -> Memory:
    """Zeros for an engine with so many slots on each rank."""

    def rows(layers: int, row_bytes: int) -> list[np.ndarray]:
        return [np.zeros((layers, slots, row_bytes), np.uint8) for _ in range(info.dp * info.dcp)]

    return memory(rows(info.layers, info.mla_row_bytes), rows(info.indexers, info.index_row_bytes))


def describe(
    config: GLMConfig,
    rows: AnyMemory,
    sharding: KVSharding,
    *,
    engine_id: str,
    connector: str,
    kv_cache_dtype: str,
    speculation: bool,
    dp: int = 1,
    checkpoint: str = "",
) -> PeerInfo:
    """What an engine with this memory says of itself.

    Raises:
      ConfigError: the memory is not that of this model or sharding.
    """
    info = PeerInfo(
        engine_id=engine_id,
        connector=connector,
        glmjax_version=__version__,
        model=fingerprint(config, checkpoint),
        kv_cache_dtype=kv_cache_dtype,
        speculation=speculation,
        layers=config.num_hidden_layers + speculation,
        indexers=config.num_full_indexers + speculation,
        mla_row_bytes=rows[MLA].row_bytes,
        index_row_bytes=rows[INDEX].row_bytes,
        block_size=sharding.block_size,
        dcp=sharding.ranks,
        interleave=sharding.interleave,
        dp=dp,
    )
    check_memory(info, rows)
    return info


def check_memory(info: PeerInfo, rows: AnyMemory) -> None:
    """Raises ConfigError unless an engine's memory is as it says."""
    for name, layers, row_bytes in (
        (MLA, info.layers, info.mla_row_bytes),
        (INDEX, info.indexers, info.index_row_bytes),
    ):
        region = rows[name]
        found = region.num_ranks, region.layers, region.row_bytes
        wanted = info.dp * info.dcp, layers, row_bytes
        if found != wanted:
            raise ConfigError(
                f"region {name} of engine {info.engine_id} has (ranks, layers, row bytes) {found}, not {wanted}"
            )
        if region.slots % info.block_size:
            raise ConfigError(f"region {name}: {region.slots} slots are no whole blocks of {info.block_size}")
