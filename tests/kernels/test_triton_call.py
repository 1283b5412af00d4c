"""The glue between Triton kernels and JAX: what it passes on, in which order, and what is missing."""

import sys

import jax
import jax.numpy as jnp
import pytest
from h200_code import compile_case, needs_plugin

from glmjax.errors import ConfigError
from glmjax.kernels.report_case import Case
from glmjax.kernels.triton_call import triton_call

X = jax.ShapeDtypeStruct((128,), jnp.float32)


@pytest.mark.parametrize("missing", ["jax_triton", "triton"])
def test_missing_packages_say_what_to_install(monkeypatch, missing):
    for name in [name for name in sys.modules if name.split(".")[0] == "jax_triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"need jax-triton and triton: pip install 'glmjax\[cuda12\]'"):
        triton_call(jnp.ones(4), kernel=None, results=X, grid=(1,))


@pytest.fixture
def passed_on(monkeypatch):
    """What reaches jax-triton."""
    jax_triton = pytest.importorskip("jax_triton")
    calls = []
    monkeypatch.setattr(jax_triton, "triton_call", lambda *operands, **options: calls.append((operands, options)))
    return calls


def test_operands_in_place_are_counted_without_those_that_are_none(passed_on):
    a, b, c = jnp.ones(1), jnp.ones(2), jnp.ones(3)
    triton_call(a, None, b, 7, None, c, kernel="kernel", results=[X, X], grid=(2, 3), in_place={2: 1, 5: 0}, WIDTH=8)
    ((operands, options),) = passed_on
    assert operands == (a, None, b, 7, None, c)
    assert options["input_output_aliases"] == {1: 1, 3: 0}
    assert (options["kernel"], options["grid"], options["WIDTH"]) == ("kernel", (2, 3), 8)


def test_costs_and_options_are_told(passed_on):
    triton_call(jnp.ones(1), kernel="k", results=X, grid=(1,), num_warps=8, num_stages=3, num_flops=5, num_bytes=6)
    ((_, options),) = passed_on
    assert options["cost_estimate"] == {"flops": 5, "bytes_accessed": 6}
    assert {"num_warps": 8, "num_stages": 3}.items() <= options["backend_options"].items()


@needs_plugin
def test_results_may_go_unused_within_a_loop():
    """JAX drops what is dead of a loop's body by a rule that jax-triton 0.4.1 brings in another form."""
    from glmjax.kernels import row_fetch_triton

    def function(target, rows):
        def body(target, _):
            (fetched,) = row_fetch_triton.row_fetch((target,), (target + 1,), rows, rows)
            row_fetch_triton.row_fetch((target,), (target + 2,), rows, rows)  # of no use
            return fetched, fetched.sum()

        return jax.lax.scan(body, target, None, length=3)[0]

    arguments = (jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))
    code, *_ = compile_case(Case("k", "triton", "", function, arguments, bytes=1, flops=1, arithmetic="float32"))
    assert code.name == "copy_kernel"
