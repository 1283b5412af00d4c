"""Layouts: which degrees go together, what an error says, and which device of the mesh owns what."""

import dataclasses
import itertools
import pickle
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.params import QUANT_BLOCK as PARAMS_QUANT_BLOCK
from glmjax.sharding.layout import MESH_AXES, PRESETS, QUANT_BLOCK, Layout

MAX_DEVICES = 16
DEGREES = range(1, MAX_DEVICES + 1)
# Every layout of up to 16 devices, found without the checks of the class.
ALL = [
    Layout(dp=dp, tp=tp, pcp=pcp, dcp=dcp)
    for dp, tp, pcp in itertools.product(DEGREES, repeat=3)
    if dp * tp * pcp <= MAX_DEVICES
    for dcp in DEGREES
    if pcp * tp % dcp == 0
]
ON_EIGHT = [layout for layout in ALL if layout.num_devices <= 8]
NAMES = [field.name for field in dataclasses.fields(Layout)]


def test_the_default_is_one_device():
    assert Layout().num_devices == 1
    assert Layout() == Layout(dp=1, tp=1, pcp=1, dcp=1, ep=1, interleave=1)


def test_it_is_a_value():
    layout = Layout(pcp=8, dcp=8, ep=8)
    assert {layout: "x"}[pickle.loads(pickle.dumps(layout))] == "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tp = 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_a_degree_is_a_positive_whole_number(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be a whole number of at least 1, got {value!r}$"):
        Layout(**{name: value})


def test_dcp_divides_the_group():
    with pytest.raises(ConfigError) as error:
        Layout(dp=3, pcp=4, tp=2, dcp=3)
    assert str(error.value) == (
        "dcp=3 must divide pcp=4 x tp=2, the devices that share a KV cache: use dcp=1, 2, 4 or 8"
    )


def test_ep_spans_every_device_or_none():
    with pytest.raises(ConfigError) as error:
        Layout(dp=2, pcp=4, ep=4)
    assert str(error.value) == "ep=4 must be 1 or the number of devices, dp=2 x pcp=4 x tp=1: use ep=1 or 8"
    with pytest.raises(ConfigError, match=r"use ep=1$"):
        Layout(ep=2)
    assert Layout(dp=2, pcp=4, ep=8).ep == 8


def test_an_error_for_absurd_degrees_comes_at_once():
    with pytest.raises(ConfigError, match="use dcp=1, 2, 4"):
        Layout(pcp=10**18, dcp=3)


def test_interleave_changes_nothing_without_dcp():
    Layout(interleave=48).check_model(GLMConfig.tiny(), block_size=64)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_of_eight_devices_with_experts_over_all(name):
    layout = Layout.parse(name)
    assert layout is PRESETS[name]
    assert layout.num_devices == layout.ep == 8
    layout.check_model(GLMConfig.glm_5_3(), block_size=64, quantized=True)


@given(st.sampled_from(ALL), st.integers(1, 64), st.booleans())
def test_the_short_form_reads_back(layout, interleave, all_experts):
    layout = dataclasses.replace(layout, interleave=interleave, ep=layout.num_devices if all_experts else 1)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout", "short"),
    [
        ("pcp=8,dcp=8,ep=8", Layout(pcp=8, dcp=8, ep=8), "pcp=8,dcp=8,ep=8"),
        ("pcp8_dcp8", Layout(pcp=8, dcp=8, ep=8), "pcp=8,dcp=8,ep=8"),
        (" ep = 2, dp = 2 ", Layout(dp=2, ep=2), "dp=2,ep=2"),
        ("dp=1", Layout(), "dp=1"),
    ],
)
def test_parse_and_str(text, layout, short):
    assert Layout.parse(text) == layout
    assert str(layout) == short


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither degrees such as 'tp=8,ep=8' nor dp8, tp8, "),
        ("pcp9", "layout 'pcp9' is neither degrees"),
        ("tp=8,", "layout 'tp=8,' is neither degrees"),
        ("cp=8", "'cp' is not a degree; use dp, tp, pcp, dcp, ep or interleave"),
        ("tp=8,tp=8", "tp is given twice"),
        ("tp=eight", "tp must be a whole number such as 8, got 'eight'"),
        ("tp=-8", "tp must be a whole number such as 8, got '-8'"),
        ("tp=٨", "tp must be a whole number such as 8, got '٨'"),
        ("tp=" + "8" * 5000, "tp must be a whole number such as 8"),
        ("tp=0", "tp must be a whole number of at least 1, got 0"),
        ("tp=8,dcp=3", "dcp=3 must divide pcp=1 x tp=8"),
    ],
)
def test_parse_says_what_is_wrong(text, says):
    with pytest.raises(ConfigError) as error:
        Layout.parse(text)
    assert says in str(error.value)


def test_axes_refine_every_degree():
    for layout in ALL:
        sizes = layout.axis_sizes
        assert tuple(sizes) == MESH_AXES
        assert all(size >= 1 for size in sizes.values())
        assert layout.num_shards(layout.data_axes) == layout.dp
        assert layout.num_shards(layout.context_axes) == layout.pcp
        assert layout.num_shards(layout.tensor_axes) == layout.tp
        assert layout.num_shards(layout.shard_axes) == layout.dcp
        assert layout.num_shards(layout.replica_axes) == layout.group_size // layout.dcp
        assert layout.num_shards(layout.group_axes) == layout.group_size
        assert sorted(layout.shard_axes + layout.replica_axes) == sorted(layout.group_axes)


