"""How large the KV pools are: as told, or what the memory holds; checked before anything is allocated."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from glmjax.cache import abstract_cache, packed_row_bytes
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.memory import GIB, HOST_SHARE, available_bytes, block_bytes, device_budget, has_mtp
from glmjax.options import EngineOptions
from glmjax.params import num_bytes
from glmjax.sharding import cp
from glmjax.sharding.layout import Layout
from glmjax.stage_sizes import StageSize, blocks_on_device, blocks_on_host
from glmjax.tiers import Offload

SPARE_BLOCKS = 2  # of the host's pool, beyond the longest request


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """What an engine's pools hold.

    Attributes:
      num_blocks: blocks of each data-parallel rank's pool, in host memory if rows are offloaded.
      block_size: tokens of a block, over all DCP ranks.
      max_model_len: of a request.
      offload: sizes on the device then.
      stage: None if requests are not handed over.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    offload: Offload | None = None
    stage: StageSize | None = None


def pool_sizes(
    config: GLMConfig,
    options: EngineOptions,
    connector: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    share: float = 1.0,
) -> PoolSizes:
    """Decides.

    Args:
      connector: kind of the connector by which requests are handed over.
      devices: of this process, that the engine has; None: the first.
      share: of their free memory, that it may have.

    Raises:
      ConfigError: a request of ``max_model_len`` does not fit, or there is not that much memory.
    """
    if devices is None:
        devices = jax.local_devices()[: options.layout.num_devices]
    budget = device_budget(options, devices, share)
    on_device = connector and blocks_on_device(config, options, connector, budget, devices)
    if on_device and not options.kv_cache_gib:
        budget -= on_device * block_bytes(config, options)
    sizes = _pool_sizes(config, options, budget)
    if connector is None:
        return sizes
    if on_device:
        return dataclasses.replace(sizes, stage=StageSize(on_device, on_device=True))
    longest = -(-sizes.max_model_len // sizes.block_size)
    of_ranks = block_bytes(config, options) * options.layout.dcp
    blocks = blocks_on_host(options, options.layout.dp, longest, of_ranks)
    return dataclasses.replace(sizes, stage=StageSize(blocks, on_device=False))


def _pool_sizes(config: GLMConfig, options: EngineOptions, budget: float) -> PoolSizes:
    longest = options.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={longest} is more than the model's {config.max_position_embeddings} positions"
        )
    if options.host_gib is not None:
        return _with_host_pool(config, options, options.host_gib, longest, budget)
    num_blocks = device_blocks(config, options, longest, budget)
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


def device_blocks(config: GLMConfig, options: EngineOptions, longest: int, budget: float) -> int:
    """Blocks of a device's pool that holds all rows, in so many bytes, but no more than the sequences can use.

    Where there are several processes, what the fullest of them can hold.
    """
    if options.num_device_blocks is not None:
        return options.num_device_blocks
    one = block_bytes(config, options)
    most = options.max_num_seqs * -(-longest // (options.block_size * options.layout.dcp))
    return _fitting(options, one, budget, most)


def _with_host_pool(
    config: GLMConfig, options: EngineOptions, host_gib: float, longest: int, budget: float
) -> PoolSizes:
    """As many blocks as the host's pool holds, and as many pages as the device then does."""
    layout, block_size = options.layout, options.block_size * options.layout.dcp
    mtp = has_mtp(options)
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
        pages = _fitting(options, one, budget - (on_device(1) - one), num_blocks)
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


def _check_host_memory(host_gib: float, layout: Layout) -> None:
    """Refuses pools that this machine has no room for.  Every device of a group keeps its own copy of its part."""
    local = len(jax.local_devices()[: layout.num_devices]) if jax.process_count() == 1 else jax.local_device_count()
    need = host_gib * GIB * local / layout.dcp
    free = available_bytes()
    if need > HOST_SHARE * free:
        raise ConfigError(
            f"host pools of {need / GIB:.1f} GiB ({host_gib / layout.dcp:g} for each of {local} devices) are more than "
            f"{HOST_SHARE:.0%} of the {free / GIB:.1f} GiB of free memory: lower hisparse_host_gib (kv_offload_gib for "
            "plain offload)"
        )
