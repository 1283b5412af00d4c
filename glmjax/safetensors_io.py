"""Safetensors files: checked headers, memory-mapped tensors, streamed writing.

Our own reader because safetensors' NumPy reader knows no FP8 and copies every tensor.  A tensor read here is a view of
the mapped file; ``release`` gives its pages back, so that a load holds the model once and not twice.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from glmjax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorInfo(NamedTuple):
    """Where a tensor lies; ``start`` counts from the beginning of the file."""

    file: Path
    code: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.code} {list(self.shape)} in {self.file.name}"


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, after checking that the file holds all of them.

    Raises:
      CheckpointError: the file is missing, truncated or not in the safetensors format.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            prefix = f.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file} is truncated: {size} bytes are too few for a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is not a safetensors file: header length {length} is out of range")
            if 8 + length > size:
                raise CheckpointError(f"{file} is truncated: its header needs {8 + length} bytes, the file has {size}")
            text = f.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file} not found") from None
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror}") from None
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _parse_entry(file, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{file} has a corrupt safetensors header") from None
    end = max((t.start + t.num_bytes for t in tensors.values()), default=8 + length)
    if end > size:
        raise CheckpointError(f"{file} is truncated: its tensors need {end} bytes, the file has {size}")
    for name, info in tensors.items():
        known = DTYPES.get(info.code)
        if known is not None and math.prod(info.shape) * known.itemsize != info.num_bytes:
            raise CheckpointError(
                f"{file} has a corrupt safetensors header: {name} is {info.code} {list(info.shape)}"
                f" but takes {info.num_bytes} bytes"
            )
    return tensors


def _parse_entry(file: Path, entry: dict[str, Any], data_start: int) -> TensorInfo:
    start, stop = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= start <= stop or min(shape, default=0) < 0 or not isinstance(entry["dtype"], str):
        raise ValueError
    return TensorInfo(file, entry["dtype"], shape, data_start + start, stop - start)


class TensorFiles:
    """Every tensor of a checkpoint folder, whatever shard it is in."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.tensors = list_tensors(self.folder)
        self._maps: dict[Path, mmap.mmap] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file."""
        info = self.tensors[name]
        buffer = self._map(info.file)
        flat = np.frombuffer(buffer, DTYPES[info.code], math.prod(info.shape), info.start)
        return flat.reshape(info.shape)

    def release(self, name: str, rows: slice) -> None:
        """Drops the resident pages of some rows of a tensor; a later read fetches them again."""
        info = self.tensors[name]
        row_bytes = info.num_bytes // info.shape[0]
        start, stop = info.start + rows.start * row_bytes, info.start + rows.stop * row_bytes
        start -= start % mmap.PAGESIZE
        self._map(info.file).madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as f:
                self._maps[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}")
        return read_header(folder / SINGLE_FILE)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shard_names = sorted(set(weight_map.values()))
        outside = [name for name in shard_names if Path(name).name != name]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{index} is not a valid safetensors index") from None
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is outside the folder")
    for name in shard_names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} not found, but {INDEX_FILE} names it")
    shards = {name: read_header(folder / name) for name in shard_names}
    tensors = {}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise CheckpointError(f"{folder / shard} lacks {tensor}, which {INDEX_FILE} places there")
        tensors[tensor] = shards[shard][tensor]
    return tensors


class PlannedTensor(NamedTuple):
    """A tensor to write: what it is now, and how to get it when its turn comes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: Path, tensors: Iterable[PlannedTensor]) -> None:
    """Writes one file, holding one tensor at a time; the same tensors give the same bytes."""
    # Wider items first keeps every tensor aligned to its item size.
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        stop = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            array = np.ascontiguousarray(tensor.fetch(), tensor.dtype)
            if array.shape != tensor.shape:
                raise ValueError(f"{tensor.name} was planned as {tensor.shape} and came as {array.shape}")
            f.write(array.reshape(-1).view(np.uint8))
