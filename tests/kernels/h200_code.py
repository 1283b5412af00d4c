"""Compiles kernels' cases for an H200 and holds their machine code against what every kernel owes."""

import importlib.util

import pytest

from glmjax.kernel_report import compile_program
from glmjax.kernels.machine_code import machine_code
from glmjax.kernels.roofline import MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK

NEEDED = (("jax_cuda12_plugin", "jax_cuda13_plugin"), ("triton",), ("jax_triton",), ("cramjam",))
needs_plugin = pytest.mark.skipif(
    not all(any(importlib.util.find_spec(name) for name in names) for names in NEEDED),
    reason="needs pip install 'glmjax[aot]', no GPU",
)


def compile_case(case):
    """The case's kernels as an H200 would run them; what XLA generated around them comes last, with ``blocks`` None."""
    return machine_code(compile_program(case).executable)


def check_in_place(program, case):
    """The arguments that the case updates are its outputs, and nothing is copied on the way."""
    donated = sum(case.arguments[i].size * case.arguments[i].dtype.itemsize for i in case.donate)
    assert program.memory.aliased == donated
    small = 1024  # tables of several outputs
    assert program.memory.outputs - donated < small and program.memory.temporaries < small
    assert " copy(" not in program.hlo


def check_code(code, *instructions, blocks=MULTIPROCESSORS):
    """Nothing spilled, shared memory fits, the grid fills an H200, and each of the instructions is there.

    Args:
      code: a ``KernelCode``.
      instructions: names; of alternatives joined with "|" one must be there.
      blocks: of the grid, at least.
    """
    assert (code.stack, code.local, code.spills) == (0, 0, 0), code
    assert code.shared_bytes <= SHARED_BYTES_PER_BLOCK, code
    assert code.blocks >= blocks, code
    for names in instructions:
        assert any(code.instructions.get(name) for name in names.split("|")), (names, code.instructions)
