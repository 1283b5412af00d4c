"""Block-FP8 on a CPU: the format's error, linear layers and experts, against float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from h200_code import compile_program, needs_plugin

from glmjax.kernels.block_fp8 import BLOCK, quantize_rows
from glmjax.kernels.block_fp8_matmul import block_fp8_matmul
from glmjax.kernels.grouped_matmul import grouped_swiglu
from glmjax.kernels.report_case import Case

FP8, f32 = jnp.float8_e4m3fn, jnp.float32


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def quantized(*shape):
    """Bytes, scales, and their product in float64, of [..., R, K]."""
    values = random(*shape).astype(ml_dtypes.float8_e4m3fn)
    scale = np.exp(random(*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:])))
    wide = scale.repeat(BLOCK, axis=-2)[..., : shape[-2], :].repeat(BLOCK, axis=-1)[..., : shape[-1]]
    return values, scale, values.astype(np.float64) * wide


def assert_equal_in_float32(out, expected):
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_quantised_rows_are_as_near_as_fp8_can_be(size):
    x = size * random(5, 3 * BLOCK)
    x[1, :BLOCK] = 0
    x[2, 7] = 1e3 * size  # one large value costs its 127 neighbours their low bits, and no others
    values, scale = (np.asarray(part.astype(f32)) for part in quantize_rows(jnp.asarray(x)))
    step = scale.repeat(BLOCK, axis=-1)
    # Half of the distance of neighbours: 2^-4 of the number, and below 2^-6 a fixed 2^-10.
    assert (np.abs(values * step - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * step) * (1 + 1e-6)).all()
    peaks = np.abs(values).reshape(5, 3, BLOCK).max(axis=-1)
    assert (peaks[1, 0], scale[1, 0]) == (0, 1)
    assert (np.delete(peaks.ravel(), 3) == 448).all()


def test_rows_that_are_not_numbers_stay_so():
    x = random(2, 2 * BLOCK)
    x[0, 3] = np.nan
    values, _ = quantize_rows(jnp.asarray(x))
    assert np.isnan(np.asarray(values.astype(f32))).sum() == 1


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("R", "K"), [(576, 256), (64, 100)])
def test_linear(R, K, as_bytes):
    values, scale, exact = quantized(3, R, K)
    x = random(2, 5, K)
    weight = jnp.asarray(values.view(np.uint8) if as_bytes else values)
    out = jax.jit(block_fp8_matmul)(x, weight, scale, jnp.int32(2))
    assert_equal_in_float32(out, x.astype(np.float64) @ exact[2].T)
    assert (np.asarray(block_fp8_matmul(jnp.asarray(x), weight[2], jnp.asarray(scale[2]))) == np.asarray(out)).all()


@pytest.mark.parametrize("T", [2, 30])
def test_experts(T):
    E, D, F = 4, 96, 160
    (gate_up, up_scale, gu), (down, down_scale, dn) = quantized(2, E, 2, F, D), quantized(2, E, D, F)
    x, ids, weights = random(T, D), np.random.default_rng(T).integers(-1, E, (T, 3), np.int32), random(T, 3)
    scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
    out = jax.jit(grouped_swiglu)(x, ids, gate_up, down, layer=jnp.int32(1), **scales)
    gate, up = np.einsum("td,tjhfd->htjf", x.astype(np.float64), gu[1][ids])
    expected = np.einsum("tjf,tjdf->tjd", gate / (1 + np.exp(-gate)) * up, dn[1][ids])
    expected = np.where(ids[..., None] >= 0, expected, 0)
    assert_equal_in_float32(out, expected)
    assert (np.asarray(out)[ids < 0] == 0).all()
    total = jax.jit(grouped_swiglu)(x, ids, gate_up, down, layer=jnp.int32(1), pair_weights=weights, **scales)
    assert_equal_in_float32(total, np.einsum("tjd,tj->td", expected, weights))


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("width", "kernels"), [(128, 3), (96, 0)])
def test_kernels_run_on_an_h200_where_shapes_allow(width, kernels):
    """Two for the experts and one for the linear layer, or the jnp forms."""

    def function(x, ids, gate_up, down, up_scale, down_scale):
        out = grouped_swiglu(x, ids, gate_up, down, gate_up_scale=up_scale, down_scale=down_scale)
        return out, block_fp8_matmul(x, gate_up[0, 0, 0], up_scale[0, 0, 0])

    shapes = [((4, width), jnp.bfloat16), ((4, 2), jnp.int32)]
    shapes += [((1, 2, 2, 128, width), FP8), ((1, 2, width, 128), FP8), ((1, 2, 2, 1, 1), f32), ((1, 2, 1, 1), f32)]
    arguments = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    program = compile_program(Case("grouped_matmul", "hopper", "", function, arguments, 0, 0, "float8_e4m3fn"))
    assert program.hlo.count('custom_call_target="mosaic_gpu') == kernels
