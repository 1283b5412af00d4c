"""Options of an engine: what is refused, and that the message names the value and what would be right."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.errors import ConfigError
from glmjax.options import EngineOptions, engine_options
from glmjax.sharding.layout import Layout

FIELDS = [f.name for f in dataclasses.fields(EngineOptions)]
SIZES = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_device_blocks"]


def test_defaults_are_valid_and_may_be_said():
    assert engine_options() == EngineOptions()
    assert engine_options(**{field: getattr(EngineOptions(), field) for field in FIELDS}) == EngineOptions()


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [
        ("bfloat16", "auto", "fp8_ds_mla"),
        ("float32", "auto", "float32"),
        ("float32", "fp8_ds_mla", "fp8_ds_mla"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_dtype_of_the_cache(dtype, kv_cache_dtype, expected):
    assert engine_options(dtype=dtype, kv_cache_dtype=kv_cache_dtype).cache_dtype == expected


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("dtype", "float64", "'bfloat16', 'float32'"),
        ("dtype", None, "'bfloat16', 'float32'"),
        ("kv_cache_dtype", "fp8", "'auto', 'fp8_ds_mla', 'bfloat16', 'float32'"),
        ("policy", "lifo", "'fcfs', 'priority'"),
        ("max_model_len", 1, "a whole number of at least 2"),
        ("kv_cache_gib", 0, "a positive number"),
        ("kv_cache_gib", -1.5, "a positive number"),
        ("kv_cache_gib", math.nan, "a positive number"),
        ("kv_cache_gib", math.inf, "a positive number"),
        ("kv_cache_gib", "4", "a positive number"),
        ("seed", 1.5, "a whole number"),
        ("enable_prefix_caching", "no", "True or False"),
        *((field, value, "a whole number of at least") for field in SIZES for value in (0, -3, 2.0, "8", True)),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(field, value, remedy):
    with pytest.raises(ConfigError) as caught:
        engine_options(**{field: value})
    assert str(caught.value).startswith(f"{field} must be ")
    assert remedy in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        (None, Layout()),
        (Layout(pcp=8, ep=8), Layout(pcp=8, ep=8)),
        ("pcp=8,dcp=8,ep=8", Layout(pcp=8, dcp=8, ep=8)),
        ("pcp8_dcp8", Layout(pcp=8, dcp=8, ep=8)),
    ],
)
def test_layout_is_a_value_or_its_text(value, layout):
    assert engine_options(layout=value).layout == layout


@pytest.mark.parametrize("value", ["", "pcp", "pcp=8,dcp=3", "tp=0"])
def test_text_that_is_no_layout_is_refused(value):
    with pytest.raises(ConfigError):
        engine_options(layout=value)


@given(
    st.sampled_from(sorted({*FIELDS} - {"layout", "prefill", "decode"})),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]),
)
def test_any_value_is_taken_or_named(field, value):
    try:
        options = engine_options(**{field: value})
    except ConfigError as error:
        assert str(error).startswith(f"{field} must be ") and repr(value) in str(error)
    else:
        assert getattr(options, field) is value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "dp=1"}, "go together: got only prefill=dp=1"),
        ({"decode": "dp=1"}, "go together: got only decode=dp=1"),
        ({"prefill": "dp=1", "decode": "dp=1", "layout": "tp=2"}, "layout must be left out where prefill and decode"),
        (
            {"prefill": "dp=1", "decode": "dp=1", "kv_offload": "host", "kv_offload_gib": 1},
            "kv_offload must be left at None with prefill and decode",
        ),
        ({"kv_offload": "host"}, "kv_offload must come with kv_offload_gib"),
        ({"kv_offload_gib": 1}, "kv_offload_gib must be left at None without kv_offload='host', got 1"),
        ({"kv_offload": "host", "kv_offload_gib": 1, "hisparse_host_gib": 1}, "asks for HiSparse: give one of them"),
        ({"hisparse_buffer": 64}, "hisparse_buffer must be left at None without hisparse_host_gib, got 64"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        engine_options(**options)
    assert message in str(caught.value)


def test_two_layouts_may_be_texts():
    options = engine_options(prefill="pcp=2,dcp=2", decode="dp=2,ep=2")
    assert (options.prefill, options.decode) == (Layout(pcp=2, dcp=2), Layout(dp=2, ep=2))


def test_two_layouts_go_with_hisparse():
    options = engine_options(prefill="dp=1", decode="dp=1", hisparse_host_gib=2, hisparse_buffer=64)
    assert (options.hisparse_host_gib, options.hisparse_buffer) == (2, 64)
