"""Timelines of replays by timestamps: their records, the page, and the CPU pool's transfers."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard_lab.replay import ReplayOptions, ReplayResult, ServiceModel, replay
from blockyard_lab.replay.timeline import MAX_SPANS, SUMS, TimelineRecorder
from blockyard_lab.replay.timeline_page import write_run_page
from blockyard_lab.traces import open_trace
from blockyard_testing.seeds import run_seed

from ..support.lab_page import Page
from ..support.made_curves import HOSTILE
from .test_page import CHROMIUM

BUSY = ServiceModel(speedup=3)


def busy(num_blocks: int = 1200, **others: Any) -> ReplayResult:
    """The shipped trace, three times as fast as it was, through a pool that is too small."""
    others = {"max_model_len": 8192, "service": BUSY, "keep_timeline": True, **others}
    return replay(open_trace("small"), ReplayOptions(num_blocks, **others))


@pytest.fixture(scope="module")
def found() -> ReplayResult:
    return busy()


# ---------------------------------------------------------------- notes


@pytest.mark.parametrize("number", range(10))
def test_merged_spans_keep_all_counts(number: int) -> None:
    draw = random.Random(f"{run_seed()} {number}")
    recorder, notes, held = TimelineRecorder(), [], []
    now = 0.0
    for _ in range(draw.randint(1, 600)):
        now += draw.expovariate(1) * draw.choice([0.001, 1, 30])
        name, at, amount = draw.choice(SUMS), draw.uniform(0, now), draw.randint(1, 9)
        recorder.note(name, at, amount)
        recorder.hold(now, amount)
        notes.append((name, at, amount))
        held.append((now, amount))
    timeline = recorder.result()
    assert len(timeline.held_blocks) <= MAX_SPANS
    assert len(timeline.held_blocks) == int(now / timeline.span) + 1
    for name in SUMS:
        wanted = np.zeros(len(timeline.held_blocks), np.int64)
        for noted, at, amount in notes:
            wanted[int(at / timeline.span)] += amount * (noted == name)
        assert timeline.counts[name].tolist() == wanted.tolist()
    last = 0
    for span in range(len(timeline.held_blocks)):
        within = [amount for at, amount in held if int(at / timeline.span) == span]
        assert timeline.held_blocks[span] == max(within, default=last)
        last = within[-1] if within else last


def test_the_timeline_adds_up_to_the_result(found: ReplayResult) -> None:
    timeline, misses = found.timeline, found.misses
    assert timeline is not None
    assert misses is not None
    sums = {name: int(counts.sum()) for name, counts in timeline.counts.items()}
    assert sums["arrived"] == sums["started"] == sums["finished"] == found.num_requests == 320
    assert sums["preempted"] == sums["resumed"] == found.num_preemptions > 10
    assert (sums["prompt_tokens"], sums["hit_tokens"]) == (found.num_prompt_tokens, found.num_hit_tokens)
    causes = (sums["evicted_tokens"], sums["never_seen_tokens"], sums["tail_tokens"])
    assert causes == (misses.evicted, misses.never_seen, misses.tail)
    assert timeline.held_blocks.max() == found.peak_used_blocks == 1199
    assert timeline.running.max() <= found.peak_running
    assert timeline.waiting.max() > 40
    assert timeline.running.min() >= 0
    assert timeline.waiting.min() >= 0
    assert timeline.running[-1] == timeline.waiting[-1] == 0


def test_recording_a_timeline_changes_no_result(found: ReplayResult) -> None:
    plain = busy(keep_timeline=False)
    assert plain.timeline is None
    for name in ("num_hit_tokens", "num_preemptions", "misses", "simulated", "num_evicted_blocks"):
        assert getattr(plain, name) == getattr(found, name)


def test_timeline_needs_a_timed_replay(found: ReplayResult, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="keep_timeline is True and service is None"):
        ReplayOptions(100, keep_timeline=True)
    with pytest.raises(InvalidArgument, match="without timeline"):
        write_run_page("small", [found, busy(keep_timeline=False)], tmp_path / "run.html")
    with pytest.raises(InvalidArgument, match="results is empty"):
        write_run_page("small", [], tmp_path / "run.html")
    with pytest.raises(InvalidArgument, match="path is "):
        write_run_page("small", [found], tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the CPU pool


def test_a_cpu_pool_turns_evictions_into_hits(found: ReplayResult) -> None:
    with_cpu = busy(num_cpu_blocks=4000)
    assert found.num_saved_blocks == found.num_fetched_blocks == 0
    assert with_cpu.num_saved_blocks > 10_000
    assert with_cpu.num_fetched_blocks > 5000
    assert with_cpu.num_hit_tokens > 2 * found.num_hit_tokens
    assert with_cpu.timeline is not None
    moved = int(with_cpu.timeline.counts["moved_blocks"].sum())
    assert moved == with_cpu.num_saved_blocks + with_cpu.num_fetched_blocks


def test_moved_blocks_take_time() -> None:
    fast = busy(num_cpu_blocks=4000, service=ServiceModel(seconds_per_moved_block=0))
    slow = busy(num_cpu_blocks=4000, service=ServiceModel(seconds_per_moved_block=0.01))
    assert fast.simulated is not None
    assert slow.simulated is not None
    assert slow.simulated.duration > fast.simulated.duration + 0.005 * slow.num_saved_blocks


def test_cpu_pool_works_without_timestamps() -> None:
    """Evicted blocks come back, and the fetched tokens are the hits beyond the pool's own."""
    trace = open_trace("small")
    plain, with_cpu = (
        replay(trace, ReplayOptions(1200, max_model_len=8192, num_cpu_blocks=cpu)) for cpu in (0, 30_000)
    )
    without_limit = replay(trace, ReplayOptions(40_000, max_model_len=8192))
    assert plain.num_hit_tokens < with_cpu.num_hit_tokens == without_limit.num_hit_tokens
    assert with_cpu.num_fetched_blocks >= (with_cpu.num_hit_tokens - plain.num_hit_tokens) // 16


