"""Our CPU speed beside llama.cpp and transformers on the same checkpoint, in one run, with the ratios.

    python benchmarks/cpu_peers.py --model SMALL --peers SCRIPTS --llama llama-batched-bench --gguf small-f32.gguf \\
        --transformers PYTHON

benchmarks/README.md says how to get the peers.  A round measures every point with every system, one after the other,
and the next round goes the other way round; what is compared are medians over the rounds.  Ours runs with float32
weights and a float32 KV pool, as the peers do.
"""

import dataclasses
import enum
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from support.machine import describe, use_cores
from support.results import Point, Sample, growth_rows, in_turn, memory_rows, parse_points, speed_rows
from support.systems import Llama, Ours, Settings, System, Transformers
from support.tables import growth_table, memory_table, speed_table


class Fill(enum.StrEnum):
    prefill = "prefill"
    random = "random"


def main(
    model: Annotated[Path, typer.Option(envvar="GLMJAX_BENCH_MODEL", help="Checkpoint in Hugging Face's format.")],
    peers: Annotated[
        Path | None, typer.Option(envvar="GLMJAX_BENCH_PEERS", help="Folder of the peers' benchmark scripts.")
    ] = None,
    llama: Annotated[
        str | None, typer.Option(envvar="GLMJAX_BENCH_LLAMA", help="llama.cpp's llama-batched-bench.")
    ] = None,
    gguf: Annotated[str | None, typer.Option(envvar="GLMJAX_BENCH_GGUF", help="The checkpoint as GGUF.")] = None,
    llama_fa: Annotated[str, typer.Option(help="Flash attention modes of llama.cpp to try.")] = "auto,off",
    transformers: Annotated[
        str | None, typer.Option(envvar="GLMJAX_BENCH_TRANSFORMERS", help="A Python with torch and transformers.")
    ] = None,
    transformers_attn: Annotated[str, typer.Option(help="Attention of transformers, or several to try.")] = "sdpa",
    transformers_chunk: Annotated[str, typer.Option(help="Prompt chunks of transformers to try; 0: none.")] = "0",
    transformers_runs: Annotated[
        int | None, typer.Option(min=1, help="Rounds that transformers takes part in; by default all.")
    ] = None,
    transformers_longest: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt or context that transformers is measured at.")
    ] = None,
    ours_only: Annotated[bool, typer.Option("--ours-only", help="Measure no peer.")] = False,
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,8192",
    decode: Annotated[str, typer.Option(help="batch:context, ...")] = "1:512,1:8192,16:512,16:8192",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a measurement, ours and llama.cpp's.")] = 32,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of one of our steps.")] = 512,
    fill: Annotated[Fill, typer.Option(help="Where our decode contexts come from.")] = Fill.prefill,
    runs: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    attempts: Annotated[int, typer.Option(min=1, help="Measurements at most while others disturb.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use; by default all.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of one process at most.")] = 1800,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for our compiled programs; by default one for this run only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too, after every measurement.")] = None,
) -> None:
    """Measure ours, llama.cpp and transformers on one checkpoint and print the ratios."""
    try:
        points = parse_points(prefill, decode)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prefill / --decode") from None
    if not points:
        raise typer.BadParameter("no point to measure", param_hint="--prefill / --decode")
    cores = threads or len(os.sched_getaffinity(0))
    use_cores(cores)
    settings = Settings(model=str(model), threads=cores, steps=steps, attempts=attempts, timeout=timeout)
    others: list[System] = []
    if not ours_only:
        scripts = _folder(peers, "--peers", "bench_llamacpp.py", "bench_transformers.py")
        binary, weights = _program(llama, "--llama"), _file(gguf, "--gguf")
        python = _program(transformers, "--transformers")
        others += [Llama(settings, scripts, binary, weights, mode) for mode in llama_fa.split(",")]
        others.append(Transformers(settings, scripts, python, transformers_attn, transformers_chunk))
    _folder(model, "--model", "config.json")
    last_round = {"transformers": transformers_runs or runs}

    log = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        ours = Ours(settings, cache or Path(scratch), chunk, fill.value)
        report = Report([ours.name, *(s.name for s in others)], points, settings, out)
        for point in points:
            log.print(f"compile  {point}", end="  ")
            report.compiled[str(point)] = row = ours.prepare(point)
            log.print(row.get("error") or f"{row['compile_s']:.1f} s", markup=False)
        systems = {s.name: s for s in (ours, *others)}
        for round_ in range(runs):
            for point in points:
                taking_part = [name for name in systems if round_ < last_round.get(name, runs)]
                if transformers_longest is not None and point.length > transformers_longest:
                    taking_part = [name for name in taking_part if name != "transformers"]
                for name in in_turn(taking_part, round_):
                    log.print(f"round {round_ + 1}  {point!s:16} {name:16}", end="", markup=False)
                    sample = systems[name].measure(point, round_)
                    log.print(said(sample), markup=False)
                    report.add(sample)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n")
    else:
        report.print(Console() if sys.stdout.isatty() else Console(width=140))
    raise typer.Exit(1 if report.failed else 0)


