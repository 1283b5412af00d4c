"""The indexer's jnp form over a paged pool against float64 scores and the NumPy twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import ConfigError
from glmjax.kernels import few_rows, index_scores, index_topk
from glmjax.kernels.index_scores import contiguous_tables, index_scores_numpy, paged_index_scores
from glmjax.kernels.index_topk import KeySource, chunk_keys, index_top_k, scan_context
from glmjax.kernels.topk import top_k_numpy

HEADS, DIM, BLOCK, K = 8, 16, 16, 32
REQUESTS, BLOCKS, INDEXERS = 2, 9, 3

select = jax.jit(index_top_k, static_argnums=7, static_argnames=("block_size", "implementation"))
score = jax.jit(paged_index_scores, static_argnames=("block_size", "implementation"))


def inputs(queries, fp8, seed=0):
    """Small whole numbers and scales of powers of two: scores are exact, and ties abound."""
    rng = np.random.default_rng(seed)
    slots = (REQUESTS * BLOCKS + 2) * BLOCK
    query = rng.integers(-2, 3, (REQUESTS, queries, HEADS, DIM))
    weights = rng.integers(-3, 4, (REQUESTS, queries, HEADS)).astype(np.float32)
    keys = rng.integers(-1, 2, (INDEXERS, slots, DIM))
    scale = (2.0 ** rng.integers(-2, 3, (INDEXERS, slots))).astype(np.float32) if fp8 else None
    tables = rng.permutation(REQUESTS * BLOCKS).reshape(REQUESTS, BLOCKS).astype(np.int32)
    if fp8:
        stored = jax.lax.bitcast_convert_type(jnp.asarray(keys, jnp.float8_e4m3fn), jnp.uint8)
        return [jnp.asarray(query, jnp.float8_e4m3fn), weights, stored, scale, tables], keys
    return [jnp.asarray(query, jnp.float32), weights, jnp.asarray(keys, jnp.bfloat16), scale, tables], keys


def expected(query, weights, keys, scale, tables, visible):
    """Scores [R, Q, n * BLOCK] in float64; keys and scales of one indexer."""
    slots = tables[..., None] * BLOCK + np.arange(BLOCK)
    keys = keys * (1.0 if scale is None else scale[:, None].astype(np.float64))
    query = np.asarray(query.astype(jnp.float32))
    one = zip(query, weights, slots, visible, strict=True)
    return np.stack([index_scores_numpy(q, w, keys[s.reshape(-1)], v - 1) for q, w, s, v in one])


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("chunk", [32, 48, 2048])  # of 144 keys: in runs, all at once in chunks of one block, and two
@pytest.mark.parametrize("limit", ["TILE_SCORES", "TILE_QUERIES"])
def test_equals_the_twin(fp8, queries, chunk, limit, monkeypatch):
    monkeypatch.setattr(index_topk, "CONTEXT_CHUNK", chunk)
    monkeypatch.setattr(index_topk, "FIRST", (chunk // 2, 2 * chunk))
    monkeypatch.setattr(index_topk, "RUN", 4)
    # Two queries to a tile; those of the first see less than a chunk.
    monkeypatch.setattr(index_topk, limit, {"TILE_SCORES": 4 * chunk, "TILE_QUERIES": 2}[limit])
    (query, weights, keys, scale, tables), numbers = inputs(queries, fp8)
    visible = np.resize([0, 1, 31, 32, 33, 144, 143, 100, 64, 17], (queries, REQUESTS)).T.astype(np.int32)
    of_one = None if scale is None else scale[1]
    scores = expected(query, weights, numbers[1], of_one, tables, visible)
    wanted = top_k_numpy(scores, K)
    select.clear_cache()  # the sizes above are not its arguments
    found, positions = select(query, weights, keys, scale, 1, tables, visible, K, block_size=BLOCK)
    assert (np.asarray(positions) == wanted).all()
    there = np.take_along_axis(scores, np.maximum(wanted, 0), axis=-1)
    assert (np.asarray(found) == np.where(wanted >= 0, there, -np.inf)).all()
    assert (np.asarray(score(query, weights, keys, scale, 1, tables, visible, block_size=BLOCK)) == scores).all()


@given(st.integers(1, 300), st.sampled_from([1, 2, 16, 64]), st.integers(1, 3000))
def test_a_chunk_has_whole_pieces(requests, block_size, blocks):
    chunk, piece = chunk_keys(requests, block_size, blocks)
    assert chunk % piece == 0 and chunk <= index_topk.PIECES * piece
    assert piece % block_size == 0 and 1 <= chunk // block_size <= blocks
    fits = chunk <= index_topk.CONTEXT_CHUNK and chunk * requests <= index_topk.CHUNK_KEYS
    assert fits or chunk == block_size


def test_of_the_last_chunk_only_pieces_that_are_seen_are_read(monkeypatch):
    """A piece that no query sees may be anything and costs nothing: it is not read."""
    monkeypatch.setattr(index_topk, "CONTEXT_CHUNK", 4 * BLOCK)
    monkeypatch.setattr(index_topk, "PIECES", 4)
    read = []

    def keys(first, count):
        jax.debug.callback(lambda first: read.append((int(first), count)), first)
        places = first + jnp.arange(count, dtype=jnp.int32)
        return jnp.ones((1, count, DIM)), None, places

    source = KeySource(4 * BLOCK, BLOCK, 12 * BLOCK, keys, lambda context: context, lambda i: i)
    query, weights = jnp.ones((1, 1, HEADS, DIM)), jnp.ones((1, 1, HEADS))
    position = jnp.full((1, 1), 5 * BLOCK)  # the first key of the sixth block
    best = scan_context(K, source, query, weights, position, scored=True)
    jax.block_until_ready(best)
    jax.effects_barrier()
    assert sorted(read) == [(0, 4 * BLOCK), (4 * BLOCK, BLOCK), (5 * BLOCK, BLOCK)]


@pytest.mark.parametrize("chunk", [1, 64, 96])  # a block for each request; two; three, and nine blocks are no multiple
def test_scores_come_in_chunks_of_the_context(chunk, monkeypatch):
    (query, weights, keys, scale, tables), numbers = inputs(2, fp8=True)
    visible = np.array([[0, 144], [33, 100]], np.int32)
    monkeypatch.setattr(index_scores, "CHUNK", chunk)
    anew = jax.jit(lambda *arguments: paged_index_scores(*arguments, block_size=BLOCK))  # the size is no argument
    found = anew(query, weights, keys, scale, 1, tables, visible)
    assert (np.asarray(found) == expected(query, weights, numbers[1], scale[1], tables, visible)).all()


@pytest.mark.parametrize("queries", [1, 8])
def test_scores_take_no_array_of_context_by_heads(queries):
    heads, dim, context = 32, 128, 1 << 16
    query, weights = jnp.zeros((1, queries, heads, dim), jnp.float8_e4m3fn), jnp.zeros((1, queries, heads))
    keys, scale = jnp.zeros((1, context, dim), jnp.uint8), jnp.zeros((1, context))
    tables, visible = jnp.zeros((1, context // 64), jnp.int32), jnp.zeros((1, queries), jnp.int32)
    memory = jax.jit(paged_index_scores).lower(query, weights, keys, scale, 0, tables, visible).compile()
    assert memory.memory_analysis().temp_size_in_bytes < 4 * context * heads


def test_selecting_takes_no_array_of_queries_by_context_by_heads():
    queries, heads, dim, context = 512, 32, 128, 1 << 16
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, queries, heads, dim), jnp.float8_e4m3fn),
            ((1, queries, heads), jnp.float32),
            ((1, context, dim), jnp.uint8),
            ((1, context), jnp.float32),
            ((), jnp.int32),
            ((1, context // 64), jnp.int32),
            ((1, queries), jnp.int32),
        )
    ]
    lowered = jax.jit(index_top_k, static_argnums=7).lower(*abstract, 2048)
    memory = lowered.compile(dict(few_rows.COMPILER_OPTIONS)).memory_analysis()
    assert 0 < memory.temp_size_in_bytes < 4 * queries * context * heads / 16


def test_no_way_to_select_copies_the_pool():
    """XLA would, where a branch takes other than what the pool is stored as."""
    heads, dim, context = 32, 128, 1 << 16
    query, weights = jnp.zeros((1, 1, heads, dim), jnp.float8_e4m3fn), jnp.zeros((1, 1, heads))
    keys, scale = jnp.zeros((1, context, dim), jnp.uint8), jnp.zeros((1, context))
    tables, visible = jnp.zeros((1, context // 64), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    compiled = (
        jax.jit(index_top_k, static_argnums=7).lower(query, weights, keys, scale, 0, tables, visible, 64).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < keys.nbytes / 2


def test_contiguous_keys_are_a_pool():
    (query, weights, keys, scale, _), numbers = inputs(1, fp8=True)
    tables, visible = contiguous_tables(REQUESTS, 64, BLOCK), np.array([[64], [40]], np.int32)
    assert tables.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    scores = score(query, weights, keys, scale, 0, tables, visible, block_size=BLOCK)
    assert (np.asarray(scores) == expected(query, weights, numbers[0], scale[0], np.asarray(tables), visible)).all()


def test_blocks_that_no_query_sees_may_be_any():
    (query, weights, keys, scale, tables), _ = inputs(1, fp8=True)
    visible = np.array([[17], [0]], np.int32)
    clean = select(query, weights, keys, scale, 0, tables, visible, K, block_size=BLOCK)
    tables[0, 2:], tables[1] = 1 << 20, -1
    for a, b in zip(clean, select(query, weights, keys, scale, 0, tables, visible, K, block_size=BLOCK), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


def test_a_kernel_asked_for_says_why_not():
    (query, weights, keys, scale, tables), _ = inputs(1, fp8=True)
    visible = jnp.ones((REQUESTS, 1), jnp.int32)
    with pytest.raises(ConfigError, match="index_top_k cannot run its triton kernel: head width 16"):
        index_top_k(query, weights, keys, scale, 0, tables, visible, K, implementation="triton")
    with pytest.raises(ConfigError, match="index_scores cannot run its hopper kernel: head width 16"):
        paged_index_scores(query, weights, keys, scale, 0, tables, visible, implementation="hopper")
    with pytest.raises(ConfigError, match="give 'auto', 'jnp' or 'triton'"):
        index_top_k(query, weights, keys, scale, 0, tables, visible, K, implementation="hopper")
