"""Tensors for tests: files read by the reference library and written by hand, trees compared."""

import json
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}

Tensors = dict[str, np.ndarray]


def read_folder(folder: Path) -> Tensors:
    """Every tensor of every shard."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, info in safetensors.deserialize(file.read_bytes()):
            tensors[name] = np.frombuffer(info["data"], DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors


def write_file(file: Path, tensors: Tensors) -> None:
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {"dtype": codes[array.dtype], "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def dequantized(tensors: Tensors, name: str) -> np.ndarray:
    """A weight in float32, whether it is block-FP8 or not."""
    weight = tensors[name].astype(np.float32)
    scale = tensors.get(f"{name}_scale_inv")
    if scale is None:
        return weight
    wide = np.kron(scale, np.ones((128, 128), np.float32))
    return weight * wide[: weight.shape[0], : weight.shape[1]]


def assert_same(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))
