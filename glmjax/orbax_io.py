"""The parameter tree as an Orbax checkpoint: our own fast format, one array per stacked leaf, readable into any sharding.

A folder is ``config.json`` and ``params/``, which Orbax owns.  Arrays are stored uncompressed in chunks that are read in parallel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError
from glmjax.hf_names import FP8_LEAVES, dotted, map_named
from glmjax.hf_write import check_fit, write_configs
from glmjax.params import FLOAT32_WEIGHTS, Params, abstract_params, num_bytes

FOLDER = "params"
_CHUNK_BYTES = 64 << 20


def is_orbax(folder: str | Path) -> bool:
    return (Path(folder) / FOLDER).is_dir()


def write_orbax(config: GLMConfig, params: Params, folder: Path, dtype: np.dtype[Any] | None) -> None:
    """Writes ``params/`` and config.json into an existing folder.

    Args:
      dtype: of plain weights, those that are float32 always excepted; None: as they are.
    """
    check_fit(config, params)

    def save_args(path: str, leaf: jax.Array) -> ocp.SaveArgs:
        name = path.rpartition(".")[2]
        kept = dtype is None or name in ("values", "scale") or name in FLOAT32_WEIGHTS
        return ocp.SaveArgs(dtype=leaf.dtype if kept else dtype, chunk_byte_size=_CHUNK_BYTES)

    with _checkpointer() as checkpointer:
        checkpointer.save(
            folder.absolute() / FOLDER,
            args=ocp.args.PyTreeSave(item=nested(params), save_args=nested(map_named(save_args, params))),
        )
    write_configs(config, params, folder, dtype)


class OrbaxReader:
    """An Orbax folder that has been found to hold the whole tree of ``config``.

    Attributes:
      config: as given.
      abstract: shapes and dtypes of the tree to come.
    """

    def __init__(self, folder: Path, config: GLMConfig, dtype: np.dtype[Any], *, mtp: bool):
        self.config = config
        self._folder = folder.absolute() / FOLDER
        with _one_line_errors(self._folder), _checkpointer() as checkpointer:
            tree = checkpointer.metadata(self._folder).item_metadata.tree
            self._stored = {dotted_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        has_mtp = any(path.startswith("mtp.") for path in self._stored)
        if has_mtp and not config.num_nextn_predict_layers:
            raise CheckpointError(f"{self._folder} holds an MTP layer that its config.json lacks")
        map_named(self._check_leaf, self._tree(config, dtype, mtp=has_mtp))
        self.abstract = self._tree(config, dtype, mtp=has_mtp and mtp)

    def stored_dtype(self) -> str:
        return np.dtype(self._stored["embed"].dtype).name

    def read(self, shardings: Params | None, advance: Callable[[int], None]) -> Params:
        """Restores the tree; arguments as of ``HFReader.read``."""
        if shardings is None:
            one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shardings = jax.tree.map(lambda _: one_device, self.abstract)

        def restore_args(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> ocp.ArrayRestoreArgs:
            # Not strict: without its MTP layer a stack is read up to the last entry but one.
            return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False)

        with _one_line_errors(self._folder), _checkpointer() as checkpointer:
            restored = checkpointer.restore(
                self._folder,
                args=ocp.args.PyTreeRestore(
                    item=nested(self.abstract),
                    restore_args=nested(jax.tree.map(restore_args, self.abstract, shardings)),
                    partial_restore=True,
                ),
            )
        advance(num_bytes(self.abstract))
        arrays = {dotted_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}
        return map_named(lambda path, _: arrays[path], self.abstract)

    def _tree(self, config: GLMConfig, dtype: np.dtype[Any], *, mtp: bool) -> Params:
        return map_named(
            lambda leaf, plain, fp8: fp8 if leaf in FP8_LEAVES and f"{leaf}.values" in self._stored else plain,
            abstract_params(config, dtype, mtp=mtp),
            abstract_params(config, dtype, mtp=mtp, quantized=True),
        )

    def _check_leaf(self, path: str, leaf: jax.ShapeDtypeStruct) -> None:
        stored = self._stored.get(path)
        if stored is None:
            raise CheckpointError(f"{self._folder} lacks {path}, which its config.json calls for")
        if tuple(stored.shape) != leaf.shape:
            raise CheckpointError(
                f"{path} has shape {list(stored.shape)} in {self._folder}, but config.json makes it {list(leaf.shape)}:"
                " is this config.json of another checkpoint?"
            )


def nested(tree: Params) -> dict[str, Any]:
    """The tree as plain dicts, ``None`` parts left out: what Orbax stores does not depend on our classes."""
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, name = dotted(path).split(".")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = leaf
    return out


def dotted_keys(path: tuple[Any, ...]) -> str:
    """The dotted path of a leaf of ``nested``."""
    return ".".join(key.key for key in path)


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Orbax and TensorStore raise many types, with messages of many lines."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        first = next(iter(str(e).splitlines()), "")
        raise CheckpointError(f"{folder} cannot be read by Orbax: {type(e).__name__}: {first[:300]}") from e
