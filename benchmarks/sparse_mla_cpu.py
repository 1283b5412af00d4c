"""Times of sparse MLA's CPU path at GLM-5.3's sizes: python benchmarks/sparse_mla_cpu.py [--json]

For a decode step and a prefill chunk, 2,048 rows of the FP8 pool for every query, selected out of ever longer contexts:
the time follows the rows and not the context. Beside the time of the wall stands that of the processor, of all threads
together.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from support.tables import make_table, number
from support.timing import best_ms

from glmjax.kernels.kv_rows import quantize_latent
from glmjax.kernels.sparse_mla import sparse_mla_from_pool

LATENT, ROPE, SELECTED, SCALE = 512, 64, 2048, 256**-0.5


def measure(queries: list[int], contexts: list[int], heads: int, seconds: float) -> Iterator[dict[str, Any]]:
    attend = jax.jit(partial(sparse_mla_from_pool, scale=SCALE))
    for context in contexts:
        key = jax.random.split(jax.random.key(0), 5)
        values, scale = quantize_latent(jax.random.normal(key[0], (1, context, LATENT)))
        latent = jax.lax.bitcast_convert_type(values, jnp.uint8)
        rope = jax.random.normal(key[1], (1, context, ROPE)).astype(jnp.bfloat16)
        for T in queries:
            query_latent = jax.random.normal(key[2], (T, heads, LATENT))
            query_rope = jax.random.normal(key[3], (T, heads, ROPE))
            # As a selection is: different slots all over the context, in the order of their positions.
            step = context // SELECTED
            rows = step * jnp.arange(SELECTED) + jax.random.randint(key[4], (T, SELECTED), 0, step)
            taken = best_ms(attend, query_latent, query_rope, latent, scale, rope, 0, rows, seconds=seconds)
            flops = 2 * T * heads * SELECTED * (2 * LATENT + ROPE)
            yield {
                "queries": T,
                "context": context,
                "ms": taken["wall"],
                "processor_ms": taken["processor"],
                "gflops_per_processor_second": 1e-6 * flops / taken["processor"],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", default="1,512", help="queries at once, comma separated (1,512)")
    parser.add_argument("--contexts", default="2048,8192,32768,131072", help="tokens, 2048 or more (2048 to 131072)")
    parser.add_argument("--heads", type=int, default=64, help="heads (64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of runs for each figure (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    queries, contexts = ([int(x) for x in text.split(",")] for text in (args.queries, args.contexts))
    if bad := [c for c in contexts if c < SELECTED]:
        parser.error(f"--contexts {bad[0]}: {SELECTED} rows are selected, give at least as many tokens")
    rows = list(measure(queries, contexts, args.heads, args.seconds))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    columns = ["queries", "context", "ms", "processor ms", "GFLOP per processor second"]
    lines = [
        [
            str(row["queries"]),
            str(row["context"]),
            number(row["ms"]),
            number(row["processor_ms"]),
            number(row["gflops_per_processor_second"]),
        ]
        for row in rows
    ]
    title = f"Sparse MLA on this CPU, {args.heads} heads, {SELECTED} FP8 rows for a query"
    Console().print(make_table(title, columns, lines))


if __name__ == "__main__":
    main()
