"""Experts and plain linear layers on Hopper: how the products of ``grouped_kernel`` are cut up and strung together.

    tokens -> FP8 -> sorted by expert -> [gate, up, SwiGLU] -> FP8 -> [down] -> summed by token

With tiles of 128 tokens (prefill) an item has 128 columns of the hidden layer, and its block quantises them. With small
tiles (decode) it has 64, so that eight experts make 256 items and not 128, and XLA quantises the little there is.

What exists does not fit. JAX's ``ragged_dot_mgpu`` (bf16) computes rows / tile + experts - 1 tiles whether experts have
tokens or not, searches all experts in every block, takes 64 tokens or more at a time and has no SwiGLU; tokamax has no
kernel for FP8 times FP8 on Hopper, and XLA's ``ragged_dot`` is a dense product with every expert.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from glmjax.kernels.block_fp8 import BLOCK, as_fp8, quantize_rows
from glmjax.kernels.grouped_kernel import grouped_matmul
from glmjax.kernels.grouped_plan import FP8, LINE_BYTES, TOKEN_TILES, WGMMA_ROWS, Tuning, cut_into_slabs
from glmjax.kernels.grouped_schedule import group_by_expert, tile_tokens
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK

MAX_STAGES = 8  # 140 KiB of weights in flight; more hide nothing
SLACK_BYTES = 1024  # barriers
SPLIT_TILE = 32  # partial sums of larger tiles would spill on their way out
f32 = jnp.float32


def choose_tuning(tile: int, slabs: int, slab_rows: int, *, sms: int = MULTIPROCESSORS) -> Tuning:
    """Tuning for tiles of so many tokens and a matrix of ``slabs`` x ``slab_rows`` rows.

    Small tiles leave room for two blocks on a multiprocessor: while one starts or ends, the other keeps loading. With
    tiles of 128 and the tensor cores at full rate a multiprocessor asks the L2 cache for 48 bytes per cycle, which is
    about all it gives; blocks in pairs ask for 40.
    """
    rows = 2 * WGMMA_ROWS if tile >= 64 and slab_rows % (2 * WGMMA_ROWS) == 0 else WGMMA_ROWS
    blocks_per_sm = 2 if tile <= 32 else 1
    stage = slabs * rows * LINE_BYTES + tile * (LINE_BYTES + 4)
    room = SHARED_BYTES_PER_BLOCK // blocks_per_sm - rows * tile * 2 - SLACK_BYTES
    cluster = 2 if tile == 128 and slab_rows % (2 * rows) == 0 and sms % 2 == 0 else 1
    return Tuning(tile, rows, min(MAX_STAGES, room // stage), blocks_per_sm * sms, cluster=cluster)


def experts_swiglu(
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
    sms: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """The Hopper form of ``glmjax.kernels.grouped_matmul.grouped_swiglu``; see there."""
    (T, k), (_, E, _, F, D) = expert_ids.shape, gate_up.shape
    fp8 = gate_up_scale is not None
    tile = tile_tokens(expected_pairs or T * k, E)
    places, tile_experts, num_tiles, max_tiles = group_by_expert(expert_ids.reshape(-1), E, tile)
    # Token of every place of the tiled order; unused places read token 0 and are never read back.
    source = jnp.zeros(max_tiles * tile, jnp.int32)
    source = source.at[places].set(jnp.arange(T * k, dtype=jnp.int32) // k, mode="drop")
    schedule = (tile_experts + jnp.asarray(layer, jnp.int32) * E, num_tiles[None])

    def product(x: Any, weights: jax.Array, scale: jax.Array | None, tuning: Tuning, quantize: bool = False) -> Any:
        values, x_scale = x
        weights = weights.reshape(-1, *weights.shape[2:])
        scale = None if scale is None else scale.reshape(-1, *scale.shape[2:])
        return grouped_matmul(
            values, x_scale, weights, scale, *schedule, tuning=tuning, quantize=quantize, interpret=interpret
        )

    first = choose_tuning(tile, 2, F, sms=sms)
    second = choose_tuning(tile, *cut_into_slabs(D), sms=sms)
    if not fp8:
        hidden = product((x[source], None), gate_up, None, first)
        out = product((hidden, None), down, None, second)
    else:
        values, scale = quantize_rows(x)
        in_kernel = first.rows == first.tile == BLOCK
        hidden = product((values[source], scale[source].T), as_fp8(gate_up), gate_up_scale, first, in_kernel)
        hidden = hidden if in_kernel else _quantize(hidden)
        out = product(hidden, as_fp8(down), down_scale, second)
    places = places.reshape(T, k)
    if pair_weights is None:
        return out.at[places].get(mode="fill", fill_value=0)
    # Choice by choice, so that XLA makes one loop of it and never holds [T, k, D].
    return sum(
        out.at[places[:, j]].get(mode="fill", fill_value=0).astype(f32) * pair_weights[:, j, None] for j in range(k)
    )


def linear_tuning(T: int, R: int, K: int, sms: int = MULTIPROCESSORS) -> Tuning:
    """Tuning for T tokens times a block-FP8 [R, K].

    Until every multiprocessor has an item, tiles become smaller, and then K is split into parts of two lines or more.
    Where that is not enough, tiles become as small as they can be, and after them the parts.
    """
    slabs, slab_rows = cut_into_slabs(R)
    lines = K // LINE_BYTES
    largest = next((tile for tile in TOKEN_TILES if tile >= T), TOKEN_TILES[-1])
    tiles = [tile for tile in reversed(TOKEN_TILES) if tile <= largest]
    splits = [n for n in range(1, lines // 2 + 1) if lines % n == 0] or [1]
    cuts = [(tile, 1) for tile in tiles if tile > SPLIT_TILE]
    cuts += [(tile, n) for tile in tiles if tile <= SPLIT_TILE for n in splits]
    cuts += [(tile, lines) for tile in tiles if tile <= SPLIT_TILE]
    tunings = [replace(choose_tuning(tile, slabs, slab_rows, sms=sms), splits=n) for tile, n in cuts]

    def items(tuning: Tuning) -> int:
        return -(-T // tuning.tile) * (slab_rows // tuning.rows) * tuning.splits

    return next((tuning for tuning in tunings if items(tuning) >= sms), max(tunings, key=items))


def linear(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    layer: jax.Array | int = 0,
    sms: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """The Hopper form of ``glmjax.kernels.block_fp8_matmul.block_fp8_matmul``: one group of all tokens."""
    (T, K), R = x.shape, weight.shape[-2]
    tuning = linear_tuning(T, R, K, sms)
    tiles = -(-T // tuning.tile)
    values, x_scale = _quantize(jnp.pad(x, [(0, tiles * tuning.tile - T), (0, 0)]))
    matrix, num_tiles = jnp.full(tiles, layer, jnp.int32), jnp.full(1, tiles, jnp.int32)
    out = grouped_matmul(
        values, x_scale, as_fp8(weight), scale, matrix, num_tiles, tuning=tuning, out_dtype=x.dtype, interpret=interpret
    )
    return out[:T]


def _quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[P, K] -> values, and scales [K / 128, P] as the kernel reads them."""
    values, scale = quantize_rows(x)
    return values, scale.T


