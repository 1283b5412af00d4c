"""The log of the ``glmjax`` command and of the engines that it starts: lines on standard error."""

import contextlib
import logging
import sys
from collections.abc import Iterator

LOGGER = "glmjax"


@contextlib.contextmanager
def lines_on_stderr(level: int = logging.INFO, prefix: str = "") -> Iterator[None]:
    """What glmjax logs from this level on goes to standard error; ``prefix`` comes before each message."""
    logger, handler = logging.getLogger(LOGGER), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s", "%Y-%m-%d %H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
