"""Tokens per second with and without drafts at a given acceptance, and where the time of a step goes.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --drafts 5 --length 3.61 --batches 1,8 --json

Drafts are accepted by chance (``synthetic_acceptance_length``), since the demo's random MTP layer guesses badly; 2.99
tokens a step are what GLM-5.2 reaches with three drafts (spec/system.md 5).
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from layout_costs import numbers
from rich.console import Console
from support.machine import describe
from support.tables import make_table, number

from glmjax.api import LLM, enable_compilation_cache
from glmjax.batch import TokenBatch
from glmjax.cache import make_cache
from glmjax.config import GLMConfig
from glmjax.model import logits, run_layers
from glmjax.mtp import draft
from glmjax.params import Params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of
from glmjax.speculation import synthetic_rates
from glmjax.step import choose, count_new
from glmjax.step_io import StepInputs, StepShape, unpack
from glmjax.types import SamplingParams

SEED = 1234
BLOCK = 64


def throughput(llm: LLM, batch: int, context: int, tokens: int, runs: int) -> tuple[float, float]:
    """Median new tokens per second of ``batch`` requests that decode together, and mean tokens of a request's step."""
    rng = np.random.default_rng(SEED)
    how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    speeds = []
    before = llm.stats()
    for run in range(runs + 1):
        handles = [
            llm.engine.submit(rng.integers(3, llm.config.vocab_size, context).tolist(), how) for _ in range(batch)
        ]
        while any(h.metrics.first_token is None for h in handles):
            llm.engine.step()
        counted = llm.stats()["generation_tokens"]
        began = time.perf_counter()
        while llm.engine.has_work:
            llm.engine.step()
        seconds = time.perf_counter() - began
        if run:  # after one to warm up
            speeds.append((llm.stats()["generation_tokens"] - counted) / seconds)
    after = llm.stats()
    drafts, accepted = (after.get(k, 0) - before.get(k, 0) for k in ("num_drafts", "num_accepted_tokens"))
    return statistics.median(speeds), 1 + accepted / drafts if drafts else 1.0


def parts_ms(
    config: GLMConfig,
    params: Params,
    batch: int,
    context: int,
    num_drafts: int,
    rates: tuple[float, ...] | None,
    runs: int,
) -> dict[str, float]:
    """Median milliseconds of a decode step's parts, each compiled by itself: verify, sample and draft."""
    Q = 1 + num_drafts
    width = -(-(context + 2 * Q) // BLOCK)
    shape = StepShape(batch, Q, decode=True)
    inputs = StepInputs.empty(shape, width)
    inputs.tokens[:] = np.random.default_rng(SEED).integers(3, config.vocab_size, inputs.tokens.shape)
    inputs.start[:], inputs.length[:], inputs.continues[:], inputs.limit[:] = context, Q, 1, width * BLOCK
    inputs.block_tables[:] = np.arange(batch * width).reshape(batch, width)
    rows = unpack(jnp.asarray(inputs.pack()), shape, width)
    batch_of_rows = TokenBatch(rows.tokens, rows.start, rows.length, rows.block_tables, BLOCK)
    share = share_of(batch_of_rows, ONE_DEVICE)

    @jax.jit
    def sample_rows(params: Params, hidden: jax.Array) -> Any:
        return count_new(choose(logits(params, hidden), rows, Q).token, rows, rates)

    verify = jax.jit(lambda params, cache: run_layers(params, config, cache, share)[:2], donate_argnums=1)
    cache = make_cache(config, batch * width, BLOCK, "float32", mtp=True)
    cache, hidden = verify(params, cache)
    new = sample_rows(params, hidden)

    def timed(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(runs + 1):
            began = time.perf_counter()
            jax.block_until_ready(run())
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times[1:])

    def run_verify() -> Any:
        nonlocal cache
        cache, hidden = verify(params, cache)
        return hidden

    found = {"verify_ms": timed(run_verify), "sample_ms": timed(lambda: sample_rows(params, hidden)), "draft_ms": 0.0}
    if num_drafts:
        following = dataclasses.replace(batch_of_rows, tokens=new.following, length=new.computed)
        drafting = jax.jit(lambda p, c, h: draft(p, config, c, h, following, num_drafts)[:2], donate_argnums=1)

        def run_draft() -> Any:
            nonlocal cache
            cache, tokens = drafting(params, cache, hidden)
            return tokens

        found["draft_ms"] = timed(run_draft)
    return found


def measure(
    model: str, drafts: int, length: float, batch: int, context: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    """A row without drafts and one with them."""
    rows = []
    for n in (0, drafts):
        options: dict[str, Any] = {"num_speculative_tokens": n}
        if n:
            options["synthetic_acceptance_length"] = length
        limits = {"max_num_seqs": batch, "max_model_len": context + tokens + 1, "max_num_batched_tokens": 512}
        with LLM(model, dtype="float32", **limits, **options) as llm:
            speed, mean = throughput(llm, batch, context, tokens, runs)
            params, config = llm.engine.runner._programs.params, llm.config  # type: ignore[attr-defined]
            rates = synthetic_rates(n, length=length) if n else None
            parts = parts_ms(config, params, batch, context, n, rates, 20 * runs)
        rows.append({"batch": batch, "drafts": n, "tok_s": speed, "tokens_per_step": mean, **parts})
    return rows


def main(
    model: Annotated[str, typer.Option(help="Path of a checkpoint with an MTP layer, or 'demo'.")] = "demo",
    drafts: Annotated[int, typer.Option(min=1, max=7, help="Tokens drafted a step.")] = 3,
    length: Annotated[float, typer.Option(help="Mean tokens of a step, in [1, drafts + 1].")] = 2.99,
    batches: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,4,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of each.")] = 192,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs, after one to warm up.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Compare decoding with and without drafts, side by side."""
    enable_compilation_cache()
    rows = [row for batch in numbers(batches) for row in measure(model, drafts, length, batch, context, tokens, runs)]
    settings = {"model": Path(model).name, "drafts": drafts, "length": length, "context": context, "tokens": tokens}
    text = json.dumps({"machine": describe(), "settings": settings, "rows": rows}, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    lines = []
    for plain, drafting in zip(rows[::2], rows[1::2], strict=True):
        for row in (plain, drafting):
            gain = number(row["tok_s"] / plain["tok_s"], 2, "x")
            cells = [number(row[k], 2) for k in ("tokens_per_step", "verify_ms", "sample_ms", "draft_ms")]
            lines.append([f"{row['batch']} x {context}", str(row["drafts"]), number(row["tok_s"]), gain, *cells])
    columns = ["batch x context", "drafts", "tok/s", "gain", "tokens a step", "verify ms", "sample ms", "draft ms"]
    title = f"{settings['model']}, float32: {drafts} drafts, accepted so that a step gives {length} tokens"
    Console().print(make_table(title, columns, lines))


if __name__ == "__main__":
    typer.run(main)
