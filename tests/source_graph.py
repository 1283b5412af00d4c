"""The repository's sources and what they import, read with ``ast``; nothing is executed.

``test_house.py`` asks it about levels and circles, ``test_build_file.py`` about Bazel targets.  A file is read once, by
its path under ``glmjax/`` (three of the folders there are links), and is named by its module: ``glmjax.kernels.topk``.
"""

import ast
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "sharding", "serving")
DYNAMIC_IMPORTS = ("import_module", "__import__")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: full name if it is ours, top-level name if it is not."""

    module: str
    line: int
    typing_only: bool = False
    whole_package: bool = False  # ``import glmjax``: every public name is then in reach

    @property
    def is_ours(self) -> bool:
        return self.module.split(".")[0] == "glmjax"

    @property
    def is_stdlib(self) -> bool:
        return self.module.split(".")[0] in sys.stdlib_module_names


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file: its module, its path from the repository root as a reader would type it, and its text."""

    module: str
    path: str
    text: str

    def tree(self) -> ast.Module:
        return _parsed(self.text, self.path)


@functools.cache
def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, filename=path)


def files_under(folder: Path) -> Iterator[Path]:
    """Every file below ``folder``, through links too, without caches, in a fixed order."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.endswith(".pyc"))


def package_sources(root: Path = ROOT) -> dict[str, Source]:
    """All files of the import package ``glmjax``, by module."""
    sources = {}
    for file in files_under(root / "glmjax"):
        if file.suffix == ".py":
            inside = file.relative_to(root)
            parts = inside.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            shown = Path(*inside.parts[1:]) if inside.parts[1] in LINKED else inside
            sources[module] = Source(module, shown.as_posix(), file.read_text())
    return sources


def loose_sources(*folders: str, root: Path = ROOT) -> list[Source]:
    """The Python files of folders that are no package, such as ``tests``."""
    return [
        Source(file.stem, file.relative_to(root).as_posix(), file.read_text())
        for folder in folders
        for file in files_under(root / folder)
        if file.suffix == ".py"
    ]


def lazy_names(sources: Mapping[str, Source]) -> dict[str, str]:
    """Public name -> module, as the table ``_EXPORTS`` of ``glmjax/__init__.py`` has it."""
    if "glmjax" not in sources:
        return {}
    for node in sources["glmjax"].tree().body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_EXPORTS":
            return dict(ast.literal_eval(node.value))
    return {}


def imports_of(source: Source, sources: Mapping[str, Source]) -> list[Import]:
    """Every import of a file, those inside functions and behind TYPE_CHECKING included.

    ``from package import name`` is an import of ``package.name`` where that is a module; a lazy public name counts as
    the module it comes from.  A relative import keeps its dots: ``.kernels``.
    """
    lazy = lazy_names(sources)
    found: list[Import] = []

    def visit(node: ast.AST, typing_only: bool) -> None:
        match node:
            case ast.Import(names=names):
                found.extend(_named(alias.name, node.lineno, typing_only) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = "." * level + (module or "")
                for alias in names:
                    inner = f"{package}.{alias.name}"
                    if package == "glmjax" and alias.name in lazy:
                        found.append(Import(lazy[alias.name], node.lineno, typing_only))
                    elif inner in sources:
                        found.append(Import(inner, node.lineno, typing_only))
                    else:
                        star = package == "glmjax" and alias.name == "*"
                        found.append(dataclasses.replace(_named(package, node.lineno, typing_only), whole_package=star))
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if _called(func) in DYNAMIC_IMPORTS:
                found.append(_named(name, node.lineno, typing_only))
            case ast.If(test=test, body=body, orelse=orelse) if _called(test) == "TYPE_CHECKING":
                for child in body:
                    visit(child, True)
                for child in orelse:
                    visit(child, typing_only)
                return
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(source.tree(), False)
    return found


def _named(module: str, line: int, typing_only: bool) -> Import:
    ours_or_relative = module.split(".")[0] in ("glmjax", "")
    name = module if ours_or_relative else module.split(".")[0]
    return Import(name, line, typing_only, whole_package=module == "glmjax")


def _called(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
