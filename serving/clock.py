"""The one reader of time.  Everything in serving that needs a time is handed a clock.

``Clock`` is the machine's; ``ManualClock`` stands still until told, for tests and simulation.
"""

import time


class Clock:
    """Real time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; only differences mean anything."""
        return time.monotonic()

    def time(self) -> float:
        """Wall time in seconds since the epoch."""
        return time.time()


class ManualClock(Clock):
    """Time that moves only by ``advance``."""

    def __init__(self, now: float = 0.0):
        self._now = now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now
