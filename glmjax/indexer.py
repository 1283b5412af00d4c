"""The lightning indexer: scores every cached key and picks the top-k positions each query attends to.

The context streams by in chunks of whole blocks and queries are handled in tiles, so memory does not grow
with the context and work follows the longest request of the batch, not the width of its block table.

Under decode context parallelism each rank scores the keys that it holds, and the ranks' best are merged into the exact
top-k; or, if the step brings the keys to the queries, every rank scores all keys of its own queries.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glmjax import codec
from glmjax.cache import KVCache, pack_index_key, read_index_keys, stored_bits, stored_values
from glmjax.config import GLMConfig
from glmjax.gathered import KV, read_gathered_keys
from glmjax.kernels.index_scores import index_scores
from glmjax.kernels.topk import merge_top_k
from glmjax.layers import apply_rope, layer_norm, linear
from glmjax.params import IndexerParams
from glmjax.sharding import cp
from glmjax.sharding.merge import merge_candidates
from glmjax.share import Share

KEY_NORM_EPS = 1e-6  # the indexer's own, not the model's (spec/model.md 2.4)
CONTEXT_CHUNK = 2048  # keys of a chunk at most
CHUNK_KEYS = 16384  # keys of a chunk at most, over all requests
TILE_SCORES = 1 << 18  # scores held at once: 1 MiB

Keys = tuple[jax.Array, jax.Array | None, jax.Array]  # [R, C, d], scales [R, C] or None, positions [C]
Best = tuple[jax.Array, jax.Array]  # scores float32 and positions int32, [R, q, K]


@dataclasses.dataclass(frozen=True)
class KeySource:
    """A context's index keys, a chunk at a time.

    Attributes:
      chunk: keys of a chunk.
      read: chunk number -> the keys of every request, their scales and their positions, ascending.
      count: how many keys there are of a context of so many tokens.
      position: i -> the position of the i-th key.
    """

    chunk: int
    read: Callable[[jax.Array], Keys]
    count: Callable[[jax.Array], jax.Array]
    position: Callable[[jax.Array], jax.Array]


def select(
    weights: IndexerParams,
    config: GLMConfig,
    kv: KV,
    indexer: jax.Array | int,
    x: jax.Array,
    query_latent: jax.Array,
    angles: jax.Array,
    share: Share,
) -> tuple[KV, jax.Array]:
    """Writes the new index keys and selects each query's positions.

    Args:
      weights: one indexer's weights.
      indexer: which, in the cache's stack.
      x: [T, D] hidden states after input_layernorm, T = r * q.
      query_latent: [T, q_lora], normed, shared with MLA.
      angles: [T, rope / 2].

    Returns:
      the KV and the selected positions [T, K] int32, -1 for missing; K = index_topk.
    """
    heads, dim, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    interleaved = config.indexer_rope_interleave

    def rotate(y: jax.Array, at: jax.Array) -> jax.Array:
        turned = apply_rope(y[..., :rope], at, interleaved=interleaved)
        return jnp.concatenate([turned, y[..., rope:]], axis=-1)

    key = layer_norm(linear(x, weights.key), weights.key_norm_weight, weights.key_norm_bias, KEY_NORM_EPS)
    kv = kv.write(indexer, pack_index_key(kv.cache, rotate(key, angles)), share)

    query = rotate(linear(query_latent, weights.query).reshape(-1, heads, dim), angles[:, None])
    head_weights = (
        jnp.matmul(x.astype(jnp.float32), weights.head_weights.T, precision="highest") * (dim * heads) ** -0.5
    )  # [T, heads]
    if kv.cache.quantized:
        query, query_scale = codec.quantize_index_key(query)
        head_weights = head_weights * query_scale

    positions, tables = share.positions, share.block_tables
    if share.kv == "query_gather":
        query = stored_values(share.gather_queries(stored_bits(query)))  # fp8 queries travel as bytes
        head_weights = share.gather_queries(head_weights)
        positions, tables = share.query_positions, share.query_tables
    if kv.cache.quantized:
        query = query.astype(jnp.float32)
    R, Q = positions.shape
    blocks = max(1, min(CONTEXT_CHUNK, CHUNK_KEYS // R) // share.block_size)
    if kv.view is None:
        source = _own_keys(kv.cache, indexer, tables, blocks, share)
    else:
        source = _gathered_keys(kv.view, blocks, share)
    best = _scan_context(
        config.index_topk, source, query.reshape(R, Q, heads, dim), head_weights.reshape(R, Q, heads), positions
    )
    if share.kv == "query_gather":
        best = merge_candidates(*share.gather_candidates(best), config.index_topk)
    return kv, best[1].reshape(-1, config.index_topk)


def _own_keys(cache: KVCache, indexer: jax.Array | int, tables: jax.Array, blocks: int, share: Share) -> KeySource:
    """The keys in this device's pool: of every position, or of those of its DCP rank."""
    layout, rank = share.layout, share.shard_rank
    blocks = min(blocks, tables.shape[1])
    chunk = blocks * share.block_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))

    def position(i: jax.Array) -> jax.Array:
        return cp.global_position(i, layout.dcp, rank, layout.interleave) if layout.dcp > 1 else i

    def read(i: jax.Array) -> Keys:
        part = jax.lax.dynamic_slice_in_dim(tables, i * blocks, blocks, axis=1)
        keys, scale = read_index_keys(cache, indexer, part, share.block_size)
        return keys, scale, position(i * chunk + jnp.arange(chunk, dtype=jnp.int32))

    return KeySource(
        chunk, read, lambda context: cp.local_length(context, layout.dcp, rank, layout.interleave), position
    )


