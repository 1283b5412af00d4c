"""Sparse MLA against float64 softmax over the selected rows, and the union of partial attentions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.kernels import few_rows
from glmjax.kernels import sparse_mla as kernel
from glmjax.kernels.sparse_mla import merge_by_lse, sparse_mla

HEADS, LATENT, ROPE, POOL, SCALE = 3, 16, 8, 300, 0.25
TOLERANCE = 1e-5


def random_pool(seed=0):
    rng = np.random.default_rng(seed)
    shape = rng.standard_normal((POOL, LATENT)), rng.standard_normal((POOL, ROPE))
    return tuple(x.astype(np.float32) for x in shape)


def random_queries(tokens, seed=1):
    rng = np.random.default_rng(seed)
    shape = rng.standard_normal((tokens, HEADS, LATENT)), rng.standard_normal((tokens, HEADS, ROPE))
    return tuple(x.astype(np.float32) for x in shape)


def random_rows(lengths, k, seed=2):
    """[T, K]: the first ``lengths[t]`` entries name different rows of the pool."""
    rng = np.random.default_rng(seed)
    rows = np.full((len(lengths), k), -1, np.int32)
    for t, length in enumerate(lengths):
        rows[t, :length] = rng.permutation(POOL)[:length]
    return rows


@functools.cache
def compiled(row_chunk=kernel.ROW_CHUNK, tile_elements=kernel.TILE_ELEMENTS):
    """The kernel with other chunk and tile sizes, so that small inputs take every path."""

    def attend(queries, rows, pool):
        before = kernel.ROW_CHUNK, kernel.TILE_ELEMENTS
        kernel.ROW_CHUNK, kernel.TILE_ELEMENTS = row_chunk, tile_elements
        try:
            return sparse_mla(
                *queries, rows, lambda slots: tuple(x[slots] for x in pool), scale=SCALE, latent_dim=LATENT
            )
        finally:
            kernel.ROW_CHUNK, kernel.TILE_ELEMENTS = before

    return jax.jit(attend)


# One pass; chunks of rows; tiles of two queries; both.
PATHS = {"whole": {}, "chunks": {"row_chunk": 64}, "tiles": {"tile_elements": 1}}
PATHS["tiles of chunks"] = {"row_chunk": 64, "tile_elements": 64 * (LATENT + ROPE) * 2}


def sparse_mla_numpy(queries, rows, pool):
    """Float64 twin: a softmax over the rows that are selected."""
    (latent_query, rope_query), (latent, rope) = ([x.astype(np.float64) for x in pair] for pair in (queries, pool))
    out = np.zeros(latent_query.shape)
    lse = np.full(latent_query.shape[:2], -np.inf)
    for t, row in enumerate(rows):
        row = row[row >= 0]
        if len(row):
            scores = SCALE * (latent_query[t] @ latent[row].T + rope_query[t] @ rope[row].T)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            lse[t] = np.log(weights.sum(axis=1)) + top[:, 0]
            out[t] = weights / weights.sum(axis=1, keepdims=True) @ latent[row]
    return out, lse


def assert_equal(actual, expected):
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert np.abs(np.asarray(out) - expected_out).max() < TOLERANCE
    assert (np.isneginf(lse) == np.isneginf(expected_lse)).all()
    seen = np.isfinite(expected_lse)
    assert np.abs(np.asarray(lse)[seen] - expected_lse[seen]).max(initial=0) < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("k", [64, 130])
def test_equals_float64_softmax(path, k):
    pool, lengths = random_pool(), [k, 0, 1, 63, 64, min(65, k), k - 1, 2, 0]
    queries, rows = random_queries(len(lengths)), random_rows(lengths, k)
    assert_equal(compiled(**PATHS[path])(queries, rows, pool), sparse_mla_numpy(queries, rows, pool))


@pytest.mark.parametrize("path", PATHS)
def test_query_without_rows_gives_zero_and_minus_infinity(path):
    lengths = [0, 0, 0]
    out, lse = compiled(**PATHS[path])(random_queries(3), random_rows(lengths, 130), random_pool())
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
def test_rows_that_are_not_selected_leave_no_trace(path, rubbish):
    pool, lengths = random_pool(), [130, 0, 1, 63, 64, 65, 129]
    queries, rows = random_queries(len(lengths)), random_rows(lengths, 130)
    rows = np.where(rows == 0, 299, rows)  # row 0 is where a missing entry would read
    expected = sparse_mla_numpy(queries, rows, pool)
    unused = np.setdiff1d(np.arange(POOL), rows)
    assert 0 in unused
    for part in pool:
        part[unused] = rubbish
    assert_equal(compiled(**PATHS[path])(queries, rows, pool), expected)


def test_missing_entries_may_stand_anywhere_within_one_chunk():
    pool, queries = random_pool(), random_queries(4)
    rows = random_rows([64] * 4, 64)
    rows[np.random.default_rng(0).random(rows.shape) < 0.5] = -1
    assert_equal(compiled()(queries, rows, pool), sparse_mla_numpy(queries, rows, pool))


@pytest.mark.parametrize("path", PATHS)
def test_order_of_the_rows_does_not_matter(path):
    pool, queries, rows = random_pool(), random_queries(4), random_rows([130, 100, 64, 3], 130)
    reversed_rows = np.stack([np.concatenate([r[r >= 0][::-1], r[r < 0]]) for r in rows])
    assert_equal(compiled(**PATHS[path])(queries, reversed_rows, pool), sparse_mla_numpy(queries, rows, pool))


@pytest.mark.parametrize("path", PATHS)
def test_large_scores_do_not_overflow(path):
    pool, rows = random_pool(), random_rows([130, 65, 1], 130)
    queries = tuple(1000 * x for x in random_queries(3))
    out, lse = compiled(**PATHS[path])(queries, rows, pool)
    expected_out, expected_lse = sparse_mla_numpy(queries, rows, pool)
    assert np.abs(np.asarray(out) - expected_out).max() < 1e-2  # scores near 1e4: float32 holds their third decimal
    assert np.abs(np.asarray(lse) / expected_lse - 1).max() < 1e-5


def test_equal_scores_average_the_rows():
    pool, rows = random_pool(), random_rows([130, 65], 130)
    queries = tuple(np.zeros_like(x) for x in random_queries(2))
    out, lse = compiled(row_chunk=64)(queries, rows, pool)
    for t, length in enumerate([130, 65]):
        assert np.abs(np.asarray(out)[t] - pool[0][rows[t, :length]].mean(axis=0)).max() < TOLERANCE
        assert np.abs(np.asarray(lse)[t] - np.log(length)).max() < TOLERANCE


def test_output_has_the_dtype_of_the_query():
    queries = tuple(jnp.asarray(x, jnp.bfloat16) for x in random_queries(2))
    out, lse = compiled()(queries, random_rows([5, 0], 64), random_pool())
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32


def test_attention_takes_no_array_of_queries_by_rows_by_heads():
    queries, heads, latent, rope, k, pool = 512, 64, 512, 64, 2048, 1 << 16
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((queries, heads, latent), jnp.float32),
            ((queries, heads, rope), jnp.float32),
            ((queries, k), jnp.int32),
            ((pool, latent), jnp.float32),
            ((pool, rope), jnp.float32),
        )
    ]

    def attend(query_latent, query_rope, rows, *pool):
        return sparse_mla(
            query_latent, query_rope, rows, lambda slots: tuple(x[slots] for x in pool), scale=SCALE, latent_dim=latent
        )

    memory = jax.jit(attend).lower(*abstract).compile(dict(few_rows.COMPILER_OPTIONS)).memory_analysis()
    assert 0 < memory.temp_size_in_bytes < 4 * queries * k * heads / 16


# Merging.

merged = jax.jit(merge_by_lse)


def finite_or_nothing(seed, empty):
    rng = np.random.default_rng(seed)
    out, lse = rng.standard_normal((HEADS, LATENT)).astype(np.float32), 3 * rng.standard_normal(HEADS)
    return (np.zeros_like(out), np.full(HEADS, -np.inf, np.float32)) if empty else (out, lse.astype(np.float32))


@given(st.integers(0, 130), st.integers(0, 2**16))
def test_two_parts_merge_to_the_whole(cut, seed):
    pool, queries = random_pool(seed), random_queries(1, seed + 1)
    rows = random_rows([130], 130, seed + 2)
    left, right = (sparse_mla_numpy(queries, part, pool) for part in (rows[:, :cut], rows[:, cut:]))
    parts = [jnp.asarray(x, jnp.float32) for x in (*left, *right)]
    assert_equal(merged(*parts), sparse_mla_numpy(queries, rows, pool))


@pytest.mark.parametrize(("left_empty", "right_empty"), [(True, False), (False, True), (True, True)])
def test_part_without_rows_changes_nothing(left_empty, right_empty):
    left, right = finite_or_nothing(0, left_empty), finite_or_nothing(1, right_empty)
    expected = right if left_empty else left
    out, lse = merged(*left, *right)
    assert (np.asarray(out) == expected[0]).all() and (np.asarray(lse) == expected[1]).all()


def test_merging_far_apart_parts_keeps_the_heavier():
    (out, _), (other, _) = finite_or_nothing(0, False), finite_or_nothing(1, False)
    lse = np.full(HEADS, 3e4, np.float32)
    result, merged_lse = merged(out, lse, other, -lse)
    assert (np.asarray(result) == out).all() and (np.asarray(merged_lse) == lse).all()
