"""How often a hot region of so many rows has what the indexer picks: the table of ``glmjax bench hisparse``.

The row resolver runs over a trace as a step would run it, group by group, with no page of the request on the device:
all that is selected is wanted from the hot region. In an engine the tail of a request is in pages, and as much more as
there is room for, and those rows need no region; so the bytes here are the most that a request costs.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.errors import ConfigError
from glmjax.hisparse_trace import Advance, Trace, written_beside
from glmjax.kernels.resolve_rows import resolve_rows
from glmjax.kernels.roofline import HOST_BYTES_PER_SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 1 << 24  # of a region: more than any context


@dataclasses.dataclass(frozen=True)
class BufferResult:
    """What a trace costs with hot regions of one size.

    Attributes:
      buffer: rows of the region, for each layer.
      buffer_bytes: of the region, all layers together.
      steps: of the trace, the first of which finds an empty region.
      hits: references to rows that were there, or that an earlier one of the same step and group brought in.
      misses: first references to other rows, summed over groups and steps.
      num_bytes: from the host: misses x bytes of a row x layers of the group.
    """

    buffer: int
    buffer_bytes: int
    steps: int
    hits: int
    misses: int
    num_bytes: int

    @property
    def hit_rate(self) -> float:
        references = self.hits + self.misses
        return self.hits / references if references else 1.0

    @property
    def misses_per_step(self) -> float:
        return self.misses / self.steps

    @property
    def bytes_per_step(self) -> float:
        return self.num_bytes / self.steps

    @property
    def host_ms_per_step(self) -> float:
        """Milliseconds that the link to the host needs at least."""
        return 1e3 * self.bytes_per_step / HOST_BYTES_PER_SECOND

    def as_json(self) -> dict[str, Any]:
        derived = ("hit_rate", "misses_per_step", "bytes_per_step", "host_ms_per_step")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def default_buffers(trace: Trace) -> list[int]:
    """The least that a step may want times 1, 1.5, 2, 3, 4, 6 and so on, and at last all tokens of the request."""
    least, whole = trace.least_rows, trace.context
    doubled = [least << i for i in range(whole.bit_length())]
    sizes = sorted({*doubled, *(size + size // 2 for size in doubled)})
    return [*(size for size in sizes if size == least or size < 0.9 * whole), whole] if least < whole else [whole]


def measure(trace: Trace, buffers: Iterable[int], advance: Advance = lambda: None) -> list[BufferResult]:
    """Runs the resolver over a trace for each size of the hot region.

    Args:
      buffers: rows of the region.
      advance: called once for each size and step.

    Returns:
      a result for each size, by size.

    Raises:
      ConfigError: a region is too small for one step, or there is none.
    """
    sizes = sorted(set(buffers))
    if not sizes:
        raise ConfigError("buffers: give at least one size")
    if sizes[0] < trace.least_rows:
        raise ConfigError(
            f"buffers: {sizes[0]} rows do not hold what a step may want, {trace.least_rows} ({trace.queries} rows of "
            f"k={trace.k} in {trace.context} tokens): give at least {trace.least_rows}"
        )
    if sizes[-1] > MOST_ROWS:
        raise ConfigError(f"buffers: {sizes[-1]} rows are more than any context has: give at most {MOST_ROWS}")
    return [_measure_one(trace, size, advance) for size in sizes]


def _measure_one(trace: Trace, size: int, advance: Advance) -> BufferResult:
    groups = len(trace.layers)
    owner = jnp.full((groups, size), -1, jnp.int32)
    order = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (groups, size))
    hits, misses = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for selected, length in zip(trace.selections, trace.lengths, strict=True):
        owner, order, hit, missed = _resolve(selected.reshape(groups, -1), length, owner, order, context=trace.context)
        hits += np.asarray(hit)
        misses += np.asarray(missed)
        advance()
    layers = np.array(trace.layers)
    return BufferResult(
        buffer=size,
        buffer_bytes=size * int(layers.sum()) * trace.row_bytes,
        steps=trace.steps,
        hits=int(hits.sum()),
        misses=int(misses.sum()),
        num_bytes=int(misses @ layers) * trace.row_bytes,
    )


@functools.partial(jax.jit, static_argnames="context")
def _resolve(
    positions: jax.Array, length: jax.Array, owner: jax.Array, order: jax.Array, *, context: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A step of all groups [groups, C]: owner and order after it, hits and misses [groups]."""
    first_written = jnp.broadcast_to(length, positions.shape[:1])
    found = resolve_rows(
        positions, jnp.ones(positions.shape, bool), owner, order, first_written=first_written, context=context
    )
    return found.owner, found.order, found.hits, found.misses


