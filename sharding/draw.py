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
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.sharding import cp
from glmjax.sharding.traffic import KVSource, Prefill, Transfer, row_bytes

if TYPE_CHECKING:
    from glmjax.sharding.layout import Layout

INK, MUTED, EMPTY = "#1f2430", "#6b7280", "#f3f4f7"
KINDS = {"all-gather": "#3b76c4", "reduce-scatter": "#e08a3c", "all-reduce": "#c8504f", "all-to-all": "#4f9d69"}
SOURCES: dict[KVSource, str] = {
    "pool": "every device has the KV that its queries need",
    "kv_gather": "cached KV travels to the queries",
    "query_gather": "queries travel to the KV",
}
CELLS = 32  # of the KV pattern at most
MIN_ROWS = 3  # that a panel has room for


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
    kept = cp.local_length(np.array(length), layout.dcp, where.dcp, layout.interleave)
    return np.where(where.dp == 0, kept, 0)


def computed(layout: "Layout", prompt_len: int) -> list[np.ndarray]:
    """Offsets in the prompt of the queries that each device computes, ascending, one array a device."""
    where = ranks(layout)
    if cp.splits_by_row(prompt_len, layout.pcp):  # too short to cut: one device of the pcp has all of it
        own = [np.arange(prompt_len if rank == 0 else 0) for rank in where.pcp]
    else:
        width = cp.local_width(prompt_len, layout.pcp)
        own = [cp.zigzag_positions(np.array(prompt_len), layout.pcp, rank, width) for rank in where.pcp]
    return [x[x >= 0] if group == 0 else x[:0] for x, group in zip(own, where.dp, strict=True)]


def causal_work(layout: "Layout", prompt_len: int, cached: int = 0) -> np.ndarray:
    """Keys before the queries of each device, times its share of the heads: [devices] float."""
    return np.array([np.sum(cached + x + 1, dtype=np.float64) / layout.tp for x in computed(layout, prompt_len)])


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
    traffic = layout.traffic(config, tokens=prompt_len, context_rows=total, block_size=block_size, prefill=prefill)
    bars = [t for t in traffic if t.each != "step"]
    devices = layout.num_devices
    heights = [1.3 + 0.27 * max(devices, MIN_ROWS), 0.8 + 0.27 * (max(len(bars), MIN_ROWS) if bars else 0)]
    figure = LayoutFigure(figsize=(14, sum(heights) + 0.5), layout="constrained", facecolor="white")
    figure.suptitle(
        f"{layout}   ·   {_count(devices, 'device')}   ·   {_count(prompt_len, 'new token')} after {cached:,} cached",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=INK,
    )
    grid = figure.add_gridspec(2, 1, height_ratios=heights, hspace=0.03)
    upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    kv, kept, queries, work = upper.subplots(1, 4, width_ratios=[5, 1.5, 5, 1.6], sharey=True)
    colours = list(0.88 * matplotlib.colormaps["turbo"](np.linspace(0.08, 0.92, devices)) + 0.12)
    _draw_stored(kv, layout, total, colours)
    _draw_kept(kept, layout, total, config, colours)
    _draw_computed(queries, layout, prompt_len, config, colours)
    _draw_work(work, causal_work(layout, prompt_len, cached), layout, colours)
    _label_devices(kv, layout)
    _draw_wire(lower.subplots(), traffic.kv, bars)
    return figure


