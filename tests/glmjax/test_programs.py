"""Compiled steps: rectangles against single rows, and a pool that is not copied."""

import functools
import itertools
import re

import jax
import numpy as np
import pytest
import tiny_glm
from hypothesis import given
from hypothesis import strategies as st

from glmjax.cache import abstract_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.params import random_params
from glmjax.programs import Programs, step_shapes, with_contexts
from glmjax.sharding.cp import local_slots
from glmjax.sharding.layout import Layout
from glmjax.step_io import StepInputs, StepShape
from glmjax.types import MAX_LOGPROBS

# A pool so large that whatever is as small as a step's temporaries cannot be a copy of a part of it.
BLOCK, NUM_BLOCKS, WIDTH = 16, 4095, 4
ONE, FOUR = StepShape(1, 1, decode=True), StepShape(4, 1, decode=True)
SHAPES = (ONE, FOUR, StepShape(1, 16), StepShape(3, 8))
FP8_SHAPES = (FOUR, StepShape(1, 16))


@functools.cache
def programs(cache_dtype="float32"):
    """The steps of the reference checkpoint."""
    config, params = tiny_glm.checkpoint()
    return Programs(
        config,
        params,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        table_width=WIDTH,
        cache_dtype=cache_dtype,
        shapes=SHAPES if cache_dtype == "float32" else FP8_SHAPES,
    )


def step_of(shape, rows):
    """Inputs with the given rows (tokens, start, block table); the others are padding."""
    inputs = StepInputs.empty(shape, WIDTH)
    inputs.wants_logprobs[:] = 1
    for r, (tokens, start, table) in enumerate(rows):
        inputs.tokens[r, : len(tokens)] = tokens
        inputs.start[r], inputs.length[r] = start, len(tokens)
        inputs.block_tables[r, : len(table)] = table
    return inputs


def run(shape, cache, rows):
    cache, _, packed = programs().run(shape, cache, programs().make_state(), [step_of(shape, rows)])
    return cache, programs().outputs(packed)


# What a step computes.

TABLES = ([7, 2, 9, 30], [1, 100, 5, 31], [4000, 3, 8, 32])


def prompt(r):
    return tiny_glm.recorded()["input_ids"][r]


def expected_logprobs(r, position):
    """Log-probabilities of the token after ``position`` of a prompt, from the recorded logits."""
    logits = tiny_glm.recorded()["logits"][r, position].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def assert_next_token_is_the_recorded(out, row, r, position):
    expected = expected_logprobs(r, position)
    order = np.argsort(-expected)[:MAX_LOGPROBS]
    assert out.token[row, 0] == order[0] and out.rank[row, 0] == 1
    assert np.abs(out.top_logprobs[row, 0] - expected[order]).max() < 1e-4
    assert out.top_ids[row, 0].tolist() == order.tolist()


def test_chunks_then_single_tokens_give_the_recorded_logits():
    cache = programs().make_cache()
    for start in (0, 16):
        cache, out = run(StepShape(1, 16), cache, [(prompt(0)[start : start + 16], start, TABLES[0])])
        assert_next_token_is_the_recorded(out, 0, 0, start + 15)
    for position in range(32, 36):
        cache, out = run(ONE, cache, [(prompt(0)[position : position + 1], position, TABLES[0])])
        assert_next_token_is_the_recorded(out, 0, 0, position)


def test_rectangle_with_padding_equals_separate_rows():
    """Rows of unequal length, one of them not at the start of its request, and one that is padding."""
    shape, start = StepShape(3, 8), 16
    cache = programs().make_cache()
    cache, _ = run(StepShape(1, 16), cache, [(prompt(0)[:16], 0, TABLES[0])])
    cache, out = run(shape, cache, [(prompt(0)[start : start + 8], start, TABLES[0]), (prompt(1)[:5], 0, TABLES[1])])
    assert_next_token_is_the_recorded(out, 0, 0, start + 7)
    assert_next_token_is_the_recorded(out, 1, 1, 4)

    alone = programs().make_cache()
    alone, _ = run(StepShape(1, 16), alone, [(prompt(0)[:24][:16], 0, TABLES[0])])
    alone, _ = run(StepShape(1, 16), alone, [(prompt(0)[start : start + 8], start, TABLES[0])])
    alone, _ = run(StepShape(1, 16), alone, [(prompt(1)[:5], 0, TABLES[1])])
    for mine, other in zip(jax.tree.leaves(cache), jax.tree.leaves(alone), strict=True):
        assert np.abs(np.asarray(mine)[:, :-BLOCK] - np.asarray(other)[:, :-BLOCK]).max() < 1e-4


