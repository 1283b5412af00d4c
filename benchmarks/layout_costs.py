"""What layouts cost: bytes that GLM-5.3 moves in a layer, and step times of a tiny model on simulated devices.

    python benchmarks/layout_costs.py
    python benchmarks/layout_costs.py --layout pcp8 --layout pcp=4,tp=2,dcp=8,ep=8 --no-times --json

Bytes are exact (``Layout.traffic``, which a test holds against compiled programs). Times are of CPU devices that share
this machine's cores: they compare what layouts do in all, with exchanges that are copies in memory, and say nothing of
a GPU.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table
from support.machine import describe
from support.tables import Rows, make_table, number

from glmjax.api import enable_compilation_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.params import random_params
from glmjax.programs import Programs
from glmjax.sharding.layout import PRESETS, Layout
from glmjax.sharding.partition import param_specs
from glmjax.step_io import StepInputs, StepShape

MIB = 2**20
BLOCK = 16  # of the tiny model
# Every layer kind of GLM-5.3 in eleven layers; heads and experts for up to 16 devices.
TINY = GLMConfig.tiny(
    num_hidden_layers=11, num_attention_heads=16, index_topk=64, intermediate_size=512, moe_intermediate_size=64
)


def default_layouts() -> list[str]:
    """The presets, those of the same value once."""
    found: dict[Layout, str] = {}
    for name, layout in PRESETS.items():
        found.setdefault(layout, name)
    return list(found.values())


def bytes_rows(layouts: Sequence[str], contexts: Sequence[int], chunk: int, decode_rows: int) -> list[dict[str, Any]]:
    """A row for each layout, kind of step and context: a chunk of one prompt a data-parallel rank, or a token a row.

    The decode rows are those of all ranks together, and a block table is as long as the context needs.
    """
    config = GLMConfig.glm_5_3()
    rows = []
    for name in layouts:
        layout = Layout.parse(name)
        for kind, tokens, requests in (("prefill", chunk, 1), ("decode", 1, -(-decode_rows // layout.dp))):
            for context in contexts:
                traffic = layout.traffic(config, tokens=tokens, requests=requests, context_rows=context + tokens)
                rows.append(
                    {
                        "layout": name,
                        "step": kind,
                        "context": context,
                        "layer_bytes": traffic.layer_bytes,
                        "step_bytes": traffic.received_bytes,
                        "kv": traffic.kv,
                    }
                )
    return rows


def time_rows(
    layouts: Sequence[str], contexts: Sequence[int], chunk: int, decode_rows: int, runs: int
) -> list[dict[str, Any]]:
    """The same rows of the tiny model with median milliseconds; the KV before a step is zeros."""
    params, rows = random_params(TINY), []
    for name in layouts:
        layout = Layout.parse(name)
        shapes = {"prefill": StepShape(1, chunk), "decode": StepShape(-(-decode_rows // layout.dp), 1, decode=True)}
        width = -(-(max(contexts) + chunk) // (BLOCK * layout.dcp))
        mesh, placed = None, params
        if layout.num_devices > 1:
            mesh = layout.mesh()
            specs = param_specs(layout, params)
            placed = jax.tree.map(lambda x, s, mesh=mesh: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
        programs = Programs(
            TINY,
            placed,
            num_blocks=width * shapes["decode"].requests,
            block_size=BLOCK,
            table_width=width,
            cache_dtype="float32",
            shapes=list(shapes.values()),
            layout=layout,
            mesh=mesh,
        )
        for kind, shape in shapes.items():
            for context in contexts:
                ms = step_ms(programs, shape, context, runs)
                rows.append({"layout": name, "step": kind, "context": context, "step_ms": ms})
    return rows


def step_ms(programs: Programs, shape: StepShape, context: int, runs: int) -> float:
    """Median over the runs after one to warm up."""
    inputs = StepInputs.empty(shape, programs.table_width)
    inputs.start[:], inputs.length[:] = context, shape.tokens
    blocks = np.arange(shape.requests * programs.table_width, dtype=np.int32)
    inputs.block_tables[:] = blocks.reshape(inputs.block_tables.shape)
    cache, state, times = programs.make_cache(), programs.make_state(), []
    for _ in range(runs + 1):
        began = time.perf_counter()
        cache, state, out = programs.run(shape, cache, state, [inputs] * programs.layout.dp)
        jax.block_until_ready(out)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def numbers(text: str) -> list[int]:
    """Context lengths: "0,64K,1M"."""
    units = {"K": 1 << 10, "M": 1 << 20}
    try:
        found = [int(part.rstrip("KM")) * units.get(part[-1:], 1) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not lengths such as 0,64K,1M") from None
    if min(found) < 0:
        raise typer.BadParameter(f"{text!r} has a negative length")
    return found


def short(length: int) -> str:
    """64K."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def table_of(title: str, rows: Rows, contexts: Sequence[int], shown: Callable[[Mapping[str, Any]], str]) -> Table:
    """A line for each layout and kind of step, a cell for each context."""
    cells = {(row["layout"], row["step"], row["context"]): shown(row) for row in rows}
    pairs = dict.fromkeys((row["layout"], row["step"]) for row in rows)
    lines = [[name, kind, *(cells[name, kind, context] for context in contexts)] for name, kind in pairs]
    return make_table(title, ["layout", "step", *map(short, contexts)], lines)


