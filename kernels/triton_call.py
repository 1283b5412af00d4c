"""Triton kernels as JAX operations, through jax-triton.

A ``*_triton.py`` module is imported only where its kernel is to run, and calls this. Kernels compile while a program is
lowered, also for an H200 on a machine that has none.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from glmjax.errors import ConfigError

# Triton writes for the newest PTX that its own ptxas reads, XLA assembles with the CUDA toolkit's. This one, of CUDA
# 12.6, knows all that Hopper has.
PTX_VERSION = 85


def triton_call(
    *operands: jax.Array | int | None,
    kernel: Any,
    results: Any,
    grid: tuple[int, ...],
    in_place: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 1,
    num_flops: int = 0,
    num_bytes: int = 0,
    **constants: Any,
) -> Any:
    """Runs a kernel over arrays.

    Args:
      operands: the kernel's first parameters: arrays as pointers, whole numbers and None as themselves.
      kernel: a function under ``@triton.jit``. After the operands it takes a pointer for every result that is not in
        place.
      results: a pytree of ``jax.ShapeDtypeStruct``.
      grid: number of programs along up to three axes.
      in_place: position of an operand -> position of the result that takes its memory; JAX copies the operand first
        where it is still needed.
      num_warps, num_stages: of a program, and of its software pipeline.
      num_flops, num_bytes: what it costs, for XLA's scheduler and for profilers.
      constants: the kernel's ``tl.constexpr`` parameters.

    Returns:
      arrays in the form of ``results``.

    Raises:
      ConfigError: jax-triton or Triton is not installed.
    """
    try:
        import jax_triton
        from jax_triton import triton_lib
    except ImportError as error:
        raise ConfigError("Triton kernels need jax-triton and triton: pip install 'glmjax[cuda12]'") from error
    _mend_dead_code_elimination(triton_lib.triton_kernel_call_p)
    with warnings.catch_warnings():
        # jax.Ref, the successor of aliases, is not there for them in all the versions that glmjax runs with.
        warnings.filterwarnings("ignore", message="input_output_aliases is deprecated", category=DeprecationWarning)
        return jax_triton.triton_call(
            *operands,
            kernel=kernel,
            out_type=results,
            grid=grid,
            input_output_aliases={at - operands[:at].count(None): result for at, result in (in_place or {}).items()},
            backend_options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "ptx_version": PTX_VERSION,
                "enable_fp_fusion": True,
            },
            cost_estimate={"flops": num_flops, "bytes_accessed": num_bytes},
            **constants,
        )


def _mend_dead_code_elimination(primitive: Any) -> None:
    """jax-triton 0.4.1 brings a rule of two arguments; JAX 0.12 calls it with three, the last being the equation."""
    from jax._src.interpreters import partial_eval

    partial_eval.dce_rules[primitive] = _keep_whole


def _keep_whole(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    equation = rest[-1]
    return [True] * len(equation.invars), equation
