"""Compiles programs for N H200s on a machine that has none, and says what XLA made of them.

XLA's own buffer assignment is the memory figure and its scheduled HLO (``glmjax.sharding.hlo`` reads it) the proof of
overlap. Needs JAX's CUDA plugin and ptxas, no GPU and no driver; the process keeps its own backend, and arrays and
programs on it are not touched.

What such a compilation cannot know: nothing is autotuned, so XLA's own matmuls have default tiles and may hold the
partial sums of a split contraction, and sorts do without CUB. The devices list no memory kinds, so JAX drops the
``pinned_host`` of a sharding over them: ``compile_for_h200(on_host=...)`` says it instead.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jaxlib.mlir import ir

from glmjax.errors import ConfigError

GPUS_PER_HOST = 8
OPTIONS: Mapping[str, bool | int | str] = {
    "xla_backend_optimization_level": 3,  # XLA's default, whatever XLA_FLAGS says for a CPU
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # The fields of a KV row travel together: of several collectives XLA lets only one at a time run beside the compute.
    "xla_gpu_all_gather_combine_threshold_bytes": 4 << 30,
    # Per cent of the memory that the scheduler may fill, what there is less the arguments. Beyond it nothing overlaps,
    # and 744B of FP8 weights on eight GPUs can leave too little for a layer's gathered KV and the next one's.
    "xla_gpu_memory_limit_slop_factor": 300,
}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes for one device, from XLA's buffer assignment: in its own memory, or in the host's."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # of the outputs, those that live in donated arguments

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class H200Program:
    """A compiled program.

    Attributes:
      memory: what one device needs to run it.
      host_memory: what it needs for that device in the host's pinned memory; not in ``memory``.
      hlo: the scheduled HLO of one device.
      executable: JAX's own object; ``serialize_executable`` gets the machine code out of it. It cannot be called.
    """

    memory: DeviceMemory
    host_memory: DeviceMemory
    hlo: str = field(repr=False)
    executable: jax.stages.Compiled = field(repr=False)


def h200_devices(count: int) -> list[jax.Device]:
    """Compile-only H200s, for a ``Mesh`` that keeps their order; more than eight stand in hosts of eight.

    JAX leaves the CUDA plugin out if it finds no CUDA libraries, unless it was told not to run on CUDA: on a machine
    without a GPU set ``JAX_PLATFORMS=cpu``, or ``jax.config.update("jax_platforms", "cpu")`` before JAX is first used.

    Raises:
      ConfigError: JAX has no CUDA plugin, or this many GPUs do not fill hosts of eight.
    """
    hosts, rest = divmod(count, GPUS_PER_HOST)
    if count < 1 or (hosts and rest):
        raise ConfigError(f"count={count} H200s: give 1 to {GPUS_PER_HOST}, or a multiple of {GPUS_PER_HOST}")
    target = files("glmjax.sharding").joinpath("h200.txtpb").read_text()
    topology = f"1x{hosts}x{GPUS_PER_HOST}" if hosts else f"1x1x{count}"  # slices x hosts x GPUs of a host
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices
    except NotImplementedError as error:
        raise ConfigError(
            "JAX has no CUDA plugin to compile for H200 with: pip install 'glmjax[aot]'. If that is installed and "
            "this machine has no GPU, JAX left it out: set JAX_PLATFORMS=cpu"
        ) from error


def compile_for_h200(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: Mesh,
    donate: tuple[int, ...] = (),
    on_host: tuple[int, ...] = (),
    options: Mapping[str, bool | int | str] | None = None,
) -> H200Program:
    """Compiles a function of arrays for the devices of ``mesh``.

    Args:
      function: what ``jax.jit`` takes.
      arguments: a pytree of ``jax.ShapeDtypeStruct`` for each argument, each with a ``NamedSharding`` over ``mesh``.
      mesh: over ``h200_devices``.
      donate: positions of the arguments whose memory the outputs may take.
      on_host: positions of the arguments that are in pinned host memory; so the function finds them, in
        ``jax.memory.Space.Host``.
      options: XLA compiler options on top of ``OPTIONS``.

    Raises:
      ConfigError: ``mesh`` is not of GPUs, or an argument is not an abstract array placed on it.
      jax.errors.JaxRuntimeError: XLA refuses the program, or there is no ptxas.
    """
    _check(arguments, mesh)
    host = jax.memory.Space.Host

    def placed(*arguments: Any) -> Any:
        return function(*(jax.device_put(x, host) if i in on_host else x for i, x in enumerate(arguments)))

    jitted = (
        jax.jit(placed, donate_argnums=donate, keep_unused=True)
        if on_host
        else jax.jit(function, donate_argnums=donate)
    )
    # Pallas asks the abstract mesh which GPU it lowers for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        # JAX's persistent cache, where it is on, keeps these programs but cannot load them without a GPU.
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
        lowered = jitted.lower(*arguments)
        if on_host:
            places = [i in on_host for i, x in enumerate(arguments) for _ in jax.tree.leaves(x)]
            _put_on_host(lowered, places)
        compiled = lowered.compile(compiler_options={**OPTIONS, **(options or {})})
    sizes, hlo = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None and hlo is not None  # XLA's GPU compiler gives both
    memory, host_memory = (
        DeviceMemory(
            arguments=getattr(sizes, f"{where}argument_size_in_bytes"),
            outputs=getattr(sizes, f"{where}output_size_in_bytes"),
            temporaries=getattr(sizes, f"{where}temp_size_in_bytes"),
            aliased=getattr(sizes, f"{where}alias_size_in_bytes"),
        )
        for where in ("", "host_")
    )
    return H200Program(memory, host_memory, hlo, compiled)


def _put_on_host(lowered: jax.stages.Lowered, places: list[bool]) -> None:
    """Marks arguments of a lowered program as JAX does where the devices do list their memory kinds."""
    module: Any = lowered.compiler_ir()
    with module.context:
        (main,) = (op.operation for op in module.body if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        kind = ir.StringAttr.get("pinned_host")
        attributes = []
        for old, there in zip(ir.ArrayAttr(main.attributes["arg_attrs"]), places, strict=True):
            entries: Any = ir.DictAttr(old)
            new = {x.name: x.attr for x in entries} | ({"mhlo.memory_kind": kind} if there else {})
            attributes.append(ir.DictAttr.get(new))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def _check(arguments: tuple[Any, ...], mesh: Mesh) -> None:
    platform = mesh.devices.flat[0].platform
    if platform != "gpu":
        raise ConfigError(f"mesh of {platform} devices: make it of h200_devices({mesh.size})")
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            name = f"arguments{jax.tree_util.keystr(path)}"
            raise ConfigError(f"{name} is {leaf!r:.100}: give a ShapeDtypeStruct with a NamedSharding over the mesh")
