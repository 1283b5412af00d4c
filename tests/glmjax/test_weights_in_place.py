"""A step that decodes a few rows on a CPU reads its weights where they are in the stacks."""

import functools

import jax
import numpy as np
import pytest

from glmjax.config import GLMConfig
from glmjax.params import random_params
from glmjax.programs import Programs
from glmjax.step_io import StepShape

# Two dense layers and three with experts, both in scans. Of the weights only key_up, which is small here, is still
# copied; all that a step holds besides weights is small too.
CONFIG = GLMConfig.tiny(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=5,
    first_k_dense_replace=2,
    indexer_types=("full",) * 5,
    num_attention_heads=16,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=4,
    qk_rope_head_dim=16,
    v_head_dim=16,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_nextn_predict_layers=0,
)
SHAPES = StepShape(1, 1, decode=True), StepShape(4, 1, decode=True)


@functools.cache
def programs():
    params = random_params(CONFIG, mtp=False)
    return Programs(
        CONFIG, params, num_blocks=8, block_size=4, table_width=2, cache_dtype="float32", shapes=SHAPES
    )  # fmt: skip


def large_matrices():
    """Bytes of each kind of layer's matrix but ``key_up``, the smallest first."""
    params = programs().params
    stacks = params.attention, params.dense, params.moe, params.indexer
    slices = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(stacks)}
    sizes = [4 * int(np.prod(x.shape[-2:])) for name, x in slices.items() if x.ndim > 2 and "key_up" not in name]
    return sorted(size for size in sizes if size > 64 << 10)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_matrix_is_copied_out_of_its_stack(shape):
    smallest = large_matrices()[0]
    assert programs()._steps[shape].memory_analysis().temp_size_in_bytes < smallest


def test_layers_are_not_one_loop_on_one_core():
    """XLA makes one kernel, for one core, of a loop without library calls."""
    text = programs()._steps[SHAPES[0]].as_text()
    gate_up = ",".join(map(str, programs().params.moe.gate_up.shape))
    calls = [line for line in text.splitlines() if 'xla_cpu_small_call="true"' in line]
    assert gate_up in text
    assert not any(gate_up in line for line in calls)
