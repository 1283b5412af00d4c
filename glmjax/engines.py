"""Engines from options: pools are sized, programs compiled and joined with a scheduler; and two of them as one."""

import dataclasses
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from glmjax.checkpoint import load_checkpoint, weights_name
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.options import EngineOptions
from glmjax.pool_sizes import PoolSizes, pool_sizes
from glmjax.programs import Programs, drafts_by_rows, step_shapes, with_contexts
from glmjax.progress import Progress
from glmjax.serving.clock import Clock
from glmjax.serving.data_parallel import DataParallelScheduler
from glmjax.serving.disaggregated import DisaggregatedEngine
from glmjax.serving.engine import Engine
from glmjax.serving.exchange import DeviceExchange, Exchange, HostExchange
from glmjax.serving.handoff import Collector, Handoff
from glmjax.serving.runner import ProgramRunner
from glmjax.serving.scheduler import Scheduler
from glmjax.serving.scheduler_config import SchedulerConfig
from glmjax.serving.tokenizer import Tokenizer
from glmjax.serving.transfer.factory import between_processes, make_connector
from glmjax.serving.transfer.job import Settings
from glmjax.serving.transfer.local import Hub
from glmjax.serving.transfer.memory import describe
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import param_specs
from glmjax.sharding.relayout import KVSharding
from glmjax.step_io import MAX_BANNED

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Peers:
    """How an engine is known to others, and finds them.

    Attributes:
      engine_id: unique to a run of it.
      connector: kind of its connector.
      checkpoint: tells apart models of one shape.
      hub: where the engines of this process find each other, for connector "local".
      settings: of the connector.
    """

    engine_id: str
    connector: str
    checkpoint: str
    hub: Hub | None = None
    settings: Settings = dataclasses.field(default_factory=Settings)


def build_engine(
    config: GLMConfig,
    params: Any,
    tokenizer: Tokenizer | None,
    options: EngineOptions,
    eos_ids: Sequence[int],
    *,
    mesh: jax.sharding.Mesh | None = None,
    peers: Peers | None = None,
    sizes: PoolSizes | None = None,
) -> Engine:
    """Compiles the programs for these options and joins them with a scheduler.

    Args:
      mesh: of the layout, where ``params`` are; None: the first devices.
      peers: hands requests over to other engines, or takes them.
      sizes: of the pools; None: as the options and the memory that is free say.
    """
    if sizes is None:
        sizes = pool_sizes(config, options, None if peers is None else peers.connector, _local_devices(mesh))
    layout, max_model_len = options.layout, sizes.max_model_len
    max_chunk = min(options.max_num_batched_tokens, max_model_len)
    table_width = -(-max_model_len // sizes.block_size)
    drafting = options.drafting
    shapes = step_shapes(options.max_num_seqs, max_chunk, drafts_by_rows(config, params, drafting, layout))
    shapes = with_contexts(shapes, table_width, layout, options.dcp_prefill)
    limits = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        policy=options.policy,
        num_speculative_tokens=drafting.num_drafts,
        num_pages=None if sizes.offload is None else sizes.offload.num_pages,
        region_pages=0 if sizes.offload is None else sizes.offload.region_pages,
    )
    with Progress("Compiling", len(shapes), "programs") as shown:
        programs = Programs(
            config,
            params,
            num_blocks=sizes.num_blocks,
            block_size=options.block_size,
            table_width=table_width,
            cache_dtype=options.cache_dtype,
            shapes=shapes,
            num_slots=options.max_num_seqs,
            speculation=drafting,
            offload=sizes.offload,
            layout=layout,
            mesh=mesh,
            prefill=options.dcp_prefill,
            combine=options.dcp_comm_backend,
            dispatch=options.ep_dispatch,
            progress=lambda done, total: shown.update(done),
        )
    exchange, handoffs = None, None
    if peers is not None:
        exchange, handoffs = _handoffs(config, programs, options, sizes, peers)
    _say(options, sizes)
    scheduler: Scheduler | DataParallelScheduler
    if layout.dp == 1:
        scheduler = Scheduler(limits, eos_ids, handoffs[0] if handoffs else None)
    else:
        scheduler = DataParallelScheduler(limits, layout.dp, eos_ids, handoffs)
    raw = tokenizer.raw if tokenizer else None
    runner = ProgramRunner(programs, exchange)
    return Engine(
        scheduler,
        runner,
        raw,
        Clock(),
        vocab_size=config.vocab_size,
        max_banned_ids=MAX_BANNED,
        seed=options.seed,
    )


def _say(options: EngineOptions, sizes: PoolSizes) -> None:
    """What was chosen where the options did not say."""
    where = "in host memory" if sizes.offload is not None else "on the devices"
    log.info(
        "KV cache: %d tokens in %d blocks %s for each data-parallel rank, %s; requests of up to %d tokens",
        sizes.num_blocks * sizes.block_size,
        sizes.num_blocks,
        where,
        options.cache_dtype,
        sizes.max_model_len,
    )
    if sizes.stage is not None:
        where = "on the devices" if sizes.stage.on_device else "in host memory"
        log.info("KV on its way between engines: %d tokens %s", sizes.stage.num_blocks * sizes.block_size, where)


