"""Compiled copies of whole blocks between the device's pools and packed rows, for engines that hand requests over.

A block travels with the rows of all its layers and the keys of all its indexers, in the formats of spec/model.md
section 4. Lists of blocks are padded to the programs' one length, so nothing compiles while serving. Where rows are in
two tiers (``glmjax.tiers``) those of a block that comes go to the host's pool, and its keys to the device's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from glmjax.cache import KVCache, mla_fields
from glmjax.kernels.host_rows import write_pages
from glmjax.kernels.row_fetch import as_bytes, as_fields
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec


def index_fields(cache: KVCache) -> dict[str, Any]:
    """The arrays of a cache that hold its index keys, in the order of a packed row."""
    scale = {} if cache.index_scale is None else {"index_scale": cache.index_scale}
    return {"index_key": cache.index_key, **scale}


def read_blocks(cache: KVCache, blocks: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Packed rows of blocks [P]: MLA rows [L, P, block_size, bytes] and index rows [N, P, block_size, bytes], uint8."""
    return _pack(mla_fields(cache), blocks, block_size), _pack(index_fields(cache), blocks, block_size)


def write_blocks(cache: KVCache, blocks: jax.Array, mla: jax.Array, index: jax.Array, block_size: int) -> KVCache:
    """Puts packed rows, as ``read_blocks`` gives them, into blocks [P]; -1 drops."""
    new = _unpack(mla_fields(cache), blocks, mla, block_size) | _unpack(index_fields(cache), blocks, index, block_size)
    return dataclasses.replace(cache, **new)


def write_tiers(
    cache: KVCache, host: jax.Array, blocks: jax.Array, mla: jax.Array, index: jax.Array, block_size: int
) -> tuple[KVCache, jax.Array]:
    """As ``write_blocks``, with the MLA rows going to the host's pool [L, S, bytes]; returns both pools."""
    cache = dataclasses.replace(cache, **_unpack(index_fields(cache), blocks, index, block_size))
    return cache, write_pages(host, mla, jnp.where(blocks >= 0, blocks * block_size, -1))


def _pack(fields: dict[str, Any], blocks: jax.Array, block_size: int) -> jax.Array:
    parts = []
    for pool in fields.values():
        by_block = pool.reshape(pool.shape[0], -1, block_size, *pool.shape[2:])[:, jnp.maximum(blocks, 0)]
        parts.append(as_bytes(by_block.reshape(-1, *pool.shape[2:])))
    stack = next(iter(fields.values())).shape[0]
    return jnp.concatenate(parts, axis=1).reshape(stack, blocks.shape[0], block_size, -1)


def _unpack(fields: dict[str, Any], blocks: jax.Array, rows: jax.Array, block_size: int) -> dict[str, Any]:
    """The fields with packed rows in their blocks."""
    found = as_fields([rows.reshape(-1, rows.shape[-1])], [pool[0] for pool in fields.values()])
    return {
        name: _put_blocks(pool, blocks, values.reshape(*rows.shape[:3], *pool.shape[2:]), block_size)
        for (name, pool), values in zip(fields.items(), found, strict=True)
    }


def _put_blocks(pool: jax.Array, blocks: jax.Array, rows: jax.Array, block_size: int) -> jax.Array:
    spare = pool.shape[1] // block_size - 1
    places = jnp.where(blocks >= 0, blocks, spare) * block_size

    def put(i: jax.Array, pool: jax.Array) -> jax.Array:
        start = (jnp.int32(0), places[i], *[jnp.int32(0)] * (pool.ndim - 2))
        return jax.lax.dynamic_update_slice(pool, rows[:, i], start)

    return jax.lax.fori_loop(0, blocks.shape[0], put, pool)


