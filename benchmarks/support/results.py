"""Points to measure, what was measured at them, and the figures that follow; plain data, no process is started here."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

Kind = Literal["prefill", "decode"]
OURS, TRANSFORMERS, LLAMA = "ours", "transformers", "llama.cpp"

# What the project asks for: our speed over the better peer's by length, a step's growth, and MiB beyond llama.cpp.
SPEED_TARGETS = {512: 1.0, 8192: 3.0}
GROWTH_TARGET = 1.5
MEMORY_TARGET_MB = 1024.0


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """Prefill of one prompt of ``length`` tokens, or decode of ``batch`` sequences that hold ``length`` tokens each."""

    length: int
    kind_order: int  # prefill before decode of the same length: one llama.cpp process measures both
    batch: int

    @classmethod
    def prefill(cls, length: int) -> "Point":
        return cls(length, 0, 1)

    @classmethod
    def decode(cls, batch: int, context: int) -> "Point":
        return cls(context, 1, batch)

    @property
    def kind(self) -> Kind:
        return "decode" if self.kind_order else "prefill"

    def __str__(self) -> str:
        return f"decode {self.batch} x {self.length}" if self.kind_order else f"prefill {self.length}"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement of one system at one point.

    Attributes:
      round: which pass over all points.
      tok_s: tokens per second, of all sequences together; None if it failed.
      other_cores: cores kept busy by others meanwhile.
      details: whatever else the measuring program said.
    """

    system: str
    point: Point
    round: int
    tok_s: float | None
    peak_rss_mb: float | None = None
    other_cores: float | None = None
    error: str | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        row = {"system": self.system, "kind": self.point.kind, "length": self.point.length, "batch": self.point.batch}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("system", "point")}
        return row | rest


def parse_lengths(text: str) -> list[int]:
    """``"512,8192"`` -> [512, 8192].  ValueError for anything that is not a positive number."""
    return [_positive(part) for part in text.split(",") if part.strip()]


def parse_points(prefill: str, decode: str) -> list[Point]:
    """Points of ``"512,8192"`` and ``"1:512,16:8192"`` (batch:context), in the order to measure them."""
    points = {Point.prefill(n) for n in parse_lengths(prefill)}
    for part in decode.split(","):
        if part.strip():
            batch, colon, context = part.partition(":")
            if not colon:
                raise ValueError(f"{part!r} is not batch:context")
            points.add(Point.decode(_positive(batch), _positive(context)))
    return sorted(points)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{text!r} is not a positive number")
    return value


def in_turn(systems: Sequence[str], round_: int) -> list[str]:
    """The order of a round: there and back, so that a drift of the machine favours nobody."""
    return list(systems if round_ % 2 == 0 else reversed(systems))


def median_of(
    samples: Iterable[Sample], system: str, point: Point, value: Callable[[Sample], float | None] = lambda s: s.tok_s
) -> float | None:
    """Median over the rounds; None if no round has a value."""
    found = [v for s in samples if s.system == system and s.point == point and (v := value(s)) is not None]
    return statistics.median(found) if found else None


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def speed_rows(samples: Sequence[Sample], points: Sequence[Point], systems: Sequence[str]) -> list[dict[str, Any]]:
    """A row per point: tokens/s by system, the better peer, our ratio to it, and how disturbed the worst sample was."""
    rows = []
    for point in points:
        speeds = {name: median_of(samples, name, point) for name in systems}
        peers = {name: speed for name, speed in speeds.items() if name != OURS and speed is not None}
        llama = [speed for name, speed in peers.items() if name.startswith(LLAMA)]
        best = max(peers, key=lambda name: peers[name], default=None)
        gain = ratio(speeds.get(OURS), peers[best]) if best else None
        target = SPEED_TARGETS.get(point.length)
        loads = [s.other_cores for s in samples if s.point == point and s.other_cores is not None]
        rows.append(
            {
                "point": str(point),
                "tok_s": speeds,
                "llama.cpp": max(llama, default=None),
                "better_peer": best,
                "ratio": gain,
                "ratio_by_peer": {name: ratio(speeds.get(OURS), speed) for name, speed in peers.items()},
                "target": target,
                "met": None if gain is None or target is None else gain >= target,
                "worst_other_cores": max(loads, default=None),
                "failed": sorted({s.system for s in samples if s.point == point and s.error}),
            }
        )
    return rows


def memory_rows(samples: Sequence[Sample], points: Sequence[Point], systems: Sequence[str]) -> list[dict[str, Any]]:
    """A row per point: peak RSS in MiB by system, the highest of all rounds, and how far we are above llama.cpp."""
    rows = []
    for point in points:
        peaks: dict[str, float | None] = {}
        for name in systems:
            values = [s.peak_rss_mb for s in samples if s.system == name and s.point == point and s.peak_rss_mb]
            peaks[name] = max(values, default=None)
        ours, llama = peaks.get(OURS), [p for name, p in peaks.items() if name.startswith(LLAMA) and p is not None]
        over = ours - min(llama) if ours is not None and llama else None
        rows.append(
            {
                "point": str(point),
                "peak_rss_mb": peaks,
                "over_llama_mb": over,
                "target_mb": MEMORY_TARGET_MB,
                "met": None if over is None else over <= MEMORY_TARGET_MB,
            }
        )
    return rows


def growth_rows(samples: Sequence[Sample], points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row per batch: our decode step at the longest context over that at the shortest, with and without the scan."""
    rows = []
    decodes = [p for p in points if p.kind == "decode"]
    for batch in sorted({p.batch for p in decodes}):
        contexts = sorted(p for p in decodes if p.batch == batch)
        few, many = contexts[0], contexts[-1]
        full, rest = (_by_context(samples, (few, many), key) for key in ("step_ms", "step_without_scan_ms"))
        if few == many or full[few.length] is None or full[many.length] is None:
            continue
        grown = ratio(rest[many.length], rest[few.length])
        rows.append(
            {
                "batch": batch,
                "contexts": [few.length, many.length],
                "step_ms": full,
                "step_without_scan_ms": rest,
                "scan_ms": {n: None if (b := rest[n]) is None or a is None else a - b for n, a in full.items()},
                "growth": ratio(full[many.length], full[few.length]),
                "growth_without_scan": grown,
                "target": GROWTH_TARGET,
                "met": None if grown is None else grown <= GROWTH_TARGET,
            }
        )
    return rows


def _by_context(samples: Sequence[Sample], points: Sequence[Point], key: str) -> dict[int, float | None]:
    return {p.length: median_of(samples, OURS, p, lambda s: s.details.get(key)) for p in points}
