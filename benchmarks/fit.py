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
from layout_costs import numbers
from support.machine import describe, memory_mb

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import GIB, H200_BYTES, Fit, compile_prefill, table
from glmjax.sharding.layout import Layout
from glmjax.sharding.traffic import Prefill

WAYS: tuple[Prefill, ...] = ("kv_gather", "query_gather")


def compiled(layout: Layout, cached: int, **how: Any) -> tuple[Fit, dict[str, float]]:
    """One program, and what compiling it took here."""
    Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from now on
    began = time.perf_counter()
    fit = compile_prefill(GLMConfig.glm_5_3(), layout, cached=cached, **how)
    return fit, {"compile_s": time.perf_counter() - began, "peak_rss_mb": memory_mb("VmHWM")}


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
    made: list[tuple[Fit, dict[str, float]]] = []
    try:
        for degrees in (Layout.parse(text) for text in layout or ("pcp8_dcp8", "pcp8")):
            for way in (prefill or WAYS) if degrees.dcp > 1 else ("auto",):
                made += [
                    compiled(degrees, cached, chunk=chunk, prefill=way, block_size=block_size, mtp=mtp)
                    for cached in numbers(contexts)
                ]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    settings = {"chunk": chunk, "block_size": block_size, "mtp": mtp, "h200_bytes": H200_BYTES, "jax": jax.__version__}
    rows = [fit.as_dict() | cost for fit, cost in made]
    text = json.dumps({"machine": describe(), "settings": settings, "glm_5_3_fp8": rows}, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    print(f"GLM-5.3 FP8, {chunk:,} new tokens: GiB on each H200, of {H200_BYTES // GIB}\n")
    print(table([fit for fit, _ in made]))
    seconds = [cost["compile_s"] for _, cost in made]
    peak = max(cost["peak_rss_mb"] for _, cost in made) / 1024
    print(f"\nCompiled in {min(seconds):.0f} to {max(seconds):.0f} s each, with at most {peak:.1f} GiB of memory.")


if __name__ == "__main__":
    typer.run(main)
