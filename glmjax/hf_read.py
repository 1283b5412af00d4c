"""The parameter tree from Hugging Face safetensors, tensor by tensor.

Each leaf is allocated once and filled in place from the mapped files; on the CPU backend the filled buffer *is* the
array (JAX takes over 64-byte-aligned NumPy memory without a copy).  Names, shapes and dtypes are all checked before
anything is allocated.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glmjax.blockfp8 import dequantize, scale_shape
from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError
from glmjax.hf_names import FP8_LEAVES, HALVES, SCALE_SUFFIX, Piece, map_named, pieces, split_kv_b, tensor_shape
from glmjax.params import QUANT_BLOCK, Params, abstract_params
from glmjax.placement import Region, aligned_empty, place
from glmjax.safetensors_io import TensorFiles

Advance = Callable[[int], None]  # told the bytes just placed

_PLAIN = ("F32", "BF16", "F16")
_THREADS = 8
_BLOCK_BYTES = 32 << 20  # of a tensor in hand, per thread


class HFReader:
    """A checkpoint folder that has been found to hold the whole tree of ``config``.

    Attributes:
      config: as given.
      abstract: shapes and dtypes of the tree to come.  A leaf is a ``QuantizedWeight`` if all its tensors are in
        block-FP8; a leaf of which only some are is dequantised.
    """

    def __init__(self, folder: Path, config: GLMConfig, dtype: np.dtype[Any], *, mtp: bool):
        self.config = config
        self.files = TensorFiles(folder)
        mtp_prefix = f"model.layers.{config.num_hidden_layers}."
        # transformers leaves the MTP layer out when it saves, but keeps its key in config.json.
        mtp = mtp and config.num_nextn_predict_layers > 0 and any(n.startswith(mtp_prefix) for n in self.files.tensors)
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces(config, mtp=mtp):
            self._pieces[piece.leaf].append(piece)
        plain = abstract_params(config, dtype, mtp=mtp)
        self._refuse_more_layers()
        map_named(self._check_leaf, plain)
        self.abstract: Params = map_named(
            lambda leaf, as_plain, as_fp8: as_fp8 if self._stays_fp8(leaf) else as_plain,
            plain,
            abstract_params(config, dtype, mtp=mtp, quantized=True),
        )

    def stored_dtype(self) -> str:
        """Dtype of the embedding, which no release quantises."""
        return self.files.read("model.embed_tokens.weight").dtype.name

    def read(self, shardings: Params | None, advance: Advance) -> Params:
        """Fills the tree, one leaf after the other.

        Args:
          shardings: a tree like ``abstract`` with a ``jax.sharding.Sharding`` per leaf; None: the default device.
        """
        with ThreadPoolExecutor(_THREADS) as pool:

            def load(path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
                return place(leaf, sharding, lambda region: self._fill(path, leaf.dtype, region, pool, advance))

            trees = (self.abstract,) if shardings is None else (self.abstract, shardings)
            return map_named(load, *trees)

    def _fill(
        self, path: str, dtype: np.dtype[Any], region: Region, pool: ThreadPoolExecutor, advance: Advance
    ) -> np.ndarray:
        """One region of a leaf, from the tensors that overlap it."""
        leaf, part = _leaf_and_part(path)
        out = aligned_empty(tuple(axis.stop - axis.start for axis in region), dtype)

        def copy(piece: Piece) -> None:
            lead = tuple(zip(piece.index, region, strict=False))
            if all(axis.start <= i < axis.stop for i, axis in lead):
                target = out[tuple(i - axis.start for i, axis in lead)]
                self._copy(piece, part, region[len(lead) :], target)
                advance(target.nbytes)

        for _ in pool.map(copy, self._pieces[leaf]):
            pass  # raises what a copy raised
        return out

    def _copy(self, piece: Piece, part: str, window: Region, target: np.ndarray) -> None:
        scale_name = piece.name + SCALE_SUFFIX
        name = scale_name if part == "scale" else piece.name
        tensor = self.files.read(name)
        scale = self.files.read(scale_name) if not part and scale_name in self.files else None
        if piece.leaf in HALVES:
            whole = tensor if scale is None else dequantize(tensor, scale)
            np.copyto(target, split_kv_b(self.config, piece.leaf, whole)[window], casting="unsafe")
            self.files.release(name, slice(0, len(tensor)))
            return
        rows, *rest = window
        step = max(1, _BLOCK_BYTES * len(tensor) // tensor.nbytes // QUANT_BLOCK) * QUANT_BLOCK
        for first in range(rows.start - rows.start % QUANT_BLOCK, rows.stop, step):
            block = slice(first, min(first + step, rows.stop))
            values = tensor[block]
            if scale is not None:
                values = dequantize(values, scale[first // QUANT_BLOCK :])
            wanted = max(first, rows.start)
            source = values[(slice(wanted - first, None), *rest)]
            np.copyto(target[wanted - rows.start : block.stop - rows.start], source, casting="unsafe")
            self.files.release(name, block)

    # Checks.

    def _stays_fp8(self, leaf: str) -> bool:
        parts = self._pieces[leaf] if leaf in FP8_LEAVES else []
        return bool(parts) and all(piece.name + SCALE_SUFFIX in self.files for piece in parts)

    def _check_leaf(self, leaf: str, abstract: jax.ShapeDtypeStruct) -> None:
        for piece in self._pieces[leaf]:
            shape = tensor_shape(self.config, piece, abstract.shape)
            if piece.name not in self.files:
                raise CheckpointError(f"{self.files.folder} lacks tensor {piece.name}, which its config.json calls for")
            code = self._check_shape(piece.name, shape)
            scale = piece.name + SCALE_SUFFIX
            if scale not in self.files:
                if code not in _PLAIN:
                    hint = f" without {scale}" if code == "F8_E4M3" else ""
                    raise CheckpointError(f"{piece.name} is {code}{hint}; expected one of {', '.join(_PLAIN)}")
                continue
            if code != "F8_E4M3":
                raise CheckpointError(f"{piece.name} has a {scale} but is {code}; expected F8_E4M3")
            code = self._check_shape(scale, scale_shape(shape))
            if code not in _PLAIN:
                raise CheckpointError(f"{scale} is {code}; expected F32")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> str:
        """Dtype code of a tensor of the right shape."""
        info = self.files[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(info.shape)} in {info.file}, but config.json makes it {list(shape)}:"
                " is this config.json of another checkpoint?"
            )
        return info.code

    def _refuse_more_layers(self) -> None:
        layers = self.config.num_hidden_layers
        for name in self.files.tensors:
            found = re.fullmatch(r"model\.layers\.(\d+)\.input_layernorm\.weight", name)
            index = int(found[1]) if found else -1
            has_projection = f"model.layers.{index}.eh_proj.weight" in self.files
            is_mtp = index == layers and (self.config.num_nextn_predict_layers > 0 or has_projection)
            if index >= layers and not is_mtp:
                raise CheckpointError(
                    f"{self.files.folder} holds layer {index}, but its config.json has num_hidden_layers={layers}:"
                    " is this config.json of another checkpoint?"
                )


def _leaf_and_part(path: str) -> tuple[str, str]:
    """``moe.down.scale`` -> (``moe.down``, ``scale``); a plain leaf has no part."""
    leaf, _, last = path.rpartition(".")
    return (leaf, last) if last in ("values", "scale") else (path, "")
