"""Sparse multi-head latent attention, always absorbed: one 576-wide row of the KV pool serves all heads."""

import jax
import jax.numpy as jnp

from glmjax.batch import TokenBatch
from glmjax.cache import KVCache, insert_mla, read_mla
from glmjax.config import GLMConfig
from glmjax.kernels.sparse_mla import sparse_mla
from glmjax.layers import apply_rope, linear, precision_of, rms_norm
from glmjax.params import AttentionParams


def query_latent(weights: AttentionParams, config: GLMConfig, x: jax.Array) -> jax.Array:
    """The normed query latent, shared with the indexer: [T, D] -> [T, q_lora]."""
    return rms_norm(linear(x, weights.query_down), weights.query_norm, config.mla_norm_eps)


def insert_kv(
    weights: AttentionParams,
    config: GLMConfig,
    cache: KVCache,
    layer: jax.Array | int,
    x: jax.Array,
    angles: jax.Array,
    batch: TokenBatch,
) -> KVCache:
    """Computes the latent and rotary key of x [T, D] and writes them to the batch's slots."""
    latent, rope = jnp.split(linear(x, weights.kv_down), [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, weights.kv_norm, config.mla_norm_eps)
    return insert_mla(cache, layer, batch.write_slots.reshape(-1), latent, apply_rope(rope, angles))


def attend(
    weights: AttentionParams,
    config: GLMConfig,
    cache: KVCache,
    layer: jax.Array | int,
    latent: jax.Array,
    angles: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Attention over the selected slots and the output projection.

    Args:
      latent: [T, q_lora] from ``query_latent``.
      angles: [T, rope / 2].
      slots: [T, K] int32, valid ones first, -1 for missing.

    Returns:
      [T, D].
    """
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    query = linear(latent, weights.query_up).reshape(-1, heads, config.qk_head_dim)
    content, rope = query[..., :nope], apply_rope(query[..., nope:], angles[:, None])
    absorbed = jnp.einsum("thn,hnc->thc", content, weights.key_up, precision=precision_of(content))
    out, _ = sparse_mla(
        absorbed,
        rope,
        slots,
        lambda rows: read_mla(cache, layer, rows),
        scale=config.softmax_scale,
        latent_dim=config.kv_lora_rank,
    )
    values = jnp.einsum("thc,hvc->thv", out, weights.value_up, precision=precision_of(out))
    return linear(values.reshape(-1, heads * config.v_head_dim), weights.output)
