"""JAX's CUDA plugin where there is no GPU: nobody hears of it, unless they ask for GPUs."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest
import small_model

from glmjax import cuda_plugin

SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@pytest.fixture
def told(monkeypatch):
    """Whether jax is told to look for no libraries, on a machine with or without a GPU, with these platforms chosen."""
    before = jax.config.jax_platforms

    def told(*, gpu, platforms=None, said=None):
        monkeypatch.delenv(SKIP, raising=False)
        if said is not None:
            monkeypatch.setenv(SKIP, said)
        monkeypatch.setattr(cuda_plugin, "may_have_gpu", lambda: gpu)
        jax.config.update("jax_platforms", platforms)
        cuda_plugin.expect_no_libraries()
        return os.environ.get(SKIP)

    yield told
    jax.config.update("jax_platforms", before)


def test_libraries_are_expected_where_there_is_a_gpu_or_the_user_chose_platforms(told):
    assert told(gpu=False) == "1"
    assert told(gpu=True) is None
    assert told(gpu=False, platforms="cuda") is None
    assert told(gpu=False, platforms="cpu") is None
    assert told(gpu=False, said="") == ""


def test_platforms_of_the_environment_count_before_jax_is_imported():
    code = f"import os\nfrom glmjax import cuda_plugin as p\np.expect_no_libraries()\nprint(os.environ.get('{SKIP}'))"
    for platforms in ("cpu", "cuda"):
        environment = {name: value for name, value in os.environ.items() if name != SKIP} | {"JAX_PLATFORMS": platforms}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert run.stdout == "None\n"


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs JAX's CUDA plugin")
@pytest.mark.skipif(cuda_plugin.may_have_gpu(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("call", ["glmjax.LLM(folder)", "glmjax.serve(folder, port=0)", "cli.main()"])
def test_a_plugin_that_only_compiles_is_not_mentioned(call, tmp_path):
    """Up to where devices are known, which loads the plugin."""
    folder = str(small_model.write_checkpoint(tmp_path / "small"))
    code = (
        "import sys, jax, glmjax\n"
        "from glmjax import api, cli\n"
        "def build(*_):\n"
        "    print(jax.devices())\n"
        "    raise SystemExit\n"
        "api.LLM._build = build\n"
        f"folder = {folder!r}\n"
        "sys.argv = ['glmjax', 'generate', folder, '--prompt', 'x']\n"
        f"{call}\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (0, "") and "CpuDevice" in run.stdout