def _draw_stored(ax: Axes, layout: "Layout", total: int, colours: list[Any]) -> None:
    """The first tokens, in cells of as many as stay together."""
    grain = layout.interleave if layout.dcp > 1 else 1
    cells = min(CELLS, -(-total // grain))
    starts = np.arange(cells) * grain
    for device, holds in enumerate(stored(layout, starts)):
        for cell in range(cells):
            colour = colours[device] if holds[cell] else EMPTY
            ax.broken_barh([(cell + 0.04, 0.92)], (device - 0.4, 0.8), facecolors=colour)
    rule = "every token" if layout.dcp == 1 else f"token t is on dcp rank {_owner_rule(layout)}"
    if layout.group_size > layout.dcp:
        rule += f", {layout.group_size // layout.dcp} copies"
    _title(ax, "Who stores the KV", rule if layout.dp == 1 else f"{rule}; other dp ranks: other prompts")
    step = max(1, cells // 8)
    ax.set_xticks(np.arange(0, cells, step) + 0.5, [f"{start:,}" for start in starts[::step]])
    more = f", and so on to {total - 1:,}" if cells * grain < total else ""
    ax.set_xlabel(f"token{f' (cells of {grain})' if grain > 1 else ''}{more}", color=MUTED)
    ax.set_xlim(0, cells)


def _owner_rule(layout: "Layout") -> str:
    return f"t mod {layout.dcp}" if layout.interleave == 1 else f"⌊t / {layout.interleave}⌋ mod {layout.dcp}"


def _draw_kept(ax: Axes, layout: "Layout", total: int, config: GLMConfig, colours: list[Any]) -> None:
    kv_row, index_key = row_bytes(config)
    token = config.num_hidden_layers * sum(kv_row) + config.num_full_indexers * sum(index_key)
    kept = stored_tokens(layout, total) * token
    _bars(ax, kept, colours, [_bytes(x) if x else "" for x in kept])
    _title(ax, "", "KV of the prompt")


def _draw_computed(ax: Axes, layout: "Layout", prompt_len: int, config: GLMConfig, colours: list[Any]) -> None:
    """Runs of consecutive queries; a device with a part of the heads has that part of the height."""
    tp_rank = ranks(layout).tp
    for device, offsets in enumerate(computed(layout, prompt_len)):
        ax.broken_barh([(0, prompt_len)], (device - 0.4, 0.8), facecolors=EMPTY)
        low = device - 0.4 + 0.8 * tp_rank[device] / layout.tp
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1):
            if len(run):
                ax.broken_barh([(run[0], len(run))], (low, 0.8 / layout.tp), facecolors=colours[device])
    if layout.pcp == 1:
        split = "all of them"
    elif cp.splits_by_row(prompt_len, layout.pcp):
        split = f"too few to cut into {2 * layout.pcp}"
    else:
        split = f"two of {2 * layout.pcp} parts, one from either end"
    if layout.tp > 1:
        split += f"; height: {config.num_attention_heads // layout.tp} of {config.num_attention_heads} heads"
    _title(ax, "Who computes which queries", split)
    ax.set_xlim(0, prompt_len)
    ax.set_xlabel("new token", color=MUTED)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def _draw_work(ax: Axes, work: np.ndarray, layout: "Layout", colours: list[Any]) -> None:
    share = work * layout.group_size / work.sum()
    _bars(ax, share, colours, [f"{x:.3f}" if x else "" for x in share])
    _title(ax, "", f"work, max/mean {share.max():.3f}")


def _draw_wire(ax: Axes, kv: KVSource, bars: list[Transfer]) -> None:
    received = [t.received_bytes for t in bars]
    _title(
        ax,
        f"What a device receives in one layer: {_bytes(sum(received)) if bars else 'nothing'}",
        f"{SOURCES[kv]}; the layer has an indexer and experts" if bars else "",
    )
    for row, (t, size) in enumerate(zip(bars, received, strict=True)):
        ax.barh(row, size, height=0.72, color=KINDS[t.kind])
        ax.text(size, row, f"  {_bytes(size)}   {t.kind} of {t.devices}", va="center", fontsize=9, color=INK)
    ax.set_yticks(range(len(bars)), [t.what for t in bars], fontsize=9, color=INK)
    ax.set_ylim(max(len(bars), MIN_ROWS) - 0.5, -0.5)
    ax.set_xlim(0, 1.25 * max(received, default=1))
    ax.set_xticks([])


def _bars(ax: Axes, values: np.ndarray, colours: list[Any], texts: list[str]) -> None:
    """A bar a device, with what it says beside it."""
    ax.barh(range(len(values)), values, height=0.8, color=colours)
    for device, text in enumerate(texts):
        ax.text(values[device], device, f" {text}", va="center", fontsize=8, color=INK)
    ax.set_xlim(0, 1.9 * max(values))
    ax.set_xticks([])


def _label_devices(ax: Axes, layout: "Layout") -> None:
    where, sizes = ranks(layout), (layout.dp, layout.pcp, layout.tp, layout.dcp)
    numbers = np.arange(layout.num_devices)
    # A rank that is the device's own number says nothing.
    named = {n: r for n, r, size in zip(Ranks._fields, where, sizes, strict=True) if size > 1 and (r != numbers).any()}
    labels = [f"{', '.join(f'{name} {rank[i]}' for name, rank in named.items())}   {i}" for i in numbers]
    ax.set_yticks(range(layout.num_devices), labels, fontsize=8, color=INK)
    ax.set_ylim(max(layout.num_devices, MIN_ROWS) - 0.5, -0.5)
    ax.set_ylabel("device", color=MUTED)


def _title(ax: Axes, title: str, subtitle: str) -> None:
    """And the look of all axes: no frame, no tick marks."""
    ax.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    ax.text(0, 1.02, subtitle, transform=ax.transAxes, fontsize=9, color=MUTED, in_layout=False)
    ax.set_frame_on(False)
    ax.tick_params(length=0, labelsize=8, labelcolor=INK)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
