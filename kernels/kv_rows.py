"""Rows of the KV pools: their fields, and the FP8 values and scales they are quantised to (spec/model.md section 4).

Scales are powers of two: exact in bf16, by which readers of the format multiply.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]  # by field

MLA_FIELDS = ("latent", "latent_scale", "rope")  # of a layer
INDEX_FIELDS = ("index_key", "index_scale")  # of an indexer

FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
LATENT_TILE = 128  # latent values that share a scale
FLOOR = 1e-4  # of a latent tile's scale, and of the largest value of an index key


def num_tiles(latent_dim: int) -> int:
    return -(-latent_dim // LATENT_TILE)


def quantize_latent(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., kv_lora] -> fp8 values of that shape and float32 scales [..., tiles]; value * scale restores.

    The scale of a tile is 2^ceil(log2(max(amax / 448, 1e-4))).
    """
    dim = latent.shape[-1]
    tiles = num_tiles(dim)
    x = latent.astype(jnp.float32)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * LATENT_TILE - dim)])
    x = x.reshape(*x.shape[:-1], tiles, LATENT_TILE)
    scale = _power_of_two_at_least(jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / FP8_MAX, FLOOR))
    values = _to_fp8(x / scale[..., None])
    return values.reshape(*latent.shape[:-1], -1)[..., :dim], scale


def quantize_index_key(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., index_dim] -> fp8 values and one float32 scale [...]: 2^ceil(log2(max(amax, 1e-4) / 448))."""
    x = key.astype(jnp.float32)
    scale = _power_of_two_at_least(jnp.maximum(jnp.max(jnp.abs(x), axis=-1), FLOOR) / FP8_MAX)
    return _to_fp8(x / scale[..., None]), scale


def _power_of_two_at_least(x: jax.Array) -> jax.Array:
    """2^ceil(log2 x), exactly."""
    mantissa, exponent = jnp.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return jnp.ldexp(jnp.ones_like(x), jnp.where(mantissa > 0.5, exponent, exponent - 1))


def _to_fp8(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)
