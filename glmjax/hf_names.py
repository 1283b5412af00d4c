"""Which Hugging Face tensor goes where: the names of a ``glm_moe_dsa`` checkpoint against the stacked parameter tree.

A leaf of the tree is known by its dotted path, ``attention.query_down``.  Each leaf is made of pieces: one checkpoint
tensor per piece, at a leading index of the stack (spec/model.md 3.1).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from glmjax.config import GLMConfig

SCALE_SUFFIX = "_scale_inv"  # appended to a tensor's name, "x.weight" -> "x.weight_scale_inv"

_ATTENTION = {
    "input_norm": "input_layernorm.weight",
    "query_down": "self_attn.q_a_proj.weight",
    "query_norm": "self_attn.q_a_layernorm.weight",
    "query_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "key_up": "self_attn.kv_b_proj.weight",
    "value_up": "self_attn.kv_b_proj.weight",
    "output": "self_attn.o_proj.weight",
    "output_norm": "post_attention_layernorm.weight",
}
_INDEXER = {
    "query": "self_attn.indexer.wq_b.weight",
    "key": "self_attn.indexer.wk.weight",
    "key_norm_weight": "self_attn.indexer.k_norm.weight",
    "key_norm_bias": "self_attn.indexer.k_norm.bias",
    "head_weights": "self_attn.indexer.weights_proj.weight",
}
_ROUTER = {"router": "mlp.gate.weight", "router_bias": "mlp.gate.e_score_correction_bias"}
_MTP = {
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "projection": "eh_proj.weight",
    "final_norm": "shared_head.norm.weight",
}
_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}

# Leaves that stay in block-FP8 if the checkpoint has them so; every other leaf is dequantised.
FP8_LEAVES = frozenset(
    {
        "attention.query_down",
        "attention.query_up",
        "attention.kv_down",
        "attention.output",
        "indexer.query",
        "indexer.key",
        "dense.gate_up",
        "dense.down",
        "moe.gate_up",
        "moe.down",
        "moe.shared_gate_up",
        "moe.shared_down",
    }
)
HALVES = {"attention.key_up": 0, "attention.value_up": 1}  # both are cut from kv_b_proj


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Checkpoint tensor ``name`` is ``leaf[index]`` (for ``HALVES``, a part of it is)."""

    leaf: str
    index: tuple[int, ...]
    name: str


def pieces(config: GLMConfig, *, mtp: bool) -> Iterator[Piece]:
    """All pieces of the tree, layer by layer."""
    yield Piece("embed", (), _TOP["embed"])
    indexers = 0
    for layer in range(config.num_hidden_layers + int(mtp)):
        prefix = f"model.layers.{layer}."
        is_mtp = layer == config.num_hidden_layers
        for leaf, name in _ATTENTION.items():
            yield Piece(f"attention.{leaf}", (layer,), prefix + name)
        if is_mtp or config.indexer_types[layer] == "full":
            for leaf, name in _INDEXER.items():
                yield Piece(f"indexer.{leaf}", (indexers,), prefix + name)
            indexers += 1
        moe = layer - config.first_k_dense_replace
        if not is_mtp and moe < 0:
            yield from _swiglu("dense.gate_up", "dense.down", (layer,), f"{prefix}mlp.")
        else:
            for leaf, name in _ROUTER.items():
                yield Piece(f"moe.{leaf}", (moe,), prefix + name)
            for expert in range(config.n_routed_experts):
                yield from _swiglu("moe.gate_up", "moe.down", (moe, expert), f"{prefix}mlp.experts.{expert}.")
            if config.n_shared_experts:
                yield from _swiglu("moe.shared_gate_up", "moe.shared_down", (moe,), f"{prefix}mlp.shared_experts.")
        if is_mtp:
            for leaf, name in _MTP.items():
                yield Piece(f"mtp.{leaf}", (), prefix + name)
    yield Piece("final_norm", (), _TOP["final_norm"])
    yield Piece("head", (), _TOP["head"])


def _swiglu(gate_up: str, down: str, index: tuple[int, ...], prefix: str) -> Iterator[Piece]:
    yield Piece(gate_up, (*index, 0), f"{prefix}gate_proj.weight")
    yield Piece(gate_up, (*index, 1), f"{prefix}up_proj.weight")
    yield Piece(down, index, f"{prefix}down_proj.weight")


def tensor_shape(config: GLMConfig, piece: Piece, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the checkpoint tensor of a piece."""
    if piece.leaf in HALVES:
        rows = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        return rows, config.kv_lora_rank
    return leaf_shape[len(piece.index) :]


def split_kv_b(config: GLMConfig, leaf: str, tensor: np.ndarray) -> np.ndarray:
    """The half of ``kv_b_proj`` that ``leaf`` is: [H, nope or v, kv_lora]."""
    by_head = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    nope = config.qk_nope_head_dim
    return by_head[:, nope:] if HALVES[leaf] else by_head[:, :nope]


def join_kv_b(key_up: np.ndarray, value_up: np.ndarray) -> np.ndarray:
    """``kv_b_proj`` [H * (nope + v), kv_lora] of one layer."""
    return np.concatenate([key_up, value_up], axis=1).reshape(-1, key_up.shape[-1])


def map_named(function: Callable[..., Any], *trees: Any) -> Any:
    """``jax.tree.map`` with the dotted path first; the first tree gives the structure."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(dotted(path), *leaves), *trees)


def dotted(path: tuple[object, ...]) -> str:
    """``attention.query_down.values`` for a path of attribute keys."""
    return ".".join(key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey))
