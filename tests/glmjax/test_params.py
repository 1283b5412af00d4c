"""The parameter tree: sizes known from the released checkpoints, and random trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.config import GLMConfig
from glmjax.params import FLOAT32_WEIGHTS, QuantizedWeight, abstract_params, random_params


def count(tree: object) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def test_glm_5_3_has_exactly_the_released_size():
    config = GLMConfig.glm_5_3()
    assert count(abstract_params(config, jnp.bfloat16, mtp=False)) == 743_377_019_904
    tree = abstract_params(config, jnp.bfloat16)
    # All of the bf16 release is bf16 except the router's bias (spec/model.md 1.2).
    assert 2 * count(tree) + 2 * count(tree.moe.router_bias) == 1_506_659_919_872


def test_few_leaves_whatever_the_depth():
    deep = len(jax.tree.leaves(abstract_params(GLMConfig.glm_5_3(), jnp.bfloat16, quantized=True)))
    shallow = len(jax.tree.leaves(abstract_params(GLMConfig.tiny(), jnp.bfloat16, quantized=True)))
    assert deep == shallow < 100


def test_the_mtp_layer_is_one_more_entry():
    config = GLMConfig.tiny()
    with_mtp, without = (abstract_params(config, jnp.float32, mtp=mtp) for mtp in (True, False))
    assert with_mtp.attention.query_down.shape == (8, 64, 128)
    assert without.attention.query_down.shape == (7, 64, 128)
    assert (with_mtp.indexer.key.shape[0], without.indexer.key.shape[0]) == (5, 4)
    assert (with_mtp.moe.down.shape[0], without.moe.down.shape[0]) == (5, 4)
    assert with_mtp.dense.down.shape == without.dense.down.shape == (3, 128, 256)
    assert with_mtp.mtp is not None
    assert without.mtp is None


def test_a_config_without_mtp_makes_a_tree_without_it():
    assert abstract_params(GLMConfig.tiny(num_nextn_predict_layers=0), jnp.float32).mtp is None


@pytest.mark.parametrize(("dense", "has_dense", "has_moe"), [(0, False, True), (7, True, False), (3, True, True)])
def test_absent_kinds_of_layer_are_none(dense, has_dense, has_moe):
    config = GLMConfig.tiny(first_k_dense_replace=dense, num_nextn_predict_layers=0)
    tree = abstract_params(config, jnp.float32)
    assert (tree.dense is not None, tree.moe is not None) == (has_dense, has_moe)


def test_quantized_weights_have_a_scale_per_started_block():
    config = GLMConfig.tiny(hidden_size=200, intermediate_size=300)
    weight = abstract_params(config, jnp.bfloat16, quantized=True).dense.gate_up
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == (3, 2, 300, 200)
    assert (weight.values.dtype, weight.scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert weight.scale.shape == (3, 2, 3, 2)


def test_some_weights_are_float32_in_any_dtype():
    tree = random_params(GLMConfig.tiny(), jnp.bfloat16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        expected = jnp.float32 if path[-1].name in FLOAT32_WEIGHTS else jnp.bfloat16
        assert leaf.dtype == expected, path


def test_random_params_have_the_abstract_shapes_and_repeat():
    config = GLMConfig.tiny()
    first, again, other = (random_params(config, seed=seed) for seed in (1, 1, 2))
    expected = abstract_params(config, jnp.float32)
    assert jax.tree.map(lambda leaf: leaf.shape, first) == jax.tree.map(lambda leaf: leaf.shape, expected)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, first, other)))


def test_no_part_of_a_random_model_is_degenerate():
    for path, leaf in jax.tree_util.tree_leaves_with_path(random_params(GLMConfig.tiny())):
        values = np.asarray(leaf)
        assert values.std() > 0.02, path
        assert np.isfinite(values).all(), path
