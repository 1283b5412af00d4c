"""Where each array lives: parameters, KV cache and batch as ``PartitionSpec`` over the mesh of a ``Layout``.

Every axis of every parameter has a logical name, and one rule says over which mesh axes a name is split.  What has no
rule is whole on every device.  The tree is known here by its dotted paths only: it is built a level above, in
glmjax/params.py.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from glmjax.errors import ConfigError
from glmjax.sharding.layout import QUANT_BLOCK, Layout

LogicalAxis = Literal[
    "layer",
    "model",
    "token",  # rows of the embedding table
    "logit",  # rows of the head
    "query_rank",
    "kv_rank",
    "head",  # heads, or heads x their width with the head slowest: a contiguous part is whole heads
    "head_dim",
    "index_head",
    "index_dim",
    "gate_up",  # two: gate, up
    "dense_width",
    "router_logit",  # of all experts: each device chooses for the tokens that it has
    "expert",
    "expert_width",
    "shared_width",
]

PARAM_AXES: Mapping[str, tuple[LogicalAxis, ...]] = {
    "embed": ("token", "model"),
    "attention.input_norm": ("layer", "model"),
    "attention.query_down": ("layer", "query_rank", "model"),
    "attention.query_norm": ("layer", "query_rank"),
    "attention.query_up": ("layer", "head", "query_rank"),
    "attention.kv_down": ("layer", "kv_rank", "model"),
    "attention.kv_norm": ("layer", "kv_rank"),
    "attention.key_up": ("layer", "head", "head_dim", "kv_rank"),
    "attention.value_up": ("layer", "head", "head_dim", "kv_rank"),
    "attention.output": ("layer", "model", "head"),
    "attention.output_norm": ("layer", "model"),
    "indexer.query": ("layer", "index_head", "query_rank"),
    "indexer.key": ("layer", "index_dim", "model"),
    "indexer.key_norm_weight": ("layer", "index_dim"),
    "indexer.key_norm_bias": ("layer", "index_dim"),
    "indexer.head_weights": ("layer", "index_head", "model"),
    "dense.gate_up": ("layer", "gate_up", "dense_width", "model"),
    "dense.down": ("layer", "model", "dense_width"),
    "moe.router": ("layer", "router_logit", "model"),
    "moe.router_bias": ("layer", "router_logit"),
    "moe.gate_up": ("layer", "expert", "gate_up", "expert_width", "model"),
    "moe.down": ("layer", "expert", "model", "expert_width"),
    "moe.shared_gate_up": ("layer", "gate_up", "shared_width", "model"),
    "moe.shared_down": ("layer", "model", "shared_width"),
    "mtp.embed_norm": ("model",),
    "mtp.hidden_norm": ("model",),
    "mtp.projection": ("model", "model"),
    "mtp.final_norm": ("model",),
    "final_norm": ("model",),
    "head": ("logit", "model"),
}


def axis_rules(layout: Layout) -> dict[LogicalAxis, tuple[str, ...]]:
    """The mesh axes over which each logical axis is split; the axes that are not listed are not."""
    return {
        "head": layout.tensor_axes,
        "dense_width": layout.tensor_axes,
        "shared_width": layout.tensor_axes,
        "expert": layout.expert_axes,
        "expert_width": () if layout.expert_axes else layout.tensor_axes,
        "logit": layout.group_axes,
    }


def param_specs[Tree](layout: Layout, abstract_params: Tree) -> Tree:
    """A ``PartitionSpec`` for each parameter.

    Attention heads and feed-forward widths are split over tp, experts over every device (without expert parallelism: by
    width over tp), the output head's rows over the group if they divide.  All else, the indexer included, is whole on
    every device.  The values and the scales of a block-FP8 weight are split alike.

    Args:
      abstract_params: a tree with the paths of ``glmjax.params.Params``; its leaves have a ``shape``.

    Returns:
      The same tree with specs for leaves, each with an entry for every axis.

    Raises:
      ConfigError: a leaf is none of ``PARAM_AXES``, or an axis would be split unevenly or inside a block of 128 that
        shares a scale (``Layout.check_model`` finds that out from the config alone).
    """
    rules = axis_rules(layout)

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        axes = PARAM_AXES.get(name.removesuffix(".values").removesuffix(".scale"))
        if axes is None or len(axes) != len(leaf.shape):
            raise ConfigError(f"no sharding is known for parameter {name!r} of shape {leaf.shape}; see PARAM_AXES")
        blocked = (len(axes) - 2, len(axes) - 1) if name.endswith(".values") else ()
        split: list[tuple[str, ...] | None] = []
        for i, (axis, size) in enumerate(zip(axes, leaf.shape, strict=True)):
            over = rules.get(axis, ())
            parts = layout.num_shards(over)
            unit = QUANT_BLOCK if i in blocked and parts > 1 else 1
            even = size % (parts * unit) == 0
            if not even and axis != "logit":
                whole = f" of whole blocks of {unit}" if unit > 1 else ""
                raise ConfigError(
                    f"layout {layout} cannot split {name} of shape {leaf.shape} along axis {i}, {axis!r}: "
                    f"it takes {parts} equal parts{whole}"
                )
            split.append(over if over and even else None)
        return PartitionSpec(*split)

    return jax.tree_util.tree_map_with_path(spec, abstract_params)


def cache_spec(layout: Layout) -> PartitionSpec:
    """The one spec of every field of ``glmjax.cache.KVCache``, all of which are [layers, slots, ...].

    Slots are split over dp and dcp and replicated over the rest of a group.  The global array is the local pools end to
    end, ``dp * dcp`` of them, that of data-parallel rank d and dcp rank r being number ``d * dcp + r``.
    """
    return PartitionSpec(None, (*layout.data_axes, *layout.shard_axes))


def batch_spec(layout: Layout) -> PartitionSpec:
    """The spec of a program's batch: arrays [dp, ...], one entry for each data-parallel rank."""
    return PartitionSpec(layout.data_axes)