def _gathered_keys(view: KVCache, blocks: int, share: Share) -> KeySource:
    """The keys of every position, in the gathered copy."""
    blocks = max(1, min(blocks // share.layout.dcp, share.block_tables.shape[1]))
    chunk = blocks * share.block_size * share.layout.dcp

    def read(i: jax.Array) -> Keys:
        positions = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return *read_gathered_keys(view, positions, share), positions

    return KeySource(chunk, read, lambda context: context, lambda i: i)


def _scan_context(k: int, source: KeySource, query: jax.Array, weights: jax.Array, positions: jax.Array) -> Best:
    """[R, Q, heads, dim] queries at positions [R, Q], -1 for padding -> each one's best keys of the source."""
    R, Q = positions.shape
    tile = max(1, min(Q, TILE_SCORES // (R * source.chunk)))
    if tile >= Q:
        return _select_tile(k, source, query, weights, positions)
    tiles = -(-Q // tile)

    def cut(x: jax.Array, value: int = 0) -> jax.Array:
        pad = [(0, 0), (0, tiles * tile - Q)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=value)
        return jnp.moveaxis(x.reshape(R, tiles, tile, *x.shape[2:]), 1, 0)

    chosen = jax.lax.map(
        lambda part: _select_tile(k, source, *part), (cut(query), cut(weights), cut(positions, -1))
    )  # [tiles, R, tile, K]
    scores, places = (jnp.moveaxis(x, 0, 1).reshape(R, tiles * tile, -1)[:, :Q] for x in chosen)
    return scores, places


def _select_tile(k: int, source: KeySource, query: jax.Array, weights: jax.Array, positions: jax.Array) -> Best:
    """One tile of queries [R, q, ...] against the whole context, a chunk at a time."""
    R, q = positions.shape
    context = jnp.max(positions) + 1

    def everything(_: None) -> Best:
        """At most k positions are visible: all are selected, no score is needed."""
        every = jnp.broadcast_to(source.position(jnp.arange(k, dtype=jnp.int32)), (R, q, k))
        seen = every <= positions[..., None]
        return jnp.where(seen, 0.0, -jnp.inf), jnp.where(seen, every, -1)

    def best(_: None) -> Best:
        def add(i: jax.Array, carry: Best) -> Best:
            keys, scale, places = source.read(i)
            scores = index_scores(query, weights, keys, scale, positions, places)
            return merge_top_k(*carry, scores, places)

        start = (jnp.full((R, q, k), -jnp.inf), jnp.full((R, q, k), -1, jnp.int32))
        return jax.lax.fori_loop(0, (source.count(context) + source.chunk - 1) // source.chunk, add, start)

    return jax.lax.cond(context <= k, everything, best, None)
