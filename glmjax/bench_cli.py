"""The ``glmjax bench`` commands, part of ``glmjax.cli``: figures that need no server and no clock."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glmjax.errors import ConfigError

if TYPE_CHECKING:
    from glmjax.hisparse_trace import Advance, Trace

app = typer.Typer(no_args_is_help=True, help="Benchmarks of parts of the system.")

MAX_QUERIES = 8  # 1 + as many drafts as serving takes
MAX_WEIGHT_BYTES = 16e9  # of a model to record, which runs on one device

Progress = Callable[[str, int], "Advance"]  # (what, how many) -> to be called after each


@app.callback()
def _group() -> None: ...


@app.command()
def hisparse(
    trace: Annotated[Path | None, typer.Option(help="Selections saved before (.npz), instead of new ones.")] = None,
    model: Annotated[str | None, typer.Option(help="Record this checkpoint, or 'demo'; the default is demo.")] = None,
    overlap: Annotated[
        float | None, typer.Option(help="Draw selections at GLM-5.3's sizes; this part is kept from step to step.")
    ] = None,
    shared: Annotated[float | None, typer.Option(help="Drawn: part of a row that its step's rows share (0.9).")] = None,
    context: Annotated[int | None, typer.Option(help="Drawn: tokens before the first step (32768).")] = None,
    prompt_len: Annotated[int | None, typer.Option(help="Recorded: tokens of the random prompt (512).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of decoding (128).")] = None,
    queries: Annotated[int | None, typer.Option(help="Rows of a step: 1 + drafts (1).")] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Positions that a row selects (the model's; drawn: 2048).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the prompt, or of what is drawn (0).")] = None,
    buffers: Annotated[
        str | None, typer.Option(help="Rows of the hot region, such as 4096,8192; by default up to the whole context.")
    ] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Keep the selections in this file (.npz).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate and bytes into this file (.png, .svg, ...).")] = None,
) -> None:
    """Hit rate and bytes per step of HiSparse's hot region against its size, over recorded or drawn selections."""
    from rich.console import Console

    from glmjax import hisparse_bench
    from glmjax.hisparse_trace import load_trace
    from glmjax.hisparse_trace import save_trace as write_trace

    sizes = None if buffers is None else _rows(buffers)
    of_drawn = {"--shared": shared, "--context": context}
    of_recorded = {"--model": model, "--prompt-len": prompt_len}
    of_both = {"--steps": steps, "--queries": queries, "--k": k, "--seed": seed}
    for name, value, least, most in (
        ("--queries", queries, 1, MAX_QUERIES),
        ("--k", k, 1, None),
        ("--seed", seed, 0, None),
        ("--prompt-len", prompt_len, 1, None),
        ("--steps", steps, 1, None),
    ):
        _check_range(name, value, least, most)
    common: dict[str, Any] = {"queries": 1 if queries is None else queries, "k": k, "seed": seed or 0}
    with _progress() as progress:
        if trace is not None:
            _refuse("--trace", {"--overlap": overlap} | of_drawn | of_recorded | of_both)
            selections = load_trace(trace)
        elif overlap is not None:
            _refuse("--overlap", of_recorded)
            selections = _drawn(
                progress,
                overlap=overlap,
                shared=0.9 if shared is None else shared,
                context=32768 if context is None else context,
                steps=128 if steps is None else steps,
                **common,
            )
        else:
            _refuse("a recording (use --overlap to draw)", of_drawn)
            selections = _recorded(
                progress,
                model=model or "demo",
                prompt_len=512 if prompt_len is None else prompt_len,
                steps=128 if steps is None else steps,
                **common,
            )
        if save_trace is not None:
            write_trace(selections, save_trace)
        sizes = hisparse_bench.default_buffers(selections) if sizes is None else sizes
        advance = progress("Resolving", len(set(sizes)) * selections.steps)
        results = hisparse_bench.measure(selections, sizes, advance)
    if plot is not None:
        hisparse_bench.save_figure(hisparse_bench.draw(selections, results), plot)
    if as_json:
        typer.echo(json.dumps([result.as_json() for result in results], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(hisparse_bench.as_text(selections, results))


def _drawn(progress: Progress, *, steps: int, k: int | None, context: int, **values: Any) -> "Trace":
    """At the sizes of GLM-5.3, with the MTP layer's group if there are drafts."""
    from glmjax.cache import abstract_cache, packed_row_bytes
    from glmjax.config import GLMConfig
    from glmjax.hisparse_trace import group_layers, synthetic

    config = GLMConfig.glm_5_3()
    longest = config.max_position_embeddings
    if context + steps > longest:
        raise ConfigError(f"--context {context} and {steps} steps are more than the model's {longest} positions")
    layers = group_layers(config, mtp=values["queries"] > 1)
    row_bytes = packed_row_bytes(abstract_cache(config, 0, 64, "fp8_ds_mla"))
    return synthetic(
        context,
        config.index_topk if k is None else k,
        layers,
        steps=steps,
        row_bytes=row_bytes,
        advance=progress("Drawing", steps * len(layers)),
        **values,
    )


def _recorded(
    progress: Progress, *, model: str, prompt_len: int, steps: int, queries: int, k: int | None, seed: int
) -> "Trace":
    """Of a small checkpoint in the formats that serving defaults to, after a prompt of random tokens."""
    import dataclasses

    import numpy as np

    from glmjax.api import enable_compilation_cache, find_model
    from glmjax.checkpoint import load_checkpoint, load_config
    from glmjax.hisparse_trace import record
    from glmjax.params import abstract_params, num_bytes

    folder = find_model(model)
    weights = num_bytes(abstract_params(load_config(folder), "bfloat16"))
    if weights > MAX_WEIGHT_BYTES:
        raise ConfigError(
            f"--model {model} has {weights / 1e9:.0f} GB of weights, and recording runs on one device, with at most "
            f"{MAX_WEIGHT_BYTES / 1e9:g}: use a small model, or --overlap to draw selections at GLM-5.3's sizes"
        )
    enable_compilation_cache()
    config, params = load_checkpoint(folder, "bfloat16", mtp=queries > 1, progress=False)
    if k is not None:
        config = dataclasses.replace(config, index_topk=k)
    prompt = np.random.default_rng(seed).integers(config.vocab_size, size=prompt_len).tolist()
    advance = progress("Recording", steps)
    return record(
        params, config, prompt, steps=steps, queries=queries, cache_dtype="fp8_ds_mla", name=model, advance=advance
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each thing that takes time, on standard error if that is a terminal."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:

        def start(what: str, count: int) -> "Advance":
            task = bar.add_task(what, total=count)
            return lambda: bar.advance(task)

        yield start


def _check_range(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        bounds = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise ConfigError(f"{name} must be {bounds}, got {value}")


def _rows(text: str) -> list[int]:
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise ConfigError(
            f"--buffers must be numbers of rows with commas between them, such as 4096,8192, got {text!r}"
        )
    return rows


def _refuse(chosen: str, others: dict[str, Any]) -> None:
    """Options that would have no effect."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ConfigError(f"{given[0]} does not go with {chosen}: leave one of them out")
