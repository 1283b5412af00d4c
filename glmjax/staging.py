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
      CheckpointError: ``path`` is a file or a folder with something in it and ``overwrite`` is False, or the disk
        refuses.
    """
    target = Path(path).absolute()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{path} is a file, not a folder")
    taken = target.exists() and any(target.iterdir())
    if taken and not overwrite:
        raise CheckpointError(f"{path} exists; pass overwrite=True (--overwrite) to replace it")
    staging = _free_sibling(target, "new")
    try:
        staging.mkdir(parents=True)
        yield staging
        if taken:
            _swap(staging, target)
        else:
            staging.rename(target)
    except OSError as e:
        raise CheckpointError(f"{path} cannot be written: {e.strerror or e}") from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(staging: Path, target: Path) -> None:
    retired = _free_sibling(target, "old")
    target.rename(retired)
    try:
        staging.rename(target)
    except OSError:
        retired.rename(target)
        raise
    shutil.rmtree(retired)


def _free_sibling(target: Path, tag: str) -> Path:
    count = 0
    while (path := target.parent / f".{target.name}.{tag}-{os.getpid()}-{count}").exists():
        count += 1
    return path