class BlockCopies:
    """The programs for both ways, compiled when constructed; only those for what comes if rows are in two tiers.

    Args:
      cache: abstract pools of all devices, placed where they will be.
      most: blocks that a program copies.
      mesh: of the layout, None for one device.
      host: the host's abstract pool, likewise; None if all rows stay on the devices.

    Attributes:
      stacks: layers and indexers; row_bytes: of a row of either kind.
    """

    def __init__(
        self,
        cache: KVCache,
        block_size: int,
        most: int,
        layout: Layout,
        mesh: Mesh | None,
        compiler_options: dict[str, Any] | None = None,
        host: jax.ShapeDtypeStruct | None = None,
    ):
        self.most, self._layout = most, layout
        kv, by_rank = cache_spec(layout), batch_spec(layout)
        self._rows = None if mesh is None else NamedSharding(mesh, kv)
        self._by_rank = None if mesh is None else NamedSharding(mesh, by_rank)

        def read(cache: KVCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
            return read_blocks(cache, blocks, block_size)

        def write(cache: KVCache, blocks: jax.Array, mla: jax.Array, index: jax.Array) -> KVCache:
            return write_blocks(cache, blocks, mla, index, block_size)

        def receive(
            cache: KVCache, host: jax.Array, blocks: jax.Array, mla: jax.Array, index: jax.Array
        ) -> tuple[KVCache, jax.Array]:
            return write_tiers(cache, host, blocks, mla, index, block_size)

        if mesh is not None:
            read = jax.shard_map(read, mesh=mesh, in_specs=(kv, by_rank), out_specs=(kv, kv), check_vma=False)
            write = jax.shard_map(write, mesh=mesh, in_specs=(kv, by_rank, kv, kv), out_specs=kv, check_vma=False)
            receive = jax.shard_map(
                receive, mesh=mesh, in_specs=(kv, kv, by_rank, kv, kv), out_specs=(kv, kv), check_vma=False
            )
        blocks = jax.ShapeDtypeStruct((layout.dp * most,), jnp.int32, sharding=self._by_rank)
        mla, index = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows) for x in jax.eval_shape(read, cache, blocks)
        )
        self.row_bytes = mla.shape[3], index.shape[3]
        self.stacks = mla.shape[0], index.shape[0]
        if host is not None:
            out = jax.tree.map(lambda x: x.sharding, cache), host.sharding
            program = jax.jit(receive, donate_argnums=(0, 1), out_shardings=out)
            self._receive = program.lower(cache, host, blocks, mla, index).compile(compiler_options)
            return
        self._read = jax.jit(read).lower(cache, blocks).compile(compiler_options)
        self._write = jax.jit(write, donate_argnums=0).lower(cache, blocks, mla, index).compile(compiler_options)

    def read(self, cache: KVCache, blocks: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
        """Packed rows of up to ``most`` blocks of each data-parallel rank, on the devices.

        Returns:
          MLA rows [L, dp * dcp * most, block_size, bytes] and index rows likewise, rank by rank.
        """
        return self._read(cache, self._padded(blocks))

    def write(self, cache: KVCache, blocks: Sequence[Sequence[int]], mla: np.ndarray, index: np.ndarray) -> KVCache:
        """Puts packed rows of that form into blocks.  The cache passed in is consumed."""
        return self._write(cache, self._padded(blocks), *self._placed(mla, index))

    def receive(
        self, cache: KVCache, host: jax.Array, blocks: Sequence[Sequence[int]], mla: np.ndarray, index: np.ndarray
    ) -> tuple[KVCache, jax.Array]:
        """The same with rows in two tiers: MLA rows go to the host's pool.  Both pools passed in are consumed."""
        return self._receive(cache, host, self._padded(blocks), *self._placed(mla, index))

    def _placed(self, mla: np.ndarray, index: np.ndarray) -> tuple[Any, Any]:
        return (mla, index) if self._rows is None else jax.device_put((mla, index), self._rows)

    def _padded(self, blocks: Sequence[Sequence[int]]) -> Any:
        padded = np.full((self._layout.dp, self.most), -1, np.int32)
        for rank, own in enumerate(blocks):
            padded[rank, : len(own)] = own
        flat = padded.reshape(-1)
        return flat if self._by_rank is None else jax.device_put(flat, self._by_rank)
