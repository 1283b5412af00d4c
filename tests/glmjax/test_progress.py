"""Progress: a bar on a terminal, lines of the log elsewhere, as few as tell how far it is."""

import logging
import re
import subprocess
import sys

import pytest

from glmjax import progress
from glmjax.progress import Progress


@pytest.fixture
def lines(caplog):
    """What is logged at INFO, with seconds left out."""
    caplog.set_level(logging.INFO, logger="glmjax")
    return lambda: [re.sub(r"\d+\.\d s$", "", message).strip() for message in caplog.messages]


def test_beginning_and_end_are_said_and_what_is_between_only_when_due(lines):
    with Progress("Compiling", 7, "programs") as shown:
        for done in range(1, 8):
            shown.update(done)
    assert lines() == ["Compiling: 7 programs", "Compiling: done in"]


def test_one_is_no_plural(lines):
    with Progress("Generating", 1, "requests"):
        pass
    assert lines()[0] == "Generating: 1 request"


def test_what_takes_long_says_how_far_it_is(lines, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("Compiling", 3, "programs") as shown:
        shown.update(2)
        shown.advance()  # which the last line says
    assert lines() == ["Compiling: 3 programs", "Compiling: 2 of 3 programs,", "Compiling: done in"]


def test_bytes_have_their_units(lines, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("Loading GLM", 755_000_000_000, "bytes") as shown:
        shown.advance(12_300_000_000)
    assert lines()[:2] == ["Loading GLM: 755.0 GB", "Loading GLM: 12.3 GB of 755.0 GB,"]


def test_what_fails_is_not_said_to_be_done(lines):
    with pytest.raises(ZeroDivisionError), Progress("Compiling", 7, "programs"):
        _ = 1 / 0
    assert lines() == ["Compiling: 7 programs"]


def test_nothing_is_shown_where_nothing_is_wanted(lines, capsys):
    with Progress("Compiling", 7, "programs", show=False) as shown:
        shown.advance()
    assert lines() == [] and capsys.readouterr() == ("", "")


def test_a_bar_takes_the_place_of_lines(lines, capsys):
    with Progress("Compiling [all]", 7, "programs", show=True) as shown:
        shown.advance(3)
    out, err = capsys.readouterr()
    assert lines() == [] and out == "" and "Compiling [all]" in err and "3/7" in err


@pytest.fixture
def notebook(monkeypatch):
    """As in a kernel of Jupyter's: what rich knows it by."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setenv("TERM", "xterm-color")


@pytest.mark.parametrize("show", [None, True])
def test_a_notebook_gets_a_bar_that_is_drawn_over_itself(notebook, lines, capsys, recwarn, show):
    with Progress("Compiling", 7, "programs", show=show) as shown:
        shown.advance(3)
        shown.advance(4)
    out, err = capsys.readouterr()
    assert lines() == [] and out == "" and not recwarn.list
    assert "3/7" not in err.rpartition("\r")[2] and "7/7" in err.rpartition("\r")[2]


def test_a_notebook_gets_nothing_where_nothing_is_wanted(notebook, lines, capsys):
    with Progress("Compiling", 7, "programs", show=False):
        pass
    assert lines() == [] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("asks", [False, True])
def test_a_program_that_uses_the_library_is_told_only_if_it_asks(asks):
    code = f"""
import logging
from glmjax.progress import Progress
if {asks}:
    logging.basicConfig(level=logging.INFO)
with Progress("Compiling", 7, "programs"):
    pass
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr.count("Compiling")) == ("", 2 * asks)
