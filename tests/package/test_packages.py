"""Rules between packages and for all of them: who imports whom, what is public, what every source looks like."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import blockyard
from blockyard_testing import source_text
from blockyard_testing.each import for_each
from blockyard_testing.import_cycles import find_cycle
from blockyard_testing.places import NAMES, PACKAGES, ROOT, source_of
from blockyard_testing.public_face import documented, exported, face_problems, tree_of

#: Each package, and those that it may import.
BELOW = {
    "blockyard": set(),
    "blockyard_tiers": {"blockyard"},
    "blockyard_engine": {"blockyard", "blockyard_tiers"},
    "blockyard_serve": {"blockyard", "blockyard_tiers", "blockyard_engine"},
    "blockyard_lab": {"blockyard", "blockyard_tiers"},
    "blockyard_vllm": {"blockyard", "blockyard_tiers"},
    "blockyard_sglang": {"blockyard", "blockyard_tiers"},
}
#: Folders within a package, from the bottom up; a file imports from lower ones, or its own. Files in no folder of the
#: list are below all.
INNER_LAYERS = {
    "blockyard_lab": {"traces": 1, "curve": 2, "fleet": 2, "replay": 2, "closed": 3, "planning": 3, "cli": 4},
    "blockyard_serve": {"openai": 1, "live": 1, "jobs": 2, "http": 3, "fleet": 4, "cli": 5},
}
#: What each package may import of the world, beside the standard library.
OUTSIDE = {
    "blockyard_tiers": {"numpy", "xxhash", "redis", "obstore", "mooncake", "torch", "lmcache"},
    "blockyard_lab": {"numpy", "joblib", "matplotlib", "psutil", "rich", "zstandard", "ray", "transformers"},
    "blockyard_vllm": {"numpy", "vllm", "torch", "prometheus_client"},
    "blockyard_sglang": {"numpy", "sglang", "torch"},
}
MAX_LINES = 600
FILES = [
    (name, path) for name in NAMES for path in sorted(source_of(name).rglob("*.py")) if path.stem != "_build_record"
]
#: Of tests, examples and tools too.
ALL_CODE = [
    path
    for folder in ("tests", "testing", "benchmarks", "examples", "packages")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def short(file: tuple[str, Path]) -> str:
    return file[1].relative_to(source_of(file[0]).parent).as_posix()


def is_module(parts: list[str]) -> bool:
    base = PACKAGES / parts[0].replace("_", "-") / "src" / Path(*parts)
    return base.is_dir() or base.with_suffix(".py").is_file()


def imports(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """The line and the module of each absolute import."""
    found = [
        (node.lineno, alias.name) for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names:
                inner = [*module.split("."), alias.name]
                found.append((node.lineno, ".".join(inner) if inner[0] in BELOW and is_module(inner) else module))
    return [(line, name.split(".")) for line, name in found]


def import_problems(package: str, tree: ast.Module) -> list[str]:
    problems = []
    for line, parts in imports(tree):
        name = ".".join(parts)
        if parts[0] == package:
            problems.append(f"line {line}: {name} is of this package: import it relatively")
        elif parts[0] in BELOW and parts[0] not in BELOW[package]:
            problems.append(f"line {line}: {package} may not import {parts[0]}")
        elif parts[0] in BELOW and (
            len(parts) > 2 or any(part.startswith("_") for part in parts[1:]) or parts[1:] == ["core"]
        ):
            problems.append(f"line {line}: {name} is private to {parts[0]}")
    return problems


@for_each(FILES, short)
def test_packages_import_public_modules_of_those_below(file: tuple[str, Path]) -> None:
    assert import_problems(file[0], tree_of(file[1])) == []


@pytest.mark.parametrize(
    "source",
    [
        "from blockyard.core.pool import lease",
        "from blockyard.core import KVCacheManager",
        "from blockyard.cli import tables",
        "import blockyard.wire.message",
        "from blockyard_engine import Engine",
        "from blockyard_tiers.files import FileTier",
        "from blockyard._build import build_name",
    ],
)
def test_a_wrong_import_is_found(source: str) -> None:
    assert import_problems("blockyard_tiers", ast.parse(source))


def test_a_right_import_is_not() -> None:
    source = "import numpy\nfrom blockyard import KVCacheManager\nfrom blockyard.wire import pack\nfrom .files import F"
    assert import_problems("blockyard_tiers", ast.parse(source)) == []


@for_each([file for file in FILES if file[0] in OUTSIDE], short)
def test_packages_need_little_from_outside(file: tuple[str, Path]) -> None:
    import sys

    allowed = {*sys.stdlib_module_names, *BELOW, *OUTSIDE[file[0]], "__future__"}
    assert [".".join(parts) for _, parts in imports(tree_of(file[1])) if parts[0] not in allowed] == []


def relative_imports(package: str, path: Path, tree: ast.Module) -> list[tuple[int, list[str]]]:
    """The line of each relative import, and what it imports, from the package down."""
    here = list(path.relative_to(source_of(package)).parts[:-1])
    return [
        (
            node.lineno,
            [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else []), alias.name],
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]


@for_each([file for file in FILES if file[0] in INNER_LAYERS], short)
def test_imports_within_a_package_go_down(file: tuple[str, Path]) -> None:
    package, path = file
    layers = INNER_LAYERS[package]
    parts = path.relative_to(source_of(package)).parts
    own = parts[0] if len(parts) > 1 else ""
    wrong = [
        f"line {line}: {'.'.join(target)}"
        for line, target in relative_imports(package, path, tree_of(path))
        if target[0] in layers and target[0] != own and layers[target[0]] >= layers.get(own, 0)
    ]
    assert parts == ("__init__.py",) or wrong == []


def test_every_folder_has_a_layer() -> None:
    for package, layers in INNER_LAYERS.items():
        assert {path.parent.name for path in source_of(package).glob("*/__init__.py")} - {"pages"} == set(layers), (
            package
        )


def import_graph(package: str) -> dict[str, set[str]]:
    """File to files that it imports when it is imported; imports inside functions do not count."""
    top = source_of(package)

    def file_of(parts: list[str]) -> str | None:
        for end in (len(parts), len(parts) - 1):
            base = top.joinpath(*parts[:end])
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if end and path.is_file():
                    return path.relative_to(top).as_posix()
        return None

    graph: dict[str, set[str]] = {}
    for name, path in FILES:
        if name == package:
            body = [node for node in tree_of(path).body if isinstance(node, ast.ImportFrom)]
            found = [file_of(parts) for _, parts in relative_imports(package, path, ast.Module(body, []))]
            graph[path.relative_to(top).as_posix()] = {each for each in found if each is not None}
    return graph


@pytest.mark.parametrize("package", NAMES)
def test_no_import_cycle(package: str) -> None:
    assert find_cycle(import_graph(package)) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


@for_each(FILES, short)
def test_every_file_says_what_it_is(file: tuple[str, Path]) -> None:
    assert ast.get_docstring(tree_of(file[1]))


@for_each([file for file in FILES if file[1].name == "__init__.py"], short)
def test_public_names_are_listed_and_documented(file: tuple[str, Path]) -> None:
    path = file[1]
    tree = tree_of(path)
    assert face_problems(tree, {child.stem for child in path.parent.iterdir()}) == []
    assert [name for name in exported(tree) if not documented(path, name)] == []


@pytest.mark.parametrize("name", ["blockyard", "blockyard.observe"])
def test_public_names_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_the_core_has_few_names() -> None:
    """`import blockyard` had 65 names once; nothing said which of them matter."""
    assert len(blockyard.__all__) <= 40


def test_a_bad_face_is_seen() -> None:
    def problems(source: str) -> list[str]:
        return face_problems(ast.parse(source), {"a"})

    assert problems("from .b import c, d\n__all__ = ['c']") == ["d is missing from __all__"]
    assert problems("from .b import c\n__all__ = ['c', 'c']") == ["c stands in __all__ twice"]
    assert problems("from .b import c, d\n__all__ = ['d', 'c']") == ["__all__ is not sorted"]
    assert problems("from . import a\nfrom .b import c, warn\n__all__ = ['c']\nwarn()") == []


def test_a_missing_docstring_is_seen(tmp_path: Path) -> None:
    front, back = tmp_path / "__init__.py", tmp_path / "back.py"
    front.write_text("from .back import A, B, C, D, f\n")
    back.write_text('class A:\n    "Said."\nclass B: ...\n#: Said.\nC = 1\n\nD = 2\ndef f():\n    "Said."\n')
    assert [name for name in ("A", "B", "C", "D", "f", "E") if not documented(front, name)] == ["B", "D", "E"]


@for_each(ALL_CODE, lambda path: path.relative_to(ROOT).as_posix())
def test_files_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_LINES or source_text.num_code_lines(source) <= MAX_LINES


def test_a_code_line_is_no_prose() -> None:
    prose = '"""A file."""\n\n# why\n'
    code = 'x = """a\nb"""  # twice\n\n\ndef f():\n    """What it does,\n\n    in short."""\n    return x\n'
    assert source_text.num_code_lines(prose + code) == 4


@for_each(FILES, short)
def test_no_commented_out_code(file: tuple[str, Path]) -> None:
    assert source_text.commented_code(file[1].read_text()) == []


def test_commented_out_code_is_seen() -> None:
    assert source_text.commented_code("# x = 1\n# return the block\n# import os\n# Why: it is so.\n#: int\n") == [
        (1, "# x = 1"),
        (3, "# import os"),
    ]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("blockyard_engine", ("ModelError", "RankError")),
        ("blockyard_engine.parallel", ("HandoffError", "PeerMismatch", "StaleOffer")),
        ("blockyard_lab", ("TraceError",)),
    ],
)
def test_a_package_exports_the_errors_that_it_raises(module: str, names: tuple[str, ...]) -> None:
    face = importlib.import_module(module)
    for name in names:
        assert name in face.__all__
        assert getattr(face, name) is getattr(blockyard.errors, name)


# ---------------------------------------------------------------- distributions


def project(name: str) -> dict[str, object]:
    return dict(tomllib.loads((PACKAGES / name.replace("_", "-") / "pyproject.toml").read_text())["project"])


@pytest.mark.parametrize("name", NAMES)
def test_all_packages_have_one_version(name: str) -> None:
    text = (PACKAGES / name.replace("_", "-") / "pyproject.toml").read_text()
    assert project(name)["version"] == blockyard.__version__
    assert set(re.findall(r"blockyard[\w-]*(?:\[[\w,]+\])?==([\w.]+)", text)) <= {blockyard.__version__}


@pytest.mark.parametrize("name", NAMES)
def test_a_package_needs_those_below_it_alone(name: str) -> None:
    needs = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in project(name)["dependencies"]}  # type: ignore[index, attr-defined]
    assert {each for each in needs if each in BELOW} <= BELOW[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_package_has_its_licence_types_and_readme(name: str) -> None:
    folder = PACKAGES / name.replace("_", "-")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (source_of(name) / "py.typed").is_file()
    assert len((folder / "README.md").read_text().splitlines()) <= 50


def test_tests_of_the_core_import_no_companion() -> None:
    """`make test PACKAGE=blockyard` runs where no other package is installed."""
    for path in (PACKAGES / "blockyard" / "tests").rglob("*.py"):
        names = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert {*names} & BELOW.keys() <= {"blockyard"}, path
