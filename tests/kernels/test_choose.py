"""Which implementation runs, by device and by wish, and what is logged of it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_code import needs_plugin

from glmjax.errors import ConfigError
from glmjax.kernel_report import h200_mesh
from glmjax.kernels import choose as module
from glmjax.kernels.choose import choose, target_device

H200 = ("gpu", "NVIDIA H200")


@pytest.fixture(autouse=True)
def log(caplog):
    module._say.cache_clear()
    caplog.set_level(logging.INFO, "glmjax.kernels")
    return caplog


def on(monkeypatch, device):
    monkeypatch.setattr(module, "target_device", lambda: device)


def test_a_cpu_runs_the_jnp_form_without_a_word(log):
    assert choose("topk", kernel="triton") == "jnp"
    assert choose("topk", "auto", kernel="triton", obstacle="k is odd") == "jnp"
    assert not log.records


@pytest.mark.parametrize(
    "kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H800"]
)
def test_a_hopper_gpu_runs_the_kernel_and_says_so_once(monkeypatch, log, kind):
    on(monkeypatch, ("gpu", kind))
    assert [choose("topk", kernel="triton") for _ in range(3)] == ["triton"] * 3
    assert [(r.levelname, r.getMessage()) for r in log.records] == [("INFO", f"topk: triton kernel, for {kind}")]


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "AMD Instinct MI300X"])
def test_other_gpus_run_the_jnp_form_and_warn(monkeypatch, log, kind):
    on(monkeypatch, ("gpu", kind))
    assert choose("topk", kernel="triton") == "jnp"
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"topk: jnp form on {kind}, which is slow: the kernel is for Hopper GPUs"


def test_an_obstacle_on_a_gpu_is_a_warning(monkeypatch, log):
    on(monkeypatch, H200)
    assert choose("topk", kernel="triton", obstacle="k=3000 is over 2048") == "jnp"
    assert [(r.levelname, r.getMessage()) for r in log.records] == [
        ("WARNING", "topk: jnp form on NVIDIA H200, which is slow: k=3000 is over 2048")
    ]


def test_a_wish_is_followed(monkeypatch, log):
    assert choose("topk", "triton", kernel="triton") == "triton"
    assert choose("topk", "jnp", kernel="triton") == "jnp"
    on(monkeypatch, H200)
    assert choose("topk", "jnp", kernel="triton") == "jnp"
    assert [r.getMessage() for r in log.records] == [
        "topk: triton kernel, as asked for",
        "topk: jnp form on NVIDIA H200, as asked for",
    ]


def test_a_wish_that_cannot_be_is_an_error():
    with pytest.raises(ConfigError, match=r"topk cannot run its triton kernel: k is odd\. Use implementation='auto'"):
        choose("topk", "triton", kernel="triton", obstacle="k is odd")


@pytest.mark.parametrize("name", ["hopper", "cuda", ""])
def test_unknown_implementations_are_refused(name):
    with pytest.raises(ConfigError, match=f"implementation='{name}' of topk: give 'auto', 'jnp' or 'triton'"):
        choose("topk", name, kernel="triton")


def seen_by(function_of_jit):
    seen = []

    def look(x):
        seen.append(target_device())
        return x

    function_of_jit(look)
    return seen


def test_device_is_the_default_one():
    assert target_device() == ("cpu", "cpu")
    with jax.default_device(jax.devices("cpu")[1]):
        assert target_device() == ("cpu", "cpu")


def test_device_of_a_mesh_is_seen_in_its_programs():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    seen = seen_by(lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(2)))
    assert set(seen) == {("cpu", "cpu")}


@needs_plugin
def test_device_is_what_a_program_is_compiled_for():
    with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
        assert set(seen_by(lambda f: jax.jit(f).trace(jax.ShapeDtypeStruct((2,), jnp.float32)))) == {H200}
    assert target_device() == ("cpu", "cpu")
