"""The Hopper kernel for experts and block-FP8 layers: simulated against float64, and compiled for H200s.

Simulated runs look for races, on two multiprocessors, so that a block has several items and stages are used again.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_addresses import Values, instructions
from h200_code import check_code, compile_case, compile_program, needs_plugin
from jax.experimental.pallas import mosaic_gpu as plgpu

from glmjax.errors import ConfigError
from glmjax.kernels.block_fp8 import BLOCK, dequantize, quantize_rows
from glmjax.kernels.grouped_kernel import grouped_matmul
from glmjax.kernels.grouped_matmul import grouped_swiglu
from glmjax.kernels.grouped_matmul_hopper import cases, choose_tuning, experts_swiglu, linear, linear_tuning
from glmjax.kernels.grouped_plan import Tuning, cut_into_slabs
from glmjax.kernels.grouped_schedule import tile_tokens
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import MULTIPROCESSORS

FP8, BF16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
BF16_STEP = 2.0**-8  # half of the distance of two bf16 numbers, relative
FP8_STEP = 2.0**-4
simulate = functools.partial(plgpu.InterpretGPUParams, detect_races=True)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def exact(x):
    return np.asarray(x.astype(f32)).astype(np.float64)


def fp8_weights(*shape, seed=0):
    """Values, scales and their product in float64; the scales of neighbouring blocks differ by up to 16 times."""
    values = jnp.asarray(random(*shape, seed=seed), FP8)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), shape[-1] // BLOCK)
    scale = jnp.asarray(2.0 ** np.random.default_rng(seed).uniform(-3, 1, blocks), f32)
    return values, scale, exact(dequantize(values, scale, f32))


def fp8_tokens(x):
    """Values and scales as the kernel takes them, and their product in float64."""
    values, scale = quantize_rows(jnp.asarray(x, BF16))
    return values, scale.T, exact(values) * np.repeat(np.asarray(scale, np.float64), BLOCK, axis=-1)


def swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def of_tiles(x, weights, matrices, tile):
    """Float64: each tile of x by the matrix (or gate and up) of its group."""
    out = []
    for i, matrix in enumerate(matrices):
        product = x[i * tile : (i + 1) * tile] @ np.swapaxes(weights[matrix], -1, -2)
        out.append(swiglu(*product) if product.ndim == 3 else product)
    return np.concatenate(out)


def assert_close(out, expected, relative):
    """Within the rounding of the result, and of sums in float32."""
    error = np.abs(exact(out) - expected)
    assert (error <= relative * np.abs(expected) + 1e-5 * np.abs(expected).max()).all(), error.max()


# One product, simulated.


@pytest.mark.parametrize(
    ("tuning", "shape"),
    [
        (Tuning(tile=8, rows=64, stages=2, blocks=2), (3, 2, 128, 256)),
        (Tuning(tile=64, rows=128, stages=3, blocks=2), (3, 2, 128, 384)),
        (Tuning(tile=16, rows=64, stages=2, blocks=3), (3, 256, 256)),
        (Tuning(tile=8, rows=64, stages=2, blocks=2), (3, 192, 256)),  # a last scale block of 64 rows
        (Tuning(tile=8, rows=64, stages=2, blocks=2, splits=2), (3, 192, 512)),
        (Tuning(tile=32, rows=64, stages=2, blocks=1, splits=4), (3, 256, 512)),
        (Tuning(tile=16, rows=64, stages=2, blocks=4, cluster=2), (3, 2, 128, 384)),
        (Tuning(tile=16, rows=128, stages=2, blocks=2, cluster=2), (3, 512, 256)),
    ],
)
def test_fp8_product(tuning, shape):
    matrices, used = [2, 2, 0, 1], 3
    x = random(len(matrices) * tuning.tile, shape[-1])
    x[used * tuning.tile :] = np.nan  # the last tile is not in use
    values, x_scale, x_exact = fp8_tokens(x)
    weights, scale, w_exact = fp8_weights(*shape)
    schedule = jnp.array(matrices, jnp.int32), jnp.array([used], jnp.int32)
    out = grouped_matmul(values, x_scale, weights, scale, *schedule, tuning=tuning, interpret=simulate())
    expected = of_tiles(x_exact, w_exact, matrices[:used], tuning.tile)
    assert_close(out[: len(expected)], expected, BF16_STEP)


@pytest.mark.parametrize("shape", [(3, 2, 64, 192), (3, 192, 128)])
def test_bf16_product(shape):
    tuning, matrices = Tuning(tile=8, rows=64, stages=2, blocks=2), [1, 0, 2]
    x, weights = jnp.asarray(random(24, shape[-1]), BF16), jnp.asarray(random(*shape), BF16)
    schedule = jnp.array(matrices, jnp.int32), jnp.array([3], jnp.int32)
    out = grouped_matmul(x, None, weights, None, *schedule, tuning=tuning, interpret=simulate())
    assert_close(out, of_tiles(exact(x), exact(weights), matrices, 8), BF16_STEP)


def test_hidden_layer_in_fp8():
    """Its largest value of 128 is in the half of the other warpgroup, and one token is all zeros."""
    tuning, matrices = Tuning(tile=128, rows=128, stages=2, blocks=2, cluster=2), [1, 0]
    x = random(256, 256)
    x[5] = 0
    values, x_scale, x_exact = fp8_tokens(x)
    weights, scale, w_exact = fp8_weights(2, 2, 256, 256)
    schedule = jnp.array(matrices, jnp.int32), jnp.array([2], jnp.int32)
    out, out_scale = grouped_matmul(
        values, x_scale, weights, scale, *schedule, tuning=tuning, quantize=True, interpret=simulate()
    )
    expected = of_tiles(x_exact, w_exact, matrices, 128)
    peaks = np.abs(expected).reshape(256, 2, BLOCK).max(axis=-1)
    assert_close(out_scale.T, np.where(peaks > 0, peaks / 448, 1), BF16_STEP)
    step = np.repeat(np.asarray(out_scale.T, np.float64), BLOCK, axis=-1)
    error = np.abs(exact(out) * step - expected)
    # Rounded twice; below 2^-6 FP8 numbers are 2^-9 apart.
    assert (error <= (FP8_STEP + 2 * BF16_STEP) * np.abs(expected) + step * 2.0**-10 + 1e-6).all()
    assert (exact(out)[5] == 0).all()


# Experts, simulated.


@functools.partial(jax.jit, static_argnames="expected_pairs")
def simulated_experts(*arguments, expected_pairs=None, **options):
    return experts_swiglu(*arguments, expected_pairs=expected_pairs, sms=2, interpret=simulate(), **options)


def experts(x, ids, E, F=128, *, fp8=True, as_bytes=False, **options):
    """The kernel's result and float64's, which knows no FP8 but that of the weights; the second layer of two."""
    D = x.shape[1]
    shapes = (2, E, 2, F, D), (2, E, D, F)
    scales = {}
    if fp8:
        (gate_up, up_scale, gu), (down, down_scale, dn) = (
            fp8_weights(*shape, seed=i) for i, shape in enumerate(shapes)
        )
        scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
    else:
        gate_up, down = (jnp.asarray(random(*shape), BF16) for shape in shapes)
        gu, dn = exact(gate_up), exact(down)
    if as_bytes:
        gate_up, down = (jax.lax.bitcast_convert_type(w, jnp.uint8) for w in (gate_up, down))
    x, ids = jnp.asarray(x, BF16), jnp.asarray(ids, jnp.int32)
    out = simulated_experts(x, ids, gate_up, down, layer=jnp.int32(1), **scales, **options)
    expected = np.zeros((*ids.shape, D))
    for t, j in np.argwhere(np.asarray(ids) >= 0):
        e = int(ids[t, j])
        expected[t, j] = dn[1, e] @ swiglu(*(gu[1, e] @ exact(x)[t]))
    return np.asarray(out.astype(f32), np.float64), expected


def assert_as_good_as_fp8(out, expected):
    """Two roundings of activations to FP8, each of 2^-4 at most and about a third of that in the mean square."""
    assert np.linalg.norm(out - expected) <= 0.06 * np.linalg.norm(expected)


@pytest.mark.parametrize("fp8", [True, False])
def test_experts_of_a_few_tokens(fp8):
    ids = np.random.default_rng(1).integers(-1, 5, (6, 3))
    out, expected = experts(random(6, 256), ids, 5, fp8=fp8)
    if fp8:
        assert_as_good_as_fp8(out, expected)
    else:
        assert np.linalg.norm(out - expected) <= BF16_STEP * np.linalg.norm(expected)
    assert (out[ids < 0] == 0).all()


GROUPED = {"E": 3, "expected_pairs": 12}  # tiles of 8: one program for the tests that follow


@pytest.mark.parametrize("sizes", [(1, 0, 7), (8, 0, 0), (9, 1, 6), (0, 16, 0)])
def test_groups_end_before_at_and_after_the_edge_of_a_tile(sizes):
    assert tile_tokens(12, 3) == 8
    ids = np.full(16, -1)
    ids[: sum(sizes)] = np.repeat(range(3), sizes)
    ids = np.random.default_rng(2).permutation(ids)[:, None]
    out, expected = experts(random(16, 128), ids, **GROUPED)
    assert_as_good_as_fp8(out, expected)
    assert (out[ids < 0] == 0).all()


def test_all_pairs_may_be_skipped():
    out, _ = experts(random(16, 128), np.full((16, 1), -1), **GROUPED)
    assert (out == 0).all()


def test_not_a_number_stays_with_its_token():
    x = random(16, 128)
    x[0], x[3, 5], x[4] = np.nan, np.inf, np.nan
    ids = np.array([-1, 0, 0, 0, 1, 1, -1, 2, 0, 0, 0, 0, 0, 0, 0, 2])[:, None]
    with np.errstate(invalid="ignore"):
        out, expected = experts(x, ids, **GROUPED)
    assert np.isnan(out[[3, 4]]).all()
    clean = np.delete(np.arange(16), [3, 4])
    assert_as_good_as_fp8(out[clean], expected[clean])


def test_experts_of_many_tokens_quantise_in_the_kernel():
    ids = np.random.default_rng(3).integers(-1, 2, (70, 2))
    assert tile_tokens(140, 2) == 128
    out, expected = experts(random(70, 128), ids, 2, as_bytes=True)
    assert_as_good_as_fp8(out, expected)
    assert (out[ids < 0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(63, 0, 65), (64, 1, 64), (127, 128, 129), (0, 0, 0)])
def test_groups_end_before_at_and_after_the_edge_of_a_large_tile(sizes):
    assert tile_tokens(140, 3) == 128
    ids = np.full(384, -1)  # as many for all: one program
    ids[: sum(sizes)] = np.repeat(range(3), sizes)
    ids = np.random.default_rng(4).permutation(ids)[:, None]
    out, expected = experts(random(384, 128), ids, 3, expected_pairs=140)
    assert_as_good_as_fp8(out, expected)
    assert (out[ids < 0] == 0).all()


def test_weighted_sum_over_the_choices():
    ids, weights = np.array([[0, 2], [1, -1], [-1, -1]]), random(3, 2)
    out, expected = experts(random(3, 128), ids, 3, pair_weights=jnp.asarray(weights))
    assert out.shape == (3, 128)
    assert_as_good_as_fp8(out, np.einsum("tkd,tk->td", expected, weights))
    assert (out[2] == 0).all()


# Linear layers, simulated.


@pytest.mark.parametrize(("T", "R", "K"), [(1, 192, 512), (9, 256, 256), (65, 512, 128)])
def test_linear(T, R, K):
    x = jnp.asarray(random(T, K), BF16)
    _, _, x_exact = fp8_tokens(x)
    stack, scale, exact_stack = fp8_weights(2, R, K)
    out = linear(x, stack, scale, layer=1, sms=2, interpret=simulate())
    assert_close(out, x_exact @ exact_stack[1].T, BF16_STEP)


# What is refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 24}, "tile must be one of"),
        ({"rows": 96}, "rows 64 or 128"),
        ({"stages": 0}, "at least 1"),
        ({"tile": 16}, "do not fill tiles of 16"),
        ({"rows": 128}, "do not fill items of 1 x 128"),
        ({"splits": 3}, "do not fill 3 parts"),
        ({"cluster": 4}, "cluster must be 1 or 2"),
        ({"cluster": 2, "blocks": 2}, "do not fill items of 2 x 64"),
    ],
)
def test_tuning_that_does_not_fit_is_refused(change, message):
    x, weights = jnp.zeros((8, 128), BF16), jnp.zeros((1, 64, 128), BF16)
    one = jnp.zeros(1, jnp.int32)
    with pytest.raises(ConfigError, match=message):
        tuning = Tuning(**{"tile": 8, "rows": 64, "stages": 2, "blocks": 1, **change})
        grouped_matmul(x, None, weights, None, one, one, tuning=tuning)


def test_kernel_cannot_be_insisted_on_for_float32():
    x, ids = jnp.zeros((1, 128)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ConfigError, match="activations are float32"):
        grouped_swiglu(x, ids, jnp.zeros((1, 1, 2, 64, 128)), jnp.zeros((1, 1, 128, 64)), implementation="hopper")


# The work of a decode step fills an H200.


D, F, E = 6144, 2048, 32


def test_eight_experts_fill_an_h200():
    """A global batch of 8 on 8 GPUs brings a GPU 8 pairs, and with them 8 experts."""
    tile = tile_tokens(8, E)
    for slabs, slab_rows in ((2, F), cut_into_slabs(D)):
        tuning = choose_tuning(tile, slabs, slab_rows)
        assert tuning.blocks >= MULTIPROCESSORS
        assert 8 * slab_rows // tuning.rows >= MULTIPROCESSORS


LINEAR = [case for case in cases() if case.kernel == "block_fp8_matmul"]


# Of eight tokens, where parts of K of one line are not enough either: as many items as there can be.
SHORT = {"index key: T=8 R=128 K=6144", "shared down TP8: T=8 R=6144 K=256"}


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.shape)
def test_linear_layers_fill_an_h200(case):
    T, (R, K) = case.arguments[0].shape[0], case.arguments[1].shape
    tuning = linear_tuning(T, R, K)
    slabs, slab_rows = cut_into_slabs(R)
    items = -(-T // tuning.tile) * slab_rows // tuning.rows * tuning.splits
    if case.shape not in SHORT:
        assert items >= MULTIPROCESSORS
    else:
        assert T == tuning.tile == 8
        assert items == 96 == (R // slabs // 64) * (K // BLOCK)


# Machine code.


def compile_products(*products):
    """Machine code of products given by tuning, shape of the weights, whether in FP8, and whether to quantise."""
    arguments, calls = [], []
    for tuning, shape, fp8, quantize in products:
        tiles, depth, dtype = 20, shape[-1], FP8 if fp8 else BF16
        blocks = (*shape[:-2], -(-shape[-2] // BLOCK), depth // BLOCK)
        arguments.append(((tiles * tuning.tile, depth), dtype))
        arguments += [((depth // BLOCK, tiles * tuning.tile), f32), (shape, dtype), (blocks, f32)]
        arguments += [((tiles,), jnp.int32), ((1,), jnp.int32)]
        calls.append((fp8, functools.partial(grouped_matmul, tuning=tuning, quantize=quantize)))

    def all_of_them(*flat):
        results = []
        for i, (fp8, call) in enumerate(calls):
            x, x_scale, weights, scale, *schedule = flat[6 * i : 6 * i + 6]
            results.append(call(x, x_scale if fp8 else None, weights, scale if fp8 else None, *schedule))
        return results

    arguments = tuple(jax.ShapeDtypeStruct(*argument) for argument in arguments)
    case = Case("grouped_matmul", "hopper", "", all_of_them, arguments, 0, 0, "float8_e4m3fn")
    codes = [code for code in compile_case(case) if code.blocks is not None]
    assert len(codes) == len(products)
    return codes


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "fp8"), [(8, True), (16, True), (32, True), (64, True), (128, True), (8, False), (128, False)]
)
def test_machine_code_of_the_experts(tile, fp8):
    first, second = choose_tuning(tile, 2, F), choose_tuning(tile, *cut_into_slabs(D))
    codes = compile_products((first, (E, 2, F, D), fp8, fp8 and tile == 128), (second, (E, D, F), fp8, False))
    for code in codes:
        check_code(code, "QGMMA" if fp8 else "HGMMA", "UTMALDG")
        if tile <= 32:  # two blocks on a multiprocessor
            assert code.blocks == 2 * MULTIPROCESSORS
            assert 2 * code.threads * code.registers <= 65536
            assert 2 * (code.shared_bytes + 1024) <= 228 << 10


@needs_plugin
@pytest.mark.slow
def test_machine_code_of_the_linear_layers():
    unlike = {}  # one of those that differ in lengths alone
    for case in LINEAR:
        x, weight, _ = case.arguments
        tuning, (slabs, _) = linear_tuning(*x.shape[:1], *weight.shape), cut_into_slabs(weight.shape[0])
        kind = tuning.tile, tuning.rows, slabs, tuning.splits > 1, tuning.cluster
        unlike[kind] = tuning, (1, *weight.shape), True, False
    for code in compile_products(*unlike.values()):
        check_code(code, "QGMMA", "UTMALDG")


@needs_plugin
@pytest.mark.slow
def test_experts_of_a_layer_are_read_where_they_are():
    """One layer of a stack: two kernels, no copy of the layer, and no loop of XLA's in the schedule."""
    case = cases()[0]
    stack = [jax.ShapeDtypeStruct((4, *x.shape[1:]), x.dtype) if x.ndim > 2 else x for x in case.arguments]

    def function(x, ids, weights, layer, gate_up, down, up_scale, down_scale):
        scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
        return experts_swiglu(x, ids, gate_up, down, layer=layer, pair_weights=weights, **scales)

    arguments = (*stack[:3], jax.ShapeDtypeStruct((), jnp.int32), *stack[3:])
    program = compile_program(dataclasses.replace(case, function=function, arguments=arguments))
    assert program.memory.temporaries < 8 << 20
    assert " while(" not in program.hlo
    assert program.hlo.count('custom_call_target="mosaic_gpu') == 2


@needs_plugin
@pytest.mark.slow
def test_matrices_beyond_2_to_the_31_bytes():
    """A matrix's number is a coordinate of its own in the copies of weights; the hardware makes it an address."""
    tuning, matrices, tiles = choose_tuning(8, 2, F), 79 * E, 20
    shapes = [((tiles * tuning.tile, D), FP8), ((D // BLOCK, tiles * tuning.tile), f32)]
    shapes += [((matrices, 2, F, D), FP8), ((matrices, 2, F // BLOCK, D // BLOCK), f32)]
    shapes += [((tiles,), jnp.int32), ((1,), jnp.int32)]
    arguments = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    product = functools.partial(grouped_matmul, tuning=tuning)
    program = compile_program(Case("grouped_matmul", "hopper", "", product, arguments, 0, 0, "float8_e4m3fn"))
    last = Values(128, lambda array: matrices - 1)
    with instructions(program.hlo, "bulk.tensor.5d") as copies:
        assert [last.of(list(copy.operands)[-1]) for copy in copies] == [2 * matrices - 2, 2 * matrices - 1]
    assert (matrices - 1) * 2 * F * D > 1 << 31
