"""Zarr arrays of one uncompressed chunk, as views of the mapped file: the chunk is the array, byte for byte."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from glmjax.errors import CheckpointError

_EXTENDED = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def map_arrays(folder: Path) -> dict[str, np.ndarray] | None:
    """Read-only views of all arrays in a folder, by name; None if one is stored in any other way.

    Raises:
      CheckpointError: an array is damaged.
    """
    found = sorted(folder.glob("*/.zarray"))
    arrays = {header.parent.name: _map_array(header) for header in found}
    mapped = {name: array for name, array in arrays.items() if array is not None}
    return mapped if mapped and len(mapped) == len(arrays) else None


def _map_array(header: Path) -> np.ndarray | None:
    try:
        meta: dict[str, Any] = json.loads(header.read_text())
        shape = tuple(int(size) for size in meta["shape"])
        dtype = np.dtype(_EXTENDED.get(meta["dtype"], meta["dtype"]))
        plain = meta["compressor"] is None and not meta["filters"] and meta["order"] == "C"
        chunks, separator = tuple(meta["chunks"]), meta.get("dimension_separator", ".")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{header} is not a valid Zarr header") from None
    if not plain or chunks != shape or not shape:
        return None
    file = header.parent / separator.join("0" * len(shape))
    if not file.is_file():
        raise CheckpointError(f"{file} not found, but {header} calls for it")
    expected, size = math.prod(shape) * dtype.itemsize, file.stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{file} is damaged: {list(shape)} {dtype.name} needs {expected} bytes, the file has {size}"
        )
    # Not an np.memmap, which JAX would copy as a subclass.
    return np.asarray(np.memmap(file, dtype, "r", shape=shape)) if size else np.empty(shape, dtype)
