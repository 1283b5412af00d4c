"""Merging across shards: attention against one softmax in float64, candidates against a sort in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glmjax.sharding.merge import (
    merge_attention,
    merge_candidates,
    merge_candidates_numpy,
    shard_weight,
    weigh,
)

EMPTY = [-np.inf, np.inf, np.nan]  # the ways in which kernels say that a shard has seen no key

merge_attention_jit = jax.jit(merge_attention)
merge_candidates_jit = jax.jit(merge_candidates, static_argnums=2)
both_attention = pytest.mark.parametrize("merge", [merge_attention, merge_attention_jit], ids=["numpy", "jit"])
both_candidates = pytest.mark.parametrize("merge", [merge_candidates_numpy, merge_candidates_jit], ids=["numpy", "jit"])


def attention(scores, values):
    """Output and lse of one softmax in float64: [..., S] and [S, d]."""
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ values, (top + np.log(total))[..., 0]


def shards_of_attention(sizes, scale=1.0, seed=0):
    """Partial outputs [W, 3, 4] and lse [W, 3] over keys cut by ``sizes``, and the whole; a shard of 0 has NaN."""
    rng = np.random.default_rng(seed)
    scores = scale * rng.standard_normal((3, sum(sizes)))
    values = rng.standard_normal((sum(sizes), 4))
    cuts = np.cumsum(sizes)[:-1]
    parts = [
        attention(s, v) if v.size else (np.full((3, 4), np.nan), np.full(3, -np.inf))
        for s, v in zip(np.split(scores, cuts, axis=1), np.split(values, cuts), strict=True)
    ]
    outputs, lse = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    return outputs, lse, attention(scores, values)


@both_attention
@pytest.mark.parametrize("scale", [1.0, 200.0])
@pytest.mark.parametrize("sizes", [[7], [5, 1, 30, 2], [0, 3, 0, 0, 9, 0, 0, 1]])
def test_merged_attention_is_that_over_all_keys(merge, sizes, scale):
    outputs, lse, (whole, whole_lse) = shards_of_attention(sizes, scale)
    merged, merged_lse = merge(outputs, lse)
    assert merged.dtype == merged_lse.dtype == np.float32
    np.testing.assert_allclose(merged, whole, atol=2e-4 if scale > 1 else 1e-6)
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=1e-6)


@both_attention
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_output_of_an_empty_shard_does_not_matter(merge, empty, rubbish):
    outputs, lse, (whole, whole_lse) = shards_of_attention([4, 0, 6, 0])
    outputs[[1, 3]], lse[[1, 3]] = rubbish, empty
    merged, merged_lse = merge(outputs, lse)
    np.testing.assert_allclose(merged, whole, atol=1e-6)
    np.testing.assert_allclose(merged_lse, whole_lse, rtol=1e-6)


@both_attention
def test_no_key_anywhere_gives_zero_and_minus_infinity(merge):
    outputs = np.full((3, 2, 4), np.nan, np.float32)
    lse = np.broadcast_to(np.array(EMPTY, np.float32)[:, None], (3, 2))
    merged, merged_lse = merge(outputs, lse)
    assert (merged == 0).all() and (merged_lse == -np.inf).all()


@both_attention
def test_nan_of_a_shard_with_keys_is_not_hidden(merge):
    outputs = np.array([[[np.nan]], [[1.0]]], np.float32)
    assert np.isnan(merge(outputs, np.zeros((2, 1), np.float32))[0]).all()


@given(hnp.arrays(np.float32, (4, 3), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_weights_are_a_softmax_whatever_the_lse(lse):
    with np.errstate(over="ignore"):  # lse - top may pass the least float: its weight is 0
        weights = np.stack([shard_weight(lse, rank) for rank in range(4)])
    some = np.isfinite(lse).any(axis=0)
    assert (weights >= 0).all() and (weights[~np.isfinite(lse)] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=0), some, rtol=1e-6)


def test_outputs_weighed_on_each_rank_add_up_to_the_merge():
    outputs, lse, (whole, _) = shards_of_attention([4, 0, 6, 1])
    weight = jax.jit(shard_weight)
    total = sum(weigh(outputs[rank], shard_weight(lse, rank)) for rank in range(4))
    traced = sum(weigh(jnp.asarray(outputs[rank]), weight(lse, rank)) for rank in range(4))
    np.testing.assert_allclose(total, whole, atol=1e-6)
    np.testing.assert_allclose(traced, whole, atol=1e-6)


def best_by_sorting(scores, positions, k):
    """One row in plain Python."""
    real = [(-s, p) for s, p in zip(scores.tolist(), positions.tolist(), strict=True) if p >= 0]
    chosen = sorted(real)[:k]
    missing = k - len(chosen)
    return [-s for s, _ in chosen] + [-np.inf] * missing, [p for _, p in chosen] + [-1] * missing


@both_candidates
@pytest.mark.parametrize("palette", [[0.0], [0.0, -0.0], [-1.0, -0.0, 0.0, 2.0], [-np.inf, 1.0], None])
def test_merge_takes_the_best_and_of_equals_the_lowest_positions(merge, palette):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, 24)) if palette is None else rng.choice(palette, (40, 24))
    scores = scores.astype(np.float32)
    positions = np.stack([rng.permutation(1000)[:24] for _ in range(40)]).astype(np.int32)
    positions[rng.random((40, 24)) < np.linspace(0, 1, 40)[:, None]] = -1
    best, chosen = (np.asarray(x) for x in merge(scores, positions, 8))
    assert (best.dtype, chosen.dtype) == (np.float32, np.int32)
    for row in range(40):
        assert (best[row].tolist(), chosen[row].tolist()) == best_by_sorting(scores[row], positions[row], 8)


@both_candidates
def test_a_score_at_a_missing_position_is_ignored(merge):
    scores = np.array([[9.0, -np.inf, 1.0]], np.float32)
    best, chosen = merge(scores, np.array([[-1, 7, 3]], np.int32), 3)
    assert np.asarray(best).tolist() == [[1.0, -np.inf, -np.inf]]
    assert np.asarray(chosen).tolist() == [[3, 7, -1]]


@both_candidates
def test_top_k_of_shards_merged_is_the_top_k_of_all(merge):
    ranks, k = 4, 16
    scores = np.random.default_rng(1).integers(0, 5, (2, 3, 100)).astype(np.float32)
    positions = np.broadcast_to(np.arange(100, dtype=np.int32), scores.shape)
    parts = [merge_candidates_numpy(scores[..., r::ranks], positions[..., r::ranks], k) for r in range(ranks)]
    gathered = [np.concatenate(x, axis=-1) for x in zip(*parts, strict=True)]
    for merged, whole in zip(merge(*gathered, k), merge_candidates_numpy(scores, positions, k), strict=True):
        assert (np.asarray(merged) == whole).all()
