"""The bytes of a step: figures worked out by hand, and how they grow.

That compiled programs exchange just this is for tests/glmjax/test_collective_audit.py to show.
"""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.sharding import hlo
from glmjax.sharding.layout import ONE_DEVICE, PRESETS, Layout
from glmjax.sharding.traffic import Transfer, row_bytes

GLM = GLMConfig.glm_5_3()
DEGREES = (1, 2, 4, 8)
LAYOUTS = [
    Layout(dp=dp, tp=tp, pcp=pcp, dcp=dcp, ep=ep)
    for dp, tp, pcp, dcp in itertools.product(DEGREES, repeat=4)
    if dp * tp * pcp <= 8 and pcp * tp % dcp == 0
    for ep in {1, dp * tp * pcp}
]
SHAPES = st.fixed_dictionaries(
    {"tokens": st.integers(1, 3000), "requests": st.integers(1, 40), "context_rows": st.integers(1, 2**20)}
)


def received(traffic, what):
    return sum(t.received_bytes for t in traffic if t.what == what)


def test_rows_are_those_of_the_format():
    assert [sum(row) for row in row_bytes(GLM)] == [656, 132]
    assert [sum(row) for row in row_bytes(GLM, "bfloat16")] == [2 * 576, 2 * 128]
    assert [sum(row) for row in row_bytes(GLM, "float32")] == [4 * 576, 4 * 128]


@pytest.mark.parametrize("tokens", [1, 2048])
def test_one_device_receives_nothing(tokens):
    traffic = ONE_DEVICE.traffic(GLM, tokens=tokens, context_rows=4096)
    assert (len(traffic), traffic.received_bytes, traffic.layer_bytes, traffic.kv) == (0, 0, 0, "pool")


def test_prefill_that_gathers_the_kv():
    """The seeds' prefill engine, 2K tokens after 248K: 11.4 GB of KV rows, 0.6 GB of index keys (spec/system.md 2)."""
    context = 248 * 1024
    traffic = PRESETS["pcp8_dcp8"].traffic(GLM, tokens=2048, context_rows=context, prefill="kv_gather")
    rows = context + 8 * 64  # one block more of each rank
    assert received(traffic, "new KV rows") == 2048 * 656 * 7 // 8
    assert received(traffic, "new index keys") == 2048 * 132 * 7 // 8
    assert received(traffic, "cached KV rows") == rows * 656 * 7 // 8
    assert received(traffic, "cached index keys") == rows * 132 * 7 // 8
    assert received(traffic, "expert tokens") == 2048 * (6144 * 2 + 8 * 8) * 7 // 8
    assert received(traffic, "expert results") == 2048 * 6144 * 2 * 7 // 8
    assert {t.what for t in traffic if t.each == "step"} == {"last hidden states", "logits"}
    assert 78 * received(traffic, "cached KV rows") == pytest.approx(11.4e9, rel=0.01)
    assert 21 * received(traffic, "cached index keys") == pytest.approx(0.62e9, rel=0.01)


def test_prefill_that_sends_the_queries():
    traffic = PRESETS["pcp8_dcp8"].traffic(GLM, tokens=2048, context_rows=2**20, prefill="query_gather")
    assert received(traffic, "queries") == 2048 * 64 * 576 * 2 * 7 // 8
    assert received(traffic, "partial outputs") == 2048 * 64 * 512 * 2 * 7 // 8
    assert received(traffic, "log-sum-exps") == 2048 * 64 * 4 * 7
    assert received(traffic, "index queries") == 2048 * 32 * (128 + 4) * 7 // 8
    assert received(traffic, "top-k candidates") == 2048 * 2048 * 8 * 7 // 8
    assert received(traffic, "selected positions") == 2048 * 2048 * 4 * 7 // 8


def test_decode_of_a_row_each_sends_queries_by_head():
    traffic = PRESETS["dcp8"].traffic(GLM, tokens=1, requests=16, context_rows=2**20)
    assert traffic.kv == "query_gather"
    assert received(traffic, "queries") == 16 * 64 * 576 * 2 * 7 // 8
    assert received(traffic, "attention output") == 2 * 16 * 6144 * 2 * 7 // 8
    assert not received(traffic, "new KV rows")  # every device has computed them


def test_rows_of_a_decode_are_padded_to_the_ranks():
    layout = PRESETS["pcp8_dcp8"]
    few, eight = (layout.traffic(GLM, tokens=1, requests=n, context_rows=4096) for n in (3, 8))
    assert received(few, "queries") == received(eight, "queries") == 8 * 64 * 576 * 2 * 7 // 8


