"""Two ways to bring tokens to experts that are spread over all devices, and their results back.

``gather_dispatch`` brings every token to every device: static shapes, any backend. ``ragged_dispatch`` sends a token to
the devices that have an expert it chose, once to each, whatever the number of its experts there: fewer bytes, but XLA
has that exchange for GPUs only. Neither drops a token, whatever the routing.

The index maths gives NumPy arrays for NumPy arrays, as in ``glmjax.sharding.cp``. Letters: W devices, T tokens of one
of them, k choices of a token, D the model's width. Source: spec/jax.md section 3; ``jax.lax.ragged_all_to_all``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glmjax.sharding.collectives import Collectives
from glmjax.sharding.cp import array_namespace

# (tokens [N, D], expert ids [N, k] of all experts or -1, weights [N, k] float32) -> [N, D] float32, the weighted sum of
# what this device's experts make of each token.
Experts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Exchange = Callable[..., jax.Array]  # takes what jax.lax.ragged_all_to_all takes


def gather_dispatch(
    experts: Experts, collectives: Collectives, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """All tokens to every device by all-gather, their results back by reduce-scatter, in x's dtype.

    Args:
      x: [T, D] tokens, alike on the devices along the tensor axes.
      ids, weights: [T, k] int32 and float32; an id of -1 chooses nothing.

    Returns:
      [T, D] in x's dtype, whose sum over the tensor axes is the sum over all experts.
    """
    layout = collectives.layout
    axes = layout.token_axes if layout.expert_axes else ()
    out = experts(*(collectives.all_gather(y, axes, 0) for y in (x, ids, weights)))
    return collectives.reduce_scatter(out.astype(x.dtype), axes, 0)


def ragged_dispatch(
    experts: Experts,
    collectives: Collectives,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    experts_per_device: int,
    exchange: Exchange = jax.lax.ragged_all_to_all,
) -> jax.Array:
    """Each token to the devices of its experts, their sums back, by one ragged all-to-all each way.

    The devices along the tensor axes hold the same tokens, so each of them sends its own part. An all-gather of the
    routing, 8 k bytes a token, comes first: everyone's counts and places follow from it, and weights need no other way.
    On eight devices an even top-8 of 256 sends a token to 4.6 of the 7 others. Where tp is all devices, all tokens are
    everywhere already: there ``gather_dispatch`` exchanges nothing and is the better choice.

    The buffer for received rows has room for every token of all devices, that for returned ones for min(k, W) rows of
    each own token: what the worst routing needs. For 2,048 tokens of 6,144 bfloat16 on eight devices either is 24 MiB,
    as much as ``gather_dispatch`` gathers. Sums travel in x's dtype.

    Args and returns: as ``gather_dispatch``, with
      experts_per_device: device i of the expert axes has those from i * experts_per_device on.
      exchange: ``jax.lax.ragged_all_to_all``, or what stands in for it where XLA has none.
    """
    layout, tokens = collectives.layout, len(x)
    axes, W = layout.expert_axes, layout.num_devices
    rank = collectives.rank(axes)
    x, ids, weights = _own_part(collectives, x, 0), _own_part(collectives, ids, -1), _own_part(collectives, weights, 0)
    (T, D), k = x.shape, ids.shape[1]

    routing = jnp.concatenate([ids, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    routing = collectives.all_gather(routing, axes, 0)  # [W * T, 2k]
    wanted = wanted_devices(routing[:, :k], experts_per_device, W).reshape(W, T, W)  # [from, token, to]
    counts = jnp.sum(wanted, axis=1, dtype=jnp.int32)

    def send(rows: jax.Array, counts: jax.Array, room: int) -> jax.Array:
        return exchange(rows, jnp.zeros((room, D), rows.dtype), *ragged_slices(counts, rank), axis_name=axes)

    outgoing = true_places(wanted[rank].T, room=T * min(k, W)) % T  # of places [to, token], their token
    incoming = true_places(wanted[:, :, rank], room=W * T)  # in the routing of all
    received = send(x[outgoing], counts, W * T)
    received_ids = jnp.where(incoming[:, None] >= 0, routing[incoming, :k], -1)
    received_weights = jax.lax.bitcast_convert_type(routing[incoming, k:], jnp.float32)
    sums = experts(received, received_ids, received_weights).astype(x.dtype)
    returned = send(sums, counts.T, len(outgoing))

    place = row_places(ids, experts_per_device, W)
    place = jnp.where(place >= 0, place, len(returned))
    out = jnp.sum(returned.at[place].get(mode="fill", fill_value=0), axis=1, dtype=jnp.float32).astype(x.dtype)
    # Zeros elsewhere, so that the sum over the tensor axes, which the shared experts need anyway, makes it whole.
    whole = jnp.zeros((T * layout.tp, D), x.dtype)
    start = jnp.asarray(collectives.rank(layout.tensor_axes)) * T
    return jax.lax.dynamic_update_slice_in_dim(whole, out, start, axis=0)[:tokens]


def _own_part(collectives: Collectives, x: jax.Array, padding: int) -> jax.Array:
    """This device's part of rows that all devices along the tensor axes hold, padded to equal parts."""
    missing = -len(x) % collectives.layout.tp
    x = jnp.pad(x, ((0, missing), (0, 0)), constant_values=padding)
    return collectives.part(x, collectives.layout.tensor_axes, 0)


