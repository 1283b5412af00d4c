"""Progress of what takes long: a bar where standard error is a terminal or a notebook's, else lines for the log.

Lines are logged at INFO: the command line shows them, and a program that uses the library if it asks for them. Their
seconds are by the clock of rich, which its bars go by.
"""

import logging
import threading

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0  # from one line to the next, at least


class Progress:
    """Says how far something is, while it is entered.

    Args:
      title: what is going on, such as "Compiling".
      total: of what there is to do.
      unit: what is counted, in the plural; "bytes" are shown as kB, MB and so on.
      show: None: a bar on a terminal or in a notebook, lines elsewhere; True: a bar wherever it goes; False: nothing.
    """

    def __init__(self, title: str, total: int, unit: str, *, show: bool | None = None) -> None:
        console = Console(stderr=True)
        if console.is_jupyter and show is not False:
            # Drawn as on a terminal, which notebooks can show: rich's own way there needs ipywidgets.
            console = Console(stderr=True, force_jupyter=False, force_terminal=True)
        draws = console.is_terminal if show is None else show
        of_bytes = (DownloadColumn(), TransferSpeedColumn())
        counts = of_bytes if unit == "bytes" else (MofNCompleteColumn(), TimeElapsedColumn())
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counts)
        self._bar = Bar(*columns, console=console, disable=not draws)
        self._title, self._total, self._unit = title, total, unit
        self._logs = show is None and not draws
        self._lock = threading.Lock()
        self._said = 0.0  # when the last line was, in seconds from the beginning

    def __enter__(self) -> "Progress":
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=self._total)
        if self._logs:
            log.info("%s: %s", self._title, self._of_total())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if self._logs and kind is None:
            log.info("%s: done in %.1f s", self._title, self._seconds)

    def advance(self, count: int = 1) -> None:
        """So much more is done.  Any thread may say so."""
        self._bar.advance(self._task, count)
        self._say_if_due()

    def update(self, completed: int) -> None:
        """So much is done in all."""
        self._bar.update(self._task, completed=completed)
        self._say_if_due()

    def _say_if_due(self) -> None:
        with self._lock:
            task, seconds = self._bar.tasks[0], self._seconds
            if not self._logs or task.finished or seconds < self._said + LINE_SECONDS:
                return
            self._said = seconds
        log.info("%s: %s, %.1f s", self._title, self._of_total(int(task.completed)), seconds)

    @property
    def _seconds(self) -> float:
        return self._bar.tasks[0].elapsed or 0.0

    def _of_total(self, done: int | None = None) -> str:
        if self._unit == "bytes":
            return decimal(self._total) if done is None else f"{decimal(done)} of {decimal(self._total)}"
        unit = self._unit.removesuffix("s") if self._total == 1 else self._unit
        return f"{'' if done is None else f'{done} of '}{self._total} {unit}"
