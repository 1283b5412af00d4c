"""The lightning indexer as one operation: each query's keys of the highest score, without the scores' matrix.

On a Hopper GPU one kernel scores and selects (``index_topk_triton``). The jnp form, ``scan_context``, walks over tiles
of queries and, for each, over chunks of the context with a running selection: memory does not grow with the context,
and work follows what the tile's queries see, not the width of their block tables. Chunks are scored one by one, and
their best are selected for many at once, since a selection has a cost of its own.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.index_limits import FP8, KEY_BLOCK, k_obstacle, key_obstacle
from glmjax.kernels.index_scores import flat_pool, index_scores, read_blocks
from glmjax.kernels.topk import best_of, in_order, merge_top_k

CONTEXT_CHUNK = 2048  # keys of a chunk at most
CHUNK_KEYS = 16384  # keys of a chunk at most, over all requests
TILE_SCORES = 1 << 18  # scores of a chunk: 1 MiB
TILE_QUERIES = 128  # of a request in a tile at most: tiles of a prompt's beginning see less, some no more than k
FIRST, RUN = (1, 4), 12  # chunks that are scored before their best are selected: of short contexts, and of long ones

Keys = tuple[jax.Array, jax.Array | None, jax.Array]  # [R, C, d], scales [R, C] or None, positions [C]
Best = tuple[jax.Array, jax.Array]  # scores float32 and positions int32, [R, q, K]


@dataclasses.dataclass(frozen=True)
class KeySource:
    """A context's index keys, a chunk at a time.

    Attributes:
      chunk: keys of a chunk.
      chunks: of the longest context.
      read: chunk number -> the keys of every request, their scales and their positions, ascending.
      count: how many keys there are of a context of so many tokens.
      position: i -> the position of the i-th key.
    """

    chunk: int
    chunks: int
    read: Callable[[jax.Array], Keys]
    count: Callable[[jax.Array], jax.Array]
    position: Callable[[jax.Array], jax.Array]


def index_top_k(
    query: jax.Array,
    head_weights: jax.Array,
    index_key: jax.Array,
    index_scale: jax.Array | None,
    indexer: jax.Array | int,
    tables: jax.Array,
    visible: jax.Array,
    k: int,
    *,
    block_size: int = KEY_BLOCK,
    implementation: Implementation = "auto",
) -> Best:
    """The k best keys of each query (spec/model.md 2.4), ties to the lowest position.

    Args:
      query: [R, Q, H, d] of R requests with Q tokens each, of the keys' type or float8_e4m3fn for keys stored as bytes.
      head_weights: [R, Q, H] float32; every constant factor and the query's own scale are folded in.
      index_key: [N, S, d] keys of N indexers in S slots: numbers, or the bytes of float8_e4m3fn as uint8.
      index_scale: [N, S] float32, or None for unscaled keys.
      indexer: which of the N.
      tables: [R, n] int32 blocks of each request; entries of blocks that no query sees may be any of the pool's.
      visible: [R, Q] int32: a query sees the first so many keys of its request's blocks.
      k: how many.
      block_size: slots of a block.
      implementation: "auto", "jnp" or "triton".

    Returns:
      scores [R, Q, k] float32 and positions among the request's keys [R, Q, k] int32, ascending; missing ones (-inf,
      -1) last.

    Raises:
      ConfigError: the implementation is unknown, or asked for and not for these arguments.
    """
    blocks, keys, scale = flat_pool(index_key, index_scale, indexer, tables, block_size)
    if has_kernel(query, keys, scale, k, block_size, implementation):
        from glmjax.kernels.index_topk_triton import index_top_k_triton

        assert scale is not None  # else there is an obstacle
        return index_top_k_triton(query, head_weights, keys, scale, blocks, visible, k)
    if query.dtype == FP8:
        query = query.astype(jnp.float32)
    per_chunk = min(chunk_blocks(query.shape[0], block_size), blocks.shape[1])
    blocks = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % per_chunk)))
    chunk = per_chunk * block_size
    stored = index_key.reshape(keys.shape)

    def read(i: jax.Array) -> Keys:
        here = jax.lax.dynamic_slice_in_dim(blocks, i * per_chunk, per_chunk, axis=1)
        positions = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return *read_blocks(stored, scale, here, block_size), positions

    source = KeySource(chunk, blocks.shape[1] // per_chunk, read, lambda context: context, lambda i: i)
    return in_order(*scan_context(k, source, query, head_weights, visible - 1, scored=True))


def has_kernel(
    query: jax.Array,
    keys: jax.Array,
    scale: jax.Array | None,
    k: int,
    block_size: int,
    implementation: Implementation = "auto",
) -> bool:
    """Whether ``index_top_k`` runs its GPU kernel: queries [R, Q, H, d], keys [..., d] as numbers or fp8's bytes."""
    if keys.dtype == jnp.uint8:
        keys = jax.ShapeDtypeStruct(keys.shape, FP8)  # type: ignore[assignment]
    obstacle = key_obstacle(query, keys, scale, block_size) or k_obstacle(k)
    return choose("index_top_k", implementation, kernel="triton", obstacle=obstacle) == "triton"


