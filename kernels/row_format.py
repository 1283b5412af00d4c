"""Rows as bytes: how many there are in a row, and rows that stand in host memory."""

import dataclasses
import math

import jax
import numpy as np

from glmjax.errors import ConfigError

MAX_FIELDS = 3
WORD = 4  # bytes that the kernel moves at least


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRows:
    """Packed rows in pinned host memory that the GPU reads where they are.

    JAX does not know of this memory: whoever owns it keeps it alive and unchanged until the copy is done, and carries
    the order of copies and writes by the data that programs return.

    Attributes:
      address: [2] uint32, of the first row as the GPU sees it: low half, high half. It is an array so that another
        pool needs no other program.
      row_bytes: of a row; rows follow one another without gaps.
    """

    address: jax.Array | np.ndarray
    row_bytes: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def at(cls, address: int, row_bytes: int) -> "HostRows":
        """Rows from a device-visible address on.

        Raises:
          ConfigError: the address is no multiple of 16.
        """
        if address % 16 or not 0 < address < 1 << 64:
            raise ConfigError(f"host pool at address {address:#x}: it must be aligned to 16 bytes")
        return cls(np.asarray([address & 0xFFFFFFFF, address >> 32], np.uint32), row_bytes)


def row_bytes(rows: jax.Array) -> int:
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize
