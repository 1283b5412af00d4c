"""A layout over the devices of two processes, joined by ``jax.distributed``: the tokens of one process, in both."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from child_environment import without_devices
from reference import REFERENCE

WORKER = Path(__file__).parents[1] / "process_worker.py"
TIMEOUT = 300
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "block_size": 4,
}


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(processes, devices, layout):
    """What each process printed."""
    prompts = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (1, 17, 40)]
    job = {"model": str(REFERENCE / "tiny_glm"), "options": OPTIONS | {"layout": layout}}
    job |= {"prompts": prompts, "max_tokens": 4}
    environment = without_devices() | {"JAX_PLATFORMS": "cpu"}
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *map(str, (port, processes, index, devices)), json.dumps(job)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        results = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, results, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in results]


@pytest.fixture(scope="module")
def alone():
    return run(1, 1, "dp=1")[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pcp=8,dcp=8,ep=8", "dp=2,pcp=4,dcp=2,ep=8"])
def test_two_processes_of_four_devices_give_the_tokens_of_one(layout, alone):
    assert run(2, 4, layout) == [alone, alone]
