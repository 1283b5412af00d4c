"""KV rows in two tiers, as a step sees them: pages of the device's row pool and a pool in host memory.

A block of tokens has its index keys on the device, always, and a place for its rows in the host pool, both under the
block's number. Its rows may also, or only, stand in a *page* of the device's row pool, which is smaller. A request
whose pages are not all there reads single rows through its *hot region*, pages leased to it whose rows the resolver
fills with what the indexer picks (spec/system.md 1.6). Every index group fills the region for its own layers.

Letters: L layers, N indexers, S requests' slots, U rows of a hot region.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from glmjax.errors import ConfigError
from glmjax.kernels.host_rows import host_rows
from glmjax.kernels.row_format import HostRows

Reads = Literal["auto", "xla", "address"]

COPY_STREAM = 1


@dataclasses.dataclass(frozen=True)
class Offload:
    """Sizes of the tiers on one device, beside the number of blocks.

    Attributes:
      num_pages: pages of the device's row pool, each as large as a block.
      region_pages: pages of a request's hot region; 0: requests run with all their pages on the device only.
      transfer_pages: pages that one program copies between the tiers.
      reads: how single rows come from the host: "xla", a gather on the host and a copy, or "address", a kernel that
        reads pinned memory, on GPUs only; "auto": the latter on GPUs.
    """

    num_pages: int
    region_pages: int = 0
    transfer_pages: int = 16
    reads: Reads = "auto"

    def __post_init__(self) -> None:
        for field, least in (("num_pages", 1), ("region_pages", 0), ("transfer_pages", 1)):
            if getattr(self, field) < least:
                raise ConfigError(f"{field} must be at least {least}, got {getattr(self, field)}")


@struct.dataclass
class HotRows:
    """What stands in the hot regions, by indexer and request slot; the last slot is for padding.

    A device has its own, also where others hold the same KV: the rows that it has brought in are its own too.

    Attributes:
      owner: [N, S + 1, U] int32, the position that a row holds, counted among those of this DCP rank; -1: none.
      order: [N, S + 1, U] int32, places of the region from the least to the most recently used.
      lease: [N, S + 1] int32, the lease of a region that owner and order are of; of another they mean nothing.
      counts: [1, S + 1, 3] int32, of the step at hand: hits, misses, and rows brought in over all layers.
    """

    owner: jax.Array
    order: jax.Array
    lease: jax.Array
    counts: jax.Array


def abstract_hot_rows(indexers: int, num_slots: int, rows: int) -> HotRows:
    """Shapes for ``num_slots`` requests and the spare one."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    slots = num_slots + 1
    per_row = (indexers, slots, rows)
    return HotRows(array(*per_row), array(*per_row), array(indexers, slots), array(1, slots, 3))


@struct.dataclass
class Regions:
    """The hot regions of a step's rows.

    Attributes:
      table: [R, region_pages] int32, the region's pages.
      lease: [R] int32, number of the lease; 0: the row has no region, and needs none.
      slot: [R] int32, the request's place in ``HotRows``.
    """

    table: jax.Array
    lease: jax.Array
    slot: jax.Array

    def padded(self, rows: int) -> "Regions":
        """With so many rows more, which have no region and the spare slot."""
        return Regions(
            jnp.pad(self.table, ((0, rows), (0, 0))),
            jnp.pad(self.lease, (0, rows)),
            jnp.pad(self.slot, (0, rows), constant_values=-1),
        )


@struct.dataclass
class Tiers:
    """Where a step finds its KV rows.

    Attributes:
      host: [L, blocks * block_size, row_bytes] uint8 in host memory, rows packed (spec/model.md section 4), or the
        address of that.
      page_of: [blocks + 1] int32, the page that holds a block's rows; -1: they are on the host.
      regions: of the batch's rows; None if all that they read is in pages, or is staged.
      staged: the rows of a whole context are copied together for each layer before it attends, from both tiers.
      slots_per_layer: of a host's pool given by address.
    """

    host: jax.Array | HostRows
    page_of: jax.Array
    regions: Regions | None = None
    staged: bool = struct.field(pytree_node=False, default=False)
    slots_per_layer: int | None = struct.field(pytree_node=False, default=None)

    def host_rows(self, layer: jax.Array | int, count: int, slots: jax.Array, *, aside: bool = False) -> jax.Array:
        """Rows of ``count`` layers from ``layer`` on, [count, M, row_bytes] uint8, for slots [M] int32; -1: zeros.

        Args:
          aside: on a GPU, on a stream beside the one that computes: these rows are not needed at once.
        """
        if not isinstance(self.host, HostRows):
            return host_rows(self.host, layer, count, slots)
        stream = COPY_STREAM if aside else None
        return host_rows(self.host, layer, count, slots, slots_per_layer=self.slots_per_layer, stream=stream)
