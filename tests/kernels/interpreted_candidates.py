"""Runs the kernels that fill and merge lists of candidates in Triton's interpreter, whole wrappers at a time."""

import numpy as np
import pytest

pytest.importorskip("triton")

import triton_interpreter

from glmjax.kernels import candidates_triton, merge_triton


def interpreted_call(*operands, **options):
    with triton_interpreter.interpreted(candidates_triton), triton_interpreter.interpreted(merge_triton):
        return triton_interpreter.interpreted_call(*operands, **options)


def run_interpreted(monkeypatch, module):
    """Lets a module's kernels, and those that merge its lists, run on the CPU. Other pieces: ``test_merge_triton``."""
    monkeypatch.setattr(module, "triton_call", interpreted_call)
    monkeypatch.setattr(merge_triton, "triton_call", interpreted_call)
    monkeypatch.setattr(candidates_triton.Parts, "pieces", 2)


class Lists:
    """What passes between the kernels: recorded in one run, and published from the start in the next.

    The interpreter runs programs one after the other. With what all of them published before, a program finds what it
    would find late in a run side by side.
    """

    def __init__(self, monkeypatch, module):
        self.monkeypatch, self.module, self.merge = monkeypatch, module, module.merge_lists
        monkeypatch.setattr(module, "merge_lists", self.record)

    def record(self, parts, published, lists, counts):
        self.parts, self.published, self.counts = parts, published, counts
        return self.merge(parts, published, lists, counts)

    def publish_all(self):
        known = self.published
        self.monkeypatch.setattr(self.module, "nothing_published", lambda parts: known)


class Entries:
    """Counts the candidates that a module's kernels append to lists, those included that lists lose when shortened."""

    def __init__(self, monkeypatch, module):
        self.count, self.append = 0, triton_interpreter.Function(module.append.fn)
        monkeypatch.setattr(module, "append", self.counted)

    def counted(self, list_ptr, count, scores, positions, enters):
        self.count += int(np.sum(enters.handle.data))
        return self.append(list_ptr, count, scores, positions, enters)

    def take(self):
        """How many there were since the last call."""
        count, self.count = self.count, 0
        return count
