"""The rules of the house, over the sources: who may import whom, no circles, and what only some files may do.

The levels are those of docs/architecture.md.  Each rule is tried on a made-up file that breaks it, so that a rule that
has stopped seeing anything fails here.
"""

import ast
import os
from collections.abc import Mapping

import pytest
from source_graph import (
    DYNAMIC_IMPORTS,
    LINKED,
    ROOT,
    Import,
    Source,
    imports_of,
    loose_sources,
    package_sources,
)

MAX_LINES = 450

VALUES = {"glmjax.config", "glmjax.types", "glmjax.errors", "glmjax.vllm_names"}
PROGRAMS = {f"glmjax.{name}" for name in ("programs", "step", "step_io", "fit", "fit_decode", "handoff", "stage")}
FACE = {
    *("glmjax.api", "glmjax.bench_cli", "glmjax.cli", "glmjax.cli_errors", "glmjax.cli_log", "glmjax.cli_options"),
    *("glmjax.cli_proxy", "glmjax.cli_interrupt", "glmjax.engines", "glmjax.engine_process", "glmjax.processes"),
    *("glmjax.cuda_plugin", "glmjax.__main__"),
}

# Level -> the levels that its files may import.  "root" is glmjax/__init__.py: a version, names that load on first use.
MAY_IMPORT = {
    "root": set(),
    "values": {"root", "values"},
    "kernels": {"root", "values", "kernels"},
    "sharding": {"root", "values", "sharding"},
    "model": {"root", "values", "kernels", "sharding", "model"},
    "programs": {"root", "values", "kernels", "sharding", "model", "programs"},
    "serving": {"root", "values", "programs", "serving"},
    "agentx": {"root", "values", "programs", "serving", "agentx"},
}
MAY_IMPORT["face"] = {"face", *MAY_IMPORT}
# Of the sharding folder, serving knows the plain mathematics and not the collectives or the compiler.
SERVING_ALSO = {"glmjax.sharding.layout", "glmjax.sharding.cp", "glmjax.sharding.cost", "glmjax.sharding.relayout"}

BELOW_SERVING = {"root", "values", "kernels", "sharding", "model", "programs"}
NOT_FACE = {*BELOW_SERVING, "serving", "agentx"}
CLOCKS = {"time", "timeit", "sched"}
NETWORK = {"socket", "socketserver", "ssl", "select", "selectors", "asyncio", "http", "urllib", "requests", "httpx"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
NOW = {"now", "utcnow", "today"}


def level_of(module: str) -> str:
    parts = module.split(".")
    if module == "glmjax":
        return "root"
    if parts[1] in LINKED:
        return "agentx" if parts[1:3] == ["serving", "agentx"] else parts[1]
    for level, members in (("values", VALUES), ("programs", PROGRAMS), ("face", FACE)):
        if module in members:
            return level
    return "model"


def violations(sources: Mapping[str, Source]) -> list[str]:
    """Every breach of a rule in a package, as ``file:line: what is wrong``."""
    found = []
    for source in sources.values():
        level = level_of(source.module)
        found += text_violations(source)
        for item in imports_of(source, sources):
            problem = name_problem(item) or import_problem(source.module, level, item)
            if problem:
                found.append(f"{source.path}:{item.line}: {problem}")
        for line, problem in use_problems(source, level):
            found.append(f"{source.path}:{line}: {problem}")
    return sorted(found) + circles(sources)


def text_violations(source: Source) -> list[str]:
    found = []
    lines = source.text.count("\n")
    if lines > MAX_LINES:
        found.append(f"{source.path}:{MAX_LINES + 1}: {lines} lines; a file has at most {MAX_LINES}")
    tree = source.tree()
    if tree.body and not ast.get_docstring(tree):
        found.append(f"{source.path}:1: no docstring at the head of the module")
    return found


def name_problem(item: Import) -> str | None:
    top = item.module.split(".")[0]
    if top == "":
        return f"relative import of {item.module}; import absolutely, from glmjax"
    if top in LINKED:
        return f"{top} is not a top-level package of ours; import glmjax.{top}"
    return None


def import_problem(module: str, level: str, item: Import) -> str | None:
    if not item.is_ours:
        if level == "values" and not item.is_stdlib and item.module != "numpy":
            return f"{item.module} imported at level values, which knows the standard library and numpy only"
        if item.module in CLOCKS and level in NOT_FACE and module != "glmjax.serving.clock":
            return f"{item.module} imported at level {level}; only glmjax/serving/clock.py reads the clock"
        if item.module in NETWORK and level in BELOW_SERVING:
            return f"{item.module} imported at level {level}; nothing below serving knows the network"
        return None
    if item.whole_package and level != "face":
        return "import glmjax brings every level in reach; import the module that is meant"
    target = level_of(item.module)
    if target in MAY_IMPORT[level] or (level in ("serving", "agentx") and item.module in SERVING_ALSO):
        return None
    known = ", ".join(sorted(MAY_IMPORT[level])) or "nothing of ours"
    return f"level {level} imports {item.module} of level {target}; it may import {known}"


def use_problems(source: Source, level: str) -> list[tuple[int, str]]:
    """What a file does, apart from what it imports."""
    found = []
    tree = source.tree()
    of_os, of_datetime = names_bound_to(tree, "os"), names_bound_to(tree, "datetime")
    may_read_clock = level == "face" or source.module == "glmjax.serving.clock"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr, value=ast.Name(id=name)) if name in of_os and attr in ENVIRONMENT:
                problem = f"os.{attr}" if level in BELOW_SERVING else ""
            case ast.ImportFrom(module="os", names=names) if ENVIRONMENT & {alias.name for alias in names}:
                problem = "os.environ" if level in BELOW_SERVING else ""
            case ast.Attribute(attr=attr, value=value) if attr in NOW and root_name(value) in of_datetime:
                problem = "" if may_read_clock else f"datetime's {attr}"
            case ast.Global(names=names):
                problem = f"global {', '.join(names)}" if level in BELOW_SERVING else ""
            case ast.Call(func=ast.Name(id="print")) if source.module != "glmjax.cli":
                problem = "print; only glmjax/cli.py prints, elsewhere return the text or log it:"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in DYNAMIC_IMPORTS:
                hidden = level != "root" and not (args and isinstance(args[0], ast.Constant))
                problem = f"{name} of a computed name, which hides an import," if hidden else ""
            case _:
                continue
        if problem:
            found.append((node.lineno, f"{problem} used at level {level}"))
    return found


