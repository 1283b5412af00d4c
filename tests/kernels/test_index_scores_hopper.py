"""The Hopper kernel for index scores: simulated with a race detector against float64, and its code for an H200."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_addresses import Values, instructions
from h200_code import check_code, compile_case, compile_program, needs_plugin
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from glmjax.errors import ConfigError
from glmjax.kernels.index_scores import contiguous_tables, index_scores_numpy, paged_index_scores
from glmjax.kernels.index_scores_hopper import Config, cases, index_scores_hopper
from glmjax.kernels.machine_code import machine_code

FP8 = jnp.float8_e4m3fn
HEADS, DIM, BLOCK = 32, 128, 64
SPARE = 3  # blocks of the pool that belong to no request


def inputs(requests, queries, blocks, heads=HEADS, seed=0):
    """Queries, weights, pool, scales and shuffled tables."""
    rng = np.random.default_rng(seed)
    slots = (requests * blocks + SPARE) * BLOCK
    return (
        jnp.asarray(rng.standard_normal((requests, queries, heads, DIM)), FP8),
        jnp.asarray(rng.standard_normal((requests, queries, heads)), jnp.float32),
        jnp.asarray(rng.standard_normal((slots, DIM)), FP8),
        jnp.asarray(2.0 ** rng.integers(-3, 3, slots), jnp.float32),
        rng.permutation(requests * blocks + SPARE)[: requests * blocks].reshape(requests, blocks).astype(np.int32),
    )


def expected(query, weights, pool, scale, tables, visible):
    slots = tables[..., None] * BLOCK + np.arange(BLOCK)
    keys = np.asarray(pool, np.float64) * np.asarray(scale, np.float64)[:, None]
    one = zip(np.asarray(query, np.float64), np.asarray(weights, np.float64), slots, visible, strict=True)
    return np.stack([index_scores_numpy(q, w, keys[s.reshape(-1)], v - 1) for q, w, s, v in one])


def simulated(*args, **config):
    *arrays, tables, visible = args
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        scores = index_scores_hopper(*arrays, jnp.asarray(tables), jnp.asarray(visible), config=Config(**config))
    assert not interpret_pallas_call.get_races().races_found
    return np.asarray(scores)


def assert_close(actual, expected):
    """The same entries masked, and the rest within float32's rounding of a sum of products."""
    assert actual.shape == expected.shape
    assert (np.isneginf(actual) == np.isneginf(expected)).all()
    seen = np.isfinite(expected)
    assert np.abs(actual[seen] - expected[seen]).max(initial=0) <= 1e-6 * np.abs(expected[seen]).max(initial=1)


@pytest.mark.parametrize("queries", [1, 2, 3])  # the last fills its second tile with one that does not exist
def test_equals_float64_up_to_the_bound(queries):
    arrays = inputs(2, queries, blocks=5)
    visible = np.array([[0, 1, 65], [320, 64, 63]], np.int32)[:, :queries]
    actual = simulated(*arrays, visible, queries=min(queries, 2), stages=2, min_steps=1)
    assert_close(actual, expected(*arrays, visible))


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_long_contexts_go_round_the_stages(length):
    arrays = inputs(1, 1, blocks=33)
    visible = np.array([[length]], np.int32)
    assert_close(simulated(*arrays, visible, queries=1, stages=3, min_steps=64), expected(*arrays, visible))


