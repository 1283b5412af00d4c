"""The row resolver: its rules by example, against its NumPy twin over sequences of calls, and against LRU lists."""

import functools
from collections import OrderedDict

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from h200_code import needs_plugin
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from glmjax.kernel_report import h200_mesh
from glmjax.kernels.resolve_rows import Resolved, resolve_rows, resolve_rows_numpy
from glmjax.sharding.aot import compile_for_h200

SHAPES = [(1, 1, 1, 5), (1, 6, 6, 12), (2, 8, 12, 40), (3, 12, 12, 24), (4, 6, 9, 10)]  # R, C, U, context
TOO_SMALL = [(1, 6, 2, 12), (2, 8, 1, 40), (3, 12, 7, 24)]

resolve = jax.jit(resolve_rows, static_argnames="context")


def one(positions, owner, order=None, *, wanted=None, first_written=None, context=100):
    """Both forms on one request, which must agree: fields without their first axis, as lists."""
    order = range(len(owner)) if order is None else order
    wanted = [True] * len(positions) if wanted is None else wanted
    arguments = [np.asarray([x], dtype) for x, dtype in ((positions, np.int32), (wanted, bool))]
    arguments += [np.asarray([list(x)], np.int32) for x in (owner, order)]
    written = None if first_written is None else np.asarray([first_written], np.int32)
    twin = resolve_rows_numpy(*arguments, first_written=written, context=context)
    check_equal(resolve(*arguments, first_written=written, context=context), twin)
    return Resolved(*(np.asarray(x)[0].tolist() for x in twin))


def check_equal(found, twin):
    for name, x, y in zip(Resolved._fields, found, twin, strict=True):
        assert x.dtype == y.dtype == np.int32, name
        assert x.shape == y.shape and (np.asarray(x) == y).all(), (name, x, y)


def test_rows_that_are_not_there_take_the_oldest_places():
    r = one([7, 9], [-1, 3, 4, -1], [1, 0, 2, 3])
    assert r.hot == [1, 0] and r.missing == [7, 9] and r.targets == [1, 0]
    assert r.owner == [9, 7, 4, -1]
    assert r.order == [2, 3, 1, 0]
    assert (r.hits, r.misses) == (0, 2)


def test_rows_that_are_there_stay_and_become_the_newest_in_their_old_order():
    r = one([5, 3], [3, 4, 5, 6], [2, 1, 0, 3])
    assert r.hot == [2, 0] and r.missing == r.targets == [-1, -1]
    assert r.owner == [3, 4, 5, 6]
    assert r.order == [1, 3, 2, 0]
    assert (r.hits, r.misses) == (2, 0)


def test_a_wanted_row_is_not_evicted_for_another_however_old():
    r = one([9, 3], [3, 4, 5], [0, 1, 2])
    assert r.hot == [1, 0] and r.missing == [9, -1] and r.targets == [1, -1]
    assert r.owner == [3, 9, 5] and r.order == [2, 1, 0]


def test_repeats_share_one_place_and_count_as_hits():
    r = one([8, 3, 8, 3, 8], [3, -1, -1, -1, -1])
    assert r.hot == [1, 0, 1, 0, 1] and r.missing == [8, -1, -1, -1, -1]
    assert (r.hits, r.misses) == (4, 1)


def test_what_is_not_wanted_or_no_position_takes_part_in_nothing():
    r = one([8, -1, 100, -7, 2**31 - 1, 3], [3, 4, -1, -1, -1, -1], wanted=[False, True, True, True, True, False])
    assert r.hot == r.missing == r.targets == [-1] * 6
    assert r.owner == [3, 4, -1, -1, -1, -1] and r.order == list(range(6))
    assert (r.hits, r.misses) == (0, 0)


def test_first_reference_counts_only_where_it_is_wanted():
    r = one([8, 9, 8], [-1] * 3, wanted=[False, True, True])
    assert r.hot == [-1, 0, 1] and r.missing == [9, 8, -1]


