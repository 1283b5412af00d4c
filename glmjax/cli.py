"""The ``glmjax`` command.  Bad input is one line on standard error and exit code 2."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from glmjax import __version__, bench_cli, cli_interrupt, cli_proxy
from glmjax.cli_errors import usage_message
from glmjax.cli_log import lines_on_stderr
from glmjax.cli_options import (
    DCP,
    DP,
    EP,
    PCP,
    TP,
    Batched,
    Blocks,
    BlockSize,
    Buffer,
    CacheDtype,
    CacheOption,
    Caching,
    Combine,
    CombineOption,
    Connector,
    ConnectorHost,
    ConnectorOption,
    ConnectorPort,
    DecodeLayout,
    Dispatch,
    DispatchOption,
    Drafts,
    Dtype,
    DtypeOption,
    Format,
    Gib,
    HostGib,
    Interleave,
    KvBuffer,
    KvBufferDevice,
    LayoutName,
    Lease,
    Length,
    LoadFailure,
    MinPrefill,
    Model,
    OffloadGib,
    OffloadOption,
    OnLoadFailure,
    Policy,
    Prefill,
    PrefillLayout,
    PrefillOption,
    Reads,
    ReadsOption,
    RoleOption,
    Seed,
    Sequences,
    SpeculationMode,
    SpeculationOption,
    StageGib,
    SyntheticLength,
    SyntheticRates,
)
from glmjax.cuda_plugin import expect_no_libraries, may_have_gpu
from glmjax.errors import ConfigError, GlmjaxError
from glmjax.sharding.layout import Layout

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut the names of options off
    context_settings={"max_content_width": 120},
    help="GLM-5.3 in JAX: serve, generate, convert.",
)
app.add_typer(bench_cli.app, name="bench")

# Of click, which typer imports or carries with it, depending on its version.
_ClickException: Any = typer.BadParameter.__mro__[2]


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Clients must send it as a Bearer token.")] = None,
    max_num_queued_requests: Annotated[int | None, typer.Option(help="More waiting requests get a 503.")] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    kv_cache_dtype: CacheOption = CacheDtype.auto,
    max_model_len: Length = None,
    max_num_seqs: Sequences = 16,
    max_num_batched_tokens: Batched = 512,
    block_size: BlockSize = 64,
    num_device_blocks: Blocks = None,
    kv_cache_gib: Gib = None,
    prefix_caching: Caching = True,
    policy: Annotated[Policy, typer.Option(help="Order of waiting requests.")] = Policy.fcfs,
    seed: Seed = 0,
    layout: LayoutName = None,
    dp: DP = 1,
    tp: TP = 1,
    pcp: PCP = 1,
    dcp: DCP = 1,
    ep: EP = 1,
    interleave: Interleave = 1,
    dcp_prefill: PrefillOption = Prefill.auto,
    dcp_comm_backend: CombineOption = Combine.ag_rs,
    ep_dispatch: DispatchOption = Dispatch.gather,
    num_speculative_tokens: Drafts = 0,
    speculation: SpeculationOption = SpeculationMode.fixed,
    synthetic_acceptance_rates: SyntheticRates = None,
    synthetic_acceptance_length: SyntheticLength = None,
    hisparse_host_gib: HostGib = None,
    hisparse_buffer: Buffer = None,
    hisparse_reads: ReadsOption = Reads.auto,
    kv_offload: OffloadOption = None,
    kv_offload_gib: OffloadGib = None,
    prefill: PrefillLayout = None,
    decode: DecodeLayout = None,
    min_prefill_tokens: MinPrefill = 64,
    kv_load_failure_policy: LoadFailure = OnLoadFailure.recompute,
    role: RoleOption = None,
    connector: ConnectorOption = Connector.auto,
    connector_host: ConnectorHost = "127.0.0.1",
    connector_port: ConnectorPort = 0,
    kv_buffer_device: KvBufferDevice = KvBuffer.auto,
    connector_stage_gib: StageGib = None,
    lease_seconds: Lease = 30.0,
) -> None:
    """Serve a model with OpenAI's HTTP API."""
    from glmjax import api

    chosen = _layout(layout, dp=dp, tp=tp, pcp=pcp, dcp=dcp, ep=ep, interleave=interleave)
    given = {"--prefill": prefill, "--decode": decode}
    pair = [_parse_layout(option, text) for option, text in given.items() if text is not None]
    if connector is Connector.local:
        _simulate_devices(sum(one.num_devices for one in pair))
    api.serve(
        model,
        host,
        port,
        served_model_name=served_model_name,
        api_key=api_key,
        max_num_queued_requests=max_num_queued_requests,
        dtype=dtype.value,
        kv_cache_dtype=kv_cache_dtype.value,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_device_blocks=num_device_blocks,
        kv_cache_gib=kv_cache_gib,
        enable_prefix_caching=prefix_caching,
        policy=policy.value,
        layout=chosen,
        dcp_prefill=dcp_prefill.value,
        dcp_comm_backend=dcp_comm_backend.value,
        ep_dispatch=ep_dispatch.value,
        num_speculative_tokens=num_speculative_tokens,
        speculation=speculation.value,
        synthetic_acceptance_rates=_numbers("--synthetic-acceptance-rates", synthetic_acceptance_rates),
        synthetic_acceptance_length=synthetic_acceptance_length,
        hisparse_host_gib=hisparse_host_gib,
        hisparse_buffer=hisparse_buffer,
        hisparse_reads=hisparse_reads.value,
        kv_offload=kv_offload.value if kv_offload else None,
        kv_offload_gib=kv_offload_gib,
        prefill=prefill,
        decode=decode,
        min_prefill_tokens=min_prefill_tokens,
        kv_load_failure_policy=kv_load_failure_policy.value,
        role=role.value if role else None,
        connector=connector.value,
        connector_host=connector_host,
        connector_port=connector_port,
        kv_buffer_device=kv_buffer_device.value,
        connector_stage_gib=connector_stage_gib,
        lease_seconds=lease_seconds,
        seed=seed,
    )