def test_step_writes_the_slots_of_its_tokens_and_no_other():
    cache = programs().make_cache()
    cache, _ = run(StepShape(3, 8), cache, [(prompt(0)[:8], 0, TABLES[0]), (prompt(1)[:3], 0, TABLES[1])])
    written = np.where(np.arange(8) < [[8], [3]], np.arange(8), -1)
    expected = {*local_slots(np.array(TABLES[:2]), written, BLOCK, 1, 0, 1).reshape(-1).tolist()} - {-1}
    assert len(expected) == 11
    for pool in jax.tree.leaves(cache):
        for layer in np.asarray(pool)[:, :-BLOCK]:
            assert set(np.flatnonzero(layer.any(axis=-1))) == expected


def test_decode_rows_do_not_see_one_another():
    cache = programs().make_cache()
    for r in range(2):
        cache, _ = run(StepShape(1, 16), cache, [(prompt(r)[:16], 0, TABLES[r])])
    rows = [(prompt(r)[16:17], 16, TABLES[r]) for r in (1, 0)]
    _, out = run(FOUR, cache, rows)
    assert_next_token_is_the_recorded(out, 0, 1, 16)
    assert_next_token_is_the_recorded(out, 1, 0, 16)


# The pool is never copied.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_step_returns_the_pool_in_the_buffers_it_came_in(shape):
    cache = programs().make_cache()
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    after, _ = run(shape, cache, [(prompt(0)[:1], 0, TABLES[0])])
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))


CASES = [("float32", shape) for shape in SHAPES] + [("fp8_ds_mla", shape) for shape in FP8_SHAPES]


@functools.cache
def compiled(cache_dtype, shape):
    """The step as ``Programs`` compiles it: that very executable."""
    return programs(cache_dtype)._steps[shape]


@functools.cache
def pool_arrays(cache_dtype):
    return jax.tree.leaves(abstract_cache(tiny_glm.checkpoint()[0], NUM_BLOCKS, BLOCK, cache_dtype))


HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "uint8": "u8"}


@pytest.mark.parametrize(("cache_dtype", "shape"), CASES, ids=str)
def test_program_has_no_copy_of_the_pool(cache_dtype, shape):
    text = compiled(cache_dtype, shape).as_text()
    for x in pool_arrays(cache_dtype):
        array = re.escape(f"{HLO_TYPES[x.dtype.name]}[{','.join(map(str, x.shape))}]")
        assert re.search(array, text)  # the name under which the pool goes
        assert not re.search(rf"= \(?{array}\S* copy(-start)?\(", text)


@pytest.mark.parametrize(("cache_dtype", "shape"), CASES, ids=str)
def test_temporaries_are_smaller_than_the_pools_main_arrays(cache_dtype, shape):
    cache = jax.eval_shape(programs(cache_dtype).make_cache)
    least = min(x.size * x.dtype.itemsize for x in (cache.latent, cache.rope, cache.index_key))
    assert compiled(cache_dtype, shape).memory_analysis().temp_size_in_bytes < least / 2


@pytest.mark.parametrize(("cache_dtype", "shape"), CASES, ids=str)
def test_pool_is_not_converted_to_read_a_row(cache_dtype, shape):
    """All that is as large as one layer's keys is of the types that the pool is stored in."""
    large = (NUM_BLOCKS + 1) * BLOCK * tiny_glm.checkpoint()[0].index_head_dim
    text = compiled(cache_dtype, shape).as_text()
    arrays = {(kind, tuple(map(int, dims.split(",")))) for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]+)\]", text)}
    found = {kind for kind, dims in arrays if np.prod(dims) >= large}
    assert found == {HLO_TYPES[x.dtype.name] for x in pool_arrays(cache_dtype) if x.size >= large}


