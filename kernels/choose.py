"""Which implementation of an operation runs: the jnp form on a CPU, the kernel on a Hopper GPU.

The choice is made while a program is traced, for the device that it is traced for: that of the mesh in use, which is an
H200 in ``glmjax.sharding.aot.compile_for_h200`` whatever this machine is, or else JAX's default device.

``jax.lax.platform_dependent`` would choose later, for the platform that is lowered for, but it traces every branch:
each trace on a CPU would take the time to trace the GPU kernels too, and need Triton installed. What that saves it from
is not silent here: a program traced for a GPU and lowered for a CPU fails, since the kernel has no lowering there.
"""

import functools
import logging
import re
from typing import Literal

import jax

from glmjax.errors import ConfigError

Implementation = Literal["auto", "jnp", "hopper", "triton"]
Kernel = Literal["hopper", "triton"]  # Pallas on Mosaic GPU, or Triton through jax-triton

HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")  # of a device's kind, such as "NVIDIA H100 80GB HBM3"

_log = logging.getLogger("glmjax.kernels")


def choose(
    operation: str, implementation: str = "auto", *, kernel: Kernel, obstacle: str | None = None
) -> Literal["jnp"] | Kernel:
    """Decides between an operation's jnp form and its kernel, and logs once what runs on a GPU and why.

    Args:
      operation: its name, for the log and for errors.
      implementation: "auto" for what suits the device, "jnp" or the kernel's kind to insist.
      kernel: the kind of kernel the operation has.
      obstacle: why the kernel cannot take these arguments, e.g. "head width 64, the kernel is for 128"; None if it can.
        With "auto" on a GPU the jnp form then runs, and a warning says so.

    Raises:
      ConfigError: the implementation is unknown, or it is insisted on and there is an obstacle.
    """
    if implementation not in ("auto", "jnp", kernel):
        raise ConfigError(f"implementation={implementation!r} of {operation}: give 'auto', 'jnp' or {kernel!r}")
    if implementation == kernel:
        if obstacle is not None:
            raise ConfigError(f"{operation} cannot run its {kernel} kernel: {obstacle}. Use implementation='auto'")
        _say(logging.INFO, f"{operation}: {kernel} kernel, as asked for")
        return kernel
    platform, kind = target_device()
    if platform == "cpu":
        return "jnp"
    if implementation == "jnp":
        _say(logging.INFO, f"{operation}: jnp form on {kind}, as asked for")
        return "jnp"
    if obstacle is None and not HOPPER.search(kind):
        obstacle = "the kernel is for Hopper GPUs"
    if obstacle is not None:
        _say(logging.WARNING, f"{operation}: jnp form on {kind}, which is slow: {obstacle}")
        return "jnp"
    _say(logging.INFO, f"{operation}: {kernel} kernel, for {kind}")
    return kernel


def target_device() -> tuple[str, str]:
    """Platform and kind of the device that the program at hand is traced for, e.g. ("gpu", "NVIDIA H200")."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.platform or "cpu", abstract.device_kind
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):  # None, or the name of a platform
        device = jax.devices(device)[0]
    return device.platform, device.device_kind


@functools.cache
def _say(level: int, message: str) -> None:
    _log.log(level, message)
