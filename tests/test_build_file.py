"""BUILD says what the sources say: every file in one target, and each target's deps are what its files import.

BUILD is Starlark that is also Python, so it is executed here with rules that only take note of how they were called.
Where a list is wrong, the failure prints the right one.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from source_graph import ROOT, Import, files_under, imports_of, loose_sources, package_sources

# Wanted by pyproject's pytest options and by ``import pytest`` alone, so no file names it.
PLUGINS = {"@pypi//pytest_timeout"}


@dataclasses.dataclass(frozen=True)
class Target:
    """One call of a rule in BUILD."""

    rule: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]
    data: tuple[str, ...]
    main: str | None


def read_build(text: str, root: Path) -> list[Target]:
    """The targets of a Bazel file.  A rule that no ``load`` brought in is a NameError."""
    targets: list[Target] = []

    def rule(kind: str) -> Callable[..., None]:
        def call(
            *, name: str, srcs: list[str], deps: list[str], data: list[str] = (), main: str | None = None, **other: Any
        ) -> None:
            targets.append(Target(kind, name, tuple(srcs), tuple(deps), tuple(data), main))

        return call

    def load(label: str, *symbols: str) -> None:
        assert re.fullmatch(r"@rules_python//python:\w+\.bzl", label), label
        names.update({symbol: rule(symbol) for symbol in symbols})

    def glob(include: list[str], exclude: list[str] = ()) -> list[str]:
        kept, dropped = ([pattern(text) for text in texts] for texts in (include, exclude))
        folders = sorted({text.split("/")[0] for text in include})
        files = [file.relative_to(root).as_posix() for folder in folders for file in files_under(root / folder)]
        return [f for f in files if any(p.fullmatch(f) for p in kept) and not any(p.fullmatch(f) for p in dropped)]

    names: dict[str, Any] = {"__builtins__": {}, "load": load, "glob": glob, "package": lambda **settings: None}
    exec(compile(text, "BUILD", "exec"), names)
    return targets


def pattern(text: str) -> re.Pattern[str]:
    """A Bazel glob as a regular expression over a whole path."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.compile("".join(parts.get(piece, re.escape(piece)) for piece in re.split(r"(\*\*/|\*\*|\*)", text)))


def wanted_deps(target: Target, targets: list[Target], root: Path) -> set[str]:
    """The labels that a target's files import, with the packages that Python runs on the way to a module."""
    sources = package_sources(root)
    by_path = {module.replace(".", "/"): source for module, source in sources.items()}
    tests = {source.path: source for source in loose_sources("tests", root=root)}
    local = {part for path in tests for part in Path(path).with_suffix("").parts}
    owner = {module_path(src): other.name for other in targets for src in other.srcs}
    wanted = set()
    for src in target.srcs:
        source = tests.get(src) or by_path[module_path(src)]
        imports = [item for item in imports_of(source, sources) if not item.is_stdlib]
        ours = {item.module for item in imports if item.is_ours}
        if src.startswith("glmjax/"):
            ours.add(source.module)
        paths = {"/".join(name.split(".")[:depth]) for name in ours for depth in range(1, name.count(".") + 2)}
        wanted |= {f":{owner[path]}" for path in paths if path in owner and owner[path] != target.name}
        for_tests = src.startswith("tests/")
        wanted |= {
            label_of(item, for_tests)
            for item in imports
            if not item.is_ours and not (for_tests and item.module in local)
        }
    return wanted - {""}


def module_path(src: str) -> str:
    return src.removesuffix(".py").removesuffix("/__init__")


def label_of(item: Import, for_tests: bool) -> str:
    """``@pypi//name`` of the requirement that an import comes from; empty for what only a GPU needs."""
    base, dev, for_gpu = requirements()
    needed = base | dev if for_tests else base
    offers = {normal(name) for name in installed().get(item.module, [item.module])}
    if offers & for_gpu:
        return ""
    assert offers & needed, f"{item.module} is imported and pyproject.toml requires none of {sorted(offers)}"
    return f"@pypi//{min(offers & needed)}"


@functools.cache
def installed() -> dict[str, list[str]]:
    return dict(packages_distributions()) | {"jaxlib": ["jax"]}  # jax requires the one of its version


def requirements() -> tuple[set[str], set[str], set[str]]:
    """What pyproject.toml asks for everywhere, for development, and on a GPU or to compile for one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base, dev = ({normal(t) for t in ts} for ts in (project["dependencies"], extras["dev"]))
    return base, dev, {normal(t) for t in (*extras["cuda12"], *extras["aot"], *extras["nixl"])} - base


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "_", re.match(r"[\w.-]+", requirement)[0]).lower()


def shown(labels: set[str]) -> str:
    """Labels in the order and form in which BUILD has them."""
    if len(labels) < 2:
        return "deps = [" + "".join(f'"{label}"' for label in labels) + "],"
    return "deps = [\n" + "".join(f'        "{label}",\n' for label in sorted(labels)) + "    ],"


TARGETS = read_build((ROOT / "BUILD").read_text(), ROOT)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_deps_are_the_imports(target: Target) -> None:
    wanted = wanted_deps(target, TARGETS, ROOT) | (PLUGINS if target.rule == "py_test" else set())
    assert target.deps == tuple(sorted(wanted)), f"BUILD, {target.name}: should read\n    {shown(wanted)}"


def test_every_file_is_in_one_target() -> None:
    listed = [file for target in TARGETS for file in (*target.srcs, *(target.data if target.rule != "py_test" else ()))]
    assert len(listed) == len(set(listed)), sorted({file for file in listed if listed.count(file) > 1})
    package = {file.relative_to(ROOT).as_posix() for file in files_under(ROOT / "glmjax")}
    tests = {source.path for source in loose_sources("tests")}
    assert set(listed) == package | tests
    assert all((ROOT / file).is_file() for target in TARGETS for file in target.data)
    assert all(target.main in target.srcs for target in TARGETS if target.rule != "py_library")


def test_targets_form_no_circle() -> None:
    below = {f":{target.name}": {dep for dep in target.deps if dep.startswith(":")} for target in TARGETS}
    while below:
        free = {name for name, deps in below.items() if not deps & set(below)}
        assert free, f"a circle among {sorted(below)}"
        below = {name: deps for name, deps in below.items() if name not in free}


def test_pinned_versions_cover_the_requirements() -> None:
    """@pypi is made from constraints.txt, which therefore pins every requirement, by version and by nothing else."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)
    base, dev, _ = requirements()
    assert base | dev <= {normal(line) for line in lines}


def test_a_wrong_build_file_is_seen(tmp_path: Path) -> None:
    """The reader and the comparison, on a package of two files."""
    for path, text in {
        "glmjax/__init__.py": "",
        "glmjax/config.py": "import json\n",
        "glmjax/kernels/topk.py": "import jax\nfrom glmjax.config import X\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    text = """
load("@rules_python//python:py_library.bzl", "py_library")
py_library(name = "low", srcs = glob(["glmjax/*.py"], exclude = ["glmjax/__main__.py"]), deps = [])
py_library(name = "high", srcs = glob(["glmjax/*/**/*.py"]), deps = [":low"])
"""
    low, high = targets = read_build(text, tmp_path)
    assert low.srcs == ("glmjax/__init__.py", "glmjax/config.py")
    assert high.srcs == ("glmjax/kernels/topk.py",)
    assert wanted_deps(low, targets, tmp_path) == set()
    assert wanted_deps(high, targets, tmp_path) == {":low", "@pypi//jax"}
    with pytest.raises(NameError):
        read_build('py_library(name = "never_loaded", srcs = [], deps = [])', tmp_path)
