"""What a module exports by `__all__`, and whether each name has a docstring."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once, so nobody may change it."""
    return ast.parse(path.read_text(), str(path))


def exported(tree: ast.Module) -> list[str]:
    """The items of `__all__`, or nothing."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            return list(ast.literal_eval(node.value)) if node.value else []
    return []


def imports_for_checkers(tree: ast.Module) -> list[ast.stmt]:
    """What stands under `if TYPE_CHECKING:`: in a face, names that are imported when they are first asked for."""
    tests = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [node for test in tests for node in test.body]


def imported_names(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in [*tree.body, *imports_for_checkers(tree)]
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def face_problems(tree: ast.Module, submodules: set[str]) -> list[str]:
    """What is wrong with `__all__`: names imported for others, and not used here, must stand in it once, sorted."""
    names = exported(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    public = {name for name in imported_names(tree) - used if not name.startswith("_")}
    problems = [f"{name} is missing from __all__" for name in sorted(public - submodules - set(names))]
    problems += [f"{name} stands in __all__ twice" for name in sorted({n for n in names if names.count(n) > 1})]
    return problems + (["__all__ is not sorted"] if names != sorted(names, key=order) else [])


def documented(path: Path, name: str, seen: frozenset[Path] = frozenset()) -> bool:
    """Whether `name`, followed through relative imports, has a docstring, or a `#:` comment if it is a value.

    Compiled classes have no docstring at run time, so the sources are read.
    """
    tree = tree_of(path)
    for node in [*tree.body, *imports_for_checkers(tree)]:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return bool(ast.get_docstring(node))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return path.read_text().splitlines()[node.lineno - 2].lstrip().startswith("#:") or name == "__version__"
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("blockyard"):
            names = [alias.asname or alias.name for alias in node.names]
            if name in names:  # the package that defines it has a test of its own
                return True
        if isinstance(node, ast.ImportFrom) and node.level and path not in seen:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    base = path.parent.joinpath(*[".."] * (node.level - 1), *(node.module or "").split("."))
                    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
                    return documented(file, alias.name, seen | {path})
    return False
