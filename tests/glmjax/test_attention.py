"""Absorbed MLA against plain attention with expanded keys and values, and against what transformers recorded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm

from glmjax.attention import attend, new_rows, query_latent, selected_slots
from glmjax.batch import contiguous_batch
from glmjax.cache import KVCache, make_cache, read_mla
from glmjax.config import GLMConfig
from glmjax.gathered import KV, Ahead
from glmjax.layers import at_layer, rms_norm, rope_angles
from glmjax.params import random_params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

TOLERANCE = 1e-4
CONFIG = GLMConfig.tiny(num_nextn_predict_layers=0)
LAYER, TOKENS = 1, 12


@functools.partial(jax.jit, static_argnums=(1, 4))
def attention(params, config, layer, x, dtype, chosen):
    """One layer's attention over [B, S, D] after input_layernorm; chosen [B, S, K] positions, -1 for none."""
    share = share_of(contiguous_batch(jnp.zeros(x.shape[:2], jnp.int32)), ONE_DEVICE)
    weights = at_layer(params.attention, layer)
    rows, angles = (
        x.reshape(-1, x.shape[-1]),
        rope_angles(share.positions.reshape(-1), config.qk_rope_head_dim, config.rope_theta),
    )
    kv = KV(make_cache(config, *x.shape[:2], dtype), None)
    kv = kv.write(new_rows(weights, config, rows, angles), share, layer)
    chosen = chosen.reshape(rows.shape[0], -1)
    kv, slots, _ = selected_slots(kv, share, chosen, layer=layer, indexer=0, followers=0)
    latent = query_latent(weights, config, rows)
    return attend(weights, config, kv, layer, latent, angles, slots, share, Ahead())[0].reshape(x.shape), kv.cache


@functools.cache
def model():
    return random_params(CONFIG)