def chunk_blocks(requests: int, block_size: int) -> int:
    """Blocks of a chunk of the context."""
    return max(1, min(CONTEXT_CHUNK, CHUNK_KEYS // requests) // block_size)


def scan_context(
    k: int, source: KeySource, query: jax.Array, weights: jax.Array, positions: jax.Array, *, scored: bool = False
) -> Best:
    """[R, Q, heads, dim] queries at positions [R, Q], -1 for padding -> each one's best keys of the source.

    Args:
      scored: give every key its score; else all have 0 where none of the queries sees more than k.
    """
    R, Q = positions.shape
    tiles = -(-Q // max(1, min(TILE_QUERIES, TILE_SCORES // (R * source.chunk))))
    if tiles == 1:
        return _select_tile(k, source, query, weights, positions, scored)
    tile = -(-Q // tiles)

    def cut(x: jax.Array, value: int = 0) -> jax.Array:
        pad = [(0, 0), (0, tiles * tile - Q)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=value)
        return jnp.moveaxis(x.reshape(R, tiles, tile, *x.shape[2:]), 1, 0)

    def select(part: tuple[jax.Array, jax.Array, jax.Array]) -> Best:
        return _select_tile(k, source, *part, scored)

    chosen = jax.lax.map(select, (cut(query), cut(weights), cut(positions, -1)))  # [tiles, R, tile, K]
    scores, places = (jnp.moveaxis(x, 0, 1).reshape(R, tiles * tile, -1)[:, :Q] for x in chosen)
    return scores, places


def _select_tile(
    k: int, source: KeySource, query: jax.Array, weights: jax.Array, positions: jax.Array, scored: bool
) -> Best:
    """One tile of queries [R, q, ...] against the whole context, a chunk at a time."""
    R, q = positions.shape
    context = jnp.max(positions) + 1

    def everything() -> Best:
        """At most k positions are visible: all are selected, no score is needed."""
        every = jnp.broadcast_to(source.position(jnp.arange(k, dtype=jnp.int32)), (R, q, k))
        seen = every <= positions[..., None]
        return jnp.where(seen, 0.0, -jnp.inf), jnp.where(seen, every, -1)

    chunks = (source.count(context) + source.chunk - 1) // source.chunk

    def score(start: jax.Array | int, count: int) -> jax.Array:
        """Scores [R, q, count * chunk] of chunks from one on, -inf for those that no query sees."""

        def add(i: jax.Array | int, scores: jax.Array) -> jax.Array:
            keys, scale, places = source.read(jnp.int32(start + i))
            part = index_scores(query, weights, keys, scale, positions, places)
            return jax.lax.dynamic_update_slice_in_dim(scores, part, i * source.chunk, axis=2)

        none = jnp.full((R, q, count * source.chunk), -jnp.inf)
        return jax.lax.fori_loop(0, jnp.minimum(count, chunks - start), add, none) if count > 1 else add(0, none)

    def best_of_first(count: int) -> Best:
        places = source.position(jnp.arange(count * source.chunk, dtype=jnp.int32))
        return best_of(score(0, count), jnp.broadcast_to(places, (R, q, *places.shape)), k)

    def best_of_runs() -> Best:
        held = RUN * source.chunk

        def add(run: jax.Array, best: Best) -> Best:
            places = source.position(run * held + jnp.arange(held, dtype=jnp.int32))
            return merge_top_k(*best, score(run * RUN, RUN), places)

        none = (jnp.full((R, q, k), -jnp.inf), jnp.full((R, q, k), -1, jnp.int32))
        return jax.lax.fori_loop(0, (chunks + RUN - 1) // RUN, add, none)

    # The first way that is enough for the chunks that the queries see.
    counts = [n for n in FIRST if n < source.chunks] + [source.chunks] * (source.chunks <= RUN)
    ways: list[Callable[[], Best]] = [functools.partial(best_of_first, n) for n in counts]
    if source.chunks > RUN:
        ways.append(best_of_runs)
    way = jnp.sum(chunks > jnp.asarray(counts[: len(ways) - 1], jnp.int32), dtype=jnp.int32)
    if not scored:
        ways, way = [everything, *ways], jnp.where(context <= k, 0, 1 + way)
    return jax.lax.switch(way, ways)