def _handoffs(
    config: GLMConfig, programs: Programs, options: EngineOptions, sizes: PoolSizes, peers: Peers
) -> tuple[Exchange, list[Handoff]]:
    """What it takes to hand requests over, for each data-parallel rank."""
    layout = programs.layout
    assert sizes.stage is not None
    exchange: Exchange
    if sizes.stage.on_device:
        exchange = DeviceExchange(programs, sizes.stage.num_blocks)
    else:
        exchange = HostExchange(programs, sizes.stage.num_blocks)
    info = describe(
        config,
        exchange.memory,
        KVSharding(layout.dcp, layout.interleave, options.block_size),
        engine_id=peers.engine_id,
        connector=peers.connector,
        kv_cache_dtype=options.cache_dtype,
        speculation=options.num_speculative_tokens > 0,
        dp=layout.dp,
        checkpoint=peers.checkpoint,
    )
    connector = make_connector(info, exchange.memory, Clock(), peers.settings, peers.hub)
    collector, policy = Collector(connector, layout.dp), options.kv_load_failure_policy
    blocks = exchange.stage_blocks
    return exchange, [Handoff(collector, blocks, sizes.block_size, group, policy) for group in range(layout.dp)]


def build_pair(
    path: Path, tokenizer: Tokenizer | None, options: EngineOptions, eos_ids: Sequence[int]
) -> tuple[GLMConfig, DisaggregatedEngine]:
    """A prefill and a decode engine in this process, the first on the first devices, the second on those after.

    Raises:
      ConfigError: there are too few devices for both.
    """
    prefill, decode = options.prefill, options.decode
    assert prefill is not None and decode is not None
    devices, need = jax.devices(), prefill.num_devices + decode.num_devices
    shared = len(devices) == 1 == prefill.num_devices == decode.num_devices
    if len(devices) < need and not shared:
        raise ConfigError(
            f"prefill={prefill} and decode={decode} need {need} devices, this process sees {len(devices)}: on a CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={need} or jax_num_cpu_devices={need}"
        )
    meshes = (None, None) if shared else (prefill.mesh(devices), decode.mesh(devices[prefill.num_devices :]))
    config, params = _load(path, options, prefill, meshes[0])
    other = params if shared else _load(path, options, decode, meshes[1])[1]
    own = [options.of_engine(name) for name in ("prefill", "decode")]
    share = 1 / 2 if shared else 1.0

    # Before either engine takes memory, and so that both have their stage in memory of one kind.
    def sizes_of(**changes: Any) -> list[PoolSizes]:
        return [
            pool_sizes(config, dataclasses.replace(one, **changes), "local", _local_devices(mesh), share)
            for one, mesh in zip(own, meshes, strict=True)
        ]

    sizes = sizes_of()
    if not all(one.stage is not None and one.stage.on_device for one in sizes):
        sizes = sizes_of(kv_buffer_device="host")
    hub: Hub = {}
    settings = Settings(lease_seconds=float(options.lease_seconds))

    def build(one: EngineOptions, weights: Any, mesh: jax.sharding.Mesh | None, sizes: PoolSizes) -> Engine:
        peers = Peers(f"{one.role}-{uuid.uuid4().hex[:12]}", "local", str(path.resolve()), hub, settings)
        return build_engine(config, weights, tokenizer, one, eos_ids, mesh=mesh, peers=peers, sizes=sizes)

    first = build(own[0], params, meshes[0], sizes[0])
    second = build(own[1], other, meshes[1], sizes[1])
    pair = DisaggregatedEngine(first, second, options.min_prefill_tokens, options.kv_load_failure_policy)
    producer, consumer = hub
    hub[consumer].meet(producer)
    return config, pair


def _local_devices(mesh: jax.sharding.Mesh | None) -> list[jax.Device] | None:
    """This process's devices of a mesh; None without one."""
    return None if mesh is None else [d for d in mesh.devices.flat if d.process_index == jax.process_index()]


def build_role(
    path: Path, tokenizer: Tokenizer | None, options: EngineOptions, eos_ids: Sequence[int]
) -> tuple[GLMConfig, Engine]:
    """An engine that hands requests over to engines of other processes, or takes them."""
    config, params = _load(path, options, options.layout, None)
    settings = Settings(
        host=options.connector_host, port=options.connector_port, lease_seconds=float(options.lease_seconds)
    )
    kind = between_processes() if options.connector == "auto" else options.connector
    peers = Peers(f"{options.role}-{uuid.uuid4().hex[:12]}", kind, weights_name(path), settings=settings)
    return config, build_engine(config, params, tokenizer, options, eos_ids, peers=peers)


def _load(path: Path, options: EngineOptions, layout: Layout, mesh: jax.sharding.Mesh | None) -> tuple[GLMConfig, Any]:
    mtp = options.num_speculative_tokens > 0
    if mesh is None:
        return load_checkpoint(path, options.dtype, layout, mtp=mtp)

    def place(abstract: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(layout, abstract))

    return load_checkpoint(path, options.dtype, shardings=place, mtp=mtp)
