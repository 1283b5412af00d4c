"""Block-FP8 weights on the host: one float32 scale per 128 x 128 block, in NumPy (spec/model.md 3.2)."""

import jax
import ml_dtypes
import numpy as np

from glmjax.hf_names import FP8_LEAVES, map_named
from glmjax.params import QUANT_BLOCK, Params, QuantizedWeight

FP8_MAX = 448.0  # largest float8_e4m3fn


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., out, in]."""
    return (*shape[:-2], *(-(-size // QUANT_BLOCK) for size in shape[-2:]))


def dequantize(values: np.ndarray, scale: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``values * scale`` of one matrix [out, in], into ``out`` (any float dtype) or a new float32 array."""
    rows, columns = values.shape
    if out is None:
        out = np.empty(values.shape, np.float32)
    wide = np.repeat(np.asarray(scale, np.float32), QUANT_BLOCK, axis=1)[:, :columns]
    for block, first in enumerate(range(0, rows, QUANT_BLOCK)):
        span = slice(first, min(first + QUANT_BLOCK, rows))
        out[span] = values[span].astype(np.float32) * wide[block]
    return out


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of [..., out, in]: scale = amax / 448 per block, 1 for a block of zeros."""
    *lead, rows, columns = weight.shape
    block_rows, block_columns = scale_shape(weight.shape)[-2:]
    padded = np.zeros((*lead, block_rows * QUANT_BLOCK, block_columns * QUANT_BLOCK), np.float32)
    padded[..., :rows, :columns] = weight
    tiles = padded.reshape(*lead, block_rows, QUANT_BLOCK, block_columns, QUANT_BLOCK)
    peak = np.abs(tiles).max(axis=(-3, -1))
    scale = np.where(peak > 0, peak / FP8_MAX, 1).astype(np.float32)
    tiles = np.clip(tiles / scale[..., :, None, :, None], -FP8_MAX, FP8_MAX)
    values = tiles.reshape(padded.shape)[..., :rows, :columns].astype(ml_dtypes.float8_e4m3fn)
    return values, scale


def quantize_fp8(params: Params) -> Params:
    """The same model with every weight that a block-FP8 release quantises as a ``QuantizedWeight``.

    The up-projections of the latent stay plain: the tree always holds them dequantised.
    """

    def quantized(name: str, leaf: jax.Array) -> jax.Array | QuantizedWeight:
        if name not in FP8_LEAVES or 0 in leaf.shape:
            return leaf
        values, scale = zip(*(quantize(np.asarray(layer)) for layer in leaf), strict=True)
        return QuantizedWeight(jax.device_put(np.stack(values)), jax.device_put(np.stack(scale)))

    return map_named(quantized, params)
