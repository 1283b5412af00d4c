"""KV rows as bytes: ``fp8_ds_mla`` rows of 656 bytes and index-key rows of 132 (spec/model.md section 4).

Quantising picks power-of-two scales (exact in bf16, what readers of the format multiply by); reading accepts any scale.
These bytes are the format of the host pool and of the wire.  All functions work under jit.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from glmjax.config import GLMConfig
from glmjax.kernels.kv_rows import FP8, LATENT_TILE, num_tiles

INDEX_BLOCK = 64  # tokens of one packed block of index keys


def mla_row_bytes(config: GLMConfig) -> int:
    """Bytes of one token's row in one layer: fp8 latent, float32 scales, bf16 rotary key; 656 for GLM-5."""
    return config.kv_lora_rank + 4 * num_tiles(config.kv_lora_rank) + 2 * config.qk_rope_head_dim


def index_row_bytes(config: GLMConfig) -> int:
    """Bytes of one token's index key in one full layer: fp8 values and a float32 scale; 132 for GLM-5."""
    return config.index_head_dim + 4


def bytes_per_token(config: GLMConfig, *, mtp: bool = True) -> int:
    """Bytes of KV that one token takes in ``fp8_ds_mla``: 54,728 for GLM-5.3 with its MTP layer."""
    extra = int(mtp and config.num_nextn_predict_layers > 0)
    rows = (config.num_hidden_layers + extra) * mla_row_bytes(config)
    return rows + (config.num_full_indexers + extra) * index_row_bytes(config)


def dequantize_latent(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Inverse of ``quantize_latent``: [..., kv_lora] float32."""
    return values.astype(jnp.float32) * jnp.repeat(scale, LATENT_TILE, axis=-1)[..., : values.shape[-1]]


def _bytes(x: jax.Array) -> jax.Array:
    """Little-endian bytes of the last axis: [..., n] -> [..., n * itemsize] uint8."""
    b = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return b if x.dtype.itemsize == 1 else b.reshape(*x.shape[:-1], -1)


def _from_bytes(b: jax.Array, dtype: DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        b = b.reshape(*b.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(b, dtype)


def pack_mla(values: jax.Array, scale: jax.Array, rope: jax.Array) -> jax.Array:
    """One ``fp8_ds_mla`` row per token.

    Args:
      values: [..., kv_lora] fp8; scale: [..., tiles] float32; rope: [..., rope], stored as bf16, pairs adjacent.

    Returns:
      [..., 656] uint8 for GLM-5's sizes.
    """
    parts = [values.astype(FP8), scale.astype(jnp.float32), rope.astype(jnp.bfloat16)]
    return jnp.concatenate([_bytes(x) for x in parts], axis=-1)


def unpack_mla(packed: jax.Array, latent_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inverse of ``pack_mla``: fp8 values, float32 scales (whatever their rounding) and bf16 rotary keys."""
    rope_start = latent_dim + 4 * num_tiles(latent_dim)
    values = _from_bytes(packed[..., :latent_dim], FP8)
    scale = _from_bytes(packed[..., latent_dim:rope_start], jnp.float32)
    return values, scale, _from_bytes(packed[..., rope_start:], jnp.bfloat16)


def pack_index_block(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Index keys of a block of tokens: all values first, then all scales.

    Args:
      values: [..., tokens, index_dim] fp8; scale: [..., tokens] float32.

    Returns:
      [..., tokens * (index_dim + 4)] uint8; 8,448 bytes for 64 tokens of 128.
    """
    flat = _bytes(values.astype(FP8)).reshape(*values.shape[:-2], -1)
    return jnp.concatenate([flat, _bytes(scale.astype(jnp.float32))], axis=-1)


def unpack_index_block(packed: jax.Array, index_dim: int) -> tuple[jax.Array, jax.Array]:
    """Inverse of ``pack_index_block``: values [..., tokens, index_dim] fp8 and scales [..., tokens]."""
    tokens = packed.shape[-1] // (index_dim + 4)
    values = _from_bytes(packed[..., : tokens * index_dim], FP8)
    scale = _from_bytes(packed[..., tokens * index_dim :], jnp.float32)
    return values.reshape(*packed.shape[:-1], tokens, index_dim), scale
