"""Outcomes of another engine's own tests, run stock and on Blockyard, and what in them is not explained."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

#: Test to "passed", "failed" or "skipped".
Outcomes = dict[str, str]


def outcomes_in(results: Path) -> Outcomes:
    """From pytest's report."""
    found = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        file, is_in_class, inside = case.attrib["classname"].partition(".Test")
        name = f"Test{inside}::{case.attrib['name']}" if is_in_class else case.attrib["name"]
        parts = {child.tag for child in case}
        outcome = "failed" if parts & {"failure", "error"} else "skipped" if "skipped" in parts else "passed"
        found[f"{file.replace('.', '/')}.py::{name}"] = outcome
    return found


def table(stock: Outcomes, ours: Outcomes) -> list[str]:
    """Markdown: a row for each file."""
    lines = ["| file | tests | stock passes | Blockyard passes |", "|---|---|---|---|"]
    files = sorted({name.partition("::")[0] for name in stock})
    for file in files:
        names = [name for name in stock if name.startswith(f"{file}::")]
        passed = [sum(run.get(name) == "passed" for name in names) for run in (stock, ours)]
        lines.append(f"| {file.removeprefix('tests/v1/')} | {len(names)} | {passed[0]} | {passed[1]} |")
    total = [sum(outcome == "passed" for outcome in run.values()) for run in (stock, ours)]
    return [*lines, f"| all | {len(stock)} | {total[0]} | {total[1]} |"]


def unexplained(stock: Outcomes, ours: Outcomes, known: Mapping[str, str]) -> list[str]:
    """What is wrong, a line each."""
    lines = []
    for name, outcome in stock.items():
        fails = outcome == "passed" and ours.get(name) != "passed"
        short = short_name(name)
        if fails and short not in known:
            lines.append(f"{name} fails on Blockyard, and known.py does not say why")
        if short in known and ours.get(name) == "passed":
            lines.append(f"{name} passes on Blockyard, but known.py says: {known[short]}")
    return lines


def failures(stock: Outcomes, ours: Outcomes, known: Mapping[str, str]) -> list[str]:
    """A line for each test that fails on Blockyard, with its reason."""
    lines = []
    for name, outcome in ours.items():
        if outcome == "failed":
            fails_anyway = stock.get(name) == "failed"
            reason = "fails with stock vLLM here too" if fails_anyway else known.get(short_name(name), "NOT KNOWN")
            lines.append(f"- {name}: {reason}")
    return lines


def short_name(name: str) -> str:
    """Without the folders, as in `known.py`."""
    file, _, test = name.partition("::")
    return f"{file.rpartition('/')[2]}::{test}"
