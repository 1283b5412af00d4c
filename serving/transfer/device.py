"""Rows from one mesh to another without the host: two engines of one process on devices of their own.

The rows are gathered on the devices that have them, sharded there as the target will be where degrees allow, and
``jax.device_put`` carries them over.
"""

import functools

import jax
import numpy as np


@functools.partial(jax.jit, static_argnames="sharding")
def _take(rows: jax.Array, slots: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    taken = rows.at[:, slots].get(mode="clip")
    return taken if sharding is None else jax.lax.with_sharding_constraint(taken, sharding)


def move_rows(rows: jax.Array, slots: np.ndarray, target: jax.sharding.Sharding) -> jax.Array:
    """Packed rows in another order, on other devices.

    Args:
      rows: [layers, slots, row bytes] uint8, sharded over any mesh.
      slots: [T] int32, the slot of ``rows`` that each row is taken from; those of padding may be any.
      target: of the [layers, T, row bytes] returned, over any devices.
    """
    return jax.device_put(_take(rows, slots, _same_split(rows.sharding, target)), target)


def _same_split(source: jax.sharding.Sharding, target: jax.sharding.Sharding) -> jax.sharding.NamedSharding | None:
    """The target's sharding over the source's devices, so that each shard has one way to go; None if they are fewer."""
    if not isinstance(source, jax.sharding.NamedSharding) or not isinstance(target, jax.sharding.NamedSharding):
        return None
    if source.mesh.size != target.mesh.size:
        return None
    mesh = jax.sharding.Mesh(source.mesh.devices.reshape(target.mesh.devices.shape), target.mesh.axis_names)
    return jax.sharding.NamedSharding(mesh, target.spec)
