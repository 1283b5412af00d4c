"""Whether GLM-5.3 fits on H200s: its steps compiled for them, with no GPU here, and what XLA assigns on each.

    python benchmarks/fit.py
    python benchmarks/fit.py --layout pcp=8,dcp=4,ep=8 --contexts 128K --chunk 8192 --prefill query_gather --json
    python benchmarks/fit.py --decode
    python benchmarks/fit.py --decode --batches 16 --regions 8192 --reads xla --contexts 994368

Needs JAX's CUDA plugin and ptxas: ``pip install 'glmjax[aot]'``. A program takes about 40 seconds of one core, twice
that if it decodes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import typer
from layout_costs import numbers
from support.machine import describe, memory_mb

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.fit import GIB, H200_BYTES, Fit, compile_prefill, table
from glmjax.fit_decode import DecodeFit, compile_decode, decode_table, hybrid
from glmjax.sharding.layout import Layout
from glmjax.sharding.traffic import Prefill

CONFIG = GLMConfig.glm_5_3()
WAYS: tuple[Prefill, ...] = ("kv_gather", "query_gather")

HostReads = Literal["address", "xla"]
type Cost = dict[str, float]


def compiled[F](compile_step: Callable[..., F], layout: Layout, **how: Any) -> tuple[F, Cost]:
    """One program, and what compiling it took here."""
    Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from now on
    began = time.perf_counter()
    fit = compile_step(CONFIG, layout, **how)
    return fit, {"compile_s": time.perf_counter() - began, "peak_rss_mb": memory_mb("VmHWM")}


def prefill_steps(
    layouts: list[Layout], contexts: list[int], ways: list[str] | None, **how: Any
) -> Iterator[tuple[Fit, Cost]]:
    for layout in layouts:
        for way in (ways or WAYS) if layout.dcp > 1 else ("auto",):
            for cached in contexts:
                yield compiled(compile_prefill, layout, cached=cached, prefill=way, **how)


def decode_steps(
    layouts: list[Layout],
    contexts: list[int],
    batches: list[int],
    regions: list[int],
    reads: HostReads,
    num_drafts: int,
    block_size: int,
) -> Iterator[tuple[DecodeFit, Cost]]:
    """With rows in two tiers by batch and size of the hot regions, and one with all rows on the device."""
    how = {"num_drafts": num_drafts, "block_size": block_size}
    for layout in layouts:
        for context in contexts:
            for batch in batches:
                for rows in regions:
                    offload = hybrid(CONFIG, batch, rows=rows, reads=reads, **how)
                    yield compiled(compile_decode, layout, batch=batch, context=context, offload=offload, **how)
            yield compiled(compile_decode, layout, batch=batches[0], context=context, **how)


def main(
    decode: Annotated[bool, typer.Option("--decode", help="The decode step, instead of prefill.")] = False,
    layout: Annotated[list[str] | None, typer.Option(help="Degrees or a preset; repeat it.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Cached tokens; to decode, of the longest request.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="New tokens of a prefill step.")] = 2048,
    prefill: Annotated[list[str] | None, typer.Option(help="kv_gather, query_gather or auto; repeat it.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block on one GPU.")] = 64,
    mtp: Annotated[bool, typer.Option(help="Hold the MTP layer too; a decode step always does.")] = False,
    batches: Annotated[str, typer.Option(help="Requests of a data-parallel rank that decode.")] = "1,8,64",
    drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted for each.")] = 3,
    regions: Annotated[str, typer.Option(help="Rows of a request's hot region.")] = "8192,10240",
    reads: Annotated[HostReads, typer.Option(help="How rows come from the host: address or xla.")] = "address",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Compile the full-size step for H200s and say what is left of their memory."""
    jax.config.update("jax_platforms", "cpu")  # JAX keeps the plugin, and looks for no GPU
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA would warn of programs that need more memory than there is
    settings: dict[str, Any] = {"block_size": block_size, "h200_bytes": H200_BYTES, "jax": jax.__version__}
    made: list[tuple[Any, Cost]]
    try:
        if decode:
            layouts = [Layout.parse(text) for text in layout or ("dp=8,ep=8",)]
            lengths, sizes, rows = (numbers(text) for text in (contexts or "1M", batches, regions))
            made = list(decode_steps(layouts, lengths, sizes, rows, reads, drafts, block_size))
        else:
            layouts = [Layout.parse(text) for text in layout or ("pcp8_dcp8", "pcp8")]
            lengths = numbers(contexts or "0,64K,248K,1M")
            made = list(prefill_steps(layouts, lengths, prefill, chunk=chunk, block_size=block_size, mtp=mtp))
            settings |= {"chunk": chunk, "mtp": mtp}
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    found = [fit.as_dict() | cost for fit, cost in made]
    name = "glm_5_3_fp8_decode" if decode else "glm_5_3_fp8"
    text = json.dumps({"machine": describe(), "settings": settings, name: found}, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    what = f"decoding with {drafts} drafts" if decode else f"{chunk:,} new tokens"
    print(f"GLM-5.3 FP8, {what}: GiB on each H200, of {H200_BYTES // GIB}\n")
    print((decode_table if decode else table)([fit for fit, _ in made]))
    seconds = [cost["compile_s"] for _, cost in made]
    peak = max(cost["peak_rss_mb"] for _, cost in made) / 1024
    print(f"\nCompiled in {min(seconds):.0f} to {max(seconds):.0f} s each, with at most {peak:.1f} GiB of memory.")


if __name__ == "__main__":
    typer.run(main)
