"""What a user installs: the wheel holds the whole package, and in a new environment it serves a request.

The new environment holds glmjax alone and borrows its requirements, by a path file, from the environment that runs the
test: that is quick and needs no download.  GLMJAX_TEST_FULL_INSTALL=1 has pip fetch them instead, at the versions of
constraints.txt.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import openai
import pytest
from source_graph import LINKED, ROOT, files_under

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "kernels").exists(), reason="needs a checkout, and this is Bazel's sandbox"),
]

NEEDED = ("glmjax", *LINKED, "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def copy_tree(tree: Path) -> None:
    """What a package is built from, in a new folder: builds write into their tree."""
    tree.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)


def make_environment(place: Path, *given: str | Path) -> Path:
    """The Python of a new virtual environment with what pip is given in it, and its requirements."""
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    if os.environ.get("GLMJAX_TEST_FULL_INSTALL"):
        run(*pip, *given, "--constraint", ROOT / "constraints.txt", cwd=place)
    else:
        run(*pip, "--no-deps", *given, cwd=place)
        own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
        Path(own, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel built from the tree and one built from the source archive, in a copy that no old build has touched."""
    place = tmp_path_factory.mktemp("build")
    tree = place / "tree"
    copy_tree(tree)
    run(sys.executable, "-m", "build", "--outdir", place / "by_archive", tree, cwd=place)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", place / "by_tree", tree, cwd=place)
    (by_tree,), (by_archive,) = (sorted((place / name).glob("*.whl")) for name in ("by_tree", "by_archive"))
    return by_tree, by_archive


@pytest.fixture(scope="module")
def environment(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it."""
    place = tmp_path_factory.mktemp("user") / "env"
    make_environment(place, wheels[0])
    return place


def test_wheels_hold_the_package_and_nothing_else(wheels: tuple[Path, Path]) -> None:
    tree = {file.relative_to(ROOT).as_posix() for file in files_under(ROOT / "glmjax")}
    for wheel in wheels:
        names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        assert names == tree
    assert {"glmjax/py.typed", "glmjax/kernels/__init__.py", "glmjax/sharding/__init__.py"} <= tree
    assert any(re.fullmatch(r"glmjax/serving/\w+\.jinja", name) for name in tree)
    assert any(re.fullmatch(r"glmjax/sharding/\w+\.txtpb", name) for name in tree)


def test_wheel_says_what_it_is(wheels: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(wheels[0])
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in archive.namelist())
    version = re.search(r"^Version: (.*)$", metadata, re.MULTILINE)
    assert version and version[1] == importlib.import_module("glmjax").__version__


def test_editable_install_is_this_tree(tmp_path: Path) -> None:
    origins = [json.loads(found.read_text("direct_url.json") or "{}") for found in distributions(name="glmjax")]
    if not any(origin.get("dir_info", {}).get("editable") for origin in origins):
        pytest.skip("glmjax is not installed as editable here")
    for name in LINKED:
        code = f"import glmjax.{name} as folder; print(folder.__file__)"
        assert os.path.samefile(run(sys.executable, "-c", code, cwd=tmp_path).strip(), ROOT / name / "__init__.py")


def test_new_editable_install_is_its_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_tree(tree)
    python = make_environment(tmp_path / "env", "--editable", tree)
    packages = ["glmjax", *(f"glmjax.{name}" for name in LINKED)]
    code = f"import importlib\nfor name in {packages}: print(importlib.import_module(name).__file__)"
    files = run(python, "-c", code, cwd=tmp_path).split()
    assert [Path(file).resolve() for file in files] == [
        (tree / folder / "__init__.py").resolve() for folder in ("glmjax", *LINKED)
    ]


def test_make_serve_passes_the_model_and_the_port_on() -> None:
    dry_run = ("make", "--dry-run", "--no-print-directory", "serve", "PORT=1234", "MODEL=some/model")
    command = run(*dry_run, cwd=ROOT).splitlines()[-1].split()
    assert command[0].endswith("/glmjax") and command[1:3] == ["serve", "some/model"]
    assert command[command.index("--port") + 1] == "1234"


def test_installed_package_is_the_wheels(environment: Path) -> None:
    code = "import glmjax, glmjax.kernels as k, glmjax.serving as s; print(glmjax.__file__, k.__file__, s.__file__)"
    files = run(environment / "bin" / "python", "-c", code, cwd=environment).split()
    assert len(files) == 3
    assert all(Path(file).is_relative_to(environment) for file in files), files
    for name in LINKED:
        answer = subprocess.run(
            [environment / "bin" / "python", "-c", f"import {name}"], cwd=environment, capture_output=True, check=False
        )
        assert answer.returncode != 0, f"the wheel brought a top-level package {name}"


@pytest.fixture(scope="module")
def url(environment: Path) -> Iterator[str]:
    """The address of ``glmjax serve demo``, started with the wheel's command outside the repository.

    The demo checkpoint is made anew; compiled programs are taken from, and left in, the cache of the other tests.
    """
    log, cache = environment.parent / "server.log", environment.parent / "cache"
    cache.mkdir()
    compiled = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "jax").symlink_to(compiled)
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    settings |= {"JAX_PLATFORMS": "cpu", "GLMJAX_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    options = "--port 0 --max-model-len 512 --max-num-seqs 1 --max-num-batched-tokens 64"
    command = [str(environment / "bin" / "glmjax"), "serve", "demo", *options.split()]
    with log.open("w") as errors:
        server = subprocess.Popen(
            command, cwd=environment.parent, env=settings, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert server.stdout
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"Serving .* on (http://127\.0\.0\.1:\d+)", line):
                break
        assert lines and found, f"no address: {lines}\n{log.read_text()[-2000:]}"
        yield found[1]
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.mark.timeout(1200)
def test_wheel_serves_a_request(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
        )
    assert answer.usage and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"
