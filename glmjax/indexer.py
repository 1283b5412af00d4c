"""The lightning indexer: scores every cached key and picks the top-k positions each query attends to.

Under decode context parallelism each rank scores the keys that it holds, and the ranks' best are merged into the exact
top-k; or, if the step brings the keys to the queries, every rank scores all keys of its own queries.
"""

import jax
import jax.numpy as jnp

from glmjax.cache import KVCache, Rows, read_index_keys, stored_bits, stored_values
from glmjax.config import GLMConfig
from glmjax.gathered import KV, gathered_tables, read_gathered_keys
from glmjax.kernels import kv_rows
from glmjax.kernels.index_topk import Best, Keys, KeySource, chunk_keys, has_kernel, index_top_k, scan_context
from glmjax.layers import apply_rope, layer_norm, linear
from glmjax.params import IndexerParams
from glmjax.sharding import cp
from glmjax.sharding.merge import merge_candidates
from glmjax.share import Share

KEY_NORM_EPS = 1e-6  # the indexer's own, not the model's (spec/model.md 2.4)


def new_keys(weights: IndexerParams, config: GLMConfig, x: jax.Array, angles: jax.Array) -> Rows:
    """The index keys of x [T, D], hidden states after input_layernorm: [T, index_dim]."""
    key = layer_norm(linear(x, weights.key), weights.key_norm_weight, weights.key_norm_bias, KEY_NORM_EPS)
    return {"index_key": _rotate(config, key, angles)}


def _rotate(config: GLMConfig, y: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the first dimensions of y [..., index_dim]."""
    rope = config.qk_rope_head_dim
    turned = apply_rope(y[..., :rope], angles, interleaved=config.indexer_rope_interleave)
    return jnp.concatenate([turned, y[..., rope:]], axis=-1)


def select(
    weights: IndexerParams,
    config: GLMConfig,
    kv: KV,
    indexer: jax.Array | int,
    x: jax.Array,
    query_latent: jax.Array,
    angles: jax.Array,
    share: Share,
) -> jax.Array:
    """Selects each query's positions.

    Args:
      weights: one indexer's weights.
      kv: with the index keys of the queries' own positions.
      indexer: which, in the cache's stack.
      x: [T, D] hidden states after input_layernorm, T = r * q.
      query_latent: [T, q_lora], normed, shared with MLA.
      angles: [T, rope / 2].

    Returns:
      positions [T, K] int32, -1 for missing; K = index_topk.
    """
    heads, dim = config.index_n_heads, config.index_head_dim
    query = _rotate(config, linear(query_latent, weights.query).reshape(-1, heads, dim), angles[:, None])
    head_weights = (
        jnp.matmul(x.astype(jnp.float32), weights.head_weights.T, precision="highest") * (dim * heads) ** -0.5
    )  # [T, heads]
    if kv.cache.quantized:
        query, query_scale = kv_rows.quantize_index_key(query)
        head_weights = head_weights * query_scale

    positions, tables = share.positions, share.block_tables
    if share.kv == "query_gather":
        query = stored_values(share.gather_queries(stored_bits(query)))  # fp8 queries travel as bytes
        head_weights = share.gather_queries(head_weights)
        positions, tables = share.query_positions, share.query_tables
    R, Q = positions.shape
    query, head_weights = query.reshape(R, Q, heads, dim), head_weights.reshape(R, Q, heads)
    pool, place = kv.source(indexer)
    if has_kernel(query, pool.index_key, pool.index_scale, config.index_topk, share.block_size):
        best = _best_by_kernel(config.index_topk, pool, place, query, head_weights, positions, tables, share)
    else:
        own = share.kv != "kv_gather"
        source = _own_keys(pool, place, tables, share) if own else _gathered_keys(pool, R, share)
        if kv.cache.quantized:
            query = query.astype(jnp.float32)
        best = scan_context(config.index_topk, source, query, head_weights, positions)
    if share.kv == "query_gather":
        best = merge_candidates(*share.gather_candidates(best), config.index_topk)
    return best[1].reshape(-1, config.index_topk)


def _best_by_kernel(
    k: int,
    pool: KVCache,
    place: jax.Array | int,
    query: jax.Array,
    head_weights: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    share: Share,
) -> Best:
    """The best keys of the pool, or of a gathered copy: of each rank's part of it, and then of all."""
    layout, (R, Q) = share.layout, positions.shape
    if share.kv == "kv_gather":
        tables, ranks = gathered_tables(share), jnp.arange(layout.dcp, dtype=jnp.int32)
    else:
        tables, ranks = tables[None], jnp.asarray(share.shard_rank, jnp.int32).reshape(1)
    parts, by_part = len(ranks), ranks[:, None, None, None]

    def each(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (parts, *x.shape)).reshape(parts * R, *x.shape[1:])

    visible = cp.local_length(positions[None] + 1, layout.dcp, by_part[..., 0], layout.interleave)
    scores, local = index_top_k(
        each(query),
        each(head_weights),
        pool.index_key,
        pool.index_scale,
        place,
        tables.reshape(parts * R, -1),
        jnp.broadcast_to(visible, (parts, R, Q)).reshape(parts * R, Q),
        k,
        block_size=share.block_size,
    )
    local = local.reshape(parts, R, Q, k)
    found = jnp.where(local >= 0, cp.global_position(local, layout.dcp, by_part, layout.interleave), -1)
    if parts == 1:
        return scores, found[0]

    def side_by_side(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(parts, R, Q, k), 0, 2).reshape(R, Q, parts * k)

    return merge_candidates(side_by_side(scores), side_by_side(found), k)


def _own_keys(cache: KVCache, indexer: jax.Array | int, tables: jax.Array, share: Share) -> KeySource:
    """The keys in this device's pool: of every position, or of those of its DCP rank."""
    layout, rank, block_size = share.layout, share.shard_rank, share.block_size
    chunk, piece = chunk_keys(tables.shape[0], block_size, tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (piece // block_size))))

    def position(i: jax.Array) -> jax.Array:
        return cp.global_position(i, layout.dcp, rank, layout.interleave) if layout.dcp > 1 else i

    def read(first: jax.Array, count: int) -> Keys:
        part = jax.lax.dynamic_slice_in_dim(tables, first // block_size, count // block_size, axis=1)
        keys, scale = read_index_keys(cache, indexer, part, block_size)
        return keys, scale, position(first + jnp.arange(count, dtype=jnp.int32))

    def own(context: jax.Array) -> jax.Array:
        return cp.local_length(context, layout.dcp, rank, layout.interleave)

    return KeySource(chunk, piece, tables.shape[1] * block_size, read, own, position)


def _gathered_keys(view: KVCache, requests: int, share: Share) -> KeySource:
    """The keys of every position, in the gathered copy."""
    of_all_ranks, blocks = share.block_size * share.layout.dcp, share.block_tables.shape[1]
    chunk, piece = chunk_keys(requests, of_all_ranks, blocks)
    size = -(-blocks * of_all_ranks // piece) * piece

    def read(first: jax.Array, count: int) -> Keys:
        positions = first + jnp.arange(count, dtype=jnp.int32)
        return *read_gathered_keys(view, positions, share), positions

    return KeySource(chunk, piece, size, read, lambda context: context, lambda i: i)
