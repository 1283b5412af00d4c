"""The host's pool of KV rows: where it is in memory, and how a step gets at it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glmjax.cache import KVCache, packed_row_bytes
from glmjax.kernels.row_format import HostRows
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import cache_spec


def abstract_host_pool(cache: KVCache, block_size: int, layout: Layout, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Every row of every block of all devices, packed: [L, slots, row_bytes] uint8 in pinned memory.

    It is split over devices as the cache is; a device that has the same KV as others has a part of its own.

    Args:
      cache: of one device.
    """
    slots = cache.index_key.shape[1] - block_size  # the spare block has no place there
    sharding = NamedSharding(mesh, cache_spec(layout), memory_kind="pinned_host")
    shape = (cache.latent.shape[0], layout.dp * layout.dcp * slots, packed_row_bytes(cache))
    return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=sharding)


def make_host_pool(pool: jax.ShapeDtypeStruct) -> jax.Array:
    """The pool, of zeros.  It comes out of a program: one made of a NumPy array may keep that array's memory."""
    assert pool.sharding is not None
    return jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype), out_shardings=pool.sharding)()


def address_sharding(mesh: Mesh) -> NamedSharding:
    """Of the addresses of the devices' parts, [devices, 2] uint32: each device has its own."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def addresses(pool: jax.Array, mesh: Mesh) -> jax.Array:
    """Where the devices' parts of a pool are, for kernels that read pinned memory: [devices, 2] uint32."""
    parts: list[Any] = []
    for shard in pool.addressable_shards:
        address = HostRows.at(shard.data.unsafe_buffer_pointer(), pool.shape[2]).address
        parts.append(jax.device_put(np.asarray(address)[None], shard.device))
    return jax.make_array_from_single_device_arrays((mesh.size, 2), address_sharding(mesh), parts)
