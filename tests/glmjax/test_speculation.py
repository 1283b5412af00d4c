"""How many tokens are drafted, and acceptance by chance."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.options import engine_options
from glmjax.speculation import (
    FLOP_PER_BYTE,
    MAX_DRAFTS,
    MEASURED_TOKENS,
    Speculation,
    profitable_drafts,
    step_cost,
    synthetic_rates,
    typical_tokens,
)

GLM = GLMConfig.glm_5_3()
H200 = FLOP_PER_BYTE["gpu"][1]


@given(st.integers(1, MAX_DRAFTS), st.floats(0, 1))
def test_rates_of_a_length_have_that_mean_and_the_least_variance(n, part):
    length = 1 + part * n
    rates = synthetic_rates(n, length=length)
    assert len(rates) == n and sum(rates) == pytest.approx(length - 1)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(0 < rate < 1 for rate in rates) <= 1  # all certain but one


def test_the_length_of_the_benchmark():
    assert synthetic_rates(3, length=2.99) == pytest.approx((1.0, 0.99, 0.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of"),
        ({"rates": [1], "length": 1.5}, "exactly one of"),
        ({"length": 4.5}, r"synthetic_acceptance_length must be in \[1, 4\], got 4.5"),
        ({"length": 0.5}, r"in \[1, 4\], got 0.5"),
        ({"length": "2"}, r"in \[1, 4\], got '2'"),
        ({"length": float("nan")}, r"in \[1, 4\], got nan"),
        ({"rates": [1, 0.5]}, r"must be 3 numbers, one a draft, got \[1, 0.5\]"),
        ({"rates": "1,1,1"}, "must be 3 numbers"),
        ({"rates": [1, 0.5, 1.5]}, r"in \[0, 1\]"),
        ({"rates": [0.5, 0.6, 0]}, "must not increase"),
    ],
)
def test_impossible_rates_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        synthetic_rates(3, **given)


def test_typical_tokens_go_on_growing_ever_more_slowly():
    tokens = [typical_tokens(n) for n in range(MAX_DRAFTS + 1)]
    assert tuple(tokens[: len(MEASURED_TOKENS)]) == MEASURED_TOKENS
    gains = [b - a for a, b in itertools.pairwise(tokens)]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0


def test_few_rows_draft_and_many_do_not():
    """From 16 rows most experts are read anyway; at thousands arithmetic is what takes the time.

    With very few rows each further token brings experts of its own.
    """
    assert [profitable_drafts(GLM, rows, 3, 1, H200) for rows in (1, 4, 16, 64)] == [2, 1, 3, 3]
    assert profitable_drafts(GLM, 20_000, 3, 1, H200) == 0
    chosen = [profitable_drafts(GLM, rows, 7, 1, H200) for rows in (64, 128, 256, 512, 1024, 4096, 20_000)]
    assert chosen == sorted(chosen, reverse=True)


def test_cost_is_that_of_reading_until_arithmetic_takes_longer():
    few, twice = (step_cost(GLM, tokens, 1, H200) for tokens in (2000, 4000))
    assert few < twice < 2 * few
    many, more = (step_cost(GLM, tokens, 1, H200) for tokens in (100_000, 200_000))
    assert more == pytest.approx(2 * many)
    # All weights of the trunk in fp8, once: 743.6 GB are the checkpoint's, the embedding is looked up.
    assert step_cost(GLM, 2000, 1, float("inf")) == pytest.approx(742e9, rel=0.01)


def test_fixed_is_what_was_asked_for():
    fixed, auto = (Speculation(num_drafts=3, mode=mode) for mode in ("fixed", "auto"))
    assert fixed.drafts_for(GLM, 20_000, 1, H200) == 3 and auto.drafts_for(GLM, 20_000, 1, H200) == 0
    assert Speculation(mode="auto").drafts_for(GLM, 1, 1, H200) == 0


# As options.


def test_options_become_one_value():
    options = engine_options(num_speculative_tokens=3, synthetic_acceptance_length=2.5)
    assert options.drafting == Speculation(num_drafts=3, rates=(1.0, 0.5, 0.0))
    assert engine_options(num_speculative_tokens=3, speculation="auto").drafting == Speculation(
        num_drafts=3, mode="auto"
    )
    assert engine_options().drafting == Speculation()


def test_the_config_of_vllm_is_taken():
    options = engine_options(
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.99,
        }
    )
    assert options.num_speculative_tokens == 3 and options.drafting.rates == pytest.approx((1.0, 0.99, 0.0))
    assert engine_options(num_speculative_tokens=2, speculative_config={"num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 8}, r"num_speculative_tokens must be a whole number in \[0, 7\], got 8"),
        ({"num_speculative_tokens": -1}, "got -1"),
        ({"num_speculative_tokens": True}, "got True"),
        (
            {"num_speculative_tokens": 3, "max_num_batched_tokens": 512, "max_num_seqs": 256},
            "does not hold a step of max_num_seqs=256 .* give at least 1024",
        ),
        ({"num_speculative_tokens": 2, "synthetic_acceptance_rates": 0.5}, "must be 2 numbers, one a draft, got 0.5"),
        (
            {"num_speculative_tokens": 3, "speculation": "auto", "synthetic_acceptance_length": 2},
            "synthetic_acceptance_length needs speculation='fixed'",
        ),
        ({"speculative_config": {"method": "mtp"}}, "num_speculative_tokens is missing"),
        ({"speculation": "on"}, "speculation must be one of 'fixed', 'auto'"),
        ({"synthetic_acceptance_length": 2}, "left at None where num_speculative_tokens is 0, got 2"),
        ({"num_speculative_tokens": 1, "synthetic_acceptance_length": 3}, r"in \[1, 2\], got 3"),
        ({"speculative_config": "mtp"}, "must be a mapping"),
        ({"speculative_config": {"method": "eagle"}}, "method must be 'mtp', got 'eagle'"),
        ({"speculative_config": {"tokens": 3}}, "unknown key 'tokens'"),
        ({"speculative_config": {"rejection_sample_method": "block"}}, "'standard' or 'synthetic', got 'block'"),
        (
            {"speculative_config": {"num_speculative_tokens": 1, "rejection_sample_method": "synthetic"}},
            "goes with exactly one of",
        ),
        (
            {"num_speculative_tokens": 2, "speculative_config": {"num_speculative_tokens": 3}},
            "num_speculative_tokens=2, but speculative_config says 3",
        ),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        engine_options(**options)
