"""Where a step spends its time on a CPU, by kind of operation, from JAX's own trace.

    python benchmarks/cpu_profile.py --model CHECKPOINT --decode 1:512,1:8192 --prefill 512

Times go from an operation's start to its end. Operations run side by side, and one that is spread over threads may wait
for another, so the times add up to more than the step.

Of a decode step it also says what it must read, and how long that takes as fast as this machine reads.
"""

import collections
import gzip
import json
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from support.least import least_bytes, read_bandwidth
from support.ours import Bench, Job, Sequences
from support.results import Point, parse_points
from support.tables import make_table, number

from glmjax.api import enable_compilation_cache
from glmjax.checkpoint import load_checkpoint

# The first that fits the name of an XLA operation; what holds others is not counted itself.
KINDS = (
    ("", r"^(while|cond|call)\b"),
    ("layers' weights copied out of their stacks", r"dynamic-slice"),
    ("KV rows and index keys gathered", r"gather"),
    ("matrix products", r"^(ynn_fusion|dot|.*_dot_|(slice|multiply)_reduce_fusion)"),
    ("top-k, and sorts that only keep a loop on all cores", r"^(custom-call|sort|convert_reduce_fusion)"),
    ("all else: norms, rotation, softmax, masks", r"^[a-z-]+(_[a-z-]+)*(\.|$)"),
)
NOT_OPERATIONS = re.compile(r"^\$|::|PjitFunction|[A-Z ]")


def kind_of(name: str) -> str:
    """Which kind an event of the trace is; empty for what is no operation."""
    if NOT_OPERATIONS.search(name):
        return ""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "")


def events(folder: Path) -> Iterator[tuple[str, float]]:
    """Names and microseconds of a trace's complete events."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        if event.get("ph") == "X":
            yield event["name"], event.get("dur", 0.0)


def profile(model: str, point: Point, steps: int, chunk: int) -> dict[str, Any]:
    """One point's milliseconds and operations a step, by kind."""
    batch = point.batch if point.kind == "decode" else 1
    job = Job(model=model, kind=point.kind, length=point.length, batch=batch, steps=4 * steps, chunk=chunk)
    config, params = load_checkpoint(model, dtype="float32", mtp=False)
    sequences = Sequences(job, config, Bench(job, config, params))

    def run() -> list[float]:
        if point.kind == "decode":
            return sequences.decode(steps)
        sequences.prefill(point.length)
        return [0.0]

    if point.kind == "decode":
        sequences.fill()
    run()
    step_ms = statistics.median(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found = list(events(Path(folder)))
    count = steps if point.kind == "decode" else 1
    time, number_of = collections.Counter[str](), collections.Counter[str]()
    for name, microseconds in found:
        kind = kind_of(name)
        time[kind] += microseconds  # type: ignore[assignment]
        number_of[kind] += 1
    rows = [
        {"kind": kind, "ms": time[kind] / 1e3 / count, "operations": number_of[kind] / count} for kind, _ in KINDS[1:]
    ]
    least = None
    if point.kind == "decode":
        reads, bandwidth = (
            least_bytes(config, params, batch, point.length),
            read_bandwidth(len(os.sched_getaffinity(0))),
        )
        ms = 1e3 * sum(reads.values()) / bandwidth
        least = {"mb": {name: n / 1e6 for name, n in reads.items()}, "gb_s": bandwidth / 1e9, "ms": ms}
    return {"point": str(point), "step_ms": step_ms or None, "rows": rows, "least": least}


def main(
    model: Annotated[str, typer.Option(help="Checkpoint in Hugging Face's format.")],
    decode: Annotated[str, typer.Option(help="batch:context, ...")] = "1:512,1:8192,16:512",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of the trace.")] = 16,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of a step.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON here too.")] = None,
) -> None:
    """Profile steps of one model on a CPU."""
    enable_compilation_cache()
    found = [profile(model, point, steps, chunk) for point in parse_points(prefill, decode)]
    text = json.dumps(found, indent=1)
    if out is not None:
        out.write_text(text)
    if as_json:
        print(text)
        return
    for one in found:
        title = one["point"] + (f", a step takes {number(one['step_ms'])} ms" if one["step_ms"] else "")
        lines = [[r["kind"], number(r["ms"], 2), number(r["operations"], 0)] for r in one["rows"]]
        lines.append(["together", number(sum(r["ms"] for r in one["rows"]), 2), ""])
        Console().print(make_table(title, ["kind of operation", "ms", "operations"], lines))
        if (least := one["least"]) is not None:
            reads = ", ".join(f"{name} {number(mb)} MB" for name, mb in least["mb"].items())
            Console().print(f"reads {reads}: {number(least['ms'], 2)} ms at {number(least['gb_s'])} GB/s\n")


if __name__ == "__main__":
    typer.run(main)
