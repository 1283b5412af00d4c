"""Hybrid HiSparse inside a step: selected rows that are not on the device are brought into the request's hot region.

The leader of an index group resolves its selection, and the layers behind it copy the same list of rows, each from its
own part of the host pool (spec/system.md 1.6). What followers need is under way while the leader computes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glmjax.cache import KVCache, store_packed
from glmjax.gathered import KV
from glmjax.kernels.resolve_rows import resolve_rows
from glmjax.sharding import cp
from glmjax.share import Share
from glmjax.tiers import HotRows, Regions

NEVER = jnp.iinfo(jnp.int32).max // 2


class Incoming(NamedTuple):
    """Rows for the followers of an index group.

    Attributes:
      rows: [followers, M, row_bytes] uint8.
      targets: [M] int32, the slots of the row pool that they go to; -1 for none.
    """

    rows: jax.Array
    targets: jax.Array


def bring_in(
    kv: KV,
    share: Share,
    positions: jax.Array,
    logical: jax.Array,
    tables: jax.Array,
    regions: Regions,
    first: jax.Array,
    *,
    layer: jax.Array | int,
    indexer: jax.Array | int,
    followers: int,
) -> tuple[KV, jax.Array, Incoming | None]:
    """Finds the selected rows of an index group on the device, after copying those that are not there from the host.

    Args:
      positions: [r, C] int32, all that the rows of each request selected.
      logical: [r, C] int32, slots of the index pool; -1 for what this device does not hold.
      tables: [r, B] int32; regions: of these requests.
      first: [r] int32, the first position that the step computes of each; -1 for padding.
      layer, indexer: the group's leader; ``followers`` layers share its selection.

    Returns:
      the KV with the leader's rows in place, slots of the row pool [r, C], and the followers' rows.
    """
    hot, block_size = kv.cache.hot, share.block_size
    assert hot is not None and share.tiers is not None
    layout, rank = share.layout, share.shard_rank
    slots = share.row_slots(logical)
    wanted = (logical >= 0) & (slots < 0) & (regions.lease > 0)[:, None]
    local = jnp.where(logical >= 0, cp.local_position(positions, layout.dcp, layout.interleave), -1)
    written = cp.local_length(jnp.where(first >= 0, first, NEVER), layout.dcp, rank, layout.interleave)

    owner, order, lease = (x[indexer][regions.slot] for x in (hot.owner, hot.order, hot.lease))
    valid = lease == regions.lease
    found = resolve_rows(
        local,
        wanted,
        owner,
        jnp.where(valid[:, None], order, jnp.arange(order.shape[1], dtype=jnp.int32)),
        first_written=jnp.where(valid, written, 0),
        context=tables.shape[1] * block_size,
    )
    targets = _region_slots(regions.table, found.targets, block_size).reshape(-1)
    sources = _region_slots(tables, found.missing, block_size).reshape(-1)
    slots = jnp.where(wanted, _region_slots(regions.table, found.hot, block_size), slots)

    counts = jnp.stack([found.hits, found.misses, found.misses * (1 + followers)], axis=-1)
    hot = HotRows(
        owner=_put(hot.owner, indexer, regions.slot, found.owner),
        order=_put(hot.order, indexer, regions.slot, found.order),
        lease=_put(hot.lease, indexer, regions.slot, regions.lease),
        counts=hot.counts.at[0, regions.slot].add(counts),
    )
    tiers, cache = share.tiers, dataclasses.replace(kv.cache, hot=hot)
    # The followers' rows only after the leader's, which it waits for. Else both come over the same link at once, and
    # of two calls on the host XLA makes one.
    rows, later = jax.lax.optimization_barrier((tiers.host_rows(layer, 1, sources)[0], sources))
    cache = store_packed(cache, layer, targets, rows)
    incoming = None
    if followers:
        incoming = Incoming(tiers.host_rows(layer + 1, followers, later, aside=True), targets)
    return KV(cache, kv.view), slots, incoming


def take_in(kv: KV, layer: jax.Array | int, incoming: Incoming, follower: jax.Array | int) -> KV:
    """Puts a follower's rows in their places, from where they are: a part cut out would be a copy."""
    _, count, size = incoming.rows.shape
    rows = incoming.rows.reshape(-1, size)
    return KV(store_packed(kv.cache, layer, incoming.targets, rows, first=follower * count), kv.view)


def start_counting(cache: KVCache) -> KVCache:
    """No hits and misses yet in this step."""
    if cache.hot is None:
        return cache
    hot = dataclasses.replace(cache.hot, counts=jnp.zeros_like(cache.hot.counts))
    return dataclasses.replace(cache, hot=hot)


def _region_slots(table: jax.Array, rows: jax.Array, block_size: int) -> jax.Array:
    """Slots of rows [r, n] that are counted through the pages of a table [r, pages]; -1 stays."""
    page = jnp.take_along_axis(table, jnp.maximum(rows, 0) // block_size, axis=1)
    return jnp.where(rows >= 0, page * block_size + rows % block_size, -1)


def _put(stack: jax.Array, place: jax.Array | int, slot: jax.Array, new: jax.Array) -> jax.Array:
    """stack[place, slot] = new, by way of the one place: XLA's CPU scatter copies what it writes to."""
    one = stack[place].at[slot].set(new)
    return jax.lax.dynamic_update_index_in_dim(stack, one, place, 0)
