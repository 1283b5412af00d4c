"""The lightning indexer on Hopper in one pass, in Triton: keys stream past, scores stay in registers, the best stay.

A program takes a tile of a request's queries and a part of its context. It multiplies a block of 64 FP8 keys with all
the (query, head) pairs of the tile by wgmma, while the next blocks are copied to shared memory, and sums over heads in
registers. Scores that reach the query's threshold enter its list of candidates (``candidates_triton``).

Why one kernel: a score matrix, even a chunk of it at a time, costs four bytes out and four back for each key and query.
With eight queries to a tile that is half as many again as their keys' 132 bytes; lists take the few per cent that enter
them. A first pass that only counts scores would read and multiply all keys twice. In issued instructions a
multiprocessor needs 760 cycles for 64 keys and 8 queries, against 530 in ``index_scores_hopper`` (the products alone
take 512) and another 510 to select from the scores. Why Triton: Mosaic GPU cannot store a register at an address that
depends on its lane.
"""

# mypy: allow-untyped-defs
# (Triton's language has types of its own.)

import dataclasses
import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from glmjax.errors import ConfigError
from glmjax.kernels.candidates_triton import (
    APART_BYTES,
    LOWEST,
    Parts,
    append_columns,
    floors_of,
    make_room,
    next_power_of_two,
    nothing_published,
    part_size_of,
    publish,
)
from glmjax.kernels.index_limits import FP8, HEAD_DIM, KEY_BLOCK, MAX_K, k_obstacle, key_obstacle
from glmjax.kernels.merge_triton import merge_lists
from glmjax.kernels.report_case import Case
from glmjax.kernels.triton_call import triton_call


