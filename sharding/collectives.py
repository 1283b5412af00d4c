"""The collectives that the model uses inside ``shard_map``, over groups of mesh axes.

Axes along which a layout has one device are left out, so on a single device nothing is exchanged and the model needs no
mesh at all.
"""

import dataclasses

import jax
import jax.numpy as jnp

from glmjax.sharding.layout import Layout

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Exchanges between the devices of a layout; ``axes`` are names of mesh axes, outermost first."""

    layout: Layout

    def size(self, axes: Axes) -> int:
        return self.layout.num_shards(axes)

    def rank(self, axes: Axes) -> jax.Array | int:
        """This device's place along the axes, int32; the first axis counts slowest."""
        axes = self._split(axes)
        return jax.lax.axis_index(axes) if axes else 0

    def all_gather(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """Everyone's x end to end along ``dim``."""
        axes = self._split(axes)
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def all_reduce(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The sum of everyone's x."""
        axes = self._split(axes)
        return jax.lax.psum(x, axes) if axes else x

    def reduce_scatter(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """This device's part along ``dim`` of the sum of everyone's x."""
        axes = self._split(axes)
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x

    def all_to_all(self, x: jax.Array, axes: Axes, split: int, join: int) -> jax.Array:
        """Part i of x along ``split`` goes to device i; what arrives stands end to end along ``join``."""
        axes = self._split(axes)
        return jax.lax.all_to_all(x, axes, split_axis=split, concat_axis=join, tiled=True) if axes else x

    def part(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """This device's equal part of an x that all hold alike; no exchange."""
        parts = self.size(axes)
        if parts == 1:
            return x
        width = x.shape[dim] // parts
        return jax.lax.dynamic_slice_in_dim(x, jnp.asarray(self.rank(axes)) * width, width, axis=dim)

    def _split(self, axes: Axes) -> Axes:
        sizes = self.layout.axis_sizes
        return tuple(axis for axis in axes if sizes[axis] > 1)
