"""Grouped matmul on Hopper: block-FP8 or bf16, with SwiGLU in its epilogue (Mosaic GPU).

The weights are the left operand of wgmma and the tokens the right one: out^T = W x^T. wgmma takes 64 rows on the left
and any multiple of 8 columns on the right, and in a decode step an expert has a few tokens, so this way round a tile of
8 tokens costs 8 columns instead of 64 rows: registers and shared memory go into weights in flight, which are all that a
decode step waits for. With tiles of 128 tokens the two ways cost about the same.

A work item is one tile of tokens, all of one expert, times ``rows`` rows of each *slab* of the expert's weights: gate
and up projection for SwiGLU, which thereby meet in the registers of one thread, or the two halves of a plain matrix.
Blocks are persistent and take every ``blocks``-th item; how many tiles there are is read from the device, so experts
without tokens cost nothing.

    warpgroup    role
    0 .. C-1     wait(full) -> wgmma on 64 rows of each slab -> rescale and add to registers -> arrive(empty); epilogue
    C            wait(empty) -> TMA of weights [slabs, rows, 128 B], tokens [tile, 128 B] and scales [tile] -> full

Blocks in pairs (``Tuning.cluster``) take neighbouring rows of one tile. Each loads half of the tokens for both, so a
stage is empty when the consumers of both have arrived.

The tensor cores add FP8 products over one block of 128 only; the sum over blocks is in float32 registers, each partial
product times the scales of its token and its weight block, as the format asks for (spec/model.md 3.2). bf16 goes the
same way without scales, 64 columns at a time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from glmjax.kernels.block_fp8 import BLOCK, FP8_MAX
from glmjax.kernels.grouped_plan import FP8, WGMMA_ROWS, Product, Tuning, cut_into_slabs

f32 = jnp.float32


def grouped_matmul(
    x: jax.Array,
    x_scale: jax.Array | None,
    weights: jax.Array,
    weight_scale: jax.Array | None,
    tile_matrix: jax.Array,
    num_tiles: jax.Array,
    *,
    tuning: Tuning,
    out_dtype: DTypeLike = jnp.bfloat16,
    quantize: bool = False,
    interpret: Any = None,
) -> Any:
    """Multiplies every tile of tokens by the matrix of its group.

    Args:
      x: [P, K] float8_e4m3fn or bfloat16; P = tiles * tuning.tile.
      x_scale: [K / 128, P] float32; None in bf16.
      weights: [N, R, K], or [N, 2, F, K] for silu(gate x) * up x; x's dtype.
      weight_scale: [N, ceil(R / 128), K / 128] or [N, 2, ceil(F / 128), K / 128] float32; None in bf16.
      tile_matrix: [tiles] int32 in [0, N).
      num_tiles: [1] int32, tiles in use. The rows of the others are left as they are: anything.
      quantize: of SwiGLU: round to ``out_dtype``, then to float8_e4m3fn with scales, the form of ``x`` and ``x_scale``.
      interpret: ``plgpu.InterpretGPUParams`` to simulate.

    Returns:
      [P, R] or [P, F] in ``out_dtype``; with ``quantize`` [P, F] float8_e4m3fn and [F / 128, P] float32.

    Raises:
      ConfigError: the kernel cannot take these shapes with this tuning.
    """
    swiglu = weights.ndim == 4
    slabs, rows = (2, weights.shape[-2]) if swiglu else cut_into_slabs(weights.shape[-2])
    dtypes = jnp.dtype(x.dtype), jnp.dtype(out_dtype)
    product = Product(tuning, x.shape[0], slabs, rows, x.shape[1], *dtypes, swiglu, quantize)
    operands = [x, weights.reshape(-1, rows, x.shape[1])]
    if product.fp8:
        assert x_scale is not None and weight_scale is not None
        operands += [x_scale, weight_scale.reshape(operands[1].shape[0], -1, weight_scale.shape[-1])]
    out = _launch(product, interpret)(tile_matrix, num_tiles, *operands)
    if quantize:
        return tuple(out)
    if tuning.splits > 1:
        return jnp.sum(out[0], axis=0).T.astype(out_dtype)
    return out[0]


@functools.cache
def _launch(product: Product, interpret: Any) -> Callable[..., list[jax.Array]]:
    """The kernel, made once for all layers of a program: jitted, it is also lowered once."""
    tuning, inputs = product.tuning, 6 if product.fp8 else 4

    def body(*refs: Any, **scratch: Any) -> None:
        names = ("tile_matrix", "num_tiles", "x", "weights", "x_scale", "weight_scale")[:inputs]
        block = _Block(product, out=refs[inputs:], **dict(zip(names, refs, strict=False)), **scratch)
        role = lax.axis_index("warpgroup")
        pl.when(role == tuning.consumers)(block.produce)
        pl.when(role < tuning.consumers)(lambda: block.consume(role))

    options = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        body,
        out_type=product.results(),
        grid=(tuning.blocks // tuning.cluster,),
        grid_names=("blocks",),
        cluster=(tuning.cluster,),
        cluster_names=("cluster",),
        num_threads=tuning.consumers + 1,
        thread_name="warpgroup",
        scratch_types=product.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **options,
    )
    return jax.jit(kernel) if interpret is None else kernel


@dataclass(frozen=True)
class _Item:
    """One unit of work: traced int32."""

    matrix: jax.Array  # index of its first slab
    token: jax.Array  # first
    row: jax.Array  # first, within a slab
    line: jax.Array  # first
    part: jax.Array  # of the splits


@dataclass(frozen=True)
class _Block:
    """The kernel: references to device memory, then to shared memory and barriers."""

    product: Product
    out: Any
    tile_matrix: Any
    num_tiles: Any
    x: Any
    weights: Any
    weight_lines: Any
    token_lines: Any
    staged: Any
    full: Any
    empty: Any
    x_scale: Any = None
    weight_scale: Any = None
    token_scales: Any = None
    exchange: Any = None

    def for_items(self, work: Callable[[_Item, jax.Array], jax.Array]) -> None:
        """Runs ``work(item, step) -> step`` on this block's items; ``step`` counts lines, and so stages."""
        p, blocks = self.product, self.product.tuning.blocks
        block = lax.axis_index("blocks") * p.tuning.cluster + lax.axis_index("cluster")
        items = self.num_tiles[0] * (p.tuning.splits * p.row_blocks)

        def one(i: jax.Array, step: jax.Array) -> jax.Array:
            index, row_block = _divide(block + i * blocks, p.row_blocks)
            tile, part = _divide(index, p.tuning.splits)
            item = _Item(
                self.tile_matrix[tile] * p.slabs, tile * p.tuning.tile, row_block * p.tuning.rows, part * p.lines, part
            )
            return work(item, step)

        lax.fori_loop(0, lax.div(items - block + blocks - 1, blocks), one, jnp.int32(0))

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.product.tuning.stages)

    def produce(self) -> None:
        p, t = self.product, self.product.tuning
        if t.consumers == 2:
            plgpu.set_max_registers(40, action="decrease")

        copy_shared = functools.partial(plgpu.copy_gmem_to_smem, collective_axes="cluster" if t.cluster > 1 else None)

        def load(item: _Item, step: jax.Array) -> jax.Array:
            tokens = pl.ds(item.token, t.tile)

            def one(i: jax.Array, step: jax.Array) -> jax.Array:
                stage, line = self.stage(step), item.line + i
                full, columns = self.full.at[stage], pl.ds(line * p.line, p.line)
                plgpu.barrier_wait(self.empty.at[stage])
                for slab in range(p.slabs):
                    rows = self.weights.at[item.matrix + slab, pl.ds(item.row, t.rows), columns]
                    plgpu.copy_gmem_to_smem(rows, self.weight_lines.at[stage, slab], full)
                copy_shared(self.x.at[tokens, columns], self.token_lines.at[stage], full)
                if p.fp8:
                    copy_shared(self.x_scale.at[line, tokens], self.token_scales.at[stage], full)
                return step + 1

            return lax.fori_loop(0, p.lines, one, step)

        self.for_items(load)
        for stage in range(t.stages):  # no one leaves before the last stages are read
            plgpu.barrier_wait(self.empty.at[stage])

    def consume(self, warpgroup: jax.Array) -> None:
        p, t = self.product, self.product.tuning
        if t.consumers == 2:
            plgpu.set_max_registers(232, action="increase")
        for stage in range(t.stages):
            plgpu.barrier_arrive(self.empty.at[stage])
        zero = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, t.tile), f32), plgpu.Layout.WGMMA)

        def multiply(item: _Item, step: jax.Array) -> jax.Array:
            def one(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                step, *sums = carry
                stage = self.stage(step)
                # Asked for before the wait, so that they are there when the products are.
                scales = self.block_scales(item, item.line + i) if p.fp8 else []
                plgpu.barrier_wait(self.full.at[stage])
                for slab in range(p.slabs):
                    part = self.partial(stage, slab, warpgroup)
                    if p.fp8:
                        # Read anew for each slab: kept, they would not fit into the registers.
                        by_token = plgpu.load(
                            self.token_scales.at[stage], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                        )
                        part = part * lax.broadcast_in_dim(by_token * scales[slab], part.shape, [1])
                    sums[slab] += part
                if p.fp8:
                    plgpu.commit_smem()  # reads of the scales come before the copy that overwrites them
                plgpu.barrier_arrive(self.empty.at[stage])
                return (step + 1, *sums)

            step, *sums = lax.fori_loop(0, p.lines, one, (step, *[zero] * p.slabs))
            if p.swiglu:
                gate, up = sums
                sums = [gate / (1 + jnp.exp(-gate)) * up]
            if p.quantize:
                self.store_quantized(item, warpgroup, sums[0])
            else:
                for slab, value in enumerate(sums):
                    self.store(item, warpgroup, slab, value)
            return step

        self.for_items(multiply)
        plgpu.wait_smem_to_gmem(0)

    def block_scales(self, item: _Item, line: jax.Array) -> list[jax.Array]:
        row = lax.div(item.row, BLOCK)
        return [self.weight_scale[item.matrix + slab, row, line] for slab in range(self.product.slabs)]

    def partial(self, stage: jax.Array, slab: int, warpgroup: jax.Array) -> jax.Array:
        """[64, tile] float32: this warpgroup's rows of a slab times the tokens, over one line."""
        rows = self.weight_lines.at[stage, slab, pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]

        def product(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, rows, self.token_lines.at[stage].T)
            return sums[...]

        return pl.run_scoped(product, plgpu.ACC((WGMMA_ROWS, self.product.tuning.tile), f32))

    def store(self, item: _Item, warpgroup: jax.Array, slab: int, value: jax.Array) -> None:
        p, t = self.product, self.product.tuning
        (out,), tokens = self.out, pl.ds(item.token, t.tile)
        rows = pl.ds(slab * p.slab_rows + item.row + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
        if t.splits > 1:
            _store(out.at[item.part, rows, tokens], value)
            return
        staged = self.staged.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.T[...] = value.astype(p.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[tokens, rows])

    def store_quantized(self, item: _Item, warpgroup: jax.Array, value: jax.Array) -> None:
        """The warpgroups have 64 rows of the hidden layer each, for all tokens; here they swap for all of 64 tokens."""
        values, scales = self.out
        self.staged.at[warpgroup].T[...] = value.astype(self.product.out_dtype)
        plgpu.barrier_arrive(self.exchange)
        plgpu.barrier_wait(self.exchange)
        mine = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
        halves = [
            plgpu.load(self.staged.at[half, mine], layout=plgpu.Layout.WGMMA, optimized=False).astype(f32)
            for half in range(2)
        ]
        peaks = [jnp.max(jnp.abs(half), axis=1) for half in halves]
        peak = jnp.maximum(*peaks)
        scale = jnp.where(peak > 0, peak / FP8_MAX, 1.0)
        tokens = pl.ds(item.token + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
        inverse = lax.broadcast_in_dim(1 / scale, (WGMMA_ROWS, WGMMA_ROWS), [0])
        for i, half in enumerate(halves):
            columns = pl.ds(item.row + i * WGMMA_ROWS, WGMMA_ROWS)
            _store(values.at[tokens, columns], (half * inverse).astype(FP8))
        _store(scales.at[lax.div(item.row, BLOCK), tokens], scale)
        plgpu.barrier_arrive(self.exchange)
        plgpu.barrier_wait(self.exchange)


def _divide(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(a, b), lax.rem(a, b)


def _store(ref: Any, value: jax.Array) -> None:
    """To device memory, a few bytes per thread. JAX 0.11 has no ``plgpu.store`` and takes a plain assignment."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
