"""Time to first token, turn by turn, of a conversation through a prefill and a decode engine, and through one engine.

    python benchmarks/disaggregated_turns.py
    python benchmarks/disaggregated_turns.py --prefill pcp=2,dcp=2 --decode dp=2,ep=2 --turn-tokens 128 --json

A prompt is all that was said before and new tokens. What the decode engine answered is in its prefix cache, so it lacks
only the new tokens and a block that was not full. The prefill engine has not seen the answer and computes it too.
Beside it the same conversation goes through one engine of prefill's layout, with a prefix cache and without.
"""

import dataclasses
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from support.machine import Load, describe
from support.results import in_turn, ratio
from support.tables import Rows, make_table, number

from glmjax.api import LLM, enable_compilation_cache
from glmjax.errors import ConfigError
from glmjax.progress import Progress
from glmjax.serving.disaggregated import AnyEngine, DisaggregatedEngine
from glmjax.sharding.layout import Layout
from glmjax.types import SamplingParams

SEED = 1234
BLOCK = 64
PAIR, ONE, COLD = "pair", "one engine", "no cache"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of one conversation.

    Attributes:
      cached_tokens: leading tokens of the prompt that the engine which answers had in its prefix cache.
      computed_tokens: of the prompt, by the engine which computes prompts.
      ttft_ms: from the request to the first token of its answer.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    bytes_fetched: int
    ttft_ms: float


@dataclasses.dataclass(frozen=True)
class Conversation:
    """``token_ids``: all that was said in it; ``other_cores``: kept busy by others meanwhile."""

    turns: tuple[Turn, ...]
    token_ids: tuple[int, ...]
    other_cores: float


def converse(
    engine: AnyEngine, said: Sequence[Sequence[int]], output_tokens: int, *, forgets: bool = False
) -> Conversation:
    """One conversation, greedily, from empty prefix caches.

    Args:
      said: tokens of each turn.
      output_tokens: of each answer, exactly.
      forgets: empty the prefix caches before every turn.
    """
    how = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    prefix = "prefill_" if isinstance(engine, DisaggregatedEngine) else ""
    history: list[int] = []
    turns = []
    with Load() as load:
        for index, new in enumerate(said):
            if forgets or index == 0:
                engine.reset_prefix_cache()
                finish(engine)
            history += new
            before = Counter(engine.stats())
            handle = engine.submit(history, how)
            finish(engine)
            result, moments, counts = handle.result(timeout=0), handle.metrics, Counter(engine.stats())
            counts.subtract(before)
            assert moments.first_token is not None
            turns.append(
                Turn(
                    prompt_tokens=len(history),
                    cached_tokens=result.num_cached_tokens,
                    computed_tokens=counts[f"{prefix}prompt_tokens"] - counts[f"{prefix}cached_tokens"],
                    bytes_fetched=counts["kv_transfer_bytes_fetched"],
                    ttft_ms=1e3 * (moments.first_token - moments.arrival),
                )
            )
            history += result.outputs[0].token_ids
    return Conversation(tuple(turns), tuple(history), load.other_cores)


def finish(engine: AnyEngine) -> None:
    while engine.has_work:
        engine.step()


@dataclasses.dataclass(frozen=True)
class Job:
    """What is said, and how often: turns of so many tokens, answers of so many, timed conversations."""

    turns: int
    turn_tokens: int
    output_tokens: int
    runs: int

    @property
    def length(self) -> int:
        """Tokens of a conversation."""
        return self.turns * (self.turn_tokens + self.output_tokens)


def measure(job: Job, systems: dict[str, bool], **options: Any) -> dict[str, list[Conversation]]:
    """Conversations by name of the system; a first one of each, to warm up, is left out.

    Args:
      systems: what one ``LLM`` of these options is measured as, and whether it forgets before every turn.
    """
    made: dict[str, list[Conversation]] = {name: [] for name in systems}
    title, total = f"Conversations, {' and '.join(systems)}", len(systems) * (job.runs + 1)
    with LLM(**options) as llm, Progress(title, total, "conversations") as progress:
        rng = np.random.default_rng(SEED)
        said = rng.integers(3, llm.engine.vocab_size, (job.turns, job.turn_tokens)).tolist()
        for run in range(job.runs + 1):
            for name in in_turn(list(systems), run):
                made[name].append(converse(llm.engine, said, job.output_tokens, forgets=systems[name]))
                progress.advance()
    return {name: conversations[1:] for name, conversations in made.items()}


def rows_of(made: dict[str, list[Conversation]]) -> list[dict[str, Any]]:
    """A row for each turn; every number is a median over the conversations of a system."""

    def middle(name: str, turn: int, field: str) -> Any:
        values = [getattr(conversation.turns[turn], field) for conversation in made[name]]
        return statistics.median(values) if field == "ttft_ms" else statistics.median_low(values)

    count = len(made[PAIR][0].turns)
    return [
        {
            "turn": 1 + turn,
            "prompt_tokens": middle(PAIR, turn, "prompt_tokens"),
            "cached_tokens": {name: middle(name, turn, "cached_tokens") for name in made},
            "computed_tokens": {name: middle(name, turn, "computed_tokens") for name in made},
            "bytes_fetched": middle(PAIR, turn, "bytes_fetched"),
            "ttft_ms": {name: middle(name, turn, "ttft_ms") for name in made},
        }
        for turn in range(count)
    ]


