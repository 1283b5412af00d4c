"""The kernel of ``sparse_mla_hopper``: one block attends with up to 64 heads of one query to a part of its rows.

Rows pass by in tiles of 64. Three warpgroups share a tile:

    warpgroup 2   slots -> asynchronous copies of rows, ahead of the others
    warpgroup 0   latents 0-255 to bf16  |  scores = Q K^T, online softmax, weights  |  output columns 0-255
    warpgroup 1   latents 256-511 to bf16, rope                                      |  output columns 256-511

All 64 heads use a row, so that a tile is 191 operations for every byte. One warpgroup multiplies all of Q K^T: with 64
columns to a wgmma each operand is read from shared memory once, and splitting the rows would read Q twice. The two
split the output instead, which does not fit one warpgroup's registers, and with it the rows' conversion.

FP8 rows land in a ring of half tiles and are converted into one tile of K, which is also V. Lanes read 8 values each
along a row and write them to the 128-byte swizzle of wgmma, both without bank conflicts. Rows of bf16 need no
conversion: they land in the swizzle, and the tiles alternate between two buffers.
"""

# mypy: allow-untyped-defs

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glmjax.errors import ConfigError
from glmjax.kernels.clusters import MOST_BLOCKS
from glmjax.kernels.kv_rows import LATENT_TILE
from glmjax.kernels.scattered_rows import SWIZZLED, await_copies, start_copies
from glmjax.kernels.sparse_mla_merge import AXIS, MEETINGS, meet, merge_columns, simulated_parts
from glmjax.kernels.sparse_mla_shapes import HEADS, LATENT, ROPE, TILE

