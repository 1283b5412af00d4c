"""Absorbed MLA over selected rows of the KV pool: one latent row serves all heads (spec/model.md 2.2, 2.5).

``sparse_mla`` is the jnp form, which gets its rows from a callback; ``sparse_mla_from_pool`` reads them from the pool,
on a Hopper GPU by its own kernel (``sparse_mla_hopper``).

The jnp form walks over tiles of queries and, within a tile, over chunks of the selected rows with an online softmax, so
that its temporaries stay in cache and rows that do not exist (short contexts) cost nothing, or little.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from glmjax.kernels.check import FLOATS, INT32, check_arrays, check_place
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.kv_rows import FP8, LATENT_TILE
from glmjax.kernels.sparse_mla_shapes import attention_obstacle, check_arguments

GatherRows = Callable[[jax.Array], tuple[jax.Array, jax.Array]]

ROW_CHUNK = 512  # selected rows handled at once
WIDTHS, WIDTH_STEP = 4, 64  # a tile takes the quarters of a single chunk that it needs, whole multiples of 64 rows
TILE_ELEMENTS = 1 << 20  # gathered elements of a tile: 4 MiB in float32


def sparse_mla(
    query_latent: jax.Array,
    query_rope: jax.Array,
    rows: jax.Array,
    gather: GatherRows,
    *,
    scale: float,
    latent_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over its own selected rows.

    Args:
      query_latent: [T, H, kv_lora], the query multiplied by W_UK.
      query_rope: [T, H, rope].
      rows: [T, K] int32 rows of the pool; -1 is skipped. Work follows the last that is not.
      gather: rows [...] int32 (all >= 0) -> latents [..., kv_lora] and rope keys [..., rope], dequantised.
      scale: softmax scale.
      latent_dim: kv_lora.

    Returns:
      output [T, H, kv_lora] in the query's dtype, zero where no row is selected, and the log-sum-exp [T, H]
      float32 (base e), -inf there.

    Raises:
      ConfigError: arrays do not fit one another.
    """
    check_arrays(
        "sparse_mla",
        {
            "query_latent": (query_latent, f"T H {latent_dim}", FLOATS),
            "query_rope": (query_rope, "T H rope", FLOATS),
            "rows": (rows, "T K", INT32),
        },
    )
    T, K = rows.shape
    if T * K == 0:
        return jnp.zeros_like(query_latent), jnp.full(query_latent.shape[:2], -jnp.inf, jnp.float32)
    chunk = min(K, ROW_CHUNK)
    width = latent_dim + query_rope.shape[-1]
    tile = max(1, TILE_ELEMENTS // (chunk * width))
    tile = min(T, 1 << (tile.bit_length() - 1))  # a power of two divides most shapes, and then nothing is padded
    if tile >= T:
        return _tile(query_latent, query_rope, rows, gather, scale, chunk)
    tiles = -(-T // tile)

    def pad(x: jax.Array, value: int = 0) -> jax.Array:
        extra = [(0, tiles * tile - T)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, extra, constant_values=value).reshape(tiles, tile, *x.shape[1:])

    step = -(-chunk // (WIDTHS * WIDTH_STEP)) * WIDTH_STEP

    def attend(tile: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        latent, rope, rows = tile

        def take(width: int) -> Callable[[], tuple[jax.Array, jax.Array]]:
            return lambda: _tile(latent, rope, rows[:, :width], gather, scale, min(width, chunk))

        if chunk < K or step >= K:
            return take(K)()
        # The tiles of a prompt's beginning have fewer rows.
        widths = [take(width) for width in (*range(step, K, step), K)]
        return jax.lax.switch(jnp.maximum(_used(rows) - 1, 0) // step, widths)

    out, lse = jax.lax.map(attend, (pad(query_latent), pad(query_rope), pad(rows, -1)))
    return out.reshape(tiles * tile, *out.shape[2:])[:T], lse.reshape(tiles * tile, -1)[:T]


def sparse_mla_from_pool(
    query_latent: jax.Array,
    query_rope: jax.Array,
    latent: jax.Array,
    latent_scale: jax.Array | None,
    rope: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    *,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over its own selected rows of one layer of the KV pool.

    Args:
      query_latent: [T, H, kv_lora], the query multiplied by W_UK.
      query_rope: [T, H, rope].
      latent: [L, S, kv_lora] bf16 or float32, or uint8 that are float8_e4m3fn values.
      latent_scale: [L, S, kv_lora / 128] float32, or None for latents that are not quantised.
      rope: [L, S, rope].
      layer: of the pools.
      rows: [T, K] int32 slots; -1 is skipped. Work follows the last that is not.
      scale: softmax scale.
      implementation: "auto", or "jnp" or "hopper" to insist.

    Returns:
      output [T, H, kv_lora] in the query's dtype, zero where no row is selected, and the log-sum-exp [T, H]
      float32 (base e), -inf there.

    Raises:
      ConfigError: arrays do not fit one another, bytes have no scale, or "hopper" is insisted on and the kernel is not
        for these shapes or types.
    """
    arrays = (query_latent, query_rope, latent, latent_scale, rope)
    chosen = choose("sparse_mla", implementation, kernel="hopper", obstacle=attention_obstacle(*arrays, rows))
    check_arguments(*arrays, rows)
    check_place("sparse_mla", "layer", layer, latent.shape[0])
    if chosen == "hopper" and rows.size:
        from glmjax.kernels.sparse_mla_hopper import sparse_mla_hopper

        return sparse_mla_hopper(*arrays, layer, rows, scale=scale)

    def gather(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = _read(latent, layer, slots)
        if latent_scale is not None:
            found = jax.lax.bitcast_convert_type(found, FP8).astype(jnp.float32)
            found *= jnp.repeat(_read(latent_scale, layer, slots), LATENT_TILE, axis=-1)[..., : found.shape[-1]]
        return found, _read(rope, layer, slots)

    return sparse_mla(query_latent, query_rope, rows, gather, scale=scale, latent_dim=latent.shape[-1])


def _read(pool: jax.Array, layer: jax.Array | int, slots: jax.Array) -> jax.Array:
    """pool[layer, slots], for slots >= 0."""
    layers, size, width = pool.shape
    return pool.reshape(layers * size, width).at[layer * size + slots].get(mode="promise_in_bounds")


def _tile(
    query_latent: jax.Array, query_rope: jax.Array, rows: jax.Array, gather: GatherRows, scale: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    t, H, latent_dim = query_latent.shape
    chunks = -(-rows.shape[1] // chunk)
    if chunks == 1:
        scores, latent = _scores(query_latent, query_rope, rows, gather, scale)
        weights, lse = _softmax(scores)
        out = _weighted(weights, latent, lse)
        return out.astype(query_latent.dtype), lse

    rows = jnp.pad(rows, [(0, 0), (0, chunks * chunk - rows.shape[1])], constant_values=-1)
    used = _used(rows)

    def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        part = jax.lax.dynamic_slice_in_dim(rows, i * chunk, chunk, axis=1)
        scores, latent = _scores(query_latent, query_rope, part, gather, scale)
        weights, part_lse = _softmax(scores)
        return merge_by_lse(out, lse, _weighted(weights, latent, part_lse), part_lse)

    start = (jnp.zeros((t, H, latent_dim), jnp.float32), jnp.full((t, H), -jnp.inf))
    out, lse = jax.lax.fori_loop(0, (used + chunk - 1) // chunk, add, start)
    return out.astype(query_latent.dtype), lse


def _used(rows: jax.Array) -> jax.Array:
    """How many columns of rows [t, K] there are up to the last that is not -1."""
    return jnp.max(jnp.where(rows >= 0, jnp.arange(1, rows.shape[1] + 1), 0))


def _scores(
    query_latent: jax.Array, query_rope: jax.Array, rows: jax.Array, gather: GatherRows, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Scaled scores [t, H, k] float32 (-inf for row -1) and the gathered latents [t, k, kv_lora].

    For a missing row one of the query's own is read again: another request's row may hold a NaN, which a weight of zero
    does not undo.
    """
    own = jnp.maximum(jnp.max(rows, axis=1, keepdims=True), 0)
    latent, rope = gather(jnp.where(rows >= 0, rows, own))
    latent, rope = latent.astype(query_latent.dtype), rope.astype(query_rope.dtype)
    f32 = jnp.float32
    scores = jnp.einsum("thd,tkd->thk", query_latent, latent, preferred_element_type=f32)
    scores += jnp.einsum("thd,tkd->thk", query_rope, rope, preferred_element_type=f32)
    return jnp.where(rows[:, None] >= 0, scores * scale, -jnp.inf), latent


def _weighted(weights: jax.Array, latent: jax.Array, lse: jax.Array) -> jax.Array:
    """Sum of the latents [t, k, d] by weight [t, H, k], float32; zero where no row is selected."""
    out = jnp.einsum("thk,tkd->thd", weights, latent, preferred_element_type=jnp.float32)
    return jnp.where(lse[..., None] > -jnp.inf, out, 0)


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights over the last axis and their log-sum-exp; a row of -inf gives zero weights and -inf."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)[..., 0]
    return weights / jnp.where(total > 0, total, 1), lse


def merge_by_lse(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax-weighted union of two partial attentions: outputs [..., d], log-sum-exps [...]."""
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(lse > -jnp.inf, lse, 0)
    weight_a, weight_b = jnp.exp(lse_a - safe), jnp.exp(lse_b - safe)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse
