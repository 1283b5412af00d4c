"""Compilation for H200 in a process that runs on CPU devices; the tests that compile need JAX's CUDA plugin."""

import importlib.util
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glmjax.errors import ConfigError
from glmjax.kernels.machine_code import machine_code
from glmjax.sharding import hlo
from glmjax.sharding.aot import compile_for_h200, h200_devices

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in PLUGINS), reason="needs JAX's CUDA plugin, no GPU"
)
LAYERS, WIDTH = 6, 1024


def h200_mesh(count):
    return Mesh(np.array(h200_devices(count)), ("x",), axis_types=(AxisType.Auto,))


def abstract(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("count", [-8, 0, 9, 12])
def test_counts_that_fill_no_hosts_are_refused(count):
    with pytest.raises(ConfigError, match=f"count={count} H200s: give 1 to 8, or a multiple of 8"):
        h200_devices(count)


def test_missing_plugin_says_what_to_install(monkeypatch):
    def without_plugin(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", without_plugin)
    with pytest.raises(ConfigError, match=r"pip install 'glmjax\[aot\]'.*JAX_PLATFORMS=cpu"):
        h200_devices(8)


def test_mesh_of_this_machine_is_refused():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    with pytest.raises(ConfigError, match=r"mesh of cpu devices: make it of h200_devices\(2\)"):
        compile_for_h200(jnp.sin, abstract(mesh, (4,)), mesh=mesh)


@needs_plugin
@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (3, 1), (8, 1), (16, 2)])
def test_devices_stand_in_hosts_of_eight(count, hosts):
    devices = h200_devices(count)
    assert [device.id for device in devices] == list(range(count))
    assert {device.device_kind for device in devices} == {"NVIDIA H200"}
    assert {device.process_index for device in devices} == set(range(hosts))


@needs_plugin
def test_code_is_optimised_whatever_xla_flags_say():
    """They tell XLA to optimise nothing here (conftest), and the GPU's compiler reads them too."""
    mesh = h200_mesh(1)
    array = abstract(mesh, (512, 512), dtype=jnp.float32)
    default, optimised = (
        machine_code(
            compile_for_h200(lambda x: jnp.cumsum(jnp.sin(x), 0), array, mesh=mesh, options=options).executable
        )
        for options in (None, {"xla_backend_optimization_level": 3})
    )
    assert default == optimised


@needs_plugin
def test_argument_that_is_not_placed_is_named():
    mesh = h200_mesh(2)
    tree = {"w": abstract(mesh, (4,)), "b": jax.ShapeDtypeStruct((4,), jnp.float32)}
    with pytest.raises(ConfigError, match=r"arguments\[1\]\['b'\] is ShapeDtypeStruct.*NamedSharding over the mesh"):
        compile_for_h200(lambda x, t: x, abstract(mesh, (4,)), tree, mesh=mesh)


@needs_plugin
@pytest.mark.parametrize("count", [8, 16])
def test_memory_is_that_of_one_device(count):
    mesh = h200_mesh(count)
    program = compile_for_h200(
        jax.shard_map(
            lambda x, w: x + lax.all_gather(w, "x", tiled=True).sum(axis=0),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        ),
        abstract(mesh, (4096, WIDTH), "x"),
        abstract(mesh, (WIDTH, WIDTH), "x"),
        mesh=mesh,
    )
    rows, weights = 2 * 4096 * WIDTH // count, 2 * WIDTH * WIDTH
    assert program.memory.arguments == rows + weights // count
    assert (program.memory.outputs, program.memory.aliased) == (rows, 0)
    assert weights <= program.memory.temporaries < 1.1 * weights  # the gathered weights
    module = hlo.parse(program.hlo)
    assert (module.num_devices, module.is_scheduled) == (count, True)
    assert [c.kind for c in hlo.collectives(module)] == ["all-gather"]


@needs_plugin
def test_donated_pool_is_updated_in_place():
    mesh = h200_mesh(8)
    pool = 2 * (1 << 16) * 576
    program = compile_for_h200(
        lambda pool, row: lax.dynamic_update_slice(pool, row, (0, 7, 0)),
        abstract(mesh, (8, 1 << 16, 576), "x"),
        abstract(mesh, (8, 1, 576), "x"),
        mesh=mesh,
        donate=(0,),
    )
    assert program.memory.aliased == program.memory.outputs == pool
    assert program.memory.temporaries < pool // 100
    assert program.memory.total == program.memory.arguments + program.memory.temporaries


@needs_plugin
def test_next_layers_gather_runs_during_this_layers_matmuls():
    mesh = h200_mesh(8)

    def layers(x, cached):  # x [T/8, D], cached [L, S/8, D]
        def gather(layer):
            return lax.all_gather(lax.dynamic_index_in_dim(cached, layer, keepdims=False), "x", tiled=True)

        def body(carry, layer):
            x, context = carry
            following = gather(jnp.minimum(layer + 1, LAYERS - 1))
            return (x + jax.nn.softmax(x @ context.T) @ context, following), None

        return lax.scan(body, (x, gather(0)), jnp.arange(LAYERS))[0][0]

    program = compile_for_h200(
        jax.shard_map(layers, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P("x"), check_vma=False),
        abstract(mesh, (4096, 576), "x"),
        abstract(mesh, (LAYERS, 8192, 576), None, "x"),
        mesh=mesh,
    )
    module = hlo.parse(program.hlo)
    (gather,) = (found for found in hlo.collectives(module) if found.runs == LAYERS)
    assert gather.received_bytes == 2 * 8192 * 576 * 7 // 8
    assert any("dot" in module.opcodes(instruction) for instruction in hlo.overlapped(module, gather))


@needs_plugin
def test_options_reach_the_compiler():
    mesh = h200_mesh(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_gpu_no_such'"):
        compile_for_h200(jnp.sin, abstract(mesh, (4,)), mesh=mesh, options={"xla_gpu_no_such": True})


@needs_plugin
def test_lowering_knows_which_gpu_it_is_for():
    mesh = h200_mesh(1)
    seen = []

    def function(x):
        seen.append(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
        return x

    compile_for_h200(function, abstract(mesh, (4,)), mesh=mesh)
    assert seen == ["NVIDIA H200"]


@needs_plugin
def test_programs_on_the_cpu_go_on_as_before():
    devices = jax.devices()
    here = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
    total = jax.jit(jax.shard_map(lambda v: lax.psum(v, "x"), mesh=here, in_specs=P("x"), out_specs=P()))
    v = jax.device_put(jnp.arange(8.0), NamedSharding(here, P("x")))
    before = total(v)
    mesh = h200_mesh(8)
    compile_for_h200(
        jax.shard_map(lambda v: lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()),
        abstract(mesh, (8,), "x"),
        mesh=mesh,
    )
    assert jax.devices() == devices
    assert jax.default_backend() == devices[0].platform
    assert total(v) == before == total(2 * v) / 2 == 28
    assert jax.jit(jnp.cos)(v[0]) == 1  # compiled since


@needs_plugin
def test_persistent_cache_raises_no_warning():
    mesh = h200_mesh(1)
    name = "jax_persistent_cache_min_compile_time_secs"
    previous = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                compile_for_h200(lambda x: jnp.tanh(x) + 1, abstract(mesh, (4096,)), mesh=mesh)
    finally:
        jax.config.update(name, previous)


@needs_plugin
def test_no_environment_variable_is_needed():
    code = (
        "import jax; jax.config.update('jax_platforms', 'cpu')\n"
        "from glmjax.sharding.aot import h200_devices; print(len(h200_devices(8)), jax.default_backend())"
    )
    settings = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "cpu"]
