"""The links of the README and the pages lead to files of the repository, and to headings in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blockyard_testing.places import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]


def links(text: str) -> list[str]:
    """Those within the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [link for link in found if not re.match(r"\w+:", link)]


def headings(text: str) -> set[str]:
    """Each as a link to it is written: small letters, hyphens for spaces, no other signs."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not heading or heading in headings(target.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [link for link in links(page.read_text()) if not leads_somewhere(page, link)] == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](docs/lab.md#what-paging-is-for) [b](docs/lab.md#no-such) ![c](c.svg) [d](https://example.org/d)"
    assert links(text) == ["docs/lab.md#what-paging-is-for", "docs/lab.md#no-such", "c.svg"]
    assert [leads_somewhere(ROOT / "README.md", link) for link in links(text)] == [True, False, False]
