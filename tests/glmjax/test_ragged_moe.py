"""Experts behind the ragged exchange: equal to one device and to the gather dispatch, and what XLA makes of it on GPUs.

The whole layer runs on eight CPU devices with the exchange emulated; the real one is compiled for H200.
"""

import collections
import functools
import importlib.util

import emulated_exchange
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glmjax.batch import TokenBatch
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.moe import moe
from glmjax.options import engine_options
from glmjax.params import random_params
from glmjax.programs import Programs
from glmjax.sharding import hlo
from glmjax.sharding.aot import compile_for_h200, h200_devices
from glmjax.sharding.layout import ONE_DEVICE, Layout
from glmjax.sharding.partition import param_specs
from glmjax.share import share_of

# Two experts a device: a token's four choices often meet on one.
CONFIG = GLMConfig.tiny(
    hidden_size=32,
    moe_intermediate_size=16,
    n_routed_experts=16,
    num_experts_per_tok=4,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    indexer_types=("full", "full", "shared"),
    num_nextn_predict_layers=0,
)
LAYERS = CONFIG.num_moe_layers
LAYOUTS = [
    Layout.parse(text)
    for text in ("dp=8,ep=8", "tp=8,ep=8", "pcp=8,ep=8", "dp=2,pcp=2,tp=2,ep=8", "pcp=4,tp=2,dcp=4,ep=8")
]
# The bias decides who is chosen.
BIASES = {
    "even": {},
    "all tokens to one expert": {9: 10},
    "all tokens to two devices": {2: 10, 3: 10, 14: 10, 15: 10},
    "last device idle": {14: -10, 15: -10},
}


@functools.cache
def weights():
    return random_params(CONFIG).moe


def layer(layout, dispatch, exchange=emulated_exchange.ragged_all_to_all):
    """A layer on a device's rows x [T, D] of requests of one token, or of none where valid [R] is False."""

    def local(params, index, x, valid):
        rows = jnp.zeros(len(valid), jnp.int32)
        batch = TokenBatch(rows[:, None], rows, valid.astype(jnp.int32), rows[:, None], block_size=1)
        return moe(params, CONFIG, index, x, share_of(batch, layout, dispatch=dispatch), exchange)

    return local


def over(layout, mesh, function):
    """The function over a mesh, with parameters as the layout says and rows split over the devices of its tokens."""
    specs = param_specs(layout, {"moe": weights()})["moe"]
    rows, requests = P(layout.token_axes), P(layout.data_axes)
    return jax.shard_map(function, mesh=mesh, in_specs=(specs, P(), rows, requests), out_specs=rows, check_vma=False)


@functools.cache
def program(layout, dispatch):
    local = layer(layout, dispatch)
    return jax.jit(local if layout == ONE_DEVICE else over(layout, layout.mesh(), local))


def outputs(layout, requests, bias, dispatch="ragged", dtype=jnp.float32):
    """Real rows of the layer and of one device's, for so many requests of each data-parallel rank, some empty."""
    rng = np.random.default_rng(requests)
    real = rng.random((layout.dp, requests)) < 0.7
    real[0, 0] = True
    padded = np.pad(real, ((0, 0), (0, -requests % layout.pcp))).reshape(-1)
    x = rng.standard_normal((padded.size, CONFIG.hidden_size))
    x[~padded] = np.nan
    router_bias = np.zeros((LAYERS, CONFIG.n_routed_experts), np.float32)
    for expert, size in bias.items():
        router_bias[:, expert] = size
    params = jax.tree.map(lambda w: w.astype(dtype), weights())
    params = params.replace(router=weights().router, router_bias=jnp.asarray(router_bias))
    x, index = jnp.asarray(x, dtype), jnp.int32(LAYERS - 1)
    out = program(layout, dispatch)(params, index, x, real.reshape(-1))
    one = program(ONE_DEVICE, "gather")(params, index, x, padded)
    assert out.dtype == one.dtype == dtype
    return np.asarray(out, np.float32)[padded], np.asarray(one, np.float32)[padded]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_one_device(layout, bias):
    ragged, one = outputs(layout, 11, BIASES[bias])
    assert np.abs(one).max() > 0.1
    assert np.abs(ragged - one).max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_token_of_each_rank_equals_one_device(layout):
    ragged, one = outputs(layout, 1, {})
    assert np.abs(ragged - one).max() < 1e-5


