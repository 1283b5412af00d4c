"""A step's batch as one device sees it: the query rows that it computes, and what it must exchange with others.

Under prefill context parallelism the new tokens of a data-parallel rank are split over its devices: a rectangle of
prompts token by token in a zig-zag, one of single tokens row by row. What every device computes of them, new KV rows
and the last hidden states, is gathered. On one device the share is the whole batch and nothing is exchanged.

Letters: R x Q the batch, r x q the share, T = r * q its rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from glmjax.batch import TokenBatch
from glmjax.sharding import cp
from glmjax.sharding.collectives import Axes, Collectives
from glmjax.sharding.layout import Layout
from glmjax.tiers import Regions, Tiers

KVSource = Literal["pool", "query_gather", "kv_gather"]
Combine = Literal["ag_rs", "a2a"]
Dispatch = Literal["gather", "ragged"]


@struct.dataclass
class Share:
    """One device's part of a ``TokenBatch``.

    Attributes:
      tokens: [r, q] int32.
      positions: [r, q] int32, -1 for padding.
      block_tables: [r, B] int32.
      group_positions, group_tables: the same for the rows of the whole group, in gathered order.
      kv: where attention finds its keys: "pool", the device's own pool, which has all of them; "query_gather", the
        pools of all DCP ranks, to which the queries travel; "kv_gather", a temporary copy of all ranks' rows.
      combine: how partial attention results come back with "query_gather": "ag_rs" gathers log-sum-exps and
        reduce-scatters weighted outputs, "a2a" sends each device its queries' partial outputs.
      dispatch: with expert parallelism, how tokens reach their experts: "gather" brings all tokens to every device,
        "ragged" sends each to the devices that it needs, which XLA can do on GPUs only.
      by_row: the batch is split by row, not by token.
      requests: R.
      tiers: where the rows are, if not all of them are in the device's pool; its regions are the share's, and
        ``group_regions`` those of the whole group.
    """

    tokens: jax.Array
    positions: jax.Array
    block_tables: jax.Array
    group_positions: jax.Array
    group_tables: jax.Array
    block_size: int = struct.field(pytree_node=False)
    layout: Layout = struct.field(pytree_node=False)
    kv: KVSource = struct.field(pytree_node=False)
    combine: Combine = struct.field(pytree_node=False)
    dispatch: Dispatch = struct.field(pytree_node=False)
    by_row: bool = struct.field(pytree_node=False)
    requests: int = struct.field(pytree_node=False)
    tiers: Tiers | None = None
    group_regions: Regions | None = None

    @property
    def collectives(self) -> Collectives:
        return Collectives(self.layout)

    @property
    def rows(self) -> tuple[int, int]:
        """r, q."""
        r, q = self.tokens.shape
        return r, q

    @property
    def valid(self) -> jax.Array:
        """[r, q] bool."""
        return self.positions >= 0

    @property
    def write_slots(self) -> jax.Array:
        """Slots in this device's pool for all rows of the group: [group rows] int32, -1 for what it does not keep."""
        return self._slots(self.group_tables, self.group_positions, self.shard_rank).reshape(-1)

    def row_slots(self, slots: jax.Array) -> jax.Array:
        """Where the latents and rotary keys of these slots are on the device; -1 for what is only on the host."""
        if self.tiers is None:
            return slots
        page = self.tiers.page_of[jnp.maximum(slots, 0) // self.block_size]
        return jnp.where((slots >= 0) & (page >= 0), page * self.block_size + slots % self.block_size, -1)

    @property
    def shard_rank(self) -> jax.Array | int:
        """This device's DCP rank."""
        return self.collectives.rank(self.layout.shard_axes)

    def slots(self, positions: jax.Array) -> jax.Array:
        """Slots in this device's pool of positions [r, q, ...] of the share's requests; -1 where it has none."""
        return self._slots(self.block_tables, positions, self.shard_rank)

    def _slots(self, tables: jax.Array, positions: jax.Array, rank: jax.Array | int) -> jax.Array:
        layout = self.layout
        return cp.local_slots(tables, positions, self.block_size, layout.dcp, rank, layout.interleave)

    def own_rows(self, x: jax.Array) -> jax.Array:
        """This device's rows of an x [R, ...] with one row a request, in a batch of single tokens: [T, ...]."""
        missing = -x.shape[0] % self.layout.pcp
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
        return self.collectives.part(x, self.layout.context_axes, 0)

    # Exchanges.  x is [T, ...], rows flat; results are flat too.

    def gather_rows(self, x: jax.Array) -> jax.Array:
        """The rows of the whole group, in the order of ``group_positions``."""
        return self._gather(x, self.layout.context_axes)

    def gather_queries(self, x: jax.Array) -> jax.Array:
        """The rows of the devices among which the KV is split."""
        return self._gather(x, self.layout.shard_context_axes)

    def last_rows(self, x: jax.Array) -> jax.Array:
        """Each request's last real row, on every device: [T, ...] -> [R, ...]; zeros for requests without any."""
        r, q = self.rows
        x = x.reshape(r, q, *x.shape[1:])
        ends = jnp.max(self.positions if self.by_row else self.group_positions, axis=1, keepdims=True)
        last = (self.positions == ends) & self.valid
        place = jnp.argmax(last, axis=1).reshape(r, 1, *[1] * (x.ndim - 2))
        here = jnp.any(last, axis=1).reshape(r, *[1] * (x.ndim - 2))
        own = jnp.where(here, jnp.take_along_axis(x, place, axis=1)[:, 0], 0)
        if self.by_row:
            return self.collectives.all_gather(own, self.layout.context_axes, 0)[: self.requests]
        return self.collectives.all_reduce(own, self.layout.context_axes)

    def all_rows(self, x: jax.Array) -> jax.Array:
        """Every row of the batch on every device, of a batch split by row: [T, ...] -> [R, Q, ...]."""
        assert self.by_row
        r, q = self.rows
        x = self.collectives.all_gather(x.reshape(r, q, *x.shape[1:]), self.layout.context_axes, 0)
        return x[: self.requests]

    @property
    def query_positions(self) -> jax.Array:
        """Positions of ``gather_queries``' rows, as a rectangle: [r', q']."""
        return self.collectives.part(self.group_positions, self.layout.replica_context_axes, self.split_dim)

    @property
    def query_tables(self) -> jax.Array:
        """Block tables of that rectangle's requests: [r', B]."""
        if not self.by_row:
            return self.block_tables
        return self.collectives.part(self.group_tables, self.layout.replica_context_axes, 0)

    @property
    def query_regions(self) -> Regions | None:
        """Hot regions of that rectangle's requests."""
        regions = self.group_regions
        if not self.by_row or regions is None:
            return regions
        return jax.tree.map(lambda x: self.collectives.part(x, self.layout.replica_context_axes, 0), regions)

    def query_slots(self, positions: jax.Array) -> jax.Array:
        """Slots in this device's pool of positions [T', ...] of ``gather_queries``' rows; -1 where it has none."""
        tables = self.query_tables
        shape = positions.shape
        return self._slots(tables, positions.reshape(tables.shape[0], -1), self.shard_rank).reshape(shape)

    def gather_candidates(self, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """All ranks' candidates for this device's queries: pairs of [r', q', K] -> [r, q, dcp * K]."""
        collectives, layout = self.collectives, self.layout

        def exchange(y: jax.Array) -> jax.Array:
            y = collectives.all_to_all(y[None], layout.shard_context_axes, 1 + self.split_dim, 0)
            y = collectives.all_gather(y, layout.shard_tensor_axes, 0)  # [dcp, r, q, K]
            return jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:3], -1)

        return exchange(x[0]), exchange(x[1])

    @property
    def split_dim(self) -> int:
        """The dimension of [r, q] along which shares stand side by side."""
        return 0 if self.by_row else 1

    def _gather(self, x: jax.Array, axes: Axes) -> jax.Array:
        r, q = self.rows
        x = self.collectives.all_gather(x.reshape(r, q, *x.shape[1:]), axes, self.split_dim)
        return x.reshape(-1, *x.shape[2:])


