"""Host memory to arrays: what is filled on the host becomes a JAX array, whole or in the parts of a sharding."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Region = tuple[slice, ...]  # part of an array: one slice with start and stop per axis

_ALIGNMENT = 64  # bytes; what the CPU backend asks of memory that it takes over


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Uninitialised memory that the CPU backend takes over without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def place(
    leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None, fill: Callable[[Region], np.ndarray]
) -> jax.Array:
    """An array whose regions ``fill`` makes, each distinct one once; one has left the host before the next is made.

    Args:
      sharding: None: the default device.
    """
    shape = leaf.shape
    if sharding is None:
        return jax.block_until_ready(jax.device_put(fill(tuple(slice(0, size) for size in shape))))
    owners: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    indices = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        bounds = [axis.indices(size) for axis, size in zip(index or (), shape, strict=True)]
        owners[tuple((start, stop) for start, stop, _ in bounds)].append(device)
    parts: dict[jax.Device, jax.Array] = {}
    for region, devices in owners.items():
        host = fill(tuple(slice(*axis) for axis in region))
        for device in devices:
            target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            parts[device] = jax.block_until_ready(jax.device_put(host, target))
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in indices])
