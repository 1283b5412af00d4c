"""Index scores against their float64 twin, by either form, and what the mask keeps out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.kernels import kv_rows
from glmjax.kernels.index_scores import index_scores, index_scores_numpy

HEADS, DIM, CONTEXT = 8, 16, 130
QUERIES = [1, 5]  # all heads at once, and head by head

EVERY = jnp.arange(CONTEXT)  # positions of the keys

scored = jax.jit(index_scores)


def inputs(queries, requests=2, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((requests, queries, HEADS, DIM)).astype(np.float32)
    weights = rng.standard_normal((requests, queries, HEADS)).astype(np.float32)
    keys = rng.standard_normal((requests, CONTEXT, DIM)).astype(np.float32)
    return query, weights, keys


def twin(query, weights, keys, positions):
    return np.stack([index_scores_numpy(*one) for one in zip(query, weights, keys, positions, strict=True)])


def assert_close(actual, expected):
    """The same entries masked, and the rest within float32's rounding of a sum of products."""
    actual = np.asarray(actual)
    assert (np.isneginf(actual) == np.isneginf(expected)).all()
    seen = np.isfinite(expected)
    assert np.abs(actual[seen] - expected[seen]).max(initial=0) < 1e-4


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("last", [-1, 0, 1, 63, 64, 65, CONTEXT - 1])
def test_equals_float64_up_to_the_query(queries, last):
    query, weights, keys = inputs(queries)
    positions = np.maximum(last - np.arange(queries)[::-1], -1) + np.zeros((2, 1), int)
    actual = scored(query, weights, keys, None, jnp.asarray(positions, jnp.int32), EVERY)
    assert_close(actual, twin(query, weights, keys, positions))


@pytest.mark.parametrize("queries", QUERIES)
def test_chunk_equals_its_part_of_the_whole(queries):
    query, weights, keys = inputs(queries)
    positions = np.array([[100], [64]]) + np.arange(queries)
    first = 64
    places = jnp.arange(first, keys.shape[1])
    part = scored(query, weights, keys[:, first:], None, jnp.asarray(positions, jnp.int32), places)
    assert_close(part, twin(query, weights, keys, positions)[:, :, first:])


@pytest.mark.parametrize("queries", QUERIES)
def test_key_scale_multiplies_the_score(queries):
    query, weights, keys = inputs(queries)
    stored, scale = kv_rows.quantize_index_key(jnp.asarray(keys))
    positions = np.full((2, queries), CONTEXT - 1)
    actual = scored(query, weights, stored, scale, jnp.asarray(positions, jnp.int32), EVERY)
    restored = np.asarray(stored, np.float64) * np.asarray(scale, np.float64)[..., None]
    assert_close(actual, twin(query, weights, restored, positions))


@pytest.mark.parametrize("queries", QUERIES)
def test_fp8_error_is_that_of_the_format(queries):
    """Against the scores of what queries and keys were before they were rounded, by 2^-4 of themselves at most."""
    exact = inputs(queries)
    query, weights, keys = exact
    (query, query_error), (keys, key_error) = map(rounded, (query, keys))
    positions = np.full((2, queries), CONTEXT - 1)
    actual = scored(query, weights, keys, None, jnp.asarray(positions, jnp.int32), EVERY)
    of_query = np.einsum("rqhd,rsd->rqhs", query_error, np.abs(exact[2]) + key_error)
    of_keys = np.einsum("rqhd,rsd->rqhs", np.abs(exact[0]), key_error)
    bound = np.einsum("rqhs,rqh->rqs", of_query + of_keys, np.abs(weights))
    assert (np.abs(actual - twin(*exact, positions)) <= bound).all()


def rounded(x):
    """x as FP8 holds it, and the most that it may be off by: half a step, of numbers or of denormals."""
    values, scale = (np.asarray(y, np.float32) for y in kv_rows.quantize_index_key(jnp.asarray(x)))
    return values * scale[..., None], np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * scale[..., None]) + 1e-7


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_keys_after_the_query_leave_no_trace(queries, rubbish):
    query, weights, keys = inputs(queries)
    positions = np.full((2, queries), 40)
    expected = twin(query, weights, keys, positions)
    keys[:, 41:] = rubbish
    actual = scored(query, weights, keys, None, jnp.asarray(positions, jnp.int32), EVERY)
    assert_close(actual, expected)


@pytest.mark.parametrize("queries", QUERIES)
def test_no_positive_product_scores_exactly_zero(queries):
    query, weights, keys = inputs(queries)
    positions = jnp.full((2, queries), CONTEXT - 1, jnp.int32)
    actual = np.asarray(scored(np.abs(query), weights, -np.abs(keys), None, positions, EVERY))
    assert (actual == 0).all()


@pytest.mark.parametrize("queries", QUERIES)
def test_request_does_not_see_its_neighbour(queries):
    query, weights, keys = inputs(queries, requests=3)
    positions = jnp.asarray(np.array([[5], [90], [129]]) + np.zeros(queries, int), jnp.int32)
    together = np.asarray(scored(query, weights, keys, None, positions, EVERY))
    for r in range(3):
        one = slice(r, r + 1)
        alone = scored(query[one], weights[one], keys[one], None, positions[one], EVERY)
        assert_close(together[one], np.asarray(alone))