def test_rewritten_positions_are_no_longer_there_and_their_places_keep_their_rank():
    r = one([5, 9], [3, 5, 6, 4], [0, 1, 2, 3], first_written=5)
    assert r.hot == [0, 1] and r.missing == [5, 9] and r.targets == [0, 1]
    assert r.owner == [5, 9, -1, 4]
    assert r.order == [2, 3, 0, 1]
    assert one([], [3, 5, 6, 4], [3, 2, 1, 0], first_written=5)[3:5] == ([3, -1, -1, 4], [3, 2, 1, 0])


def test_more_rows_than_places():
    r = one([3, 7, 8, 9, 8, 9], [3, 4, 5], [0, 1, 2])
    assert r.hot == [0, 1, 2, -1, 2, -1]
    assert r.missing == [7, 8, -1, -1, -1, -1] and r.targets == [1, 2, -1, -1, -1, -1]
    assert r.owner == [3, 7, 8] and r.order == [1, 2, 0]
    assert (r.hits, r.misses) == (3, 3)


def references(shape):
    """Steps for a shape: references with duplicates, -1 and others out of range; which are wanted; what is written."""
    R, C, _, context = shape
    positions = hnp.arrays(np.int32, (R, C), elements=st.integers(-2, context + 1))
    some = hnp.arrays(bool, (R, C))
    wanted = st.one_of(some, st.booleans().map(lambda all_or_none: np.full((R, C), all_or_none)))
    written = hnp.arrays(np.int32, R, elements=st.integers(0, context))
    nothing = st.just(np.full(R, context, np.int32))
    return st.lists(st.tuples(positions, wanted, st.one_of(nothing, nothing, written)), min_size=1, max_size=6)


def steps_of(shapes):
    return st.sampled_from(shapes).flatmap(lambda shape: st.tuples(st.just(shape), references(shape), st.randoms()))


def start(shape, random):
    R, _, U, _ = shape
    return np.full((R, U), -1, np.int32), np.array([random.sample(range(U), U) for _ in range(R)], np.int32)


@given(steps_of(SHAPES + TOO_SMALL))
def test_equals_the_twin_over_sequences_of_calls(example):
    shape, steps, random = example
    owner, order = start(shape, random)
    for positions, wanted, written in steps:
        arguments = (positions, wanted, owner, order)
        found = resolve(*arguments, first_written=written, context=shape[3])
        twin = resolve_rows_numpy(*arguments, first_written=written, context=shape[3])
        check_equal(found, twin)
        if shape in (SHAPES[0], TOO_SMALL[0]) and (written == shape[3]).all():  # other programs
            check_equal(resolve(*arguments, context=shape[3]), twin)
        owner, order = twin.owner, twin.order


@given(steps_of(SHAPES))
def test_laws(example):
    """What attention and the copies rely on, whatever came before."""
    shape, steps, random = example
    R, _, U, context = shape
    owner, order = start(shape, random)
    for positions, wanted, written in steps:
        found = resolve(positions, wanted, owner, order, first_written=written, context=context)
        found = Resolved(*map(np.asarray, found))
        asked = wanted & (positions >= 0) & (positions < context)
        for r in range(R):
            hot, at = found.hot[r], asked[r]
            assert (hot[~at] == -1).all() and (hot[at] >= 0).all()
            assert (found.owner[r][hot[at]] == positions[r][at]).all()
            count = int(found.misses[r])
            missing, targets = found.missing[r], found.targets[r]
            assert (missing[:count] >= 0).all() and (missing[count:] == -1).all() and (targets[count:] == -1).all()
            assert len(set(missing[:count])) == len(set(targets[:count])) == count
            assert (found.owner[r][targets[:count]] == missing[:count]).all()
            kept = np.setdiff1d(np.arange(U), targets[:count])
            valid = np.where(owner[r] >= written[r], -1, owner[r])
            assert (found.owner[r][kept] == valid[kept]).all()
            assert not np.isin(missing[:count], valid).any()
            assert sorted(found.order[r]) == list(range(U))
            held = found.owner[r][found.owner[r] >= 0]
            assert len(set(held)) == len(held)
            assert found.hits[r] + found.misses[r] == at.sum()
        owner, order = found.owner, found.order


