"""Imports of our own names, in programs that neither mypy nor `make test` loads."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from blockyard_testing.places import NAMES, PACKAGES, ROOT, source_of

FILES = [
    path
    for folder in (ROOT / "benchmarks", ROOT / "examples", *sorted(PACKAGES.glob("*/tests/interop")))
    for path in sorted(folder.rglob("*.py"))
]


def module_path(base: Path, module: str) -> Path | None:
    """The file of a module, or the folder of a package; None if there is neither."""
    path = base.joinpath(*module.split(".")) if module else base
    return next((each for each in (path.with_suffix(".py"), path.with_suffix(".pyi")) if each.is_file()), None) or (
        path if path.is_dir() else None
    )


@cache
def names_of(path: Path) -> set[str] | None:
    """The names that a module defines or imports, at any depth; None if it computes them."""
    file = path / "__init__.py" if path.is_dir() else path
    found = {each.stem for each in path.iterdir()} if path.is_dir() else set()
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return None if found & {"__getattr__", "*"} else found


def unresolved(path: Path) -> list[str]:
    problems = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if node.level:
            target = module_path(path.parents[node.level - 1], module)
        elif module.split(".")[0] in NAMES:
            target = module_path(source_of(module.split(".")[0]).parent, module)
        else:
            continue
        names = set() if target is None else names_of(target)
        missing = [] if names is None else [alias.name for alias in node.names if alias.name not in {*names, "*"}]
        problems += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {'.' * node.level}{module} has no {name}" for name in missing
        ]
    return problems


def test_every_import_of_our_own_names_resolves() -> None:
    assert [problem for path in FILES for problem in unresolved(path)] == []
