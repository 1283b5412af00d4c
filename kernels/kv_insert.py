"""Writes new tokens' rows into the KV pools, in place: latents, rotary keys and index keys, quantised on the way.

The jnp form is a loop of slice updates, not a scatter: XLA's CPU scatter reads the old row to honour indices out of
range, which makes it copy the pool.
"""

import jax
import jax.numpy as jnp

from glmjax.errors import ConfigError
from glmjax.kernels.check import FLOAT32, FLOATS, INT32, check_arrays, check_place, check_scale
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.kv_rows import INDEX_FIELDS, LATENT_TILE, MLA_FIELDS, Arrays, quantize_index_key, quantize_latent

SCALES = {"latent": (quantize_latent, "latent_scale"), "index_key": (quantize_index_key, "index_scale")}
# L layers of S slots, N indexers of M; a scale is for LATENT_TILE of the latent.
SIZES = {"latent": "L S kv_lora", "latent_scale": f"L S kv_lora/{LATENT_TILE}", "rope": "L S rope"}
SIZES |= {"index_key": "N M index_dim", "index_scale": "N M"}


def kv_insert(
    pools: Arrays,
    rows: Arrays,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    indexer: jax.Array | int | None = None,
    index_slots: jax.Array | None = None,
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
      slots: [T] int32, all different; -1 is dropped.
      layer, indexer: places along the pools' first axes.
      index_slots: [T] int32 for the index keys, where these are not at ``slots`` of their own pools.
      implementation: "jnp", "triton", or "auto" for what suits the device.

    Returns:
      the pools that were written, by field. Under ``jax.jit`` with the pools donated nothing is copied.

    Raises:
      ConfigError: fields are missing or do not fit one another, or the implementation is unknown or cannot take them.
    """
    fields = (MLA_FIELDS if layer is not None else ()) + (INDEX_FIELDS if indexer is not None else ())
    _check(fields, pools, rows, slots, layer, indexer, index_slots)
    pools = {name: pools[name] for name in fields if name in pools}
    chosen = choose("kv_insert", implementation, kernel="triton", obstacle=pool_obstacle(pools))
    if slots.shape[0] == 0:
        return pools
    if chosen == "triton":
        from glmjax.kernels import kv_insert_triton

        return kv_insert_triton.kv_insert(pools, rows, slots, layer, indexer, index_slots)
    stored, written = as_stored(pools, rows), dict[str, jax.Array]()
    index_slots = slots if index_slots is None else index_slots
    for names, place, at in ((MLA_FIELDS, layer, slots), (INDEX_FIELDS, indexer, index_slots)):
        if place is not None:
            held = {name: pools[name] for name in names if name in pools}
            written |= put_rows(held, place, at, stored)
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


def put_rows(pools: Arrays, place: jax.Array | int, slots: jax.Array, rows: Arrays) -> dict[str, jax.Array]:
    """pools[name][place, slots] = rows[name] of each but for slots of -1, in place on a CPU.

    The turn of a row that is dropped writes one again that is not. A turn that left a slot as it is would have to read
    it, and XLA then writes the whole pool anew; to look up which rows are kept takes longer.

    Args:
      pools: [L, S, ...] of as many slots; in another shape they would be copied.
      place: along their first axis.
      slots: [T] int32, all different.
      rows: [T, ...] as the pools store them.
    """
    kept = slots >= 0
    turns, first = jnp.where(jnp.any(kept), slots.shape[0], 0), jnp.argmax(kept).astype(jnp.int32)

    def put(turn: jax.Array, pools: dict[str, jax.Array]) -> dict[str, jax.Array]:
        i = jnp.where(kept[turn], turn, first)
        written = {}
        for name, pool in pools.items():
            row = jax.lax.dynamic_slice_in_dim(rows[name], i, 1)[None]
            start = [jnp.asarray(place, jnp.int32), slots[i], *[jnp.int32(0)] * (pool.ndim - 2)]
            written[name] = jax.lax.dynamic_update_slice(pool, row, start)
        return written

    return jax.lax.fori_loop(0, turns, put, dict(pools)) if slots.shape[0] else dict(pools)


def _check(
    fields: tuple[str, ...],
    pools: Arrays,
    rows: Arrays,
    slots: jax.Array,
    layer: jax.Array | int | None,
    indexer: jax.Array | int | None,
    index_slots: jax.Array | None,
) -> None:
    if not fields:
        raise ConfigError("kv_insert: give a layer, an indexer, or both")
    if indexer is None and index_slots is not None:
        raise ConfigError("kv_insert: index_slots without an indexer, give both")
    needed = [name for name in fields if not name.endswith("_scale")]
    for kind, arrays in (("pools", pools), ("rows", rows)):
        if missing := [name for name in needed if name not in arrays]:
            raise ConfigError(f"kv_insert: {kind} lack {', '.join(missing)}")
    if homeless := [name for name in rows if name not in fields]:
        raise ConfigError(f"kv_insert: rows {', '.join(homeless)} have no place: give layer or indexer")
    arguments = {}
    for name in fields:
        dtypes = FLOAT32 if name.endswith("_scale") else FLOATS if name == "rope" else (*FLOATS, "uint8")
        arguments[f"pool {name!r}"] = (pools.get(name), SIZES[name], dtypes)
    arguments |= {"slots": (slots, "T", INT32), "index_slots": (index_slots, "T", INT32)}
    for name in fields:
        sizes = " ".join(["T", *SIZES[name].split()[2:]])
        arguments[f"rows {name!r}"] = (rows.get(name), sizes, arguments[f"pool {name!r}"][2])
    scales = [name for name in arguments if "_scale" in name]  # whether these are needed comes next
    check_arrays("kv_insert", arguments, optional=["index_slots", *scales])
    for name, (_, scale) in SCALES.items():
        if name in fields:
            for kind, arrays in (("pool", pools), ("rows", rows)):
                check_scale("kv_insert", f"{kind} {name!r}", arrays[name], repr(scale), arrays.get(scale), ("uint8",))
            if rows[name].dtype == jnp.uint8 and pools[name].dtype != jnp.uint8:
                raise ConfigError(
                    f"kv_insert: rows {name!r} of uint8 go into a pool of uint8, it is {pools[name].dtype}"
                )
    for kind, place, name in (("layer", layer, "latent"), ("indexer", indexer, "index_key")):
        if place is not None:
            check_place("kv_insert", kind, place, pools[name].shape[0])


def pool_obstacle(pools: Arrays) -> str | None:
    """Why the Triton kernel cannot take the arguments."""
    for name, pool in pools.items():
        width = pool.shape[2] if pool.ndim == 3 else 1
        if name == "latent" and width % LATENT_TILE:
            return f"a latent of {width} is no multiple of {LATENT_TILE}"
        if name != "latent" and width & (width - 1):
            return f"{name} of {width} is no power of two"
    return None