def mib(row: Mapping[str, Any]) -> str:
    """With what travels under DCP: keys to queries or queries to keys."""
    way = {"kv_gather": " kv", "query_gather": " q", "pool": ""}[row["kv"]]
    return number(row["layer_bytes"] / MIB, 1 if row["layer_bytes"] > MIB else 3) + way


def main(
    layout: Annotated[list[str] | None, typer.Option(help="Degrees or a preset; repeat it. Default: presets.")] = None,
    contexts: Annotated[str, typer.Option(help="Cached tokens, for bytes.")] = "0,64K,248K,1M",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill step, for bytes.")] = 2048,
    decode_rows: Annotated[int, typer.Option(min=1, help="Rows of a decode step, of all ranks together.")] = 16,
    times: Annotated[bool, typer.Option(help="Time the tiny model too.")] = True,
    timed_contexts: Annotated[str, typer.Option(help="Cached tokens, for times.")] = "0,1K,4K",
    timed_chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill step, for times.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of a step.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Compare layouts by the bytes that they move and the work that they do."""
    layouts = layout or default_layouts()
    try:
        devices = max(Layout.parse(name).num_devices for name in layouts)
        moved = bytes_rows(layouts, numbers(contexts), chunk, decode_rows)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--layout") from None
    timed: list[dict[str, Any]] = []
    if times:
        # Read when jax first looks for devices, which is below.
        if "device_count" not in os.environ.get("XLA_FLAGS", ""):
            flags = (os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}")
            os.environ["XLA_FLAGS"] = " ".join(flags).strip()
        jax.config.update("jax_platforms", "cpu")
        enable_compilation_cache()
        timed = time_rows(layouts, numbers(timed_contexts), timed_chunk, decode_rows, runs)
    result = {
        "machine": describe() | {"devices": f"{devices} simulated on the CPU"},
        "settings": {"chunk": chunk, "decode_rows": decode_rows, "timed_chunk": timed_chunk, "runs": runs},
        "received_bytes_glm_5_3": moved,
        "simulated_step_ms_tiny": timed,
    }
    text = json.dumps(result, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    what = f"{{}} new ones a data-parallel rank, or {decode_rows} rows in all"
    title = (
        f"GLM-5.3: MiB that a device receives in a layer (mean), by cached tokens; {what.format(chunk)} "
        "(kv: cached KV travels, q: queries do)"
    )
    Console().print(table_of(title, moved, numbers(contexts), mib))
    if timed:
        title = (
            f"Tiny model, {devices} simulated devices on {result['machine']['cores']} cores: "
            "ms a step, by cached tokens; " + what.format(timed_chunk)
        )
        Console().print(table_of(title, timed, numbers(timed_contexts), lambda row: number(row["step_ms"], 1)))


if __name__ == "__main__":
    typer.run(main)
