"""Drafting against the recorded drafts, and that it leaves the cache fit for the next step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm

from glmjax.batch import TokenBatch, contiguous_batch
from glmjax.cache import make_cache
from glmjax.model import logits, run_layers
from glmjax.mtp import draft, mtp_layer
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

TOLERANCE = 1e-4
PROMPT, DRAFTS, BLOCK = 48, 3, 64
WIDTH = PROMPT + 4  # one program for the prompt, and for the prompt with what was accepted after it
RECORDED = {"mtp": True, "mtp_noshare": False}  # whether the first draft's top-k is used again

drafted = jax.jit(draft, static_argnums=(1, 5))


@functools.partial(jax.jit, static_argnums=1)
def one_pass(params, config, cache, hidden, batch):
    return mtp_layer(params, config, cache, hidden, share_of(batch, ONE_DEVICE))


def model(share=True):
    config, params = tiny_glm.checkpoint()
    return dataclasses.replace(config, index_share_for_mtp_iteration=share), params


def tokens():
    """[2, 64]: the prompts and the target's own greedy choices."""
    return tiny_glm.recorded()["greedy_ids"].astype(np.int32)


@functools.cache
def target():
    """Hidden states [2, 60, D] of the trunk after its final norm."""
    config, params = model()
    share = share_of(contiguous_batch(jnp.asarray(tokens()[:, :60])), ONE_DEVICE)
    _, hidden, _ = jax.jit(run_layers, static_argnums=1)(params, config, make_cache(config, 2, 60, "float32"), share)
    return np.asarray(hidden).reshape(2, 60, -1)


def rows_at(start, length, width, block_tables=((0,), (1,))):
    """Hidden [2 * width, D] and next tokens of both requests at positions start .. start + length - 1, padded."""
    following = np.zeros((2, width), np.int32)
    hidden = np.zeros((2, width, target().shape[-1]), np.float32)
    for r, (s, n) in enumerate(zip(start, length, strict=True)):
        following[r, :n] = tokens()[r, s + 1 : s + 1 + n]
        hidden[r, :n] = target()[r, s : s + n]
    arrays = (jnp.asarray(x, jnp.int32) for x in (following, start, length, block_tables))
    return jnp.asarray(hidden.reshape(2 * width, -1)), TokenBatch(*arrays, BLOCK)


def prompts(length=PROMPT):
    return rows_at([0, 0], [length] * 2, WIDTH)


def pool(fill=0):
    return jax.tree.map(lambda x: jnp.full_like(x, fill), make_cache(model()[0], 2, BLOCK, "float32", mtp=True))


@functools.cache
def whole_prompt(share=True):
    """The first draft of both prompts: cache, tokens [2, 3] and logits [2, 3, V]."""
    config, params = model(share)
    return drafted(params, config, pool(), *prompts(), DRAFTS)


@functools.cache
def first_pass():
    """Cache, hidden states [2, PROMPT, D] and selections [2, PROMPT, K]."""
    config, params = model()
    cache, *outputs = one_pass(params, config, pool(), *prompts())
    return cache, *(np.asarray(x).reshape(2, WIDTH, -1)[:, :PROMPT] for x in outputs)


# Against the recorded drafts.


@pytest.mark.parametrize("name", RECORDED)
def test_drafts_equal_the_recorded(name):
    recorded = tiny_glm.recorded()
    _, drafts, scores = whole_prompt(RECORDED[name])
    assert (np.asarray(drafts) == recorded[f"{name}.draft_tokens"]).all()
    assert np.abs(np.asarray(scores) - recorded[f"{name}.draft_logits"]).max() < TOLERANCE


def test_first_pass_equals_the_recorded():
    recorded, (_, hidden, chosen) = tiny_glm.recorded(), first_pass()
    assert np.abs(hidden - recorded["mtp.step0_hidden"]).max() < TOLERANCE
    scores = np.asarray(logits(model()[1], jnp.asarray(tiny_glm.as_rows(hidden))))
    assert np.abs(scores - tiny_glm.as_rows(recorded["mtp.step0_logits"])).max() < TOLERANCE
    assert tiny_glm.chosen_sets(chosen) == tiny_glm.chosen_sets(recorded["mtp.step0_topk"])


