"""Top-k against its NumPy twin: whole rows, rows in chunks, ties, and scores that floats compare oddly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import ConfigError
from glmjax.kernels import few_rows, topk
from glmjax.kernels.topk import merge_top_k, select_top_k, top_k, top_k_numpy

K = 64
LENGTHS = [0, 1, K - 1, K, K + 1, 2 * K, 200]
ROWS = [1, 9]  # the sorting and the counting path, see below
CHUNK = 50


@pytest.fixture(autouse=True, scope="module")
def sort_one_short_row():
    """One of these rows is sorted and nine are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "SORT_SCORES", 400)
        yield


merge = jax.jit(merge_top_k)
select = jax.jit(select_top_k, static_argnums=1)


def in_chunks(scores, k, chunk=CHUNK):
    """Top-k of [N, S] as the indexer finds it: chunk after chunk, the last one filled up with -inf."""
    values = jnp.full((len(scores), k), -jnp.inf)
    positions = jnp.full((len(scores), k), -1, jnp.int32)
    for first in range(0, scores.shape[1], chunk):
        part = scores[:, first : first + chunk]
        part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])), constant_values=-np.inf)
        values, positions = merge(values, positions, part, first + jnp.arange(part.shape[1], dtype=jnp.int32))
    return np.asarray(values), np.asarray(positions)


def ascending(positions):
    """Positions in order, missing ones last: the twin's form."""
    ordered = np.sort(np.where(positions < 0, np.iinfo(np.int32).max, positions), axis=-1)
    return np.where(ordered == np.iinfo(np.int32).max, -1, ordered)


def random_scores(rows, size, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, size)).astype(np.float32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_whole(rows, length):
    scores = random_scores(rows, 256)
    scores[:, length:] = -np.inf
    assert (ascending(in_chunks(scores, K)[1]) == top_k_numpy(scores, K)).all()


@pytest.mark.parametrize("rows", ROWS)
def test_each_row_has_its_own_length(rows):
    scores = random_scores(rows, 256)
    lengths = np.resize([0, 1, 63, 64, 65, 127, 128, 250, 256], rows)
    scores[np.arange(256) >= lengths[:, None]] = -np.inf
    assert (ascending(in_chunks(scores, K)[1]) == top_k_numpy(scores, K)).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "palette",
    [
        [1.5],
        [0.0],
        [0.0, -0.0],
        [-0.0, 1.0, -1.0, 0.0],
        [-3.0, -2.0],
        [np.inf, 0.0, -np.inf],
        [3.4e38, -3.4e38, -np.inf],
    ],
    ids=str,
)
def test_ties_go_to_the_lowest_position(rows, palette):
    scores = np.random.default_rng(1).choice(np.array(palette, np.float32), (rows, 256))
    assert (ascending(in_chunks(scores, K)[1]) == top_k_numpy(scores, K)).all()


@pytest.mark.parametrize("rows", ROWS)
def test_zeros_of_either_sign_tie_in_programs_that_may_add_in_any_order(rows):
    """XLA does not tell them apart there, unless by their bits."""
    scores = np.random.default_rng(1).choice(np.array([0.0, -0.0, -1.0], np.float32), (rows, 256))
    select = jax.jit(lambda scores: top_k(scores, K)).lower(scores).compile(dict(few_rows.COMPILER_OPTIONS))
    assert (ascending(np.asarray(select(scores)[1])) == top_k_numpy(scores, K)).all()


@pytest.mark.parametrize("rows", ROWS)
def test_values_are_the_scores_at_the_positions(rows):
    scores = random_scores(rows, 256)
    scores[:, 40:] = -np.inf
    values, positions = in_chunks(scores, K)
    there = np.take_along_axis(scores, np.maximum(positions, 0), axis=1)
    assert (values == np.where(positions >= 0, there, -np.inf)).all()


