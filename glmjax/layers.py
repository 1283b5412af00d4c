"""The small pieces that every layer is made of: linear, norms, rotary embedding, SwiGLU.

Norms, rotary angles and softmax run in float32 whatever the activations' dtype (spec/model.md 2).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from glmjax.kernels import block_fp8, few_rows
from glmjax.kernels.block_fp8 import take
from glmjax.kernels.block_fp8_matmul import block_fp8_matmul
from glmjax.params import QUANT_BLOCK, QuantizedWeight, Weight


def at_layer[T](stack: T, layer: jax.Array | int) -> T:
    """One layer of a stacked weight or of a tree of them: [L, ...] -> [...]; of block-FP8 ones just the note which."""

    def pick(x: Weight) -> Weight:
        return dataclasses.replace(x, layer=layer) if isinstance(x, QuantizedWeight) else take(x, layer)

    return jax.tree.map(pick, stack, is_leaf=lambda x: isinstance(x, QuantizedWeight))


def dequantize(weight: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """values * scale, [..., out, in], in ``dtype`` (spec/model.md 3.2)."""
    values, scale = weight.values, weight.scale
    if weight.layer is not None:
        values, scale = take(values, weight.layer), scale[weight.layer]
    return block_fp8.dequantize(values, scale, dtype)


def as_array(weight: Weight, dtype: DTypeLike) -> jax.Array:
    """The weight as a plain array: [..., out, in] in ``dtype``."""
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    return weight.astype(dtype)


def linear(x: jax.Array, weight: Weight, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x Wᵀ: [..., in] times [out, in] -> [..., out], accumulated in float32; in x's dtype unless told otherwise."""
    if isinstance(weight, QuantizedWeight) and out_dtype is None:
        return block_fp8_matmul(x, weight.values, weight.scale, weight.layer)
    quantized = isinstance(weight, QuantizedWeight)
    return block_fp8.matmul(x, as_array(weight, x.dtype), out_dtype, dequantized=quantized)


def linear_by_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Each head's x Wᵀ: [T, H, in] times [H, out, in] -> [T, H, out]."""
    if few_rows.suits(x.shape[0], x.shape[-1]):
        return few_rows.multiply(x, weight).astype(x.dtype)
    return jnp.einsum("thi,hoi->tho", x, weight, precision=precision_of(x))


def precision_of(x: jax.Array) -> str | None:
    """float32 products are float32 products, on GPUs too, where XLA would take TF32."""
    return "highest" if x.dtype == jnp.float32 else None


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / sqrt(mean(x²) + eps) over the last axis; the product is taken in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm with bias over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight + bias).astype(x.dtype)


def rope_angles(positions: jax.Array, dim: int, theta: float) -> jax.Array:
    """Rotary angles position * theta^(-2i / dim): [...] int32 -> [..., dim / 2] float32."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    return positions[..., None].astype(jnp.float32) * frequency


def apply_rope(x: jax.Array, angles: jax.Array, *, interleaved: bool = True) -> jax.Array:
    """Rotates pairs of the last axis in place: [..., dim], angles [..., dim / 2].

    Args:
      interleaved: pairs are (2i, 2i + 1), as in GLM; else (i, i + dim / 2).
    """
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    y = x.astype(jnp.float32)
    if interleaved:
        y = y.reshape(*x.shape[:-1], -1, 2)
        a, b = y[..., 0], y[..., 1]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(y, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.astype(x.dtype)


def swiglu(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """down(silu(gate x) * up x): [..., D] with gate_up [2, F, D] and down [D, F] -> [..., D]."""
    gate, up = jnp.split(linear(x, _side_by_side(gate_up)), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)


def _side_by_side(gate_up: Weight) -> Weight:
    """[2, F, D] -> [2 F, D]."""
    two, width, model = gate_up.shape
    if not isinstance(gate_up, QuantizedWeight):
        return gate_up.reshape(two * width, model)
    if width % QUANT_BLOCK:  # then blocks of scales would span both
        return dequantize(gate_up, jnp.float32).reshape(two * width, model)
    stack = () if gate_up.layer is None else gate_up.values.shape[:1]
    values = gate_up.values.reshape(*stack, two * width, model)
    return QuantizedWeight(values, gate_up.scale.reshape(*stack, -1, gate_up.scale.shape[-1]), gate_up.layer)