def test_how_often():
    runs = {t.what: (t.each, t.runs) for t in PRESETS["pcp8_dcp8"].traffic(GLM, tokens=2048, context_rows=2**16)}
    assert runs["new KV rows"] == ("layer", 78)
    assert runs["new index keys"] == ("indexer", 21)
    assert runs["expert tokens"] == ("expert layer", 75)
    assert runs["cached KV rows"] == ("layer", 79)  # the loop over the last groups gathers once more
    assert runs["logits"] == ("step", 1)


def test_few_tokens_travel_to_the_kv_and_a_short_context_to_the_queries():
    layout = PRESETS["pcp8_dcp8"]

    def source(tokens, context):
        return layout.traffic(GLM, tokens=tokens, context_rows=context + tokens).kv

    assert [source(2048, k << 10) for k in (0, 64, 248, 1024)] == ["kv_gather"] * 3 + ["query_gather"]
    assert [source(n, 64 << 10) for n in (1, 16, 128, 1024)] == ["query_gather"] * 3 + ["kv_gather"]


@given(layout=st.sampled_from(LAYOUTS), shape=SHAPES)
def test_auto_is_the_lesser_of_the_two(layout, shape):
    auto, queries, kv = (layout.traffic(GLM, **shape, prefill=way) for way in ("auto", "query_gather", "kv_gather"))
    assert auto.received_bytes == min(queries.received_bytes, kv.received_bytes)
    assert auto in (queries, kv)


@given(layout=st.sampled_from(LAYOUTS), shape=SHAPES, more=st.integers(0, 2**20))
def test_only_gathered_kv_grows_with_the_context(layout, shape, more):
    longer = {**shape, "context_rows": shape["context_rows"] + more}
    for prefill in ("query_gather", "kv_gather"):
        one, two = (layout.traffic(GLM, **s, prefill=prefill) for s in (shape, longer))
        changed = [a.what for a, b in zip(one, two, strict=True) if a != b]
        assert set(changed) <= ({"cached KV rows", "cached index keys"} if one.kv == "kv_gather" else set())
        assert one.received_bytes <= two.received_bytes


@given(layout=st.sampled_from(LAYOUTS), shape=SHAPES)
def test_data_parallel_ranks_exchange_expert_tokens_and_results_only(layout, shape):
    one = dataclasses.replace(layout, dp=1, ep=1).traffic(GLM, **shape)
    many = dataclasses.replace(layout, dp=4, ep=1).traffic(GLM, **shape)
    assert many.transfers[: len(one)] == one.transfers
    assert [t.what for t in many.transfers[len(one) :]] == ["sampled tokens"]


@given(
    kind=st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]),
    devices=st.integers(2, 16),
    parts=st.integers(1, 1000),
)
def test_bytes_are_counted_as_in_hlo(kind, devices, parts):
    operand = parts * devices
    ours = Transfer("", kind, ("x",), devices, (operand,), "layer", 1)
    theirs = hlo.Collective(None, None, kind, operand, ours.result_bytes, devices, 1, False)
    assert ours.received_bytes == theirs.received_bytes


def test_a_heading_and_a_line_each():
    text = str(PRESETS["tp8"].traffic(GLM, tokens=1, context_rows=64))
    assert [line.split("  ")[0].strip() for line in text.splitlines()[:-1]] == [
        "what",
        "attention output",
        "feed-forward output",
        "logits",
    ]
    assert text.splitlines()[-1].endswith("bytes received by each device in a step (KV: pool)")


@pytest.mark.parametrize("name", ["tokens", "context_rows", "block_size", "requests", "activation_bytes"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got 0$"):
        ONE_DEVICE.traffic(GLM, **{"tokens": 1, "context_rows": 64, name: 0})


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("kv_dtype", "fp8_ds_mla, bfloat16, float32"),
        ("prefill", "auto, query_gather, kv_gather"),
        ("combine", "ag_rs, a2a"),
    ],
)
def test_unknown_choices_are_refused(name, right):
    with pytest.raises(ConfigError, match=f"^{name} must be one of {right}, got 'other'$"):
        ONE_DEVICE.traffic(GLM, tokens=1, context_rows=64, **{name: "other"})


def test_a_model_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="tp=3 cannot split num_attention_heads=64"):
        Layout(tp=3).traffic(GLM, tokens=1, context_rows=64)
