"""Times of the indexer's CPU path at GLM-5.3's sizes: python benchmarks/indexer_cpu.py [--json]

For a decode step and a prefill chunk of one request, over contexts of the FP8 pool, 2,048 keys chosen: the scores alone
(``paged_index_scores``) and scores with selection (``index_top_k``), and what the latter costs for each key. Beside the
time of the wall stands that of the processor, of all threads together.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from support.tables import make_table, number
from support.timing import best_ms

from glmjax.kernels.index_limits import KEY_BLOCK
from glmjax.kernels.index_scores import paged_index_scores
from glmjax.kernels.index_topk import index_top_k

HEADS, DIM, TOP_K = 32, 128, 2048
MATRIX_LIMIT = 1 << 25  # of scores: larger ones are not measured alone


def measure(queries: list[int], contexts: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    scores = jax.jit(paged_index_scores)
    select = jax.jit(index_top_k, static_argnums=7)
    for T in queries:
        for context in contexts:
            key = jax.random.split(jax.random.key(0), 4)
            blocks = context // KEY_BLOCK
            query = jax.random.normal(key[0], (1, T, HEADS, DIM)).astype(jnp.float8_e4m3fn)
            head_weights = jax.random.normal(key[1], (1, T, HEADS))
            keys = jax.random.normal(key[2], (1, context, DIM)).astype(jnp.float8_e4m3fn)
            keys = jax.lax.bitcast_convert_type(keys, jnp.uint8)
            scale = jnp.ones((1, context))
            tables = jax.random.permutation(key[3], blocks).reshape(1, blocks)
            visible = context - T + 1 + jnp.arange(T)[None]
            args = (query, head_weights, keys, scale, 0, tables, visible)
            chosen = best_ms(select, *args, TOP_K, seconds=seconds)
            alone = best_ms(scores, *args, seconds=seconds) if T * context <= MATRIX_LIMIT else {}
            yield {
                "queries": T,
                "context": context,
                "scores_ms": alone.get("wall"),
                "scores_processor_ms": alone.get("processor"),
                "top_k_ms": chosen["wall"],
                "top_k_processor_ms": chosen["processor"],
                "top_k_processor_ns_per_query_and_key": 1e6 * chosen["processor"] / (T * context),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", default="1,512", help="queries at once, comma separated (1,512)")
    parser.add_argument("--contexts", default="2048,8192,32768,131072", help="keys, multiples of 64 (2048 to 131072)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of runs for each figure (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    queries, contexts = ([int(x) for x in text.split(",")] for text in (args.queries, args.contexts))
    if bad := [c for c in contexts if c < 1 or c % KEY_BLOCK]:
        parser.error(f"--contexts {bad[0]}: give multiples of {KEY_BLOCK}")
    rows = list(measure(queries, contexts, args.seconds))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    columns = ["queries", "context", "scores ms", "processor", "scores and top-k ms", "processor", "ns a query and key"]
    lines = [
        [
            str(row["queries"]),
            str(row["context"]),
            number(row["scores_ms"]),
            number(row["scores_processor_ms"]),
            number(row["top_k_ms"]),
            number(row["top_k_processor_ms"]),
            number(row["top_k_processor_ns_per_query_and_key"]),
        ]
        for row in rows
    ]
    Console().print(make_table(f"The indexer on this CPU, {HEADS} heads of {DIM}, k={TOP_K}", columns, lines))


if __name__ == "__main__":
    main()