def cases() -> tuple[Case, ...]:
    """GLM-5.3 on eight GPUs, 32 experts of 256 on each, and its block-FP8 linear layers, whole and under TP.

    Decode of 8 requests on each data-parallel rank, without drafts and with three, and of fewer, which a linear layer
    pads; chunks of 2,048 tokens of a prompt. Experts in bf16 are an operation of its own: eight GPUs do not hold them.
    """
    decode = {
        "TP8 batch 8": 8,
        "TP4 batch 8": 16,
        "TP8 batch 8, drafts": 32,
        "DP8 batch 8": 64,
        "DP8 batch 8, drafts": 256,
    }
    prefill = {"TP8 or PCP8 prefill": 2048, "TP4 prefill": 4096, "DP8 prefill": 16384}
    experts = [_expert_case(name, T, fp8=True) for name, T in (decode | prefill).items()]
    experts += [_expert_case("DP8 batch 8", 64, fp8=False), _expert_case("DP8 prefill", 16384, fp8=False)]
    layers: dict[tuple[int, int, int], str] = {}
    for tp in (1, 4, 8):
        for T in (8, 32, 256, 2048) if tp == 1 else (8, 32, 2048):
            for name, shape in _layer_shapes(tp).items():
                layers.setdefault((T, *shape), name)
    return (*experts, *(_linear_case(name, *shape) for shape, name in layers.items()))


