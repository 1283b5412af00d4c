"""Whether GLM-5.3 fits on H200s: its prefill step compiled for them, with no GPU here, and what XLA assigns on each.

    python benchmarks/fit.py
    python benchmarks/fit.py --layout pcp=8,dcp=4,ep=8 --contexts 128K --chunk 8192 --prefill query_gather --json

Needs JAX's CUDA plugin and ptxas: ``pip install 'glmjax[aot]'``. A program takes about 40 seconds of one core.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from layout_costs import numbers, short
from rich.console import Console
from support.machine import describe, memory_mb
from support.tables import make_table, number

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import GIB, H200_BYTES, compile_prefill
from glmjax.sharding.layout import Layout
from glmjax.sharding.traffic import Prefill

WAYS: tuple[Prefill, ...] = ("kv_gather", "query_gather")


def fit_row(layout: Layout, cached: int, **how: Any) -> dict[str, Any]:
    """One program: what it takes on a GPU, and what compiling it took here."""
    Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from now on
    began = time.perf_counter()
    fit = compile_prefill(GLMConfig.glm_5_3(), layout, cached=cached, **how)
    seconds = time.perf_counter() - began
    return fit.as_dict() | {"compile_s": seconds, "peak_rss_mb": memory_mb("VmHWM")}


def main(
    layout: Annotated[list[str] | None, typer.Option(help="Degrees or a preset; repeat it.")] = None,
    contexts: Annotated[str, typer.Option(help="Cached tokens.")] = "0,64K,248K,1M",
    chunk: Annotated[int, typer.Option(min=1, help="New tokens of a step.")] = 2048,
    prefill: Annotated[list[str] | None, typer.Option(help="kv_gather, query_gather or auto; repeat it.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block on one GPU.")] = 64,
    mtp: Annotated[bool, typer.Option(help="Hold the MTP layer too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Compile the full-size prefill step for H200s and say what is left of their memory."""
    jax.config.update("jax_platforms", "cpu")  # JAX keeps the plugin, and looks for no GPU
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA would warn of programs that need more memory than there is
    rows = []
    try:
        for degrees in (Layout.parse(text) for text in layout or ("pcp8_dcp8", "pcp8")):
            for way in (prefill or WAYS) if degrees.dcp > 1 else ("auto",):
                rows += [
                    fit_row(degrees, cached, chunk=chunk, prefill=way, block_size=block_size, mtp=mtp)
                    for cached in numbers(contexts)
                ]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    settings = {"chunk": chunk, "block_size": block_size, "mtp": mtp, "h200_bytes": H200_BYTES, "jax": jax.__version__}
    text = json.dumps({"machine": describe(), "settings": settings, "glm_5_3_fp8": rows}, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    lines = [
        [
            row["layout"],
            row["kv_source"],
            short(row["cached"]),
            *(number(row[part] / GIB, 2) for part in ("weights", "kv", "temporaries", "left")),
            f"{row['kv_tokens']:,}",
            number(row["compile_s"], 0),
            number(row["peak_rss_mb"] / 1024, 1),
        ]
        for row in rows
    ]
    title = f"GLM-5.3 FP8, {chunk} new tokens: GiB on each H200, of {H200_BYTES // GIB}"
    columns = ["layout", "KV by", "cached", "weights", "KV", "temporaries", "left", "room for tokens", "s", "RAM"]
    Console().print(make_table(title, columns, lines))


if __name__ == "__main__":
    typer.run(main)
