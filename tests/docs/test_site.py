"""What `make docs` builds the site from: every page, example and public name once, and links that lead to pages."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import blockyard
from blockyard_testing.places import NAMES, ROOT, source_of
from blockyard_testing.public_face import exported

CONFIG = tomllib.loads((ROOT / "site" / "zensical.toml").read_text())
#: Beside the tabs: the README in Chinese is reached from the first page.
NOT_IN_NAV = {"README.zh-CN.md"}


def load_gather() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gather", ROOT / "site" / "gather.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gather = load_gather()


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for inner in entry.values() for page in nav_pages(inner)]
    return [page for inner in entry for page in nav_pages(inner)] if isinstance(entry, list) else [str(entry)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    gather.main(target)
    return target / "pages"


def test_every_page_is_in_the_navigation(pages: Path) -> None:
    listed = nav_pages(CONFIG["project"]["nav"])
    assert len(listed) == len(set(listed))
    written = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    assert set(listed) <= written
    assert {page for page in written - set(listed) if not page.startswith(("examples/", "packages/"))} == NOT_IN_NAV


def test_every_link_leads_to_a_page(pages: Path) -> None:
    for page in pages.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"\w+:|#", link):
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


def test_the_reference_has_every_public_name(pages: Path) -> None:
    text = (pages / "reference" / "blockyard.md").read_text()
    assert re.findall(r"^::: blockyard\.(\w+)$", text, re.MULTILINE) == [
        name for name in blockyard.__all__ if not name.startswith("_")
    ]


def public_modules(name: str) -> set[str]:
    """Modules of a package that list public names and that other packages may import: no command, not the core."""
    top = source_of(name)
    files = [top / "__init__.py", *top.glob("*.py"), *top.glob("*/__init__.py")]
    listing = {path for path in files if exported(ast.parse(path.read_text()))}
    dotted = {path.relative_to(top.parent).with_suffix("").as_posix().replace("/", ".") for path in listing}
    return {module.removesuffix(".__init__") for module in dotted} - {f"{name}.cli", f"{name}.core"}


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_has_every_public_module(name: str) -> None:
    listed = {module for module in gather.reference_modules() if module.partition(".")[0] == name}
    assert name in listed
    assert public_modules(name) - listed == set()


def test_the_reference_has_every_module_that_a_page_imports_from() -> None:
    text = "\n".join(page.read_text() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    imported = set(re.findall(r"^from (blockyard[\w.]*) import", text, re.MULTILINE))
    assert imported - set(gather.reference_modules()) == set()


def test_the_reference_is_read_from_the_sources_of_every_package() -> None:
    paths = CONFIG["project"]["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"]
    assert {(ROOT / "build" / "site" / path).resolve() for path in paths} == {source_of(name).parent for name in NAMES}


@pytest.mark.parametrize(
    ("link", "leads_to"),
    [
        ("../README.md#embed-it", "index.md#embed-it"),
        ("steps.md#a-b", "steps.md#a-b"),
        ("../examples/hit_rates.py", "examples/hit_rates.py.md"),
        ("images/curve.svg", "images/curve.svg"),
        ("https://example.org/a", "https://example.org/a"),
        ("#here", "#here"),
    ],
)
def test_where_a_link_of_a_page_leads(link: str, leads_to: str) -> None:
    assert gather.site_link(ROOT / "docs" / "guide.md", link) == leads_to


def test_a_link_inside_code_stays() -> None:
    text = "see `[a](../README.md)` and [b](../README.md)"
    assert gather.with_site_links(ROOT / "docs" / "guide.md", text) == "see `[a](../README.md)` and [b](index.md)"
