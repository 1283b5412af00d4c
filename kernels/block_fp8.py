"""Block-FP8: weights with one float32 scale per 128 x 128 block, activations with one per token and 128 columns.

The format of spec/model.md 3.2, as jnp functions that XLA fuses into their neighbours.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from glmjax.kernels import few_rows

BLOCK = 128
FP8_MAX = 448.0  # largest float8_e4m3fn


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Activations in FP8: [..., K] -> float8_e4m3fn [..., K] and float32 scales [..., K / 128].

    scale = amax / 448 of each token's 128 columns, 1 where they are all zero.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    peak = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.where(peak > 0, peak / FP8_MAX, 1)
    values = jnp.clip(groups / scale, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scale[..., 0]


def as_fp8(values: jax.Array) -> jax.Array:
    """Weights held as float8_e4m3fn or as their bytes (uint8), as float8_e4m3fn."""
    return values if values.dtype == jnp.float8_e4m3fn else jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)


def dequantize(values: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Weights: values [..., R, K] times scale [..., ceil(R / 128), ceil(K / 128)]."""
    rows, columns = values.shape[-2:]
    scale = jnp.repeat(scale, BLOCK, axis=-2)[..., :rows, :]
    scale = jnp.repeat(scale, BLOCK, axis=-1)[..., :columns]
    return (as_fp8(values).astype(jnp.float32) * scale).astype(dtype)


def take(x: jax.Array, *index: jax.Array | int) -> jax.Array:
    """x[index] along the leading axes.

    An FP8 array is indexed by its bytes: XLA's CPU backend would turn all of it into f16 first.
    """
    if x.dtype != jnp.float8_e4m3fn:
        return x[index]
    return as_fp8(jax.lax.bitcast_convert_type(x, jnp.uint8)[index])


def weight_dtype(x: jax.Array) -> jnp.dtype:
    """What to dequantise a weight to for ``matmul`` with x [..., K].

    It is x's dtype, but float32 for a few rows: these are multiplied as the weight is dequantised, in one loop, and to
    round in it takes longer than all the rest.
    """
    *lead, K = x.shape
    return jnp.dtype(jnp.float32) if few_rows.suits(math.prod(lead), K, few_rows.FEW) else x.dtype


def matmul(
    x: jax.Array, weight: jax.Array, out_dtype: DTypeLike | None = None, *, dequantized: bool = False
) -> jax.Array:
    """x Wᵀ: [..., K] times [R, K] -> [..., R] in x's dtype unless told otherwise, accumulated in float32.

    float32 products are float32 products, on GPUs too, where XLA would take TF32.

    Args:
      dequantized: the weight is from ``dequantize``, in ``weight_dtype``, and not from memory.
    """
    *lead, K = x.shape
    if few_rows.suits(math.prod(lead), K, few_rows.FEW if dequantized else few_rows.MOST):
        out = few_rows.multiply(x.reshape(-1, K), weight).reshape(*lead, -1)
    else:
        precision = "highest" if x.dtype == jnp.float32 else None
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        out = jax.lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)
