"""Peak memory and speed of loading, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from glmjax.checkpoint import convert, save_pretrained
from glmjax.config import GLMConfig
from glmjax.params import num_bytes, random_params

MEASURE = """
import sys, time
import jax
from glmjax.checkpoint import load_checkpoint
from glmjax.params import num_bytes

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

path, dtype = sys.argv[1:]
jax.block_until_ready(jax.device_put(1.0))
before, start = peak(), time.perf_counter()
_, params = load_checkpoint(path, dtype)
print(num_bytes(params), peak() - before, time.perf_counter() - start)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 310 MB in four shards, and the same for Orbax."""
    folder = tmp_path_factory.mktemp("large")
    config = GLMConfig.tiny(
        hidden_size=512, moe_intermediate_size=256, n_routed_experts=64, vocab_size=8192, num_hidden_layers=7
    )
    params = random_params(config, jnp.bfloat16)
    assert 250e6 < num_bytes(params) < 350e6
    save_pretrained(config, params, folder / "hf", dtype="bfloat16", max_shard_bytes=100e6)
    convert(folder / "hf", folder / "orbax")
    return folder


def measure(folder: Path, dtype: str) -> tuple[float, float, float]:
    command = [sys.executable, "-c", MEASURE, str(folder), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size, rise, seconds = (float(word) for word in output.split())
    return size, rise, seconds


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory of a process")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_peak_memory_is_one_model(large, form, dtype):
    size, rise, _ = measure(large / form, dtype)
    # Besides the model: the tensors that the threads have in hand, and what Python imports on the way.
    assert rise < size + 130e6
    assert rise < 1.5 * size


@pytest.mark.slow
def test_orbax_loads_faster(large):
    assert measure(large / "orbax", "bfloat16")[2] < measure(large / "hf", "bfloat16")[2]
