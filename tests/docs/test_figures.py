"""Figures that one page takes from another page's table, or from its own, are the figures of that table."""

from __future__ import annotations

import re

import pytest

from blockyard_testing.places import ROOT

#: Row of "By load" in policies.md, and the loads of policy-research.md that it stands for, in the order of its figures.
LOADS = {
    "conversations, the second half of an hour of production (Mooncake)": ["Mooncake, second half"],
    "chats": ["chat", "chat:seed=72,users=300,turns=9"],
    "agents that write code": ["coding:agents=12"],
    "many agents": ["agents"],
    "one system prompt, or documents": ["system", "rag"],
    "bursts of the same prompts": ["bursts"],
    "a mix of all these": ["mix"],
    "its kind changes every 300 requests (turns:turn=300)": ["turns:turn=300"],
    "what was learned turns wrong (trap)": ["trap:scans=300,collection=50"],
    "its kind changes every 40 (turns:turn=40)": ["turns:turn=40"],
    "no pattern (memoryless), or a pool that nearly fits": ["memoryless"],
}
POLICIES = ("fifo", "s3fifo", "lfu", "arc", "score", "density")
#: The worst difference to LRU, and the share of the gap that is closed.
Figures = tuple[float, int]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def tables(text: str, first: str) -> list[list[dict[str, str]]]:
    """The tables whose first column is headed `first`: a dict for each row, without backquotes."""
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            head = []
        elif not head:
            head = cells
            if first == head[0]:
                found.append([])
        elif first == head[0] and not cells[0].startswith("--"):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def pairs(cell: str) -> list[Figures]:
    return [(float(worst), int(closed)) for worst, closed in re.findall(r"([+-]\d+\.\d\d) / (-?\d+)", cell)]


def measured() -> dict[str, dict[str, Figures]]:
    """Of policy-research.md: by load, by policy."""
    found: dict[str, dict[str, Figures]] = {}
    for table in tables(page("policy-research.md"), "load"):
        for row in table:
            if "fifo" not in row:
                continue
            figures = {name: pairs(cell) for name, cell in row.items()}
            found.setdefault(row["load"], {}).update({name: each[0] for name, each in figures.items() if each})
    return found


BY_LOAD = {row["your load"]: row for row in tables(page("policies.md"), "your load")[0]}


def test_every_load_of_the_choice_is_known() -> None:
    assert len(measured()["chat"]) == 6
    assert [name for name in BY_LOAD if name not in LOADS] == ["one for which hardly any loss is acceptable"]
    assert set(LOADS) <= set(BY_LOAD)


@pytest.mark.parametrize("name", LOADS)
def test_the_choice_by_load_has_the_measured_figures(name: str) -> None:
    figures_of, row = measured(), BY_LOAD[name]
    assert pairs(row["density"]) == [figures_of[load]["density"] for load in LOADS[name]]
    best = row["closes most"]
    for load, figures in zip(LOADS[name], pairs(best), strict=False):
        most = max(figures_of[load][policy][1] for policy in POLICIES if policy in figures_of[load])
        closing = [policy for policy in POLICIES if figures_of[load].get(policy) == figures]
        assert figures[1] == most
        assert any(policy in best for policy in closing)
    assert pairs(best) or best == "nothing to win"


def test_the_summary_of_partial_hints_has_the_figures_of_its_table() -> None:
    text = page("hints.md")
    (summary,) = [table for table in tables(text, "policy") if "50 %" in table[0]]
    (every,) = [table for table in tables(text, "load") if "over, 25 %" in table[0]]
    columns = ["no hints", *(f"over, {share} %" for share in (25, 50, 75, 100))]
    for row in summary:
        lines = [line for line in every if line["policy"] == row["policy"]]
        medians = [[int(line[column].split()[0]) for line in lines] for column in columns]
        assert list(row.values())[1:] == [f"{min(shares)} to {max(shares)}" for shares in medians]
        assert len(lines) == 5
    assert len(summary) == 2
    half = {row["policy"]: row["50 %"] for row in summary}
    lead = f"`lru` closes {half['lru']} % of the gap"
    assert lead in " ".join(text.split())
    promise = f"`lru` closes {half['lru']} % of its gap, `density` {half['density']}"
    assert promise in " ".join(page("promises.md").split())
