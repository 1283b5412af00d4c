"""The pieces of a layer against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax import blockfp8
from glmjax.layers import (
    apply_rope,
    at_layer,
    dequantize,
    layer_norm,
    linear,
    rms_norm,
    rope_angles,
    swiglu,
)
from glmjax.params import QuantizedWeight, fp8_as_bytes

TOLERANCE = 1e-5
DIM, THETA = 16, 8e6
rope = jax.jit(apply_rope, static_argnames="interleaved")
angles = jax.jit(rope_angles, static_argnums=(1, 2))


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def assert_close(actual, expected):
    assert np.abs(np.asarray(actual, np.float64) - expected).max() < TOLERANCE


# Norms.


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_rms_norm_equals_its_formula(scale):
    x, weight, eps = normal(3, DIM, scale=scale), normal(DIM, seed=1), 1e-5
    wide = x.astype(np.float64)
    assert_close(rms_norm(x, weight, eps), weight * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps))


def test_rms_norm_of_zeros_is_zero():
    assert (np.asarray(rms_norm(jnp.zeros((2, DIM)), normal(DIM), 1e-5)) == 0).all()


def test_rms_norm_takes_the_mean_in_float32():
    x = jnp.asarray(normal(3, 4096), jnp.bfloat16)
    exact = rms_norm(x.astype(jnp.float32), jnp.ones(4096), 1e-5)
    rounded = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-5)
    assert rounded.dtype == jnp.bfloat16
    assert (np.asarray(rounded) == np.asarray(exact.astype(jnp.bfloat16))).all()


def test_layer_norm_equals_its_formula():
    x, weight, bias, eps = normal(3, DIM) + 5, normal(DIM, seed=1), normal(DIM, seed=2), 1e-6
    wide = x.astype(np.float64)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    assert_close(layer_norm(x, weight, bias, eps), wide * weight + bias)


# Rotary embedding.


def as_complex(x, interleaved):
    pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    return pairs[0] + 1j * pairs[1]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_as_complex_numbers(interleaved):
    x, positions = normal(5, DIM), np.array([0, 1, 7, 1000, 4095])
    turned = np.asarray(rope(x, angles(positions, DIM, THETA), interleaved=interleaved))
    frequency = THETA ** (-np.arange(0, DIM, 2) / DIM)
    expected = as_complex(x.astype(np.float64), interleaved) * np.exp(1j * positions[:, None] * frequency)
    assert np.abs(as_complex(turned, interleaved) - expected).max() < 1e-3  # an angle of 4095 has an ulp of 2.4e-4


def test_rope_at_position_zero_is_the_identity():
    x = normal(3, DIM)
    assert (np.asarray(rope(x, angles(np.zeros(3, np.int32), DIM, THETA))) == x).all()


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_rope_products_depend_on_the_distance_only(a, b, shift):
    q, k = normal(1, DIM), normal(1, DIM, seed=1)

    def product(a, b):
        turned = [np.asarray(rope(x, angles(np.array([p]), DIM, THETA))) for x, p in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert abs(product(a, b) - product(a + shift, b + shift)) < 1e-3


@pytest.mark.parametrize("position", [0, 1, 4095, 202751, 1048575])
def test_cosines_of_large_angles_are_exact(position):
    at = angles(np.array([position]), DIM, THETA)
    ones = np.tile(np.array([1.0, 0.0], np.float32), DIM // 2)[None]
    turned = np.asarray(rope(ones, at))
    wide = np.asarray(at, np.float64)  # the float32 angle, taken as it is
    assert_close(turned[:, 0::2], np.cos(wide))
    assert_close(turned[:, 1::2], np.sin(wide))


# Weights.


def quantized(*shape, seed=0):
    values, scale = blockfp8.quantize(normal(*shape, seed=seed))
    return QuantizedWeight(jnp.asarray(values), jnp.asarray(scale))


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 129), (576, 64), (3, 130, 20)])
def test_dequantize_multiplies_each_block_by_its_scale(shape):
    weight = quantized(*shape)
    values, scale = np.asarray(weight.values, np.float32), np.asarray(weight.scale)
    rows, columns = np.arange(shape[-2]) // 128, np.arange(shape[-1]) // 128
    expected = values * scale[..., rows[:, None], columns]
    assert (np.asarray(dequantize(weight, jnp.float32)) == expected).all()


def quantized_bytes(*shape, seed=0):
    return fp8_as_bytes(quantized(*shape, seed=seed))


def plain(weight):
    return dequantize(weight, jnp.float32) if isinstance(weight, QuantizedWeight) else weight


def test_bytes_of_fp8_stand_for_the_same_numbers():
    weight, stored = quantized(200, 300), quantized_bytes(200, 300)
    assert stored.values.dtype == jnp.uint8
    assert (np.asarray(plain(stored)) == np.asarray(plain(weight))).all()


def test_linear_multiplies_by_the_transpose():
    x, weight = normal(2, 3, 5), normal(4, 5, seed=1)
    assert_close(linear(x, weight), x.astype(np.float64) @ weight.T.astype(np.float64))


def test_linear_with_a_block_fp8_weight_equals_its_plain_form():
    x, weight = normal(2, 200), quantized(150, 200)
    assert_close(linear(x, weight), np.asarray(linear(x, dequantize(weight, jnp.float32))))


def test_linear_adds_up_in_float32():
    x = jnp.ones((1, 4096), jnp.bfloat16)  # a bf16 sum of ones stops at 256
    assert linear(x, x).dtype == jnp.bfloat16 and float(linear(x, x)[0, 0]) == 4096
    assert linear(x, x, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("make", [normal, quantized, quantized_bytes])
def test_at_layer_is_one_entry_of_a_stack(make):
    stack = make(3, 130, 20)
    layer = jax.jit(at_layer)(stack, 1)
    assert (np.asarray(plain(layer)) == np.asarray(plain(stack))[1]).all()


@pytest.mark.parametrize("make", [normal, quantized, quantized_bytes])
def test_swiglu_equals_its_formula(make):
    x, gate_up, down = normal(4, 6, scale=0.3), make(2, 7, 6, seed=1), make(6, 7, seed=2)
    wide_gate_up, wide_down = (np.asarray(plain(w), np.float64) for w in (gate_up, down))
    gate, up = x @ wide_gate_up[0].T, x @ wide_gate_up[1].T
    assert_close(swiglu(x, gate_up, down), gate / (1 + np.exp(-gate)) * up @ wide_down.T)