@pytest.mark.parametrize("rows", ROWS)
def test_missing_entries_come_last(rows):
    scores = random_scores(rows, 256)
    scores[:, 7:70] = -np.inf
    scores[:, 75:] = -np.inf
    positions = in_chunks(scores, K)[1]
    assert (positions[:, :12] >= 0).all() and (positions[:, 12:] == -1).all()


PALETTE = [-np.inf, -1.0, -0.0, 0.0, 1.0, 2.0]


@given(
    rows=st.sampled_from(ROWS),
    k=st.sampled_from([1, 8]),
    scores=st.lists(st.sampled_from(PALETTE), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_chunked_equals_whole_for_any_scores(rows, k, scores, seed):
    rng = np.random.default_rng(seed)
    scores = np.stack([rng.permutation(np.array(scores, np.float32)) for _ in range(rows)])
    assert (ascending(in_chunks(scores, k, chunk=16)[1]) == top_k_numpy(scores, k)).all()


@pytest.mark.parametrize(("size", "k"), [(1, 1), (7, 8), (8, 8), (63, 64), (64, 64), (65, 64), (200, 3), (1000, 256)])
def test_select_equals_the_twin(size, k):
    scores = random_scores(5, size)
    scores[2] = np.round(scores[2])  # ties
    scores[3, size // 2 :] = -np.inf
    assert (np.asarray(select(scores, k)) == top_k_numpy(scores, k)).all()


def test_twin_agrees_with_a_plain_sort():
    scores = [[3.0, 1.0, 3.0, -np.inf, 2.0]]
    assert top_k_numpy(np.array(scores), 2).tolist() == [[0, 2]]
    assert top_k_numpy(np.array(scores), 3).tolist() == [[0, 2, 4]]
    assert top_k_numpy(np.array(scores), 6).tolist() == [[0, 1, 2, 4, -1, -1]]


@pytest.mark.parametrize("rows", ROWS)
def test_top_k_of_rows_with_lengths_and_nan(rows):
    scores = np.round(random_scores(rows, 300) * 2)
    scores[:, 7::11] = np.nan
    lengths = np.resize([300, 0, 1, 63, 64, 65, 299], rows).astype(np.int32)
    values, positions = jax.jit(top_k, static_argnums=1)(scores, K, visible=lengths)
    eligible = np.where(np.isnan(scores) | (np.arange(300) >= lengths[:, None]), -np.inf, scores)
    expected = top_k_numpy(eligible, K)
    assert (np.asarray(positions) == expected).all()
    there = np.take_along_axis(eligible, np.maximum(expected, 0), axis=1)
    assert (np.asarray(values) == np.where(expected >= 0, there, -np.inf)).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 130])
def test_top_k_of_rows_in_chunks(rows, size, monkeypatch):
    monkeypatch.setattr(topk, "CHUNK", 64)
    monkeypatch.setattr(topk, "SORT_SCORES", 0 if size == 130 else topk.SORT_SCORES)  # a row that is too long to sort
    scores = np.round(random_scores(rows, size) * 2)  # ties across the chunks
    values, positions = top_k(scores, K)
    expected = top_k_numpy(scores, K)
    assert (np.asarray(positions) == expected).all()
    assert np.isneginf(values).sum() == (expected < 0).sum()


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_of_a_million_takes_little_memory(rows):
    size = 1 << 20
    memory = jax.jit(top_k, static_argnums=1).lower(jnp.zeros((rows, size)), 2048).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * rows * size


def test_selecting_holds_no_array_of_rows_by_k_by_scores():
    rows, size, k = 128, 4096, 2048
    memory = select.lower(jnp.zeros((rows, size)), k).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * rows * k * size / 32 / 2  # half of one float32 for each word of 32 scores


def test_top_k_says_why_its_kernel_cannot_run():
    with pytest.raises(ConfigError, match="top_k cannot run its triton kernel: k=4096, the kernel is for 1 to 2048"):
        top_k(jnp.zeros((1, 8192)), 4096, implementation="triton")
