"""Compiled step programs exchange what ``Layout.traffic`` lists, byte for byte, and nothing else.

XLA's CPU backend compiles one collective for each array that the model exchanges: it combines none and splits none, so
the two are compared as they stand. The one thing that it changes is bf16, which it widens to float32 to exchange it;
``on_cpu`` says where. For H200 XLA leaves bf16 alone and combines collectives over the same devices, so there the sums
of bytes are compared.
"""

import collections
import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from glmjax.cache import abstract_cache
from glmjax.config import GLMConfig
from glmjax.params import abstract_params, random_params
from glmjax.programs import Programs
from glmjax.sharding import hlo
from glmjax.sharding.aot import compile_for_h200, h200_devices
from glmjax.sharding.layout import Layout
from glmjax.sharding.partition import batch_spec, cache_spec, param_specs
from glmjax.step import abstract_state, make_step, over_mesh
from glmjax.step_io import StepShape, packed_width

BLOCK, CONTEXT = 8, 64
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
}


def of_groups(*groups, dense):
    """A model of index groups of these sizes, the first layers dense."""
    kinds = [kind for size in groups for kind in ("full", *["shared"] * (size - 1))]
    return GLMConfig.tiny(
        num_hidden_layers=len(kinds), indexer_types=tuple(kinds), first_k_dense_replace=dense, **SIZES
    )


MODELS = {
    "equal groups": of_groups(2, 2, dense=0),  # one loop, over groups
    "one group": of_groups(4, dense=1),  # one loop, over followers
    "no loop": of_groups(1, 2, dense=1),
    "no loop, dense": of_groups(2, dense=2),
}
PREFILL, DECODE = StepShape(1, 16), StepShape(5, 1, decode=True)
CASES = [
    # layout, shape, how queries and KV meet, how results come back, cache, model
    ("pcp=8,dcp=8,ep=8", PREFILL, "auto", "ag_rs", "fp8_ds_mla", "equal groups"),
    ("pcp=8,dcp=8,ep=8", DECODE, "kv_gather", "a2a", "fp8_ds_mla", "no loop"),
    ("pcp=4,tp=2,dcp=8,interleave=4", PREFILL, "query_gather", "a2a", "float32", "no loop"),
    ("pcp=4,tp=2,dcp=8", StepShape(2, 16), "kv_gather", "ag_rs", "bfloat16", "one group"),
    ("pcp=4,tp=2,dcp=4,ep=8", PREFILL, "query_gather", "ag_rs", "float32", "no loop"),
    ("dp=2,pcp=2,tp=2,dcp=4,ep=8", StepShape(3, 12), "query_gather", "ag_rs", "fp8_ds_mla", "one group"),
    ("tp=8,dcp=2,ep=8", DECODE, "auto", "ag_rs", "float32", "no loop"),
    ("tp=2,dcp=2", DECODE, "kv_gather", "ag_rs", "fp8_ds_mla", "no loop, dense"),
    ("pcp=8", StepShape(3, 7), "auto", "ag_rs", "float32", "no loop"),
    ("dp=8,ep=8", DECODE, "auto", "ag_rs", "fp8_ds_mla", "no loop"),
    ("pcp=3,dcp=3", PREFILL, "query_gather", "a2a", "float32", "no loop, dense"),
]


@functools.cache
def params_of(model):
    return random_params(MODELS[model])


