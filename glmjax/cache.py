"""The KV pool on the device: typed arrays over all layers and slots, updated in place.

A slot holds one token in every layer. The scheduler owns which request a slot belongs to; a program receives slots
(-1 for padding) and never copies the pool: it is donated, written and returned.

Letters: L layers, N indexers, S slots.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from glmjax import codec
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.kernels import kv_rows
from glmjax.kernels.kv_insert import kv_insert

CacheDtype = Literal["fp8_ds_mla", "bfloat16", "float32"]


@struct.dataclass
class KVCache:
    """Latents, rotary keys and index keys of every slot.

    Attributes:
      latent: [L, S, kv_lora] bf16, float32, or the bytes of fp8 values as uint8: XLA's CPU backend turns a whole fp8
        array into f16 to read one row of it.
      latent_scale: [L, S, tiles] float32 for fp8, else None.
      rope: [L, S, rope]; bf16 for fp8 and bf16 caches.
      index_key: [N, S, index_dim], of the latent's dtype.
      index_scale: [N, S] float32 for fp8, else None.
    """

    latent: jax.Array
    latent_scale: jax.Array | None
    rope: jax.Array
    index_key: jax.Array
    index_scale: jax.Array | None

    @property
    def quantized(self) -> bool:
        return self.latent_scale is not None

    @property
    def dtype(self) -> CacheDtype:
        return "fp8_ds_mla" if self.quantized else "float32" if self.latent.dtype == jnp.float32 else "bfloat16"


Rows = dict[str, jax.Array]  # rows on their way into a cache, as it stores them: field -> [T, ...]


def abstract_cache(
    config: GLMConfig, num_blocks: int, block_size: int, dtype: CacheDtype, *, mtp: bool = False
) -> KVCache:
    """Shapes and dtypes of a pool, as ``jax.ShapeDtypeStruct`` leaves.

    Args:
      mtp: give the MTP layer rows too (the last of L and N).

    Raises:
      ConfigError: ``dtype`` is not a cache format.
    """
    if dtype not in ("fp8_ds_mla", "bfloat16", "float32"):
        raise ConfigError(f"kv_cache_dtype must be 'fp8_ds_mla', 'bfloat16' or 'float32', got {dtype!r}")
    extra = int(mtp and config.num_nextn_predict_layers > 0)
    layers, indexers = config.num_hidden_layers + extra, config.num_full_indexers + extra
    fp8 = dtype == "fp8_ds_mla"
    wide = jnp.float32 if dtype == "float32" else jnp.bfloat16
    narrow = jnp.uint8 if fp8 else wide

    def pool(stack: int, *width: int, dtype: DTypeLike) -> Any:
        return jax.ShapeDtypeStruct((stack, (num_blocks + 1) * block_size, *width), dtype)

    tiles = kv_rows.num_tiles(config.kv_lora_rank)
    return KVCache(
        latent=pool(layers, config.kv_lora_rank, dtype=narrow),
        latent_scale=pool(layers, tiles, dtype=jnp.float32) if fp8 else None,
        rope=pool(layers, config.qk_rope_head_dim, dtype=wide),
        index_key=pool(indexers, config.index_head_dim, dtype=narrow),
        index_scale=pool(indexers, dtype=jnp.float32) if fp8 else None,
    )


def make_cache(config: GLMConfig, num_blocks: int, block_size: int, dtype: CacheDtype, *, mtp: bool = False) -> KVCache:
    """An empty pool on the default device."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), abstract_cache(config, num_blocks, block_size, dtype, mtp=mtp)
    )


