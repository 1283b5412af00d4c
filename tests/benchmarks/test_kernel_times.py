"""The benchmarks of single kernels on a CPU run and print what they measured.  Sizes are small, no time is judged."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs a checkout, and this is Bazel's sandbox")

CASES = {
    "indexer_cpu": (
        "--queries 1,2 --contexts 2048",
        {"scores_ms", "scores_processor_ms", "top_k_ms", "top_k_processor_ms", "top_k_processor_ns_per_query_and_key"},
    ),
    "sparse_mla_cpu": (
        "--queries 1,2 --contexts 2048 --heads 1",
        {"ms", "processor_ms", "gflops_per_processor_second"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_prints_json_of_every_size(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, figures = CASES[name]
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *options.split(), "--seconds", "0", "--json"])
    script.main()
    rows = json.loads(capsys.readouterr().out)
    assert [(row["queries"], row["context"]) for row in rows] == [(1, 2048), (2, 2048)]
    for row in rows:
        assert set(row) == figures | {"queries", "context"}
        assert all(row[figure] > 0 for figure in figures), row
