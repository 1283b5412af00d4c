"""Arguments that do not fit one another are one ConfigError with the value and the right one; empty ones are taken.

Each operation is tried as its jnp form and as its kernel, with arguments that the kernel could take but for one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glmjax.errors import ConfigError
from glmjax.kernels.block_fp8_matmul import block_fp8_matmul
from glmjax.kernels.check import check_arrays
from glmjax.kernels.grouped_matmul import grouped_swiglu
from glmjax.kernels.index_scores import index_scores, paged_index_scores
from glmjax.kernels.index_topk import index_top_k
from glmjax.kernels.kv_insert import kv_insert
from glmjax.kernels.row_fetch import row_fetch
from glmjax.kernels.sparse_mla import sparse_mla, sparse_mla_from_pool
from glmjax.kernels.topk import top_k

BF16, F32, I32, U8, FP8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8, jnp.float8_e4m3fn


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


EXPERTS = {
    "x": array(4, 128, dtype=BF16),
    "expert_ids": array(4, 2, dtype=I32),
    "gate_up": array(2, 3, 2, 256, 128, dtype=U8),
    "down": array(2, 3, 128, 256, dtype=U8),
    "gate_up_scale": array(2, 3, 2, 2, 1),
    "down_scale": array(2, 3, 1, 2),
    "pair_weights": array(4, 2),
    "layer": array(dtype=I32),
}
LINEAR = {
    "x": array(2, 3, 128, dtype=BF16),
    "values": array(5, 256, 128, dtype=FP8),
    "scale": array(5, 2, 1),
    "layer": array(dtype=I32),
}
QUERIES = {"query_latent": array(2, 16, 512, dtype=BF16), "query_rope": array(2, 16, 64, dtype=BF16)}
ATTENTION = {
    **QUERIES,
    "latent": array(3, 128, 512, dtype=U8),
    "latent_scale": array(3, 128, 4),
    "rope": array(3, 128, 64, dtype=BF16),
    "layer": array(dtype=I32),
    "rows": array(2, 64, dtype=I32),
}
INDEX = {
    "query": array(2, 3, 32, 128, dtype=FP8),
    "head_weights": array(2, 3, 32),
    "index_key": array(4, 256, 128, dtype=U8),
    "index_scale": array(4, 256),
    "indexer": array(dtype=I32),
    "tables": array(2, 4, dtype=I32),
    "visible": array(2, 3, dtype=I32),
}
CHUNK = {
    "query": array(2, 3, 32, 128),
    "head_weights": array(2, 3, 32),
    "keys": array(2, 10, 128, dtype=FP8),
    "key_scale": array(2, 10),
    "query_position": array(2, 3, dtype=I32),
    "positions": array(10, dtype=I32),
}
POOLS = {
    "latent": array(3, 64, 512, dtype=U8),
    "latent_scale": array(3, 64, 4),
    "rope": array(3, 64, 64, dtype=BF16),
    "index_key": array(2, 40, 128, dtype=U8),
    "index_scale": array(2, 40),
}
ROWS = {"latent": array(5, 512, dtype=BF16), "rope": array(5, 64, dtype=BF16), "index_key": array(5, 128, dtype=BF16)}
STORED = {**ROWS, "latent": array(5, 512, dtype=U8), "latent_scale": array(5, 4)}
PLAIN = {name: array(*x.shape, dtype=BF16) for name, x in POOLS.items() if not name.endswith("_scale")}
INSERT = {
    "pools": POOLS,
    "rows": ROWS,
    "slots": array(5, dtype=I32),
    "layer": array(dtype=I32),
    "indexer": array(dtype=I32),
    "index_slots": array(5, dtype=I32),
}
FETCH = {
    "targets": [array(40, 512, dtype=U8), array(40, 4)],
    "sources": array(50, 528, dtype=U8),
    "target_rows": array(7, dtype=I32),
    "source_rows": array(7, dtype=I32),
}
TOP = {"scores": array(6, 100), "k": 8, "visible": array(6, dtype=I32)}


def gathered(**arguments):
    return sparse_mla(
        **arguments,
        gather=lambda slots: tuple(jnp.zeros((*slots.shape, n)) for n in (512, 64)),
        scale=1,
        latent_dim=512,
    )


OPERATIONS = {  # by the name in messages: what to call, its arguments, its kernel
    "grouped_swiglu": (grouped_swiglu, EXPERTS, "hopper"),
    "block_fp8_matmul": (block_fp8_matmul, LINEAR, "hopper"),
    "sparse_mla": (lambda **arguments: sparse_mla_from_pool(**arguments, scale=1.0), ATTENTION, "hopper"),
    "sparse_mla, gathered": (gathered, {**QUERIES, "rows": array(2, 64, dtype=I32)}, None),
    "index_scores": (paged_index_scores, INDEX, "hopper"),
    "index_scores, chunk": (index_scores, CHUNK, None),
    "index_top_k": (index_top_k, {**INDEX, "k": 8}, "triton"),
    "top_k": (top_k, TOP, "triton"),
    "kv_insert": (kv_insert, INSERT, "triton"),
    "row_fetch": (row_fetch, FETCH, "triton"),
}

# What is changed, and what the message says: the value at fault and the right one.
PAGED = [
    ({"query": array(2, 32, 128, dtype=FP8)}, "query of shape (2, 32, 128), give [R, Q, H, d]"),
    ({"query": array(2, 3, 32, 128, dtype=I32)}, "query of int32, give bfloat16 or float32 or float8_e4m3fn"),
    ({"head_weights": array(2, 3, 16)}, "head_weights of shape (2, 3, 16), give [R, Q, H] with H = 32 as in query"),
    ({"head_weights": array(2, 3, 32, dtype=BF16)}, "head_weights of bfloat16, give float32"),
    ({"index_key": array(4, 256, 64, dtype=U8)}, "index_key of shape (4, 256, 64), give [N, S, d] with d = 128 as in"),
    ({"index_key": array(4, 250, 128, dtype=U8), "index_scale": array(4, 250)}, "250 slots with block_size=64"),
    ({"block_size": 0}, "256 slots with block_size=0, give whole blocks"),
    ({"index_scale": None}, "index_key of uint8 without index_scale"),
    ({"index_scale": array(4, 128)}, "index_scale of shape (4, 128), give [N, S] with S = 256 as in index_key"),
    ({"tables": array(4, dtype=I32)}, "tables of shape (4,), give [R, n] with R = 2"),
    ({"tables": array(1, 4, dtype=I32)}, "tables of shape (1, 4), give [R, n] with R = 2 as in query"),
    ({"tables": array(2, 4)}, "tables of float32, give int32"),
    ({"visible": array(2, 1, dtype=I32)}, "visible of shape (2, 1), give [R, Q] with Q = 3 as in query"),
    ({"visible": array(2, 3)}, "visible of float32, give int32"),
    ({"indexer": 4}, "indexer=4, give one of 0 to 3"),
    ({"indexer": array(2, dtype=I32)}, "indexer of shape (2,), give []"),
]
COUNTS = [({"k": -1}, "k=-1, give a whole number from 0 on"), ({"k": 2.0}, "k=2.0, give a whole number")]
MISTAKES = {
    "grouped_swiglu": [
        ({"x": array(4, 64, dtype=BF16)}, "gate_up of shape (2, 3, 2, 256, 128), give [M, E, 2, F, D] with D = 64"),
        ({"x": array(4, 128, dtype=I32)}, "x of int32, give bfloat16 or float32"),
        ({"expert_ids": array(3, 2, dtype=I32)}, "expert_ids of shape (3, 2), give [T, k] with T = 4 as in x"),
        ({"expert_ids": array(4, 2)}, "expert_ids of float32, give int32"),
        ({"gate_up": array(2, 3, 128, 128, dtype=U8)}, "gate_up of shape (2, 3, 128, 128), give [M, E, 2, F, D]"),
        ({"gate_up": array(2, 3, 2, 256, 128, dtype=BF16)}, "gate_up of bfloat16 with gate_up_scale, which is for"),
        ({"down": array(2, 3, 256, 128, dtype=U8)}, "with D = 128 as in x, F = 256 as in gate_up"),
        ({"gate_up_scale": None}, "gate_up of uint8 without gate_up_scale"),
        ({"down_scale": None}, "down of uint8 without down_scale"),
        ({"down": array(2, 3, 128, 256, dtype=FP8), "down_scale": None}, "down of float8_e4m3fn without down_scale"),
        ({"gate_up_scale": array(2, 3, 2, 256, 1)}, "[M, E, 2, F/128, D/128] with F/128 = 2 as in gate_up"),
        ({"down_scale": array(2, 3, 1, 1, dtype=BF16)}, "down_scale of bfloat16, give float32"),
        ({"pair_weights": array(4, 3)}, "pair_weights of shape (4, 3), give [T, k] with k = 2 as in expert_ids"),
        ({"layer": 2}, "layer=2, give one of 0 to 1"),
    ],
    "block_fp8_matmul": [
        ({"layer": None}, "values without layer of shape (5, 256, 128), give [R, K]"),
        ({"values": array(256, 128, dtype=FP8)}, "values with layer of shape (256, 128), give [L, R, K]"),
        ({"values": array(5, 256, 128, dtype=BF16)}, "of bfloat16, give float8_e4m3fn or uint8"),
        ({"x": array(2, 3, 64, dtype=BF16)}, "of shape (5, 256, 128), give [L, R, K] with K = 64 as in x"),
        ({"x": array(dtype=BF16)}, "x of shape (), give [..., K]"),
        ({"scale": array(5, 1, 1)}, "scale of shape (5, 1, 1), give [L, R/128, K/128] with R/128 = 2 as in values"),
        ({"scale": None}, "scale is of type NoneType, give an array"),
        ({"layer": -1}, "layer=-1, give one of 0 to 4"),
    ],
    "sparse_mla": [
        ({"query_rope": array(2, 8, 64, dtype=BF16)}, "query_rope of shape (2, 8, 64), give [T, H, rope] with H = 16"),
        ({"query_latent": array(2, 16, 512, dtype=I32)}, "query_latent of int32, give bfloat16 or float32"),
        ({"latent": array(128, 512, dtype=U8)}, "latent of shape (128, 512), give [L, S, kv_lora]"),
        ({"latent": array(3, 128, 512, dtype=BF16)}, "latent of bfloat16 with latent_scale, which is for uint8"),
        ({"latent_scale": None}, "latent of uint8 without latent_scale"),
        ({"latent_scale": array(3, 128, 4, dtype=BF16)}, "latent_scale of bfloat16, give float32"),
        ({"latent_scale": array(3, 128, 1)}, "[L, S, kv_lora/128] with kv_lora/128 = 4 as in query_latent"),
        ({"rope": array(3, 64, 64, dtype=BF16)}, "rope of shape (3, 64, 64), give [L, S, rope] with S = 128"),
        ({"rows": array(1, 64, dtype=I32)}, "rows of shape (1, 64), give [T, K] with T = 2 as in query_latent"),
        ({"rows": array(64, dtype=I32)}, "rows of shape (64,), give [T, K]"),
        ({"rows": array(2, 64)}, "rows of float32, give int32"),
        ({"layer": 3}, "layer=3, give one of 0 to 2"),
    ],
    "sparse_mla, gathered": [
        ({"rows": array(1, 64, dtype=I32)}, "rows of shape (1, 64), give [T, K] with T = 2 as in query_latent"),
        ({"query_latent": array(2, 16, 256)}, "query_latent of shape (2, 16, 256), give [T, H, 512]"),
    ],
    "index_scores": PAGED,
    "index_top_k": [*PAGED, *COUNTS],
    "index_scores, chunk": [
        ({"keys": array(2, 10, 128, dtype=U8)}, "keys of uint8, give bfloat16 or float32 or float8_e4m3fn"),
        ({"keys": array(1, 10, 128, dtype=FP8)}, "keys of shape (1, 10, 128), give [R, C, d] with R = 2 as in query"),
        ({"key_scale": array(2, 1)}, "key_scale of shape (2, 1), give [R, C] with C = 10 as in keys"),
        ({"query_position": array(2, 1, dtype=I32)}, "query_position of shape (2, 1), give [R, Q] with Q = 3"),
        ({"positions": array(1, dtype=I32)}, "positions of shape (1,), give [C] with C = 10 as in keys"),
    ],
    "top_k": [
        ({"scores": array(100)}, "scores of shape (100,), give [N, S]"),
        ({"scores": array(6, 100, dtype=BF16)}, "scores of bfloat16, give float32"),
        ({"scores": array(6, 100, dtype=I32)}, "scores of int32, give float32"),
        ({"visible": array(3, dtype=I32)}, "visible of shape (3,), give [N] with N = 6 as in scores"),
        ({"visible": array(6)}, "visible of float32, give int32"),
        *COUNTS,
    ],
    "kv_insert": [
        ({"slots": array(6, dtype=I32)}, "index_slots of shape (5,), give [T] with T = 6 as in slots"),
        ({"slots": array(6, dtype=I32), "index_slots": None}, "rows 'latent' of shape (5, 512), give [T, kv_lora]"),
        ({"slots": array(5)}, "slots of float32, give int32"),
        ({"index_slots": array(5, dtype=U8)}, "index_slots of uint8, give int32"),
        ({"rows": {**ROWS, "latent": array(5, 256, dtype=BF16)}}, "with kv_lora = 512 as in pool 'latent'"),
        ({"rows": {**ROWS, "rope": array(5, 32, dtype=BF16)}}, "(5, 32), give [T, rope] with rope = 64 as in pool"),
        ({"rows": {**ROWS, "index_key": array(4, 128, dtype=BF16)}}, "rows 'index_key' of shape (4, 128)"),
        ({"rows": {**ROWS, "index_key": array(5, 128, dtype=I32)}}, "of int32, give bfloat16 or float32 or uint8"),
        ({"pools": {**POOLS, "rope": array(2, 64, 64, dtype=BF16)}}, "[L, S, rope] with L = 3 as in pool 'latent'"),
        ({"pools": {**POOLS, "index_scale": array(2, 64)}}, "[N, M] with M = 40 as in pool 'index_key'"),
        ({"pools": {**POOLS, "latent_scale": array(3, 64, 1)}}, "with kv_lora/128 = 4 as in pool 'latent'"),
        ({"pools": {**POOLS, "rope": array(3, 64, 64, dtype=U8)}}, "pool 'rope' of uint8, give bfloat16 or float32"),
        ({"slots": None}, "slots is of type NoneType, give an array"),
        ({"pools": {**POOLS, "latent_scale": None}}, "pool 'latent' of uint8 without 'latent_scale'"),
        ({"rows": {**ROWS, "index_scale": array(5)}}, "rows 'index_key' of bfloat16 with 'index_scale'"),
        ({"rows": STORED, "pools": PLAIN}, "rows 'latent' of uint8 go into a pool of uint8, it is bfloat16"),
        ({"layer": 3}, "layer=3, give one of 0 to 2"),
        ({"indexer": 2}, "indexer=2, give one of 0 to 1"),
        ({"indexer": None}, "index_slots without an indexer, give both"),
    ],
    "row_fetch": [
        ({"source_rows": array(6, dtype=I32)}, "source_rows of shape (6,), give [N] with N = 7 as in target_rows"),
        ({"target_rows": array(7)}, "target_rows of float32, give int32"),
        ({"target_rows": array(1, 7, dtype=I32)}, "target_rows of shape (1, 7), give [N]"),
        ({"targets": [array(40, 512, dtype=U8), array(4, 4)]}, "targets[1] of shape (4, 4), give [rows, width_1]"),
        ({"sources": array(528, dtype=U8)}, "sources[0] of shape (528,), give [rows, width_0]"),
        ({"sources": array(50, 512, dtype=U8)}, "target rows of 528 bytes, source rows of 512"),
    ],
}  # fmt: skip


def call(operation, implementation=None, **changes):
    """Shapes of the result; what is traced is not run."""
    function, arguments, _ = OPERATIONS[operation]
    arguments = arguments | changes
    leaves, tree = jax.tree.flatten(arguments)
    options = {} if implementation is None else {"implementation": implementation}

    def traced(arrays):
        arrays = iter(arrays)
        given = [next(arrays) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
        return function(**jax.tree.unflatten(tree, given), **options)

    return jax.eval_shape(traced, [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)])


def implementations(operation):
    return ["jnp", OPERATIONS[operation][2]] if OPERATIONS[operation][2] else [None]


@pytest.mark.parametrize(
    ("operation", "implementation", "changes", "message"),
    [(name, form, *mistake) for name in OPERATIONS for form in implementations(name) for mistake in MISTAKES[name]],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_error_with_value_and_remedy(operation, implementation, changes, message):
    with pytest.raises(ConfigError) as error:
        call(operation, implementation, **changes)
    assert str(error.value).startswith(operation.partition(",")[0] + ": ")
    assert message in str(error.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_same_arguments_without_a_mistake_are_taken(operation):
    assert jax.tree.leaves(call(operation, implementations(operation)[0]))


def test_what_is_no_array_is_named():
    with pytest.raises(ConfigError, match="top_k: scores is of type list, give an array"):
        top_k([[1.0, 2.0]], 1)


def test_arrays_of_numpy_are_what_jax_makes_of_them():
    check_arrays("sum", {"x": (np.zeros(3), "N", ["float32"]), "at": (np.arange(3), "N", ["int32"])})


def test_a_last_block_may_be_begun():
    check_arrays("sum", {"x": (array(129), "N", []), "scale": (array(2), "N/128", [])})
    with pytest.raises(ConfigError, match=r"scale of shape \(1,\), give \[N/128\] with N/128 = 2 as in x"):
        check_arrays("sum", {"x": (array(129), "N", []), "scale": (array(1), "N/128", [])})


@pytest.mark.parametrize("implementation", ["jnp", "hopper"])
def test_attention_of_no_query_is_empty(implementation):
    none = {name: array(0, *x.shape[1:], dtype=x.dtype) for name, x in QUERIES.items()}
    out, lse = call("sparse_mla", implementation, **none, rows=array(0, 64, dtype=I32))
    assert (out.shape, out.dtype, lse.shape) == ((0, 16, 512), BF16, (0, 16))


def test_attention_over_no_rows_is_zero():
    queries, pools = [jnp.ones(x.shape, x.dtype) for x in QUERIES.values()], [array(3, 128, n) for n in (512, 64)]
    latent, rope = (jnp.ones(x.shape) for x in pools)
    out, lse = sparse_mla_from_pool(*queries, latent, None, rope, 0, jnp.zeros((2, 0), I32), scale=1.0)
    assert out.shape == (2, 16, 512) and not out.any()
    assert lse.shape == (2, 16) and np.isneginf(lse).all()


@pytest.mark.parametrize("implementation", ["jnp", "hopper"])
@pytest.mark.parametrize(
    ("operation", "changes", "shape"),
    [
        ("grouped_swiglu", {"x": (0, 128), "expert_ids": (0, 2), "pair_weights": (0, 2)}, (0, 128)),
        ("block_fp8_matmul", {"x": (0, 3, 128)}, (0, 3, 256)),
        ("index_scores", {"query": (2, 0, 32, 128), "head_weights": (2, 0, 32), "visible": (2, 0)}, (2, 0, 256)),
        ("index_scores", {"tables": (2, 0)}, (2, 3, 0)),
    ],
)
def test_no_tokens_give_no_results(operation, changes, shape, implementation):
    given = OPERATIONS[operation][1]
    changes = {name: array(*size, dtype=given[name].dtype) for name, size in changes.items()}
    assert call(operation, implementation, **changes).shape == shape


@pytest.mark.parametrize("implementation", ["jnp", "triton"])
def test_a_context_of_no_keys_has_none_to_choose(implementation):
    query, weights = jnp.zeros((1, 1, 32, 128), FP8), jnp.zeros((1, 1, 32))
    keys, scale = jnp.zeros((1, 64, 128), U8), jnp.zeros((1, 64))
    tables, visible = jnp.zeros((1, 0), I32), jnp.zeros((1, 1), I32)
    scores, positions = index_top_k(query, weights, keys, scale, 0, tables, visible, 4, implementation=implementation)
    assert np.isneginf(scores).all() and (np.asarray(positions) == -1).all()


def test_experts_of_which_one_weight_is_plain_have_no_kernel():
    plain = {"down": array(2, 3, 128, 256, dtype=BF16), "down_scale": None}
    assert call("grouped_swiglu", "jnp", **plain).shape == (4, 128)
    with pytest.raises(ConfigError, match="uint8 and bfloat16 weights, the kernel is for both with scales or none"):
        call("grouped_swiglu", "hopper", **plain)