def share_of(
    batch: TokenBatch,
    layout: Layout,
    *,
    prefill: KVSource = "query_gather",
    combine: Combine = "ag_rs",
    dispatch: Dispatch = "gather",
    tiers: Tiers | None = None,
) -> Share:
    """What this device computes of a batch that all devices of its group hold alike.

    Args:
      prefill: where to find keys under DCP if there is a choice (``cp.may_gather_keys``); else queries are gathered.
      tiers: where the batch's rows are; None: all in the device's pool.  A staged batch works on copies, as one whose
        keys are gathered does.
    """
    R, Q = batch.tokens.shape
    positions = jnp.where(batch.valid, batch.positions, -1)
    by_row = cp.splits_by_row(Q, layout.pcp)
    kv: KVSource = "pool" if layout.dcp == 1 else prefill if cp.may_gather_keys(Q, layout.pcp) else "query_gather"
    regions = None if tiers is None else tiers.regions
    if tiers is not None and tiers.staged:
        kv = "kv_gather"
    common: dict[str, Any] = {
        "block_size": batch.block_size,
        "layout": layout,
        "kv": kv,
        "combine": combine,
        "dispatch": dispatch,
        "by_row": by_row,
        "requests": R,
    }
    collectives, axes = Collectives(layout), layout.context_axes
    if by_row:
        missing = -R % layout.pcp
        tokens, tables = (jnp.pad(x, ((0, missing), (0, 0))) for x in (batch.tokens, batch.block_tables))
        positions = jnp.pad(positions, ((0, missing), (0, 0)), constant_values=-1)
        own_tokens, own_positions, own_tables = (collectives.part(x, axes, 0) for x in (tokens, positions, tables))
        if tiers is not None and regions is not None:
            regions = regions.padded(missing)
            tiers = dataclasses.replace(tiers, regions=jax.tree.map(lambda x: collectives.part(x, axes, 0), regions))
        return Share(
            own_tokens, own_positions, own_tables, positions, tables, tiers=tiers, group_regions=regions, **common
        )
    width = cp.local_width(Q, layout.pcp)
    offsets = cp.zigzag_positions(batch.length, layout.pcp, collectives.rank(axes), width)
    everyone = cp.zigzag_gather_index(batch.length, layout.pcp, width)
    return Share(
        tokens=jnp.take_along_axis(batch.tokens, jnp.maximum(offsets, 0), axis=1),
        positions=jnp.where(offsets >= 0, batch.start[:, None] + offsets, -1),
        block_tables=batch.block_tables,
        group_positions=jnp.where(everyone >= 0, batch.start[:, None] + everyone, -1),
        group_tables=batch.block_tables,
        tiers=tiers,
        group_regions=regions,
        **common,
    )