# Shown.


def describe(trace: Trace) -> str:
    """What a trace is, in three lines."""
    size = (
        f"{trace.steps} steps of {trace.queries} x top-{trace.k} in {trace.context:,} tokens; "
        f"{len(trace.layers)} index groups, {sum(trace.layers)} layers, {trace.row_bytes} B a row"
    )
    measured = f"overlap {trace.overlap():.3f}" + (f", shared {trace.shared():.3f}" if trace.queries > 1 else "")
    return f"{trace.source}\n{size}\nmeasured: {measured}"


def as_text(trace: Trace, results: Sequence[BufferResult]) -> Any:
    """For ``rich`` to print: what the trace is, a table with a row for each size, and how to read it."""
    from rich.console import Group
    from rich.table import Table

    table = Table()
    for name in ("rows", "on the device\nMB", "hit rate\n%", "misses\na step", "from the host\nMB a step", "ms a step"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            f"{one.buffer:,}",
            f"{one.buffer_bytes / 1e6:,.2f}",
            f"{100 * one.hit_rate:.2f}",
            f"{one.misses_per_step:,.1f}",
            f"{one.bytes_per_step / 1e6:,.3f}",
            f"{one.host_ms_per_step:.4f}",
        )
    return Group(describe(trace), table, CAPTION)


CAPTION = (
    "One request with no page on the device; the first step finds an empty region. A reference to a row that is not\n"
    "there is a miss, later ones in the same step are hits. Rows are of a layer, misses of all index groups, MB of\n"
    f"all layers; ms: at {HOST_BYTES_PER_SECOND / 1e9:g} GB/s from the host."
)


def draw(trace: Trace, results: Sequence[BufferResult]) -> "Figure":
    """Hit rate and bytes from the host against the size of the region, in the manner of ``Layout.draw``."""
    from matplotlib.figure import Figure

    from glmjax.sharding.draw import INK, KINDS

    figure = Figure(figsize=(11, 4.8), layout="constrained", facecolor="white")
    figure.suptitle(describe(trace), x=0.01, ha="left", fontsize=10, color=INK)
    rate, traffic = figure.subplots(1, 2)
    colours = list(KINDS.values())
    _curve(rate, results, [100 * one.hit_rate for one in results], colours[0], "Hit rate", "% of references", "{:.4g}")
    size = [one.bytes_per_step / 1e6 for one in results]
    _curve(traffic, results, size, colours[1], "From the host", "MB a step, all layers", "{:.3g}")
    traffic.set_ylim(0, 1.15 * max(size) or 1)
    return figure


def _curve(
    ax: "Axes", results: Sequence[BufferResult], values: list[float], colour: str, title: str, unit: str, label: str
) -> None:
    """One line with its values beside the points, over sizes on a scale of powers of two."""
    from glmjax.sharding.draw import EMPTY, INK, MUTED

    sizes = [one.buffer for one in results]
    ax.plot(sizes, values, color=colour, marker="o", linewidth=2)
    for x, y in zip(sizes, values, strict=True):
        ax.annotate(label.format(y), (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8, color=INK)
    ax.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    ax.text(0, 1.02, unit, transform=ax.transAxes, fontsize=9, color=MUTED, in_layout=False)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.margins(x=0.08, y=0.15)
    ax.set_xlabel("rows of the hot region", color=MUTED)
    ax.grid(axis="y", color=EMPTY)
    ax.set_axisbelow(True)
    ax.set_frame_on(False)
    ax.tick_params(length=0, labelsize=8, labelcolor=INK)


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Writes a picture in the format of the name's suffix, whole or not at all.

    Raises:
      ConfigError: matplotlib does not write that format, or the disk refuses.
    """
    suffix = Path(path).suffix[1:].lower()
    known = figure.canvas.get_supported_filetypes()
    if suffix not in known:
        raise ConfigError(f"{path}: the picture's name must end with one of .{', .'.join(sorted(known))}")
    with written_beside(path) as new:
        figure.savefig(new, format=suffix, dpi=110)