def test_position_zero_sees_no_embedding():
    with_embedding = tiny_glm.recorded()["mtp_nozero.step0_hidden"]
    assert (np.abs(first_pass()[1] - with_embedding).max(axis=-1) > 10 * TOLERANCE)[:, 0].all()


def test_sharing_the_selection_changes_the_later_drafts_only():
    shared, own = (np.asarray(whole_prompt(share)[2]) for share in (True, False))
    assert (np.abs(shared - own)[:, 0] < 1e-5).all()
    assert (np.abs(shared - own)[:, 1:].max(axis=-1) > 10 * TOLERANCE).all()


def test_missing_layer_is_an_error_that_says_so():
    config, params = model()
    with pytest.raises(ValueError, match="no MTP layer"):
        one_pass(params.replace(mtp=None), config, pool(), *prompts())


# What it writes.


def mtp_rows(cache):
    """The MTP layer's own rows of request 0's block, by position: latents and index keys."""
    return np.asarray(cache.latent)[-1, :BLOCK], np.asarray(cache.index_key)[-1, :BLOCK]


def test_later_drafts_write_their_kv_and_no_index_key():
    latent, key = mtp_rows(whole_prompt()[0])
    written = PROMPT + DRAFTS - 1
    assert (latent[:written] != 0).any(axis=1).all() and (latent[written:] == 0).all()
    assert (key[:PROMPT] != 0).any(axis=1).all() and (key[PROMPT:] == 0).all()


def test_later_drafts_write_index_keys_when_each_selects_for_itself():
    _, key = mtp_rows(whole_prompt(share=False)[0])
    assert (key[: PROMPT + DRAFTS - 1] != 0).any(axis=1).all() and (key[PROMPT + DRAFTS - 1 :] == 0).all()


def test_drafting_leaves_the_trunks_rows_alone():
    cache, _, _ = whole_prompt()
    assert (np.asarray(cache.latent)[:-1] == 0).all() and (np.asarray(cache.index_key)[:-1] == 0).all()


def test_stale_drafts_do_not_matter():
    """Whatever was drafted, the pass over the accepted tokens drafts as one over the whole text does."""
    config, params = model()
    accepted = rows_at([PROMPT] * 2, [4, 4], 4)
    _, after_drafts, scores = drafted(params, config, whole_prompt()[0], *accepted, DRAFTS)
    _, in_one_go, expected = drafted(params, config, pool(), *prompts(PROMPT + 4), DRAFTS)
    assert (np.asarray(after_drafts) == np.asarray(in_one_go)).all()
    assert np.abs(np.asarray(scores) - np.asarray(expected)).max() < TOLERANCE


def draft_few(length, block_tables=((0,), (1,))):
    """Drafts after a few tokens, from a pool of ones."""
    config, params = model()
    return drafted(params, config, pool(1), *rows_at([0, 0], length, 4, block_tables), DRAFTS)


def test_draft_does_not_depend_on_the_other_request():
    _, together, scores = draft_few([4, 2])
    for r, length in enumerate(([4, 4], [2, 2])):
        _, alone, expected = draft_few(length)
        assert (np.asarray(together)[r] == np.asarray(alone)[r]).all()
        assert np.abs(np.asarray(scores)[r] - np.asarray(expected)[r]).max() < TOLERANCE


def test_padding_request_leaves_no_trace():
    """The block table of a padding row names a block of another request."""
    padded, drafts, _ = draft_few([4, 0], block_tables=((0,), (0,)))
    beside, expected, _ = draft_few([4, 4])
    assert (np.asarray(drafts)[0] == np.asarray(expected)[0]).all()
    for mine, other in zip(jax.tree.leaves(padded), jax.tree.leaves(beside), strict=True):
        own, unused = (np.asarray(mine)[:, r * BLOCK : (r + 1) * BLOCK] for r in range(2))
        assert np.abs(own - np.asarray(other)[:, :BLOCK]).max() < TOLERANCE
        assert (unused == 1).all()
