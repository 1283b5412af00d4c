"""A linear layer with a block-FP8 weight (spec/model.md 3.2)."""

import math

import jax

from glmjax.kernels.block_fp8 import BLOCK, dequantize, matmul, take, weight_dtype
from glmjax.kernels.check import FLOAT32, FLOATS, FP8, check_arrays, check_place
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.grouped_matmul import weight_obstacle


def block_fp8_matmul(
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """x Wᵀ with W = values * scale.

    The jnp form dequantises the weight to x's dtype; the Hopper kernel quantises x to FP8, one scale per token and 128
    columns, and multiplies FP8 by FP8.

    Args:
      x: [..., K].
      values: [R, K] float8_e4m3fn or their bytes as uint8, or a stack [L, R, K] of them.
      scale: [(L,) ceil(R / 128), ceil(K / 128)] float32.
      layer: which of the stack. The kernel reads it where it is; indexing first would copy it.

    Returns:
      [..., R] in x's dtype.

    Raises:
      ConfigError: arrays do not fit one another, a stack comes without a layer, or the Hopper kernel is insisted on and
        cannot take these shapes.
    """
    stack = "" if layer is None else "L "  # a layer goes with a stack, and none with a weight of its own
    check_arrays(
        "block_fp8_matmul",
        {
            "x": (x, "... K", FLOATS),
            f"values {'without' if layer is None else 'with'} layer": (values, f"{stack}R K", FP8),
            "scale": (scale, f"{stack}R/{BLOCK} K/{BLOCK}", FLOAT32),
        },
    )
    if layer is not None:
        check_place("block_fp8_matmul", "layer", layer, values.shape[0])
    *lead, K = x.shape
    obstacle = weight_obstacle(x, values, fp8=True)
    chosen = choose("block_fp8_matmul", implementation, kernel="hopper", obstacle=obstacle)
    if chosen == "hopper" and x.size:
        from glmjax.kernels.grouped_matmul_hopper import linear

        out = linear(x.reshape(math.prod(lead), K), values, scale, layer=0 if layer is None else layer)
        return out.reshape(*lead, -1)
    if layer is not None:
        values, scale = take(values, layer), scale[layer]
    return matmul(x, dequantize(values, scale, weight_dtype(x)), dequantized=True)
