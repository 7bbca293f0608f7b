"""What is public: `__all__` of each face is complete and sorted, each name has a docstring, and the names stay few."""

from __future__ import annotations

import ast
from pathlib import Path

import blockyard

from ..support.places import PACKAGE_DIR
from .test_source_rules import PACKAGE_FILES, every_file, tree_of

#: `import blockyard` had 65 names once; nothing said which of them matter.
MOST_NAMES = 40


def test_the_package_has_few_names() -> None:
    assert len(blockyard.__all__) <= MOST_NAMES


def public_packages() -> list[Path]:
    return [path for path in PACKAGE_FILES if path.name == "__init__.py" and exported(tree_of(path))]


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


def test_the_top_package_has_an_all() -> None:
    assert PACKAGE_DIR / "__init__.py" in public_packages()


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


@every_file([path for path in PACKAGE_FILES if path.name == "__init__.py"])
def test_all_is_complete_sorted_and_importable(path: Path) -> None:
    tree = tree_of(path)
    assert face_problems(tree, {child.stem for child in path.parent.iterdir()}) == []
    if path.parent in (PACKAGE_DIR, PACKAGE_DIR / "core", PACKAGE_DIR / "observe"):
        module = __import__(".".join(["blockyard", *path.parent.relative_to(PACKAGE_DIR).parts]), fromlist=["*"])
        assert [name for name in exported(tree) if not hasattr(module, name)] == []


def test_a_bad_face_is_seen() -> None:
    def problems(source: str) -> list[str]:
        return face_problems(ast.parse(source), {"a"})

    assert problems("from .b import c, d\n__all__ = ['c']") == ["d is missing from __all__"]
    assert problems("from .b import c\n__all__ = ['c', 'c']") == ["c stands in __all__ twice"]
    assert problems("from .b import c, d\n__all__ = ['d', 'c']") == ["__all__ is not sorted"]
    assert problems("from . import a\nfrom .b import c, warn\n__all__ = ['c']\nwarn()") == []


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
        if isinstance(node, ast.ImportFrom) and node.level and path not in seen:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    base = path.parent.joinpath(*[".."] * (node.level - 1), *(node.module or "").split("."))
                    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
                    return documented(file, alias.name, seen | {path})
    return False


@every_file(PACKAGE_FILES)
def test_every_public_name_is_documented(path: Path) -> None:
    if path.name == "__init__.py":
        assert [name for name in exported(tree_of(path)) if not documented(path, name)] == []


def test_a_missing_docstring_is_seen(tmp_path: Path) -> None:
    front, back = tmp_path / "__init__.py", tmp_path / "back.py"
    front.write_text("from .back import A, B, C, D, f\n")
    back.write_text('class A:\n    "Said."\nclass B: ...\n#: Said.\nC = 1\n\nD = 2\ndef f():\n    "Said."\n')
    assert [name for name in ("A", "B", "C", "D", "f", "E") if not documented(front, name)] == ["B", "D", "E"]


@every_file(PACKAGE_FILES)
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))
