"""The KV pool on the device: typed arrays over all layers and slots, updated in place.

A slot holds one token in every layer. The scheduler owns which request a slot belongs to; a program receives slots
(-1 for padding) and never copies the pool: it is donated, written and returned.  With a host pool behind it
(``glmjax.tiers``) the rows' pool has fewer slots than that of the index keys.

Letters: L layers, N indexers, S slots.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from glmjax import codec
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.kernels import kv_rows
from glmjax.kernels.choose import choose
from glmjax.kernels.kv_insert import as_stored, kv_insert, put_rows
from glmjax.kernels.row_fetch import as_fields, row_fetch
from glmjax.tiers import HotRows, Offload, abstract_hot_rows

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
      hot: what the hot regions hold, if rows are offloaded row by row.
    """

    latent: jax.Array
    latent_scale: jax.Array | None
    rope: jax.Array
    index_key: jax.Array
    index_scale: jax.Array | None
    hot: HotRows | None = None

    @property
    def quantized(self) -> bool:
        return self.latent_scale is not None

    @property
    def dtype(self) -> CacheDtype:
        return "fp8_ds_mla" if self.quantized else "float32" if self.latent.dtype == jnp.float32 else "bfloat16"


Rows = dict[str, jax.Array]  # rows on their way into a cache: field -> [T, ...]


def abstract_cache(
    config: GLMConfig,
    num_blocks: int,
    block_size: int,
    dtype: CacheDtype,
    *,
    mtp: bool = False,
    offload: Offload | None = None,
    num_slots: int = 0,
) -> KVCache:
    """Shapes and dtypes of a pool, as ``jax.ShapeDtypeStruct`` leaves.

    Args:
      mtp: give the MTP layer rows too (the last of L and N).
      offload: give the latents and rotary keys this many pages only, the others are on the host; and room to say what
        the hot regions of ``num_slots`` requests hold, if they have any.

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

    def pool(stack: int, blocks: int, *width: int, dtype: DTypeLike) -> Any:
        return jax.ShapeDtypeStruct((stack, (blocks + 1) * block_size, *width), dtype)

    tiles = kv_rows.num_tiles(config.kv_lora_rank)
    pages = num_blocks if offload is None else offload.num_pages
    hot = None
    if offload is not None and offload.region_pages:
        hot = abstract_hot_rows(indexers, num_slots, offload.region_pages * block_size)
    return KVCache(
        latent=pool(layers, pages, config.kv_lora_rank, dtype=narrow),
        latent_scale=pool(layers, pages, tiles, dtype=jnp.float32) if fp8 else None,
        rope=pool(layers, pages, config.qk_rope_head_dim, dtype=wide),
        index_key=pool(indexers, num_blocks, config.index_head_dim, dtype=narrow),
        index_scale=pool(indexers, num_blocks, dtype=jnp.float32) if fp8 else None,
        hot=hot,
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


def packed(cache: KVCache, rows: Rows) -> Rows:
    """New rows as the cache stores them, for their way between devices: half the bytes, where it is quantised."""
    return as_stored(_pools(cache), rows)


def write_rows(
    cache: KVCache,
    rows: Rows,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    indexer: jax.Array | int | None = None,
    index_slots: jax.Array | None = None,
) -> KVCache:
    """Writes new rows of a layer, an indexer, or both.

    Args:
      rows: normed latents and rotated keys, numbers or ``packed``: ``latent`` [T, kv_lora] and ``rope`` [T, rope] if
        there is a layer, ``index_key`` [T, index_dim] if there is an indexer.
      slots: [T] int32, -1 dropped.
      index_slots: those of the index keys, where they differ.
    """
    written: dict[str, Any] = kv_insert(
        _pools(cache), rows, slots, layer=layer, indexer=indexer, index_slots=index_slots
    )
    return dataclasses.replace(cache, **written)


def _pools(cache: KVCache) -> dict[str, jax.Array]:
    return {name: pool for name, pool in vars(cache).items() if isinstance(pool, jax.Array)}


def read_mla(cache: KVCache, layer: jax.Array | int, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dequantised rows of one layer: slots [...] int32 >= 0 -> latent [..., kv_lora], rope [..., rope]."""
    latent, rope = _read(cache.latent, layer, slots), _read(cache.rope, layer, slots)
    if cache.latent_scale is not None:
        latent = codec.dequantize_latent(latent, _read(cache.latent_scale, layer, slots))
    return latent, rope


def mla_fields(cache: KVCache) -> dict[str, Any]:
    """The arrays of a cache that hold its rows, in the order of a packed row (spec/model.md section 4)."""
    fields = {"latent": cache.latent, "latent_scale": cache.latent_scale, "rope": cache.rope}
    return {name: field for name, field in fields.items() if field is not None}


def packed_row_bytes(cache: KVCache) -> int:
    """Bytes of a packed row of one layer."""
    return sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in mla_fields(cache).values())


def store_packed(
    cache: KVCache, layer: jax.Array | int, slots: jax.Array, rows: jax.Array, first: jax.Array | int = 0
) -> KVCache:
    """Writes M of the packed rows [N, row_bytes] uint8, from ``first`` on, to slots [M] int32 of a layer; -1 drops."""
    fields = mla_fields(cache)
    size = cache.latent.shape[1]
    new: dict[str, Any]
    if choose("row_fetch", kernel="triton") == "jnp":
        own = jax.lax.dynamic_slice_in_dim(rows, first, slots.shape[0])
        found = as_fields([own], [pool[0] for pool in fields.values()])
        put: dict[str, Any] = put_rows(fields, layer, slots, dict(zip(fields, found, strict=True)))
        return dataclasses.replace(cache, **put)
    targets = jnp.where(slots >= 0, layer * size + slots, -1)
    flat = [x.reshape(-1, x.shape[-1]) for x in fields.values()]
    written = row_fetch(flat, rows, targets, first + jnp.arange(slots.shape[0], dtype=jnp.int32))
    new = {name: rows.reshape(x.shape) for (name, x), rows in zip(fields.items(), written, strict=True)}
    return dataclasses.replace(cache, **new)


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
