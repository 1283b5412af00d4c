"""What goes in and out of a step as one array."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.config import GLMConfig
from glmjax.step_io import (
    MAX_BANNED,
    StepInputs,
    StepOutputs,
    StepShape,
    num_logprobs,
    output_width,
    packed_width,
    unpack,
)
from glmjax.types import MAX_LOGPROBS


@st.composite
def step_inputs(draw):
    shape = StepShape(draw(st.integers(1, 4)), draw(st.integers(1, 5)), decode=draw(st.booleans()))
    width, pages = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    inputs = StepInputs.empty(shape, width, pages)
    for field in dataclasses.fields(inputs):
        array = getattr(inputs, field.name)
        if array.dtype == np.float32:
            array[:] = rng.standard_normal(array.shape)
        else:
            array[:] = rng.integers(np.iinfo(array.dtype).min, np.iinfo(array.dtype).max, array.shape, endpoint=True)
    return shape, width, pages, inputs


@given(step_inputs())
def test_inputs_arrive_as_they_were_packed(case):
    shape, width, pages, inputs = case
    packed = inputs.pack()
    assert packed.shape == (shape.requests, packed_width(shape, width, pages)) and packed.dtype == np.int32
    rows = unpack(jnp.asarray(packed), shape, width, pages)
    assert rows.regions.table.shape[1] == (pages if shape.decode else 0)
    for field in dataclasses.fields(inputs):
        sent, name = getattr(inputs, field.name), field.name.removeprefix("region_")
        where = rows.regions if name != field.name else rows if hasattr(rows, name) else rows.how
        got = np.asarray(getattr(where, name))
        if field.name in ("wants_logprobs", "continues"):
            sent = sent > 0
        assert got.dtype == sent.dtype and got.tobytes() == sent.tobytes(), field.name


def test_empty_inputs_are_padding():
    rows = unpack(jnp.asarray(StepInputs.empty(StepShape(2, 3), 4).pack()), StepShape(2, 3), 4)
    assert not np.asarray(rows.length).any() and not np.asarray(rows.continues).any()
    assert (np.asarray(rows.slot) == -1).all() and (np.asarray(rows.next_token) == -1).all()
    assert (np.asarray(rows.how.banned) == -1).all() and rows.how.banned.shape == (2, MAX_BANNED)
    assert not np.asarray(rows.how.temperature).any() and (np.asarray(rows.how.top_p) == 1).all()


@pytest.mark.parametrize("vocab_size", [4, 320])
@pytest.mark.parametrize("shape", [StepShape(2, 7), StepShape(2, 3, decode=True)])
def test_outputs_unpack_to_what_the_step_packed(vocab_size, shape):
    config = GLMConfig.tiny(vocab_size=vocab_size, eos_token_ids=(1,))
    most = num_logprobs(config)
    assert most == min(MAX_LOGPROBS, vocab_size)
    packed = np.arange(2 * output_width(config, shape), dtype=np.int32).reshape(2, -1)
    out = StepOutputs.unpack(packed, most)
    new_tokens = 3 if shape.decode else 1
    assert [out.count.tolist(), out.drafted.tolist()] == packed[:, :2].T.tolist()
    by_token = packed[:, 2:].reshape(2, new_tokens, -1)
    assert out.token.tolist() == by_token[..., 0].tolist() and out.rank.tolist() == by_token[..., 1].tolist()
    assert out.logprob.view(np.int32).tolist() == by_token[..., 2].tolist()
    assert out.top_ids.tolist() == by_token[..., 3 : 3 + most].tolist()
    assert out.top_logprobs.view(np.int32).tolist() == by_token[..., 3 + most :].tolist()
