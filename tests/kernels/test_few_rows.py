"""Products of a few rows on a CPU: against float64, and without a copy of what they take from a stack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.kernels.block_fp8 import BLOCK, matmul, take
from glmjax.kernels.block_fp8_matmul import block_fp8_matmul
from glmjax.kernels.few_rows import COMPILER_OPTIONS, FEW, MOST, multiply, multiply_each
from glmjax.kernels.grouped_matmul import grouped_swiglu

LAYERS, LARGE = 3, 256


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@functools.cache
def compiled(f, *arguments):
    """With the options of a CPU's programs; arguments are (shape, dtype)."""
    abstract = [jax.ShapeDtypeStruct(*a) for a in arguments]
    return jax.jit(f).lower(*abstract).compile(dict(COMPILER_OPTIONS))


def run(f, *arguments):
    arguments = tuple(jnp.asarray(a) for a in arguments)
    return np.asarray(compiled(f, *((a.shape, a.dtype.name) for a in arguments))(*arguments).astype(jnp.float32))


@pytest.mark.parametrize("K", [64, 77])
@pytest.mark.parametrize("T", [1, 2, 3, FEW, FEW + 1, 2 * FEW, MOST - 1, MOST, MOST + 1])
def test_rows_equal_float64(T, K):
    x, weight = normal(T, K), normal(40, K)
    x64, weight64 = x.astype(np.float64), weight.T.astype(np.float64)
    # Of a sum in any order: a few roundings of what is added.
    bound = 4 * np.finfo(np.float32).eps * (np.abs(x64) @ np.abs(weight64))
    assert (np.abs(run(matmul, x, weight) - x64 @ weight64) < bound).all()


@pytest.mark.parametrize("T", [1, FEW, FEW + 1, MOST])
def test_heads_have_weights_of_their_own(T):
    x, weight = normal(T, 3, 64), normal(3, 40, 64)
    exact = np.einsum("thk,hrk->thr", x.astype(np.float64), weight)
    assert np.abs(run(multiply, x, weight) - exact).max() < 1e-5


@pytest.mark.parametrize(("weights", "T"), [(1, 1), (2, 2), (FEW, 1), (3, 2)])
def test_each_weight_has_rows_of_its_own(weights, T):
    x, *stack = normal(weights, T, 64), *normal(weights, 40, 64)
    exact = np.einsum("ntk,nrk->ntr", x.astype(np.float64), stack)
    assert np.abs(run(lambda x, *stack: multiply_each(x, stack), x, *stack) - exact).max() < 1e-5


@pytest.mark.parametrize("T", [1, FEW])
def test_bfloat16_is_summed_in_float32(T):
    x, weight = (jnp.asarray(a, jnp.bfloat16) for a in (normal(T, 4096), normal(16, 4096)))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # Half a bit of the result; sums in bfloat16 are off by many.
    assert (np.abs(run(matmul, x, weight) - exact) <= 2.0**-8 * np.abs(exact) + 1e-3).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(value):
    x, weight = normal(2 * FEW, 64), normal(40, 64)
    x[1, 5] = value
    out = run(matmul, x, weight)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(out, 1, axis=0)).all()


@pytest.mark.parametrize(
    ("name", "low", "high"), [("cos", 0, 1e6), ("sin", 0, 1e6), ("exp", -80, 80), ("log", 1e-6, 1e6), ("tanh", -9, 9)]
)
def test_options_leave_functions_as_exact_as_they_are(name, low, high):
    x = np.random.default_rng(0).uniform(low, high, 10_000).astype(np.float32)
    exact = getattr(np, name)(x.astype(np.float64))
    plain = np.asarray(jax.jit(getattr(jnp, name))(x))
    assert np.abs(run(getattr(jnp, name), x) - exact).max() <= 1.1 * np.abs(plain - exact).max()


def product(x, stack, layer):
    return matmul(x, take(stack, layer))


def fp8_product(x, stack, scale, layer):
    return block_fp8_matmul(x, stack, scale, layer)


def heads_product(x, stack, layer):
    return multiply(x, stack[layer])


def experts(x, ids, gate_up, down, layer):
    return grouped_swiglu(x, ids, gate_up, down, layer=layer)


SCALES = ((LAYERS, LARGE // BLOCK, LARGE // BLOCK), "float32")
LAYER = ((), "int32")


def cases(T):
    stack, x = (LAYERS, LARGE, LARGE), (T, LARGE)
    yield "float32", product, (x, "float32"), (stack, "float32"), LAYER
    yield "bfloat16", product, (x, "bfloat16"), (stack, "bfloat16"), LAYER
    yield "fp8", fp8_product, (x, "bfloat16"), (stack, "uint8"), SCALES, LAYER
    yield "heads", heads_product, ((T, 4, LARGE), "float32"), ((LAYERS, 4, LARGE, LARGE), "float32"), LAYER
    weights = (((LAYERS, 8, *n, LARGE, LARGE), "float32") for n in ((2,), ()))
    yield "experts", experts, (x, "float32"), ((T, 2), "int32"), *weights, LAYER


FROM_MEMORY = [case for case in cases(MOST) if case[0] != "fp8"]  # more than FEW rows would do its arithmetic again


@pytest.mark.parametrize("case", [*cases(1), *cases(FEW), *FROM_MEMORY], ids=lambda c: f"{c[0]}-{c[2][0][0]}")
def test_weights_are_not_copied_out_of_their_stack(case):
    _, f, *arguments = case
    matrix = LARGE * LARGE * np.dtype(arguments[1][1]).itemsize if case[0] != "experts" else 4 * LARGE * LARGE
    assert compiled(f, *arguments).memory_analysis().temp_size_in_bytes < matrix / 2


def test_many_rows_are_a_matrix_product():
    def is_product(f, T, *weights):
        return " dot(" in compiled(f, ((T, LARGE), "float32"), *weights).as_text()

    plain = ((LARGE, LARGE), "float32")
    assert [is_product(matmul, T, plain) for T in (MOST, MOST + 1)] == [False, True]
    fp8 = ((LAYERS, LARGE, LARGE), "uint8"), SCALES, LAYER
    assert [is_product(fp8_product, T, *fp8) for T in (FEW, FEW + 1)] == [False, True]


@pytest.mark.parametrize("T", [8, 32, 40])
def test_experts_of_small_groups_are_left_to_all_cores(T):
    """XLA makes one kernel, for one core, of a loop without a sort or a call of a library."""
    (case,) = (case for case in cases(T) if case[0] == "experts")
    _, f, *arguments = case
    text, stack = compiled(f, *arguments).as_text(), ",".join(map(str, arguments[2][0]))
    calls = [line for line in text.splitlines() if 'xla_cpu_small_call="true"' in line]
    assert stack in text
    assert not any(stack in line for line in calls)
