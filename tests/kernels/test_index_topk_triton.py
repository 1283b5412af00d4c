"""The indexer's kernel in Triton's interpreter against float64 scores and the NumPy twin, and its code for an H200.

Queries, keys and weights are small whole numbers and scales powers of two: scores are then exact, and ties abound.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from h200_code import check_code, compile_program, needs_plugin
from interpreted_candidates import Lists, SideBySide, run_interpreted

from glmjax.errors import ConfigError
from glmjax.kernels import candidates_triton, index_topk_triton, merge_triton
from glmjax.kernels.index_scores import index_scores_numpy
from glmjax.kernels.index_topk import index_top_k
from glmjax.kernels.index_topk_triton import Config, cases, default_config, index_top_k_triton
from glmjax.kernels.machine_code import machine_code
from glmjax.kernels.roofline import MULTIPROCESSORS
from glmjax.kernels.topk import top_k_numpy

FP8 = ml_dtypes.float8_e4m3fn
HEADS, DIM, BLOCK = 32, 128, 64
SPARE = 3  # blocks of the pool that belong to no request
K = 64


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if "case" not in request.fixturenames and request.function is not test_the_pools_bytes_are_not_copied:
        run_interpreted(monkeypatch, index_topk_triton)
        if request.function is not test_as_configured_for_the_model:
            monkeypatch.setattr(merge_triton, "MERGE_CAPACITY", 512)


def small(queries):
    return Config(queries=queries, capacity=512, stages=2, early=128, refresh=128)


def inputs(requests, queries, blocks, heads=HEADS, seed=0):
    """Queries, weights, pool, scales and shuffled tables."""
    rng = np.random.default_rng(seed)
    slots = (requests * blocks + SPARE) * BLOCK
    return [
        rng.integers(-2, 3, (requests, queries, heads, DIM)).astype(FP8),
        rng.integers(-3, 4, (requests, queries, heads)).astype(np.float32),
        rng.integers(-1, 2, (slots, DIM)).astype(FP8),
        (2.0 ** rng.integers(-2, 3, slots)).astype(np.float32),
        rng.permutation(requests * blocks + SPARE)[: requests * blocks].reshape(requests, blocks).astype(np.int32),
    ]


def expected(query, weights, pool, scale, tables, visible, k):
    slots = tables[..., None] * BLOCK + np.arange(BLOCK)
    keys = pool.astype(np.float64) * scale.astype(np.float64)[:, None]
    one = zip(query.astype(np.float64), weights, slots, visible, strict=True)
    scores = np.stack([index_scores_numpy(q, w, keys[s.reshape(-1)], v - 1) for q, w, s, v in one])
    positions = top_k_numpy(scores, k)
    there = np.take_along_axis(scores, np.maximum(positions, 0), axis=-1)
    return np.where(positions >= 0, there, -np.inf), positions


def assert_is(found, wanted):
    scores, positions = (np.asarray(x) for x in found)
    assert (positions == wanted[1]).all()
    assert (scores == wanted[0]).all()


@pytest.mark.parametrize("queries", [1, 2, 3, 8])  # with 3 the last tile has a query that does not exist
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_equals_the_twin_up_to_the_bound(queries, multiprocessors, monkeypatch):
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", multiprocessors)
    arrays = inputs(2, queries, blocks=13)
    lengths = [0, 1, 63, 64, 65, 127, 128, 129, 832, 831, 512, 500, 3, 700, 832, 832]
    visible = np.resize(lengths, (queries, 2)).T.astype(np.int32)
    wanted = expected(*arrays, visible, K)
    lists = Lists(monkeypatch, index_topk_triton)
    tile = {3: 2}.get(queries, queries)
    assert_is(index_top_k_triton(*arrays, visible, K, config=small(tile)), wanted)
    if multiprocessors > 1:
        assert lists.parts.parts > 1
        lists.publish_all()
        assert_is(index_top_k_triton(*arrays, visible, K, config=small(tile)), wanted)


def test_a_context_much_shorter_than_its_table_is_cut_all_the_same(monkeypatch):
    arrays = inputs(1, 2, blocks=40)
    visible = np.array([[511, 512]], np.int32)
    lists = Lists(monkeypatch, index_topk_triton)
    assert_is(index_top_k_triton(*arrays, visible, K, config=small(2)), expected(*arrays, visible, K))
    assert (np.asarray(lists.counts)[:, :8] > 0).all() and (np.asarray(lists.counts)[:, 8:] == 0).all()


def test_lists_are_shortened_and_ties_kept_in_order(monkeypatch):
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 1)
    query, weights, pool, scale, tables = inputs(1, 2, blocks=40)
    visible = np.array([[2560, 2500]], np.int32)
    order = np.argsort(tables[0], kind="stable")
    for kind in ("all equal", "ascending", "zero"):
        pool[:] = -1 if kind == "zero" else 1
        query[:], weights[:] = 1, 1
        places = np.full(len(scale), 7)
        places[(tables[0][order][:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)] = (
            order[:, None] * BLOCK + np.arange(BLOCK)
        ).reshape(-1)
        scale[:] = places + 1 if kind == "ascending" else 1
        wanted = expected(query, weights, pool, scale, tables, visible, K)
        assert_is(index_top_k_triton(query, weights, pool, scale, tables, visible, K, config=small(2)), wanted)
        assert (wanted[1][0, 0] == np.arange(K) + (2560 - K) * (kind == "ascending")).all()


def test_what_no_query_sees_leaves_no_trace():
    query, weights, pool, scale, tables = inputs(2, 2, blocks=4)
    visible = np.array([[65, 100], [0, 0]], np.int32)
    wanted = expected(query, weights, pool, scale, tables, visible, K)
    seen = (tables[0, :2, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:100]
    unseen = np.setdiff1d(np.arange(len(pool)), seen)
    pool[unseen], scale[unseen] = np.nan, np.inf
    tables[0, 2:], tables[1] = [-1, 1 << 30], [1 << 30, -1, 7, 1 << 24]
    assert_is(index_top_k_triton(query, weights, pool, scale, tables, visible, K, config=small(2)), wanted)


def test_a_score_that_is_no_number_is_never_chosen():
    query, weights, pool, scale, tables = inputs(1, 1, blocks=3)
    visible = np.array([[192]], np.int32)
    slots = (tables[0][:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    pool[slots[10:150]] = np.nan
    positions = np.asarray(index_top_k_triton(query, weights, pool, scale, tables, visible, K, config=small(1))[1])
    assert (positions[0, 0, :52] == [*range(10), *range(150, 192)]).all() and (positions[0, 0, 52:] == -1).all()


def test_keys_more_than_2_gib_away():
    far = (1 << 31) // DIM // BLOCK + 5  # the pool is as large, but only what is touched takes memory
    query, weights, near, near_scale, tables = inputs(1, 2, blocks=3)
    pool, scale = np.zeros(((far + 8) * BLOCK, DIM), np.uint8).view(FP8), np.zeros((far + 8) * BLOCK, np.float32)
    pool[far * BLOCK : (far + 6) * BLOCK], scale[far * BLOCK : (far + 6) * BLOCK] = near, near_scale
    visible = np.array([[192, 100]], np.int32)
    wanted = expected(query, weights, near, near_scale, tables, visible, K)
    assert_is(index_top_k_triton(query, weights, pool, scale, tables + far, visible, K, config=small(2)), wanted)


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_as_configured_for_the_model(length):
    arrays = inputs(1, 1, blocks=40)
    visible = np.array([[length]], np.int32)
    assert_is(index_top_k_triton(*arrays, visible, 2048), expected(*arrays, visible, 2048))


def test_real_numbers_within_float32_of_float64():
    query, weights, pool, scale, tables = inputs(1, 2, blocks=8)
    rng = np.random.default_rng(3)
    query, pool = rng.standard_normal(query.shape).astype(FP8), rng.standard_normal(pool.shape).astype(FP8)
    weights = rng.standard_normal(weights.shape).astype(np.float32)
    visible = np.array([[512, 400]], np.int32)
    scores, positions = expected(query, weights, pool, scale, tables, visible, K)
    found, places = index_top_k_triton(query, weights, pool, scale, tables, visible, K, config=small(2))
    assert (np.asarray(places) == positions).all()
    assert np.abs(np.asarray(found) - scores).max() <= 1e-6 * np.abs(scores).max()


@pytest.mark.parametrize("apart", [256, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1024))])
def test_as_many_candidates_enter_parts_side_by_side_as_their_bytes_assume(apart, monkeypatch):
    query, weights, pool, scale, tables = inputs(1, 2, blocks=64)
    rng = np.random.default_rng(4)
    query, pool = rng.standard_normal(query.shape).astype(FP8), rng.standard_normal(pool.shape).astype(FP8)
    scale[:] = 1
    visible = np.full((1, 2), 4096, np.int32)
    monkeypatch.setattr(candidates_triton, "MULTIPROCESSORS", 2)
    lists, kernel, config = Lists(monkeypatch, index_topk_triton), index_topk_triton.index_top_k_of_parts, small(2)
    entries = SideBySide(monkeypatch, index_topk_triton, kernel, "append_columns", apart=apart, block=BLOCK)
    found = index_top_k_triton(query, weights, pool, scale, tables, visible, K, config=config)[1]
    assert (np.asarray(found) == expected(query, weights, pool, scale, tables, visible, K)[1]).all()
    assert lists.parts.parts == 4
    assumed = 2 * lists.parts.entries(4096, early=config.early, refresh=config.refresh, apart=apart)
    assert abs(assumed / entries.take() - 1) < 0.1


def test_refuses_what_it_is_not_for():
    *arrays, tables = inputs(1, 1, blocks=1)
    visible = np.ones((1, 1), np.int32)
    with pytest.raises(ConfigError, match="k=2049, the kernel is for 1 to 2048"):
        index_top_k_triton(*arrays, tables, visible, 2049)
    with pytest.raises(ConfigError, match="head width 64, the kernel is for 128"):
        index_top_k_triton(arrays[0][..., :64], *arrays[1:], tables, visible, K)
    with pytest.raises(ConfigError, match=r"refresh=96.*early and refresh multiples of 64"):
        index_top_k_triton(*arrays, tables, visible, K, config=Config(queries=1, refresh=96))
    with pytest.raises(ConfigError, match=r"stages=1.*stages >= 2"):
        index_top_k_triton(*arrays, tables, visible, K, config=Config(queries=1, stages=1))


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
    program = compile_program(case)
    requests, queries = case.arguments[5].shape
    filling, *merging = (code for code in machine_code(program.executable) if code.blocks)
    check_code(filling, "QGMMA", "LDGSTS")
    assert filling.instructions["QGMMA"] == DIM // 32  # a key is multiplied with all (query, head) pairs at once
    assert len(merging) == (1 if queries * requests == 2048 else 3)  # with parts, their lists are gathered first
    for code in merging:
        check_code(code, "LDGSTS")
    rows, context = requests * queries, case.arguments[4].shape[1] * BLOCK
    if rows * context > 1 << 25:  # else lists are larger than the matrix of scores would be
        assert program.memory.temporaries < 4 * rows * context / 2


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.shape)
def test_moves_little_more_than_it_must(case):
    """Keys and their scales once for each tile of queries, tables, queries and results; no matrix of scores.

    More candidates enter lists where one request is cut into a part for every multiprocessor, of 1,024 keys, and where
    an eighth of 16,384 keys is chosen.
    """
    most = {"decode R=1 Q=4": 1.36, "prefill kv_gather R=8 Q=256": 1.44}.get(case.shape.partition(" H=")[0], 1.15)
    (requests, queries, heads, _), blocks = case.arguments[0].shape, case.arguments[4].shape[1]
    tiles = requests * -(-queries // 8)
    least = tiles * blocks * (BLOCK * (DIM + 4) + 4) + requests * queries * (heads * (DIM + 4) + 8 * 2048)
    assert least < case.bytes <= most * least


@pytest.mark.parametrize("context", [2112, 4096, 8192, 16384, 32768, 65536, 131072, 1 << 20])
@pytest.mark.parametrize(("requests", "queries"), [(1, 1), (8, 1), (8, 4), (32, 1), (1, 512)])
def test_short_contexts_fill_an_h200_too(requests, queries, context):
    tiles, blocks, config = requests * -(-queries // 8), context // BLOCK, default_config(queries, HEADS)
    parts = index_topk_triton.parts_of(tiles, blocks, 2048, config).parts
    assert parts <= blocks and tiles * parts >= min(MULTIPROCESSORS, tiles * blocks)


@pytest.mark.parametrize(("requests", "queries"), [(1, 1), (8, 1), (8, 4), (32, 1), (1, 512)])
def test_two_programs_for_every_multiprocessor_if_parts_are_not_too_short(requests, queries):
    tiles, config = requests * -(-queries // 8), default_config(queries, HEADS)

    def parts(keys):
        return index_topk_triton.parts_of(tiles, keys // BLOCK, 2048, config).parts

    two, one = 2 * MULTIPROCESSORS // tiles, -(-MULTIPROCESSORS // tiles)
    assert parts(3 * config.early * two) == two
    assert parts(3 * config.early * two - BLOCK) == one


@needs_plugin
def test_the_pools_bytes_are_not_copied():
    """The cache stores fp8 as bytes, of all indexers together."""
    case = cases()[0]
    query, weights, _, _, tables, visible = case.arguments
    keys = jax.ShapeDtypeStruct((20, 1 << 20, DIM), jnp.uint8)
    scale = jax.ShapeDtypeStruct((20, 1 << 20), jnp.float32)

    def select(query, weights, index_key, index_scale, tables, visible):
        return index_top_k(query, weights, index_key, index_scale, 17, tables, visible, 2048)  # "auto", for an H200

    arguments = (query, weights, keys, scale, tables, visible)
    program = compile_program(dataclasses.replace(case, function=select, arguments=arguments))
    assert program.memory.temporaries < 16 << 20  # lists of candidates
    check_code(machine_code(program.executable)[0], "QGMMA", "LDGSTS")