def test_equals_the_gather_dispatch():
    ragged, gather = (outputs(LAYOUTS[-1], 11, {}, dispatch)[0] for dispatch in ("ragged", "gather"))
    assert np.abs(ragged - gather).max() < 1e-5


def test_bf16_sums_lose_no_more_than_a_rounding():
    ragged, one = outputs(LAYOUTS[0], 11, {}, dtype=jnp.bfloat16)
    assert np.abs(ragged - one).max() < 2**-7 * np.abs(one).max()


def test_without_expert_parallelism_nothing_is_exchanged():
    layout = Layout(tp=2)
    x, valid = np.ones((3, CONFIG.hidden_size), np.float32), np.ones(3, bool)
    ragged, gather = (program(layout, how).lower(weights(), 0, x, valid).as_text() for how in ("ragged", "gather"))
    assert ragged == gather


def test_is_refused_on_a_cpu():
    layout = Layout(dp=8, ep=8)
    with pytest.raises(ConfigError, match=r"ep_dispatch='ragged' needs GPUs.*use ep_dispatch='gather'"):
        Programs(
            CONFIG,
            random_params(CONFIG),
            num_blocks=1,
            block_size=8,
            table_width=1,
            cache_dtype="float32",
            shapes=(),
            layout=layout,
            dispatch="ragged",
        )


def test_option_is_checked():
    assert engine_options(ep_dispatch="ragged").ep_dispatch == "ragged"
    with pytest.raises(ConfigError, match="ep_dispatch must be one of 'gather', 'ragged', got 'a2a'"):
        engine_options(ep_dispatch="a2a")


needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")),
    reason="needs JAX's CUDA plugin, no GPU",
)


@needs_plugin
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layer_for_h200_has_two_ragged_exchanges_and_one_of_the_routing(layout):
    tokens = 16  # of a data and context rank
    parts = layout.num_shards(layout.token_axes)
    mesh = layout.mesh(h200_devices(8))

    def layers(params, indices, x, valid):
        step = layer(layout, "ragged", jax.lax.ragged_all_to_all)
        return jax.lax.scan(lambda x, index: (step(params, index, x, valid), None), x, indices)[0]

    def placed(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    specs = param_specs(layout, {"moe": weights()})["moe"]
    compiled = compile_for_h200(
        over(layout, mesh, layers),
        jax.tree.map(lambda w, spec: placed(w.shape, jnp.bfloat16, spec), weights(), specs),
        placed((LAYERS,), jnp.int32, P()),
        placed((parts * tokens, CONFIG.hidden_size), jnp.bfloat16, P(layout.token_axes)),
        placed((parts * tokens,), jnp.bool, P(layout.data_axes)),
        mesh=mesh,
    )
    found = hlo.collectives(hlo.parse(compiled.hlo))
    rows, row_bytes, choices = tokens // layout.tp, 2 * CONFIG.hidden_size, CONFIG.num_experts_per_tok
    expected = [
        ("all-gather", 8 * rows * 2 * choices * 4),  # ids and weights
        ("ragged-all-to-all", 8 * rows * row_bytes),
        ("ragged-all-to-all", rows * choices * row_bytes),
    ]
    if layout.tp > 1:
        expected.append(("all-reduce", tokens * row_bytes))
    assert collections.Counter((c.kind, c.result_bytes) for c in found) == collections.Counter(expected)
    assert {c.runs for c in found} == {LAYERS}
