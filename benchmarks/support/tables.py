"""Rows of figures as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from support.results import OURS

Rows = Sequence[Mapping[str, Any]]


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def verdict(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[red]not met[/]"


def make_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in lines:
        table.add_row(*line)
    return table


def speed_table(rows: Rows, systems: Sequence[str]) -> Table:
    peers = [name for name in systems if name != OURS]
    lines = []
    for row in rows:
        speeds = [
            "failed"
            if row["tok_s"][name] is None and name in row["failed"]
            else number(row["tok_s"][name]) + ("*" if name == row["better_peer"] and len(peers) > 1 else "")
            for name in systems
        ]
        target = number(row["target"], 0, "x") if peers else "-"
        lines.append(
            [
                row["point"],
                *speeds,
                number(row["ratio"], 2, "x"),
                f"{target} {verdict(row['met'])}".strip(),
                number(row["worst_other_cores"], 2),
            ]
        )
    return make_table(
        "Tokens per second, median of the rounds (* the better peer)",
        ["point", *systems, "ours / better peer", "target", "other cores"],
        lines,
    )


def memory_table(rows: Rows, systems: Sequence[str]) -> Table:
    lines = [
        [
            row["point"],
            *(number(row["peak_rss_mb"][name], 0) for name in systems),
            number(row["over_llama_mb"], 0),
            verdict(row["met"]),
        ]
        for row in rows
    ]
    return make_table("Peak RSS in MiB", ["point", *systems, "ours over llama.cpp", "at most 1024"], lines)


def growth_table(rows: Rows) -> Table:
    lines = []
    for row in rows:
        for context in row["contexts"]:
            last = context == row["contexts"][-1]
            parts = [number(row[key][context], 2) for key in ("step_ms", "scan_ms", "step_without_scan_ms")]
            grows = [number(row[key], 2, "x") for key in ("growth", "growth_without_scan")] if last else ["", ""]
            target = f"{row['target']:.1f}x {verdict(row['met'])}".strip() if last else ""
            lines.append([str(row["batch"]), str(context), *parts, *grows, target])
    columns = ["batch", "context", "step ms", "scan ms", "rest ms", "step grows", "rest grows", "at most"]
    return make_table("Our decode step by context, and the indexer's scan in it", columns, lines)