@triton.jit
def index_top_k_of_parts(
    query_ptr, weights_ptr, pool_ptr, scale_ptr, tables_ptr, visible_ptr, extents_ptr, published_ptr,
    tiles, blocks, parts, early,
    lists_ptr, counts_ptr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, PARTS_PADDED: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    REFRESH: tl.constexpr,
):  # fmt: skip
    """Fills the lists of one part of the context of one tile of queries. Grid (tiles of all requests, parts)."""
    part = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a chunk's last queries see most: they start first
    tables_ptr += (tile // tiles) * blocks
    row = tile.to(tl.int64) * QUERIES  # of the tile's first query
    lists_ptr = lists_ptr.to(tl.pointer_type(tl.int64)) + (row * parts + part) * CAPACITY
    published_ptr += row * parts
    n, d, i, q = tl.arange(0, QUERIES * HEADS), tl.arange(0, DIM), tl.arange(0, BLOCK), tl.arange(0, QUERIES)
    query = tl.load(query_ptr + (row * HEADS + n)[:, None] * DIM + d)
    weights = tl.load(weights_ptr + row * HEADS + n)
    visible = tl.load(visible_ptr + row + q)
    extent = tl.load(extents_ptr + row)
    part_size = part_size_of(extent, parts, BLOCK)
    first = part * part_size
    end = tl.minimum(first + part_size, extent)
    # How many of a block's keys enter each query's list, a byte each: at most 64.
    shift = q.to(tl.int64) * 8 if QUERIES > 4 else q * 8

    counts, leasts, at = tl.zeros((QUERIES,), tl.int32), tl.full((QUERIES,), LOWEST, tl.float32), first
    due = first + early
    while at < end:
        for j in range(QUERIES):
            count, least = tl.sum(tl.where(q == j, counts, 0), 0), tl.sum(tl.where(q == j, leasts, 0.0), 0)
            list_ptr = lists_ptr + j * parts * CAPACITY
            count, least = make_room(list_ptr, count, least, (CAPACITY - K) // 4, K, CAPACITY, STEP)
            counts, leasts = tl.where(q == j, count, counts), tl.where(q == j, least, leasts)
        # So far there is room whatever the scores are: the loop below does not ask, and its loads run ahead.
        stop = tl.minimum(end, at + (CAPACITY - tl.max(counts, 0)) // BLOCK * BLOCK)
        if PARTS_PADDED > 1:
            stop = tl.minimum(stop, due)
        block = tl.load(tables_ptr + at // BLOCK)
        for start in tl.range(at, stop, BLOCK, num_stages=STAGES):
            slot = block.to(tl.int64) * BLOCK
            keys = tl.load(pool_ptr + slot * DIM + (i * DIM)[:, None] + d)
            scale = tl.load(scale_ptr + slot + i)
            block = tl.load(tables_ptr + (start + BLOCK) // BLOCK, mask=start + BLOCK < end, other=0)
            if (PARTS_PADDED > 1) & (start % REFRESH == 0):
                floors = floors_of(published_ptr + q * parts, visible, parts, part_size, PARTS_PADDED)
                leasts = tl.maximum(leasts, floors)
            products = tl.maximum(tl.dot(keys, query.T), 0.0, propagate_nan=tl.PropagateNan.ALL) * weights
            scores = tl.sum(tl.reshape(products, (BLOCK, QUERIES, HEADS)), 2) * scale[:, None]
            positions = tl.broadcast_to((start + i)[:, None], (BLOCK, QUERIES))
            enters = (scores >= leasts) & (positions < visible)
            counts = append_columns(lists_ptr + q * parts * CAPACITY, counts, scores, positions, enters, shift)
        at = stop
        if (PARTS_PADDED > 1) & ((at == due) | (at == end)):
            for j in range(QUERIES):
                seen = tl.load(visible_ptr + row + j)
                length = tl.minimum(part_size, seen - first)
                if length > 0:
                    list_ptr, count = lists_ptr + j * parts * CAPACITY, tl.sum(tl.where(q == j, counts, 0), 0)
                    publish(published_ptr + j * parts + part, list_ptr, count, length, seen, K, CAPACITY)
            due += due - first
    tl.store(counts_ptr + (row + q) * parts + part, counts)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      queries: of a tile; queries * heads <= 256, the columns of a wgmma.
      capacity: of a query's list; the larger, the rarer it is shortened.
      stages: key blocks in flight, and the one in use.
      early: keys after which a part first publishes.
      refresh: keys after which a part looks again at what the others have published.
    """

    queries: int
    capacity: int = 4096
    stages: int = 5
    early: int = 256
    refresh: int = 128

    def check(self, heads: int, k: int) -> None:
        powers = all(n > 0 and n & (n - 1) == 0 for n in (self.queries, self.capacity, heads))
        fits = 16 <= self.queries * heads <= 256 and (self.capacity - k) // 4 >= KEY_BLOCK and self.queries <= 8
        steps = all(n > 0 and n % KEY_BLOCK == 0 for n in (self.early, self.refresh))
        if not powers or not fits or not steps or not self.early <= self.capacity or self.stages < 2:
            raise ConfigError(
                f"{self} for {heads} heads and k={k}: queries, capacity and heads must be powers of two, queries <= 8, "
                f"16 <= queries * heads <= 256, capacity >= k + {4 * KEY_BLOCK}, early and refresh multiples of "
                f"{KEY_BLOCK}, early <= capacity, stages >= 2"
            )


def default_config(queries: int, heads: int) -> Config:
    """As many queries in a tile as there are, up to a wgmma's 256 columns; every key is then read the fewest times."""
    tile = min(next_power_of_two(queries), 8, max(1, 256 // heads))
    return Config(queries=tile, stages=5 if tile == 1 else 4)


def index_top_k_triton(
    query: jax.Array,
    head_weights: jax.Array,
    pool: jax.Array,
    pool_scale: jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    k: int,
    *,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k keys of the highest score for each query (spec/model.md 2.4, FP8 form), ties to the lowest position.

    Args:
      query: [R, Q, H, 128] float8_e4m3fn.
      head_weights: [R, Q, H] float32, every constant factor and the queries' scales folded in.
      pool: [slots, 128] float8_e4m3fn, keys in blocks of 64.
      pool_scale: [slots] float32.
      tables: [R, n] int32, the pool's block of each 64 keys; entries of blocks that no query sees may be anything.
      visible: [R, Q] int32: query (r, q) sees keys 0 .. visible - 1 of its request.
      k: up to 2048.
      config: how the work is cut.

    Returns:
      scores [R, Q, k] float32 and positions [R, Q, k] int32 in ascending order, missing ones -inf and -1, last. A key
      whose score is NaN or -inf is never chosen.

    Raises:
      ConfigError: shapes or types that the kernel is not for.
    """
    if obstacle := key_obstacle(query, pool, pool_scale, KEY_BLOCK) or k_obstacle(k):
        raise ConfigError(f"index_top_k in Triton: {obstacle}")
    R, Q, H, dim = query.shape
    config = config or default_config(Q, H)
    config.check(H, k)
    blocks, tile = tables.shape[1], config.queries
    tiles = -(-Q // tile)
    if tiles * tile != Q:
        query, head_weights, visible = (
            jnp.pad(x, [(0, 0), (0, tiles * tile - Q)] + [(0, 0)] * (x.ndim - 2))
            for x in (query, head_weights, visible)
        )
    visible = jnp.clip(visible, 0, blocks * KEY_BLOCK).reshape(-1, tile)
    extents = jnp.broadcast_to(jnp.max(visible, axis=1, keepdims=True), visible.shape).reshape(-1)
    visible = visible.reshape(-1)
    parts = parts_of(R * tiles, blocks, k, config)
    published, lists, counts = triton_call(
        query, head_weights, pool, pool_scale, tables, visible, extents, nothing_published(parts),
        tiles, blocks, parts.parts, config.early,
        kernel=index_top_k_of_parts,
        results=parts.results,
        in_place={7: 0},
        grid=(R * tiles, parts.parts),
        num_warps=4,
        num_flops=2 * R * Q * H * dim * blocks * KEY_BLOCK,
        num_bytes=R * tiles * blocks * KEY_BLOCK * (dim + 4),
        QUERIES=tile, HEADS=H, DIM=dim, STAGES=config.stages, REFRESH=config.refresh,
        **parts.constants,
    )  # fmt: skip
    best = merge_lists(parts, published, lists, counts)
    scores, positions = (x.reshape(R, tiles * tile, k)[:, :Q] for x in best)
    return scores, positions


def parts_of(groups: int, blocks: int, k: int, config: Config) -> Parts:
    """No shorter than three times what all of them keep before they hear of each other, if that leaves none idle."""
    return Parts.cut(
        groups * config.queries,
        blocks * KEY_BLOCK,
        groups=groups,
        block=KEY_BLOCK,
        k=k,
        capacity=config.capacity,
        shortest=3 * config.early,
    )


def cases() -> tuple[Case, ...]:
    """GLM-5.3's steps: decode of 1 and of 8 requests, with and without three draft tokens, and a chunk of a prompt.

    Under PCP a GPU has 256 queries of the chunk; where the keys of eight DCP ranks are gathered, each rank's are a row.
    Contexts may have any length.
    """
    return (
        _case("decode", 8, 1, 32768),
        _case("decode", 8, 1, 131072),
        _case("decode", 8, 1, 1048576),
        _case("decode", 8, 4, 131072),
        _case("decode", 1, 4, 131072),
        _case("prefill", 1, 2048, 131072),
        _case("prefill pcp", 1, 256, 131072),
        _case("prefill kv_gather", 8, 256, 131072 // 8),
    )


def _case(name: str, R: int, Q: int, context: int, k: int = MAX_K, heads: int = 32, slots: int = 1 << 20) -> Case:
    config = default_config(Q, heads)
    blocks, groups = context // KEY_BLOCK, R * -(-Q // config.queries)
    parts = parts_of(groups, blocks, k, config)
    keys = groups * (context * (HEAD_DIM + 4) + 4 * blocks)  # once for each tile of queries
    queries = R * Q * heads * (HEAD_DIM + 4) * parts.parts
    apart = APART_BYTES // (HEAD_DIM + 4)
    return Case(
        kernel="index_top_k",
        implementation="triton",
        shape=f"{name} R={R} Q={Q} H={heads} context={context} k={k}",
        function=functools.partial(index_top_k_triton, k=k),
        arguments=(
            jax.ShapeDtypeStruct((R, Q, heads, HEAD_DIM), FP8),
            jax.ShapeDtypeStruct((R, Q, heads), jnp.float32),
            jax.ShapeDtypeStruct((slots, HEAD_DIM), FP8),
            jax.ShapeDtypeStruct((slots,), jnp.float32),
            jax.ShapeDtypeStruct((R, blocks), jnp.int32),
            jax.ShapeDtypeStruct((R, Q), jnp.int32),
        ),
        bytes=keys + queries + parts.bytes(context, early=config.early, refresh=config.refresh, apart=apart),
        flops=2 * R * Q * heads * HEAD_DIM * context,
        arithmetic="float8_e4m3fn",
        stages=config.stages,
        limits={4: slots // KEY_BLOCK, 5: context + 1},
    )
