"""Where KV on its way between engines is, and how much of it there may be."""

import dataclasses

import jax
import pytest

import glmjax.memory
import glmjax.stage_sizes
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.memory import GIB, block_bytes
from glmjax.options import engine_options
from glmjax.pool_sizes import pool_sizes
from glmjax.stage_sizes import blocks_on_device, blocks_on_host

GLM = GLMConfig.glm_5_3()
BUDGET = 32.0 * GIB  # for KV on each device


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str


def on_device(connector="local", platform="gpu", role="decode", budget=BUDGET, config=GLM, **options):
    own = {"dtype": "bfloat16", "num_speculative_tokens": 3, "layout": "dp=8,ep=8", "role": role} | options
    return blocks_on_device(config, engine_options(**own), connector, budget, [Device(platform)])


def test_by_itself_the_stage_is_on_devices_that_have_room_for_the_longest_request():
    one = 64 * 54_728  # of a block of a device, in FP8 with the MTP layer
    assert on_device(max_model_len=32768) == 2 * 512
    assert on_device(max_model_len=65536) == int(BUDGET / 8 / one) < 2 * 1024
    assert on_device(max_model_len=131072) is None
    assert on_device(max_model_len=131072, kv_buffer_device="host") is None
    assert on_device(max_model_len=131072, kv_buffer_device="device") == 2048
    assert on_device(max_model_len=131072, layout="pcp=8,dcp=8,ep=8", role="prefill") == 2 * 256
    assert on_device(max_model_len=32768, kv_buffer_device="host") is None


def test_a_request_that_the_pool_could_not_hold_needs_no_room():
    assert on_device(num_device_blocks=100) == 200


def test_rows_that_go_to_the_host_come_by_the_host():
    assert on_device(max_model_len=32768, hisparse_host_gib=48) is None
    assert on_device(max_model_len=32768, hisparse_host_gib=48, kv_buffer_device="device") == 1024


def test_nixl_reads_into_devices_where_rows_stay_together_and_each_device_has_its_own():
    together = "dp=8,ep=8,interleave=64"  # says that the prefill engine's are too
    assert on_device("nixl", max_model_len=32768, layout=together) == 1024
    assert on_device("nixl", max_model_len=32768) is None
    assert on_device("nixl", platform="cpu", max_model_len=32768, layout=together) is None
    assert on_device("nixl", platform="cpu", max_model_len=32768, kv_buffer_device="device") == 1024
    assert on_device("nixl", max_model_len=32768, layout="tp=8,interleave=64") is None
    assert on_device("nixl", max_model_len=32768, layout="tp=8", role="prefill") == 1024
    assert on_device("nixl", max_model_len=32768, layout="pcp=8,dcp=8,ep=8") is None
    assert on_device("nixl", max_model_len=32768, layout="pcp=8,dcp=8,ep=8", role="prefill") == 128
    assert on_device("nixl", max_model_len=32768, layout="pcp=8,dcp=8,ep=8,interleave=64") == 128
    with pytest.raises(ConfigError, match=r"kv_buffer_device='device' .* several devices have the same KV"):
        on_device("nixl", max_model_len=32768, layout="tp=8", kv_buffer_device="device")


def test_connector_jax_has_it_on_the_host():
    assert on_device("jax", max_model_len=32768) is None
    with pytest.raises(ConfigError, match=r"kv_buffer_device='device' .* connector='jax' moves host memory"):
        on_device("jax", max_model_len=32768, kv_buffer_device="device")


def test_its_size_on_devices_may_be_told():
    assert on_device(max_model_len=131072, connector_stage_gib=2) == int(2 * GIB / (64 * 54_728))
    assert on_device(max_model_len=131072, connector_stage_gib=5) is None
    for gib in (1e-6, 17):
        with pytest.raises(
            ConfigError, match=r"more than half of the 32.00 GiB of memory for KV.*set connector_stage_gib"
        ):
            on_device(max_model_len=131072, connector_stage_gib=gib, kv_buffer_device="device")


def test_pool_and_stage_share_the_devices_memory(monkeypatch):
    monkeypatch.setattr(glmjax.pool_sizes, "device_budget", lambda options, devices, share: BUDGET)
    options = engine_options(dtype="bfloat16", layout="dp=8,ep=8", role="decode", max_model_len=32768, max_num_seqs=64)
    one = block_bytes(GLM, options)
    alone, beside = (pool_sizes(GLM, options, kind, jax.devices()[:1]) for kind in (None, "local"))
    assert alone.stage is None and alone.num_blocks == int(BUDGET / one)
    assert beside.stage.on_device and beside.stage.num_blocks == 1024
    assert beside.num_blocks == alone.num_blocks - 1024
    told = dataclasses.replace(options, kv_cache_gib=32)  # of the pool: the stage is beside it
    assert pool_sizes(GLM, told, "local", jax.devices()[:1]).num_blocks == alone.num_blocks


def test_the_stage_holds_two_of_the_longest_requests_or_one_where_two_are_large(monkeypatch):
    monkeypatch.setattr(glmjax.stage_sizes, "available_bytes", lambda: 100 * GIB)
    options = engine_options()
    assert blocks_on_host(options, 1, 100, 1 << 20) == 200
    assert blocks_on_host(options, 1, 100, 1 << 26) == 128
    assert blocks_on_host(options, 1, 200, 1 << 26) == 200
    assert blocks_on_host(engine_options(connector_stage_gib=1, role="decode"), 1, 100, 1 << 26) == 16


def test_a_stage_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match=r"connector_stage_gib=1e-06 holds no block: one takes 0.0010 GiB"):
        blocks_on_host(engine_options(connector_stage_gib=1e-6, role="decode"), 1, 100, 1 << 20)


@pytest.mark.parametrize(("gib", "dp"), [(10000, 1), (100, 100)])
def test_a_stage_that_is_too_large_is_refused(gib, dp, monkeypatch):
    monkeypatch.setattr(glmjax.stage_sizes, "available_bytes", lambda: 1000 * GIB)
    with pytest.raises(ConfigError, match=r"set connector_stage_gib"):
        blocks_on_host(engine_options(connector_stage_gib=gib, role="decode"), dp, 100, 1 << 20)
