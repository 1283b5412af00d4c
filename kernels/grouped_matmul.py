"""Experts' SwiGLU over tokens grouped by expert: every expert multiplies just the tokens that chose it.

The jnp form sorts the (token, choice) pairs by expert, cuts each expert's group into tiles of a fixed number of
rows and loops over the tiles in use, so the work follows the routing and no token is ever dropped.  The Hopper form
(``grouped_matmul_hopper``) does the same with one kernel for all gate and up projections and one for all down
projections.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from glmjax.kernels import few_rows
from glmjax.kernels.block_fp8 import BLOCK, dequantize, matmul, take, weight_dtype
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.grouped_schedule import group_by_expert, tile_rows

WGMMA_ROWS = 64  # of a weight, at once
UNROLL_PAIRS = 8  # up to here pairs are not grouped
ExpertFunction = Callable[[jax.Array, jax.Array], jax.Array]  # (expert id, rows [B, D]) -> [B, D]


def grouped_swiglu(
    x: jax.Array,
    expert_ids: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    layer: jax.Array | int = 0,
    pair_weights: jax.Array | None = None,
    expected_pairs: int | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """down(silu(gate x) * up x) of each token by each expert that it chose (spec/model.md 2.6).

    The jnp form dequantises block-FP8 weights to x's dtype. The Hopper form quantises activations instead, the hidden
    layer from bf16, with one scale per token and 128 columns (spec/model.md 3.2), and multiplies FP8 by FP8.

    Args:
      x: [T, D].
      expert_ids: [T, k] int32 in [0, E); -1 skips the pair, and its output is zero.
      gate_up: [M, E, 2, F, D] of M layers; plain, or float8_e4m3fn or its bytes (uint8) with a scale.
      down: [M, E, D, F].
      gate_up_scale: [M, E, 2, ceil(F / 128), ceil(D / 128)] float32 of block-FP8 weights, or None.
      down_scale: [M, E, ceil(D / 128), ceil(F / 128)] float32, or None.
      layer: which of the M; weights are read where they are, without a copy of the layer.
      pair_weights: [T, k] float32, or None for the outputs of all pairs.
      expected_pairs: pairs that are not -1, about; all unless told. The size of tiles is picked by it.

    Returns:
      [T, D] float32, each token's outputs summed by weight; without weights [T, k, D] in x's dtype.

    Raises:
      ConfigError: the Hopper kernel is insisted on and cannot take these shapes.
    """
    fp8 = gate_up_scale is not None
    problem = obstacle(x, gate_up, fp8=fp8) or obstacle(x, down, fp8=fp8)
    if choose("grouped_matmul", implementation, kernel="hopper", obstacle=problem) == "hopper":
        from glmjax.kernels.grouped_matmul_hopper import experts_swiglu

        return experts_swiglu(
            x,
            expert_ids,
            gate_up,
            down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
            layer=layer,
            pair_weights=pair_weights,
            expected_pairs=expected_pairs,
        )

    def multiply(rows: jax.Array, expert: jax.Array, values: jax.Array, scale: jax.Array | None) -> jax.Array:
        weight = take(values, layer, expert)
        if scale is None:
            weight = weight.astype(x.dtype)
        else:
            weight = dequantize(weight, scale[layer, expert], weight_dtype(rows))
        return matmul(rows, weight.reshape(-1, rows.shape[1]), dequantized=scale is not None)

    def apply(expert: jax.Array, rows: jax.Array) -> jax.Array:
        gate, up = jnp.split(multiply(rows, expert, gate_up, gate_up_scale), 2, axis=-1)
        return multiply(jax.nn.silu(gate) * up, expert, down, down_scale)

    out = grouped_apply(x, expert_ids, gate_up.shape[1], apply, expected_pairs)
    if pair_weights is None:
        return out
    return jnp.einsum("tkd,tk->td", out.astype(jnp.float32), pair_weights)


def obstacle(x: jax.Array, weights: jax.Array, *, fp8: bool) -> str | None:
    """Why the Hopper kernel cannot multiply ``x`` [..., K] by ``weights`` [..., R, K]; None if it can."""
    rows, depth = weights.shape[-2:]
    if x.dtype != jnp.bfloat16:
        return f"activations are {x.dtype}, the kernel is for bfloat16"
    if not fp8 and weights.dtype != jnp.bfloat16:
        return f"weights are {weights.dtype}, the kernel is for bfloat16 and block-FP8"
    if rows % WGMMA_ROWS or depth % BLOCK:
        return f"a weight of {rows} x {depth}, the kernel is for multiples of {WGMMA_ROWS} x {BLOCK}"
    return None


def grouped_apply(
    x: jax.Array, expert_ids: jax.Array, num_experts: int, apply: ExpertFunction, expected_pairs: int | None = None
) -> jax.Array:
    """Applies to each token the experts it chose.

    Args:
      x: [T, D].
      expert_ids: [T, k] int32 in [0, num_experts); -1 skips the pair, and its output is zero.
      num_experts: E.
      apply: one expert on a tile of rows.
      expected_pairs: pairs that are not -1, about; all unless told.

    Returns:
      [T, k, D]: output of token t's j-th expert.
    """
    T, k = expert_ids.shape
    if T * k <= UNROLL_PAIRS:
        return _apply_pairs(x, expert_ids, apply)
    tile = tile_rows(expected_pairs or T * k, num_experts, in_place=few_rows.suits(2, x.shape[1]))
    in_place = few_rows.suits(tile, x.shape[1])
    places, tile_experts, num_tiles, max_tiles = group_by_expert(expert_ids.reshape(-1), num_experts, tile)
    # Row of x for every place of the tiled order; unused places read row 0 and are never read back.
    source = jnp.zeros(max_tiles * tile, jnp.int32)
    source = source.at[places].set(jnp.arange(T * k, dtype=jnp.int32) // k, mode="drop")
    small = x[source] if in_place else None  # not tile by tile: a gather takes longer than to copy two rows

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = tile_experts[i]
        if small is not None:
            rows = jax.lax.dynamic_slice_in_dim(small, i * tile, tile)
            expert = few_rows.loop_on_all_cores(expert)
        else:
            rows = x[jax.lax.dynamic_slice_in_dim(source, i * tile, tile)]
        return jax.lax.dynamic_update_slice_in_dim(out, apply(expert, rows), i * tile, axis=0)

    out = jax.lax.fori_loop(0, num_tiles, one, jax.lax.empty((max_tiles * tile, x.shape[1]), x.dtype))
    return out.at[places].get(mode="fill", fill_value=0).reshape(T, k, -1)


def _apply_pairs(x: jax.Array, expert_ids: jax.Array, apply: ExpertFunction) -> jax.Array:
    """Pair by pair, unrolled: the experts' weights are then read by all cores at once, not one expert after another."""
    T, k = expert_ids.shape
    out = [apply(jnp.maximum(expert_ids[t, j], 0), x[t : t + 1]) for t in range(T) for j in range(k)]
    return jnp.where(expert_ids[..., None] >= 0, jnp.concatenate(out).reshape(T, k, -1), 0)
