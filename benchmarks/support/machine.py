"""The machine while something is measured: time, the load that others make, memory."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUIET = 0.15  # cores that other processes may keep busy before a measurement counts as disturbed


def busy_seconds() -> float:
    """CPU seconds spent on this machine since it started, by anyone, other guests (steal) included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Load:
    """A timed block.

    Attributes:
      seconds: wall time.
      other_cores: cores that processes other than this one kept busy, on average.
    """

    seconds = 0.0
    other_cores = 0.0

    def __enter__(self) -> "Load":
        self._busy, self._own, self._start = busy_seconds(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._start
        others = (busy_seconds() - self._busy) - (time.process_time() - self._own)
        self.other_cores = max(0.0, others / self.seconds)


def memory_mb(field: str) -> float:
    """A line of this process's status in MiB: ``VmHWM`` is its peak so far, ``VmRSS`` what it holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def use_cores(count: int) -> None:
    """Keeps this process and its children on the first ``count`` cores it may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def describe() -> dict[str, Any]:
    """What a reader of the figures wants to know of the machine."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
    }


def call(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Runs a process that prints a JSON object a line, and returns the objects; its failure is one with "error"."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"error": f"took more than {timeout:.0f} s"}]
    rows = json_lines(done.stdout)
    if done.returncode or not rows:
        rows.append({"error": f"exit code {done.returncode}: {done.stderr.strip()[-600:] or 'no result'}"})
    return rows


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines of a program's output."""
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline()
