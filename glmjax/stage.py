"""The stage on the devices: rows of requests on their way between engines, beside the pools.

For either kind of rows it is an array [stack, slots, row bytes] uint8, packed (spec/model.md section 4) and split over
devices as the pools are.  Programs that write to it are given it and return it, in place.  Four of them: blocks of the
pools are *saved* into the stage and *loaded* from it; and where two engines have a stage each, rows are *packed* on the
devices that have them, by where they go, and *spread* over the slots of those that get them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glmjax.cache import KVCache
from glmjax.handoff import read_blocks, write_blocks, write_tiers
from glmjax.kernels.row_fetch import row_fetch
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec

Stage = tuple[jax.Array, jax.Array]  # MLA rows and index rows


def abstract_stage(cache: KVCache, num_blocks: int, block_size: int, layout: Layout, mesh: Mesh | None) -> Any:
    """The stage's two arrays as shapes, with where they are.

    Args:
      cache: abstract pools of one device, with the rows of all layers.
      num_blocks: of each rank.
    """
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    packed = jax.eval_shape(lambda cache, blocks: read_blocks(cache, blocks, block_size), cache, one)
    sharding = None if mesh is None else NamedSharding(mesh, cache_spec(layout))
    slots = layout.dp * layout.dcp * num_blocks * block_size
    return tuple(jax.ShapeDtypeStruct((x.shape[0], slots, x.shape[3]), jnp.uint8, sharding=sharding) for x in packed)


def save_blocks(cache: KVCache, stage: Stage, moves: jax.Array, block_size: int) -> Stage:
    """Copies blocks of the pools into the stage.

    Args:
      moves: [P, 2] int32, block of the pools and block of the stage; -1 drops.
    """
    places = moves[:, 1]
    (kept,) = jnp.nonzero(places >= 0, size=places.shape[0], fill_value=0)

    def put(into: jax.Array, rows: jax.Array) -> jax.Array:
        def one(i: jax.Array, into: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_index_in_dim(rows, kept[i], axis=1, keepdims=False)
            return jax.lax.dynamic_update_slice(into, block, (0, places[kept[i]] * block_size, 0))

        return jax.lax.fori_loop(0, jnp.sum(places >= 0, dtype=jnp.int32), one, into)

    mla, index = read_blocks(cache, moves[:, 0], block_size)
    return put(stage[0], mla), put(stage[1], index)


def load_blocks(
    cache: KVCache, host: jax.Array | None, stage: Stage, moves: jax.Array, block_size: int
) -> tuple[KVCache, jax.Array | None]:
    """Copies blocks of the stage into the pools; with rows in two tiers, MLA rows into the host's.

    Args:
      moves: as in ``save_blocks``.
    """
    blocks, places = jnp.where(moves[:, 1] >= 0, moves[:, 0], -1), jnp.maximum(moves[:, 1], 0)
    mla, index = (x.reshape(x.shape[0], -1, block_size, x.shape[2])[:, places] for x in stage)
    if host is None:
        return write_blocks(cache, blocks, mla, index, block_size), None
    return write_tiers(cache, host, blocks, mla, index, block_size)


def pack_rows(stage: Stage, slots: jax.Array) -> list[Stage]:
    """Rows of this device for each rank that gets some.

    Args:
      slots: [1, ranks, P] int32; those of padding may be any.

    Returns:
      for each rank [stack, P, row bytes] of either kind.
    """
    return [(stage[0].at[:, own].get(mode="clip"), stage[1].at[:, own].get(mode="clip")) for own in slots[0]]


def spread_rows(stage: Stage, packed: Sequence[Stage], slots: jax.Array) -> Stage:
    """Puts the rows that came from each rank into the slots of this device.

    Args:
      packed: for each rank, as ``pack_rows`` gives them.
      slots: [1, ranks, P] int32, -1 drops.
    """
    flat = slots.reshape(-1)

    def put(into: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
        stack, num_slots, width = into.shape
        layer = jnp.arange(stack, dtype=jnp.int32)[:, None]
        targets = jnp.where(flat >= 0, layer * num_slots + flat, -1).reshape(-1)
        sources = jnp.concatenate(rows, axis=1).reshape(-1, width)
        put = row_fetch(into.reshape(-1, width), sources, targets, jnp.arange(len(targets), dtype=jnp.int32))
        assert isinstance(put, jax.Array)  # as the target is
        return put.reshape(into.shape)

    return put(stage[0], [mla for mla, _ in packed]), put(stage[1], [index for _, index in packed])


class StageCopies:
    """The programs between an engine's pools and its stage, compiled when constructed.

    Args:
      cache, stage: abstract, of all devices, placed where they will be.
      most: blocks of each data-parallel rank that a program copies.
      mesh: of the layout, None for one device.
      host: the host's abstract pool if rows are in two tiers; then nothing is saved.
    """

    def __init__(
        self,
        cache: KVCache,
        stage: Stage,
        block_size: int,
        most: int,
        layout: Layout,
        mesh: Mesh | None,
        compiler_options: dict[str, Any] | None = None,
        host: jax.ShapeDtypeStruct | None = None,
    ):
        self.most, self._dp, self._host = most, layout.dp, host is not None
        kv, ranks = cache_spec(layout), batch_spec(layout)
        self._sharding = None if mesh is None else NamedSharding(mesh, ranks)

        def save(cache: KVCache, stage: Stage, moves: jax.Array) -> tuple[Stage, jax.Array]:
            return save_blocks(cache, stage, moves, block_size), moves

        def load(cache: KVCache, host: Any, stage: Stage, moves: jax.Array) -> tuple[KVCache, Any, jax.Array]:
            return *load_blocks(cache, host, stage, moves, block_size), moves

        if mesh is not None:
            specs: dict[str, Any] = {"mesh": mesh, "check_vma": False}
            save = jax.shard_map(save, in_specs=(kv, kv, ranks), out_specs=(kv, ranks), **specs)
            load = jax.shard_map(load, in_specs=(kv, kv, kv, ranks), out_specs=(kv, kv, ranks), **specs)
        moves = jax.ShapeDtypeStruct((layout.dp * most, 2), jnp.int32, sharding=self._sharding)
        out = None if host is None else (*jax.tree.map(lambda x: x.sharding, (cache, host)), self._sharding)
        program = jax.jit(load, donate_argnums=(0, 1), out_shardings=out).lower(cache, host, stage, moves)
        self._load = program.compile(compiler_options)
        if host is None:
            self._save = jax.jit(save, donate_argnums=1).lower(cache, stage, moves).compile(compiler_options)

    def save(self, cache: KVCache, stage: Stage, moves: Sequence[Sequence[tuple[int, int]]]) -> tuple[Stage, jax.Array]:
        """Copies (block, block of the stage) of each data-parallel rank, up to ``most``.  The stage is consumed.

        Returns:
          the stage, and an array that is there once the copies are made.
        """
        return self._save(cache, stage, self._padded(moves))

    def load(
        self, cache: KVCache, host: jax.Array | None, stage: Stage, moves: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[KVCache, jax.Array | None, jax.Array]:
        """The other way.  The pools passed in are consumed.

        Returns:
          the pools, and an array that is there once the stage has been read.
        """
        return self._load(cache, host, stage, self._padded(moves))

    def _padded(self, moves: Sequence[Sequence[tuple[int, int]]]) -> Any:
        padded = np.full((self._dp, self.most, 2), -1, np.int32)
        for rank, own in enumerate(moves):
            if own:
                padded[rank, : len(own)] = own
        flat = padded.reshape(-1, 2)
        return flat if self._sharding is None else jax.device_put(flat, self._sharding)


def compile_pack(stage: Stage, ranks: int, count: int) -> Any:
    """``pack_rows`` for stages like this one: (stage, slots [devices' ranks, ranks, count]) -> rows by rank.

    Args:
      ranks: that get rows.
      count: rows for each.
    """

    def pack(stage: Stage, slots: jax.Array) -> list[Stage]:
        return pack_rows(stage, slots)

    where, specs = _slots(stage, ranks, count)
    if specs is not None:
        mesh, kv, by_rank = specs
        pack = jax.shard_map(pack, mesh=mesh, in_specs=(kv, by_rank), out_specs=kv, check_vma=False)
    return jax.jit(pack).lower(stage, where).compile()


def compile_spread(stage: Stage, ranks: int, count: int) -> Any:
    """``spread_rows`` for stages like this one: (stage, rows by rank, slots) -> (stage, slots).

    The stage is consumed; the slots are there once the rows are in their places.

    Args:
      ranks: that rows come from.
      count: rows from each.
    """

    def spread(stage: Stage, packed: Sequence[Stage], slots: jax.Array) -> tuple[Stage, jax.Array]:
        return spread_rows(stage, packed, slots), slots

    where, specs = _slots(stage, ranks, count)
    if specs is not None:
        mesh, kv, by_rank = specs
        spread = jax.shard_map(spread, mesh=mesh, in_specs=(kv, kv, by_rank), out_specs=(kv, by_rank), check_vma=False)
    shapes = [packed_like(stage, count)] * ranks
    return jax.jit(spread, donate_argnums=0).lower(stage, shapes, where).compile()


def packed_like(stage: Stage, count: int) -> Any:
    """Rows that one rank sends to every rank of a stage, as shapes."""
    ranks = num_ranks(stage[0])
    return tuple(
        jax.ShapeDtypeStruct((x.shape[0], ranks * count, x.shape[2]), jnp.uint8, sharding=x.sharding) for x in stage
    )


def num_ranks(rows: jax.Array) -> int:
    """Ranks that an array of the stage is split over."""
    return rows.shape[1] // rows.sharding.shard_shape(rows.shape)[1]


def _slots(stage: Stage, ranks: int, count: int) -> tuple[Any, Any]:
    """A list of slots as a shape; and mesh, spec of the stage and spec of the list, if that is several devices."""
    shape, sharding = (num_ranks(stage[0]), ranks, count), stage[0].sharding
    if not isinstance(sharding, NamedSharding):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding), None
    by_rank = PartitionSpec(sharding.spec[1])
    where = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(sharding.mesh, by_rank))
    return where, (sharding.mesh, sharding.spec, by_rank)
