"""Rows of several layers between a pool in pinned host memory and the device: HiSparse's copies.

A pool is one of two things. An array in JAX's host memory space is what XLA knows, on every platform: rows are gathered
by a computation on the host and sent, pages are written where they are. ``HostRows`` is an address, and the GPU reads
rows from there itself, without the host (``glmjax.kernels.row_fetch_triton``).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on

from glmjax.errors import ConfigError
from glmjax.kernels.choose import Implementation
from glmjax.kernels.row_fetch import row_fetch
from glmjax.kernels.row_format import HostRows

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def host_rows(
    pool: jax.Array | HostRows,
    layer: int | jax.Array,
    count: int,
    slots: jax.Array,
    *,
    slots_per_layer: int | None = None,
    stream: int | None = None,
    implementation: Literal["auto", "xla", "address"] = "auto",
) -> jax.Array:
    """The rows in some slots of ``count`` layers that follow one another.

    Args:
      pool: [L, S, row_bytes] uint8 in host memory, or the address of such a pool.
      layer: the first layer, a number or an int32 scalar.
      count: layers.
      slots: [M] int32, the same in each layer; -1 for a row of zeros.
      slots_per_layer: S of a pool given by address, and only of that.
      stream: a GPU stream of its own, 1 or more, for the kernel that reads from an address: it then runs beside what
        does not depend on it. What XLA reads from an array runs beside the rest in any case.
      implementation: "xla" for an array, "address" for an address, "auto" for what the pool is.

    Returns:
      [count, M, row_bytes] uint8 on the device.

    Raises:
      ConfigError: the implementation is unknown or not for such a pool, what goes with an address is given with an
        array or ``slots_per_layer`` is missing, an array is not in host memory, or "auto" finds an address where no
        GPU could read from it.
    """
    if implementation not in ("auto", "xla", "address"):
        raise ConfigError(f"implementation={implementation!r} of host_rows: give 'auto', 'xla' or 'address'")
    layers = layer + jnp.arange(count, dtype=jnp.int32)[:, None]
    if isinstance(pool, HostRows):
        if implementation == "xla" or slots_per_layer is None:
            raise ConfigError(
                "host_rows: a pool given by address (HostRows) goes with implementation='address' and slots_per_layer; "
                f"given {implementation=}, {slots_per_layer=}"
            )
        rows = jnp.where(slots >= 0, layers * slots_per_layer + slots, -1).reshape(-1)
        found = _read(pool, rows, stream, insist=implementation == "address")
        return found.reshape(count, slots.shape[0], pool.row_bytes)
    if implementation == "address" or slots_per_layer is not None or stream is not None:
        raise ConfigError(
            "host_rows: a pool given as an array goes with implementation='xla', and without what an address needs; "
            f"given {implementation=}, {slots_per_layer=}, {stream=}. To read by address give HostRows"
        )
    _check_host("host_rows", pool)
    # Indices are ready before they go to the host: constants of a computation there count as on the device.
    there = jax.device_put(_take(pool, *jax.device_put((layers, jnp.maximum(slots, 0)[None]), HOST)), DEVICE)
    return jnp.where((slots >= 0)[None, :, None], there, jnp.uint8(0))


def _read(pool: HostRows, rows: jax.Array, stream: int | None, *, insist: bool) -> jax.Array:
    """Rows [N] of a pool, zeros for -1, as [N, row_bytes]."""
    implementation: Implementation = "triton" if insist else "auto"

    def fetch(pool: HostRows, targets: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((rows.shape[0], pool.row_bytes), jnp.uint8)
        fetched = row_fetch(zeros, pool, targets, rows, implementation=implementation)
        assert isinstance(fetched, jax.Array)  # as the target is
        return fetched

    if stream is not None:
        # The zeros belong in there and the indices do not. XLA copies no argument that such a call writes to, not even
        # one that two calls share, as equal zeros would be; and it gives fusions in there names that ptxas refuses.
        fetch = compute_on(compute_type=f"gpu_stream:{stream}", out_memory_spaces=DEVICE)(fetch)
    return fetch(pool, jnp.arange(rows.shape[0], dtype=jnp.int32), rows)


@compute_on(compute_type="device_host", out_memory_spaces=HOST)
def _take(pool: jax.Array, layers: jax.Array, slots: jax.Array) -> jax.Array:
    return pool.at[layers, slots].get(mode="promise_in_bounds", wrap_negative_indices=False)


def write_pages(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes whole pages of every layer, in place where the pool is donated.

    No computation on the host does it, since on a GPU that would return another pool, but one slice update for each
    page from the device. A pool that ``jax.device_put`` left in NumPy's memory is copied once: make it by a program.

    Args:
      pool: [L, S, row_bytes] uint8 in host memory.
      rows: [L, P, page, row_bytes] uint8 on the device.
      slots: [P] int32, the first slot of each page; -1 drops it. Pages do not overlap, nor end beyond S.

    Returns:
      the pool, in host memory. ``jax.jit`` has to be told of it: ``out_shardings`` with a ``memory_kind`` of
      "pinned_host".

    Raises:
      ConfigError: the pool is not in host memory.
    """
    _check_host("write_pages", pool)
    (kept,) = jnp.nonzero(slots >= 0, size=slots.shape[0], fill_value=0)

    def put(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(rows, kept[i], axis=1, keepdims=False)
        return jax.lax.dynamic_update_slice(pool, jax.device_put(page, HOST), (0, slots[kept[i]], 0))

    return jax.lax.fori_loop(0, jnp.sum(slots >= 0, dtype=jnp.int32), put, pool)


def _check_host(operation: str, pool: jax.Array) -> None:
    if (space := jax.typeof(pool).memory_space) != HOST:
        raise ConfigError(
            f"{operation}: a pool in memory space {space.name}, and not in host memory. Place it with a NamedSharding "
            "of memory_kind='pinned_host'"
        )