def test_what_no_query_sees_leaves_no_trace():
    query, weights, pool, scale, tables = inputs(2, 2, blocks=4)
    visible = np.array([[65, 100], [0, 0]], np.int32)
    clean = expected(query, weights, pool, scale, tables, visible)
    seen = (tables[0, :2, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:100]
    unseen = np.setdiff1d(np.arange(len(pool)), seen)
    pool, scale = pool.at[unseen].set(jnp.nan), scale.at[unseen].set(jnp.inf)
    tables[0, 2:], tables[1] = [-1, 1 << 30], [1 << 30, -1, 7, 1 << 24]
    assert_close(simulated(query, weights, pool, scale, tables, visible, queries=2, stages=2, min_steps=1), clean)


def test_no_positive_product_scores_exactly_zero():
    query, weights, pool, scale, tables = inputs(1, 1, blocks=2)
    query, pool = jnp.abs(query), -jnp.abs(pool)
    scores = simulated(query, weights, pool, scale, tables, np.array([[128]], np.int32), queries=1)
    assert (scores == 0).all()


@pytest.mark.parametrize("heads", [16, 64])
def test_other_numbers_of_heads(heads):
    arrays = inputs(1, 2, blocks=2, heads=heads)
    visible = np.array([[128, 100]], np.int32)
    assert_close(simulated(*arrays, visible, queries=2), expected(*arrays, visible))


def test_contiguous_keys_are_a_pool():
    query, weights, pool, scale, _ = inputs(2, 1, blocks=2)
    tables, visible = np.asarray(contiguous_tables(2, 128)), np.array([[128], [70]], np.int32)
    arrays = (query, weights, pool, scale, tables, visible)
    assert_close(simulated(*arrays, queries=1), expected(*arrays))


def test_refuses_what_it_is_not_for():
    query, weights, pool, scale, tables = inputs(1, 1, blocks=1)
    with pytest.raises(ConfigError, match=r"float32 queries .* float8_e4m3fn"):
        index_scores_hopper(query.astype(jnp.float32), weights, pool, scale, tables, jnp.ones((1, 1), jnp.int32))
    with pytest.raises(ConfigError, match=r"queries=16, .* up to 256"):
        index_scores_hopper(query, weights, pool, scale, tables, jnp.ones((1, 1), jnp.int32), config=Config(queries=16))


def shapes():
    """All cases; of those that differ in lengths alone, all but the first are slow."""
    queries = [case.arguments[0].shape[1] for case in cases()]
    first = [q not in queries[:i] for i, q in enumerate(queries)]
    return [
        pytest.param(case, id=case.shape, marks=[] if one else pytest.mark.slow)
        for case, one in zip(cases(), first, strict=True)
    ]


@needs_plugin
@pytest.mark.parametrize("case", shapes())
def test_code_for_an_h200(case):
    (code,) = (code for code in compile_case(case) if code.blocks)
    check_code(code, "QGMMA", "UTMALDG", "UTMASTG|UBLKCP")
    assert code.instructions["QGMMA"] == DIM // 32  # a key is multiplied with all (query, head) pairs at once


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.shape)
def test_keys_are_read_once_for_a_tile_of_queries(case):
    query, _, _, _, tables, _ = (x.shape for x in case.arguments)
    requests, queries = query[:2]
    context = tables[1] * BLOCK
    tiles = requests * -(-queries // 8)
    least = tiles * context * (DIM + 4) + requests * queries * (HEADS * (DIM + 4) + 4 * context)
    assert case.bytes <= 1.15 * least


@needs_plugin
def test_the_pools_bytes_are_not_copied():
    """The cache stores fp8 as bytes, of all indexers together."""
    case = cases()[0]
    query, weights, _, _, tables, visible = case.arguments
    keys = jax.ShapeDtypeStruct((20, 1 << 20, DIM), jnp.uint8)
    scale = jax.ShapeDtypeStruct((20, 1 << 20), jnp.float32)

    def scores(query, weights, index_key, index_scale, tables, visible):
        return paged_index_scores(query, weights, index_key, index_scale, 17, tables, visible)  # "auto", for an H200

    arguments = (query, weights, keys, scale, tables, visible)
    program = compile_program(dataclasses.replace(case, function=scores, arguments=arguments))
    assert program.memory.temporaries < 1 << 20
    check_code(machine_code(program.executable)[0], "QGMMA", "UTMALDG")
    # Slots are beyond 2^31 bytes: the copies of the last block of keys, and of its scales, start where it stands.
    last = 20 * (1 << 20) // BLOCK - 1
    values = Values(2 * 128, lambda array: last)
    with instructions(program.hlo, "bulk.tensor.3d") as copies:
        keys = [[values.of(x) for x in list(copy.operands)[4:]] for copy in copies]
    with instructions(program.hlo, "bulk.tensor.1d") as copies:
        scales = [[values.of(x) for x in list(copy.operands)[4:]] for copy in copies]
    assert len(keys) == len(scales) == 2  # one for each of the warpgroups that compute
    for byte, row, group in keys:  # of tiles of 8 keys
        assert (group * 8 + row) * DIM + byte == last * BLOCK * DIM > 1 << 31
    assert scales == [[last * BLOCK]] * 2
