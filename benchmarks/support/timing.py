"""Times of compiled functions."""

import time
from collections.abc import Callable
from typing import Any

import jax


def best_ms(f: Callable[..., Any], *args: Any, seconds: float) -> dict[str, float]:
    """Of as many runs as the time allows, two at least after the first, which compiles: the least time of the wall and
    the least of the processor, of all threads together. The latter says more where others use the machine."""
    jax.block_until_ready(f(*args))
    times: list[tuple[float, float]] = []
    while len(times) < 2 or sum(wall for wall, _ in times) < seconds:
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(f(*args))
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, processor = (1e3 * min(column) for column in zip(*times, strict=True))
    return {"wall": wall, "processor": processor}
