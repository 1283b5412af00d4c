"""Sampling: exact choices where there is one, and distributions against NumPy where there is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glmjax.sample import SamplingBatch, sample
from glmjax.types import MAX_LOGPROBS

VOCAB = 50
sampled = jax.jit(sample)


def how(rows, *, temperature=0.0, top_p=1.0, min_p=0.0, top_k=0, seed=0, banned=(), wants=False):
    """The same settings for every row; ``seed`` may be one per row."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows))

    seeds = np.broadcast_to(np.asarray(seed, np.uint64), rows)
    forbidden = np.full((rows, 4), -1, np.int32)
    forbidden[:, : len(banned)] = banned
    return SamplingBatch(
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        top_k=column(top_k, np.int32),
        seed=jnp.asarray(np.stack([seeds & 0xFFFFFFFF, seeds >> np.uint64(32)], axis=1).astype(np.uint32)),
        banned=jnp.asarray(forbidden),
        wants_logprobs=column(wants, bool),
    )


def random_logits(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32)


def tokens(logits, settings, position=0):
    position = jnp.asarray(np.broadcast_to(np.asarray(position, np.int32), len(logits)))
    return np.asarray(sampled(logits, settings, position).token)


# Greedy.


@given(hnp.arrays(np.float32, (3, VOCAB), elements=st.floats(-50, 50, width=32), fill=st.just(1.0)))
def test_temperature_zero_takes_the_first_of_the_largest(logits):
    assert (tokens(logits, how(3)) == logits.argmax(axis=1)).all()


def test_banned_tokens_are_never_taken():
    logits = random_logits(3)
    order = np.argsort(-logits, axis=1)
    logits[:] = logits[0]
    assert (tokens(logits, how(3, banned=order[0, :3])) == order[0, 3]).all()


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=str)
def test_narrowest_setting_is_greedy(settings):
    logits = random_logits(3)
    settings = how(3, **({"temperature": 5.0} | settings), seed=[1, 2, 3])
    assert (tokens(logits, settings) == logits.argmax(axis=1)).all()


def test_greedy_and_random_rows_stand_side_by_side():
    logits = random_logits(3)
    got = tokens(logits, how(3, temperature=np.array([0.0, 2.0, 0.0]), seed=5))
    assert (got[[0, 2]] == logits.argmax(axis=1)[[0, 2]]).all()


# Distributions.

DRAWS, CHOICES = 4000, 12
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "banned": (0, 3)},
]


@functools.cache
def peaked():
    """Logits of a dozen tokens, the likeliest eight times the least likely."""
    rng = np.random.default_rng(1)
    return np.log(rng.permutation(np.linspace(1, 8, CHOICES))).astype(np.float32)


def distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, banned=()):
    """Float64: probabilities after all filters."""
    scaled = logits.astype(np.float64)
    scaled[list(banned)] = -np.inf
    scaled = scaled / temperature
    order = np.argsort(-scaled, kind="stable")
    probability = np.exp(scaled - scaled.max())
    kept = order[: top_k or None]
    share = probability[kept] / probability[kept].sum()
    kept = kept[np.cumsum(share) - share < top_p]
    kept = kept[probability[kept] >= min_p * probability.max()]
    out = np.zeros(len(logits))
    out[kept] = probability[kept]
    return out / out.sum()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_distribution(settings):
    logits = np.tile(peaked(), (DRAWS, 1))
    expected = DRAWS * distribution(peaked(), **settings)
    counts = np.bincount(tokens(logits, how(DRAWS, seed=np.arange(DRAWS), **settings)), minlength=CHOICES)
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four deviations; the seeds are fixed


def test_draws_at_successive_positions_follow_the_distribution():
    logits = np.tile(peaked(), (DRAWS, 1))
    expected = DRAWS * distribution(peaked(), 1.0)
    counts = np.bincount(tokens(logits, how(DRAWS, temperature=1.0, seed=7), np.arange(DRAWS)), minlength=CHOICES)
    freedom = CHOICES - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)


def test_tokens_as_likely_as_the_last_one_kept_stay_in():
    logits = np.tile(np.array([2.0] + [1.0] * 4 + [0.0] * 7, np.float32), (DRAWS, 1))
    assert set(tokens(logits, how(DRAWS, temperature=1.0, top_k=2, seed=np.arange(DRAWS)))) == set(range(5))


