"""HiSparse's row resolver: where in a request's hot region each wanted KV row stands, and which rows to load for that.

A request keeps ``U`` rows in device memory beside its resident pages, its hot region. ``owner`` says which position
each place there holds, ``order`` which place was used least recently. All references of a step, of every verification
row, are resolved together, so that no row they want evicts another (spec/system.md section 1.6).

The jnp form is what runs on every platform. It sorts nothing: the first reference of every position is found by a
scatter with ``min`` into one scratch row of the context's length, and what is new in ``order`` is a stable partition.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Resolved[Array: (jax.Array, np.ndarray)](NamedTuple):
    """What a call found and what it changes, for R requests of C references and U hot places each.

    Attributes:
      hot: [R, C] int32, the place in the hot region for each reference, -1 where none is wanted.
      missing: [R, C] int32, positions to load, in order of their first reference; -1 after the last.
      targets: [R, C] int32, the place for each of ``missing``; -1 after the last.
      owner: [R, U] int32, the position that each place holds once they are loaded, -1 none.
      order: [R, U] int32, places from the least to the most recently used.
      hits: [R] int32, references whose row was there, or that repeat one before them in this call.
      misses: [R] int32, first references of rows that were not there.
    """

    hot: Array
    missing: Array
    targets: Array
    owner: Array
    order: Array
    hits: Array
    misses: Array


def resolve_rows(
    positions: jax.Array,
    wanted: jax.Array,
    owner: jax.Array,
    order: jax.Array,
    *,
    first_written: jax.Array | None = None,
    context: int,
) -> Resolved[jax.Array]:
    """Finds or makes room for every wanted row.

    Places whose row is referenced are hits and stay. The others, with an owner or without, are evictable in the order
    they stand in ``order``, and rows that are not there take the first of them. Afterwards ``order`` has the evictable
    places that were left, those newly loaded, and the hits, each group in the order it had.

    The caller sees to U >= C. If more rows are wanted than there are places all the same, the last of the missing by
    first reference get none: their ``hot`` is -1, they are not in ``missing``, and ``misses`` counts them.

    Args:
      positions: [R, C] int32, the references of each request, verification rows one after the other; -1 none, and so
        is any other outside of 0 to ``context`` - 1. One may stand there several times.
      wanted: [R, C] bool, the position's page is not resident.
      owner: [R, U] int32 before the call, all different but for -1.
      order: [R, U] int32 before the call, a permutation of 0 to U - 1.
      first_written: [R] int32, positions from here on are written anew by this step, or were by drafts that have been
        rejected, and so no place holds them any longer; such a place keeps its rank in ``order``. None: no position.
      context: positions are below it.
    """
    if first_written is not None:
        owner = jnp.where(owner >= first_written[:, None], -1, owner)
    return jax.vmap(functools.partial(_resolve, context=context))(positions, wanted, owner, order)


def _resolve(
    positions: jax.Array, wanted: jax.Array, owner: jax.Array, order: jax.Array, *, context: int
) -> Resolved[jax.Array]:
    """One request: [C], [C], [U] and [U]."""
    (C,), (U,) = positions.shape, owner.shape
    reference, place = jnp.arange(C, dtype=jnp.int32), jnp.arange(U, dtype=jnp.int32)
    wanted = wanted & (positions >= 0) & (positions < context)
    first = jnp.full(context, C, jnp.int32).at[jnp.where(wanted, positions, context)].min(reference, mode="drop")
    mine = jnp.where(wanted, _at(first, positions), C)  # [C], each reference's first one
    hit = jnp.where((owner >= 0) & (owner < context), _at(first, owner), C)  # [U], first reference of the row it holds
    found = _scatter(hit, place, size=C, keep=hit < C)  # [C], its place at the first reference of each row

    is_miss = (mine == reference) & (found < 0)
    rank = _running_count(is_miss) - 1  # among the missing
    num_missing = jnp.sum(is_miss, dtype=jnp.int32)

    stays = _at(hit, order) < C  # [U], in order
    stay = _running_count(stays)
    num_free = U - stay[-1]
    num_new = jnp.minimum(num_missing, num_free)
    free = place - stay  # rank among the evictable, where it is one
    moved = jnp.where(free < num_new, num_free - num_new, -num_new) + free
    new_order = _scatter(jnp.where(stays, num_free + stay - 1, moved), order, size=U)

    is_new = is_miss & (rank < num_new)
    new = jnp.where(is_new, _at(new_order, num_free - num_new + rank), -1)  # [C], the place to load the row into
    here = jnp.where(is_new, new, found)  # as ``found``, with what is loaded
    loaded = reference < num_new
    missing = _scatter(rank, positions, size=C, keep=is_new)
    targets = jnp.where(loaded, _at(new_order, num_free - num_new + reference), -1)
    owner = owner.at[_distinct(new, is_new, U)].set(positions, mode="drop", unique_indices=True)
    return Resolved(
        hot=jnp.where(wanted, _at(here, mine), -1),
        missing=missing,
        targets=targets,
        owner=owner,
        order=new_order,
        hits=jnp.sum(wanted, dtype=jnp.int32) - num_missing,
        misses=num_missing,
    )


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index]; any entry of ``x`` where the index is not one of its own."""
    return x.at[index].get(mode="clip")