def compile_on_cpu(layout, shape, prefill, combine, cache_dtype, model):
    """The HLO of one device."""
    params, mesh = params_of(model), None
    if layout.num_devices > 1:
        mesh = layout.mesh()
        specs = param_specs(layout, params)
        params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    width = -(-CONTEXT // (BLOCK * layout.dcp))
    programs = Programs(
        MODELS[model],
        params,
        num_blocks=shape.requests * width,
        block_size=BLOCK,
        table_width=width,
        cache_dtype=cache_dtype,
        shapes=[shape],
        layout=layout,
        mesh=mesh,
        prefill=prefill,
        combine=combine,
    )
    return hlo.parse(programs._steps[shape].as_text())


def listed(layout, shape, prefill, combine, cache_dtype, model, activation_bytes=4):
    return layout.traffic(
        MODELS[model],
        tokens=shape.tokens,
        requests=shape.requests,
        context_rows=CONTEXT,
        block_size=BLOCK,
        kv_dtype=cache_dtype,
        activation_bytes=activation_bytes,
        prefill=prefill,
        combine=combine,
    )


def axes_of(collective):
    """Mesh axes over which it runs, as XLA prints them."""
    found = re.search(r"replica_groups=mesh\[[^]]*\] \{([^}]*)\}", collective.instruction.attributes)
    return tuple(found[1].replace("'", "").split(","))


def on_cpu(transfer, cache_dtype):
    """Bytes that a device puts in where bf16 takes four: in the rotary keys of FP8 rows, in all of bf16 rows."""
    if transfer.what not in ("new KV rows", "new index keys", "cached KV rows", "cached index keys"):
        return transfer.operands
    *others, last = transfer.operands
    match cache_dtype, transfer.each:
        case "bfloat16", _:
            return tuple(2 * operand for operand in transfer.operands)
        case "fp8_ds_mla", "layer":
            return (*others, 2 * last)
        case _:
            return transfer.operands


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "shape", "prefill", "combine", "cache_dtype", "model"), CASES)
def test_compiled_collectives_are_those_listed(layout, shape, prefill, combine, cache_dtype, model):
    case = (Layout.parse(layout), shape, prefill, combine, cache_dtype, model)
    expected, found = collections.Counter(), collections.Counter()
    transfers = [dataclasses.replace(t, operands=on_cpu(t, cache_dtype)) for t in listed(*case)]
    for t in transfers:
        for operand in t.operands:
            expected[t.kind, t.axes, t.devices, operand] += t.runs
    collectives = hlo.collectives(compile_on_cpu(*case))
    for c in collectives:
        found[c.kind, axes_of(c), c.group_size, c.operand_bytes] += c.runs
        assert not c.conditional
    assert found == expected
    assert sum(c.received_bytes * c.runs for c in collectives) == sum(t.received_bytes * t.runs for t in transfers)
    assert sum(c.result_bytes * c.runs for c in collectives) == sum(t.result_bytes * t.runs for t in transfers)


@pytest.mark.slow
@pytest.mark.usefixtures("unoptimized_h200_code")
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin, no GPU")
@pytest.mark.parametrize("prefill", ["query_gather", "kv_gather"])
def test_compiled_for_h200_the_bytes_are_those_listed(prefill):
    layout, config = Layout(pcp=4, tp=2, dcp=8, ep=8), MODELS["equal groups"]
    mesh, width = layout.mesh(h200_devices(8)), 1

    def placed(tree, specs):
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
        )

    params = abstract_params(config, jnp.bfloat16)
    cache = abstract_cache(config, 8 * width + 7, BLOCK, "fp8_ds_mla")  # all ranks' pools, a spare block in each
    batch, state = jax.ShapeDtypeStruct((1, packed_width(PREFILL, width)), jnp.int32), abstract_state(1, 0)
    compiled = compile_for_h200(
        over_mesh(make_step(config, PREFILL, width, BLOCK, layout, prefill=prefill), layout, mesh, params),
        placed(params, param_specs(layout, params)),
        placed(cache, jax.tree.map(lambda _: cache_spec(layout), cache)),
        placed(state, jax.tree.map(lambda _: batch_spec(layout), state)),
        placed(batch, batch_spec(layout)),
        mesh=mesh,
        donate=(1, 2),
    )
    expected, found = collections.Counter(), collections.Counter()
    for t in listed(layout, PREFILL, prefill, "ag_rs", "fp8_ds_mla", "equal groups", activation_bytes=2):
        expected[t.kind, t.axes] += sum(t.operands) * t.runs
    for c in hlo.collectives(hlo.parse(compiled.hlo)):
        found[c.kind, axes_of(c)] += c.operand_bytes * c.runs
    assert found == expected
