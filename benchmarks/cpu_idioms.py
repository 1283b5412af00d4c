"""Times of the idioms that the CPU path chose between: python benchmarks/cpu_idioms.py [--json]

Each row is one way to do the same thing at the sizes of the ``small`` peer model.  docs/rejected.md says what followed.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from glmjax.kernels import few_rows
from glmjax.kernels.grouped_matmul import grouped_swiglu
from glmjax.kernels.grouped_schedule import tile_rows
from glmjax.kernels.index_scores import index_scores
from glmjax.kernels.topk import select_top_k

LAYERS, MATRICES, WIDTH, HIDDEN = 8, 12, 512, 1024  # 201 MB of float32 weights


def median_ms(f: Callable[..., Any], *args: Any, runs: int = 15, options: Mapping[str, bool] | None = None) -> float:
    compiled = jax.jit(f).lower(*args).compile(None if options is None else dict(options))
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[runs // 2]


def weights() -> Iterator[tuple[str, str, float]]:
    """Matrix products with every layer's weights, stacked and scanned or as arguments of their own."""
    stacked = jax.random.normal(jax.random.key(0), (LAYERS, MATRICES, WIDTH, HIDDEN))
    apart = [[jnp.array(stacked[i, j]) for j in range(MATRICES)] for i in range(LAYERS)]

    def layer(x: jax.Array, matrix: Callable[[int], jax.Array]) -> jax.Array:
        for j in range(0, MATRICES, 2):
            x = x + 1e-3 * (x @ matrix(j)) @ matrix(j + 1).T
        return x

    def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, i: (layer(x, lambda j: w[i, j]), None), x, jnp.arange(LAYERS))[0]

    def unrolled(x: jax.Array, ws: list[list[jax.Array]]) -> jax.Array:
        for w in ws:
            x = layer(x, w.__getitem__)
        return x

    for rows in (1, 16, 512):
        x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
        runs = 5 if rows > 100 else 15
        yield f"weights, {rows} rows", "stacked, indexed in a scan", median_ms(scanned, x, stacked, runs=runs)
        yield f"weights, {rows} rows", "an argument per matrix", median_ms(unrolled, x, apart, runs=runs)


def single_row() -> Iterator[tuple[str, str, float]]:
    """One row times the output head's 8192 x 512 matrix."""
    row, matrix = (jax.random.normal(jax.random.key(i), s) for i, s in ((6, (1, 512)), (7, (8192, 512))))

    def contracted(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    def transposed(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.T  # XLA fuses the transpose into a loop of its own making

    yield "one row", "last axes contracted", median_ms(contracted, row, matrix)
    yield "one row", "x @ w.T", median_ms(transposed, row, matrix)


def from_a_stack() -> Iterator[tuple[str, str, float]]:
    """A few rows times one of eight stacked matrices of 16.8 MB, each turn another one."""
    stack = jax.random.normal(jax.random.key(8), (LAYERS, 8192, 512))

    def layers(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        def one(i: jax.Array, total: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            return total + jax.lax.top_k(multiply(x, w[i]), 1)[0]  # a library call: the loop is left to all cores

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, LAYERS, lambda i, total: one(i, total, x, w), jnp.zeros((len(x), 1)))

        return run

    def contracted(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    any_order = few_rows.COMPILER_OPTIONS
    for rows in (1, 4, 16):
        x, what = jax.random.normal(jax.random.key(9), (rows, 512)), f"8 layers of a stack, {rows} rows"
        yield what, "last axes contracted", median_ms(layers(contracted), x, stack)
        yield what, "a reduction for each row", median_ms(layers(few_rows.multiply), x, stack)
        yield what, "the same, sums in any order", median_ms(layers(few_rows.multiply), x, stack, options=any_order)


def experts() -> Iterator[tuple[str, str, float]]:
    """Seven layers of 32 experts of 512 x 256, of which every token chooses four."""
    gate_up = jax.random.normal(jax.random.key(10), (7, 32, 2, 256, 512))
    down = jax.random.normal(jax.random.key(11), (7, 32, 512, 256))

    def layers(x: jax.Array, ids: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        def one(i: jax.Array, x: jax.Array) -> jax.Array:
            return x + 1e-3 * grouped_swiglu(x, ids, gate_up, down, layer=i).sum(axis=1)

        return jax.lax.fori_loop(0, len(gate_up), one, x)

    for rows in (4, 16, 64):
        x, what = jax.random.normal(jax.random.key(12), (rows, 512)), f"7 layers of experts, {rows} rows"
        ids = jax.random.permutation(jax.random.key(13), jnp.tile(jnp.arange(32), (rows, 1)), axis=1, independent=True)
        arguments = x, ids[:, :4], gate_up, down
        library = f"a matrix product for a tile of {tile_rows(4 * rows, 32)} rows"
        own = f"tiles of {tile_rows(4 * rows, 32, in_place=True)} rows in place"
        with mock.patch.object(few_rows, "suits", lambda *_: False):
            yield what, library, _anew(layers, arguments)
        with mock.patch.object(few_rows, "loop_on_all_cores", lambda index: index):
            yield what, f"{own}, one kernel for the loop", _anew(layers, arguments)
        yield what, f"{own}, a sort in the loop", _anew(layers, arguments)


def _anew(f: Callable[..., jax.Array], arguments: tuple[jax.Array, ...]) -> float:
    """Traced again, since what was replaced is no argument."""
    return median_ms(lambda *x: f(*x), *arguments, options=few_rows.COMPILER_OPTIONS)


def top_k() -> Iterator[tuple[str, str, float]]:
    """The 256 largest of 2304 scores a row."""
    for rows in (1, 16, 128):
        scores = jax.random.normal(jax.random.key(2), (rows, 2304))
        yield f"top-k, {rows} rows", "jax.lax.top_k", median_ms(lambda s: jax.lax.top_k(s, 256), scores)
        yield f"top-k, {rows} rows", "counting and compaction", median_ms(lambda s: select_top_k(s, 256), scores)


def scores() -> Iterator[tuple[str, str, float]]:
    """Index scores of 128 queries with 8 heads against 2048 keys."""
    query, keys = (jax.random.normal(jax.random.key(i), s) for i, s in ((3, (1, 128, 8, 64)), (4, (1, 2048, 64))))
    head_weights = jax.random.normal(jax.random.key(5), (1, 128, 8))
    position = jnp.full((1, 128), 4096)

    def at_once(q: jax.Array, w: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(jnp.einsum("rqhd,rcd->rqhc", q, k)) * w[..., None], axis=2)

    def by_head(q: jax.Array, w: jax.Array, k: jax.Array) -> jax.Array:
        return index_scores(q, w, k, None, position, jnp.arange(k.shape[1]))

    yield "index scores", "all heads, then a sum", median_ms(at_once, query, head_weights, keys)
    yield "index scores", "head by head", median_ms(by_head, query, head_weights, keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = [row for group in (weights, single_row, from_a_stack, experts, top_k, scores) for row in group()]
    if args.json:
        print(json.dumps([{"what": w, "how": h, "ms": round(ms, 3)} for w, h, ms in rows], indent=1))
        return
    table = Table("what", "how", "ms")
    for what, how, ms in rows:
        table.add_row(what, how, f"{ms:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
