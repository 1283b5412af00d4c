"""Folders that appear whole or not at all: written beside their place under a hidden name, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glmjax.errors import CheckpointError


@contextmanager
def staged_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a new folder that takes the place of ``path`` when the block ends, and vanishes if it raises.

    Raises:
      CheckpointError: ``path`` is a file or a folder with something in it, and ``overwrite`` is False.
    """
    target = Path(path).absolute()
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken and not overwrite:
        raise CheckpointError(f"{path} exists; pass overwrite=True to replace it")
    if taken and not target.is_dir():
        raise CheckpointError(f"{path} is a file, not a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _fresh_sibling(target, "new")
    staging.mkdir()
    try:
        yield staging
        if taken:
            retired = _fresh_sibling(target, "old")
            target.rename(retired)
            try:
                staging.rename(target)
            except OSError:
                retired.rename(target)
                raise
            shutil.rmtree(retired)
        else:
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fresh_sibling(target: Path, tag: str) -> Path:
    count = 0
    while (path := target.parent / f".{target.name}.{tag}-{os.getpid()}-{count}").exists():
        count += 1
    return path
