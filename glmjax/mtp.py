"""The multi-token-prediction layer: one decoder layer that drafts the token after next (spec/model.md 2.7).

Its KV and index keys are the last entries of the cache's stacks. Row i takes the trunk's final hidden state of
position i and the embedding of token i + 1, and predicts token i + 2.
"""

import dataclasses

import jax
import jax.numpy as jnp

from glmjax.batch import TokenBatch
from glmjax.cache import KVCache
from glmjax.config import GLMConfig
from glmjax.gathered import first_kv
from glmjax.layers import linear, rms_norm
from glmjax.model import logits, run_group
from glmjax.params import Params
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.share import Combine, Dispatch, KVSource, Share, share_of
from glmjax.tiers import Tiers

Carry = tuple[KVCache, jax.Array, jax.Array]  # from draft to draft: cache, hidden of each request's last row, its token


def mtp_layer(
    params: Params,
    config: GLMConfig,
    cache: KVCache,
    hidden: jax.Array,
    share: Share,
    chosen: jax.Array | None = None,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Runs the layer over a batch whose tokens are the *next* tokens of its positions.

    Args:
      hidden: [T, D] after ``model.norm`` of the same positions, or this layer's own output when drafts are chained.
      share: of a batch whose tokens[r, q] is the token at position start + q + 1.
      chosen: [T, K] positions to reuse from an earlier draft; then no index key is written.

    Returns:
      the cache, hidden [T, D] after ``shared_head.norm``, and the selected positions [T, K].

    Raises:
      ValueError: the parameters were loaded without the MTP layer.
    """
    mtp = params.mtp
    if mtp is None:
        raise ValueError("these parameters have no MTP layer: load the checkpoint with mtp=True")
    embedding = params.embed[share.tokens.reshape(-1)]
    # Position 0 sees no embedding, as in vLLM.
    embedding = jnp.where((share.positions.reshape(-1) > 0)[:, None], embedding, 0)
    parts = [
        rms_norm(embedding, mtp.embed_norm, config.rms_norm_eps),
        rms_norm(hidden, mtp.hidden_norm, config.rms_norm_eps),
    ]
    x = linear(jnp.concatenate(parts, axis=-1), mtp.projection)
    layer, indexer = config.num_hidden_layers, config.num_full_indexers
    kv = first_kv(cache, layer, indexer, share)
    kv, x, chosen = run_group(params, config, kv, x, share, ("experts",), layer, indexer, chosen, last=True)
    return kv.cache, rms_norm(x, mtp.final_norm, config.rms_norm_eps), chosen


def draft(
    params: Params,
    config: GLMConfig,
    cache: KVCache,
    hidden: jax.Array,
    batch: TokenBatch,
    num_drafts: int,
    layout: Layout = ONE_DEVICE,
    *,
    limit: jax.Array | None = None,
    prefill: KVSource = "query_gather",
    combine: Combine = "ag_rs",
    dispatch: Dispatch = "gather",
    tiers: Tiers | None = None,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Drafts greedily: one pass over the batch's rows, then single rows that feed on one another.

    Args:
      hidden: [T, D] of the trunk after ``model.norm``, for this device's share of the batch.
      batch: next tokens of its positions (see ``mtp_layer``); drafting goes on from each request's last real row.
      num_drafts: n >= 1.
      limit: [R] int32, positions from here on have no slot; a draft that needs one of them is of no use.
      prefill, combine, dispatch, tiers: as in ``share_of``; a staged batch can only draft one token.

    Returns:
      the cache, draft tokens [R, n] int32 and their logits [R, n, V] float32.
    """
    share = share_of(batch, layout, prefill=prefill, combine=combine, dispatch=dispatch, tiers=tiers)
    cache, out, chosen = mtp_layer(params, config, cache, hidden, share)
    last = share.last_rows(out)
    shared = share.last_rows(chosen) if config.index_share_for_mtp_iteration else None

    def guess(last: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = logits(params, last, layout)
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores

    def follow(carry: Carry, step: jax.Array) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        cache, last, token = carry
        position = batch.start + batch.length - 1 + step
        length = jnp.minimum(batch.length, 1)  # padding rows stay padding
        if limit is not None:
            length = jnp.where(position < limit, length, 0)
        row = dataclasses.replace(batch, tokens=token[:, None], start=position, length=length)
        share = share_of(row, layout, combine=combine, dispatch=dispatch, tiers=tiers)
        reuse = None if shared is None else share.own_rows(shared)
        cache, out, _ = mtp_layer(params, config, cache, share.own_rows(last), share, reuse)
        last = share.last_rows(out)
        token, scores = guess(last)
        return (cache, last, token), (token, scores)

    token, scores = guess(last)
    if num_drafts == 1:
        return cache, token[:, None], scores[:, None]
    # A loop, so that the time to compile does not grow with the drafts.
    steps = jnp.arange(1, num_drafts, dtype=jnp.int32)
    (cache, _, _), following = jax.lax.scan(follow, (cache, last, token), steps)

    def by_row(first: jax.Array, rest: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, 1)

    return cache, by_row(token, following[0]), by_row(scores, following[1])
