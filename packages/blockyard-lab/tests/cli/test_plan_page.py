"""The page of a capacity plan: its bars are the plan's numbers, and no name can break out of its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from blockyard.cli.main import main
from blockyard.sizing import KVCacheSpec, model_config
from blockyard_lab import read_references
from blockyard_lab.planning import CapacityPlan, plan_capacity
from blockyard_lab.planning.gpu_memory import GIB
from blockyard_lab.planning.plan_page import write_plan_page
from blockyard_lab.traces import open_trace

from ..support.lab_page import Page
from ..support.made_curves import HOSTILE


def planned(**options: Any) -> CapacityPlan:
    spec = KVCacheSpec.from_config(model_config("llama-3.1-8b"))
    return plan_capacity(spec, **{"gpu_memory_gib": 40.0, "weights_gib": 15.0, **options})


def with_trace() -> CapacityPlan:
    references = read_references(open_trace("small"))
    return planned(traffic=references.survey, references=references, cpu_gib=4.0)


def test_the_bars_are_the_plan(tmp_path: Path) -> None:
    plan = with_trace()
    write_plan_page(plan, "llama", "small", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    page = Page(text)
    flex = [float(share) for share in re.findall(r"flex:([\d.]+)", text)]
    assert sum(flex) == pytest.approx(100, abs=0.01)
    assert flex[0] == pytest.approx(100 * 15 / 40, abs=0.01)
    assert f"{plan.gpu.cache_bytes / GIB:,.1f} GiB" in page.texts["strong"]
    widths = [float(share) for share in re.findall(r"width:([\d.]+)%", text.partition("<body>")[2])]
    most = max(row.concurrent for row in plan.requests)
    assert widths[: len(plan.requests)] == [round(100 * row.concurrent / most, 2) for row in plan.requests]
    assert plan.hits is not None
    assert round(100 * plan.hits.expected.hit_rate, 2) in widths
    assert round(100 * plan.hits.unlimited, 2) in widths
    assert page.texts["pre"] == [plan.as_text("llama", "small")]


def test_page_of_a_model_that_does_not_fit_names_what_is_missing(tmp_path: Path) -> None:
    plan = planned(gpu_memory_gib=8.0)
    assert not plan.fits
    write_plan_page(plan, "llama", "", tmp_path / "plan.html")
    page = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert f"{-plan.gpu.cache_bytes / GIB:,.1f} GiB" in page.texts["strong"]
    assert page.texts["td"].count("does not fit") == len(plan.requests)


def test_page_escapes_names_and_loads_nothing(tmp_path: Path) -> None:
    tags = []
    for name in (HOSTILE, "plain"):
        write_plan_page(planned(), name, name, tmp_path / "plan.html")
        text = (tmp_path / "plan.html").read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.search(r"://|url\(|@import", text)
        tags.append(Page(text).tags)
    assert tags[0] == tags[1]


def test_plan_writes_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert main(("plan", "llama-3.1-8b", "-o", str(path))) == 0
    assert "Plan of llama-3.1-8b on 1 GPU" in path.read_text(encoding="utf-8")
    assert main(("plan", "llama-3.1-8b", "-o", str(tmp_path / "plan.pdf"))) == 2
    assert "plan.pdf" in capsys.readouterr().err
