"""Writes new tokens' rows into the KV pools, in place: latents, rotary keys and index keys, quantised on the way.

The jnp form is a loop of slice updates, not a scatter: XLA's CPU scatter reads the old row to honour indices out of
range, which makes it copy the pool.
"""

import jax
import jax.numpy as jnp

from glmjax.errors import ConfigError
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.kv_rows import INDEX_FIELDS, LATENT_TILE, MLA_FIELDS, Arrays, quantize_index_key, quantize_latent

SCALES = {"latent": (quantize_latent, "latent_scale"), "index_key": (quantize_index_key, "index_scale")}


def kv_insert(
    pools: Arrays,
    rows: Arrays,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    indexer: jax.Array | int | None = None,
    implementation: Implementation = "auto",
) -> dict[str, jax.Array]:
    """Writes rows at slots of one layer, of one indexer, or of both at once.

    Args:
      pools: fields of a KV cache (spec/model.md section 4): ``latent`` [L, S, kv_lora] and ``index_key``
        [N, S, index_dim] in bf16, float32, or fp8 values as uint8; ``rope`` [L, S, rope]; beside uint8 also
        ``latent_scale`` [L, S, tiles] and ``index_scale`` [N, S] in float32. Those of the layer if ``layer`` is given,
        those of the indexer if ``indexer`` is.
      rows: the same fields without the first two axes: [T, ...]. Latents (normed) and index keys in a floating type are
        rounded to bf16 and quantised where the pool is; as uint8 they are stored as they are, and bring their scales.
      slots: [T] int32, all different; -1 is dropped. The jnp form writes those to the last slot.
      layer, indexer: places along the pools' first axes.
      implementation: "jnp", "triton", or "auto" for what suits the device.

    Returns:
      the pools that were written, by field. Under ``jax.jit`` with the pools donated nothing is copied.

    Raises:
      ConfigError: fields are missing, or the implementation is unknown or cannot take the arguments.
    """
    fields = (MLA_FIELDS if layer is not None else ()) + (INDEX_FIELDS if indexer is not None else ())
    _check(fields, pools, rows)
    pools = {name: pools[name] for name in fields if name in pools}
    chosen = choose("kv_insert", implementation, kernel="triton", obstacle=_obstacle(pools))
    if slots.shape[0] == 0:
        return pools
    if chosen == "triton":
        from glmjax.kernels import kv_insert_triton

        return kv_insert_triton.kv_insert(pools, rows, slots, layer, indexer)
    written = {}
    for name, new in as_stored(pools, rows).items():
        place = layer if name in MLA_FIELDS else indexer
        assert place is not None
        written[name] = write_rows(pools[name], place, slots, new)
    return written


def as_stored(pools: Arrays, rows: Arrays) -> dict[str, jax.Array]:
    """Rows as the pools store them: quantised if the pools are and they are not yet."""
    stored = {}
    for name, new in rows.items():
        pool = pools[name]
        if new.dtype == jnp.uint8 or pool.dtype != jnp.uint8:
            stored[name] = new.astype(pool.dtype)
        else:
            quantize, scale = SCALES[name]
            values, stored[scale] = quantize(new.astype(jnp.bfloat16))
            stored[name] = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return stored


def write_rows(pool: jax.Array, place: jax.Array | int, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """pool[place, slots] = rows, in place; slots of -1 go to the last slot."""
    size = pool.shape[1]
    slots = jnp.where(slots >= 0, slots, size - 1)

    def put(i: jax.Array | int, pool: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(rows, i, 1)[None]
        start = [jnp.asarray(place), slots[i], *[jnp.int32(0)] * (pool.ndim - 2)]
        return jax.lax.dynamic_update_slice(pool, row, start)

    return jax.lax.fori_loop(0, rows.shape[0], put, pool) if rows.shape[0] > 1 else put(0, pool)


def _check(fields: tuple[str, ...], pools: Arrays, rows: Arrays) -> None:
    if not fields:
        raise ConfigError("kv_insert: give a layer, an indexer, or both")
    for values, scale in (("latent", "latent_scale"), ("index_key", "index_scale")):
        if values in fields:
            stored = values in rows and rows[values].dtype == jnp.uint8
            quantized = values in pools and pools[values].dtype == jnp.uint8
            if quantized and scale not in pools:
                raise ConfigError(f"kv_insert: pools need {scale!r} beside {values!r} of uint8")
            if stored != (scale in rows) or stored > quantized:
                raise ConfigError(
                    f"kv_insert: rows {values!r} of uint8 go into a pool of uint8 and bring {scale!r}, others none"
                )
    needed = [name for name in fields if not name.endswith("_scale")]
    for kind, arrays in (("pools", pools), ("rows", rows)):
        if missing := [name for name in needed if name not in arrays]:
            raise ConfigError(f"kv_insert: {kind} lack {', '.join(missing)}")
    if homeless := [name for name in rows if name not in fields]:
        raise ConfigError(f"kv_insert: rows {', '.join(homeless)} have no place: give layer or indexer")


def _obstacle(pools: Arrays) -> str | None:
    """Why the Triton kernel cannot take the arguments."""
    for name, pool in pools.items():
        width = pool.shape[2] if pool.ndim == 3 else 1
        if name == "latent" and width % LATENT_TILE:
            return f"a latent of {width} is no multiple of {LATENT_TILE}"
        if name != "latent" and width & (width - 1):
            return f"{name} of {width} is no power of two"
    return None
