"""How to run a model: the options that ``LLM``, ``serve`` and the command line share, checked once."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from glmjax.errors import ConfigError
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.speculation import MAX_DRAFTS, Speculation, from_speculative_config, synthetic_rates
from glmjax.tiers import Reads
from glmjax.vllm_names import DEGREES, ENGINE, nearest

Dtype = Literal["bfloat16", "float32"]
CacheDtypeOption = Literal["auto", "fp8_ds_mla", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one engine, under vLLM's names where it has them.

    Attributes:
      dtype: of activations and of unquantised weights.
      kv_cache_dtype: "auto" is float32 for float32 activations, else fp8_ds_mla.
      max_model_len: prompt and output of a request at most; None: what the model was trained for.
      max_num_seqs: sequences that run at once.
      max_num_batched_tokens: tokens of a step at most, prompts' chunks included.
      block_size: tokens of a KV block.
      num_device_blocks: size of the KV pool; None: what ``kv_cache_gib`` holds.
      kv_cache_gib: memory for the KV pool; None: chosen from the device's.
      enable_prefix_caching: reuse the KV of equal prefixes.
      policy: "fcfs" or "priority".
      layout: how devices share the work: a ``Layout``, its text such as "pcp=8,dcp=8,ep=8", or a preset's name.
        ``max_num_seqs``, ``max_num_batched_tokens`` and the KV pool are those of each data-parallel rank.
      dcp_prefill: with dcp > 1, "kv_gather" brings a layer's cached KV to the prompt's queries, "query_gather" the
        queries to the KV; "auto" takes what moves fewer bytes.
      dcp_comm_backend: how partial attention results come back to their queries, "ag_rs" or "a2a" (vLLM's names).
      ep_dispatch: with ep > 1, how tokens reach their experts: "gather" brings all of them to every device, "ragged"
        sends each to the devices that it needs (fewer bytes unless tp is all devices; GPUs only).
      num_speculative_tokens: tokens that the model's MTP layer drafts for every step of a request, 0 to 7. The output
        is the same up to rounding, in fewer steps.
      speculation: "fixed" always drafts that many; "auto" as many, up to that, as pay for the number of requests in a
        step: fewer, or none, once it is bound by arithmetic, and fewer for a very few requests.
      synthetic_acceptance_rates, synthetic_acceptance_length: for benchmarks, accept drafts by chance: the probability
        for each position that it and all before it are accepted, or the mean number of tokens that a step emits. The
        output is then not the model's.
      hisparse_host_gib: Hybrid HiSparse: KV rows are kept in so much host memory for each data-parallel rank, and on
        the device as long as there is room; then only those that the indexer picks. Index keys stay on the device.
        ``num_device_blocks`` and ``kv_cache_gib`` are of the device, as without.
      hisparse_buffer: rows that a request keeps on the device then; None: one selection more than the queries of a step
        make.
      hisparse_reads: how rows come from the host: "xla", "address" (GPUs only), or "auto" for what suits the device.
      kv_offload: "host" is plain offload of whole blocks instead, the baseline: a running request is on the device
        whole, and blocks of the prefix cache come back from ``kv_offload_gib`` of host memory.
      prefill, decode: two layouts instead of one: prompts are computed by an engine of their own, outputs by another,
        each on devices of its own (one device may serve both), and KV travels between them.
      min_prefill_tokens: prompts of which fewer tokens are not cached are computed by the decode engine itself.
      kv_load_failure_policy: what becomes of a request whose KV does not arrive: "recompute" it, or "fail" it.
      role: of an engine by itself: "prefill" offers the KV of prompts to engines elsewhere, "decode" fetches it; calls
        say so by ``kv_transfer_params``.
      connector: how KV travels between engines: "local" within a process, "nixl" or "jax" between processes and hosts;
        "auto" is "local" within a process, else "nixl" where it is installed and "jax" where not.
      connector_host, connector_port: where the engine's connector answers others; port 0 takes a free one.
      kv_buffer_device: where KV is on its way: "device" beside the pools, so that it goes from device to device, or
        "host"; "auto" is "device" where the connector and the devices' memory allow it. ``kv_cache_gib`` does not count
        it.
      connector_stage_gib: memory of each data-parallel rank for KV on its way; None: two of the longest requests, or
        one where two are more than 8 GiB (on devices, an eighth of their memory for KV). Longer prompts are not handed
        over.
      lease_seconds: for how long KV that is offered waits for a sign of life of who fetches it.
      seed: of requests that bring none.
    """

    dtype: Dtype = "bfloat16"
    kv_cache_dtype: CacheDtypeOption = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int = 64
    num_device_blocks: int | None = None
    kv_cache_gib: float | None = None
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    layout: Layout = ONE_DEVICE
    dcp_prefill: Literal["auto", "kv_gather", "query_gather"] = "auto"
    dcp_comm_backend: Literal["ag_rs", "a2a"] = "ag_rs"
    ep_dispatch: Literal["gather", "ragged"] = "gather"
    num_speculative_tokens: int = 0
    speculation: Literal["fixed", "auto"] = "fixed"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    hisparse_host_gib: float | None = None
    hisparse_buffer: int | None = None
    hisparse_reads: Reads = "auto"
    kv_offload: Literal["host"] | None = None
    kv_offload_gib: float | None = None
    prefill: Layout | None = None
    decode: Layout | None = None
    min_prefill_tokens: int = 64
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    role: Literal["prefill", "decode"] | None = None
    connector: Literal["auto", "local", "nixl", "jax"] = "auto"
    connector_host: str = "127.0.0.1"
    connector_port: int = 0
    kv_buffer_device: Literal["auto", "device", "host"] = "auto"
    connector_stage_gib: float | None = None
    lease_seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("bfloat16", "float32"))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8_ds_mla", "bfloat16", "float32"))
        _one_of("policy", self.policy, ("fcfs", "priority"))
        _one_of("dcp_prefill", self.dcp_prefill, ("auto", "kv_gather", "query_gather"))
        _one_of("dcp_comm_backend", self.dcp_comm_backend, ("ag_rs", "a2a"))
        _one_of("ep_dispatch", self.ep_dispatch, ("gather", "ragged"))
        if not isinstance(self.layout, Layout):
            raise ConfigError(f"layout must be a glmjax.Layout or its text, such as 'pcp=8,dcp=8', got {self.layout!r}")
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_device_blocks", "max_model_len"):
            _whole(field, getattr(self, field), least=2 if field == "max_model_len" else 1)
        _whole("seed", self.seed)
        _one_of("speculation", self.speculation, ("fixed", "auto"))
        drafts = self.num_speculative_tokens
        if not isinstance(drafts, int) or isinstance(drafts, bool) or not 0 <= drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_speculative_tokens must be a whole number in [0, {MAX_DRAFTS}], got {drafts!r}")
        if drafts and (need := self.max_num_seqs * (1 + drafts)) > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} does not hold a step of max_num_seqs="
                f"{self.max_num_seqs} requests with num_speculative_tokens={drafts}: give at least {need}, or lower "
                "max_num_seqs"
            )
        self.drafting  # noqa: B018  checks the rates
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        for field in ("kv_cache_gib", "hisparse_host_gib", "kv_offload_gib", "connector_stage_gib"):
            _positive(field, getattr(self, field))
        self._check_offload()
        self._check_disaggregation()

    def _check_offload(self) -> None:
        if self.kv_offload is not None:
            _one_of("kv_offload", self.kv_offload, ("host",))
        _one_of("hisparse_reads", self.hisparse_reads, ("auto", "xla", "address"))
        _whole("hisparse_buffer", self.hisparse_buffer, least=1)
        if self.kv_offload is None and self.kv_offload_gib is not None:
            raise ConfigError(
                f"kv_offload_gib must be left at None without kv_offload='host', got {self.kv_offload_gib!r}"
            )
        if self.kv_offload is not None and self.kv_offload_gib is None:
            raise ConfigError(
                f"kv_offload must come with kv_offload_gib, the host memory that it may take, got {self.kv_offload!r}"
            )
        if self.kv_offload is not None and self.hisparse_host_gib is not None:
            raise ConfigError(
                "kv_offload='host' is the baseline without HiSparse, and hisparse_host_gib="
                f"{self.hisparse_host_gib!r} asks for HiSparse: give one of them"
            )
        if self.hisparse_host_gib is None and self.hisparse_buffer is not None:
            raise ConfigError(
                f"hisparse_buffer must be left at None without hisparse_host_gib, got {self.hisparse_buffer!r}"
            )

    def _check_disaggregation(self) -> None:
        _whole("min_prefill_tokens", self.min_prefill_tokens, least=1)
        _one_of("kv_load_failure_policy", self.kv_load_failure_policy, ("recompute", "fail"))
        self._check_connector()
        for name, other in (("prefill", self.decode), ("decode", self.prefill)):
            value = getattr(self, name)
            if not isinstance(value, Layout | None):
                raise ConfigError(f"{name} must be a glmjax.Layout or its text, such as 'pcp=8,dcp=8', got {value!r}")
            if value is not None and other is None:
                raise ConfigError(f"prefill and decode, layouts of two engines, go together: got only {name}={value}")
        if self.prefill is not None and self.layout != ONE_DEVICE:
            raise ConfigError(f"layout must be left out where prefill and decode have their own, got {self.layout!r}")
        if self.prefill is not None and self.kv_offload is not None:
            raise ConfigError(
                "kv_offload must be left at None with prefill and decode: of engines with KV in host memory only those "
                f"with HiSparse take it from others, got {self.kv_offload!r}"
            )

    def _check_connector(self) -> None:
        _one_of("connector", self.connector, ("auto", "local", "nixl", "jax"))
        _one_of("kv_buffer_device", self.kv_buffer_device, ("auto", "device", "host"))
        _positive("lease_seconds", self.lease_seconds)
        if not isinstance(self.connector_host, str) or not self.connector_host:
            raise ConfigError(f"connector_host must be an address, got {self.connector_host!r}")
        _whole("connector_port", self.connector_port, least=0)
        if self.connector_port > 65535:
            raise ConfigError(f"connector_port must be in [0, 65535], got {self.connector_port}")
        if self.connector_host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"connector_host={self.connector_host!r} is no address that other engines could reach: give this host's"
            )
        if self.role is None:
            of_roles = ["connector_host", "connector_port"]
            if self.prefill is None:
                of_roles += ["connector", "lease_seconds", "connector_stage_gib", "kv_buffer_device"]
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in of_roles and value != field.default:
                    raise ConfigError(
                        f"{field.name} must be left at {field.default!r} without role, or prefill and decode, got "
                        f"{value!r}"
                    )
            return
        _one_of("role", self.role, ("prefill", "decode"))
        if self.prefill is not None:
            raise ConfigError(f"role must be left at None with prefill and decode, which start both, got {self.role!r}")
        if self.connector == "local":
            raise ConfigError("connector='local' reaches no other process: give 'nixl' or 'jax' with role")
        if self.kv_offload is not None:
            raise ConfigError(f"kv_offload must be left at None with role, got {self.kv_offload!r}")
        if self.role == "prefill" and self.hisparse_host_gib is not None:
            raise ConfigError(
                f"hisparse_host_gib must be left at None with role='prefill': HiSparse is for decoding, got "
                f"{self.hisparse_host_gib!r}"
            )

    def of_engine(self, name: str) -> "EngineOptions":
        """Options of one engine of a pair, "prefill" or "decode". HiSparse is the decode engine's."""
        changes: dict[str, Any] = {"layout": getattr(self, name), "role": name, "prefill": None, "decode": None}
        if name == "prefill":
            changes |= {"hisparse_host_gib": None, "hisparse_buffer": None}
        if self.connector == "local":
            changes["connector"] = "auto"
        return dataclasses.replace(self, **changes)

    @property
    def host_gib(self) -> float | None:
        """Memory of the host's pool, for each data-parallel rank; None: there is none."""
        return self.hisparse_host_gib if self.kv_offload is None else self.kv_offload_gib

    @property
    def cache_dtype(self) -> Literal["fp8_ds_mla", "bfloat16", "float32"]:
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "float32" if self.dtype == "float32" else "fp8_ds_mla"

    @property
    def drafting(self) -> Speculation:
        """The options of speculative decoding as one value."""
        names = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        rates = None
        for name, value in given.items():
            if not self.num_speculative_tokens:
                raise ConfigError(f"{name} must be left at None where num_speculative_tokens is 0, got {value!r}")
            if self.speculation == "auto":
                raise ConfigError(f"{name} needs speculation='fixed': 'auto' chooses the number of drafts itself")
            rates = synthetic_rates(self.num_speculative_tokens, *(getattr(self, name) for name in names))
        return Speculation(num_drafts=self.num_speculative_tokens, mode=self.speculation, rates=rates)


