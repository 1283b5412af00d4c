"""Memories of engines on their devices, for tests of KV transfer."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transfer_case import KINDS

from glmjax.serving.transfer.device_memory import DeviceMemory
from glmjax.serving.transfer.memory import memory


@functools.cache
def mesh(first, dp, copies, dcp):
    """Devices from a number on: data-parallel ranks, devices with the same rows, DCP ranks."""
    devices = np.array(jax.devices()[first : first + dp * copies * dcp])
    return Mesh(devices.reshape(dp, copies, dcp), ("dp", "tp", "dcp"))


def on_devices(rows, first, info, copies=1):
    """Rows of the host, as an engine has them on its devices; on a single one without a mesh."""
    if info.dp * info.dcp * copies == 1:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[first])
    else:
        place = NamedSharding(mesh(first, info.dp, copies, info.dcp), PartitionSpec(None, ("dp", "dcp")))
    # From a program: arrays of NumPy may share its memory.
    whole = [jax.jit(lambda x: x + 0)(jax.device_put(np.concatenate(rows[k].ranks, axis=1), place)) for k in KINDS]
    return DeviceMemory(tuple(whole))


def on_host(rows):
    """Every rank's rows, out of every device that has them: all copies must be the same."""
    found = []
    for array in rows.read(lambda stage: stage):
        ranks = {}
        for shard in array.addressable_shards:
            ranks.setdefault(shard.index[1].start or 0, []).append(np.asarray(shard.data))
        assert all(np.array_equal(copies[0], other) for copies in ranks.values() for other in copies)
        found.append([ranks[start][0] for start in sorted(ranks)])
    return memory(*found)


def refill(memory, rows):
    """Gives a memory on devices other content, in place."""
    put = jax.jit(lambda old, new: tuple(x.at[:].set(y) for x, y in zip(old, new, strict=True)), donate_argnums=0)
    memory.replace(lambda stage: (put(stage, tuple(np.concatenate(rows[k].ranks, axis=1) for k in KINDS)), None))
