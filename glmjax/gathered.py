"""A temporary copy of one layer's KV rows of all DCP ranks, for prefill that brings the keys to the queries.

The copy is a ``KVCache`` of one layer and one indexer whose slots run rank by rank, request by request, in local order;
it holds what was cached before the step, and the step's own rows are written into it as into a pool. Since it needs
nothing of the step, the copy for the next layer is under way while a layer computes.

The rows travel as stored: FP8 rows are half the bytes of what they stand for.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glmjax.cache import KVCache, Rows, read_stored, stored_values, write_rows
from glmjax.sharding import cp
from glmjax.share import Share

MLA_FIELDS = ("latent", "latent_scale", "rope")
INDEX_FIELDS = ("index_key", "index_scale")


class KV(NamedTuple):
    """The pool and, if the step gathers keys, the copy that the layer at hand reads."""

    cache: KVCache
    view: KVCache | None

    def source(self, place: jax.Array | int) -> tuple[KVCache, jax.Array | int]:
        """Where to read the rows of a layer or the keys of an indexer, and its place there."""
        return (self.cache, place) if self.view is None else (self.view, 0)

    def write(self, place: jax.Array | int, rows: Rows, share: Share) -> "KV":
        """Writes a layer's (an indexer's) new rows [T, ...] of this device and of all others of its group."""
        rows = jax.tree.map(share.gather_rows, rows)
        cache, view = write_rows(self.cache, place, share.write_slots, rows), self.view
        if view is not None:
            view = write_rows(view, 0, gathered_slots(share, share.group_positions).reshape(-1), rows)
        return KV(cache, view)


def first_kv(cache: KVCache, layer: int, indexer: int, share: Share) -> KV:
    """The pool, and the copy for the layer if the step works on copies."""
    if share.kv != "kv_gather":
        return KV(cache, None)
    kv = gather(KV(cache, cache), MLA_FIELDS, layer, share)
    return gather(KV(kv.cache, kv.view), INDEX_FIELDS, indexer, share)


def gather(kv: KV, fields: tuple[str, ...], place: jax.Array | int, share: Share) -> KV:
    """The copy with the rows of another layer (keys of another indexer) in these fields, the others as they are.

    A place beyond the last gives the last.
    """
    assert kv.view is not None
    slots = _local_slots(share)
    pools = {name: pool for name in fields if (pool := getattr(kv.cache, name)) is not None}
    own = {name: read_stored(pool, jnp.minimum(place, pool.shape[0] - 1), slots) for name, pool in pools.items()}
    # What is written to the pool from now on waits for this reading, or XLA would copy the pool to keep the old rows.
    pools, own = jax.lax.optimization_barrier((pools, own))
    copies = {name: share.collectives.all_gather(rows, share.layout.shard_axes, 0)[None] for name, rows in own.items()}
    return KV(dataclasses.replace(kv.cache, **pools), dataclasses.replace(kv.view, **copies))


def switch(kv: KV, ahead: KV, fields: tuple[str, ...]) -> KV:
    """Goes on with the copy ``ahead`` in these fields; the pool is that of ``kv``."""
    if kv.view is None or ahead.view is None:
        return kv
    new = {name: getattr(ahead.view, name) for name in fields}
    return KV(kv.cache, dataclasses.replace(kv.view, **new))


def _local_slots(share: Share) -> jax.Array:
    """Slots of all that the requests' tables name, in order: [r * rows]."""
    tables = _tables(share)
    offsets = jnp.arange(share.block_size, dtype=jnp.int32)
    return (tables[:, :, None] * share.block_size + offsets).reshape(-1)


def _tables(share: Share) -> jax.Array:
    """One block more than the requests can fill, so that the copy's last slot is free for padding."""
    return jnp.pad(share.group_tables, ((0, 0), (0, 1)))


def shard_rows(share: Share) -> int:
    """Rows that each rank gives for each request."""
    return (share.group_tables.shape[1] + 1) * share.block_size


def gathered_slots(share: Share, positions: jax.Array) -> jax.Array:
    """Where positions [R, ...] of each request stand in the copy; -1 stays."""
    layout, rows = share.layout, shard_rows(share)
    requests = positions.shape[0]
    request = jnp.arange(requests, dtype=jnp.int32).reshape(-1, *[1] * (positions.ndim - 1))
    rank = cp.owner(positions, layout.dcp, layout.interleave)
    local = cp.local_position(positions, layout.dcp, layout.interleave)
    return jnp.where(positions >= 0, (rank * requests + request) * rows + local, -1)


def read_gathered_keys(
    view: KVCache, first_block: jax.Array, blocks: int, share: Share
) -> tuple[jax.Array, jax.Array | None]:
    """Index keys of ``blocks`` virtual blocks of each request, in order of position.

    Returns:
      keys [R, blocks * block_size * dcp, index_dim] and their scales [R, ...] if quantised.
    """
    layout, rows, requests = share.layout, shard_rows(share), share.group_tables.shape[0]
    width, grain = blocks * share.block_size, layout.interleave

    def read(stored: jax.Array) -> jax.Array:
        by_rank = stored.reshape(layout.dcp, requests, rows, *stored.shape[2:])
        part = jax.lax.dynamic_slice_in_dim(by_rank, first_block * share.block_size, width, axis=2)
        part = part.reshape(layout.dcp, requests, width // grain, grain, *stored.shape[2:])
        part = jnp.moveaxis(part, 0, 2)  # [R, width / grain, dcp, grain, ...]
        return part.reshape(requests, width * layout.dcp, *stored.shape[2:])

    scale = None if view.index_scale is None else read(view.index_scale)
    return stored_values(read(view.index_key)), scale
