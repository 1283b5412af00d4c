"""The whole model against what transformers computed, and how its program grows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm
from hypothesis import given
from hypothesis import strategies as st

from glmjax.batch import contiguous_batch
from glmjax.cache import abstract_cache, make_cache
from glmjax.checkpoint import load_checkpoint
from glmjax.config import GLMConfig
from glmjax.gathered import KV
from glmjax.model import forward, group_runs, logits, run_group, run_layers
from glmjax.params import FLOAT32_WEIGHTS, abstract_params, random_params
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of
from glmjax.speculation import Speculation
from glmjax.step import abstract_state, make_step
from glmjax.step_io import StepShape, packed_width

TOLERANCE = 1e-4
whole = jax.jit(forward, static_argnums=2)


@functools.cache
def trunk():
    """Hidden states [B, S, D] after the final norm and the selections [N, B, S, K] for the reference's prompts."""
    config, params = tiny_glm.checkpoint()
    tokens = jnp.asarray(tiny_glm.recorded()["input_ids"])
    cache = make_cache(config, *tokens.shape, "float32")
    share = share_of(contiguous_batch(tokens), ONE_DEVICE)
    _, hidden, chosen = jax.jit(run_layers, static_argnums=1)(params, config, cache, share)
    return np.asarray(hidden).reshape(*tokens.shape, -1), np.asarray(chosen).reshape(len(chosen), *tokens.shape, -1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def one_layer(params, config, kind, layer, indexer, hidden, chosen):
    """A layer over [B, S, D] on an empty cache; chosen [B * S, K] is None for a layer with an indexer."""
    share = share_of(contiguous_batch(jnp.zeros(hidden.shape[:2], jnp.int32)), ONE_DEVICE)
    dtype = "float32" if hidden.dtype == jnp.float32 else "bfloat16"
    cache = make_cache(config, *hidden.shape[:2], dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    _, out, chosen = run_group(params, config, KV(cache, None), rows, share, (kind,), layer, indexer, chosen)
    return out.reshape(hidden.shape), chosen


def kind_of(config, layer):
    return "dense" if layer < config.first_k_dense_replace else "experts"


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("logits_eps_cfg", {"mla_norm_eps": 1e-5}),
        ("logits_dense", {"index_topk": 64}),
    ],
)
def test_forward_equals_transformers(key, changes):
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    scores = whole(params, jnp.asarray(recorded["input_ids"]), dataclasses.replace(config, **changes))
    assert np.abs(np.asarray(scores) - recorded[key]).max() < TOLERANCE


def test_block_fp8_logits_equal_transformers_with_dequantised_weights():
    config, params = load_checkpoint(tiny_glm.FOLDER / "fp8")
    with np.load(tiny_glm.FOLDER / "fp8" / "ref.npz") as recorded:
        config = dataclasses.replace(config, mla_norm_eps=1e-6)
        scores = whole(params, jnp.asarray(recorded["input_ids"]), config)
        assert np.abs(np.asarray(scores) - recorded["logits"]).max() < TOLERANCE


def test_final_hidden_states_and_logits_equal_transformers():
    recorded, (hidden, _) = tiny_glm.recorded(), trunk()
    assert np.abs(hidden - recorded["final_norm"]).max() < TOLERANCE
    scores = np.asarray(logits(tiny_glm.checkpoint()[1], jnp.asarray(tiny_glm.as_rows(hidden))))
    assert np.abs(scores - tiny_glm.as_rows(recorded["logits"])).max() < TOLERANCE


@pytest.mark.parametrize("place", range(4))
def test_every_selection_equals_transformers(place):
    layer = tiny_glm.full_layers(tiny_glm.checkpoint()[0])[place]
    expected = tiny_glm.chosen_sets(tiny_glm.recorded()[f"topk_used.{layer}"])
    assert tiny_glm.chosen_sets(trunk()[1][place]) == expected


@pytest.mark.parametrize("layer", range(7))
def test_layer_equals_transformers_on_its_input(layer):
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    full = tiny_glm.full_layers(config)
    hidden = recorded[f"layer_out.{layer - 1}"] if layer else recorded["embed"]
    leader = max(i for i in full if i <= layer)
    chosen = None if layer == leader else tiny_glm.as_rows(trunk()[1][full.index(leader)])
    out, _ = one_layer(params, config, kind_of(config, layer), layer, full.index(leader), jnp.asarray(hidden), chosen)
    assert np.abs(np.asarray(out) - recorded[f"layer_out.{layer}"]).max() < TOLERANCE


