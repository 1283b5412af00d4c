"""The parameter tree to Hugging Face safetensors: per-expert tensors, in shards.

One layer of each leaf is on the host at a time, so that saving takes little memory besides the model's.
"""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.blockfp8 import scale_shape
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.hf_names import HALVES, SCALE_SUFFIX, Piece, dotted, join_kv_b, pieces, tensor_shape
from glmjax.params import QUANT_BLOCK, Params, abstract_params
from glmjax.safetensors_io import INDEX_FILE, SINGLE_FILE, PlannedTensor, write_safetensors


def write_hf(
    config: GLMConfig, params: Params, folder: Path, dtype: np.dtype[Any] | None, max_shard_bytes: float
) -> None:
    """Writes weights, index, config.json and generation_config.json into an existing folder.

    Args:
      dtype: of plain tensors, the router's bias excepted, which is float32 always; None: as they are.
    """
    check_fit(config, params)
    shards = _split(_plan(config, params, dtype), max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
        total += sum(tensor.num_bytes for tensor in shard)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_configs(config, params, folder, dtype)


def write_configs(config: GLMConfig, params: Params, folder: Path, dtype: np.dtype[Any] | None) -> None:
    """config.json and generation_config.json, true to what ``params`` holds."""
    if params.mtp is None:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    raw = config.to_hf(np.dtype(params.embed.dtype if dtype is None else dtype).name)
    leaves = _by_path(params)
    if any(path.endswith(".values") for path in leaves):
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
            "modules_to_not_convert": _plain_modules(config, leaves),
        }
    write_json(folder / "config.json", raw)
    generation = {
        "_from_model_config": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_fit(config: GLMConfig, params: Params) -> None:
    """Refuses a tree that is not the one of ``config``."""
    expected = abstract_params(config, jnp.dtype(jnp.float32), mtp=params.mtp is not None)
    wanted = {path: tuple(leaf.shape) for path, leaf in _by_path(expected).items()}
    found = {path.removesuffix(".values"): tuple(leaf.shape) for path, leaf in _by_path(params).items()}
    for path, shape in wanted.items():
        if found.get(path) != shape:
            raise ConfigError(f"params do not fit config: {path} is {found.get(path)}, config makes it {shape}")


class _HostLayers:
    """Slices of the leaves on the host; of each leaf, the layer that was asked for last."""

    def __init__(self, leaves: dict[str, jax.Array]):
        self._leaves = leaves
        self._held: dict[str, tuple[int, np.ndarray]] = {}

    def get(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        if not index:
            return np.asarray(self._leaves[path])
        layer, rest = index[0], index[1:]
        if self._held.get(path, (-1,))[0] != layer:
            # A traced index: one compilation for all layers.
            slab = jax.lax.dynamic_index_in_dim(self._leaves[path], jnp.int32(layer), keepdims=False)
            self._held[path] = (layer, np.asarray(slab))
        return self._held[path][1][rest]


def _plan(config: GLMConfig, params: Params, dtype: np.dtype[Any] | None) -> Iterator[PlannedTensor]:
    """Every tensor to write, in checkpoint order; its values are fetched when it is written."""
    leaves = _by_path(params)
    host = _HostLayers(leaves)
    for piece in pieces(config, mtp=params.mtp is not None):
        leaf, index = piece.leaf, piece.index
        if f"{leaf}.values" in leaves:
            values = leaves[f"{leaf}.values"]
            shape = tensor_shape(config, piece, values.shape)
            yield PlannedTensor(piece.name, values.dtype, shape, partial(host.get, f"{leaf}.values", index))
            yield PlannedTensor(
                piece.name + SCALE_SUFFIX,
                np.dtype(np.float32),
                scale_shape(shape),
                partial(host.get, f"{leaf}.scale", index),
            )
            continue
        if HALVES.get(leaf) == 1:
            continue  # written with the first half
        stored = leaves[leaf].dtype if dtype is None or leaf == "moe.router_bias" else np.dtype(dtype)
        shape = tensor_shape(config, piece, leaves[leaf].shape)
        yield PlannedTensor(piece.name, stored, shape, partial(_plain, host, piece))


def _plain(host: _HostLayers, piece: Piece) -> np.ndarray:
    if piece.leaf in HALVES:
        return join_kv_b(host.get("attention.key_up", piece.index), host.get("attention.value_up", piece.index))
    return host.get(piece.leaf, piece.index)


def _split(tensors: Iterator[PlannedTensor], max_bytes: float) -> list[list[PlannedTensor]]:
    """Shards of at most ``max_bytes``; a larger tensor has one to itself."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _plain_modules(config: GLMConfig, leaves: dict[str, jax.Array]) -> list[str]:
    """Names of the matrices that are not FP8, as ``modules_to_not_convert`` wants them."""
    mtp = "mtp.projection" in leaves
    plain = [p for p in pieces(config, mtp=mtp) if p.leaf in leaves and leaves[p.leaf].ndim - len(p.index) > 1]
    return list(dict.fromkeys(piece.name.removesuffix(".weight") for piece in plain))


def _by_path(tree: object) -> dict[str, Any]:
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
