"""Runs the kernels that fill and merge lists of candidates in Triton's interpreter, whole wrappers at a time."""

import heapq
import inspect
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("triton")

import triton_interpreter
from triton.runtime import interpreter

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

    def __init__(self, monkeypatch, module, append="append"):
        self.count, self.append = 0, triton_interpreter.Function(getattr(module, append).fn)
        monkeypatch.setattr(module, append, self.counted)

    def counted(self, list_ptr, count, scores, positions, enters, *rest):
        self.count += int(np.sum(enters.handle.data))
        return self.append(list_ptr, count, scores, positions, enters, *rest)

    def take(self):
        """How many there were since the last call."""
        count, self.count = self.count, 0
        return count


class SideBySide(Entries):
    """Runs the parts of a row side by side, as a GPU would, and counts the candidates that enter their lists.

    A program has a turn for every block of scores. The parts start evenly over the time that ``apart`` scores take, in
    their order, and are as fast as each other.
    """

    def __init__(self, monkeypatch, module, kernel, append="append", *, apart, block):
        super().__init__(monkeypatch, module, append)
        self.kernel, self.apart, self.block = kernel.__name__, apart, block
        self.at_once, self.back, self.running = triton_interpreter.interpret, threading.Semaphore(0), None
        monkeypatch.setattr(triton_interpreter, "interpret", self.interpret)

    def counted(self, *arguments):
        program = self.running
        program.paused = True
        self.back.release()
        program.turn.acquire()
        return super().counted(*arguments)

    def interpret(self, kernel, grid, *arguments, **constants):
        if kernel.__name__ != self.kernel:
            return self.at_once(kernel, grid, *arguments, **constants)
        with triton_interpreter.interpreted(sys.modules[kernel.fn.__module__]):
            function = triton_interpreter.Function(kernel.fn).rewrite()
            given = [triton_interpreter.Tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]
            given = [interpreter._implicit_cvt(x) for x in given]
            named = inspect.getcallargs(kernel.fn, *given, **constants)
            interpreter.interpreter_builder.set_grid_dim(*grid, 1)
            step = self.apart / max(1, grid[1] - 1)
            waiting = [
                (part * step, part, row, Program(function, named, (row, part, 0), self.back))
                for row in range(grid[0])
                for part in range(grid[1])
            ]
            heapq.heapify(waiting)
            while waiting:
                time, part, row, self.running = heapq.heappop(waiting)
                self.running.paused = False
                self.running.turn.release()
                self.back.acquire()
                if self.running.error is not None:
                    raise self.running.error
                if self.running.paused:
                    heapq.heappush(waiting, (time + self.block, part, row, self.running))


class Program:
    """One program of a grid, in a thread that runs when it has a turn."""

    def __init__(self, function, arguments, index, back):
        self.function, self.arguments, self.index, self.back = function, arguments, index, back
        self.turn, self.paused, self.error = threading.Semaphore(0), False, None
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        self.turn.acquire()
        try:
            interpreter.interpreter_builder.set_grid_idx(*self.index)  # kernels ask for it before their first block
            self.function(**self.arguments)
        except Exception as error:
            self.error = error
        self.paused = False
        self.back.release()