# What a token depends on.


@given(st.integers(0, 7), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_token_depends_on_logits_seed_and_position_only(row, seed, position):
    settings = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    mine = random_logits(1, seed=position)
    alone = tokens(mine, how(1, seed=seed, **settings), position)[0]
    others = random_logits(8, seed=position + 1)
    others[row] = mine[0]
    seeds, positions = np.arange(8, dtype=np.uint64), np.arange(8)
    seeds[row], positions[row] = seed, position
    temperatures, top_k = np.linspace(0, 2, 8), np.arange(8)
    temperatures[row], top_k[row] = 1.0, 20
    among = how(8, seed=seeds, temperature=temperatures, top_k=top_k, top_p=0.9)
    assert tokens(others, among, positions)[row] == alone


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_part_of_the_seed_counts(bit):
    flat = np.zeros((100, VOCAB), np.float32)
    position = np.arange(100)
    plain, flipped = (tokens(flat, how(100, temperature=1.0, seed=s), position) for s in (0, 1 << bit))
    assert (plain != flipped).mean() > 0.9


def test_every_position_has_noise_of_its_own():
    flat = np.zeros((100, VOCAB), np.float32)
    first, second = (tokens(flat, how(100, temperature=1.0), np.arange(100) + shift) for shift in (0, 1))
    assert (first[1:] == second[:-1]).all()
    assert (first != second).mean() > 0.9


# Log-probabilities.


def log_softmax(logits):
    wide = logits.astype(np.float64)
    return (
        wide
        - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - wide.max(axis=1, keepdims=True)
    )


def outputs(logits, settings):
    return jax.tree.map(np.asarray, sampled(logits, settings, jnp.zeros(len(logits), jnp.int32)))


def test_logprob_and_rank_are_those_of_the_model():
    logits = random_logits(3)
    out = outputs(logits, how(3, temperature=3.0, top_k=5, min_p=0.1, seed=[1, 2, 3], wants=True))
    expected = log_softmax(logits)
    chosen = np.take_along_axis(expected, out.token[:, None], axis=1)
    assert np.abs(out.logprob - chosen[:, 0]).max() < 1e-5
    assert (out.rank == 1 + (expected > chosen).sum(axis=1)).all()


def test_likeliest_tokens_come_in_order():
    logits = random_logits(3)
    out = outputs(logits, how(3, wants=True))
    order = np.argsort(-logits, axis=1)[:, :MAX_LOGPROBS]
    assert out.top_ids.shape == (3, MAX_LOGPROBS) and (out.top_ids == order).all()
    assert np.abs(out.top_logprobs - np.take_along_axis(log_softmax(logits), order, axis=1)).max() < 1e-5
    assert (out.rank == 1).all() and (out.top_ids[:, 0] == out.token).all()


def test_banned_tokens_keep_their_logprob():
    logits = random_logits(3)
    logits[:] = logits[0]
    best = int(logits[0].argmax())
    out = outputs(logits, how(3, banned=(best,), wants=True))
    assert (out.rank == 2).all() and (out.top_ids[:, 0] == best).all()


def test_equally_likely_tokens_share_a_rank():
    out = outputs(np.zeros((3, VOCAB), np.float32), how(3, temperature=1.0, seed=[1, 2, 3], wants=True))
    assert (out.rank == 1).all()
    assert np.abs(out.logprob + np.log(VOCAB)).max() < 1e-5


def test_one_row_that_wants_logprobs_is_enough():
    logits = random_logits(3)
    out = outputs(logits, how(3, wants=np.array([False, True, False])))
    assert np.abs(out.logprob[1] - log_softmax(logits)[1].max()) < 1e-5


def test_nobody_wants_logprobs_and_none_are_given():
    out = outputs(random_logits(3), how(3))
    assert not out.logprob.any() and not out.rank.any() and not out.top_ids.any() and not out.top_logprobs.any()


def test_vocabulary_smaller_than_the_list_gives_all_of_it():
    logits = np.tile(peaked(), (3, 1))
    out = outputs(logits, how(3, wants=True))
    assert out.top_ids.shape == (3, CHOICES)
    assert (np.sort(out.top_ids) == np.arange(CHOICES)).all()