def stored_bits(values: jax.Array) -> jax.Array:
    """What a pool stores of numbers: fp8 becomes bytes."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8) if values.dtype == kv_rows.FP8 else values


def stored_values(stored: jax.Array) -> jax.Array:
    """Numbers of what a pool stores: bytes become fp8."""
    return jax.lax.bitcast_convert_type(stored, kv_rows.FP8) if stored.dtype == jnp.uint8 else stored


def read_stored(pool: jax.Array, layer: jax.Array | int, slots: jax.Array) -> jax.Array:
    """pool[layer, slots] for slots >= 0, as stored."""
    layers, size = pool.shape[:2]
    flat = pool.reshape(layers * size, *pool.shape[2:])
    return flat.at[layer * size + slots].get(mode="promise_in_bounds")


def _read(pool: jax.Array, layer: jax.Array | int, slots: jax.Array) -> jax.Array:
    return stored_values(read_stored(pool, layer, slots))


def pack_mla(cache: KVCache, latent: jax.Array, rope: jax.Array) -> Rows:
    """Rows as the cache stores them: latent [T, kv_lora], rope [T, rope]."""
    rope = rope.astype(cache.rope.dtype)
    if not cache.quantized:
        return {"latent": latent.astype(cache.latent.dtype), "rope": rope}
    values, scale = kv_rows.quantize_latent(latent.astype(jnp.bfloat16))
    return {"latent": stored_bits(values), "latent_scale": scale, "rope": rope}


def pack_index_key(cache: KVCache, key: jax.Array) -> Rows:
    """Index keys as the cache stores them: [T, index_dim]."""
    if not cache.quantized:
        return {"index_key": key.astype(cache.index_key.dtype)}
    values, scale = kv_rows.quantize_index_key(key.astype(jnp.bfloat16))
    return {"index_key": stored_bits(values), "index_scale": scale}


def write_rows(cache: KVCache, place: jax.Array | int, slots: jax.Array, rows: Rows) -> KVCache:
    """Writes packed rows.

    Args:
      place: the layer, or the indexer for index keys.
      slots: [T] int32, -1 dropped.
    """
    pools = {name: pool for name, pool in vars(cache).items() if pool is not None}
    layer, indexer = (place, None) if "latent" in rows else (None, place)
    return dataclasses.replace(cache, **kv_insert(pools, rows, slots, layer=layer, indexer=indexer))


def insert_mla(cache: KVCache, layer: jax.Array | int, slots: jax.Array, latent: jax.Array, rope: jax.Array) -> KVCache:
    """Writes one layer's rows: slots [T] int32 (-1 dropped), latent [T, kv_lora], rope [T, rope]."""
    return write_rows(cache, layer, slots, pack_mla(cache, latent, rope))


def insert_index_key(cache: KVCache, indexer: jax.Array | int, slots: jax.Array, key: jax.Array) -> KVCache:
    """Writes one indexer's keys: slots [T] int32 (-1 dropped), key [T, index_dim]."""
    return write_rows(cache, indexer, slots, pack_index_key(cache, key))


def read_mla(cache: KVCache, layer: jax.Array | int, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dequantised rows of one layer: slots [...] int32 >= 0 -> latent [..., kv_lora], rope [..., rope]."""
    latent, rope = _read(cache.latent, layer, slots), _read(cache.rope, layer, slots)
    if cache.latent_scale is not None:
        latent = codec.dequantize_latent(latent, _read(cache.latent_scale, layer, slots))
    return latent, rope


def read_index_keys(
    cache: KVCache, indexer: jax.Array | int, blocks: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array | None]:
    """Index keys as stored, block by block.

    Args:
      blocks: [R, n] int32 physical blocks.

    Returns:
      keys [R, n * block_size, index_dim], and their scales [R, n * block_size] if quantised.
    """

    def read(pool: jax.Array) -> jax.Array:
        stack, size, *width = pool.shape
        by_block = pool.reshape(stack * size // block_size, block_size, *width)
        found = by_block.at[indexer * (size // block_size) + blocks].get(mode="promise_in_bounds")
        return stored_values(found).reshape(blocks.shape[0], -1, *width)

    return read(cache.index_key), None if cache.index_scale is None else read(cache.index_scale)