app.command()(cli_proxy.proxy)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Prompt; may be given several times.")],
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: DtypeOption = Dtype.bfloat16,
    kv_cache_dtype: CacheOption = CacheDtype.auto,
    max_model_len: Length = None,
    max_num_seqs: Sequences = 4,
    max_num_batched_tokens: Batched = 128,
    block_size: BlockSize = 64,
    num_device_blocks: Blocks = None,
    kv_cache_gib: Gib = None,
    seed: Seed = 0,
    layout: LayoutName = None,
    dp: DP = 1,
    tp: TP = 1,
    pcp: PCP = 1,
    dcp: DCP = 1,
    ep: EP = 1,
    interleave: Interleave = 1,
    dcp_prefill: PrefillOption = Prefill.auto,
    dcp_comm_backend: CombineOption = Combine.ag_rs,
    ep_dispatch: DispatchOption = Dispatch.gather,
    num_speculative_tokens: Drafts = 0,
    speculation: SpeculationOption = SpeculationMode.fixed,
    synthetic_acceptance_rates: SyntheticRates = None,
    synthetic_acceptance_length: SyntheticLength = None,
    hisparse_host_gib: HostGib = None,
    hisparse_buffer: Buffer = None,
    hisparse_reads: ReadsOption = Reads.auto,
    kv_offload: OffloadOption = None,
    kv_offload_gib: OffloadGib = None,
) -> None:
    """Complete prompts and print the result."""
    from glmjax import api
    from glmjax.types import SamplingParams

    chosen = _layout(layout, dp=dp, tp=tp, pcp=pcp, dcp=dcp, ep=ep, interleave=interleave)
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, skip_special_tokens=not chat
    )
    options: dict[str, Any] = {
        "dtype": dtype.value,
        "kv_cache_dtype": kv_cache_dtype.value,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_device_blocks": num_device_blocks,
        "kv_cache_gib": kv_cache_gib,
        "layout": chosen,
        "dcp_prefill": dcp_prefill.value,
        "dcp_comm_backend": dcp_comm_backend.value,
        "ep_dispatch": ep_dispatch.value,
        "num_speculative_tokens": num_speculative_tokens,
        "speculation": speculation.value,
        "synthetic_acceptance_rates": _numbers("--synthetic-acceptance-rates", synthetic_acceptance_rates),
        "synthetic_acceptance_length": synthetic_acceptance_length,
        "hisparse_host_gib": hisparse_host_gib,
        "hisparse_buffer": hisparse_buffer,
        "hisparse_reads": hisparse_reads.value,
        "kv_offload": kv_offload.value if kv_offload else None,
        "kv_offload_gib": kv_offload_gib,
        "seed": seed,
    }
    with api.LLM(model, **options) as llm:
        if chat:
            outputs = llm.chat([[{"role": "user", "content": p}] for p in prompt], sampling)
        else:
            outputs = llm.generate(prompt, sampling)
    if as_json:
        rows = [
            {
                "prompt": text,
                "text": out.outputs[0].text,
                "token_ids": out.outputs[0].token_ids,
                "finish_reason": out.outputs[0].finish_reason,
                "num_cached_tokens": out.num_cached_tokens,
            }
            for text, out in zip(prompt, outputs, strict=True)
        ]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=1))
        return
    for text, out in zip(prompt, outputs, strict=True):
        asked = typer.style(text, bold=True)  # on a terminal: what follows is the model's
        typer.echo(f"{asked}{'' if not chat else chr(10)}{out.outputs[0].text}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint to read: Hugging Face or Orbax folder, or 'demo'.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[Format, typer.Option(help="Format to write.")] = Format.orbax,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert weights; by default they stay as they are.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")] = False,
    time_loads: Annotated[bool, typer.Option("--time-loads", help="Load both afterwards and print the times.")] = False,
) -> None:
    """Convert a checkpoint between Hugging Face's format and Orbax, which loads faster."""
    from glmjax import checkpoint
    from glmjax.api import find_model

    folder = find_model(source)
    with cli_interrupt.in_order():
        checkpoint.convert(folder, target, to=to.value, dtype=dtype.value if dtype else None, overwrite=overwrite)
    typer.echo(f"Wrote {target}")
    if time_loads:
        as_dtype = dtype.value if dtype else "bfloat16"
        for path, seconds in checkpoint.time_loads([folder, target], as_dtype, time.perf_counter).items():
            typer.echo(f"{seconds:8.3f} s to load {path} as {as_dtype}")