def test_experts_span_everything_or_nothing():
    for layout in ALL:
        spread = dataclasses.replace(layout, ep=layout.num_devices)
        assert layout.expert_axes == ()
        assert spread.num_shards(spread.expert_axes) == layout.num_devices


def test_tensor_parallel_peers_hold_different_shards_before_context_parallel_ones_do():
    sizes = {
        name: tuple(Layout.parse(name).axis_sizes.values())
        for name in ("pcp=8,dcp=2", "pcp=4,tp=2,dcp=4", "tp=4,dcp=2")
    }
    assert sizes == {"pcp=8,dcp=2": (1, 4, 2, 1, 1), "pcp=4,tp=2,dcp=4": (1, 2, 2, 1, 2), "tp=4,dcp=2": (1, 1, 1, 2, 2)}


def test_the_mesh_keeps_the_order_of_the_devices():
    for layout in ON_EIGHT:
        mesh = layout.mesh()
        assert dict(mesh.shape) == dict(mesh.abstract_mesh.shape) == layout.axis_sizes
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
        assert list(mesh.devices.flat) == jax.devices()[: layout.num_devices]


def test_dcp_over_a_whole_group_numbers_its_devices_in_order():
    for layout in ON_EIGHT:
        if layout.dcp == layout.group_size:
            axes = ("data", *layout.shard_axes, *layout.replica_axes)
            by_shard = layout.mesh().devices.transpose([MESH_AXES.index(axis) for axis in axes])
            assert list(by_shard.flat) == jax.devices()[: layout.num_devices]


def test_a_mesh_takes_the_first_of_the_devices_it_is_given():
    reverse = jax.devices()[::-1]
    assert list(Layout(pcp=2, tp=2).mesh(reverse).devices.flat) == reverse[:4]


def test_too_few_devices_of_a_process_come_with_advice():
    needed = jax.device_count() + 1
    with pytest.raises(ConfigError) as error:
        Layout(dp=needed).mesh()
    assert str(error.value) == (
        f"layout dp={needed} needs {needed} devices, this process sees {needed - 1}: on a CPU set "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} or jax_num_cpu_devices={needed}"
    )


def test_too_few_given_devices():
    with pytest.raises(ConfigError, match=r"^layout pcp=2 needs 2 devices, was given 1$"):
        Layout(pcp=2).mesh(jax.devices()[:1])


def test_layouts_need_no_jax():
    code = (
        "import sys; from glmjax.sharding.layout import Layout; Layout.parse('pcp8_dcp8'); print('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        (
            "tp=8",
            {"num_attention_heads": 4},
            "tp=8 cannot split num_attention_heads=4 evenly: for this model use tp=1, 2 or 4",
        ),
        # 6 heads allow 3, the dense layers do not.
        ("tp=4", {"num_attention_heads": 6}, "num_attention_heads=6 evenly: for this model use tp=1 or 2"),
        ("tp=2", {"intermediate_size": 255}, "tp=2 cannot split intermediate_size=255 evenly: for this model use tp=1"),
        ("tp=2", {"moe_intermediate_size": 31, "n_shared_experts": 2}, "split moe_intermediate_size=31 evenly"),
        ("tp=2,ep=2", {"moe_intermediate_size": 31}, "split moe_intermediate_size * n_shared_experts=31 evenly"),
        (
            "dp=6,ep=6",
            {},
            "ep=6 cannot split n_routed_experts=16 evenly: use ep=1, 2, 4, 8 or 16, with as many devices",
        ),
        (
            "pcp=2,dcp=2,interleave=3",
            {},
            "block_size=8 must be a multiple of interleave=3: use interleave=1, 2, 4 or 8",
        ),
        ("pcp=2,dcp=2,interleave=16", {}, "block_size=8 must be a multiple of interleave=16"),
    ],
)
def test_a_model_must_divide_evenly(layout, changes, says):
    with pytest.raises(ConfigError) as error:
        Layout.parse(layout).check_model(GLMConfig.tiny(**changes), block_size=8)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp=4", {}),
        ("dp=3,pcp=5", {"n_routed_experts": 7}),
        ("tp=2,ep=2", {"moe_intermediate_size": 31, "n_shared_experts": 2}),
        ("tp=2", {"intermediate_size": 255, "first_k_dense_replace": 0}),
        ("dp=6,ep=6", {"first_k_dense_replace": 7, "num_nextn_predict_layers": 0}),
        ("pcp=2,dcp=2,interleave=8", {}),
    ],
)
def test_what_is_not_split_need_not_divide(layout, changes):
    Layout.parse(layout).check_model(GLMConfig.tiny(**changes), block_size=8)


def test_quantized_weights_are_split_between_blocks():
    config = GLMConfig.glm_5_3()
    Layout(tp=16).check_model(config, block_size=64, quantized=True)
    Layout(tp=32).check_model(config, block_size=64)
    with pytest.raises(ConfigError) as error:
        Layout(tp=64).check_model(config, block_size=64, quantized=True)
    assert str(error.value) == (
        "tp=64 cannot split intermediate_size=12288 into whole blocks of 128, as its FP8 scales need: "
        "for this model use tp=1, 2, 4, 8 or 16"
    )
    Layout(pcp=64).check_model(GLMConfig.tiny(), block_size=64, quantized=True)


def test_the_block_of_scales_is_that_of_the_parameters():
    assert QUANT_BLOCK == PARAMS_QUANT_BLOCK
