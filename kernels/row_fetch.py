"""Copies rows between pools by a list of (source row, target row), in place on the target: KV rows on their way between
host and device pools and to connectors.

A row is bytes. The packed form of the host pool and of the wire is one array; a device pool holds the same bytes as
several, one for each field (spec/model.md section 4.1: 512 of latents, 16 of scales, 128 of rotary key). Either side
may be in either form.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.errors import ConfigError
from glmjax.kernels.check import INT32, check_arrays
from glmjax.kernels.choose import Implementation, choose
from glmjax.kernels.row_format import MAX_FIELDS, WORD, HostRows, row_bytes

Rows = jax.Array | Sequence[jax.Array]


def row_fetch(
    targets: Rows,
    sources: Rows | HostRows,
    target_rows: jax.Array,
    source_rows: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> Rows:
    """targets[target_rows] = sources[source_rows], in place.

    Args:
      targets: [rows, width] of any dtype, or up to three of them that hold the fields of a row one after the other. The
        rows of a pool of several layers are ``pool.reshape(-1, width)``, row ``layer * slots + slot``.
      sources: the same, of as many bytes a row in all, in none of the targets' memory; or rows in host memory. At most
        one side is in fields of its own.
      target_rows, source_rows: [N] int32. A -1 in either list skips the pair; target rows are all different.
      implementation: "jnp", "triton", or "auto" for what suits the device.

    Returns:
      the targets, in the form they came. Under ``jax.jit`` with them donated nothing is copied.

    Raises:
      ConfigError: the sides do not fit one another, rows in host memory are to be read on a CPU, or the implementation
        is unknown or cannot take the arguments.
    """
    into = _as_tuple(targets)
    of = sources if isinstance(sources, HostRows) else _as_tuple(sources)
    _check_arrays(into, () if isinstance(of, HostRows) else of, target_rows, source_rows)
    target_bytes = [row_bytes(x) for x in into]
    source_bytes = [of.row_bytes] if isinstance(of, HostRows) else [row_bytes(x) for x in of]
    _check_bytes(target_bytes, source_bytes)
    chosen = choose("row_fetch", implementation, kernel="triton", obstacle=field_obstacle(target_bytes, source_bytes))
    if target_rows.shape[0] == 0:
        return targets
    if chosen == "triton":
        from glmjax.kernels import row_fetch_triton

        fetched = row_fetch_triton.row_fetch(into, of, target_rows, source_rows)
    elif isinstance(of, HostRows):
        raise ConfigError("row_fetch: rows in host memory need a GPU; give the pool itself as an array on a CPU")
    else:
        fetched = _copy_rows(into, of, target_rows, source_rows)
    return fetched if isinstance(targets, Sequence) else fetched[0]


def _as_tuple(rows: Rows) -> tuple[jax.Array, ...]:
    return tuple(rows) if isinstance(rows, Sequence) else (rows,)


def _copy_rows(
    targets: tuple[jax.Array, ...], sources: tuple[jax.Array, ...], target_rows: jax.Array, source_rows: jax.Array
) -> tuple[jax.Array, ...]:
    """One row after the other, as slice updates: XLA's CPU scatter copies the pool.

    Only the pairs that are to be copied have a turn. One that left a row as it is would have to read it, and XLA then
    writes the whole pool anew, row by row.
    """
    keep = (source_rows >= 0) & (target_rows >= 0)
    (kept,) = jnp.nonzero(keep, size=keep.shape[0], fill_value=0)
    found = [x.at[jnp.maximum(source_rows, 0)].get(mode="promise_in_bounds") for x in sources]
    found = as_fields(found, targets)

    def put(turn: jax.Array, targets: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i = kept[turn]
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(target, jax.lax.dynamic_slice_in_dim(rows, i, 1), target_rows[i], 0)
            for target, rows in zip(targets, found, strict=True)
        )

    return jax.lax.fori_loop(0, jnp.sum(keep, dtype=jnp.int32), put, targets)


def as_fields(rows: Sequence[jax.Array], like: Sequence[jax.Array]) -> list[jax.Array]:
    """Rows [N, ...] with the bytes of all fields in order, cut up as ``like``."""
    if [(x.shape[1:], x.dtype) for x in rows] == [(x.shape[1:], x.dtype) for x in like]:
        return list(rows)
    packed = jnp.concatenate([as_bytes(x) for x in rows], axis=1)
    ends = np.cumsum([row_bytes(x) for x in like])
    parts = jnp.split(packed, ends[:-1], axis=1)
    return [_from_bytes(part, x) for part, x in zip(parts, like, strict=True)]


def as_bytes(rows: jax.Array) -> jax.Array:
    """[N, ...] of any dtype -> [N, row_bytes] uint8."""
    return jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(rows.shape[0], -1)


def _from_bytes(packed: jax.Array, like: jax.Array) -> jax.Array:
    size = like.dtype.itemsize
    parts = packed.reshape(packed.shape[0], *like.shape[1:], *((size,) if size > 1 else ()))
    return jax.lax.bitcast_convert_type(parts, like.dtype)


def _check_arrays(
    targets: Sequence[jax.Array], sources: Sequence[jax.Array], target_rows: jax.Array, source_rows: jax.Array
) -> None:
    check_arrays("row_fetch", {"target_rows": (target_rows, "N", INT32), "source_rows": (source_rows, "N", INT32)})
    for side, fields in (("targets", targets), ("sources", sources)):
        check_arrays("row_fetch", {f"{side}[{i}]": (x, f"rows width_{i}", ()) for i, x in enumerate(fields)})


def _check_bytes(targets: Sequence[int], sources: Sequence[int]) -> None:
    if sum(targets) != sum(sources):
        raise ConfigError(f"row_fetch: target rows of {sum(targets)} bytes, source rows of {sum(sources)}")
    if min(len(targets), len(sources)) != 1 or max(len(targets), len(sources)) > MAX_FIELDS:
        raise ConfigError(
            f"row_fetch: {len(targets)} target and {len(sources)} source arrays; one side must be packed, and the "
            f"other in at most {MAX_FIELDS} fields"
        )


def field_obstacle(targets: list[int], sources: list[int]) -> str | None:
    """Why the Triton kernel cannot take the arguments."""
    if odd := [size for size in (*targets, *sources) if size % WORD]:
        return f"a field of {odd[0]} bytes is no multiple of {WORD}"
    return None