@app.command()
def demo(
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")] = False,
) -> None:
    """Write the demo checkpoint: small, random, deterministic."""
    from glmjax.demo import build_demo

    with cli_interrupt.in_order():
        build_demo(target, seed=seed, overwrite=overwrite)
    typer.echo(f"Wrote {target}")


@app.command()
def kernels(
    names: Annotated[list[str] | None, typer.Argument(help="Kernels to look at; by default all.")] = None,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Time them if there is a GPU.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile the kernels for an H200 and print registers, spills, instructions and roofline; needs no GPU."""
    import jax
    from rich.console import Console

    if not may_have_gpu() and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # else JAX leaves the CUDA plugin out, which compiles without a GPU
    from glmjax import kernel_report
    from glmjax.progress import Progress

    kernel_report.check_names(names or ())
    cases = kernel_report.select_cases(kernel_report.all_cases(), names or ())
    clock = time.perf_counter if measure and kernel_report.can_measure() else None
    kernel_report.h200_mesh()  # says if nothing can be compiled
    reports = []
    with Progress("Compiling", len(cases), "kernels") as progress:
        for case in cases:
            reports.append(kernel_report.report(case, clock))
            progress.advance()
    if as_json:
        typer.echo(json.dumps([report.as_json() for report in reports], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(kernel_report.as_table(reports))


def _layout(name: str | None, **degrees: int) -> Layout:
    """The layout that was asked for, with as many simulated devices if it will run on a CPU."""
    if name is not None and any(degree != 1 for degree in degrees.values()):
        raise ConfigError(f"--layout {name} and degrees such as --pcp exclude one another: give one of them")
    layout = Layout(**degrees) if name is None else _parse_layout("--layout", name)
    _simulate_devices(layout.num_devices)
    return layout


def _parse_layout(option: str, text: str) -> Layout:
    try:
        return Layout.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _simulate_devices(count: int) -> None:
    if count > 1 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        import jax

        jax.config.update("jax_num_cpu_devices", count)


def _numbers(option: str, text: str | None) -> list[float] | None:
    """Numbers with commas between them."""
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} must be numbers with commas between them, such as 1,0.9,0.5, got {text!r}"
        ) from None


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


def main() -> None:
    """Entry point: one line and exit code 2 for what the user can mend."""
    expect_no_libraries()
    try:
        with cli_interrupt.at_once(), lines_on_stderr():
            code = app(standalone_mode=False)
        if code == cli_interrupt.EXIT_CODE:  # newer typers return it
            raise KeyboardInterrupt
    except GlmjaxError as error:
        _fail(as_typed(str(error), *sys.argv[1:2]))
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            raise SystemExit(2) from None
        _fail(usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write(cli_interrupt.message())
        raise SystemExit(cli_interrupt.EXIT_CODE) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def as_typed(message: str, command: str | None = None) -> str:
    """A message with options as they are on the command line, ``--max-model-len``, instead of Python's names for them.

    Only names that are no words of prose, and none in what is said of a file, which has keys of its own.

    Args:
      command: whose options they are; None: any command's.
    """
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    asked = [commands[command]] if command in commands else commands.values()
    options = {param.name: param.opts[0] for each in asked for param in each.params if "_" in param.name}
    if ".json" in message:
        return message
    quoted = r"(?<!\w)'[^']*'"  # somebody's own words
    name = r"(?<![\w/.-])[a-z]+(_[a-z]+)+(?![\w/-]|\.\w)"
    return re.sub(f"{quoted}|{name}", lambda found: options.get(found[0], found[0]), message)


def _fail(message: str) -> NoReturn:
    if message:  # empty where help was shown instead
        sys.stderr.write(f"glmjax: {' '.join(message.split())}\n")
    raise SystemExit(2)
