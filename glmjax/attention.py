"""Sparse multi-head latent attention, always absorbed: one 576-wide row of the KV pool serves all heads.

Heads are those of this device. Where the KV is split over devices (DCP), either a copy of all rows has been gathered,
or the queries are: then each device attends to the selected rows that it holds, with the heads of all, and the partial
results are merged by log-sum-exp.
"""

import jax
import jax.numpy as jnp

from glmjax.cache import Rows
from glmjax.config import GLMConfig
from glmjax.gathered import KV, Ahead, gather_beside, gathered_slots
from glmjax.hisparse import Incoming, bring_in
from glmjax.kernels.sparse_mla import sparse_mla_from_pool
from glmjax.kernels.topk import compact
from glmjax.layers import apply_rope, linear, linear_by_head, precision_of, rms_norm
from glmjax.params import AttentionParams
from glmjax.sharding.merge import merge_attention, shard_weight, weigh
from glmjax.share import Share


def query_latent(weights: AttentionParams, config: GLMConfig, x: jax.Array) -> jax.Array:
    """The normed query latent, shared with the indexer: [T, D] -> [T, q_lora]."""
    return rms_norm(linear(x, weights.query_down), weights.query_norm, config.mla_norm_eps)


def new_rows(weights: AttentionParams, config: GLMConfig, x: jax.Array, angles: jax.Array) -> Rows:
    """What a layer's KV keeps of x [T, D]: its latent, normed, [T, kv_lora] and its rotary key [T, rope]."""
    latent, rope = jnp.split(linear(x, weights.kv_down), [config.kv_lora_rank], axis=-1)
    return {"latent": rms_norm(latent, weights.kv_norm, config.mla_norm_eps), "rope": apply_rope(rope, angles)}


def selected_slots(
    kv: KV,
    share: Share,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    indexer: jax.Array | int,
    followers: int,
) -> tuple[KV, jax.Array, Incoming | None]:
    """Where attention reads the selected positions [T, K] of an index group.

    Args:
      layer, indexer: the group's leader; ``followers`` layers share its selection.

    Returns:
      the KV; slots of the rows' pool or of the copy, -1 for missing: [T, K], with queries gathered [T', K] for all of
      their rows, what this device does not hold missing; and rows that the followers have to take in first.
    """
    K, incoming = positions.shape[1], None
    if share.kv == "kv_gather":
        slots = gathered_slots(share, positions.reshape(share.block_tables.shape[0], -1))
        return kv, slots.reshape(-1, K), None
    if share.kv == "query_gather":
        positions = share.gather_queries(positions)
        slots, tables, regions, rows = (
            share.query_slots(positions), share.query_tables, share.query_regions, share.query_positions
        )  # fmt: skip
    else:
        tables, rows = share.block_tables, share.positions
        slots = share.slots(positions.reshape(tables.shape[0], -1))
        regions = None if share.tiers is None else share.tiers.regions
    by_request = (tables.shape[0], -1)
    if regions is None:
        slots = share.row_slots(slots)
    else:
        kv, slots, incoming = bring_in(
            kv,
            share,
            positions.reshape(by_request),
            slots.reshape(by_request),
            tables,
            regions,
            rows[:, 0],
            layer=layer,
            indexer=indexer,
            followers=followers,
        )
    slots = slots.reshape(-1, K)
    if share.kv == "query_gather":
        # Held ones first: attention stops after the last.
        held = compact(slots >= 0, K)
        slots = jnp.where(held >= 0, jnp.take_along_axis(slots, jnp.maximum(held, 0), axis=1), -1)
    return kv, slots, incoming


def attend(
    weights: AttentionParams,
    config: GLMConfig,
    kv: KV,
    layer: jax.Array | int,
    latent: jax.Array,
    angles: jax.Array,
    slots: jax.Array,
    share: Share,
    ahead: Ahead,
) -> tuple[jax.Array, KV]:
    """Attention over the selected slots and the output projection.

    Args:
      latent: [T, q_lora] from ``query_latent``.
      angles: [T, rope / 2].
      slots: from ``selected_slots``.
      ahead: what to gather meanwhile, if the step works on gathered copies.

    Returns:
      [T, D], summed over all heads, and the KV to go on with.
    """
    heads, nope = weights.key_up.shape[0], config.qk_nope_head_dim  # heads of this device
    query = linear(latent, weights.query_up).reshape(-1, heads, config.qk_head_dim)
    content, rope = query[..., :nope], apply_rope(query[..., nope:], angles[:, None])
    absorbed = jnp.einsum("thn,hnc->thc", content, weights.key_up, precision=precision_of(content))
    if share.kv == "query_gather":
        absorbed, rope = _gather_heads(share, absorbed), _gather_heads(share, rope)

    def look_up() -> jax.Array:
        pool, place = kv.source(layer)
        out, lse = sparse_mla_from_pool(
            absorbed,
            rope,
            pool.latent,
            pool.latent_scale,
            pool.rope,
            place,
            slots,
            scale=config.softmax_scale,
        )
        if share.kv == "query_gather":
            out = _merge(share, out, lse)
        return linear_by_head(out, weights.value_up)

    values, after = gather_beside(look_up, kv, ahead, share)
    projected = linear(values.reshape(-1, heads * config.v_head_dim), weights.output)
    return share.collectives.all_reduce(projected, share.layout.tensor_axes), after


def _gather_heads(share: Share, x: jax.Array) -> jax.Array:
    """[T, heads, d] of this device -> [T', heads', d] of the devices among which the KV is split."""
    return share.collectives.all_gather(share.gather_queries(x), share.layout.shard_tensor_axes, 1)


def _merge(share: Share, out: jax.Array, lse: jax.Array) -> jax.Array:
    """Partial outputs [T', heads', c] and log-sum-exps [T', heads'] -> [T, heads, c] over all keys.

    Outputs travel in their own dtype.
    """
    layout, collectives = share.layout, share.collectives
    by_token, by_head = layout.shard_context_axes, layout.shard_tensor_axes
    r, q = share.query_positions.shape
    out, lse = out.reshape(r, q, *out.shape[1:]), lse.reshape(r, q, -1)
    if share.combine == "ag_rs":
        everyone = collectives.all_gather(lse[None], layout.shard_axes, 0)
        own = weigh(out, shard_weight(everyone, share.shard_rank)).astype(out.dtype)
        own = collectives.reduce_scatter(own, by_token, share.split_dim)
        own = collectives.reduce_scatter(own, by_head, 2)
    else:
        parts = []
        for x in (out[None], lse[None]):
            x = collectives.all_to_all(x, by_token, 1 + share.split_dim, 0)
            parts.append(collectives.all_to_all(x, by_head, 3, 0))
        own, _ = merge_attention(*parts)
    return own.astype(out.dtype).reshape(-1, *own.shape[2:])
