"""Parameters, KV cache and batch over a mesh: what each device gets, on eight simulated ones and by arithmetic."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from glmjax.cache import abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.hf_names import dotted
from glmjax.params import abstract_params, num_bytes, random_params
from glmjax.sharding.layout import PRESETS, QUANT_BLOCK, Layout
from glmjax.sharding.partition import PARAM_AXES, batch_spec, cache_spec, param_specs

# Eight heads, so that tp8 divides them.
CONFIG = GLMConfig.tiny(num_attention_heads=8)
# Divides by every degree up to 16; widths of whole FP8 blocks for tp up to 16.
WIDE = GLMConfig.tiny(
    vocab_size=720720,
    num_attention_heads=720720,
    qk_nope_head_dim=112,
    v_head_dim=128,
    n_routed_experts=720720,
    intermediate_size=720720 * 128,
    moe_intermediate_size=720720 * 128,
)
LAYOUTS = [
    *PRESETS.values(),
    Layout(tp=2),
    Layout(dp=2, tp=2, pcp=2),
    Layout(dp=2, tp=2, pcp=2, dcp=2, ep=8),
    Layout(tp=4, pcp=2, dcp=4),
    Layout(pcp=8, dcp=2, ep=8),
]


@functools.cache
def host_params():
    return jax.tree.map(np.asarray, random_params(CONFIG))


def shardings(layout, tree):
    """A tree of ``NamedSharding`` on this process's devices."""
    mesh = layout.mesh()
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(layout, tree))


def named_leaves(tree):
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def by_device(array):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def expected_splits(layout):
    """Path -> (axis, parts) of the leaves that are split, written out by hand."""
    tp = layout.tp
    splits = {
        "attention.query_up": (1, tp),
        "attention.key_up": (1, tp),
        "attention.value_up": (1, tp),
        "attention.output": (2, tp),
        "dense.gate_up": (2, tp),
        "dense.down": (2, tp),
        "moe.gate_up": (3, tp),
        "moe.down": (3, tp),
        "moe.shared_gate_up": (2, tp),
        "moe.shared_down": (2, tp),
        "head": (0, layout.pcp * tp),
    }
    if layout.ep > 1:
        splits |= {"moe.gate_up": (1, layout.ep), "moe.down": (1, layout.ep)}
    return splits


def local_shape(layout, path, shape):
    axis, parts = expected_splits(layout).get(path.removesuffix(".values").removesuffix(".scale"), (0, 1))
    return tuple(size // parts if i == axis else size for i, size in enumerate(shape))


def test_every_parameter_has_axes_and_nothing_else_does():
    names = named_leaves(abstract_params(CONFIG, jnp.float32))
    assert list(names) == list(PARAM_AXES)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_device_holds_the_expected_part(layout):
    params = host_params()
    placed = named_leaves(jax.device_put(params, shardings(layout, params)))
    for path, array in placed.items():
        assert len(array.sharding.device_set) == layout.num_devices
        expected = local_shape(layout, path, array.shape)
        assert {shard.data.shape for shard in array.addressable_shards} == {expected}, path


def test_specs_split_evenly_for_every_layout():
    axes = range(1, 17)
    tree = abstract_params(WIDE, jnp.bfloat16, quantized=True)
    leaves = named_leaves(tree)
    for dp, tp, pcp in itertools.product(axes, repeat=3):
        if dp * tp * pcp > 16:
            continue
        for dcp, ep in itertools.product(range(1, pcp * tp + 1), {1, dp * tp * pcp}):
            if pcp * tp % dcp:
                continue
            layout = Layout(dp=dp, tp=tp, pcp=pcp, dcp=dcp, ep=ep)
            layout.check_model(WIDE, block_size=64, quantized=True)
            mesh = jax.sharding.AbstractMesh(tuple(layout.axis_sizes.values()), tuple(layout.axis_sizes))
            for path, spec in named_leaves(param_specs(layout, tree)).items():
                shape = leaves[path].shape
                assert NamedSharding(mesh, spec).shard_shape(shape) == local_shape(layout, path, shape), path


def test_tensor_parallel_parts_are_whole_heads():
    layout = Layout(pcp=2, tp=4, dcp=2)
    params = host_params()
    whole, placed = params.attention, jax.device_put(params, shardings(layout, params)).attention
    heads = whole.query_up.reshape(8, 8, CONFIG.qk_head_dim, -1)  # [L, H, nope + rope, q_lora]
    outputs = whole.output.reshape(8, 128, 8, CONFIG.v_head_dim)  # [L, D, H, v]
    for device in range(8):
        first = device % layout.tp * 2
        mine = slice(first, first + 2)
        query, output = by_device(placed.query_up)[device], by_device(placed.output)[device]
        np.testing.assert_array_equal(query, heads[:, mine].reshape(query.shape))
        np.testing.assert_array_equal(output, outputs[:, :, mine].reshape(output.shape))
        np.testing.assert_array_equal(by_device(placed.key_up)[device], whole.key_up[:, mine])
        np.testing.assert_array_equal(by_device(placed.value_up)[device], whole.value_up[:, mine])


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.ep == 8], ids=str)
def test_experts_are_dealt_out_in_the_order_of_the_devices(layout):
    params = host_params()
    down = jax.device_put(params.moe.down, shardings(layout, params).moe.down)
    for rank, part in enumerate(by_device(down)):
        np.testing.assert_array_equal(part, params.moe.down[:, 2 * rank : 2 * rank + 2])


