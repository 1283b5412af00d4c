"""Routing against float64 and transformers, and the experts' sum against one expert at a time."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_glm

from glmjax.batch import TokenBatch
from glmjax.config import GLMConfig
from glmjax.layers import rms_norm
from glmjax.moe import moe, route
from glmjax.params import random_params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

TOLERANCE = 1e-4
CONFIG = GLMConfig.tiny(num_nextn_predict_layers=0)
GLM = GLMConfig.glm_5_3()
LAYER = 2  # in the stack of mixture-of-experts layers

routed = jax.jit(route, static_argnums=2)


@functools.partial(jax.jit, static_argnums=1)
def mixed(params, config, index, x, valid):
    """Rows x [T, D] of which some, valid [T], are real: requests of one token or none."""
    zeros = jnp.zeros(len(x), jnp.int32)
    batch = TokenBatch(zeros[:, None], zeros, valid.astype(jnp.int32), zeros[:, None], block_size=1)
    return moe(params, config, index, x, share_of(batch, ONE_DEVICE))


@functools.cache
def weights():
    return random_params(CONFIG).moe


def tokens(count=40, width=CONFIG.hidden_size, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def route_numpy(router, bias, config, x):
    """Float64: expert ids in order of choice, and weights."""
    probability = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.astype(np.float64).T)))
    ids = np.argsort(-(probability + bias.astype(np.float64)), axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    chosen = np.take_along_axis(probability, ids, axis=-1)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True) * config.routed_scaling_factor


def by_expert(ids, weights, experts):
    """[T, E]: the weight of each expert, zero where it is not chosen."""
    out = np.zeros((len(ids), experts))
    np.put_along_axis(out, np.asarray(ids), np.asarray(weights, np.float64), axis=-1)
    return out


def mlp_inputs(layer):
    """What transformers fed to the MLP of a layer: [B * S, D]."""
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    hidden = recorded[f"layer_out.{layer - 1}"] + recorded[f"attn_out.{layer}"]
    return rms_norm(tiny_glm.as_rows(hidden), params.attention.output_norm[layer], config.rms_norm_eps)


@pytest.mark.parametrize("layer", range(3, 7))
def test_routing_equals_transformers(layer):
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    place = layer - config.first_k_dense_replace
    ids, weights = routed(params.moe.router[place], params.moe.router_bias[place], config, mlp_inputs(layer))
    ours = by_expert(ids, weights, config.n_routed_experts)
    theirs = by_expert(recorded[f"router_ids.{layer}"], recorded[f"router_weights.{layer}"], config.n_routed_experts)
    assert ((ours > 0) == (theirs > 0)).all()
    assert np.abs(ours - theirs).max() < TOLERANCE


@pytest.mark.parametrize("layer", range(3, 7))
def test_output_equals_transformers(layer):
    config, params = tiny_glm.checkpoint()
    x = mlp_inputs(layer)
    out = mixed(params.moe, config, layer - config.first_k_dense_replace, x, jnp.ones(len(x), bool))
    assert np.abs(np.asarray(out) - tiny_glm.as_rows(tiny_glm.recorded()[f"mlp_out.{layer}"])).max() < TOLERANCE


def real_router(seed=0):
    """A router of GLM-5.3's sizes with biases in the range of the real ones (spec/model.md 2.6)."""
    rng = np.random.default_rng(seed)
    router = rng.standard_normal((GLM.n_routed_experts, 256)).astype(np.float32) / 16
    bias = rng.uniform(6.817, 7.063, GLM.n_routed_experts).astype(np.float32)
    return router, bias, tokens(200, 256, seed)


def test_large_biases_are_kept_exactly():
    router, bias, x = real_router()
    ids, _ = routed(router, bias, GLM, x)
    expected, _ = route_numpy(router, bias, GLM, x)
    assert (np.sort(np.asarray(ids)) == np.sort(expected)).all()
    rounded, _ = route_numpy(router, bias.astype(ml_dtypes.bfloat16).astype(np.float32), GLM, x)
    assert (np.sort(rounded) != np.sort(expected)).any(axis=1).mean() > 0.3  # what a bf16 bias would change


def test_router_works_in_float32_on_bf16_tokens():
    router, bias, x = real_router()
    x = jnp.asarray(x, jnp.bfloat16)
    ids, weights = routed(router, bias, GLM, x)
    expected, expected_weights = route_numpy(router, bias, GLM, np.asarray(x, np.float64))
    assert weights.dtype == jnp.float32
    assert (np.sort(np.asarray(ids)) == np.sort(expected)).all()
    sizes = [by_expert(i, w, GLM.n_routed_experts) for i, w in ((ids, weights), (expected, expected_weights))]
    assert np.abs(sizes[0] - sizes[1]).max() < 1e-5


