"""How many clusters run side by side: by the groups of multiprocessors, or as a driver says."""

import ctypes
import re
import types
from importlib.resources import files
from pathlib import Path

import jax
import pytest

from glmjax.kernels import clusters
from glmjax.kernels.clusters import LaunchAttribute, LaunchConfig, ask_driver, clusters_at_once
from glmjax.kernels.roofline import MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK

WHOLE, SMALL = (18, 18, 16, 16, 16, 16, 16, 16), (18, 18, 18, 16, 16, 16, 16, 14)


class Driver:
    """A CUDA driver of devices with such groups of multiprocessors: does what it is asked to, and keeps an account."""

    def __init__(self, *devices, broken=None):
        self.devices, self.broken = devices, broken
        self.contexts, self.current, self.modules, self.attributes = [], [], 0, {}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name == self.broken:
            return lambda *_: 801  # not supported
        return lambda *arguments: getattr(self, f"_{name}")(*arguments) or 0

    def _cuInit(self, flags):
        assert flags == 0

    def _cuDeviceGet(self, device, ordinal):
        if ordinal >= len(self.devices):
            return 101  # invalid device
        device._obj.value = 10 + ordinal

    def _cuDevicePrimaryCtxRetain(self, context, device):
        self.contexts.append(device.value)
        context._obj.value = 100 + device.value

    def _cuCtxPushCurrent_v2(self, context):
        self.current.append(context.value)

    def _cuModuleLoadData(self, module, image):
        assert self.current and b".entry empty" in image
        self.modules += 1
        module._obj.value = 7

    def _cuModuleGetFunction(self, function, module, name):
        assert (module.value, name) == (7, b"empty")
        function._obj.value = 8

    def _cuFuncSetAttribute(self, function, attribute, value):
        assert function.value == 8
        self.attributes[attribute] = value

    def _cuOccupancyMaxActiveClusters(self, clusters, function, config):
        config = config._obj
        (attribute,) = config.attributes[: config.num_attributes]
        assert function.value == 8 and attribute.id == 4 and not config.stream
        blocks, *rest = attribute.value[:3]
        assert rest == [1, 1] and config.grid[0] % blocks == 0 and list(config.block) == [128, 1, 1]
        # A block takes a multiprocessor only if it asks for most of its memory; large clusters want leave.
        assert config.shared_bytes == self.attributes[8] == SHARED_BYTES_PER_BLOCK
        if blocks > 8 and self.attributes.get(14) != 1:
            return 912  # the cluster is too large
        groups = self.devices[self.current[-1] - 110]
        clusters._obj.value = sum(group // blocks for group in groups)

    def _cuModuleUnload(self, module):
        self.modules -= module.value == 7

    def _cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.current.pop()

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        self.contexts.remove(device.value)


@pytest.fixture(autouse=True)
def afresh():
    clusters._of_local_gpus.cache_clear()
    yield
    clusters._of_local_gpus.cache_clear()


def with_gpus(monkeypatch, driver, count, kind="NVIDIA H200", processes=1):
    gpus = [types.SimpleNamespace(device_kind=kind, local_hardware_id=i) for i in range(count)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)

    def load(name):
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_a_cluster_stays_within_a_group_of_multiprocessors():
    assert [clusters_at_once(n) for n in (1, 2, 4, 6, 8, 16)] == [MULTIPROCESSORS, 66, 32, 18, 16, 8]


def test_the_driver_is_asked_where_there_are_gpus(monkeypatch):
    driver = Driver(WHOLE, SMALL)
    with_gpus(monkeypatch, driver, 2)
    assert [clusters_at_once(n) for n in (1, 8, 11, 16)] == [132, 15, 8, 7]  # of the device with least room
    assert not driver.contexts and not driver.current and not driver.modules


@pytest.mark.parametrize(
    "broken",
    ["cuInit", "cuCtxPushCurrent_v2", "cuModuleLoadData", "cuFuncSetAttribute", "cuOccupancyMaxActiveClusters"],
)
def test_an_error_of_the_driver_leaves_the_usual_groups_and_says_so(broken, monkeypatch, caplog):
    driver = Driver(SMALL, broken=broken)
    with_gpus(monkeypatch, driver, 1)
    assert clusters_at_once(16) == 8
    assert f"{broken} returned CUDA error 801 for device 0" in caplog.text
    assert not driver.contexts and not driver.current and not driver.modules


def test_no_driver_leaves_the_usual_groups(monkeypatch, caplog):
    with_gpus(monkeypatch, None, 1)
    assert clusters_at_once(16) == 8 and "libcuda.so.1" in caplog.text


@pytest.mark.parametrize(("kind", "processes"), [("NVIDIA A100-SXM4-80GB", 1), ("NVIDIA H200", 2)])
def test_other_gpus_and_those_of_several_processes_are_not_asked(kind, processes, monkeypatch):
    with_gpus(monkeypatch, Driver(SMALL), 1, kind, processes)
    assert clusters_at_once(16) == 8


def test_a_device_that_the_driver_does_not_have():
    with pytest.raises(OSError, match="cuDeviceGet returned CUDA error 101 for device 3"):
        ask_driver(Driver(WHOLE), 3)


def test_structures_and_numbers_are_those_of_the_header():
    """Sizes and offsets that a C compiler gave for Triton's cuda.h; the numbers are looked up in it."""
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset) == (72, 8)
    fields = [getattr(LaunchConfig, name).offset for name, _ in LaunchConfig._fields_]
    assert fields == [0, 12, 24, 32, 40, 48] and ctypes.sizeof(LaunchConfig) == 56
    pytest.importorskip("triton")
    header = Path(str(files("triton"))) / "backends/nvidia/include/cuda.h"
    text = header.read_text()
    for name, value in (
        ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", clusters.CLUSTER_DIMENSION),
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", clusters.MAX_DYNAMIC_SHARED_SIZE_BYTES),
        ("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", clusters.NON_PORTABLE_CLUSTER_SIZE_ALLOWED),
    ):
        assert re.search(rf"\b{name}\s*= (\d+)", text)[1] == str(value)
