"""The lightning indexer: scores every cached key and picks the top-k positions each query attends to.

The context streams by in chunks of whole blocks and queries are handled in tiles, so memory does not grow
with the context and work follows the longest request of the batch, not the width of its block table.
"""

import jax
import jax.numpy as jnp

from glmjax import codec
from glmjax.batch import TokenBatch
from glmjax.cache import KVCache, insert_index_key, read_index_keys
from glmjax.config import GLMConfig
from glmjax.kernels.index_scores import index_scores
from glmjax.kernels.topk import merge_top_k
from glmjax.layers import apply_rope, layer_norm, linear
from glmjax.params import IndexerParams

KEY_NORM_EPS = 1e-6  # the indexer's own, not the model's (spec/model.md 2.4)
CONTEXT_CHUNK = 2048  # keys of a chunk at most
CHUNK_KEYS = 16384  # keys of a chunk at most, over all requests
TILE_SCORES = 1 << 18  # scores held at once: 1 MiB


def select(
    weights: IndexerParams,
    config: GLMConfig,
    cache: KVCache,
    indexer: jax.Array | int,
    x: jax.Array,
    query_latent: jax.Array,
    angles: jax.Array,
    batch: TokenBatch,
) -> tuple[KVCache, jax.Array]:
    """Writes the new index keys and selects each query's positions.

    Args:
      weights: one indexer's weights.
      indexer: which, in the cache's stack.
      x: [T, D] hidden states after input_layernorm, T = R * Q.
      query_latent: [T, q_lora], normed, shared with MLA.
      angles: [T, rope / 2].

    Returns:
      the cache and the selected positions [T, K] int32, -1 for missing; K = index_topk.
    """
    heads, dim, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    interleaved = config.indexer_rope_interleave

    def rotate(y: jax.Array, at: jax.Array) -> jax.Array:
        turned = apply_rope(y[..., :rope], at, interleaved=interleaved)
        return jnp.concatenate([turned, y[..., rope:]], axis=-1)

    key = layer_norm(linear(x, weights.key), weights.key_norm_weight, weights.key_norm_bias, KEY_NORM_EPS)
    cache = insert_index_key(cache, indexer, batch.write_slots.reshape(-1), rotate(key, angles))

    query = rotate(linear(query_latent, weights.query).reshape(-1, heads, dim), angles[:, None])
    head_weights = (
        jnp.matmul(x.astype(jnp.float32), weights.head_weights.T, precision="highest") * (dim * heads) ** -0.5
    )  # [T, heads]
    if cache.quantized:
        query, query_scale = codec.quantize_index_key(query)
        query, head_weights = query.astype(jnp.float32), head_weights * query_scale
    R, Q = batch.tokens.shape
    return cache, _scan_context(
        config, cache, indexer, query.reshape(R, Q, heads, dim), head_weights.reshape(R, Q, heads), batch
    ).reshape(R * Q, -1)


def _scan_context(
    config: GLMConfig, cache: KVCache, indexer: jax.Array | int, query: jax.Array, weights: jax.Array, batch: TokenBatch
) -> jax.Array:
    """[R, Q, heads, dim] queries -> selected positions [R, Q, K]."""
    R, Q = query.shape[:2]
    blocks = max(1, min(CONTEXT_CHUNK, CHUNK_KEYS // R) // batch.block_size)
    blocks = min(blocks, batch.block_tables.shape[1])
    tile = max(1, min(Q, TILE_SCORES // (R * blocks * batch.block_size)))
    positions = jnp.where(batch.valid, batch.positions, -1)
    if tile >= Q:
        return _select_tile(config, cache, indexer, query, weights, positions, batch, blocks)
    tiles = -(-Q // tile)

    def cut(x: jax.Array, value: int = 0) -> jax.Array:
        pad = [(0, 0), (0, tiles * tile - Q)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=value)
        return jnp.moveaxis(x.reshape(R, tiles, tile, *x.shape[2:]), 1, 0)

    chosen = jax.lax.map(
        lambda part: _select_tile(config, cache, indexer, part[0], part[1], part[2], batch, blocks),
        (cut(query), cut(weights), cut(positions, -1)),
    )  # [tiles, R, tile, K]
    return jnp.moveaxis(chosen, 0, 1).reshape(R, tiles * tile, -1)[:, :Q]


def _select_tile(
    config: GLMConfig,
    cache: KVCache,
    indexer: jax.Array | int,
    query: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    batch: TokenBatch,
    blocks: int,
) -> jax.Array:
    """One tile of queries [R, q, ...] against the whole context, ``blocks`` blocks at a time."""
    R, q = positions.shape
    k = config.index_topk
    context = jnp.max(positions) + 1
    chunk = blocks * batch.block_size
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, -batch.block_tables.shape[1] % blocks)))

    def everything(_: None) -> jax.Array:
        """At most k positions are visible: all are selected, no score is needed."""
        every = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (R, q, k))
        return jnp.where(every <= positions[..., None], every, -1)

    def best(_: None) -> jax.Array:
        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            part = jax.lax.dynamic_slice_in_dim(tables, i * blocks, blocks, axis=1)
            keys, scale = read_index_keys(cache, indexer, part, batch.block_size)
            scores = index_scores(query, weights, keys, scale, positions, i * chunk)
            return merge_top_k(*carry, scores, i * chunk)

        start = (jnp.full((R, q, k), -jnp.inf), jnp.full((R, q, k), -1, jnp.int32))
        return jax.lax.fori_loop(0, (context + chunk - 1) // chunk, add, start)[1]

    return jax.lax.cond(context <= k, everything, best, None)
