"""The picture of a layout: what it shows is what ``cp`` says, and a figure comes out for every layout."""

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.sharding import cp, draw
from glmjax.sharding.layout import PRESETS, Layout

DEGREES = (1, 2, 3, 4, 8, 16)
LAYOUTS = [
    Layout(dp=dp, tp=tp, pcp=pcp, dcp=dcp, interleave=interleave)
    for dp, tp, pcp, dcp in itertools.product(DEGREES, repeat=4)
    if dp * tp * pcp <= 16 and pcp * tp % dcp == 0
    for interleave in (1, 4)
]
layouts = st.sampled_from(LAYOUTS)


def texts(figure):
    return " | ".join(text.get_text() for text in figure.findobj(lambda x: hasattr(x, "get_text")))


@given(layout=layouts)
def test_ranks_count_along_the_mesh_axes(layout):
    sizes = layout.axis_sizes
    where = draw.ranks(layout)
    axes = (layout.data_axes, layout.context_axes, layout.tensor_axes, layout.shard_axes)
    for device, place in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        at = dict(zip(sizes, place, strict=True))
        for rank, names in zip(where, axes, strict=True):
            inner = [math.prod(sizes[n] for n in names[i + 1 :]) for i in range(len(names))]
            assert rank[device] == sum(at[name] * stride for name, stride in zip(names, inner, strict=True))


@given(layout=layouts, length=st.integers(1, 300))
def test_every_token_is_stored_once_for_each_copy(layout, length):
    stored = draw.stored(layout, np.arange(length))
    assert stored.shape == (layout.num_devices, length)
    assert (stored.sum(axis=0) == layout.group_size // layout.dcp).all()
    assert (draw.stored_tokens(layout, length) == stored.sum(axis=1)).all()


@given(layout=layouts, position=st.integers(0, 2**20))
def test_a_token_is_stored_by_its_owner(layout, position):
    (holds,) = draw.stored(layout, np.array([position])).T
    where = draw.ranks(layout)
    assert set(where.dcp[holds]) == {cp.owner(position, layout.dcp, layout.interleave)}
    assert set(where.dp[holds]) == {0}


@given(layout=layouts, prompt_len=st.integers(1, 500))
def test_queries_are_those_of_the_zigzag(layout, prompt_len):
    where, width = draw.ranks(layout), cp.local_width(prompt_len, layout.pcp)
    shares = draw.computed(layout, prompt_len)
    for device, offsets in enumerate(shares):
        if where.dp[device]:
            assert not len(offsets)
        elif not cp.splits_by_row(prompt_len, layout.pcp):
            mine = cp.zigzag_positions(np.int32(prompt_len), layout.pcp, where.pcp[device], width)
            assert (offsets == mine[mine >= 0]).all()
    assert (np.bincount(np.concatenate(shares), minlength=prompt_len) == layout.tp).all()


@given(layout=layouts, prompt_len=st.integers(1, 300), cached=st.integers(0, 2**20))
def test_work_adds_up_to_that_of_one_device(layout, prompt_len, cached):
    total = sum(cached + i + 1 for i in range(prompt_len))
    assert draw.causal_work(layout, prompt_len, cached).sum() == pytest.approx(total)


@pytest.mark.parametrize("name", PRESETS)
def test_there_is_a_figure_of_every_preset(name):
    figure = PRESETS[name].draw(2048, 65536)
    assert figure._repr_png_().startswith(b"\x89PNG")
    shown = texts(figure)
    assert f"{PRESETS[name]}   ·   8 devices   ·   2,048 new tokens after 65,536 cached" in shown
    assert {"Who stores the KV", "Who computes which queries"} <= {t.strip() for t in shown.split("|")}


@pytest.mark.parametrize(
    ("layout", "prompt_len", "expected"),
    [
        (Layout(), 1, "What a device receives in one layer: nothing"),
        (Layout(pcp=8, tp=2, dcp=16, ep=16, interleave=8), 4096, "token t is on dcp rank ⌊t / 8⌋ mod 16"),
        (Layout(pcp=4, dcp=2), 3, "too few to cut into 8"),
        (Layout(dp=2, tp=4), 100, "16 of 64 heads"),
    ],
)
def test_it_says_what_is_particular_to_a_layout(layout, prompt_len, expected):
    figure = layout.draw(prompt_len)
    figure.canvas.draw()
    assert expected in texts(figure)


def test_bars_are_the_bytes_of_the_traffic():
    config = GLMConfig.tiny()
    layout = Layout(pcp=4, dcp=4, ep=4)
    figure = layout.draw(64, 100, config=config, block_size=16, prefill="kv_gather")
    traffic = layout.traffic(config, tokens=64, context_rows=164, block_size=16, prefill="kv_gather")
    drawn = figure.axes[-1]
    expected = [(t.what, t.received_bytes) for t in traffic if t.each != "step"]
    labels = [label.get_text() for label in drawn.get_yticklabels()]
    assert list(zip(labels, (bar.get_width() for bar in drawn.patches), strict=True)) == expected


def test_no_global_state_is_touched():
    PRESETS["tp8"].draw(64)
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(("given", "message"), [((0, 0), "prompt_len must be at least 1"), ((1, -1), "cached must be")])
def test_lengths_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Layout().draw(*given)
