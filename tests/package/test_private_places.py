"""No file names a place on one machine."""

from __future__ import annotations

from pathlib import Path

from blockyard_testing.each import for_each
from blockyard_testing.places import ROOT

PRIVATE_PLACES = ("/" + "work/", "/" + "home/", "/" + "tmp/", "/" + "root/")


LEFT_BY_RUNS = {"_build_record.py", "build", ".hypothesis", "__pycache__"}
FILES = [
    path
    for folder in ("packages", "testing", "tests", "benchmarks", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".md", ".toml", ".html", ".js"} and not LEFT_BY_RUNS & set(path.parts)
]


@for_each(FILES, lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_names_a_place_on_one_machine(path: Path) -> None:
    text = path.read_text()
    assert [place for place in PRIVATE_PLACES if place in text] == []