def _layer_shapes(tp: int) -> dict[str, tuple[int, int]]:
    """[R, K] of every block-FP8 linear layer on one of ``tp`` GPUs."""
    D = 6144
    whole = {
        "query_down": (2048, D),
        "kv_down": (576, D),
        "index query": (4096, 2048),
        "index key": (128, D),
    }
    split = {
        "query_up": (16384 // tp, 2048),
        "output": (D, 16384 // tp),
        "shared gate_up": (4096 // tp, D),
        "shared down": (D, 2048 // tp),
        "dense gate_up": (24576 // tp, D),
        "dense down": (D, 12288 // tp),
    }
    return whole | {name if tp == 1 else f"{name} TP{tp}": shape for name, shape in split.items()}


def _expert_case(name: str, T: int, *, fp8: bool) -> Case:
    """T tokens of all GPUs, of whose choices an eighth is for this GPU's experts."""
    k, E, F, D = 8, 32, 2048, 6144
    pairs, itemsize = T * k // 8, 1 if fp8 else 2
    weights = FP8 if fp8 else jnp.bfloat16
    used = round(E * (1 - (1 - 1 / E) ** pairs))  # experts with tokens, if all are as likely
    weight_bytes = used * 3 * F * D * itemsize + (used * 3 * F * D // BLOCK**2 * 4 if fp8 else 0)
    # The token and hidden row of a pair are read once and its hidden row and output written; then the sum is taken.
    row_bytes = pairs * ((D + 2 * F) * itemsize + 2 * D * 2) + T * D * (2 + 4)
    shapes = [
        ((T, D), jnp.bfloat16),
        ((T, k), jnp.int32),
        ((T, k), f32),
        ((1, E, 2, F, D), weights),
        ((1, E, D, F), weights),
        *([((1, E, 2, F // BLOCK, D // BLOCK), f32), ((1, E, D // BLOCK, F // BLOCK), f32)] if fp8 else []),
    ]

    def function(
        x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, *scales: Any
    ) -> Any:
        named = dict(zip(("gate_up_scale", "down_scale"), scales, strict=False))
        return experts_swiglu(x, ids, gate_up, down, pair_weights=weights, expected_pairs=pairs, **named)

    return Case(
        kernel="grouped_matmul",
        implementation="hopper",
        shape=f"{name}: T={T}, {pairs} pairs, E={E} F={F} D={D} {'fp8' if fp8 else 'bf16'}",
        function=function,
        arguments=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        bytes=weight_bytes + row_bytes,
        flops=6 * pairs * F * D,
        arithmetic="float8_e4m3fn" if fp8 else "bfloat16",
        stages=choose_tuning(tile_tokens(pairs, E), 2, F).stages,
        limits={1: E},
    )


def _linear_case(name: str, T: int, R: int, K: int) -> Case:
    shapes = [((T, K), jnp.bfloat16), ((R, K), FP8), ((-(-R // BLOCK), K // BLOCK), f32)]
    tuning = linear_tuning(T, R, K)
    parts = 4 * tuning.splits * T * R if tuning.splits > 1 else 0  # of sums, which are read again from the L2 cache
    return Case(
        kernel="block_fp8_matmul",
        implementation="hopper",
        shape=f"{name}: T={T} R={R} K={K}",
        function=linear,
        arguments=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        bytes=R * K + T * (K + 2 * R) + parts,
        flops=2 * T * R * K,
        arithmetic="float8_e4m3fn",
        stages=tuning.stages,
    )
