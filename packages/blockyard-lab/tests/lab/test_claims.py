"""Claims about a policy (worst, median, mean, shares), computed from rates that are written down here."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from blockyard.cli.main import main
from blockyard.cli.tables import as_narrow_text
from blockyard_lab import read_references
from blockyard_lab.curve import HitCurves, hit_curves
from blockyard_lab.traces import open_trace


@pytest.fixture(scope="module")
def curves() -> HitCurves:
    return hit_curves(read_references(open_trace("small")), ["lru", "arc", "optimum"], [100, 1000, 2000, 8000])


def test_claims_match_rates_computed_by_hand(curves: HitCurves) -> None:
    rates = {
        "lru": np.array([0.10, 0.20, 0.30, 0.40]),
        "arc": np.array([0.09, 0.245, 0.305, 0.40]),
        "optimum": np.array([0.30, 0.40, 0.34, 0.40]),
    }
    (claim,) = dataclasses.replace(curves, hit_rates=rates).claims().values()
    assert claim.worst == pytest.approx(-1.0)
    assert claim.best == pytest.approx(4.5)
    assert claim.median == pytest.approx(0.25)
    assert claim.mean == pytest.approx(1.0)
    assert claim.below == 0.25
    assert claim.gap_sizes == 2, "gaps of 20, 20, 4 and 0 points"
    assert claim.gap_closed == pytest.approx((-0.05 + 0.225) / 2)
    assert claim.fifth == 0.5


def test_claims_need_lru_and_gaps_need_the_optimum(curves: HitCurves) -> None:
    two = {policy: curves.hit_rates[policy] for policy in ("lru", "arc")}
    (claim,) = dataclasses.replace(curves, hit_rates=two).claims().values()
    assert claim.gap_sizes == 0
    assert math.isnan(claim.gap_closed)
    assert dataclasses.replace(curves, hit_rates={"arc": two["arc"]}).claims() == {}


def test_command_prints_claims_from_100_sizes_on(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["curve", "small", "--policies", "lru,fifo,lfu,optimum", "--quiet", "--jobs", "1"]
    assert main([*arguments, "--sizes", "100"]) == 0
    printed = capsys.readouterr().out
    assert "above lru over " in printed
    assert "sizes below: share of the sizes at which the policy is below lru" in printed
    assert "knee: up to it a block adds more hits" in printed
    assert "a fifth or more: share of these sizes where it is 20.00 % or more" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(("fifo ", "lfu "))]
    assert [row[0] for row in rows] == ["fifo", "lfu"]
    assert main([*arguments, "--sizes", "10"]) == 0
    printed = capsys.readouterr().out
    assert "above lru over " not in printed
    assert "need 100 sizes or more: --sizes 300" in printed
    assert main([*arguments, "--sizes", "10", "--json"]) == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert list(claims) == ["fifo", "lfu"]
    assert claims["fifo"]["worst"] < claims["lfu"]["worst"], "fifo alone is far below"
    assert claims["lfu"]["worst"] >= -0.2


@pytest.mark.parametrize(
    ("policies", "said", "unsaid"),
    [
        ("lru,lfu", ("above lru over", "add optimum to --policies"), "a fifth or more:"),
        ("fifo,lfu", ("add lru to --policies",), "above lru over"),
        ("lru,optimum", ("knee of lru",), "Claims"),
    ],
)
def test_command_says_what_claims_need(
    policies: str, said: tuple[str, ...], unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", "small", "--policies", policies, "--quiet", "--jobs", "1", "--sizes", "100"]) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)
    assert unsaid not in printed


def test_a_table_that_is_too_wide_is_cut_into_several(capsys: pytest.CaptureFixture[str]) -> None:
    """Each part has the sizes, none is wider than 120 columns, and together they have every number of the JSON."""
    arguments = ["curve", "chat:requests=80,seed=3", "--quiet", "--jobs", "1", "--sizes", "3", "--hints"]
    arguments += ["--policies", "lru,fifo,lfu,density,arc,s3fifo,optimum"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[1:])) <= 120
    tables = [part.splitlines() for part in printed.split("\n\n") if part.lstrip().startswith("blocks")]
    assert len(tables) > 1
    heads = [table[0].split("  ") for table in tables]
    names = [name.strip() for head in heads for name in head if name.strip() not in ("", "blocks", "tokens")]
    assert main([*arguments, "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert names == [name for name in sizes[0] if name not in ("blocks", "tokens")]
    for table in tables:
        assert [int(line.split()[0].replace(",", "")) for line in table[1:]] == [row["blocks"] for row in sizes]


def test_a_column_wider_than_the_table_may_be_stands_alone() -> None:
    rows = [{"n": "1", "a": "x" * 30, "b": "y", "c": "z"}]
    text = as_narrow_text(rows, num_keys=1, width=10)
    assert text.split("\n\n") == [f"n  {' ' * 29}a\n1  {'x' * 30}", "n  b  c\n1  y  z"]
