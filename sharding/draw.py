"""A picture of a layout: who stores which KV, who computes which queries, and what crosses the wire in one layer.

The figure shows one prompt of the first data-parallel rank; devices of the other ranks have prompts of their own. What
it shows is computed apart from how it looks. No pyplot and no global state: a notebook shows the figure that a cell
returns, a script saves it with ``savefig``.
"""

import io
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.sharding import cp
from glmjax.sharding.traffic import KVSource, Prefill, Traffic, Transfer, row_bytes

if TYPE_CHECKING:
    from glmjax.sharding.layout import Layout

INK, MUTED, FAINT, EMPTY = "#1f2430", "#6b7280", "#d8dce3", "#f3f4f7"
KINDS = {"all-gather": "#3b76c4", "reduce-scatter": "#e08a3c", "all-reduce": "#c8504f", "all-to-all": "#4f9d69"}
SOURCES: dict[KVSource, str] = {
    "pool": "every device has the KV that its queries need",
    "kv_gather": "cached KV travels to the queries",
    "query_gather": "queries travel to the KV",
}
CELLS = 32  # of the KV pattern at most


class Ranks(NamedTuple):
    """A device's place in each division of the work: arrays [devices]."""

    dp: np.ndarray
    pcp: np.ndarray
    tp: np.ndarray
    dcp: np.ndarray


def ranks(layout: "Layout") -> Ranks:
    """Ranks of the devices in the order of the mesh."""
    data, context_outer, context_inner, tensor_outer, tensor_inner = np.indices(tuple(layout.axis_sizes.values()))
    shards_of_tensor = layout.num_shards(layout.shard_tensor_axes)
    found = (
        data,
        context_outer * layout.num_shards(layout.shard_context_axes) + context_inner,
        tensor_outer * shards_of_tensor + tensor_inner,
        context_inner * shards_of_tensor + tensor_inner,
    )
    return Ranks(*(rank.reshape(-1) for rank in found))


def stored(layout: "Layout", positions: np.ndarray) -> np.ndarray:
    """Whether each device keeps the KV of each position: [devices, positions] bool."""
    where = ranks(layout)
    owners = cp.owner(positions, layout.dcp, layout.interleave)
    return (where.dp[:, None] == 0) & (where.dcp[:, None] == owners)


def stored_tokens(layout: "Layout", length: int) -> np.ndarray:
    """Of how many of the first ``length`` positions each device keeps the KV: [devices] int."""
    where = ranks(layout)
    kept = cp.local_length(np.int64(length), layout.dcp, where.dcp.astype(np.int64), layout.interleave)
    return np.where(where.dp == 0, kept, 0)


def computed(layout: "Layout", prompt_len: int) -> list[np.ndarray]:
    """Offsets in the prompt of the queries that each device computes, ascending, one array a device."""
    where = ranks(layout)
    if cp.splits_by_row(prompt_len, layout.pcp):  # too short to cut: one device of the pcp has all of it
        own = [np.arange(prompt_len if rank == 0 else 0) for rank in where.pcp]
    else:
        width = cp.local_width(prompt_len, layout.pcp)
        own = [cp.zigzag_positions(np.int32(prompt_len), layout.pcp, rank, width) for rank in where.pcp]
    return [x[x >= 0] if group == 0 else x[:0] for x, group in zip(own, where.dp, strict=True)]


def causal_work(layout: "Layout", prompt_len: int, cached: int = 0) -> np.ndarray:
    """Keys before the queries of each device, times its share of the heads: [devices] float."""
    return np.array([np.sum(cached + x + 1, dtype=np.float64) / layout.tp for x in computed(layout, prompt_len)])


def layer_transfers(traffic: Traffic) -> list[Transfer]:
    """What crosses the wire in a layer that has an indexer and experts."""
    return [t for t in traffic if t.each != "step"]


class LayoutFigure(Figure):
    """A figure that a notebook shows."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()


def draw(
    layout: "Layout", prompt_len: int, cached: int, config: GLMConfig, block_size: int, prefill: Prefill
) -> LayoutFigure:
    """The picture; see ``Layout.draw``."""
    for name, value, least in (("prompt_len", prompt_len, 1), ("cached", cached, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    total = cached + prompt_len
    traffic = layout.traffic(
        config, tokens=prompt_len, context_rows=total, block_size=block_size, prefill=prefill
    )
    bars = layer_transfers(traffic)
    devices = max(layout.num_devices, 2)
    top, bottom = 1.0 + 0.3 * devices, 0.9 + 0.3 * max(len(bars), 2)
    figure = LayoutFigure(figsize=(14, top + bottom + 0.9), layout="constrained", facecolor="white")
    figure.suptitle(
        f"{layout}   ·   {layout.num_devices} device{'s' * (layout.num_devices > 1)}   ·   "
        f"{prompt_len:,} new tokens after {cached:,} cached",
        x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK,
    )
    rows = figure.subfigures(2, 1, height_ratios=[top, bottom], hspace=0.04)
    kv, kept, queries, work = rows[0].subplots(1, 4, width_ratios=[5, 1.5, 5, 1.5], sharey=True)
    colours = [matplotlib.colormaps["turbo"](x) for x in np.linspace(0.07, 0.93, layout.num_devices)]
    _draw_stored(kv, layout, total, colours)
    _draw_kept(kept, layout, total, config, colours)
    _draw_computed(queries, layout, prompt_len, config, colours)
    _draw_work(work, layout, prompt_len, cached, colours)
    _label_devices(kv, layout)
    _draw_wire(rows[1].subplots(), traffic, bars)
    return figure
