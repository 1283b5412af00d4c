"""Checkpoints in and out: Hugging Face safetensors and our Orbax folders, through one front door.

    config, params = load_checkpoint("GLM-5.3", dtype="bfloat16")
    save_pretrained(config, params, "copy")
    convert("GLM-5.3", "GLM-5.3-orbax", to="orbax")

A folder that is written appears whole or not at all.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError, ConfigError
from glmjax.hf_read import HFReader
from glmjax.hf_write import write_hf
from glmjax.orbax_io import FOLDER as ORBAX_FOLDER
from glmjax.orbax_io import OrbaxReader, is_orbax, write_orbax
from glmjax.params import Params, num_bytes
from glmjax.progress import Progress
from glmjax.safetensors_io import list_tensors
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import param_specs
from glmjax.staging import staged_folder

DTYPES = ("float32", "bfloat16", "float16")
SAMPLE_BYTES = 256  # at so many places of a tensor, or of an Orbax file, where layers are stacked:
SAMPLES, ORBAX_SAMPLES = 4, 1024
MAX_SHARD_BYTES = 5e9
# What belongs to a model besides its weights and config.json, copied by ``convert``.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def weights_name(path: str | Path) -> str:
    """A name for the weights in a folder, which copies of it share, in hexadecimal.

    Samples of every tensor make it, so it takes a moment; a model in two formats has two names.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    folder, digest = Path(path), hashlib.sha256()
    if is_orbax(folder):
        # Arrays are folders; the files beside them say when they were written.
        files = sorted(file for file in (folder / ORBAX_FOLDER).glob("*/**/*") if file.is_file())
        parts = [(f"{file.relative_to(folder)}", file, 0, file.stat().st_size, ORBAX_SAMPLES) for file in files]
    else:
        tensors = sorted(list_tensors(folder).items())
        parts = [(f"{name} {t.code} {t.shape}", t.file, t.start, t.num_bytes, SAMPLES) for name, t in tensors]
    with contextlib.ExitStack() as stack:
        opened: dict[Path, BinaryIO] = {}
        for title, file, start, size, count in parts:
            data = opened.get(file) or opened.setdefault(file, stack.enter_context(file.open("rb")))
            digest.update(f"{title} {size}\n".encode())
            for place in range(count):
                data.seek(start + max(0, size - SAMPLE_BYTES) * place // (count - 1))
                digest.update(data.read(min(SAMPLE_BYTES, size)))
    return digest.hexdigest()[:32]


def load_checkpoint(
    path: str | Path,
    dtype: str = "float32",
    layout: Layout | None = None,
    *,
    shardings: Callable[[Params], Params] | None = None,
    mtp: bool = True,
    progress: bool | None = None,
) -> tuple[GLMConfig, Params]:
    """Loads a checkpoint folder, Hugging Face or Orbax.

    Block-FP8 weights stay in FP8 (``QuantizedWeight``), except the up-projections of the latent; router and index head
    weights are float32 whatever ``dtype`` says.

    Args:
      path: the folder.
      dtype: of all other weights: "float32", "bfloat16" or "float16".
      layout: spreads the weights over the devices of ``layout.mesh()``; None: one device.
      shardings: instead of a layout: given the abstract tree (``jax.ShapeDtypeStruct`` leaves), returns the same tree
        with a ``jax.sharding.Sharding`` per leaf.  Each process reads only what its devices hold.
      mtp: load the multi-token-prediction layer, if the checkpoint has one.
      progress: draw a progress bar on stderr; None: if that is a terminal or a notebook's, and log a few lines if not.

    Raises:
      CheckpointError: a file or a tensor is missing, damaged or not what config.json says.
      ConfigError: config.json asks for something that glmjax does not do, or an argument is not one of those above.
    """
    weights_dtype = parse_dtype(dtype)
    if not isinstance(layout, Layout | None):
        raise ConfigError(f"layout must be a glmjax.Layout or None, got {layout!r}")
    if layout is not None and layout.num_devices > 1:
        if shardings is not None:
            raise ConfigError("layout and shardings both say where the weights go; pass one of them")
        shardings = param_shardings(layout, layout.mesh())
    reader = _open(path, weights_dtype, mtp=mtp)
    placed = None if shardings is None else shardings(reader.abstract)
    with Progress(f"Loading {Path(path).name}", num_bytes(reader.abstract), "bytes", show=progress) as shown:
        params = reader.read(placed, shown.advance)
    return reader.config, params


def param_shardings(layout: Layout, mesh: jax.sharding.Mesh) -> Callable[[Params], Params]:
    """For ``load_checkpoint``: where each parameter goes on a layout's mesh."""

    def shardings(abstract: Params) -> Params:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(layout, abstract))

    return shardings


def save_pretrained(
    config: GLMConfig,
    params: Params,
    path: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a Hugging Face folder that ``load_checkpoint`` and transformers' ``GlmMoeDsaForCausalLM`` open.

    Args:
      dtype: of plain weights, the router's bias excepted; None: as they are.  Block-FP8 weights stay block-FP8.
      max_shard_bytes: weights are split into files of at most this size.
      overwrite: replace a folder that exists.
    """
    target_dtype = None if dtype is None else parse_dtype(dtype)
    with staged_folder(path, overwrite=overwrite) as folder:
        write_hf(config, params, folder, target_dtype, max_shard_bytes)


def convert(
    src: str | Path,
    dst: str | Path,
    to: Literal["orbax", "hf"] = "orbax",
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> None:
    """Rewrites a checkpoint in the other format (or in another dtype), with its tokenizer files.

    Args:
      dtype: of plain weights; None: that of the source.
    """
    if to not in ("orbax", "hf"):
        raise ConfigError(f"to={to!r} is not a checkpoint format; expected 'orbax' or 'hf'")
    if dtype is not None:
        parse_dtype(dtype)
    with staged_folder(dst, overwrite=overwrite) as folder:
        target = parse_dtype(dtype or stored_dtype(src))
        config, params = load_checkpoint(src, target.name, progress=progress)
        if to == "orbax":
            write_orbax(config, params, folder, target)
        else:
            write_hf(config, params, folder, target, MAX_SHARD_BYTES)
        for name in SIDE_FILES:
            if (Path(src) / name).is_file():
                shutil.copyfile(Path(src) / name, folder / name)


def time_loads(folders: Iterable[str | Path], dtype: str, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds that each checkpoint takes to load, by path.

    Args:
      clock: tells the time in seconds; nothing below serving reads one itself.
    """
    seconds = {}
    for folder in folders:
        start = clock()
        load_checkpoint(folder, dtype, progress=False)
        seconds[str(folder)] = clock() - start
    return seconds


def stored_dtype(path: str | Path) -> str:
    """Dtype of the plain weights of a checkpoint, e.g. "bfloat16"."""
    return _open(path, np.dtype(np.float32), mtp=True).stored_dtype()


def parse_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name that users may give."""
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not supported; expected one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def load_config(path: str | Path) -> GLMConfig:
    """The configuration of a checkpoint folder.

    Raises:
      CheckpointError: there is no such folder.
      ConfigError: config.json asks for something that glmjax does not do.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a folder" if folder.exists() else f"{path} not found")
    return GLMConfig.from_hf(folder)


def _open(path: str | Path, dtype: np.dtype[Any], *, mtp: bool) -> HFReader | OrbaxReader:
    folder, config = Path(path), load_config(path)
    return (OrbaxReader if is_orbax(folder) else HFReader)(folder, config, dtype, mtp=mtp)
