"""The systems under comparison, each as ``measure(point, round)``: starts the processes and reads what they print."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from support.machine import QUIET, call
from support.results import LLAMA, OURS, TRANSFORMERS, Point, Sample

HERE = Path(__file__).parents[1]
FAILURES = 3  # times llama.cpp is tried at least: now and then it ends well and prints nothing
Caller = Callable[..., list[dict[str, Any]]]


class System(Protocol):
    name: str

    def measure(self, point: Point, round_: int) -> Sample: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all systems are told.

    Attributes:
      attempts: measurements at most while others keep the cores busy.
      timeout: seconds of one process at most.
    """

    model: str
    threads: int
    steps: int = 32
    attempts: int = 3
    timeout: float = 1800.0


class Ours:
    """A fresh process a measurement, so that its peak RSS is that point's own."""

    name = OURS

    def __init__(self, settings: Settings, cache: Path, chunk: int = 512, fill: str = "prefill", run: Caller = call):
        self._settings, self._chunk, self._fill, self._call = settings, chunk, fill, run
        self._env = {
            "PYTHONPATH": str(HERE),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def prepare(self, point: Point) -> dict[str, Any]:
        """Compiles the point's programs into the cache, so that no measured process compiles."""
        return self._run(point, "compile")

    def measure(self, point: Point, round_: int) -> Sample:
        return sample_of(self.name, point, round_, self._run(point, point.kind))

    def _run(self, point: Point, kind: str) -> dict[str, Any]:
        s = self._settings
        job = {
            "model": s.model,
            "kind": kind,
            "length": point.length,
            "batch": point.batch,
            "steps": s.steps,
            "chunk": self._chunk,
            "fill": self._fill,
            "attempts": s.attempts,
            "without_scan": point.kind == "decode",
        }
        command = [sys.executable, "-m", "support.ours", json.dumps(job)]
        return self._call(command, s.timeout, self._env)[-1]


class Llama:
    """``bench_llamacpp.py`` in one flash attention mode; one process gives a length's prefill and batch-1 decode."""

    def __init__(self, settings: Settings, scripts: Path, binary: str, gguf: str, mode: str, run: Caller = call):
        self.name = f"{LLAMA} {mode}"
        self._settings, self._call = settings, run
        self._command = [sys.executable, str(scripts / "bench_llamacpp.py"), "--bin", binary, "--gguf", gguf]
        self._command += ["--fa", mode, "--runs", "1", "--ntg", str(settings.steps)]
        self._command += ["--threads", str(settings.threads), "--timeout", str(int(settings.timeout))]
        self._known: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def measure(self, point: Point, round_: int) -> Sample:
        key = (round_, point.length, point.batch)
        if key not in self._known:
            self._known[key] = self._quietest(point)
        return sample_of(self.name, point, round_, pick(self._known[key], point.kind))

    def _quietest(self, point: Point) -> list[dict[str, Any]]:
        """Repeats while disturbed or failed; the load that the script reports is that of its whole process."""
        command = [*self._command, "--ctx", str(point.length), "--batch", str(point.batch)]
        best: list[dict[str, Any]] = []
        for made in range(1, max(self._settings.attempts, FAILURES) + 1):
            rows = self._call(command, self._settings.timeout + 60)
            if not best or disturbance(rows) < disturbance(best):
                best = rows
            measured = disturbance(best) < float("inf")
            if disturbance(best) <= QUIET or (measured and made >= self._settings.attempts):
                break
        return best


class Transformers:
    """``bench_transformers.py``, which repeats disturbed runs by itself."""

    name = TRANSFORMERS

    def __init__(
        self, settings: Settings, scripts: Path, python: str, attention: str, chunks: str = "0", run: Caller = call
    ):
        self._settings, self._call = settings, run
        self._command = [python, str(scripts / "bench_transformers.py"), "--model", settings.model, "--runs", "1"]
        self._command += ["--attn", attention, "--chunk", chunks, "--threads", str(settings.threads)]
        self._command += ["--timeout", str(int(settings.timeout))]

    def measure(self, point: Point, round_: int) -> Sample:
        if point.kind == "prefill":
            where = ["--prefill", str(point.length), "--batch", "", "--ctx", ""]
        else:
            where = ["--prefill", "", "--batch", str(point.batch), "--ctx", str(point.length)]
        # The script gives each of its processes the time limit, and starts two for a decode.
        rows = self._call([*self._command, *where], 2 * self._settings.timeout + 60)
        return sample_of(self.name, point, round_, pick(rows, point.kind))


def pick(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """The fastest row of a kind (a peer may have several ways to do it), else the error."""
    good = [row for row in rows if row.get("kind") == kind and row.get("tok_s")]
    if good:
        return max(good, key=lambda row: row["tok_s"])
    errors = [row for row in rows if "error" in row]
    return errors[-1] if errors else {"error": f"no figure for {kind}"}


def disturbance(rows: Sequence[Mapping[str, Any]]) -> float:
    """The most cores that others kept busy; infinite if nothing was measured."""
    loads = [load for row in rows if (load := other_cores(row)) is not None]
    return max(loads, default=float("inf"))


def other_cores(row: Mapping[str, Any]) -> float | None:
    """A script reports one figure or one a run."""
    load = row.get("other_cores")
    return max(load, default=None) if isinstance(load, list) else load


def sample_of(system: str, point: Point, round_: int, row: Mapping[str, Any]) -> Sample:
    """A row of a script as a sample."""
    taken = ("tok_s", "peak_rss_mb", "other_cores", "error")
    return Sample(
        system,
        point,
        round_,
        tok_s=row.get("tok_s") if "error" not in row else None,
        peak_rss_mb=row.get("peak_rss_mb"),
        other_cores=other_cores(row),
        error=row.get("error"),
        details={key: value for key, value in row.items() if key not in taken},
    )