# ---------------------------------------------------------------- the page


def test_every_number_is_in_the_page(found: ReplayResult, tmp_path: Path) -> None:
    write_run_page("small", [found, busy(2000)], tmp_path / "run.html")
    page = Page((tmp_path / "run.html").read_text(encoding="utf-8"))
    timeline = found.timeline
    assert timeline is not None
    assert page.texts["title"] == ["Replay of small by timestamps"]
    assert [run["name"] for run in page.data["runs"]] == ["lru, 1,200 blocks", "lru, 2,000 blocks"]
    run = page.data["runs"][0]
    assert run["held"] == timeline.held_blocks.tolist()
    assert run["counts"]["evicted_tokens"] == timeline.counts["evicted_tokens"].tolist()
    width = page.texts["th"].index("0 s") - 1
    first = [timeline.held_blocks[0], timeline.running[0], timeline.waiting[0], timeline.counts["arrived"][0]]
    assert page.texts["td"][:4] == [f"{value:,}" for value in first]
    assert page.texts["td"][width * 3] == f"{timeline.held_blocks[3]:,}"
    assert f"{found.num_preemptions} preemptions" in " ".join(page.texts["p"])


def test_hostile_names_are_escaped(found: ReplayResult, tmp_path: Path) -> None:
    tags = []
    for name in (HOSTILE, "plain"):
        write_run_page(name, [found], tmp_path / "run.html")
        text = (tmp_path / "run.html").read_text(encoding="utf-8")
        assert "{{" not in text.replace("{{rows}}", "")
        tags.append(Page(text).tags)
    assert tags[0] == tags[1]


DRIVER = """<script>{
  const select = document.querySelector("#which select");
  const end = (box) => box.x + box.width;
  const look = () => ({
    panels: [...document.querySelectorAll("#chart text.strong")].map((one) => one.textContent),
    wide: document.documentElement.scrollWidth > innerWidth,
    tables: [...document.querySelectorAll("section.run")].map((one) => !one.hidden),
    numbers: [...document.querySelectorAll("#readout td:nth-child(2)")].map((one) => one.textContent),
    right: Math.max(...[...document.querySelectorAll("#chart text")].map((one) => end(one.getBBox()))),
    chart: document.querySelector("#chart svg").clientWidth,
    bad: document.getElementById("chart").innerHTML.includes("NaN"),
  });
  const seen = [look()];
  select.value = "1";
  select.dispatchEvent(new Event("change"));
  document.querySelector("#chart svg").dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
  seen.push(look());
  document.body.textContent = JSON.stringify(seen);
}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("window", ["1900,1000", "500,800"])
def test_page_works_in_a_browser(found: ReplayResult, window: str, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    second = busy(2000, num_cpu_blocks=4000)
    write_run_page("small", [found, second], path)
    path.write_text(path.read_text(encoding="utf-8") + DRIVER, encoding="utf-8")
    arguments = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu",
        f"--window-size={window}", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    first, after = json.loads(Page(done.stdout).texts["body"][0])
    assert [len(first["panels"]), len(after["panels"])] == [4, 5], "the CPU pool's moves have a chart of their own"
    assert (first["tables"], after["tables"]) == ([True, False], [False, True])
    assert first["numbers"][0] == "1,199"
    assert second.timeline is not None
    assert after["numbers"][0] == f"{second.timeline.held_blocks[0]:,}"
    for state in (first, after):
        assert not state["wide"]
        assert not state["bad"]
        assert state["right"] <= state["chart"]