class RaggedSlices(NamedTuple):
    """What a device tells ``jax.lax.ragged_all_to_all``, in its order; all [W] int32.

    Attributes:
      input_offsets, send_sizes: the slice of its own rows for each device.
      output_offsets: where that slice starts in the receiver's buffer.
      recv_sizes: rows that it gets from each device.
    """

    input_offsets: jax.Array | np.ndarray
    send_sizes: jax.Array | np.ndarray
    output_offsets: jax.Array | np.ndarray
    recv_sizes: jax.Array | np.ndarray


def ragged_slices(counts: jax.Array | np.ndarray, rank: jax.Array | int) -> RaggedSlices:
    """One device's slices where rows lie without gaps, by receiver before they are sent and by sender after.

    Args:
      counts: [W, W] int32: rows from each device (first axis) to each. Transposed it is the way back.
      rank: scalar.
    """
    xp = array_namespace(counts)
    before = xp.cumsum(counts, axis=1, dtype=xp.int32) - counts  # rows of the same sender for earlier receivers
    above = xp.cumsum(counts, axis=0, dtype=xp.int32) - counts  # rows for the same receiver from earlier senders
    return RaggedSlices(before[rank], counts[rank], above[rank], counts[:, rank])


def wanted_devices[A: (jax.Array, np.ndarray)](ids: A, experts_per_device: int, devices: int) -> A:
    """The devices that have an expert which a token chose.

    Args:
      ids: [..., k] int32, -1 for no choice.

    Returns:
      [..., devices] bool.
    """
    xp = array_namespace(ids)
    device = ids[..., None] // experts_per_device  # rounds down: -1 stays -1
    return xp.any(device == xp.arange(devices, dtype=xp.int32), axis=-2)


def row_places[A: (jax.Array, np.ndarray)](ids: A, experts_per_device: int, devices: int) -> A:
    """Where the row that carries a choice stands among the rows that a device sends, by receiver and then by token.

    Args:
      ids: [T, k] int32, -1 for no choice.

    Returns:
      [T, k] int32; -1 for no choice, and where an earlier choice of the token has the same row.
    """
    xp = array_namespace(ids)
    wanted = wanted_devices(ids, experts_per_device, devices).T  # [to, token]
    places = xp.cumsum(wanted.reshape(-1), dtype=xp.int32).reshape(wanted.shape) - 1
    device = ids // experts_per_device
    earlier = xp.tri(ids.shape[1], k=-1, dtype=bool)
    repeated = xp.any((device[:, :, None] == device[:, None, :]) & earlier, axis=-1)
    return xp.where((ids >= 0) & ~repeated, xp.take_along_axis(places.T, xp.maximum(device, 0), axis=1), -1)


def true_places[A: (jax.Array, np.ndarray)](mask: A, room: int) -> A:
    """Flat places of the true entries of a mask of any shape, ascending: [room] int32, -1 after the last."""
    if isinstance(mask, jax.Array):
        return jnp.flatnonzero(mask, size=room, fill_value=-1).astype(jnp.int32)
    found = np.flatnonzero(mask).astype(np.int32)
    return np.pad(found, (0, room - len(found)), constant_values=-1)
