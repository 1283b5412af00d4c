"""How many thread-block clusters an H200 runs side by side, when each block takes a whole multiprocessor.

A cluster stays within one group of multiprocessors (GPC), and chips differ in what is left of their groups. Where there
is a GPU, its driver says (``cuOccupancyMaxActiveClusters``); programs compiled without one go by ``GROUPS``.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from glmjax.kernels.choose import HOPPER
from glmjax.kernels.roofline import SHARED_BYTES_PER_BLOCK

MOST_BLOCKS = 16  # of a cluster; more than 8 by leave of the driver, see docs/kernels.md
# Multiprocessors of the eight groups that the 132 come in, at most 18 each. Two H100 were reported with one below 16.
GROUPS = (18, 18, 16, 16, 16, 16, 16, 16)

_log = logging.getLogger("glmjax.kernels")


def clusters_at_once(blocks: int) -> int:
    """Clusters of 1 to 16 blocks that run side by side, on the local GPU that has least room for them."""
    here = _of_local_gpus()
    return sum(group // blocks for group in GROUPS) if here is None else here[blocks]


@functools.cache
def _of_local_gpus() -> Mapping[int, int] | None:
    """By blocks of a cluster; None without a Hopper GPU, or with those of other processes, which may differ."""
    if jax.default_backend() != "gpu" or jax.process_count() > 1:
        return None
    devices = [device for device in jax.local_devices() if HOPPER.search(device.device_kind)]
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        found = [ask_driver(cuda, device.local_hardware_id or 0) for device in devices]
    except (OSError, AttributeError) as error:
        _log.warning("clusters of blocks are cut for a GPU with groups of %s multiprocessors: %s", GROUPS, error)
        return None
    if not found:
        return None
    least = {blocks: min(each[blocks] for each in found) for blocks in found[0]}
    _log.info("clusters that run side by side, by blocks: %s", least)
    return least


# The driver's structures and numbers, of cuda.h 12.


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: what it is, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_
MAX_DYNAMIC_SHARED_SIZE_BYTES, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14  # CU_FUNC_ATTRIBUTE_

THREADS = 128
EMPTY_KERNEL = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
"""


def ask_driver(cuda: Any, ordinal: int) -> dict[int, int]:
    """Asks the CUDA driver how many clusters of 1 to 16 blocks, each with all shared memory, a device runs at a time.

    Args:
      cuda: the driver's library, as ``ctypes.CDLL`` loads it.
      ordinal: the device's number for the driver.

    Raises:
      OSError: the driver reports an error.
    """

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} returned CUDA error {code} for device {ordinal}")

    @contextmanager
    def current_context() -> Iterator[None]:
        """The context that JAX uses too."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            call("cuDevicePrimaryCtxRelease_v2", device)

    def count(function: ctypes.c_void_p, blocks: int) -> int:
        attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = (blocks, 1, 1)
        config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), SHARED_BYTES_PER_BLOCK)
        config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
        clusters = ctypes.c_int()
        call("cuOccupancyMaxActiveClusters", ctypes.byref(clusters), function, ctypes.byref(config))
        return clusters.value

    with current_context():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), EMPTY_KERNEL)
        try:
            call("cuModuleGetFunction", ctypes.byref(function), module, b"empty")
            call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES_PER_BLOCK)
            call("cuFuncSetAttribute", function, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            return {blocks: count(function, blocks) for blocks in range(1, MOST_BLOCKS + 1)}
        finally:
            call("cuModuleUnload", module)