@dataclasses.dataclass
class Report:
    """The samples so far and what follows from them."""

    systems: Sequence[str]
    points: Sequence[Point]
    settings: Settings
    out: Path | None
    samples: list[Sample] = dataclasses.field(default_factory=list)
    compiled: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    began: str = dataclasses.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failed(self) -> bool:
        """Whether a figure that was asked for is missing: no round gave one."""
        rows = speed_rows(self.samples, self.points, self.systems)
        return any(row["tok_s"][name] is None for row in rows for name in row["failed"])

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self.out:
            self.out.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        shown = dataclasses.asdict(self.settings) | {"model": Path(self.settings.model).name}
        return {
            "began": self.began,
            "machine": describe(),
            "settings": shown,
            "speed": speed_rows(self.samples, self.points, self.systems),
            "memory": memory_rows(self.samples, self.points, self.systems),
            "growth": growth_rows(self.samples, self.points),
            "compile": self.compiled,
            "samples": [s.as_json() for s in self.samples],
        }

    def print(self, console: Console) -> None:
        data = self.as_json()
        machine = data["machine"]
        console.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; float32", markup=False)
        console.print(speed_table(data["speed"], self.systems))
        console.print(memory_table(data["memory"], self.systems))
        if data["growth"]:
            console.print(growth_table(data["growth"]))
        contexts = {s.details["context"] for s in self.samples if "context" in s.details}
        for how in sorted(contexts):
            console.print(f"Our decode contexts: {how}.", markup=False)
        for sample in self.samples:
            if sample.error:
                console.print(f"{sample.system}, {sample.point}: {sample.error}", markup=False, style="red")


def said(sample: Sample) -> str:
    """One measurement as a line of the log."""
    if sample.tok_s is None:
        return f"failed: {sample.error}"
    load = "" if sample.other_cores is None else f", {sample.other_cores:.2f} other cores"
    anew = ", compiled anew: its RSS is too high" if sample.details.get("programs_compiled_anew") else ""
    return f"{sample.tok_s:.1f} tok/s, {sample.peak_rss_mb or 0:.0f} MiB{load}{anew}"


def _folder(path: Path | None, option: str, *needed: str) -> Path:
    if path is None:
        raise typer.BadParameter("needed, unless --ours-only", param_hint=option)
    for name in needed:
        if not (path / name).is_file():
            raise typer.BadParameter(f"{path / name} not found", param_hint=option)
    return path.resolve()


def _file(path: str | None, option: str) -> str:
    if path is None or not Path(path).is_file():
        raise typer.BadParameter(f"{path} not found" if path else "needed, unless --ours-only", param_hint=option)
    return str(Path(path).resolve())


def _program(name: str | None, option: str) -> str:
    found = shutil.which(name) if name else None
    if found is None:
        raise typer.BadParameter(f"{name} is no program" if name else "needed, unless --ours-only", param_hint=option)
    return os.path.abspath(found)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    # Without arguments, as `make bench` runs every script: say how to use it.
    nothing_given = len(sys.argv) == 1 and "GLMJAX_BENCH_MODEL" not in os.environ
    app(["--help"] if nothing_given else sys.argv[1:], prog_name="cpu_peers.py")
