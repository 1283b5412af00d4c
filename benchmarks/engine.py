"""The whole engine on one model: start-up, throughput of ``LLM.generate`` and what the host costs a step.

    python benchmarks/engine.py                                   # the demo model
    python benchmarks/engine.py --model CHECKPOINT --prompts 32 --prompt-len 512 --tokens 128 --json

Prompts are random tokens, other ones in every run, so that the prefix cache helps none of them.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from support.machine import Load, describe, memory_mb
from support.tables import make_table, number

from glmjax.api import LLM, enable_compilation_cache
from glmjax.serving.plan import Plan, Results, Runner
from glmjax.serving.runner import fill_row
from glmjax.step_io import StepInputs, StepShape
from glmjax.types import SamplingParams

SEED = 1234
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class TimedRunner:
    """A runner that notes how long the host spent sending and awaiting each plan; keeps the one with most sequences."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.close, self.stats = runner.close, runner.stats
        self.reset()

    def reset(self) -> None:
        self.seconds: list[float] = []
        self.widest = Plan(())

    def start(self, plan: Plan) -> tuple[float, Any]:
        began = time.perf_counter()
        started = self._runner.start(plan)
        if len(plan.chunks) >= len(self.widest.chunks):
            self.widest = plan
        return time.perf_counter() - began, started

    def finish(self, started: tuple[float, Any]) -> Results:
        sending, inner = started
        began = time.perf_counter()
        out = self._runner.finish(inner)
        self.seconds.append(sending + time.perf_counter() - began)
        return out


@dataclasses.dataclass(frozen=True)
class Run:
    """One call of ``LLM.generate``.

    Attributes:
      host_ms: of a step outside the runner: scheduling, detokenising, delivering.
      inputs_ms: of building the inputs of the widest step, which the runner does before it sends them.
    """

    seconds: float
    prompt_tokens: int
    new_tokens: int
    steps: int
    step_ms: float
    host_ms: float
    inputs_ms: float
    other_cores: float

    @property
    def new_tok_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def all_tok_s(self) -> float:
        return (self.prompt_tokens + self.new_tokens) / self.seconds


def time_inputs(plan: Plan, table_width: int, repeats: int = 100) -> float:
    """Milliseconds to lay out a step's decoding requests in the arrays of a compiled shape; median."""
    rows = [chunk for chunk in plan.chunks if len(chunk.token_ids) <= 1]
    shape = StepShape(max(1, len(rows)), 1, decode=True)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        inputs = StepInputs.empty(shape, table_width)
        for row, chunk in enumerate(rows):
            fill_row(inputs, row, chunk)
        inputs.pack()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def generate(llm: LLM, runner: TimedRunner, rng: np.random.Generator, prompts: int, length: int, tokens: int) -> Run:
    """One timed batch of random prompts, each completed greedily by exactly ``tokens`` tokens."""
    ids = rng.integers(0, llm.config.vocab_size, (prompts, length)).tolist()
    how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    runner.reset()
    with Load() as load:
        outputs = llm.generate([{"prompt_token_ids": p} for p in ids], how, use_tqdm=False)
    limits = llm.engine.scheduler.config
    steps = max(1, len(runner.seconds))
    return Run(
        seconds=load.seconds,
        prompt_tokens=prompts * length,
        new_tokens=sum(len(o.outputs[0].token_ids) for o in outputs),
        steps=len(runner.seconds),
        step_ms=1e3 * statistics.median(runner.seconds or [0.0]),
        host_ms=1e3 * (load.seconds - sum(runner.seconds)) / steps,
        inputs_ms=time_inputs(runner.widest, -(-limits.max_model_len // limits.block_size)),
        other_cores=load.other_cores,
    )


def start(model: str, **options: Any) -> tuple[LLM, dict[str, float]]:
    """Loads a model and compiles its programs, and says how long that took."""
    compiled: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    began = time.perf_counter()
    llm = LLM(model, **options)
    took = time.perf_counter() - began
    return llm, {
        "start_s": took,
        "compile_s": sum(compiled),  # of all programs; two compile at a time
        "programs": llm.stats()["compilations"],
        "rss_mb": memory_mb("VmRSS"),
    }


def main(
    model: Annotated[str, typer.Option(help="Path of a checkpoint, or 'demo'.")] = "demo",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a run.")] = 16,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 32,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs, after one to warm up.")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "float32",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step at most.")] = 512,
    compilation_cache: Annotated[bool, typer.Option(help="Use programs compiled by earlier runs.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure the engine's start-up, its throughput and the host's part of a step."""
    if compilation_cache:
        enable_compilation_cache()
    options = {"dtype": dtype, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    llm, started = start(model, max_model_len=prompt_len + tokens, **options)
    with llm:
        runner = TimedRunner(llm.engine.runner)
        llm.engine.runner = runner
        rng = np.random.default_rng(SEED)
        generate(llm, runner, rng, min(prompts, max_num_seqs), prompt_len, min(tokens, 4))
        made = [generate(llm, runner, rng, prompts, prompt_len, tokens) for _ in range(runs)]
    middle = sorted(made, key=lambda run: run.seconds)[len(made) // 2]
    figures = {"new_tok_s": middle.new_tok_s, "all_tok_s": middle.all_tok_s, **dataclasses.asdict(middle)}
    request = {"model": Path(model).name, "prompts": prompts, "prompt_len": prompt_len, "tokens": tokens, **options}
    result: dict[str, Any] = {
        "machine": describe() | {"device": str(jax.devices()[0])},
        "settings": request,
        "start": started,
        "median_run": figures,
        "runs": [dataclasses.asdict(run) for run in made],
        "peak_rss_mb": memory_mb("VmHWM"),
    }
    text = json.dumps(result, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    lines = [
        ["start-up", number(started["start_s"], 2, " s")],
        ["  compiling, all programs together", number(started["compile_s"], 2, " s")],
        ["  programs", number(started["programs"], 0)],
        ["new tokens", number(middle.new_tok_s, 1, " /s")],
        ["prompt and new tokens", number(middle.all_tok_s, 1, " /s")],
        ["steps", number(middle.steps, 0)],
        ["step in the runner, median", number(middle.step_ms, 3, " ms")],
        ["host beside the runner, a step", number(middle.host_ms, 3, " ms")],
        ["step inputs, in the runner", number(middle.inputs_ms, 3, " ms")],
        ["other cores busy", number(middle.other_cores, 2)],
        ["peak RSS", number(result["peak_rss_mb"], 0, " MiB")],
    ]
    title = f"{request['model']}, {dtype}: {prompts} prompts of {prompt_len} tokens, {tokens} new each, median run"
    Console().print(make_table(title, ["", "figure"], lines))


if __name__ == "__main__":
    typer.run(main)