def growth(rows: Rows) -> dict[str, Any]:
    """How many times more the last turn is than the second, the first that finds something in a cache."""
    first, last = rows[min(1, len(rows) - 1)], rows[-1]
    grown: dict[str, Any] = {"prompt_tokens": ratio(last["prompt_tokens"], first["prompt_tokens"])}
    for field in ("computed_tokens", "ttft_ms"):
        grown[field] = {name: ratio(last[field][name], value) for name, value in first[field].items()}
    return grown


def same_tokens(texts: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all have; rounding depends on where chunks are cut, and may turn an almost even choice."""
    return next((i for i, tokens in enumerate(zip(*texts, strict=True)) if len(set(tokens)) > 1), len(texts[0]))


def lines_of(rows: Rows) -> list[list[str]]:
    """The rows as lines of the table, with the growth below."""
    systems = PAIR, ONE, COLD
    lines = []
    for row in rows:
        tokens = row["prompt_tokens"], row["cached_tokens"][PAIR], row["computed_tokens"][PAIR]
        ttft = [number(row["ttft_ms"][name]) for name in systems]
        lines.append([str(row["turn"]), *map(str, tokens), number(row["bytes_fetched"] / 1024, 0), *ttft])
    if len(rows) > 2:
        grown = growth(rows)
        prompt, prefill = grown["prompt_tokens"], grown["computed_tokens"][PAIR]
        times = [number(grown["ttft_ms"][name], 2, "x") for name in systems]
        lines.append(["from 2", number(prompt, 2, "x"), "", number(prefill, 2, "x"), "", *times])
    return lines


def main(
    model: Annotated[str, typer.Option(help="Path of a checkpoint, or 'demo'.")] = "demo",
    prefill: Annotated[str, typer.Option(help="Layout of the prefill engine, and of the one engine.")] = "dp=1",
    decode: Annotated[str, typer.Option(help="Layout of the decode engine.")] = "dp=1",
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 10,
    turn_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 96,
    runs: Annotated[int, typer.Option(min=1, help="Timed conversations, after one to warm up.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
) -> None:
    """Measure the time to first token of a conversation's turns, with prefill and decode apart and together."""
    try:
        layouts = [Layout.parse(text) for text in (prefill, decode)]
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--prefill / --decode") from None
    need = sum(layout.num_devices for layout in layouts)
    if need > 2 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Read when jax first looks for devices, and of no consequence where they are GPUs.
        flags = (os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={need}")
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    enable_compilation_cache()
    job = Job(turns, turn_tokens, output_tokens, runs)
    options: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": job.length,
        "max_num_seqs": 1,
        "block_size": BLOCK,
        "num_device_blocks": 2 * -(-job.length // BLOCK),
    }
    # However little is missing, it comes from the prefill engine.
    apart = {"prefill": prefill, "decode": decode, "min_prefill_tokens": 1}
    made = measure(job, {PAIR: False}, **options, **apart)
    made |= measure(job, {ONE: False, COLD: True}, **options, layout=prefill)
    rows = rows_of(made)
    settings = {"model": Path(model).name, "prefill": prefill, "decode": decode, **dataclasses.asdict(job)}
    result: dict[str, Any] = {
        "machine": describe() | {"device": str(jax.devices()[0])},
        "settings": settings,
        "rows": rows,
        "growth_from_second_turn": growth(rows),
        "same_tokens": same_tokens([c.token_ids for conversations in made.values() for c in conversations]),
        "other_cores": {name: statistics.median(c.other_cores for c in found) for name, found in made.items()},
    }
    text = json.dumps(result, indent=1) + "\n"
    if out:
        out.write_text(text)
    if as_json:
        sys.stdout.write(text)
        return
    title = (
        f"{settings['model']}, float32, prefill {prefill}, decode {decode}: {turns} turns of {turn_tokens} tokens, "
        f"answers of {output_tokens}; medians of {runs}. Tokens: prompt, cached by decode, computed by prefill; KiB "
        "fetched; time to first token in ms"
    )
    columns = ["turn", "prompt", "cached", "prefill", "KiB", PAIR, ONE, COLD]
    console = Console()
    console.print(make_table(title, columns, lines_of(rows)))
    busy = ", ".join(f"{name} {number(value, 2)}" for name, value in result["other_cores"].items())
    console.print(f"Tokens before any two conversations differ: {result['same_tokens']} of {job.length}.")
    console.print(f"Other cores busy: {busy}.")


if __name__ == "__main__":
    typer.run(main)
