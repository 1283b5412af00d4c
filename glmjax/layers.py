"""The small pieces that every layer is made of: linear, norms, rotary embedding, SwiGLU.

Norms, rotary angles and softmax run in float32 whatever the activations' dtype (spec/model.md 2).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from glmjax.params import QUANT_BLOCK, QuantizedWeight, Weight


def at_layer[T](stack: T, layer: jax.Array | int) -> T:
    """One layer of a stacked weight or of a tree of them: [L, ...] -> [...]."""
    return jax.tree.map(lambda x: take(x, layer), stack)


def take(x: jax.Array, *index: jax.Array | int) -> jax.Array:
    """x[index] along the leading axes.

    An fp8 array is indexed by its bytes: XLA's CPU backend would turn all of it into f16 first.
    """
    if x.dtype != jnp.float8_e4m3fn:
        return x[index]
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint8)[index], x.dtype)


def dequantize(weight: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """values * scale, [..., out, in], in ``dtype`` (spec/model.md 3.2)."""
    rows, columns = weight.values.shape[-2:]
    scale = jnp.repeat(weight.scale, QUANT_BLOCK, axis=-2)[..., :rows, :]
    scale = jnp.repeat(scale, QUANT_BLOCK, axis=-1)[..., :columns]
    values = weight.values
    if values.dtype == jnp.uint8:
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return (values.astype(jnp.float32) * scale).astype(dtype)


def as_array(weight: Weight, dtype: DTypeLike) -> jax.Array:
    """The weight as a plain array: [..., out, in] in ``dtype``."""
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    return weight.astype(dtype)


def linear(x: jax.Array, weight: Weight, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x Wᵀ: [..., in] times [out, in] -> [..., out], accumulated in float32; in x's dtype unless told otherwise."""
    out_dtype = out_dtype or x.dtype
    w = as_array(weight, x.dtype)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, w, dims, precision=precision_of(x), preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


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
    w = as_array(gate_up, x.dtype)
    two, width, model = w.shape
    hidden = linear(x, w.reshape(two * width, model))
    gate, up = jnp.split(hidden, 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)
