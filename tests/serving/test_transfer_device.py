"""Rows moved between meshes of one process."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glmjax.serving.transfer.device import move_rows


@pytest.mark.parametrize(("dcp", "to"), [(4, 4), (4, 2), (1, 4), (2, 1)])
def test_rows_go_from_mesh_to_mesh(dcp, to):
    """Token-sharded rows to another order on other devices, without the host."""
    devices = jax.devices()
    source = NamedSharding(Mesh(np.array(devices[:dcp]), ("dcp",)), PartitionSpec(None, "dcp"))
    target = NamedSharding(Mesh(np.array(devices[4 : 4 + to]), ("ranks",)), PartitionSpec(None, "ranks"))
    rows = np.random.default_rng(0).integers(0, 256, (3, 32, 20), np.uint8)
    slots = np.random.default_rng(1).permutation(32)[:16].astype(np.int32)
    moved = move_rows(jax.device_put(rows, source), slots, target)
    assert moved.sharding == target
    assert np.array_equal(np.asarray(moved), rows[:, slots])