SHARES = 2  # warpgroups that compute, each for half of the latent's columns
COLUMNS = LATENT // SHARES
# Of a thread. The three warpgroups start with 168 each and hand over what others get: there are no more.
LOAD_REGISTERS, COMPUTE_REGISTERS = 72, 216
SLOTS = 4  # tiles of slots kept: loads are never more than three tiles ahead of the softmax
MISSING = -1e30  # score of a missing row; smaller than any other, and its exponential is 0 beside one of them

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
PER_HEAD, PER_ROW = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of scores [heads, rows]


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      splits: parts that a query's rows are cut into, each for a block of its own; the blocks make up a cluster.
      stages: buffers of rows: half tiles of FP8 rows, tiles of bf16 rows.
    """

    splits: int = 1
    stages: int = 3

    def check(self, rows: int, quantized: bool) -> None:
        splits, stages = min(MOST_BLOCKS, rows // TILE), 3 if quantized else 2
        if not 1 <= self.splits <= splits or not 2 <= self.stages <= stages:
            raise ConfigError(f"{self} for {rows} rows: splits must be 1 to {splits}, stages 2 to {stages}")


def _lines(lanes: int) -> Any:
    """Registers hold 8 neighbouring values, and so many neighbouring lanes a line of a matrix."""
    lines, columns = 32 // lanes, 8 * lanes
    tiling = plgpu.Tiling(((4 * lines, columns), (lines, columns), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


FP8_LINES, ROPE_LINES = _lines(16), _lines(8)  # a half-warp reads 128 bytes, a quarter-warp writes 128


def _hidden_zero(simulate: bool) -> Any:
    """0, of which the compiler does not know that it is."""
    if simulate:
        return jnp.int32(0)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT(())))
    def zero(_):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        value = llvm.inline_asm(ir.IntegerType.get_signless(32), [], "mov.u32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def _add_product(sums: Any, multiply: Any, simulate: bool) -> Any:
    """``sums`` and what ``multiply`` adds to the accumulator that it is given."""
    if not simulate:
        return pl.run_state(multiply)(plgpu.ACC.init(sums))

    def product(accumulator):  # the simulator knows those that start at zero only
        multiply(accumulator)
        return accumulator[...]

    return sums + pl.run_scoped(product, plgpu.ACC(sums.shape, jnp.float32))


@functools.cache
def make_kernel(
    queries: int, heads: int, scale: float, quantized: bool, config: Config, simulate: bool, interpret: Any
) -> Any:
    """Builds the kernel, once for all layers of a program: jitted, it is also lowered once.

    It takes query_latent [T, H, 512] and query_rope [T, H, 64] bf16; the pools latent [L, S, 512] uint8 or bf16, rope
    [L, S, 64] bf16 and, if quantized, latent_scale [L, S, 4] float32 (else None); rows [T, K] int32, used [T] int32
    (tiles up to a query's last row), layer [1] int32. It gives outputs [T, H, 512] bf16 and log-sum-exps [T, H]
    float32; with ``simulate`` and several splits the parts of both besides.
    """
    splits, stages = config.splits, config.stages
    block_heads = min(heads, HEADS)
    head_blocks = heads // block_heads
    steps = 2 if quantized else 1  # copies of a tile
    step_rows = TILE // steps
    buffers = 1 if quantized else stages  # of K

    def sparse_mla(
        query_latent, query_rope, latent, latent_scale, rope, rows, used, layer_ref, out, lse, *parts,
        query_s, query_rope_s, key_s, rope_s, weights_s, slots_s, heads_s, query_ready, slots_ready, ready, free,
        key_ready, weights_ready, raw_s=None, raw_scale_s=None, raw_rope_s=None, met=None,
    ):  # fmt: skip
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        # Blocks of one query run side by side: what one has read, the next finds in the L2 cache.
        some_heads = pl.ds(lax.rem(block, head_blocks) * block_heads, block_heads)
        query = block // head_blocks
        split = lax.axis_index(AXIS) if splits > 1 else 0
        tiles = used[query]
        first = (tiles * split + splits - 1) // splits
        count = (tiles * (split + 1) + splits - 1) // splits - first

        def load():
            layer = layer_ref[0]
            own = pl.ds(0, block_heads)
            for share in range(SHARES):
                part = query_latent.at[query, some_heads, pl.ds(share * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(part, query_s.at[share, own], query_ready)
            plgpu.copy_gmem_to_smem(query_rope.at[query, some_heads], query_rope_s.at[own], query_ready)

            def load_slots(tile):
                span, kept = pl.ds(pl.multiple_of((first + tile) * TILE, TILE), TILE), lax.rem(tile, SLOTS)
                plgpu.copy_gmem_to_smem(rows.at[query, span], slots_s.at[kept], slots_ready.at[kept])

            def release(step):
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[lax.rem(step, stages)])

            pl.when(count > 0)(lambda: load_slots(0))

            @pl.loop(0, count * steps)
            def _fetch(step):
                tile, stage = step // steps, lax.rem(step, stages)
                kept = lax.rem(tile, SLOTS)

                @pl.when(lax.rem(step, steps) == 0)
                def _look_up():
                    pl.when(tile + 1 < count)(lambda: load_slots(tile + 1))
                    plgpu.barrier_wait(slots_ready.at[kept])

                pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                slots = slots_s.at[kept, pl.ds(lax.rem(step, steps) * step_rows, step_rows)]
                if quantized:
                    copies = [
                        (latent.at[layer], raw_s.at[stage]),
                        (latent_scale.at[layer], raw_scale_s.at[stage]),
                        (rope.at[layer], raw_rope_s.at[stage]),
                    ]
                else:
                    copies = [
                        (latent.at[layer, :, pl.ds(share * COLUMNS, COLUMNS)], key_s.at[stage, share])
                        for share in range(SHARES)
                    ]
                    copies.append((rope.at[layer], rope_s.at[stage]))
                start_copies(slots, copies, swizzled=not quantized, simulate=simulate)

                @pl.when(step > 0)
                def _previous():
                    await_copies(1, simulate=simulate)
                    release(step - 1)

            @pl.when(count > 0)
            def _last():
                await_copies(0, simulate=simulate)
                release(count * steps - 1)

            @pl.loop(jnp.maximum(count * steps - stages, 0), count * steps)
            def _drain(step):
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

        def convert(tile, step, share):
            """A half tile of FP8 rows to bf16, this share's columns; rope goes with the second share's."""
            stage = lax.rem(steps * tile + step, stages)
            plgpu.barrier_wait(ready.at[stage])
            into = pl.ds(step * step_rows, step_rows)
            for start in range(0, COLUMNS, LATENT_TILE):
                column = share * COLUMNS + start
                values = plgpu.load(raw_s.at[stage, :, pl.ds(column, LATENT_TILE)], layout=FP8_LINES)
                factor = plgpu.load(raw_scale_s.at[stage, :, column // LATENT_TILE], layout=FP8_LINES.reduce(1))
                factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, values.shape, [0]), FP8_LINES)
                values = lax.bitcast_convert_type(values, FP8).astype(jnp.float32) * factor
                key_s[0, share, into, pl.ds(start, LATENT_TILE)] = values.astype(BF16)
            if share == 1:
                values = plgpu.load(raw_rope_s.at[stage], layout=ROPE_LINES)
                rope_s[0, into] = values
            plgpu.barrier_arrive(free.at[stage])

        def weigh(buffer, zero, kept, top, total):
            """Scores and softmax of a tile: stores its weights and the factor for what was summed before."""
            if quantized:
                plgpu.barrier_wait(key_ready)

            def multiply(scores):
                plgpu.wgmma(scores, query_rope_s, rope_s.at[buffer].T)
                for share in range(SHARES):
                    plgpu.wgmma(scores, query_s.at[share + zero], key_s.at[buffer, share + zero].T)
                return scores[...]

            scores = pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), jnp.float32)) * (scale * math.log2(math.e))
            held = plgpu.load(slots_s.at[kept], layout=PER_ROW) >= 0
            scores = jnp.where(lax.broadcast_in_dim(held, scores.shape, [1]), scores, MISSING)
            new_top = jnp.maximum(top, scores.max(axis=1))
            factor = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            if not quantized:
                plgpu.barrier_wait(key_ready)  # the other is done with the last tile's weights
            weights_s[0] = weights.astype(BF16)
            heads_s[0] = factor
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready)
            return new_top, total * factor + weights.sum(axis=1)

        def compute(share):
            def add(tile, carry):
                sums, top, total = carry
                kept = lax.rem(tile, SLOTS)
                # Else the compiler keeps every operand's address across the tiles, 144 registers, and spills them.
                zero = _hidden_zero(simulate)
                buffer = zero if quantized else lax.rem(tile, stages)
                if quantized:
                    for step in range(steps):
                        convert(tile, step, share)
                    plgpu.commit_smem()
                else:
                    plgpu.barrier_wait(ready.at[buffer])
                plgpu.barrier_arrive(key_ready)
                if share == 0:
                    top, total = weigh(buffer, zero, kept, top, total)
                plgpu.barrier_wait(weights_ready)
                factor = plgpu.load(heads_s.at[0], layout=PER_HEAD)
                scaled = sums * lax.broadcast_in_dim(factor, sums.shape, [0])

                def multiply(product):
                    plgpu.wgmma(product, weights_s.at[zero], key_s.at[buffer, share + zero])

                sums = _add_product(scaled, multiply, simulate)
                if not quantized:
                    plgpu.barrier_arrive(free.at[buffer])
                return sums, top, total

            def constant(shape, value, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            plgpu.barrier_wait(query_ready)
            sums = constant((HEADS, COLUMNS), 0, plgpu.Layout.WGMMA)
            start = (sums, constant((HEADS,), MISSING, PER_HEAD), constant((HEADS,), 0, PER_HEAD))
            sums, top, total = lax.fori_loop(0, count, add, start)

            own = pl.ds(0, block_heads)
            if share == 0:
                # With missing rows alone their weights are still in the total; any other row's factor made them zero.
                some = top > MISSING / 2
                total = jnp.where(some, total, 1.0)
                heads_s[1] = jnp.where(some, 1.0 / total, 0.0)
                found = (top + jnp.log2(total)) * math.log(2)
                heads_s[2] = jnp.where(some, found, -jnp.inf)
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready)
                if splits == 1:
                    plgpu.copy_smem_to_gmem(heads_s.at[2, own], lse.at[query, some_heads])
            plgpu.barrier_wait(weights_ready)
            factor = plgpu.load(heads_s.at[1], layout=PER_HEAD)
            result = (sums * lax.broadcast_in_dim(factor, sums.shape, [0])).astype(BF16)
            query_s[share] = result
            plgpu.commit_smem()
            columns = pl.ds(share * COLUMNS, COLUMNS)
            whole = out.at[query, some_heads, columns]
            if splits == 1:
                plgpu.copy_smem_to_gmem(query_s.at[share, own], whole)
                plgpu.wait_smem_to_gmem(0)
                return
            part_out, part_lse = query_s.at[share, own], heads_s.at[2, own]
            if simulate:
                all_out, all_lse = parts
                all_out[block, split, :, columns] = part_out[...]
                if share == 0:
                    all_lse[block, split] = part_lse[...]
                part_out, part_lse = all_out.at[block, :, :, columns], all_lse.at[block]
            whole_lse = lse.at[query, some_heads] if share == 0 else None
            meet(0, met)
            merge_columns(part_out, part_lse, whole, whole_lse, blocks=splits, peers=not simulate)
            meet(1, met)
            if simulate:  # who leaves takes its shared memory along
                all_out[block, split, :, columns] = jnp.full((block_heads, COLUMNS), jnp.nan, BF16)
                if share == 0:
                    all_lse[block, split] = jnp.full((block_heads,), jnp.nan)

        @pl.when(group == SHARES)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            load()
            if splits > 1:  # every thread of a cluster must come
                for meeting in range(MEETINGS):
                    meet(meeting, met)

        for share in range(SHARES):

            @pl.when(group == share)
            def _compute(share=share):
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
                compute(share)

    scratch: dict[str, Any] = {
        "query_s": plgpu.SMEM((SHARES, HEADS, COLUMNS), BF16, transforms=SWIZZLED),
        "query_rope_s": plgpu.SMEM((HEADS, ROPE), BF16, transforms=SWIZZLED),
        "key_s": plgpu.SMEM((buffers, SHARES, TILE, COLUMNS), BF16, transforms=SWIZZLED),
        "rope_s": plgpu.SMEM((buffers, TILE, ROPE), BF16, transforms=SWIZZLED),
        "weights_s": plgpu.SMEM((1, HEADS, TILE), BF16, transforms=SWIZZLED),
        "slots_s": plgpu.SMEM((SLOTS, TILE), jnp.int32),
        "heads_s": plgpu.SMEM((3, HEADS), jnp.float32),  # factor of the sums, factor of the output, log-sum-exp
        "query_ready": plgpu.Barrier(num_arrivals=SHARES + 1),
        "slots_ready": plgpu.Barrier(num_barriers=SLOTS),
        "ready": plgpu.Barrier(num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=SHARES, num_barriers=stages),
        "key_ready": plgpu.Barrier(num_arrivals=SHARES),
        "weights_ready": plgpu.Barrier(),
    }
    if quantized:
        scratch |= {
            "raw_s": plgpu.SMEM((stages, step_rows, LATENT), jnp.uint8),
            "raw_scale_s": plgpu.SMEM((stages, step_rows, LATENT // LATENT_TILE), jnp.float32),
            "raw_rope_s": plgpu.SMEM((stages, step_rows, ROPE), BF16),
        }
    out_type = [
        jax.ShapeDtypeStruct((queries, heads, LATENT), BF16),
        jax.ShapeDtypeStruct((queries, heads), jnp.float32),
    ]
    if simulate and splits > 1:
        out_type += simulated_parts(queries * head_blocks, splits, block_heads, LATENT)
        scratch["met"] = plgpu.ClusterBarrier(collective_axes=(AXIS,), num_arrivals=SHARES + 1, num_barriers=MEETINGS)
    kernel = plgpu.kernel(
        sparse_mla,
        out_type=out_type,
        grid=(queries * head_blocks,),
        grid_names=("block",),
        cluster=(splits,) if splits > 1 else (),
        cluster_names=(AXIS,) if splits > 1 else (),
        num_threads=SHARES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # every hand-over between threads has a barrier of its own
            reduction_scratch_bytes=0,  # a head's scores are in four lanes of a warp
        ),
        scratch_types=scratch,
        interpret=interpret,
    )
    return jax.jit(kernel) if interpret is None else kernel