def inputs(seed=0):
    """Hidden states [1, S, D] and a random choice of earlier positions, valid ones first."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, TOKENS, CONFIG.hidden_size)).astype(np.float32)
    chosen = np.full((1, TOKENS, CONFIG.index_topk), -1, np.int32)
    for t in range(TOKENS):
        some = rng.permutation(t + 1)[: rng.integers(1, CONFIG.index_topk + 1)]
        chosen[0, t, : len(some)] = some
    return x, chosen


def expanded_attention(x, chosen, rope_of=None):
    """Float64, head by head, with the keys and values that the latents stand for (spec/model.md 2.2)."""
    config, weights = CONFIG, jax.tree.map(lambda w: np.asarray(w[LAYER], np.float64), model().attention)
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim

    def norm(y, weight):
        return weight * y / np.sqrt((y**2).mean(-1, keepdims=True) + config.mla_norm_eps)

    def rotate(y):
        frequency = config.rope_theta ** (-np.arange(0, rope, 2) / rope)
        turn = np.exp(1j * np.arange(len(x))[:, None] * frequency).reshape(len(x), *[1] * (y.ndim - 2), -1)
        turned = (y[..., 0::2] + 1j * y[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(y.shape)

    query = (norm(x @ weights.query_down.T, weights.query_norm) @ weights.query_up.T).reshape(len(x), heads, -1)
    query = np.concatenate([query[..., :nope], rotate(query[..., nope:])], axis=-1)
    down = x @ weights.kv_down.T
    latent = norm(down[:, : config.kv_lora_rank], weights.kv_norm)
    shared = rotate(down[:, config.kv_lora_rank :])
    out = np.zeros((len(x), heads, config.v_head_dim))
    for h in range(heads):
        key = np.concatenate([latent @ weights.key_up[h].T, shared], axis=-1)
        value = latent @ weights.value_up[h].T
        for t in range(len(x)):
            picked = chosen[t][chosen[t] >= 0]
            scores = query[t, h] @ key[picked].T / np.sqrt(nope + rope)
            weight = np.exp(scores - scores.max())
            out[t, h] = weight / weight.sum() @ value[picked]
    return out.reshape(len(x), -1) @ weights.output.T


def test_absorbed_equals_expanded_attention():
    x, chosen = inputs()
    out, _ = attention(model(), CONFIG, LAYER, x, "float32", chosen)
    assert np.abs(np.asarray(out)[0] - expanded_attention(x[0].astype(np.float64), chosen[0])).max() < 1e-5


@pytest.mark.parametrize("layer", range(7))
def test_attention_equals_transformers_on_its_input(layer):
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    hidden = recorded[f"layer_out.{layer - 1}"] if layer else recorded["embed"]
    used = recorded[f"topk_used.{layer}"]
    visible = used <= np.arange(used.shape[1])[:, None]
    order = np.argsort(~visible, axis=-1, kind="stable")  # valid ones first
    chosen = np.take_along_axis(np.where(visible, used, -1), order, axis=-1)
    x = rms_norm(jnp.asarray(hidden), params.attention.input_norm[layer], config.rms_norm_eps)
    out, _ = attention(params, config, layer, x, "float32", chosen)
    assert np.abs(np.asarray(out) - recorded[f"attn_out.{layer}"]).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16"])
def test_narrow_cache_equals_a_wide_one_of_the_rounded_rows(dtype):
    x, chosen = inputs()
    out, cache = attention(model(), CONFIG, LAYER, x, dtype, chosen)
    slots = jnp.arange(TOKENS)
    latent, rope = (np.asarray(y, np.float32) for y in read_mla(cache, LAYER, slots))
    exact, wide = attention(model(), CONFIG, LAYER, x, "float32", chosen)
    rounded = wide.replace(
        latent=wide.latent.at[LAYER, :TOKENS].set(latent), rope=wide.rope.at[LAYER, :TOKENS].set(rope)
    )
    assert np.abs(np.asarray(out) - attend_only(rounded, x, chosen)).max() < 1e-5
    assert 0 < np.abs(np.asarray(out) - np.asarray(exact)).max() < 2**-4 * np.abs(np.asarray(exact)).max()


def attend_only(cache: KVCache, x, chosen):
    weights = at_layer(model().attention, LAYER)
    angles = rope_angles(jnp.arange(TOKENS), CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    latent = query_latent(weights, CONFIG, jnp.asarray(x[0]))
    share = share_of(contiguous_batch(jnp.zeros((1, TOKENS), jnp.int32)), ONE_DEVICE)
    slots = jnp.asarray(chosen[0])
    return np.asarray(attend(weights, CONFIG, KV(cache, None), LAYER, latent, angles, slots, share, Ahead())[0])


def test_cached_rope_keeps_pairs_side_by_side():
    """In place as fp8_ds_mla has it: elements 2i and 2i + 1 are one pair (spec/model.md 2.3)."""
    x, chosen = inputs()
    _, cache = attention(model(), CONFIG, LAYER, x, "float32", chosen)
    rope = np.asarray(cache.rope)[LAYER, :TOKENS]
    plain = (x[0] @ np.asarray(model().attention.kv_down)[LAYER].T)[:, CONFIG.kv_lora_rank :]
    pairs = [np.hypot(y[:, 0::2], y[:, 1::2]) for y in (rope, plain)]
    assert np.abs(pairs[0] - pairs[1]).max() < 1e-5
    assert np.abs(rope[0] - plain[0]).max() < 1e-5  # position 0 is not turned


def test_query_without_positions_adds_nothing():
    x, chosen = inputs()
    chosen[0, 3] = -1
    out, _ = attention(model(), CONFIG, LAYER, x, "float32", chosen)
    assert (np.asarray(out)[0, 3] == 0).all() and (np.asarray(out)[0, 4] != 0).any()


def test_bf16_attention_is_close_to_float32_on_the_same_input():
    x, chosen = inputs()
    x = jnp.asarray(x, jnp.bfloat16)
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model())
    same = jax.tree.map(lambda w: w.astype(jnp.float32), low)
    out, _ = attention(low, CONFIG, LAYER, x, "bfloat16", chosen)
    exact, _ = attention(same, CONFIG, LAYER, x.astype(jnp.float32), "float32", chosen)
    assert out.dtype == jnp.bfloat16
    # Six products in a row, each rounded to 2^-9.
    assert np.abs(np.asarray(out, np.float32) - np.asarray(exact)).max() < 2**-5 * np.abs(np.asarray(exact)).max()
