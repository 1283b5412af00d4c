"""Lets JAX's GPU simulator run clusters of up to 64 warpgroups, where by itself it hangs with more than 31.

Each warpgroup is a program on the CPU and a Python thread that calls it, and all of a cluster wait for each other. XLA
has at most 32 programs of a device in flight, the kernel's caller among them; its pool has a thread for each device.
And what calls a program does not wait for its end: where XLA starts it in the background, as when an argument is still
on its way, the Python thread takes the next warpgroup, and XLA keeps the second until the first has ended.
"""

import functools

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map

DEVICES = 64  # a thread of XLA's pool for each warpgroup
PROGRAMS = 24  # of a device: as many as 8 blocks have warpgroups


def simulate_many_warpgroups() -> None:
    """For the rest of the process, which has ``DEVICES`` CPU devices."""
    assert jax.device_count() == DEVICES
    thread_map._run_jaxpr = run_and_wait


@functools.partial(jax.jit, static_argnums=0)
def evaluate(jaxpr, consts, *arguments):
    return jax.core.eval_jaxpr(jaxpr, consts, *arguments)


def run_and_wait(jaxpr, consts, warpgroup, *rest):
    arguments = consts, np.int32(warpgroup), *rest  # on no device yet: a copy from another would be on its way
    with jax.default_device(jax.devices()[int(warpgroup) // PROGRAMS]):
        # Not a call of ``evaluate``: it would wait for the first one, that compiles, to end.
        program = evaluate.trace(jaxpr, *arguments).lower().compile()
        jax.block_until_ready(program(*arguments))
