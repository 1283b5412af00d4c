"""The parameter tree as an Orbax checkpoint: our own format, one array per stacked leaf, readable into any sharding.

A folder is ``config.json`` and ``params/``, which Orbax owns.  We have it write each array as one uncompressed chunk,
so that reading can map the files: on the CPU backend the page cache is the model, elsewhere the transfer reads from it.
What was stored in any other way (by a sharded program, say) is restored by Orbax.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.config import GLMConfig
from glmjax.errors import CheckpointError
from glmjax.hf_names import FP8_LEAVES, dotted, map_named
from glmjax.hf_write import check_fit, write_configs
from glmjax.params import FLOAT32_WEIGHTS, Params, abstract_params, num_bytes
from glmjax.placement import aligned_empty, place
from glmjax.zarr_map import find_arrays

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FOLDER = "params"


def is_orbax(folder: str | Path) -> bool:
    return (Path(folder) / FOLDER).is_dir()


def write_orbax(config: GLMConfig, params: Params, folder: Path, dtype: np.dtype[Any] | None) -> None:
    """Writes ``params/`` and config.json into an existing folder.

    Args:
      dtype: of plain weights, those that are float32 always excepted; None: as they are.
    """
    import orbax.checkpoint as ocp

    check_fit(config, params)

    def save_args(path: str, leaf: jax.Array) -> ocp.SaveArgs:
        name = path.rpartition(".")[2]
        kept = dtype is None or name in ("values", "scale") or name in FLOAT32_WEIGHTS
        return ocp.SaveArgs(dtype=leaf.dtype if kept else dtype)

    with _quiet(), _checkpointer() as checkpointer:
        checkpointer.save(
            folder.absolute() / FOLDER,
            args=ocp.args.PyTreeSave(item=_nested(params), save_args=_nested(params, map_named(save_args, params))),
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
        self._files = find_arrays(self._folder)
        # Ours or Orbax's description of an array: both have shape and dtype.
        self._stored: dict[str, Any] = self._metadata() if self._files is None else dict(self._files)
        has_mtp = any(path.startswith("mtp.") for path in self._stored)
        if has_mtp and not config.num_nextn_predict_layers:
            raise CheckpointError(f"{self._folder} holds an MTP layer that its config.json lacks")
        map_named(self._check_leaf, self._tree(config, dtype, mtp=has_mtp))
        self.abstract = self._tree(config, dtype, mtp=has_mtp and mtp)

    def stored_dtype(self) -> str:
        """Dtype of the embedding."""
        return np.dtype(self._stored["embed"].dtype).name

    def read(self, shardings: Params | None, advance: Callable[[int], None]) -> Params:
        """The tree; arguments as of ``HFReader.read``."""
        if self._files is None:
            return self._restore(shardings, advance)
        files = self._files

        def load(path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
            if _is_empty(leaf):
                return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
            array = place(leaf, sharding, lambda region: _as_dtype(files[path].open()[region], leaf.dtype))
            advance(array.nbytes)
            return array

        return map_named(load, *((self.abstract,) if shardings is None else (self.abstract, shardings)))

    def _restore(self, shardings: Params | None, advance: Callable[[int], None]) -> Params:
        import orbax.checkpoint as ocp

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
                    item=_nested(self.abstract),
                    restore_args=_nested(self.abstract, jax.tree.map(restore_args, self.abstract, shardings)),
                    partial_restore=True,
                ),
            )
        advance(num_bytes(self.abstract))
        arrays = _flat(restored)
        return map_named(
            lambda path, leaf, sharding: (
                arrays[path] if path in arrays else jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
            ),
            self.abstract,
            shardings,
        )

    def _metadata(self) -> dict[str, Any]:
        with _one_line_errors(self._folder), _checkpointer() as checkpointer:
            return _flat(checkpointer.metadata(self._folder).item_metadata.tree)

    def _tree(self, config: GLMConfig, dtype: np.dtype[Any], *, mtp: bool) -> Params:
        return map_named(
            lambda leaf, plain, fp8: fp8 if leaf in FP8_LEAVES and f"{leaf}.values" in self._stored else plain,
            abstract_params(config, dtype, mtp=mtp),
            abstract_params(config, dtype, mtp=mtp, quantized=True),
        )

    def _check_leaf(self, path: str, leaf: jax.ShapeDtypeStruct) -> None:
        stored = self._stored.get(path)
        if _is_empty(leaf):
            return
        if stored is None:
            raise CheckpointError(f"{self._folder} lacks {path}, which its config.json calls for")
        if tuple(stored.shape) != leaf.shape:
            raise CheckpointError(
                f"{path} has shape {list(stored.shape)} in {self._folder}, but config.json makes it {list(leaf.shape)}:"
                " is this config.json of another checkpoint?"
            )


def _as_dtype(view: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if view.dtype == dtype and view.flags.c_contiguous:
        return view
    out = aligned_empty(view.shape, dtype)
    np.copyto(out, view, casting="unsafe")
    return out


def _is_empty(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """No elements, which Orbax refuses to store: the shared experts of a model without any."""
    return 0 in leaf.shape


def _nested(tree: Params, values: Params | None = None) -> dict[str, Any]:
    """The tree as plain dicts without the parts that are None or empty: what is stored does not depend on our classes.

    Args:
      values: what to put in place of the leaves.
    """
    out: dict[str, Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), value in zip(leaves, jax.tree.leaves(tree if values is None else values), strict=True):
        if _is_empty(leaf):
            continue
        *parents, name = dotted(path).split(".")
        level = out
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = value
    return out


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Leaves of ``_nested`` by dotted path."""
    return {".".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _checkpointer() -> "ocp.Checkpointer":
    import orbax.checkpoint as ocp  # takes half a second, which mapping the files does without

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's warning that a checkpoint of plain files has nothing of OCDBT's to merge."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_about_ocdbt)
    try:
        yield
    finally:
        logger.removeFilter(_not_about_ocdbt)


def _not_about_ocdbt(record: logging.LogRecord) -> bool:
    return "OCDBT" not in record.getMessage()


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Orbax and TensorStore raise many types, with messages of many lines."""
    try:
        yield
    except Exception as e:
        first = next(iter(str(e).splitlines()), "")
        raise CheckpointError(f"{folder} cannot be read by Orbax: {type(e).__name__}: {first[:300]}") from e
