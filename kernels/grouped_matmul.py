"""Experts' SwiGLU over tokens grouped by expert: every expert multiplies just the tokens that chose it.

The jnp form sorts the (token, choice) pairs by expert, cuts each expert's group into tiles of a fixed number of
rows and loops over the tiles in use, so the work follows the routing and no token is ever dropped.  The Hopper form
(``grouped_matmul_hopper``) does the same with one kernel for all gate and up projections and one for all down
projections.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from glmjax.kernels import few_rows
from glmjax.kernels.block_fp8 import BLOCK, dequantize, matmul, take, weight_dtype
from glmjax.kernels.check import FLOAT32, FLOATS, FP8, INT32, check_arrays, check_place, check_scale
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.grouped_schedule import group_by_expert, tile_rows

WGMMA_ROWS = 64  # of a weight, at once
UNROLL_PAIRS = 8  # up to here pairs are not grouped
ExpertFunction = Callable[[Sequence[jax.Array], jax.Array], jax.Array]  # (n experts' ids, rows [n, B, D]) -> [n, B, D]


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
      ConfigError: arrays do not fit one another, a scale is missing, or the Hopper kernel is insisted on and not for
        these shapes.
    """
    check_arrays(
        "grouped_swiglu",
        {
            "x": (x, "T D", FLOATS),
            "expert_ids": (expert_ids, "T k", INT32),
            "gate_up": (gate_up, "M E 2 F D", FLOATS + FP8),
            "down": (down, "M E D F", FLOATS + FP8),
            "gate_up_scale": (gate_up_scale, f"M E 2 F/{BLOCK} D/{BLOCK}", FLOAT32),
            "down_scale": (down_scale, f"M E D/{BLOCK} F/{BLOCK}", FLOAT32),
            "pair_weights": (pair_weights, "T k", FLOAT32),
        },
        optional=("gate_up_scale", "down_scale", "pair_weights"),
    )
    check_scale("grouped_swiglu", "gate_up", gate_up, "gate_up_scale", gate_up_scale, FP8)
    check_scale("grouped_swiglu", "down", down, "down_scale", down_scale, FP8)
    check_place("grouped_swiglu", "layer", layer, gate_up.shape[0])
    fp8 = gate_up_scale is not None
    obstacle = weight_obstacle(x, gate_up, fp8=fp8) or weight_obstacle(x, down, fp8=fp8)
    if fp8 != (down_scale is not None):
        obstacle = f"{gate_up.dtype} and {down.dtype} weights, the kernel is for both with scales or none"
    chosen = choose("grouped_swiglu", implementation, kernel="hopper", obstacle=obstacle)
    if chosen == "hopper" and expert_ids.size:
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

    def multiply(
        rows: jax.Array, experts: Sequence[jax.Array], values: jax.Array, scale: jax.Array | None
    ) -> jax.Array:
        def weight(expert: jax.Array) -> jax.Array:
            found = take(values, layer, expert)
            if scale is None:
                found = found.astype(x.dtype)
            else:
                found = dequantize(found, scale[layer, expert], weight_dtype(rows))
            return found.reshape(-1, rows.shape[-1])

        if len(experts) > 1:
            return few_rows.multiply_each(rows, [weight(expert) for expert in experts]).astype(x.dtype)
        return matmul(rows, weight(experts[0]), dequantized=scale is not None)

    def apply(experts: Sequence[jax.Array], rows: jax.Array) -> jax.Array:
        gate, up = jnp.split(multiply(rows, experts, gate_up, gate_up_scale), 2, axis=-1)
        return multiply(jax.nn.silu(gate) * up, experts, down, down_scale)

    out = grouped_apply(x, expert_ids, gate_up.shape[1], apply, expected_pairs)
    if pair_weights is None:
        return out
    return jnp.einsum("tkd,tk->td", out.astype(jnp.float32), pair_weights)


def weight_obstacle(x: jax.Array, weights: jax.Array, *, fp8: bool) -> str | None:
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
      apply: one or more experts, each on a tile of rows of its own; more only in programs that ``few_rows`` suits.
      expected_pairs: pairs that are not -1, about; all unless told.

    Returns:
      [T, k, D]: output of token t's j-th expert.
    """
    T, k = expert_ids.shape
    if T * k == 0:
        return jnp.zeros((T, k, x.shape[1]), x.dtype)
    if T * k <= UNROLL_PAIRS:
        return _apply_pairs(x, expert_ids, apply)
    tile = tile_rows(expected_pairs or T * k, num_experts, in_place=few_rows.suits(2, x.shape[1]))
    in_place = few_rows.suits(tile, x.shape[1])
    at_once = max(1, few_rows.FEW // tile) if in_place else 1
    places, tile_experts, num_tiles, max_tiles = group_by_expert(expert_ids.reshape(-1), num_experts, tile, at_once)
    # Row of x for every place of the tiled order; unused places read row 0 and are never read back.
    source = jnp.zeros(max_tiles * tile, jnp.int32)
    source = source.at[places].set(jnp.arange(T * k, dtype=jnp.int32) // k, mode="drop")
    small = x[source] if in_place else None  # not tile by tile: a gather takes longer than to copy a few rows

    def some(i: jax.Array, out: jax.Array) -> jax.Array:
        first = i * at_once
        if small is not None:
            first = few_rows.loop_on_all_cores(first)
            rows = jax.lax.dynamic_slice_in_dim(small, first * tile, at_once * tile)
        else:
            rows = x[jax.lax.dynamic_slice_in_dim(source, first * tile, tile)]
        experts = [tile_experts[jnp.minimum(first + j, num_tiles - 1)] for j in range(at_once)]
        done = apply(experts, rows.reshape(at_once, tile, -1)).reshape(at_once * tile, -1)
        return jax.lax.dynamic_update_slice_in_dim(out, done, first * tile, axis=0)

    turns = (num_tiles + at_once - 1) // at_once
    out = jax.lax.fori_loop(0, turns, some, jax.lax.empty((max_tiles * tile, x.shape[1]), x.dtype))
    return out.at[places].get(mode="fill", fill_value=0).reshape(T, k, -1)


def _apply_pairs(x: jax.Array, expert_ids: jax.Array, apply: ExpertFunction) -> jax.Array:
    """A few pairs at a time, unrolled: the experts' weights are then read by all cores at once."""
    T, k = expert_ids.shape
    at_once = few_rows.FEW if few_rows.suits(1, x.shape[1]) else 1
    pairs = [(jnp.maximum(expert_ids[t, j], 0), x[t]) for t in range(T) for j in range(k)]
    out = []
    for some in itertools.batched(pairs, at_once):
        experts, rows = zip(*some, strict=True)
        out.append(apply(experts, jnp.stack(rows)[:, None]))
    return jnp.where(expert_ids[..., None] >= 0, jnp.concatenate(out).reshape(T, k, -1), 0)
