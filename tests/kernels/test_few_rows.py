"""Products of a few rows on a CPU: against float64, and without a copy of what they take from a stack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.kernels.block_fp8 import BLOCK, matmul, take
from glmjax.kernels.block_fp8_matmul import block_fp8_matmul
from glmjax.kernels.few_rows import COMPILER_OPTIONS, FEW, multiply
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
@pytest.mark.parametrize("T", range(1, FEW + 2))
def test_rows_equal_float64(T, K):
    x, weight = normal(T, K), normal(40, K)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(run(matmul, x, weight) - exact).max() < 1e-5


@pytest.mark.parametrize("T", [1, FEW])
def test_heads_have_weights_of_their_own(T):
    x, weight = normal(T, 3, 64), normal(3, 40, 64)
    exact = np.einsum("thk,hrk->thr", x.astype(np.float64), weight)
    assert np.abs(run(multiply, x, weight) - exact).max() < 1e-5


@pytest.mark.parametrize("T", [1, FEW])
def test_bfloat16_is_summed_in_float32(T):
    x, weight = (jnp.asarray(a, jnp.bfloat16) for a in (normal(T, 4096), normal(16, 4096)))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # Half a bit of the result; sums in bfloat16 are off by many.
    assert (np.abs(run(matmul, x, weight) - exact) <= 2.0**-8 * np.abs(exact) + 1e-3).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(value):
    x, weight = normal(FEW, 64), normal(40, 64)
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


@pytest.mark.parametrize("case", [*cases(1), *cases(FEW)], ids=lambda c: f"{c[0]}-{c[2][0][0]}")
def test_weights_are_not_copied_out_of_their_stack(case):
    _, f, *arguments = case
    # A byte for each number of one matrix would be a copy in the smallest type.
    assert compiled(f, *arguments).memory_analysis().temp_size_in_bytes < LARGE * LARGE / 2


def test_many_rows_are_a_matrix_product():
    arguments = ((FEW + 1, LARGE), "float32"), ((LARGE, LARGE), "float32")
    assert " dot(" in compiled(matmul, *arguments).as_text()
    few = ((FEW, LARGE), "float32"), arguments[1]
    assert " dot(" not in compiled(matmul, *few).as_text()
