"""A temporary copy of one layer's KV rows of all DCP ranks, for prefill that brings the keys to the queries.

The copy is a ``KVCache`` of one layer and one indexer whose slots run rank by rank, request by request, in local order;
it holds what was cached before the step, and the step's own rows are written into it as into a pool. Since it needs
nothing of the step, the copy for the next layer is under way while a layer attends.

The rows travel as stored: FP8 rows are half the bytes of what they stand for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import xla_metadata_call

from glmjax.cache import KVCache, Rows, mla_fields, packed, read_stored, stored_values, write_rows
from glmjax.kernels.row_fetch import as_fields
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

    def write(
        self, rows: Rows, share: Share, layer: jax.Array | int | None, indexer: jax.Array | int | None = None
    ) -> "KV":
        """Writes new rows [T, ...] of a layer, an indexer or both: this device's and those of its context group."""
        if share.layout.pcp > 1:
            rows = jax.tree.map(share.gather_rows, packed(self.cache, rows))
        slots, view = share.write_slots, self.view
        rows_at, keys_at = share.row_slots(slots), None if indexer is None else slots
        cache = write_rows(self.cache, rows, rows_at, layer=layer, indexer=indexer, index_slots=keys_at)
        if view is not None:
            slots = gathered_slots(share, share.group_positions).reshape(-1)
            layer, indexer = (None if place is None else 0 for place in (layer, indexer))
            view = write_rows(view, rows, slots, layer=layer, indexer=indexer)
        return KV(cache, view)


class Ahead(NamedTuple):
    """Whose rows to gather next: a layer's, an indexer's keys; None for none.  A place beyond the last is the last."""

    layer: jax.Array | int | None = None
    indexer: jax.Array | int | None = None


def first_kv(cache: KVCache, layer: int, indexer: int, share: Share) -> KV:
    """The pool, and the copy for the layer if the step works on copies."""
    if share.kv != "kv_gather":
        return KV(cache, None)
    kv, own = _read_own(KV(cache, cache), Ahead(layer, indexer), share)
    return _with_copies(kv, _gather(own, share))


def gather_beside[T](compute: Callable[[], T], kv: KV, ahead: Ahead, share: Share) -> tuple[T, KV]:
    """Runs ``compute`` while the rows that the next layer reads are under way, if the step works on copies.

    Returns:
      what ``compute`` returns, and the KV to go on with: the copy has the rows of ``ahead``.
    """
    if kv.view is None or all(place is None for place in ahead):
        return compute(), kv
    kv, own = _read_own(kv, ahead, share)
    # XLA's scheduler takes any loop for free, attention's too, and moves a collective's start and end to where it finds
    # work that it can count. In a function that it may not inline it finds none but ``compute``.
    both = xla_metadata_call(lambda own: (compute(), _gather(own, share)), inlineable="false")
    result, copies = both(own)
    return result, _with_copies(kv, copies)


def _read_own(kv: KV, ahead: Ahead, share: Share) -> tuple[KV, dict[str, jax.Array]]:
    """This device's rows of ``ahead`` as stored, by field."""
    slots = _local_slots(share)
    rows = share.row_slots(slots)
    where = {
        **dict.fromkeys(MLA_FIELDS, (ahead.layer, jnp.maximum(rows, 0))),
        **dict.fromkeys(INDEX_FIELDS, (ahead.indexer, slots)),
    }
    pools: dict[str, Any] = {}
    own: dict[str, jax.Array] = {}
    for name, (place, at) in where.items():
        pool = getattr(kv.cache, name)
        if pool is not None and place is not None:
            pools[name], own[name] = pool, read_stored(pool, jnp.minimum(place, pool.shape[0] - 1), at)
    # What is written to the pool from now on waits for this reading, or XLA would copy the pool to keep the old rows.
    pools, own = jax.lax.optimization_barrier((pools, own))
    if share.tiers is not None and ahead.layer is not None:
        own |= _from_host(kv.cache, own, ahead.layer, slots, rows < 0, share)
    return KV(dataclasses.replace(kv.cache, **pools), kv.view), own


def _from_host(
    cache: KVCache, own: dict[str, jax.Array], layer: jax.Array | int, slots: jax.Array, away: jax.Array, share: Share
) -> dict[str, jax.Array]:
    """The rows of a layer, those that are away from the device out of the host pool."""
    assert share.tiers is not None
    fields = mla_fields(cache)
    layer = jnp.minimum(layer, cache.latent.shape[0] - 1)
    # Not what a table names beyond: entries of padding may be any block.
    first = jnp.max(jnp.where(share.group_positions >= 0, share.group_positions, -1), axis=1, keepdims=True)
    known = cp.local_length(first + 1, share.layout.dcp, share.shard_rank, share.layout.interleave)
    away &= (jnp.arange(shard_rows(share)) < known).reshape(-1)
    packed = share.tiers.host_rows(layer, 1, jnp.where(away, slots, -1))[0]
    found = as_fields([packed], [own[name] for name in fields])
    return {
        name: jnp.where(away.reshape(-1, *[1] * (new.ndim - 1)), new, own[name])
        for name, new in zip(fields, found, strict=True)
    }


def _gather(own: dict[str, jax.Array], share: Share) -> dict[str, jax.Array]:
    """The rows of all DCP ranks, as the fields of a copy."""
    return {name: share.collectives.all_gather(x, share.layout.shard_axes, 0)[None] for name, x in own.items()}


def _with_copies(kv: KV, copies: dict[str, jax.Array]) -> KV:
    assert kv.view is not None
    fields: dict[str, Any] = copies
    return KV(kv.cache, dataclasses.replace(kv.view, **fields))


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


def gathered_tables(share: Share) -> jax.Array:
    """Blocks of the copy that hold each rank's keys of each request, in order: [dcp, R, blocks]."""
    requests, blocks = share.group_tables.shape[0], shard_rows(share) // share.block_size
    return jnp.arange(share.layout.dcp * requests * blocks, dtype=jnp.int32).reshape(-1, requests, blocks)


def read_gathered_keys(view: KVCache, positions: jax.Array, share: Share) -> tuple[jax.Array, jax.Array | None]:
    """Index keys of positions [C] of each request; anything where they are beyond its block table.

    Returns:
      keys [R, C, index_dim] and their scales [R, C] if quantised.
    """
    requests, last = share.group_tables.shape[0], view.index_key.shape[1] - 1
    slots = gathered_slots(share, jnp.broadcast_to(positions, (requests, *positions.shape)))
    slots = jnp.minimum(slots, last)  # a chunk of the context may go on beyond the table, and then beyond the copy
    keys = stored_values(read_stored(view.index_key, 0, slots))
    return keys, None if view.index_scale is None else read_stored(view.index_scale, 0, slots)
