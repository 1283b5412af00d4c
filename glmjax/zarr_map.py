"""Zarr arrays of one uncompressed chunk, mapped from the disk: the chunk is the array, byte for byte."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from glmjax.errors import CheckpointError

_EXTENDED = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


class StoredArray(NamedTuple):
    """An array whose bytes are one whole file."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def open(self) -> np.ndarray:
        """A read-only view of the mapped file, whose pages are given back when the view goes."""
        return np.asarray(np.memmap(self.file, self.dtype, "r", shape=self.shape))


def find_arrays(folder: Path) -> dict[str, StoredArray] | None:
    """All arrays in a folder, by name; None if there are none or one is stored in any other way.

    Raises:
      CheckpointError: an array is damaged.
    """
    arrays: dict[str, StoredArray] = {}
    for header in sorted(folder.glob("*/.zarray")):
        array = _describe(header)
        if array is None:
            return None
        arrays[header.parent.name] = array
    return arrays or None


def _describe(header: Path) -> StoredArray | None:
    try:
        meta: dict[str, Any] = json.loads(header.read_text())
        shape = tuple(int(size) for size in meta["shape"])
        dtype = np.dtype(_EXTENDED.get(meta["dtype"], meta["dtype"]))
        plain = meta["compressor"] is None and not meta["filters"] and meta["order"] == "C"
        chunks, separator = tuple(meta["chunks"]), meta.get("dimension_separator", ".")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{header} is not a valid Zarr header") from None
    num_bytes = math.prod(shape) * dtype.itemsize
    if not plain or chunks != shape or not num_bytes:
        return None
    file = header.parent / separator.join("0" * len(shape))
    if not file.is_file():
        raise CheckpointError(f"{file} not found, but {header.name} beside it calls for it")
    size = file.stat().st_size
    if size != num_bytes:
        what = f"{list(shape)} {dtype.name}"
        raise CheckpointError(f"{file} is damaged: {what} needs {num_bytes} bytes, the file has {size}")
    return StoredArray(file, shape, dtype)