def test_weights_add_up_to_the_scaling_factor():
    _, weights = routed(*real_router()[:2], GLM, real_router()[2])
    assert np.abs(np.asarray(weights).sum(axis=-1) - 2.5).max() < 1e-5


def test_bias_moves_the_choice_and_not_the_weights():
    router, x = np.asarray(weights().router[LAYER]), tokens()
    bias = np.zeros(CONFIG.n_routed_experts, np.float32)
    bias[5] = 10
    ids, sizes = routed(router, bias, CONFIG, x)
    assert (np.asarray(ids) == 5).any(axis=1).all()
    probability = 1 / (1 + np.exp(-(x @ router.T)))
    chosen = np.take_along_axis(probability, np.asarray(ids), axis=-1)
    expected = chosen / chosen.sum(axis=-1, keepdims=True) * CONFIG.routed_scaling_factor
    assert np.abs(np.asarray(sizes) - expected).max() < 1e-5


def test_weights_stay_probabilities_when_the_config_says_so():
    config = GLMConfig.tiny(norm_topk_prob=False, routed_scaling_factor=1.0)
    router, x = np.asarray(weights().router[LAYER]), tokens()
    ids, sizes = routed(router, np.zeros(CONFIG.n_routed_experts, np.float32), config, x)
    probability = 1 / (1 + np.exp(-(x @ router.T)))
    assert np.abs(np.asarray(sizes) - np.take_along_axis(probability, np.asarray(ids), axis=-1)).max() < 1e-5


def moe_numpy(x):
    """Float64: every token through its experts, and through the shared one."""
    w = jax.tree.map(lambda y: np.asarray(y[LAYER], np.float64), weights())

    def swiglu(x, gate_up, down):
        gate, up = x @ gate_up[0].T, x @ gate_up[1].T
        return gate / (1 + np.exp(-gate)) * up @ down.T

    x = x.astype(np.float64)
    out = swiglu(x, w.shared_gate_up, w.shared_down)
    for t, (ids, sizes) in enumerate(zip(*route_numpy(w.router, w.router_bias, CONFIG, x), strict=True)):
        out[t] += sum(size * swiglu(x[t], w.gate_up[e], w.down[e]) for e, size in zip(ids, sizes, strict=True))
    return out


@pytest.mark.parametrize("count", [1, 40])
def test_sums_routed_and_shared_experts(count):
    x = tokens(count)
    out = mixed(weights(), CONFIG, LAYER, x, jnp.ones(count, bool))
    assert np.abs(np.asarray(out) - moe_numpy(x)).max() < 1e-5


def test_padding_reaches_no_expert():
    x, valid = tokens(), np.arange(40) % 3 > 0
    expected = np.asarray(mixed(weights(), CONFIG, LAYER, x, valid))
    only_shared = weights().replace(down=jnp.zeros_like(weights().down))
    nothing_routed = np.asarray(mixed(only_shared, CONFIG, LAYER, x, valid))
    assert (expected[~valid] == nothing_routed[~valid]).all()
    assert np.abs(expected[valid] - moe_numpy(x)[valid]).max() < 1e-5


def test_rubbish_in_padding_reaches_no_token():
    x, valid = tokens(), np.arange(40) % 3 > 0
    expected = moe_numpy(x)[valid]
    x[~valid] = np.nan
    out = np.asarray(mixed(weights(), CONFIG, LAYER, x, valid))
    assert np.abs(out[valid] - expected).max() < 1e-5


def test_bf16_experts_are_close_to_float32_on_the_same_tokens():
    x = jnp.asarray(tokens(), jnp.bfloat16)
    floats = {"router", "router_bias"}
    low = weights().replace(
        **{k: v.astype(jnp.bfloat16) for k, v in vars(weights()).items() if k not in floats},
    )
    same = jax.tree.map(lambda w: w.astype(jnp.float32), low)
    out = mixed(low, CONFIG, LAYER, x, jnp.ones(len(x), bool))
    exact = np.asarray(mixed(same, CONFIG, LAYER, x.astype(jnp.float32), jnp.ones(len(x), bool)))
    assert out.dtype == jnp.bfloat16
    # A few roundings to 2^-9 one after another.
    assert np.abs(np.asarray(out, np.float32) - exact).max() < 2**-6 * np.abs(exact).max()
