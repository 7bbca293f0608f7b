"""The examples in the docstrings, run from the source text: compiled modules keep no docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockyard_testing.places import PACKAGE_DIR, PACKAGES, source_of

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

#: The core, what stands between several caches, and the ground; beside what is installed, `naming` needs its extra.
FOLDERS = (PACKAGE_DIR / "core", source_of("blockyard_engine") / "parallel")
SOURCES = sorted([*PACKAGE_DIR.glob("*.py"), *(path for folder in FOLDERS for path in folder.rglob("*.py"))])
#: The two ways in. Their docstrings must show how they are used.
MUST_HAVE_EXAMPLES = {"BlockPool", "KVCacheManager"}


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Name, docstring and first line of everything documented in a source."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "module"), text, node.body[0].lineno


def examples(source: Path) -> list[doctest.DocTest]:
    """The docstrings of a source that hold examples."""
    tests = []
    for name, text, line in docstrings(ast.parse(source.read_text())):
        test = doctest.DocTestParser().get_doctest(text, {}, name, str(source), line - 1)
        if test.examples:
            tests.append(test)
    return tests


EXAMPLES = [(source, test) for source in SOURCES for test in examples(source)]


def module_name(source: Path) -> str:
    parts = source.relative_to(PACKAGES).with_suffix("").parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(("source", "test"), EXAMPLES, ids=[f"{s.stem}.{t.name}" for s, t in EXAMPLES])
def test_examples_do_what_they_say(source: Path, test: doctest.DocTest) -> None:
    test.globs = dict(vars(importlib.import_module(module_name(source))))
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)
    assert runner.tries == len(test.examples) > 0


def test_the_ways_in_have_examples() -> None:
    """Also a guard for the search itself: if it found nothing, nothing would fail."""
    assert {test.name for _, test in EXAMPLES} >= MUST_HAVE_EXAMPLES


def test_a_wrong_example_fails() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    runner.run(parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0), out=lambda _: None)
    assert runner.failures == 1