def names_bound_to(tree: ast.Module, module: str) -> set[str]:
    """The names by which a file knows a module or what it took from it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name == module}
        elif isinstance(node, ast.ImportFrom) and node.module == module:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def circles(sources: Mapping[str, Source]) -> list[str]:
    """One line per import circle.  An import for the type checker alone closes none: it never runs."""
    arrows = {
        module: {
            item.module: item.line
            for item in imports_of(source, sources)
            if item.module in sources and item.module != module and not item.typing_only
        }
        for module, source in sources.items()
    }
    found, done = [], set()

    def walk(module: str, trail: list[str]) -> None:
        if module in trail:
            circle = trail[trail.index(module) :]
            line = arrows[circle[0]][(*circle, module)[1]]
            found.append(f"{sources[circle[0]].path}:{line}: import circle: {' -> '.join([*circle, module])}")
        elif module not in done:
            for target in sorted(arrows[module]):
                walk(target, [*trail, module])
            done.add(module)

    for module in sorted(arrows):
        walk(module, [])
    return found


def test_package_keeps_the_rules() -> None:
    found = violations(package_sources())
    assert not found, "\n" + "\n".join(found)


def test_tests_and_examples_name_packages_in_full() -> None:
    found = [
        f"{source.path}:{item.line}: {problem}"
        for source in loose_sources("tests", "benchmarks", "examples")
        for item in imports_of(source, {})
        if (problem := name_problem(item))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.skipif(not (ROOT / "kernels").exists(), reason="needs a checkout, and this is Bazel's sandbox")
@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_relative_links(name: str) -> None:
    assert os.readlink(ROOT / "glmjax" / name) == f"../{name}"


def fake_house(**files: str) -> dict[str, Source]:
    """A package of made-up files; ``serving__http`` stands for ``glmjax.serving.http``."""
    files = {"root": '"""Head."""\n_EXPORTS = {"LLM": "glmjax.api"}\n', "config": "", "api": "", **files}
    sources = {}
    for name, text in files.items():
        module = "glmjax" if name == "root" else "glmjax." + name.replace("__", ".")
        sources[module] = Source(module, module.replace(".", "/") + ".py", text)
    return sources


HEAD = '"""Head."""\n'
BROKEN = [
    ("config", "import jax", "standard library and numpy only"),
    ("config", "from glmjax import model", "level values imports glmjax.model of level model"),
    ("kernels__topk", "from glmjax.sharding import cp", "level kernels imports glmjax.sharding"),
    ("kernels__topk", "def f():\n    from glmjax import model", "level kernels imports glmjax.model"),
    ("sharding__aot", "import glmjax.programs as p", "level sharding imports glmjax.programs"),
    ("model", "from glmjax.serving.plan import Plan", "level model imports glmjax.serving.plan"),
    ("model", "from glmjax.programs import step", "level model imports glmjax.programs"),
    ("programs", "from glmjax import LLM", "level programs imports glmjax.api of level face"),
    ("programs", "import importlib\nimportlib.import_module('glmjax.api')", "level programs imports glmjax.api"),
    ("programs", "import importlib\nimportlib.import_module(name)", "hides an import"),
    ("programs", "import glmjax", "brings every level in reach"),
    ("programs", "from glmjax import *", "brings every level in reach"),
    ("serving__http", "from glmjax.kernels import topk", "level serving imports glmjax.kernels"),
    ("serving__http", "from glmjax.checkpoint import load", "level serving imports glmjax.checkpoint"),
    ("serving__http", "from glmjax.sharding import collectives", "level serving imports glmjax.sharding"),
    ("serving__http", "from glmjax.serving.agentx import trace", "of level agentx"),
    ("serving__http", "if TYPE_CHECKING:\n    from glmjax.model import M", "level serving imports glmjax.model"),
    ("root", "from glmjax import config", "it may import nothing of ours"),
    ("model", "from glmjax.layers import norm", "import circle: glmjax.layers -> glmjax.model -> glmjax.layers"),
    ("model", "from .layers import norm", "relative import of .layers"),
    ("model", "from . import layers", "relative import of ."),
    ("model", "import kernels", "import glmjax.kernels"),
    ("model", "from serving.http import app", "import glmjax.serving"),
    ("model", "import time", "only glmjax/serving/clock.py reads the clock"),
    ("serving__engine", "from time import monotonic", "only glmjax/serving/clock.py reads the clock"),
    ("serving__engine", "import datetime\ndatetime.datetime.now()", "datetime's now"),
    ("cache", "from datetime import date as d\nd.today()", "datetime's today"),
    ("cache", "import socket", "nothing below serving knows the network"),
    ("cache", "import os\nos.environ['X']", "os.environ used at level model"),
    ("cache", "import os as o\nx = o.getenv('X')", "os.getenv used at level model"),
    ("cache", "from os import environ", "os.environ used at level model"),
    ("cache", "def f():\n    global x", "global x used at level model"),
    ("serving__engine", "print(1)", "only glmjax/cli.py prints"),
    ("cache", "\n" * MAX_LINES, "lines; a file has at most"),
]


@pytest.mark.parametrize(("name", "text", "expected"), BROKEN)
def test_rule_sees_a_breach(name: str, text: str, expected: str) -> None:
    layers = HEAD + "from glmjax import model\n"
    house = fake_house(**{"layers": layers, "model": "", "programs": "", **{name: HEAD + text + "\n"}})
    found = violations(house)
    assert any(expected in line for line in found), found
    module = "glmjax" if name == "root" else "glmjax." + name.replace("__", ".")
    assert all(":" in line and line.split(":")[1].isdigit() for line in found)
    assert any(line.startswith(house[module].path) for line in found) or "circle" in expected


def test_rule_sees_a_missing_docstring() -> None:
    assert violations(fake_house(cache="x = 1\n")) == ["glmjax/cache.py:1: no docstring at the head of the module"]


ALLOWED = [
    ("config", "import dataclasses\nimport numpy as np"),
    ("kernels__topk", "import jax\nfrom glmjax.config import GLMConfig\nfrom glmjax.kernels import dispatch"),
    ("model", "from glmjax.kernels import topk\nfrom glmjax.sharding import collectives\nimport os\nos.stat('x')"),
    ("programs", "from glmjax import model\nfrom glmjax import __version__"),
    ("serving__http", "from glmjax.sharding.layout import Layout\nimport asyncio, os\nos.environ.get('X')"),
    ("serving__chat", "import datetime\ndatetime.datetime.fromtimestamp(0)"),
    ("serving__clock", "import time\nimport datetime\ndatetime.datetime.now()"),
    ("api", "import glmjax\nfrom glmjax.serving import http\nfrom glmjax import checkpoint"),
    ("cli", "import time\nprint(1)"),
    ("root", "import importlib\ndef f(x):\n    return importlib.import_module(x)"),
    ("layers", "if TYPE_CHECKING:\n    from glmjax.model import M"),
]


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_rule_lets_pass(name: str, text: str) -> None:
    model = HEAD + "from glmjax import layers\n"
    assert violations(fake_house(**{"layers": "", "model": model, name: HEAD + text + "\n"})) == []
