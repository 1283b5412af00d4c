"""``python tests``: the whole suite in one process, which is how Bazel starts it."""

import sys
from pathlib import Path

import pytest

raise SystemExit(pytest.main(["--rootdir", str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.argv[1:]]))
