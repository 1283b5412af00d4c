"""Compiled copies of whole pages between the device's row pool and the host's pool.

A page travels with the rows of all its layers. Lists of pages are padded to the programs' one length, so nothing
compiles while serving. Both directions are in place: to the host the host's pool is donated, to the device the cache.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from glmjax.cache import KVCache, mla_fields
from glmjax.kernels.host_rows import host_rows, write_pages
from glmjax.kernels.row_fetch import as_bytes, as_fields
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec

Pages = Sequence[tuple[int, int]]  # (block, page)


def to_host(cache: KVCache, host: jax.Array, moves: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Copies pages into the host's pool.

    Args:
      host: [L, S, row_bytes] uint8 in host memory.
      moves: [P, 2] int32, block and page; -1 drops.

    Returns:
      the host's pool and the moves, which are there once the copies are made.
    """
    blocks, pages = moves[:, 0], jnp.maximum(moves[:, 1], 0)
    layers = cache.latent.shape[0]

    def rows(pool: jax.Array) -> jax.Array:
        by_page = pool.reshape(layers, -1, block_size, pool.shape[-1])[:, pages]
        return as_bytes(by_page.reshape(-1, pool.shape[-1]))

    packed = jnp.concatenate([rows(x) for x in mla_fields(cache).values()], axis=1)
    packed = packed.reshape(layers, moves.shape[0], block_size, -1)
    return write_pages(host, packed, jnp.where(blocks >= 0, blocks * block_size, -1)), moves


def to_device(cache: KVCache, host: jax.Array, moves: jax.Array, block_size: int) -> KVCache:
    """Copies blocks out of the host's pool into pages; arguments as in ``to_host``."""
    blocks, pages = moves[:, 0], moves[:, 1]
    layers, fields = cache.latent.shape[0], mla_fields(cache)
    slots = blocks[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    packed = host_rows(host, 0, layers, jnp.where(blocks[:, None] >= 0, slots, -1).reshape(-1))
    found = as_fields([packed.reshape(-1, packed.shape[-1])], [x[0] for x in fields.values()])
    spare = cache.latent.shape[1] // block_size - 1
    pages = jnp.where((blocks >= 0) & (pages >= 0), pages, spare)

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows.reshape(layers, moves.shape[0], block_size, pool.shape[-1])

        def one(i: jax.Array, pool: jax.Array) -> jax.Array:
            zero = jnp.int32(0)
            return jax.lax.dynamic_update_slice(pool, rows[:, i], (zero, pages[i] * block_size, zero))

        return jax.lax.fori_loop(0, moves.shape[0], one, pool)

    new: dict[str, Any] = {name: put(x, rows) for (name, x), rows in zip(fields.items(), found, strict=True)}
    return dataclasses.replace(cache, **new)


class Transfers:
    """The two programs, compiled when constructed.

    Args:
      cache, host: abstract pools of all devices, placed where they will be.
      mesh: of the layout, None for one device.
      most: pages that a program copies.

    Attributes:
      compiler_options: as given.
    """

    def __init__(
        self,
        cache: KVCache,
        host: jax.ShapeDtypeStruct,
        block_size: int,
        most: int,
        layout: Layout,
        mesh: Mesh | None,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.most, self._ranks, self._sharding = most, layout.dp, None
        self.compiler_options = compiler_options
        kv, rows = cache_spec(layout), batch_spec(layout)

        def write(cache: KVCache, host: jax.Array, moves: jax.Array) -> tuple[jax.Array, jax.Array]:
            return to_host(cache, host, moves, block_size)

        def read(cache: KVCache, host: jax.Array, moves: jax.Array) -> KVCache:
            return to_device(cache, host, moves, block_size)

        if mesh is not None:
            self._sharding = NamedSharding(mesh, rows)
            specs: dict[str, Any] = {"mesh": mesh, "in_specs": (kv, kv, rows), "check_vma": False}
            write = jax.shard_map(write, out_specs=(kv, rows), **specs)
            read = jax.shard_map(read, out_specs=kv, **specs)
        moves = jax.ShapeDtypeStruct((layout.dp * most, 2), jnp.int32, sharding=self._sharding)
        out = (host.sharding, None if mesh is None else self._sharding)
        to_host_program = jax.jit(write, donate_argnums=1, out_shardings=out).lower(cache, host, moves)
        self._to_host = to_host_program.compile(compiler_options)
        self._to_device = jax.jit(read, donate_argnums=0).lower(cache, host, moves).compile(compiler_options)

    def write_back(self, cache: KVCache, host: jax.Array, pages: Sequence[Pages]) -> tuple[jax.Array, jax.Array]:
        """Copies each rank's pages, up to ``most``, to its blocks on the host.  The host's pool passed in is consumed.

        Returns:
          the host's pool, and an array that is there once the copies are made.
        """
        (moves,) = self._padded(pages)
        return self._to_host(cache, host, moves)

    def load(self, cache: KVCache, host: jax.Array, pages: Sequence[Pages]) -> KVCache:
        """Copies each rank's blocks into its pages.  The cache passed in is consumed."""
        for moves in self._padded(pages):
            cache = self._to_device(cache, host, moves)
        return cache

    def _padded(self, pages: Sequence[Pages]) -> list[Any]:
        most = self.most
        batches = []
        for first in range(0, max(map(len, pages), default=0), most):
            moves = np.full((self._ranks, most, 2), -1, np.int32)
            for rank, own in enumerate(pages):
                part = own[first : first + most]
                if part:
                    moves[rank, : len(part)] = part
            flat = moves.reshape(-1, 2)
            batches.append(flat if self._sharding is None else jax.device_put(flat, self._sharding))
        return batches
