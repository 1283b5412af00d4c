"""Grouped experts against one expert at a time, for routings of every shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.kernels import few_rows
from glmjax.kernels.grouped_matmul import grouped_apply
from glmjax.kernels.grouped_schedule import (
    MOST_ROWS,
    SMALL_GROUP,
    group_by_expert,
    group_by_expert_numpy,
    tile_rows,
)

EXPERTS, WIDTH = 5, 8
WEIGHTS = np.random.default_rng(0).standard_normal((EXPERTS, WIDTH, WIDTH)).astype(np.float32)


@jax.jit
def grouped(x, ids):
    weights = jnp.asarray(WEIGHTS)
    return grouped_apply(x, ids, EXPERTS, lambda experts, rows: rows @ weights[jnp.stack(experts)])


def one_by_one(x, ids):
    """Float64: every pair by itself; skipped pairs give zero."""
    out = np.einsum("td,tkde->tke", x.astype(np.float64), WEIGHTS[np.maximum(ids, 0)].astype(np.float64))
    return np.where(ids[..., None] >= 0, out, 0)


def tokens(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def assert_equals_one_by_one(ids):
    ids = np.asarray(ids, np.int32)
    x = tokens(len(ids))
    out = np.asarray(grouped(x, ids))
    assert np.abs(out - one_by_one(x, ids)).max() < 1e-5
    assert (out[ids < 0] == 0).all()


# Few sizes, so that few programs are compiled: pairs one by one, tiles of two, of four and of more rows. What varies is
# the routing.
routings = st.sampled_from([1, 7, 14, 33]).flatmap(
    lambda rows: st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=2, max_size=2), min_size=rows, max_size=rows)
)


@given(routings)
def test_equals_one_expert_at_a_time(ids):
    assert_equals_one_by_one(ids)


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_all_tokens_may_choose_one_expert(expert):
    assert_equals_one_by_one(np.full((33, 2), expert))


def test_all_pairs_may_be_skipped():
    assert_equals_one_by_one(np.full((33, 2), -1))


@pytest.mark.parametrize("first", [7, 8, 9, 15, 16, 17])
def test_group_may_end_at_the_edge_of_a_tile(first):
    pairs, tile = 50, 16
    assert tile_rows(pairs, EXPERTS) == tile
    ids = np.where(np.arange(pairs) < first, 0, 3).reshape(-1, 2)
    assert_equals_one_by_one(ids)


def test_more_pairs_than_a_tile_may_have():
    pairs = 2 * 700
    assert tile_rows(pairs, EXPERTS) < pairs / EXPERTS
    assert_equals_one_by_one(np.random.default_rng(1).integers(-1, EXPERTS, (700, 2)))


def test_rubbish_in_a_skipped_token_reaches_no_other():
    ids = np.array([[-1, -1], [0, 1], [2, -1], [4, 4], [1, 0], [3, 3], [0, 2]], np.int32)
    x = tokens(len(ids))
    expected = one_by_one(x, ids)[1:]
    x[0] = np.nan
    assert np.abs(np.asarray(grouped(x, ids))[1:] - expected).max() < 1e-5


def test_output_keeps_the_dtype_of_the_tokens():
    x = jnp.asarray(tokens(7), jnp.bfloat16)
    out = grouped_apply(x, jnp.zeros((7, 2), jnp.int32), EXPERTS, lambda e, rows: rows)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out) == np.asarray(x)[:, None]).all()


# Where pairs are put.


placed = jax.jit(group_by_expert, static_argnums=(1, 2, 3))


@given(
    st.sampled_from([1, 40]).flatmap(lambda n: st.lists(st.integers(-1, 3), min_size=n, max_size=n)),
    st.sampled_from([(1, 1), (2, 2), (8, 1)]),
)
def test_places_equal_the_twin(ids, sizes):
    ids, (tile, at_once) = np.array(ids, np.int32), sizes
    places, experts, used, most = placed(ids, 4, tile, at_once)
    assert int(most) % at_once == 0
    expected_places, expected_experts = group_by_expert_numpy(ids, 4, tile)
    assert int(used) == len(expected_experts) <= most == len(experts)
    assert np.asarray(experts)[: int(used)].tolist() == expected_experts
    assert (np.asarray(places)[ids >= 0] == expected_places[ids >= 0]).all()
    assert (np.asarray(places)[ids < 0] >= most * tile).all()


@given(st.lists(st.integers(-1, 3), max_size=60), st.integers(1, 9))
def test_twin_puts_each_pair_alone_into_a_tile_of_its_expert(ids, tile):
    ids = np.array(ids, np.int32)
    places, experts = group_by_expert_numpy(ids, 4, tile)
    taken = places[ids >= 0]
    assert len(set(taken.tolist())) == len(taken)
    assert [experts[place // tile] for place in taken] == ids[ids >= 0].tolist()


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_few_tiles_hold_a_group_larger_than_the_mean(pairs, experts):
    tile, mean = tile_rows(pairs, experts), pairs / experts
    assert tile % 8 == 0
    assert tile <= MOST_ROWS
    assert mean < -(-mean // tile) * tile <= mean + 4 * mean**0.5 + 8 * -(-mean // tile)


@given(st.integers(1, 5000), st.integers(1, 300))
def test_small_groups_have_tiles_that_are_read_in_place(pairs, experts):
    tile = tile_rows(pairs, experts, in_place=True)
    if pairs <= SMALL_GROUP * experts:
        assert tile in (2, few_rows.FEW)
    else:
        assert tile == tile_rows(pairs, experts)
