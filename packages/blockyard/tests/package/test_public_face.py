"""What is public: `__all__` of each face is complete and sorted, each name has a docstring, and the names stay few."""

from __future__ import annotations

import ast
from pathlib import Path

import blockyard
from blockyard_testing.places import PACKAGE_DIR
from blockyard_testing.public_face import documented, exported, face_problems

from .test_source_rules import PACKAGE_FILES, every_file, tree_of

#: `import blockyard` had 65 names once; nothing said which of them matter.
MOST_NAMES = 40


def test_the_package_has_few_names() -> None:
    assert len(blockyard.__all__) <= MOST_NAMES


def public_packages() -> list[Path]:
    return [path for path in PACKAGE_FILES if path.name == "__init__.py" and exported(tree_of(path))]


def test_the_top_package_has_an_all() -> None:
    assert PACKAGE_DIR / "__init__.py" in public_packages()


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
