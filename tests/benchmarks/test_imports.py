"""What benchmarks and examples import of tests is in the repository's own tests, which are on their path."""

from __future__ import annotations

import ast
from pathlib import Path

from blockyard_testing.each import for_each
from blockyard_testing.places import ROOT

FILES = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


@for_each(FILES, lambda path: path.relative_to(ROOT).as_posix())
def test_imports_from_tests_are_found_at_the_root(path: Path) -> None:
    modules = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    missing = []
    for module in modules:
        if module.split(".")[0] == "tests":
            base = ROOT.joinpath(*module.split("."))
            if not (base.with_suffix(".py").is_file() or base.is_dir()):
                missing.append(module)
    assert missing == []
