"""Parts of a query's rows are merged on the chip: the blocks of a cluster read each other's shared memory.

Every block leaves its part's output, bf16, and log-sum-exps in its shared memory; all blocks meet; then each merges a
share of the output, in pieces of 8 heads x 64 columns, and writes it. They meet again before any may leave, for the
others read its memory. Nothing of a part goes to device memory.

Interpret mode knows clusters but neither their shared memory nor the hardware's barrier. There (``simulate``) the parts
stand in device memory, spoilt by a block that leaves, and a barrier of the simulator takes the place: the sums are
checked, and that blocks meet where they must. That the hardware's barrier stands there, and that the memory of peers is
read, only compiled code shows.
"""

# mypy: allow-untyped-defs

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

HEADS, COLUMNS = 8, 64  # of a piece: a tile of the swizzled shared memory
AXIS = "part"  # of the cluster
MEETINGS = 2

# Each warp holds two heads of a piece, each of its half-warps reads the 128 bytes of one.
PIECE = plgpu.Layout.TILED(
    plgpu.Tiling(((HEADS, COLUMNS), (2, COLUMNS), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def meet(meeting: int, met: Any) -> None:
    """Waits for every thread of the cluster; what any wrote to shared memory before, all see after.

    Args:
      meeting: 0 or 1.
      met: the simulator's barriers for them, that every warpgroup of the cluster arrives at; None on a GPU.
    """
    if met is not None:
        plgpu.barrier_arrive(met.at[meeting])
        plgpu.barrier_wait(met.at[meeting])
        return

    @plgpu.inline_mgpu()
    def barrier(_):
        from jaxlib.mlir.dialects import nvvm

        nvvm.cluster_arrive(aligned=True)  # releases
        nvvm.cluster_wait(aligned=True)  # acquires

    barrier()


def simulated_parts(clusters: int, blocks: int, heads: int, latent: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Where parts stand in interpret mode: outputs of the kernel."""
    return (
        jax.ShapeDtypeStruct((clusters, blocks, heads, latent), jnp.bfloat16),
        jax.ShapeDtypeStruct((clusters, blocks, heads), jnp.float32),
    )


def merge_columns(part_out: Any, part_lse: Any, out: Any, lse: Any, *, blocks: int, peers: bool) -> None:
    """Merges this block's share of some columns; a warpgroup calls it.

    Args:
      part_out: [heads, columns] bf16, a block's part in shared memory; with ``peers`` False [blocks, heads, columns].
      part_lse: [heads] float32 (base e), -inf where the part has no row; [blocks, heads].
      out: [heads, columns] bf16 in device memory.
      lse: [heads] float32 in device memory; None for all but one of the warpgroups.
      blocks: of the cluster.
      peers: parts are in the blocks' shared memory.
    """
    heads, columns = out.shape
    across = columns // COLUMNS
    pieces = heads // HEADS * across
    own = lax.axis_index(AXIS)

    def of(ref, block):
        return plgpu.cluster_ref(ref, {AXIS: block}) if peers else ref.at[block]

    @pl.loop(0, -(-pieces // blocks))
    def _merge(turn):
        piece = turn * blocks + own

        @pl.when(piece < pieces)
        def _piece():
            some_heads = pl.ds(pl.multiple_of(piece // across * HEADS, HEADS), HEADS)
            some_columns = pl.ds(pl.multiple_of(lax.rem(piece, across) * COLUMNS, COLUMNS), COLUMNS)
            # Each begins with its own part, so that no block is asked by all the others at once.
            order = [lax.rem(own + i, blocks) for i in range(blocks)]
            found = [_read(of(part_lse, block), some_heads) for block in order]
            top = functools.reduce(jnp.maximum, found)
            top = jnp.where(top > -jnp.inf, top, 0.0)
            weights = [jnp.exp(one - top) for one in found]
            total = functools.reduce(jnp.add, weights)
            some = total > 0
            factor = jnp.where(some, 1 / jnp.where(some, total, 1.0), 0.0)
            merged = None
            for block, weight in zip(order, weights, strict=True):
                part = _read(of(part_out, block), some_heads, some_columns).astype(jnp.float32)
                part *= plgpu.layout_cast(lax.broadcast_in_dim(weight * factor, part.shape, [0]), PIECE)
                merged = part if merged is None else merged + part
            plgpu.store(out.at[some_heads, some_columns], merged.astype(jnp.bfloat16))
            if lse is not None:

                @pl.when(lax.rem(piece, across) == 0)
                def _lse():
                    merged = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + top, -jnp.inf)
                    plgpu.store(lse.at[some_heads], merged, optimized=False)


def _read(ref: Any, *index: Any) -> jax.Array:
    layout = PIECE if len(index) == 2 else PIECE.reduce(1)
    return plgpu.load(ref.at[index], layout=layout, optimized=False)
