"""The lightning indexer as one operation: each query's keys of the highest score, without the scores' matrix.

On a Hopper GPU one kernel scores and selects (``index_topk_triton``). The jnp form, ``scan_context``, walks over tiles
of queries and, for each, over chunks of the context with a running selection: memory does not grow with the context,
and work follows what the tile's queries see, not the width of their block tables. Chunks are scored one by one, the
last in pieces, and the best are selected from many at once, since a selection has a cost of its own.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glmjax.kernels import few_rows
from glmjax.kernels.check import check_count
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.index_limits import FP8, KEY_BLOCK, k_obstacle, key_obstacle
from glmjax.kernels.index_scores import check_pool, flat_pool, index_scores, read_blocks
from glmjax.kernels.topk import best_of, in_order, merge_top_k

CONTEXT_CHUNK = 2048  # keys of a chunk at most
CHUNK_KEYS = 32768  # keys of a chunk at most, over all requests
PIECES = 8  # of a chunk; of the last, those that are seen are read
TILE_SCORES = 1 << 18  # scores of a chunk: 1 MiB
TILE_QUERIES = 128  # of a request in a tile at most: tiles of a prompt's beginning see less, some no more than k
FIRST, RUN = (1024, 4096), 12  # what the best are selected from at once: keys of short contexts, chunks of long ones

Keys = tuple[jax.Array, jax.Array | None, jax.Array]  # [R, C, d], scales [R, C] or None, positions [C]
Best = tuple[jax.Array, jax.Array]  # scores float32 and positions int32, [R, q, K]


@dataclasses.dataclass(frozen=True)
class KeySource:
    """A context's index keys, a chunk or a piece of one at a time.

    Attributes:
      chunk, piece: keys of each; a chunk has whole pieces.
      size: keys of the longest context, in whole pieces.
      read: (first, count) -> so many keys of every request, their scales and their positions, ascending.
      count: how many keys there are of a context of so many tokens.
      position: i -> the position of the i-th key.
    """

    chunk: int
    piece: int
    size: int
    read: Callable[[jax.Array, int], Keys]
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
      ConfigError: arrays do not fit one another, bytes have no scale, or the implementation is unknown, or asked for
        and not for these arguments.
    """
    check_pool("index_top_k", query, head_weights, index_key, index_scale, indexer, tables, visible, block_size)
    check_count("index_top_k", "k", k)
    if not (visible.size and tables.size):
        return jnp.full((*visible.shape, k), -jnp.inf), jnp.full((*visible.shape, k), -1, jnp.int32)
    blocks, keys, scale = flat_pool(index_key, index_scale, indexer, tables, block_size)
    if has_kernel(query, keys, scale, k, block_size, implementation):
        from glmjax.kernels.index_topk_triton import index_top_k_triton

        assert scale is not None  # else there is an obstacle
        return index_top_k_triton(query, head_weights, keys, scale, blocks, visible, k)
    if query.dtype == FP8:
        query = query.astype(jnp.float32)
    visible = jnp.minimum(visible, blocks.shape[1] * block_size)
    chunk, piece = chunk_keys(query.shape[0], block_size, blocks.shape[1])
    blocks = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % (piece // block_size))))
    stored = index_key.reshape(keys.shape)

    def read(first: jax.Array, count: int) -> Keys:
        here = jax.lax.dynamic_slice_in_dim(blocks, first // block_size, count // block_size, axis=1)
        positions = first + jnp.arange(count, dtype=jnp.int32)
        return *read_blocks(stored, scale, here, block_size), positions

    source = KeySource(chunk, piece, blocks.shape[1] * block_size, read, lambda context: context, lambda i: i)
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


def chunk_keys(requests: int, block_size: int, blocks: int) -> tuple[int, int]:
    """Keys of a chunk of a context of so many blocks, and of a piece of it: whole blocks, and whole pieces."""
    chunk = max(1, min(blocks, min(CONTEXT_CHUNK, CHUNK_KEYS // requests) // block_size))
    piece = -(-chunk // PIECES)
    return chunk // piece * piece * block_size, piece * block_size


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
        visible = every <= positions[..., None]
        return jnp.where(visible, 0.0, -jnp.inf), jnp.where(visible, every, -1)

    seen, run = source.count(context), RUN * source.chunk

    def score(start: jax.Array | int, size: int) -> jax.Array:
        """Scores [R, q, size] of the keys from one on, -inf for those that no query sees."""
        here = jnp.clip(seen - start, 0, size)
        chunks = here // source.chunk
        pieces = (here % source.chunk + source.piece - 1) // source.piece

        def add(count: int, first: jax.Array | int, i: jax.Array, scores: jax.Array) -> jax.Array:
            at = first + few_rows.loop_on_all_cores(i) * count
            keys, scale, places = source.read(start + at, count)
            part = index_scores(query, weights, keys, scale, positions, places)
            return jax.lax.dynamic_update_slice_in_dim(scores, part, at, axis=2)

        scores = jnp.full((R, q, size), -jnp.inf)
        if size >= source.chunk:
            scores = jax.lax.fori_loop(0, chunks, functools.partial(add, source.chunk, 0), scores)
        return jax.lax.fori_loop(0, pieces, functools.partial(add, source.piece, chunks * source.chunk), scores)

    def best_of_first(size: int) -> Best:
        places = source.position(jnp.arange(size, dtype=jnp.int32))
        return best_of(score(0, size), jnp.broadcast_to(places, (R, q, size)), k)

    def best_of_runs() -> Best:
        def add(i: jax.Array, best: Best) -> Best:
            places = source.position(i * run + jnp.arange(run, dtype=jnp.int32))
            return merge_top_k(*best, score(i * run, run), places)

        none = (jnp.full((R, q, k), -jnp.inf), jnp.full((R, q, k), -1, jnp.int32))
        return jax.lax.fori_loop(0, (seen + run - 1) // run, add, none)

    # The first way that is enough for the keys that the queries see.
    sizes = sorted({-(-n // source.piece) * source.piece for n in FIRST})
    sizes = [n for n in sizes if n < source.size] + [source.size] * (source.size <= run)
    ways: list[Callable[[], Best]] = [functools.partial(best_of_first, n) for n in sizes]
    if source.size > run:
        ways.append(best_of_runs)
    way = jnp.sum(seen > jnp.asarray(sizes[: len(ways) - 1], jnp.int32), dtype=jnp.int32)
    if not scored:
        ways, way = [everything, *ways], jnp.where(context <= k, 0, 1 + way)
    return jax.lax.switch(way, ways)
