"""JAX's CUDA plugin on a machine without a GPU, where it is there to compile only (``glmjax[aot]``)."""

import os
import sys


def may_have_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, as far as can be told without the driver."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))


def expect_no_libraries() -> None:
    """Keeps JAX from reporting, at length, that the plugin finds no CUDA libraries, on a machine that needs none.

    For before JAX first looks for devices. Who has chosen platforms, ``JAX_PLATFORMS`` or ``jax_platforms``, hears of
    them what JAX has to say.
    """
    jax = sys.modules.get("jax")
    chosen = os.environ.get("JAX_PLATFORMS") if jax is None else jax.config.jax_platforms
    if not chosen and not may_have_gpu():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
