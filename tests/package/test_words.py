"""Phrases that readers had to read twice. Their number in each package may only fall."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPENERS = re.compile(r"(It is|It says|Is|Says|Does|What|Whether|This|These|Those|Who|Of|As `|The same)\b")
PHRASES = re.compile(
    r"\blets? go\b|\bgives? back\b|\bgoes (?:first|last|away|too)\b|\b(?:is|are|was|were) (?:told|heard|asked)\b"
    r"|\btells? of\b|\bbehind\b|\bno more\b|\bany more\b|\b(?:of|in|by|to) which\b|\bdoors?\b|\bdesks?\b"
    r"|\bshel(?:f|ves)\b|\bwish(?:es|ed)?\b|\bwhat (?:is|it|a|an|the|they|was|has|stands|comes|goes|runs)\b"
    r"|\bof its own\b",
    re.I,
)
#: Docstrings with such an opener or phrase, by package. Lower a number when you mend some; never raise one.
ALLOWED = {
    "blockyard": 0,
    "blockyard-engine": 0,
    "blockyard-lab": 0,
    "blockyard-serve": 0,
    "blockyard-sglang": 0,
    "blockyard-tiers": 0,
    "blockyard-vllm": 0,
}
#: Lines of the documentation with such a phrase.
ALLOWED_IN_DOCS = 34


def docstrings(folder: Path) -> list[str]:
    """Return the docstrings of all modules, classes and functions below `folder`."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for path in sorted(folder.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text())))
    return [text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node))]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_docstrings_use_fewer_banned_phrases(package: str) -> None:
    texts = docstrings(ROOT / "packages" / package / "src")
    found = [text for text in texts if OPENERS.match(text) or PHRASES.search(text)]
    assert len(found) <= ALLOWED[package], "\n".join(found)


def test_documentation_uses_fewer_banned_phrases() -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md"), ROOT / "README.md"]
    found = [line for page in pages for line in page.read_text().split("\n") if PHRASES.search(line)]
    assert len(found) <= ALLOWED_IN_DOCS, "\n".join(found)
