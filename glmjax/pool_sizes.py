"""How large the KV pools are: as told, or what the memory holds; checked before anything is allocated."""

import dataclasses
import math
import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from glmjax.cache import abstract_cache, packed_row_bytes
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.options import EngineOptions
from glmjax.params import num_bytes
from glmjax.sharding import cp
from glmjax.sharding.layout import Layout
from glmjax.tiers import Offload

GIB = 1 << 30
CPU_CACHE_GIB = 2.0  # KV pool on a CPU unless told otherwise, and at most a quarter of the memory
HOST_SHARE = 0.95  # of the free memory that the host's pools may take
STAGE_GIB = 8.0  # two requests on their way at most, unless one is longer
SPARE_BLOCKS = 2  # of the host's pool, beyond the longest request


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """What an engine's pools hold.

    Attributes:
      num_blocks: blocks of each data-parallel rank's pool, in host memory if rows are offloaded.
      block_size: tokens of a block, over all DCP ranks.
      max_model_len: of a request.
      offload: sizes on the device then.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    offload: Offload | None = None


def pool_sizes(config: GLMConfig, options: EngineOptions) -> PoolSizes:
    """Decides.

    Raises:
      ConfigError: a request of ``max_model_len`` does not fit, or there is not that much memory.
    """
    longest = options.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's {config.max_position_embeddings} positions"
        )
    if options.host_gib is not None:
        return _with_host_pool(config, options, options.host_gib, longest)
    num_blocks = device_blocks(config, options, longest)
    block_size = options.block_size * options.layout.dcp
    room = num_blocks * block_size
    if options.max_model_len is None:
        longest = min(longest, room)
    elif room < longest:
        raise ConfigError(
            f"the KV pool holds {room} tokens ({num_blocks} blocks of {block_size}), less than "
            f"max_model_len={longest}: raise num_device_blocks or kv_cache_gib, or lower max_model_len"
        )
    return PoolSizes(num_blocks, block_size, longest)


def device_blocks(config: GLMConfig, options: EngineOptions, longest: int) -> int:
    """Blocks of a device's pool that holds all rows, but no more than the sequences can use.

    Where there are several processes, what the fullest of them can hold.
    """
    if options.num_device_blocks is not None:
        return options.num_device_blocks
    one = num_bytes(abstract_cache(config, 0, options.block_size, options.cache_dtype, mtp=_has_mtp(options)))
    most = options.max_num_seqs * -(-longest // (options.block_size * options.layout.dcp))
    return _fitting(options, one, _device_budget(options), most)


def _with_host_pool(config: GLMConfig, options: EngineOptions, host_gib: float, longest: int) -> PoolSizes:
    """As many blocks as the host's pool holds, and as many pages as the device then does."""
    layout, block_size = options.layout, options.block_size * options.layout.dcp
    mtp = _has_mtp(options)
    none = abstract_cache(config, 0, options.block_size, options.cache_dtype, mtp=mtp)
    block_bytes = packed_row_bytes(none) * none.latent.shape[0] * options.block_size * layout.dcp
    num_blocks = int(host_gib * GIB // block_bytes)
    room = (num_blocks - SPARE_BLOCKS) * block_size
    if options.max_model_len is None:
        longest = min(longest, max(room, 0))
    need = -(-longest // block_size) + SPARE_BLOCKS
    if num_blocks < need or longest < 2:
        longest = max(longest, 2)
        need = -(-longest // block_size) + SPARE_BLOCKS
        least = math.ceil(100 * need * block_bytes / GIB) / 100
        raise ConfigError(
            f"a host pool of {host_gib:g} GiB has {num_blocks} blocks of {block_size} tokens, and max_model_len="
            f"{longest} needs {need}, which are {least:.2f} GiB: raise "
            f"{'kv_offload_gib' if options.kv_offload else 'hisparse_host_gib'}, or lower max_model_len"
        )
    _check_host_memory(host_gib, layout)
    region_pages = 0 if options.kv_offload == "host" else _region_pages(config, options, longest)

    def on_device(pages: int) -> int:
        offload = Offload(max(pages, 1), region_pages, reads=options.hisparse_reads)
        cache = abstract_cache(
            config,
            num_blocks,
            options.block_size,
            options.cache_dtype,
            mtp=mtp,
            offload=offload,
            num_slots=options.max_num_seqs,
        )
        return num_bytes(cache)

    pages = options.num_device_blocks
    if pages is None:
        one = on_device(2) - on_device(1)
        pages = _fitting(options, one, _device_budget(options) - (on_device(1) - one), num_blocks)
    if not region_pages and pages * block_size < longest:
        if options.max_model_len is not None:
            raise ConfigError(
                f"with plain offload a running request is on the device whole, and {pages} blocks of {block_size} "
                f"tokens are fewer than max_model_len={longest}: raise num_device_blocks or kv_cache_gib, or lower it"
            )
        longest = pages * block_size
    return PoolSizes(num_blocks, block_size, longest, Offload(pages, region_pages, reads=options.hisparse_reads))


def _region_pages(config: GLMConfig, options: EngineOptions, longest: int) -> int:
    """Pages of a hot region (spec/system.md 1.3); it never needs to hold more rows than a request has."""
    queries, k = 1 + options.num_speculative_tokens, config.index_topk
    least = queries * k
    rows = (queries + 1) * k if options.hisparse_buffer is None else options.hisparse_buffer
    if rows < least:
        raise ConfigError(
            f"hisparse_buffer={rows} does not hold the {k} rows that each of a request's {queries} queries may select: "
            f"give at least {least}"
        )
    layout = options.layout
    if layout.pcp > 1 and not cp.may_gather_keys(options.max_num_batched_tokens, layout.pcp):
        raise ConfigError(
            f"max_num_batched_tokens={options.max_num_batched_tokens} is too few for HiSparse with pcp={layout.pcp}: "
            f"give at least {max(2 * layout.pcp, cp.NARROW + 1)}"
        )
    return -(-min(rows, longest) // options.block_size)


def _has_mtp(options: EngineOptions) -> bool:
    return options.num_speculative_tokens > 0


def _fitting(options: EngineOptions, one: int, budget: float, most: int) -> int:
    """How many blocks, or pages, of ``one`` bytes the budget holds, up to ``most``."""
    if budget < one:
        raise ConfigError(
            f"{max(budget, 0) / GIB:.3f} GiB are left for the KV pool, and one block of {options.block_size} tokens "
            f"takes {one / GIB:.3f}: raise kv_cache_gib or lower block_size"
        )
    blocks = min(most, int(budget // one))
    if jax.process_count() == 1:
        return blocks
    return int(multihost_utils.process_allgather(np.int32(min(blocks, 2**31 - 1))).min())


def _device_budget(options: EngineOptions) -> float:
    return options.kv_cache_gib * GIB if options.kv_cache_gib else _free_bytes(options.layout)


def _free_bytes(layout: Layout) -> float:
    """Memory for the pool of each device; simulated CPU devices share the machine's."""
    devices = jax.local_devices()[: layout.num_devices]
    stats = [device.memory_stats() for device in devices if device.platform != "cpu"]
    if stats and all(stats):
        return min(0.9 * memory["bytes_limit"] - memory["bytes_in_use"] for memory in stats if memory)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_GIB * GIB, memory_bytes / 4) / layout.num_devices


def stage_blocks(options: EngineOptions, dp: int, longest: int, block_bytes: int) -> int:
    """Blocks of the stage through which requests are handed over, of each data-parallel rank.

    Args:
      longest: blocks of the longest request. The stage holds two of them, or one where two are more than 8 GiB, unless
        ``connector_stage_gib`` says otherwise.
      block_bytes: of a block with the rows of all layers, on all DCP ranks.

    Raises:
      ConfigError: it holds no block, or this machine has no room for it.
    """
    blocks = max(longest, min(2 * longest, int(STAGE_GIB * GIB / block_bytes)))
    if options.connector_stage_gib is not None:
        blocks = int(options.connector_stage_gib * GIB / block_bytes)
    need, free = blocks * block_bytes * dp, _available_bytes()
    if blocks < 1 or need > HOST_SHARE * free:
        raise ConfigError(
            f"a stage of {blocks} blocks of {block_bytes / GIB:.4f} GiB for each of {dp} data-parallel ranks takes "
            f"{need / GIB:.1f} GiB, and {HOST_SHARE:.0%} of the {free / GIB:.1f} GiB of free memory are to be had: set "
            "connector_stage_gib"
        )
    return blocks


def _check_host_memory(host_gib: float, layout: Layout) -> None:
    """Refuses pools that this machine has no room for.  Every device of a group keeps its own copy of its part."""
    local = len(jax.local_devices()[: layout.num_devices]) if jax.process_count() == 1 else jax.local_device_count()
    need = host_gib * GIB * local / layout.dcp
    free = _available_bytes()
    if need > HOST_SHARE * free:
        raise ConfigError(
            f"host pools of {need / GIB:.1f} GiB ({host_gib / layout.dcp:g} for each of {local} devices) are more than "
            f"{HOST_SHARE:.0%} of the {free / GIB:.1f} GiB of free memory: lower hisparse_host_gib (kv_offload_gib for "
            "plain offload)"
        )


def _available_bytes() -> float:
    """Memory that can be had without swapping (Linux's own estimate), else what is free."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