def test_a_vocabulary_that_does_not_divide_stays_whole():
    tree = abstract_params(GLMConfig.tiny(vocab_size=321), jnp.float32)
    assert param_specs(Layout(pcp=2), tree).head == jax.sharding.PartitionSpec(None, None)


def test_each_device_has_the_scales_of_its_values():
    config = GLMConfig.tiny(num_attention_heads=8, qk_nope_head_dim=112, moe_intermediate_size=256)
    layout = Layout(tp=2, pcp=2)
    tree = abstract_params(config, jnp.bfloat16, quantized=True)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.integers(0, 9, leaf.shape).astype(np.float32), tree)
    placed = jax.device_put(params, shardings(layout, params))
    for path in ("attention.query_up", "attention.output", "dense.gate_up", "moe.down", "indexer.query"):
        weight, parts = (operator.attrgetter(path)(x) for x in (params, placed))
        whole = dequantize(weight.values, weight.scale)
        for shard, scale in zip(parts.values.addressable_shards, by_device(parts.scale), strict=True):
            np.testing.assert_array_equal(dequantize(np.asarray(shard.data), scale), whole[shard.index])


def dequantize(values, scale):
    rows, columns = values.shape[-2:]
    return values * scale.repeat(QUANT_BLOCK, -2)[..., :rows, :].repeat(QUANT_BLOCK, -1)[..., :columns]


def test_a_part_of_the_tree_will_do():
    tree = abstract_params(CONFIG, jnp.float32).replace(moe=None, mtp=None)
    specs = param_specs(Layout(tp=8), tree)
    assert jax.tree.structure(specs) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    ("layout", "quantized", "says"),
    [
        (
            "tp=3",
            False,
            "layout tp=3 cannot split attention.query_up of shape (8, 320, 64) along axis 1, 'head': it takes 3 equal",
        ),
        (
            "dp=3,ep=3",
            False,
            "cannot split moe.gate_up of shape (5, 16, 2, 32, 128) along axis 1, 'expert': it takes 3 equal parts",
        ),
        (
            "tp=2",
            True,
            "query_up.values of shape (8, 320, 64) along axis 1, 'head': it takes 2 equal parts of whole blocks of 128",
        ),
    ],
)
def test_an_uneven_split_is_refused(layout, quantized, says):
    with pytest.raises(ConfigError) as error:
        param_specs(Layout.parse(layout), abstract_params(CONFIG, jnp.bfloat16, quantized=quantized))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"attention": {"bias": np.zeros(3)}}, "no sharding is known for parameter 'attention.bias' of shape (3,)"),
        ({"embed": np.zeros(3)}, "no sharding is known for parameter 'embed' of shape (3,)"),
    ],
)
def test_an_unknown_parameter_is_named(tree, says):
    with pytest.raises(ConfigError) as error:
        param_specs(Layout(), tree)
    assert says in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_per_device_of_the_real_model(name):
    layout = PRESETS[name]
    tree = abstract_params(GLMConfig.glm_5_3(), jnp.bfloat16, quantized=True)
    parts = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype),
        tree,
        shardings(layout, tree),
    )
    attention, moe = tree.attention, tree.moe
    experts = num_bytes((moe.gate_up, moe.down))
    by_tp = num_bytes((attention.query_up, attention.key_up, attention.value_up, attention.output))
    by_tp += num_bytes((tree.dense, moe.shared_gate_up, moe.shared_down))
    head = num_bytes(tree.head)
    whole = num_bytes(tree) - experts - by_tp - head
    assert num_bytes(parts) == whole + experts // 8 + by_tp // layout.tp + head // (layout.pcp * layout.tp)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "fp8_ds_mla"])
def test_cache_is_the_local_pools_end_to_end(layout, dtype):
    sharding = NamedSharding(layout.mesh(), cache_spec(layout))
    local = jax.tree.leaves(abstract_cache(CONFIG, num_blocks=3, block_size=4, dtype=dtype))
    assert len(local) == (5 if dtype == "fp8_ds_mla" else 3)
    for pool in local:
        layers, slots, *width = pool.shape
        assert sharding.shard_shape((layers, layout.dp * layout.dcp * slots, *width)) == pool.shape


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_device_holds_the_pool_of_its_ranks(layout):
    pools = np.arange(layout.dp * layout.dcp)[None, :, None]  # [L, S, width]: one slot a pool
    mesh = layout.mesh()
    held = by_device(jax.device_put(pools, NamedSharding(mesh, cache_spec(layout))))
    for (data, *group), device in np.ndenumerate(mesh.devices):
        rank = dict(zip(mesh.axis_names[1:], group, strict=True))
        shard = rank["context_inner"] * mesh.shape["tensor_inner"] + rank["tensor_inner"]
        assert held[device.id].item() == data * layout.dcp + shard


def test_a_batch_has_an_entry_for_each_data_parallel_rank():
    layout = Layout(dp=4, pcp=2)
    sharding = NamedSharding(layout.mesh(), batch_spec(layout))
    held = by_device(jax.device_put(np.arange(4 * 3).reshape(4, 3), sharding))
    for device, part in enumerate(held):
        np.testing.assert_array_equal(part, np.arange(3)[None] + 3 * (device // 2))
