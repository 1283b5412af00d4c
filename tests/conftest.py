"""What every test runs under: eight CPU devices, full-precision matmuls, compiled programs kept from run to run.

All of it is said through environment variables and before jax is imported, so that servers which tests start as
processes run the same way, and so that whoever starts pytest can say otherwise.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

CACHE = Path(__file__).parents[1] / ".cache"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "collective_call_terminate_timeout" not in os.environ["XLA_FLAGS"]:
    # XLA ends the process when eight devices on two busy cores take 40 s to meet.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
if "backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # LLVM takes a third of the time of most tests to optimise programs that run for milliseconds.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("GLMJAX_CACHE", str(CACHE))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
# The smallest programs too: each file starts without any, and to load one takes a quarter of the time to compile it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# The same examples on every run, and no time limit for one: the first compiles.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionstart() -> None:
    """Lets Python look for garbage less often, and never through jax's modules: tracing makes objects, not garbage."""
    import jax  # after the environment is set
    import jax.numpy  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees a file's programs at its end.

    Every program takes a few memory maps, and a process may have 65,530 (vm.max_map_count): the whole suite in one
    process would need more, and LLVM aborts when it gets none.
    """
    yield
    import jax  # after the environment is set

    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def unoptimized_h200_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for H200s with LLVM's optimisations left out: a fifth of the time. HLO and memory are the same."""
    from glmjax.sharding import aot  # after the environment is set

    monkeypatch.setattr(aot, "OPTIONS", {**aot.OPTIONS, "xla_backend_optimization_level": 0})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that of several processes none is left with one at the end; skips what needs a GPU."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not {"cuda", "gpu"} & set(os.environ["JAX_PLATFORMS"].split(",")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="set JAX_PLATFORMS=cuda to run it on a GPU"))
