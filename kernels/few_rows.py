"""x Wᵀ for a few rows on a CPU, with W read where it is in its stack.

XLA's CPU backend has a library do matrix products, and the library cannot index: what a layer takes of a stack is read
and written before the product reads it again, which for a few rows takes longer than the product. Reductions are loops
that XLA writes itself, with the indexing in them, on two conditions:

- Several arrays are reduced at once. The reduction of a single one also goes to the library, or is cut in two. So there
  is one array for each row, and a single row gives two halves.
- The program may add in any order, see ``COMPILER_OPTIONS``. If not, the loop takes one number at a time; the result is
  as good, but the time is that of before or more.

With more rows the copy matters less, and the library is the faster one.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from glmjax.kernels.choose import target_device

FEW = 4
# For programs on a CPU: sums in any order, and of what else "fast math" stands for only that zero has no sign.
COMPILER_OPTIONS: Mapping[str, bool] = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}


def suits(rows: int, depth: int) -> bool:
    """Whether these are few enough rows [rows, depth], for a program on a CPU."""
    return 1 <= rows <= FEW and (rows > 1 or depth % 2 == 0) and target_device()[0] == "cpu"


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, ..., K] times weight [..., R, K] -> [T, ..., R] float32."""
    # What computes x stays out of the loop, which would do it again for each of the R.
    rows = jax.lax.optimization_barrier(x).astype(jnp.float32)
    terms = [weight.astype(jnp.float32) * row[..., None, :] for row in rows]
    if len(terms) == 1:
        halves = jnp.split(terms[0], 2, axis=-1)
        return _sums(halves, weight.ndim - 1).sum(axis=0, keepdims=True)
    return _sums(terms, weight.ndim - 1)


def _sums(terms: list[jax.Array], axis: int) -> jax.Array:
    """The arrays' sums along an axis, stacked."""

    def add(total: tuple[jax.Array, ...], term: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(total, term, strict=True))

    return jnp.stack(jax.lax.reduce(tuple(terms), (jnp.float32(0),) * len(terms), add, (axis,)))
