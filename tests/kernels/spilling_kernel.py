"""A Triton kernel that needs more registers than a thread has, for the test that spills are seen."""

import triton
import triton.language as tl


@triton.jit
def spilling(x, y, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    at = row[:, None] * SIZE + row[None, :]
    values = tl.load(x + at)  # SIZE * SIZE / 32 registers of a thread, all needed until the end
    total = tl.sum(tl.sum(values, axis=0), axis=0)
    tl.store(y + at, values * total)