@given(
    st.sampled_from([(4, 4), (4, 7)]),
    st.lists(st.lists(st.integers(0, 11), min_size=4, max_size=4), min_size=1, max_size=12),
)
def test_recency_is_that_of_a_list_of_rows(sizes, calls):
    """An independent model without places: rows from the oldest to the newest, of which the oldest are dropped."""
    C, U = sizes
    owner, order = np.full((1, U), -1, np.int32), np.arange(U, dtype=np.int32)[None, ::-1]
    rows = OrderedDict()
    for call in calls:
        union = dict.fromkeys(call)
        new = [p for p in union if p not in rows]
        hits = [p for p in rows if p in union]
        stale = [p for p in rows if p not in union]
        stale = stale[max(0, len(rows) + len(new) - U) :]
        rows = OrderedDict.fromkeys([*stale, *new, *hits])
        found = resolve(np.array([call], np.int32), np.ones((1, C), bool), owner, order, context=12)
        owner, order = np.asarray(found.owner), np.asarray(found.order)
        assert [p for p in owner[0][order[0]] if p >= 0] == list(rows)
        assert [p for p in np.asarray(found.missing)[0] if p >= 0] == new


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_one_reference_a_call_is_a_textbook_lru_cache(calls):
    owner, order = np.full((1, 3), -1, np.int32), np.arange(3, dtype=np.int32)[None]
    cache = OrderedDict()
    for p in calls:
        is_hit = p in cache
        cache[p] = True
        cache.move_to_end(p)
        if len(cache) > 3:
            cache.popitem(last=False)
        found = resolve(np.array([[p]], np.int32), np.ones((1, 1), bool), owner, order, context=8)
        owner, order = np.asarray(found.owner), np.asarray(found.order)
        assert (int(found.hits[0]), int(found.misses[0])) == (is_hit, not is_hit)
        assert [q for q in owner[0][order[0]] if q >= 0] == list(cache)


def random_calls(steps, R, C, U, context, seed=0):
    rng = np.random.default_rng(seed)
    positions = rng.integers(-1, context, (steps, R, C)).astype(np.int32)
    wanted = rng.random((steps, R, C)) < 0.8
    state = np.full((R, U), -1, np.int32), np.tile(np.arange(U, dtype=np.int32), (R, 1))
    return positions, wanted, rng.integers(context // 2, context + 1, (steps, R)).astype(np.int32), state


def test_in_a_scan_in_a_shard_map():
    positions, wanted, written, state = random_calls(5, 8, 32, 40, 100)
    twins = []
    owner, order = state
    for p, w, f in zip(positions, wanted, written, strict=True):
        twins.append(resolve_rows_numpy(p, w, owner, order, first_written=f, context=100))
        owner, order = twins[-1].owner, twins[-1].order

    def step(state, call):
        found = resolve_rows(call[0], call[1], *state, first_written=call[2], context=100)
        return (found.owner, found.order), found

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    calls = jax.shard_map(
        lambda state, *calls: jax.lax.scan(step, state, calls)[1],
        mesh=mesh,
        in_specs=(P("x"), *[P(None, "x")] * 3),
        out_specs=P(None, "x"),
    )
    found = jax.jit(calls)(state, positions, wanted, written)
    check_equal(found, [np.stack(x) for x in zip(*twins, strict=True)])


def test_large():
    positions, wanted, written, state = random_calls(2, 2, 8192, 10240, 131072)
    for p, w, f in zip(positions, wanted, written, strict=True):
        twin = resolve_rows_numpy(p, w, *state, first_written=f, context=131072)
        check_equal(resolve(p, w, *state, first_written=f, context=131072), twin)
        state = twin.owner, twin.order


@needs_plugin
def test_nothing_is_sorted_on_an_h200():
    mesh = h200_mesh()
    place = jax.sharding.NamedSharding(mesh, P())
    R, C, U, context = 16, 8192, 10240, 131072
    dims = [((R, C), jnp.int32), ((R, C), jnp.bool), ((R, U), jnp.int32), ((R, U), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in dims]
    program = compile_for_h200(functools.partial(resolve_rows, context=context), *arguments, mesh=mesh, donate=(2, 3))
    assert " sort(" not in program.hlo and "while(" not in program.hlo
    assert program.memory.temporaries < 4 * R * (2 * context + 4 * (C + U))
