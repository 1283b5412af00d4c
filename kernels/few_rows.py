"""x Wᵀ for a few rows on a CPU, with W read where it is in its stack.

XLA's CPU backend has a library do matrix products, and the library cannot index: what a layer takes of a stack is read
and written before the product reads it again, which for a few rows takes longer than the product. Reductions are loops
that XLA writes itself, with the indexing in them, on two conditions:

- Several arrays are reduced at once. The reduction of a single one also goes to the library, or is cut in two. So there
  is one array for each row, and a single row gives two halves. More than four rows are taken four at a time: the second
  four find the weight in the cache. Rows of several weights may share a loop.
- The program may add in any order, see ``COMPILER_OPTIONS``. If not, the loop takes one number at a time; the result is
  as good, but the time is that of before or more.

With more than 16 rows the copy matters less, and the library is the faster one.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from glmjax.kernels.choose import target_device

FEW, MOST = 4, 16  # rows at a time, and in all
# For programs on a CPU: sums in any order, and of what else "fast math" stands for only that zero has no sign.
COMPILER_OPTIONS: Mapping[str, bool] = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
}


def suits(rows: int, depth: int, most: int = MOST) -> bool:
    """Whether these are few enough rows [rows, depth], for a program on a CPU.

    Args:
      most: FEW for a weight that is not read but computed, which more rows would do again.
    """
    return 1 <= rows <= most and (rows > 1 or depth % 2 == 0) and target_device()[0] == "cpu"


def loop_on_all_cores(index: jax.Array) -> jax.Array:
    """The index [], from within a loop, in a way that leaves the loop's operations to all cores.

    XLA's CPU backend makes one kernel, which one core runs, of a loop without a sort or a call of a library in it.
    """
    return jax.lax.sort(jnp.stack([index, index]))[0] if target_device()[0] == "cpu" else index


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, ..., K] times weight [..., R, K] -> [T, ..., R] float32."""
    if x.shape[0] > FEW:
        passes = jnp.array_split(x, -(-x.shape[0] // FEW))
        return jnp.concatenate([multiply(rows, weight) for rows in passes])
    # What computes x stays out of the loop, which would do it again for each of the R.
    rows = jax.lax.optimization_barrier(x).astype(jnp.float32)
    terms = [weight.astype(jnp.float32) * row[..., None, :] for row in rows]
    if len(terms) == 1:
        halves = jnp.split(terms[0], 2, axis=-1)
        first, second = sums(halves, weight.ndim - 1)
        return (first + second)[None]
    return jnp.stack(sums(terms, weight.ndim - 1))


def multiply_each(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Few rows of each of several weights: x [n, B, K] times n of [R, K] -> [n, B, R] float32, all in one loop."""
    rows = jax.lax.optimization_barrier(x).astype(jnp.float32)
    terms = [w.astype(jnp.float32) * row for w, of_weight in zip(weights, rows, strict=True) for row in of_weight]
    return jnp.stack(sums(terms, 1)).reshape(*x.shape[:2], -1)


def sums(terms: Sequence[jax.Array], axis: int) -> Sequence[jax.Array]:
    """Sums of several arrays of one shape and type along an axis: one loop with what computes the terms."""

    def add(total: tuple[jax.Array, ...], term: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(total, term, strict=True))

    return jax.lax.reduce(tuple(terms), (jnp.zeros((), terms[0].dtype),) * len(terms), add, (axis,))
