"""``glmjax kernels`` has every shape that the step programs launch, and no other but those that are named here."""

import functools

import pytest

pytest.importorskip("triton")

from h200_code import needs_plugin
from recorded_shapes import PROGRAMS, WRAPPERS, shapes_of_cases, shapes_of_program

from glmjax.kernel_report import all_cases

pytestmark = needs_plugin

# Decode steps without drafts, which ``fit_decode`` does not compile.
UNDRAFTED = {
    "index_top_k R=8 Q=1 H=32 k=2048",
    "kv_insert T=8 index_key, latent, rope bf16",
    "block_fp8_matmul T=8 R=6144 K=6144",
    "block_fp8_matmul T=8 R=6144 K=3072",
    "block_fp8_matmul T=8 R=3072 K=6144",
    "block_fp8_matmul T=8 R=6144 K=1536",
}
# Operations that users may call, and connectors do.
BY_THEMSELVES = {
    "sparse_mla T=8 H=128 K=2048 fp8",
    "sparse_mla T=32 H=128 K=2048 fp8",
    "sparse_mla T=2048 H=128 K=2048 fp8",
    "grouped_matmul T=64 k=8 pairs=64 E=32 F=2048 D=6144 bf16",
    "grouped_matmul T=16384 k=8 pairs=16384 E=32 F=2048 D=6144 bf16",
    "row_fetch N=80896 656 -> 656",
}


@functools.cache
def launched(name):
    return shapes_of_program(PROGRAMS[name])


@functools.cache
def listed():
    return shapes_of_cases(all_cases)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_shape_that_a_step_launches_is_listed(name):
    found = launched(name)
    assert {"sparse_mla", "grouped_matmul", "block_fp8_matmul"} <= {shape.split()[0] for shape in found}
    assert found <= listed(), sorted(found - listed())


def test_what_no_step_launches_is_not_listed():
    found = set().union(*map(launched, PROGRAMS))
    assert {shape.split()[0] for shape in found} == set(WRAPPERS)
    assert listed() - found == UNDRAFTED | BY_THEMSELVES
