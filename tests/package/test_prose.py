"""Docstrings are sentences: of each part of the package, how many are none is counted, and the number may only fall."""

from __future__ import annotations

import pytest

from ..support.places import PACKAGE_DIR
from ..support.prose import docstrings, is_sentence

#: Docstrings without a finite verb that there still are. Where there are fewer, lower the number; a part that is not
#: here has none. `python -m tests.support.prose [PART]` lists them.
FRAGMENTS = {
    ".": 44,
    "cli": 2,
    "core": 569,
    "engine": 172,
    "events": 111,
    "integrations": 80,
    "lab": 169,
    "live": 39,
    "metrics": 15,
    "observe": 8,
    "parallel": 51,
    "serving": 96,
    "sizing": 44,
    "storage": 24,
    "wire": 13,
}


def fragments(part: str) -> int:
    """How many docstrings of a part of the package have no finite verb, as far as `prose` sees."""
    paths = PACKAGE_DIR.glob("*.py") if part == "." else (PACKAGE_DIR / part).rglob("*.py")
    return sum(not is_sentence(said) for path in paths for _, said in docstrings(path))


def parts() -> list[str]:
    return [".", *sorted(path.name for path in PACKAGE_DIR.iterdir() if path.is_dir() and any(path.glob("*.py")))]


@pytest.mark.parametrize("part", parts())
def test_no_part_gains_a_docstring_without_a_verb(part: str) -> None:
    assert fragments(part) <= FRAGMENTS.get(part, 0)


@pytest.mark.parametrize(
    "said",
    [
        "A hit is exact.",
        "Draws the knee of one trace's curves.",
        "Return 3 blocks.",
        "Wait until the step ends.",
        "`blocks` are counted once, whoever holds them.",
        "The pool keeps what was freed last.\n\nraises: nothing",
    ],
)
def test_a_sentence_is_seen(said: str) -> None:
    assert is_sentence(said)


@pytest.mark.parametrize(
    "said",
    ["What came of it so far.", "The pool's blocks.", "Of the pool without its null block.", "Those that are held."],
)
def test_a_fragment_is_seen(said: str) -> None:
    assert not is_sentence(said)
