"""Options that commands of the ``glmjax`` command share: their names there, types and help."""

import enum
from typing import Annotated

import typer


class Dtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class CacheDtype(enum.StrEnum):
    auto = "auto"
    fp8_ds_mla = "fp8_ds_mla"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Policy(enum.StrEnum):
    fcfs = "fcfs"
    priority = "priority"


class Prefill(enum.StrEnum):
    auto = "auto"
    kv_gather = "kv_gather"
    query_gather = "query_gather"


class Combine(enum.StrEnum):
    ag_rs = "ag_rs"
    a2a = "a2a"


class Dispatch(enum.StrEnum):
    gather = "gather"
    ragged = "ragged"


class SpeculationMode(enum.StrEnum):
    fixed = "fixed"
    auto = "auto"


class Reads(enum.StrEnum):
    auto = "auto"
    xla = "xla"
    address = "address"


class OnLoadFailure(enum.StrEnum):
    recompute = "recompute"
    fail = "fail"


class Role(enum.StrEnum):
    prefill = "prefill"
    decode = "decode"


class Connector(enum.StrEnum):
    auto = "auto"
    local = "local"
    nixl = "nixl"
    jax = "jax"


class KvBuffer(enum.StrEnum):
    auto = "auto"
    device = "device"
    host = "host"


class OffloadTo(enum.StrEnum):
    host = "host"


class Format(enum.StrEnum):
    orbax = "orbax"
    hf = "hf"


Model = Annotated[str, typer.Argument(help="Path of a checkpoint, or 'demo'.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of activations and unquantised weights.")]
CacheOption = Annotated[CacheDtype, typer.Option("--kv-cache-dtype", help="Format of the KV cache.")]
Length = Annotated[int | None, typer.Option("--max-model-len", help="Prompt and output at most, in tokens.")]
Sequences = Annotated[int, typer.Option("--max-num-seqs", help="Sequences that run at once.")]
Batched = Annotated[int, typer.Option("--max-num-batched-tokens", help="Tokens of a step at most.")]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens of a KV block.")]
Blocks = Annotated[int | None, typer.Option("--num-device-blocks", help="Size of the KV pool in blocks.")]
Gib = Annotated[float | None, typer.Option("--kv-cache-gib", help="Memory for the KV pool, in GiB.")]
Caching = Annotated[bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse KV of equal prefixes.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of requests that bring none.")]
LayoutName = Annotated[str | None, typer.Option("--layout", help="Instead of degrees: a preset such as pcp8_dcp8.")]
DP = Annotated[int, typer.Option("--dp", help="Data parallelism: groups with requests of their own.")]
TP = Annotated[int, typer.Option("--tp", help="Tensor parallelism: heads and widths are split.")]
PCP = Annotated[int, typer.Option("--pcp", help="Prefill context parallelism: a prompt's queries are split.")]
DCP = Annotated[int, typer.Option("--dcp", help="Decode context parallelism: the KV cache is split by token.")]
EP = Annotated[int, typer.Option("--ep", help="Expert parallelism: 1, or the number of devices.")]
PrefillOption = Annotated[Prefill, typer.Option("--dcp-prefill", help="What travels in a prefill with --dcp.")]
CombineOption = Annotated[Combine, typer.Option("--dcp-comm-backend", help="How attention results travel.")]
Interleave = Annotated[int, typer.Option("--interleave", help="Consecutive tokens of a DCP rank.")]
DispatchOption = Annotated[Dispatch, typer.Option("--ep-dispatch", help="How tokens reach experts; ragged needs GPUs.")]

Drafts = Annotated[int, typer.Option("--num-speculative-tokens", help="Tokens the MTP layer drafts a step, 0 to 7.")]
SpeculationOption = Annotated[
    SpeculationMode, typer.Option("--speculation", help="auto drafts as many as pay for a step's requests.")
]
SyntheticRates = Annotated[
    str | None, typer.Option(help="For benchmarks: chance that each draft and all before it count, such as 1,0.9,0.5.")
]
SyntheticLength = Annotated[float | None, typer.Option(help="For benchmarks: mean tokens of a step, by chance.")]
HostGib = Annotated[float | None, typer.Option("--hisparse-host-gib", help="HiSparse: GiB of KV rows on the host.")]
Buffer = Annotated[int | None, typer.Option("--hisparse-buffer", help="HiSparse: rows of a request on the device.")]
ReadsOption = Annotated[Reads, typer.Option("--hisparse-reads", help="HiSparse: how rows come from the host.")]
OffloadOption = Annotated[OffloadTo | None, typer.Option("--kv-offload", help="Plain offload of whole KV blocks.")]
OffloadGib = Annotated[float | None, typer.Option("--kv-offload-gib", help="GiB of host memory for --kv-offload.")]


PrefillLayout = Annotated[str | None, typer.Option("--prefill", help="Layout of an engine for prompts: 'pcp=8,dcp=8'.")]
DecodeLayout = Annotated[str | None, typer.Option("--decode", help="Layout of the engine for outputs then.")]
MinPrefill = Annotated[int, typer.Option("--min-prefill-tokens", help="Shorter uncached prompts stay with --decode.")]
RoleOption = Annotated[Role | None, typer.Option("--role", help="One engine of a pair, by itself; needs a proxy.")]
ConnectorOption = Annotated[Connector, typer.Option("--connector", help="How KV travels; local: within one process.")]
ConnectorHost = Annotated[str, typer.Option("--connector-host", help="Address of the connector, for other engines.")]
ConnectorPort = Annotated[int, typer.Option("--connector-port", help="Port of the connector; 0 takes a free one.")]
KvBufferDevice = Annotated[KvBuffer, typer.Option("--kv-buffer-device", help="Where KV is on its way.")]
StageGib = Annotated[float | None, typer.Option("--connector-stage-gib", help="GiB of memory for KV on its way.")]
Lease = Annotated[float, typer.Option("--lease-seconds", help="How long offered KV waits for a sign of life.")]
LoadFailure = Annotated[OnLoadFailure, typer.Option("--kv-load-failure-policy", help="If KV does not arrive.")]