def _scatter(index: jax.Array, values: jax.Array, *, size: int, keep: jax.Array | None = None) -> jax.Array:
    """[size] with the kept values at their indices, all different, and -1 elsewhere."""
    if keep is not None:
        index = _distinct(index, keep, size)
    return jnp.full(size, -1, jnp.int32).at[index].set(values, mode="drop", unique_indices=True)


def _distinct(index: jax.Array, keep: jax.Array, size: int) -> jax.Array:
    """The indices to be kept; instead of each other one of its own beyond ``size``, for the scatter to drop."""
    return jnp.where(keep, index, size + jnp.arange(index.shape[0], dtype=jnp.int32))


def _running_count(mask: jax.Array) -> jax.Array:
    return jnp.cumsum(mask, dtype=jnp.int32)


def resolve_rows_numpy(
    positions: np.ndarray,
    wanted: np.ndarray,
    owner: np.ndarray,
    order: np.ndarray,
    *,
    first_written: np.ndarray | None = None,
    context: int,
) -> Resolved[np.ndarray]:
    """NumPy twin, one row at a time: what ``resolve_rows`` must give bit for bit."""
    R, C = positions.shape
    hot, missing, targets = (np.full((R, C), -1, np.int32) for _ in range(3))
    new_owner, new_order = owner.copy(), order.copy()
    hits, misses = np.zeros(R, np.int32), np.zeros(R, np.int32)
    for r in range(R):
        if first_written is not None:
            new_owner[r, new_owner[r] >= first_written[r]] = -1
        references = [(c, int(p)) for c, p in enumerate(positions[r]) if wanted[r, c] and 0 <= p < context]
        union = {p for _, p in references}
        place_of = {int(p): u for u, p in enumerate(new_owner[r]) if int(p) in union}
        stays = set(place_of.values())
        old = [int(u) for u in order[r]]
        evictable = [u for u in old if u not in stays]
        loaded: list[int] = []
        seen: set[int] = set()
        for c, p in references:
            if p in seen or p in place_of:
                hits[r] += 1
            else:
                misses[r] += 1
                if len(loaded) < len(evictable):
                    place = evictable[len(loaded)]
                    missing[r, len(loaded)], targets[r, len(loaded)] = p, place
                    loaded.append(place)
                    place_of[p] = place
                    new_owner[r, place] = p
            seen.add(p)
            hot[r, c] = place_of.get(p, -1)
        new_order[r] = [*evictable[len(loaded) :], *loaded, *(u for u in old if u in stays)]
    return Resolved(hot, missing, targets, new_owner, new_order, hits, misses)