def test_follower_attends_to_what_its_leader_chose():
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    layer = 3
    assert config.indexer_types[layer] == "shared"
    own = np.maximum(np.arange(96)[:, None] % 48 - np.arange(8), -1).astype(np.int32)  # the nearest eight instead
    out, chosen = one_layer(params, config, "experts", layer, 2, jnp.asarray(recorded["layer_out.2"]), own)
    assert (np.asarray(chosen) == own).all()
    assert np.abs(np.asarray(out) - recorded[f"layer_out.{layer}"]).max() > 100 * TOLERANCE


def lower_precision(params):
    """All weights in bf16 but those that must stay float32."""

    def cast(path, x):
        return x if path[-1].name in FLOAT32_WEIGHTS else x.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, params)


def test_bf16_layer_is_close_to_float32_on_the_same_input():
    config, params = tiny_glm.checkpoint()
    recorded = tiny_glm.recorded()
    hidden = jnp.asarray(recorded["embed"], jnp.bfloat16)
    chosen = tiny_glm.as_rows(trunk()[1][0])
    exact, _ = one_layer(params, config, "dense", 0, 0, hidden.astype(jnp.float32), chosen)
    rounded, _ = one_layer(lower_precision(params), config, "dense", 0, 0, hidden, chosen)
    assert rounded.dtype == jnp.bfloat16
    # A bf16 number carries 2^-8; the layer adds up a handful of rounded terms.
    error = np.abs(np.asarray(rounded, np.float32) - np.asarray(exact))
    assert error.max() < 2**-5 * np.abs(np.asarray(exact)).max()


def test_bf16_model_gives_float32_logits():
    config = GLMConfig.tiny(num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=0)
    scores = whole(random_params(config, jnp.bfloat16), jnp.asarray(tiny_glm.recorded()["input_ids"]), config)
    assert scores.dtype == jnp.float32 and scores.shape == (2, 48, config.vocab_size)
    assert np.isfinite(np.asarray(scores)).all()


# How the program grows.


def test_glm_5_3_is_three_runs():
    runs = [(run.layer, run.indexer, run.mlps, run.count) for run in group_runs(GLMConfig.glm_5_3())]
    experts = "experts"
    assert runs == [
        (0, 0, ("dense",), 2),
        (2, 2, ("dense", experts, experts, experts), 1),
        (6, 3, (experts,) * 4, 18),
    ]


@given(st.lists(st.sampled_from(["full", "shared"]), max_size=12), st.integers(0, 13))
def test_runs_name_every_layer_once_and_in_order(rest, dense):
    types = ("full", *rest)
    dense = min(dense, len(types))
    config = GLMConfig.tiny(num_hidden_layers=len(types), indexer_types=types, first_k_dense_replace=dense)
    seen, leaders = [], []
    for run in group_runs(config):
        for group in range(run.count):
            leaders.append((run.indexer + group, run.layer + group * len(run.mlps)))
            seen += [(run.layer + group * len(run.mlps) + i, kind) for i, kind in enumerate(run.mlps)]
    assert seen == [(i, kind_of(config, i)) for i in range(len(types))]
    assert leaders == list(enumerate(i for i, kind in enumerate(types) if kind == "full"))


DRAFTING = Speculation(num_drafts=3)


def abstract_step(config, shape, cache_dtype="float32", dtype=jnp.float32, quantized=False):
    """A step's jaxpr, made from shapes alone."""
    cache = abstract_cache(config, 1024, 64, cache_dtype, mtp=True)
    params = abstract_params(config, dtype, quantized=quantized)
    packed = jax.ShapeDtypeStruct((shape.requests, packed_width(shape, 64)), jnp.int32)
    return jax.make_jaxpr(make_step(config, shape, 64, 64, speculation=DRAFTING))(
        params, cache, abstract_state(8, 3), packed
    )


def num_equations(jaxpr):
    """Equations of a jaxpr and of all that it calls, each counted once where it stands."""
    inner = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values())) if hasattr(x, "eqns")]
    return len(jaxpr.eqns) + sum(map(num_equations, inner))


@pytest.mark.parametrize("shape", [StepShape(4, 4, decode=True), StepShape(4, 1, decode=True), StepShape(1, 32)])
def test_program_does_not_grow_with_depth(shape):
    sizes = {
        num_equations(abstract_step(GLMConfig.tiny(num_hidden_layers=6 + 4 * groups), shape).jaxpr)
        for groups in (14, 30)
    }
    assert len(sizes) == 1 and sizes.pop() > 500


def test_full_size_step_takes_under_100_arrays():
    config = GLMConfig.glm_5_3()
    step = abstract_step(config, StepShape(8, 4, decode=True), "fp8_ds_mla", jnp.bfloat16, quantized=True)
    assert len(step.in_avals) < 100
