"""How much memory there is for KV: on each device, and on the host."""

import os
from collections.abc import Sequence

import jax

from glmjax.cache import abstract_cache
from glmjax.config import GLMConfig
from glmjax.options import EngineOptions
from glmjax.params import num_bytes

GIB = 1 << 30
CPU_CACHE_GIB = 2.0  # KV pool on a CPU unless told otherwise, and at most a quarter of the memory
HOST_SHARE = 0.95  # of the free memory that the host's pools may take


def has_mtp(options: EngineOptions) -> bool:
    return options.num_speculative_tokens > 0


def block_bytes(config: GLMConfig, options: EngineOptions) -> int:
    """Bytes of a block on one device, with all rows."""
    return num_bytes(abstract_cache(config, 0, options.block_size, options.cache_dtype, mtp=has_mtp(options)))


def device_budget(options: EngineOptions, devices: Sequence[jax.Device], share: float = 1.0) -> float:
    """Bytes for KV on each device: as told, or that share of what is free."""
    if options.kv_cache_gib:
        return options.kv_cache_gib * GIB
    return share * _free_bytes(devices, options.layout.num_devices)


def _free_bytes(devices: Sequence[jax.Device], num_devices: int) -> float:
    """Memory for the pool of each device; simulated CPU devices share the machine's."""
    stats = [device.memory_stats() for device in devices if device.platform != "cpu"]
    if stats and all(stats):
        return min(0.9 * memory["bytes_limit"] - memory["bytes_in_use"] for memory in stats if memory)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_GIB * GIB, memory_bytes / 4) / num_devices


def available_bytes() -> float:
    """Memory that can be had without swapping (Linux's own estimate), else what is free."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
