"""Ctrl-C on the command line: it ends the process at once, also in a long compile, which Python cannot interrupt.

Python raises KeyboardInterrupt between two of its own instructions, and a compile has none for minutes. So a thread
hears of the signal here, by way of a pipe that Python's C code writes to. Processes that were started end by themselves
(``engine_process``). What puts things in order when it is interrupted asks for ``in_order``.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

EXIT_CODE = 130  # 128 + SIGINT, as in a shell
SHOW_CURSOR = "\x1b[?25h"  # which progress bars hide


class _AtOnce:
    """A handler that has nothing to do: it is there so that Python's C code takes the signal and writes to the pipe."""

    def __init__(self, pipe: int):
        self._pipe = pipe

    def __call__(self, number: int, frame: object) -> None: ...

    def set(self) -> None:
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self)

    def unset(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Within, Ctrl-C says so on standard error and ends the process with code 130.

    Where Ctrl-C is ignored or somebody else's (``nohup``, a program that calls this in a thread) it stays as it is.
    """
    if not _is_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    thread = threading.Thread(target=_end_when_told, args=(read,), name="interrupt", daemon=True)
    thread.start()
    handler = _AtOnce(write)
    handler.set()
    try:
        yield
    finally:
        handler.unset()
        os.close(write)
        thread.join()
        os.close(read)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Within ``at_once``, Ctrl-C is Python's KeyboardInterrupt again."""
    handler = signal.getsignal(signal.SIGINT) if _is_main_thread() else None
    if not isinstance(handler, _AtOnce):
        yield
        return
    handler.unset()
    try:
        yield
    finally:
        handler.set()


def message() -> str:
    """What is said of it, on standard error."""
    return f"{SHOW_CURSOR}\nglmjax: interrupted\n" if os.isatty(2) else "glmjax: interrupted\n"


def _end_when_told(pipe: int) -> None:
    while signals := os.read(pipe, 64):
        if signal.SIGINT in signals:
            with contextlib.suppress(OSError):
                os.write(2, message().encode())
            os._exit(EXIT_CODE)  # exit handlers would wait for the compile


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