@pytest.mark.parametrize(("cache_dtype", "shape"), CASES, ids=str)
def test_every_array_of_the_pool_is_donated(cache_dtype, shape):
    header = compiled(cache_dtype, shape).as_text().split("\n", 1)[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", header).group(1)
    state = len(jax.tree.leaves(programs(cache_dtype).abstract_state()))
    assert aliases.count("-alias)") == len(pool_arrays(cache_dtype)) + state


# Shapes.


@given(st.integers(1, 300), st.integers(1, 5000))
def test_shapes_hold_whatever_a_step_may_be(max_num_seqs, max_chunk):
    shapes = step_shapes(max_num_seqs, max_chunk)
    decode, chunks = ([s for s in shapes if s.decode == kind] for kind in (True, False))
    assert all(s.tokens == 1 for s in decode) and all(s.requests == 1 and s.tokens > 1 for s in chunks)
    assert max(s.requests for s in shapes) == max_num_seqs
    assert max((s.tokens for s in chunks), default=1) == max_chunk
    for sizes in (sorted(s.requests for s in decode), sorted(s.tokens for s in chunks if s.tokens >= 16)):
        assert all(large <= 4 * small for small, large in itertools.pairwise(sizes))
    assert len(shapes) <= 2 + 5 + 5 + 1


@pytest.mark.parametrize(
    ("layout", "width", "widths"),
    [
        (Layout(pcp=8, dcp=8), 2048, (128, 512, 2048)),
        (Layout(pcp=8, dcp=2), 100, (25, 100)),
        (Layout(tp=4, dcp=4), 65, (17, 65)),
        (Layout(tp=4, dcp=4), 15, (15,)),
    ],
)
def test_shapes_that_gather_keys_come_for_shorter_contexts_too(layout, width, widths):
    shapes = (ONE, StepShape(4, 4, decode=True), StepShape(1, 16), StepShape(1, 64))
    expected = {StepShape(1, tokens, blocks) for tokens in (16, 64) for blocks in widths}
    assert set(with_contexts(shapes, width, layout, "auto")) == {*shapes[:2], *expected}
    assert with_contexts(shapes, width, layout, "query_gather") == shapes


def test_shapes_that_gather_no_keys_stay():
    shapes = (ONE, StepShape(1, 8), StepShape(1, 64))
    assert with_contexts(shapes, 2048, Layout(pcp=8), "auto") == shapes
    assert StepShape(1, 8) in with_contexts(shapes, 2048, Layout(pcp=8, dcp=8), "auto")  # split by row


def test_the_shortest_context_that_fits_is_taken():
    shapes = (ONE, StepShape(1, 16, 2), StepShape(1, 16, 4))
    some = object.__new__(Programs)
    some.shapes, some.table_width = shapes, 4
    assert [some.smallest(1, 9, blocks).blocks for blocks in (0, 1, 2, 3, 4)] == [2, 2, 2, 4, 4]
    assert some.smallest(1, 1, 4, decode=True) == ONE
    with pytest.raises(ConfigError, match="in 5 blocks"):
        some.smallest(1, 9, 5)


def test_smallest_program_that_fits_is_taken():
    assert programs().smallest(1, 1, decode=True) == ONE
    assert programs().smallest(2, 1, decode=True) == FOUR
    assert programs().smallest(1, 9) == StepShape(1, 16)
    assert programs().smallest(2, 2) == StepShape(3, 8)


def test_step_that_no_program_holds_is_refused():
    with pytest.raises(ConfigError, match="no compiled decode program holds 5 requests of 1 tokens"):
        programs().smallest(5, 1, decode=True)


def test_each_shape_is_compiled_once():
    assert programs().compilations == len(SHAPES)


def test_running_compiles_nothing():
    cache, _ = programs().make_cache(), programs().make_state()
    compiled = []

    def listen(event, seconds, **details):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for shape in SHAPES:
            cache, _ = run(shape, cache, [(prompt(0)[:1], 0, TABLES[0])])
        assert not compiled
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert compiled  # the listener hears
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_progress_counts_the_programs():
    seen = []
    config = GLMConfig.tiny(num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0)
    Programs(
        config,
        random_params(config),
        num_blocks=2,
        block_size=4,
        table_width=2,
        cache_dtype="float32",
        shapes=[ONE, StepShape(2, 1), ONE],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]
