"""Verification of drafts: how many count, and that the tokens are distributed as without drafts."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from glmjax.step import choose, count_new
from glmjax.step_io import StepInputs, StepShape, unpack
from glmjax.verify import num_accepted, num_accepted_numpy, synthetic_accepted

ROWS, VOCAB = 20_000, 8


@settings(max_examples=200)
@given(st.integers(0, 7), st.integers(0, 2**16))
def test_drafts_count_up_to_the_first_that_the_target_does_not_choose(n, seed):
    rng = np.random.default_rng(seed)
    choices, drafts = rng.integers(0, 3, (5, n + 1)), rng.integers(-1, 3, (5, n))
    proposed = rng.integers(0, n + 1, 5)
    found = num_accepted(*(jnp.asarray(x, jnp.int32) for x in (choices, drafts, proposed)))
    assert found.tolist() == num_accepted_numpy(choices, drafts, proposed).tolist()


def rows_with_drafts(temperature, top_p=1.0, drafts=(3, 5)):
    """Rows that differ by seed only, each with the same last token and drafts."""
    shape = StepShape(ROWS, 1 + len(drafts), decode=True)
    inputs = StepInputs.empty(shape, 1)
    inputs.tokens[:] = (1, *drafts)
    inputs.start[:], inputs.length[:], inputs.continues[:] = 9, shape.tokens, 1
    inputs.temperature[:], inputs.top_p[:], inputs.seed[:, 0] = temperature, top_p, np.arange(ROWS)
    return unpack(jnp.asarray(inputs.pack()), shape, 1)


def likelihood(counts, expected):
    """p-value of Pearson's test."""
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    assert expected[seen].min() > 5
    return scipy.stats.chisquare(counts[seen], expected[seen]).pvalue


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8)])
def test_tokens_are_distributed_as_the_target_says(temperature, top_p):
    """20,000 draws of three tokens in a row, with two drafts that the target likes in part."""
    rng = np.random.default_rng(7)
    scores = rng.standard_normal((3, VOCAB)).astype(np.float32)
    drafts = np.argmax(scores[:2], axis=1)
    rows = rows_with_drafts(temperature, top_p, drafts)
    out = choose(jnp.asarray(np.tile(scores, (ROWS, 1))), rows, 3)
    new = count_new(out.token, rows, None)
    tokens, count = np.asarray(new.tokens), np.asarray(new.count)
    assert {1, 2, 3} == set(count.tolist())
    for place in range(3):
        probability = np.exp(scores[place].astype(np.float64) / temperature)
        probability /= probability.sum()
        order = np.argsort(-probability)
        kept = np.cumsum(probability[order]) - probability[order] < top_p
        target = np.zeros(VOCAB)
        target[order[kept]] = probability[order[kept]] / probability[order[kept]].sum()
        here = tokens[count > place, place]
        counts = np.bincount(here, minlength=VOCAB)
        assert likelihood(counts, len(here) * target) > 1e-3, place
        if place < 2:
            assert (count > place + 1).sum() == counts[drafts[place]]


def test_the_noise_of_a_position_is_that_of_a_step_without_drafts():
    rng = np.random.default_rng(8)
    scores = jnp.asarray(rng.standard_normal((3, VOCAB)), jnp.float32)
    rows = rows_with_drafts(1.0)
    together = choose(jnp.tile(scores, (ROWS, 1)), rows, 3).token.reshape(ROWS, 3)
    for place in range(3):
        alone = rows.replace(start=rows.start + place, length=jnp.ones_like(rows.length))
        token = choose(jnp.tile(scores[place : place + 1], (ROWS, 1)), alone, 1).token
        assert (token == together[:, place]).all()


@pytest.mark.parametrize("rates", [(1.0, 0.99, 0.0), (0.8, 0.5, 0.2), (0.0,), (1.0,) * 7])
def test_synthetic_acceptance_has_the_rates_it_was_given(rates):
    seed = jnp.stack([jnp.arange(10_000, dtype=jnp.uint32)] * 2, axis=1)
    start = jnp.arange(10_000, dtype=jnp.int32) // 7
    accepted = np.asarray(synthetic_accepted(rates, seed, start, jnp.full(10_000, len(rates), jnp.int32)))
    found = [(accepted > place).mean() for place in range(len(rates))]
    assert np.abs(np.array(found) - rates).max() < 0.015  # 3 sigma of 10,000
    assert abs(accepted.mean() - sum(rates)) < (0.01 if rates == (1.0, 0.99, 0.0) else 0.03)
    few = synthetic_accepted(rates, seed, start, jnp.zeros(10_000, jnp.int32))
    assert not np.asarray(few).any()


def test_bans_hold_for_the_positions_before_their_end():
    shape = StepShape(1, 4, decode=True)
    inputs = StepInputs.empty(shape, 1)
    inputs.start[:], inputs.length[:] = 9, 4
    inputs.banned[0, 0], inputs.ban_end[:] = 2, 12
    rows = unpack(jnp.asarray(inputs.pack()), shape, 1)
    scores = jnp.zeros((4, VOCAB)).at[:, 2].set(2.0).at[:, 4].set(1.0)
    assert choose(scores, rows, 4).token.tolist() == [4, 4, 2, 2]  # tokens of positions 10 to 13