def engine_options(**arguments: Any) -> EngineOptions:
    """Checks keyword arguments of ``LLM`` and ``serve``; vLLM's ``speculative_config`` is taken too.

    Raises:
      ConfigError: an argument is unknown, out of range, or asks for something this version cannot do.
    """
    known = {f.name for f in dataclasses.fields(EngineOptions)}
    if (vllm := arguments.pop("speculative_config", None)) is not None:
        if not isinstance(vllm, Mapping):
            raise ConfigError(f"speculative_config must be a mapping, got {vllm!r}")
        for name, value in from_speculative_config(vllm).items():
            if arguments.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name}={arguments[name]!r}, but speculative_config says {value!r}: give one of them"
                )
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r}: {_meant(name, value, known)}")
    given = {k: v for k, v in arguments.items() if k in known}
    for name in ("layout", "prefill", "decode"):
        if isinstance(given.get(name), str):
            given[name] = Layout.parse(given[name])
    if given.get("layout") is None:
        given["layout"] = ONE_DEVICE
    return EngineOptions(**given)


def _meant(name: str, value: Any, known: Collection[str]) -> str:
    """What somebody may have meant by an option that there is not."""
    degree = DEGREES.get(name, name)
    if degree in DEGREES.values():
        many = value if isinstance(value, int) and not isinstance(value, bool) else 2
        return f"did you mean layout='{degree}={many}'?"
    near = ENGINE.get(name) or nearest(name, known)
    return f"did you mean {near}?" if near else "help(glmjax.options.EngineOptions) says which there are"


def _one_of(field: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _positive(field: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):
        raise ConfigError(f"{field} must be a positive number, got {value!r}")


def _whole(field: str, value: Any, least: int | None = None) -> None:
    if value is None and field in ("num_device_blocks", "max_model_len", "hisparse_buffer"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        rule = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{field} must be a whole number{rule}, got {value!r}")
    if least is not None and value >= 1 << 30:
        raise ConfigError(f"{field} must be below 2^30, for a device counts with 32 bits, got {value}")
