"""Scores of the lightning indexer on Hopper, in Pallas on Mosaic GPU: FP8 keys stream past resident FP8 queries.

A block takes one tile of a request's queries and one part of its context. Three warpgroups share the work:

    warpgroup 2   block table -> asynchronous copies of key blocks (64 x 128 bytes) and their scales, `stages` deep
    warpgroup 0   even key blocks  \\  wgmma: 64 keys x 128  times  128 x (query, head); then, from the accumulator,
    warpgroup 1   odd key blocks   /   ReLU, head weights, sum over heads, key scale, bound; copy out [queries, 64]

Keys are the rows of the product and (query, head) pairs its columns, so that the sum over heads stays within four
neighbouring lanes. While one warpgroup reduces, the other multiplies. Every key is read once for each tile of queries.

Hopper's tensor cores are reported to align FP8 products to about fourteen bits of the largest before they add them, so
sums are not quite those of float32; the error is far below that of rounding keys and queries to FP8.
"""

# mypy: allow-untyped-defs
# (What a kernel handles are references, whose types Pallas does not name.)

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glmjax.errors import ConfigError
from glmjax.kernels.index_limits import FP8, HEAD_DIM, KEY_BLOCK, key_obstacle
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS

COMPUTE_WARPGROUPS = 2
STEP = COMPUTE_WARPGROUPS * KEY_BLOCK  # keys of one step of the pipeline

ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value per key
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # one value per (query, head)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      queries: queries of a tile; queries * heads <= 256, the columns of a wgmma.
      stages: steps of 128 keys in flight.
      min_steps: a part of the context has at least so many steps, if there are as many.
    """

    queries: int
    stages: int = 5
    min_steps: int = 8

    def check(self, heads: int) -> None:
        columns = self.queries * heads
        if self.queries < 1 or columns > 256 or columns % 8 or self.stages < 2 or self.min_steps < 1:
            raise ConfigError(
                f"{self} for {heads} heads: queries * heads must be a multiple of 8 up to 256, stages >= 2"
            )


def default_config(queries: int, heads: int) -> Config:
    """As many queries in a tile as there are, up to a wgmma's 256 columns."""
    return Config(queries=min(1 << (queries - 1).bit_length(), max(1, 256 // heads)))


def index_scores_hopper(
    query: jax.Array,
    head_weights: jax.Array,
    pool: jax.Array,
    pool_scale: jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Scores of each query with the keys of its request (spec/model.md 2.4, FP8 form).

    Args:
      query: [R, Q, H, 128] float8_e4m3fn; H * (queries of a tile) <= 256.
      head_weights: [R, Q, H] float32, every constant factor and the queries' scales folded in.
      pool: [slots, 128] float8_e4m3fn, keys in blocks of 64.
      pool_scale: [slots] float32.
      tables: [R, n] int32, the pool's block of each 64 keys; entries of blocks that no query sees may be anything.
      visible: [R, Q] int32: query (r, q) sees keys 0 .. visible - 1 of its request.
      config: how the work is cut.

    Returns:
      [R, Q, 64 n] float32, -inf beyond the bound.

    Raises:
      ConfigError: shapes or types that the kernel is not for.
    """
    R, Q, H, dim = query.shape
    blocks = tables.shape[1]
    if obstacle := key_obstacle(query, pool, pool_scale, KEY_BLOCK):
        raise ConfigError(f"index_scores on Hopper: {obstacle}")
    config = config or default_config(Q, H)
    config.check(H)
    tile = config.queries
    tiles = -(-Q // tile)
    if tiles * tile != Q:
        query, head_weights, visible = (
            jnp.pad(x, [(0, 0), (0, tiles * tile - Q)] + [(0, 0)] * (x.ndim - 2))
            for x in (query, head_weights, visible)
        )
    steps = -(-blocks // COMPUTE_WARPGROUPS)
    tables = jnp.pad(tables, [(0, 0), (0, steps * COMPUTE_WARPGROUPS - blocks)])
    visible = jnp.clip(visible, 0, blocks * KEY_BLOCK).reshape(R * tiles, tile)
    parts = _parts(R * tiles, steps, config.min_steps)
    kernel = _make_kernel(R, tiles, H, steps, parts, config)
    scores = kernel(
        query.reshape(R * tiles, tile * H, dim),
        head_weights.reshape(R * tiles, tile * H),
        pool,
        pool_scale,
        tables,
        visible,
        jnp.max(visible, axis=1),
    )
    return scores.reshape(R, tiles * tile, -1)[:, :Q, : blocks * KEY_BLOCK]


def _parts(tiles: int, steps: int, min_steps: int) -> int:
    """Into how many parts the context is cut: two blocks for every multiprocessor, if the parts stay long enough."""
    wanted = -(-2 * MULTIPROCESSORS // tiles)
    return max(1, min(wanted, steps // min_steps))


@functools.cache
def _make_kernel(R: int, tiles: int, H: int, steps: int, parts: int, config: Config) -> Any:
    tile, stages = config.queries, config.stages
    columns = tile * H
    part_steps = -(-steps // parts)
    tiling = plgpu.TilingTransform((8, HEAD_DIM))  # type: ignore[abstract]
    swizzled = (tiling, plgpu.SwizzleTransform(HEAD_DIM))  # type: ignore[abstract]

    def index_scores(
        query_ref, weights_ref, pool_ref, scale_ref, tables_ref, visible_ref, last_ref, scores_ref,
        *, query_s, weights_s, keys_s, scales_s, scores_s, query_ready, ready, free,
    ):  # fmt: skip
        group = lax.axis_index("warpgroup")
        part, row = lax.axis_index("part"), lax.axis_index("tile")
        request = row // tiles
        first = part * part_steps
        last = last_ref[row]  # keys that some query of the tile sees
        end = jnp.minimum(first + part_steps, steps)
        seen = jnp.minimum(jnp.maximum((last + STEP - 1) // STEP, first), end)

        @pl.when(group == COMPUTE_WARPGROUPS)
        def _load():
            def look_up(step):
                """First slots of a step's blocks. One beyond the bound is not looked up: its entry may be anything."""
                blocks = [step * COMPUTE_WARPGROUPS + g for g in range(COMPUTE_WARPGROUPS)]
                known = [jnp.where(block * KEY_BLOCK < last, block, 0) for block in blocks]
                return tuple(tables_ref[request, block] * KEY_BLOCK for block in known)

            plgpu.copy_gmem_to_smem(query_ref.at[row], query_s, query_ready)
            plgpu.copy_gmem_to_smem(weights_ref.at[row], weights_s, query_ready)

            def load(step, starts):
                following = look_up(step + 1)  # ahead, so that the copies never wait for the table
                stage = lax.rem(step - first, stages)
                pl.when(step - first >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                for g, start in enumerate(starts):
                    slots = pl.ds(pl.multiple_of(start, KEY_BLOCK), KEY_BLOCK)
                    plgpu.copy_gmem_to_smem(pool_ref.at[slots], keys_s.at[stage, g], ready.at[stage])
                    plgpu.copy_gmem_to_smem(scale_ref.at[slots], scales_s.at[stage, g], ready.at[stage])
                return following

            lax.fori_loop(first, seen, load, look_up(first))

            @pl.loop(jnp.maximum(first, seen - stages), seen)
            def _drain(step):
                plgpu.barrier_wait(free.at[lax.rem(step - first, stages)])

        @pl.when(group < COMPUTE_WARPGROUPS)
        def _compute():
            def send(step, slot):
                """Sends this warpgroup's scores [queries, 64] on their way."""
                keys = pl.ds(pl.multiple_of((step * COMPUTE_WARPGROUPS + group) * KEY_BLOCK, KEY_BLOCK), KEY_BLOCK)
                plgpu.copy_smem_to_gmem(scores_s.at[group, slot], scores_ref.at[row, :, keys])

            plgpu.barrier_wait(query_ready)
            bounds = [visible_ref[row, q] for q in range(tile)]

            @pl.loop(first, seen)
            def _score(step):
                stage, slot = lax.rem(step - first, stages), lax.rem(step - first, 2)
                plgpu.barrier_wait(ready.at[stage])

                def product(acc):
                    plgpu.wgmma(acc, keys_s.at[stage, group], query_s.T)
                    return acc[...]

                products = pl.run_scoped(product, plgpu.ACC((KEY_BLOCK, columns), jnp.float32))
                scale = plgpu.load(scales_s.at[stage, group], layout=ROWS, optimized=False)
                position = plgpu.broadcasted_iota(jnp.int32, (KEY_BLOCK,), 0, layout=ROWS)
                position += (step * COMPUTE_WARPGROUPS + group) * KEY_BLOCK
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                for q in range(tile):
                    heads = slice(q * H, (q + 1) * H)
                    x = products[:, heads]
                    weight = plgpu.load(weights_s.at[pl.ds(q * H, H)], layout=COLUMNS, optimized=False)
                    # x + |x| is twice the ReLU: an addition, which the hardware does at twice the rate of a maximum.
                    x = (x + jnp.abs(x)) * lax.broadcast_in_dim(weight, x.shape, [1])
                    score = jnp.sum(x, axis=1) * (scale * 0.5)
                    score = jnp.where(position < bounds[q], score, -jnp.inf)
                    scores_s[group, slot, q] = score
                # One fence lets the copy engine read the scores and write over the keys' scales.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[stage])
                send(step, slot)

            plgpu.wait_smem_to_gmem(0)

            @pl.loop(seen, end)
            def _beyond(step):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for q in range(tile):
                    scores_s[group, 0, q] = plgpu.layout_cast(jnp.full((KEY_BLOCK,), -jnp.inf, jnp.float32), ROWS)
                plgpu.commit_smem()
                send(step, 0)

            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        index_scores,
        out_type=jax.ShapeDtypeStruct((R * tiles, tile, steps * STEP), jnp.float32),
        grid=(R * tiles, parts),
        grid_names=("tile", "part"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # A compute warpgroup only reads what was copied in, and only writes what is copied out: the barriers around
            # those copies suffice, and two more for every query would stall it.
            unsafe_no_auto_barriers=True,
        ),
        scratch_types={
            "query_s": plgpu.SMEM((columns, HEAD_DIM), FP8, transforms=swizzled),
            "weights_s": plgpu.SMEM((columns,), jnp.float32),
            "keys_s": plgpu.SMEM((stages, COMPUTE_WARPGROUPS, KEY_BLOCK, HEAD_DIM), FP8, transforms=swizzled),
            "scales_s": plgpu.SMEM((stages, COMPUTE_WARPGROUPS, KEY_BLOCK), jnp.float32),
            "scores_s": plgpu.SMEM((COMPUTE_WARPGROUPS, 2, tile, KEY_BLOCK), jnp.float32),
            "query_ready": plgpu.Barrier(num_arrivals=2),
            "ready": plgpu.Barrier(num_arrivals=2 * COMPUTE_WARPGROUPS, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        },
    )
    return jax.jit(kernel)  # lowered once, however many layers call it


def cases() -> tuple[Case, ...]:
    """At GLM-5.3's sizes, for who scores without selecting: decode with and without drafts, and prefill chunks."""
    return (
        _case("decode", 8, 1, 131072),
        _case("decode", 8, 1, 1048576),
        _case("decode", 8, 4, 131072),
        _case("decode", 32, 1, 32768),
        _case("prefill", 1, 512, 131072),
        _case("prefill", 1, 2048, 131072),
    )


def _case(name: str, R: int, Q: int, context: int, heads: int = 32, slots: int = 1 << 20) -> Case:
    config = default_config(Q, heads)
    blocks, tiles = context // KEY_BLOCK, R * -(-Q // config.queries)
    parts = _parts(tiles, -(-blocks // COMPUTE_WARPGROUPS), config.min_steps)
    keys = tiles * (context * (HEAD_DIM + 4) + 4 * blocks)  # once for each tile of queries
    queries = R * Q * heads * (HEAD_DIM + 4) * parts
    return Case(
        kernel="index_scores",
        implementation="hopper",
        shape=f"{name} R={R} Q={Q} H={heads} context={context}",
        function=index_scores_hopper,
        arguments=(
            jax.ShapeDtypeStruct((R, Q, heads, HEAD_DIM), FP8),
            jax.ShapeDtypeStruct((R, Q, heads), jnp.float32),
            jax.ShapeDtypeStruct((slots, HEAD_DIM), FP8),
            jax.ShapeDtypeStruct((slots,), jnp.float32),
            jax.ShapeDtypeStruct((R, blocks), jnp.int32),
            jax.ShapeDtypeStruct((R, Q), jnp.int32),
        ),
        bytes=keys + queries + 4 * R * Q * context,
        flops=2 * R * Q * heads * HEAD_DIM * context,
        arithmetic="float8_e4m3fn",
        stages=config.stages,
        limits={4: slots // KEY_BLOCK, 5: context + 1},
    )
