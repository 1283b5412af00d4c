"""How a grouped product is cut up: what ``grouped_kernel`` knows before it runs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from glmjax.errors import ConfigError
from glmjax.kernels.block_fp8 import BLOCK

WGMMA_ROWS = 64
LINE_BYTES = 128  # of the contracted axis in a stage: the widest swizzle
TOKEN_TILES = (8, 16, 32, 64, 128)
FP8 = jnp.dtype(jnp.float8_e4m3fn)
f32 = jnp.float32


@dataclass(frozen=True)
class Tuning:
    """How a product is cut up.

    Attributes:
      tile: tokens of an item.
      rows: weight rows of an item in each slab: 64, or 128 for two consumer warpgroups.
      stages: buffers of the load pipeline.
      blocks: persistent blocks, one or more for each multiprocessor.
      splits: parts of the contracted axis, each an item of its own, for plain products with too few rows to fill the
        GPU. XLA adds the parts, so the result does not depend on who is first.
      cluster: 1, or 2 for blocks in pairs that take neighbouring rows and load each other the half of their tokens.
    """

    tile: int
    rows: int
    stages: int
    blocks: int
    splits: int = 1
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.tile not in TOKEN_TILES or self.rows not in (WGMMA_ROWS, 2 * WGMMA_ROWS):
            raise ConfigError(f"{self}: tile must be one of {TOKEN_TILES}, rows 64 or 128")
        if min(self.stages, self.blocks, self.splits) < 1:
            raise ConfigError(f"{self}: stages, blocks and splits must be at least 1")
        if self.cluster not in (1, 2) or self.blocks % self.cluster:
            raise ConfigError(f"{self}: cluster must be 1 or 2, and blocks a multiple of it")

    @property
    def consumers(self) -> int:
        return self.rows // WGMMA_ROWS


@dataclass(frozen=True)
class Product:
    """All that is static about one launch.

    Attributes:
      tokens: P, of the padded order.
      slabs, slab_rows: of a matrix.
      depth: K.
      dtype, out_dtype: of the operands and of the result.
      swiglu: the slabs are gate and up.
      quantize: the result is FP8 with scales.
    """

    tuning: Tuning
    tokens: int
    slabs: int
    slab_rows: int
    depth: int
    dtype: Any
    out_dtype: Any
    swiglu: bool
    quantize: bool

    def __post_init__(self) -> None:
        t = self.tuning
        if self.dtype not in (FP8, jnp.bfloat16):
            problem = f"operands are {self.dtype}, not float8_e4m3fn or bfloat16"
        elif self.tokens % t.tile:
            problem = f"{self.tokens} tokens do not fill tiles of {t.tile}"
        elif self.slab_rows % (t.rows * t.cluster):
            problem = f"{self.slab_rows} rows of a slab do not fill items of {t.cluster} x {t.rows}"
        elif self.depth % (self.line * t.splits):
            problem = f"{self.depth} columns do not fill {t.splits} parts of whole {self.line}s"
        elif self.swiglu and t.splits > 1:
            problem = "SwiGLU needs whole sums, splits=1"
        elif self.quantize and not (self.swiglu and self.fp8 and t.rows == t.tile == BLOCK):
            problem = "quantize is for SwiGLU in FP8 with rows=128 and tile=128"
        else:
            return
        raise ConfigError(f"grouped matmul with {t}: {problem}")

    @property
    def fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def line(self) -> int:
        """Columns of a stage."""
        return LINE_BYTES // self.dtype.itemsize

    @property
    def lines(self) -> int:
        """Of one item."""
        return self.depth // self.line // self.tuning.splits

    @property
    def row_blocks(self) -> int:
        return self.slab_rows // self.tuning.rows

    def results(self) -> list[jax.ShapeDtypeStruct]:
        if self.quantize:
            scale = jax.ShapeDtypeStruct((self.slab_rows // BLOCK, self.tokens), f32)
            return [jax.ShapeDtypeStruct((self.tokens, self.slab_rows), FP8), scale]
        columns = self.slab_rows * (1 if self.swiglu else self.slabs)
        if self.tuning.splits > 1:
            return [jax.ShapeDtypeStruct((self.tuning.splits, columns, self.tokens), f32)]
        return [jax.ShapeDtypeStruct((self.tokens, columns), self.out_dtype)]

    def scratch(self) -> dict[str, Any]:
        t = self.tuning
        tiling = plgpu.TilingTransform((8, self.line))  # type: ignore[abstract]
        swizzled = (tiling, plgpu.SwizzleTransform(LINE_BYTES))  # type: ignore[abstract]
        buffers = {
            "weight_lines": plgpu.SMEM((t.stages, self.slabs, t.rows, self.line), self.dtype, transforms=swizzled),
            "token_lines": plgpu.SMEM((t.stages, t.tile, self.line), self.dtype, transforms=swizzled),
            "staged": plgpu.SMEM((t.consumers, t.tile, WGMMA_ROWS), self.out_dtype),
            "full": plgpu.Barrier(num_arrivals=self.slabs + 1 + self.fp8, num_barriers=t.stages),
            "empty": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages)
            if t.cluster == 1
            else plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=t.consumers, num_barriers=t.stages),
        }
        if self.fp8:
            buffers["token_scales"] = plgpu.SMEM((t.stages, t.tile), f32)
        if self.quantize:
            buffers["exchange"] = plgpu.Barrier(num_arrivals=t.consumers)
        return buffers


def cut_into_slabs(rows: int) -> tuple[int, int]:
    """Slabs of a plain matrix and their rows: two of whole scale blocks if possible."""
    return (2, rows // 2) if rows % (2 * BLOCK) == 0 else (1, rows)
