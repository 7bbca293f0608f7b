"""Builds in turns: rows meet by name, size and layout, what they count is equal, and real processes are run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benchmarks.in_turns import Rows, run_turn, table_lines
from benchmarks.measure import Figure, write_figures
from benchmarks.peers.rows import AGED, FREE, SHUFFLED, Measured
from benchmarks.peers.table import Column
from benchmarks.peers.table import table_lines as peer_lines
from benchmarks.trace_life import live, part_of

from blockyard_lab.replay import ReplayOptions, replay
from blockyard_lab.traces import open_trace
from blockyard_testing.places import ROOT

TRACE = "chat:requests=40,seed=2"


@pytest.mark.parametrize("num_blocks", [300, 2_000])
def test_a_trace_hits_and_evicts_what_the_lab_says(num_blocks: int) -> None:
    life = live(part_of(TRACE, None), num_blocks)
    said = replay(open_trace(TRACE), ReplayOptions(num_blocks, max_model_len=1 << 20))
    assert (life.num_hit_tokens, life.num_evicted_blocks) == (said.num_hit_tokens, said.num_evicted_blocks)
    assert life.num_blocks == said.num_blocks_handled


def test_parts_of_a_trace_are_the_whole() -> None:
    whole = [request.number for request in part_of(TRACE, None)]
    parts = [[request.number for request in part_of(f"{TRACE}@{number}of3", None)] for number in (1, 2, 3)]
    assert [number for part in parts for number in part] == whole
    assert [len(part) for part in parts] == [14, 14, 12]
    assert len(part_of(f"{TRACE}@2of3", 5)) == 5


def checkout(folder: Path) -> Path:
    """A work tree whose interpreter is this one."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    os.symlink(ROOT / "packages", folder / "packages")
    return folder


def test_builds_meet_at_the_same_rows(tmp_path: Path) -> None:
    builds: list[Rows] = [{}, {}]
    for name, rows in zip("ab", builds, strict=True):
        place = checkout(tmp_path / name)
        for _ in range(2):
            run_turn(place, False, ["benchmarks.trace_life", TRACE, "--sizes", "300", "2000"], rows)
    assert list(builds[0]) == list(builds[1])
    assert [key[1] for key in builds[0]] == ["300", "2,000"]
    assert {len(turns) for rows in builds for turns in rows.values()} == {2}
    assert len(table_lines(builds, ["a", "b"])) == 4


def test_a_table_of_ratios() -> None:
    first: Rows = {
        ("row", "10k", ""): [Figure("row", "10k", each, "ns", f"{each - 2} to 99") for each in (10.0, 20.0, 12.0)],
        ("alone", "1M", "aged"): [Figure("alone", "1M", 1.0, "B", "", layout="aged")],
    }
    other: Rows = {("row", "10k", ""): [Figure("row", "10k", each, "ns", "2 to 8") for each in (5.0, 7.0, 6.0)]}
    _, _, row, alone = table_lines([first, other], ["old", "new"])
    assert row == "| row |  | 10k | 12 | 8 | 0.50 | 0.25 |  |"
    assert alone == "| alone | aged | 1M | 1 | 1 |  |  |  |"


def test_builds_that_count_differently_are_not_compared() -> None:
    first, other = (
        {("row", "10k", ""): [Figure("row", "10k", 1.0, "ns", "", counts=f"{hits} hits")]} for hits in (5, 6)
    )
    with pytest.raises(SystemExit, match="counted 5 hits and 6 hits"):
        table_lines([first, other], ["old", "new"])


def test_layouts_of_a_row_stay_apart_in_the_peers_table() -> None:
    def column(name: str, aged: float, shuffled: float) -> Column:
        rows = [Measured(FREE, 10_000, aged, AGED), Measured(FREE, 10_000, shuffled, SHUFFLED)]
        return Column(name, "1.0", {row.key: row for row in rows})

    ours, later = column("ours", 2.0, 4.0), column("ours", 4.0, 8.0)
    lines = list(peer_lines([later, ours], column("C", 1.0, 2.0), [column("peer", 6.0, 60.0)]))
    assert lines[2:] == [
        "| free a block | aged | 10k | 2 ns | 2 | 1 ns | 2 | 6 ns | 3 |",
        "| free a block | shuffled | 10k | 4 ns | 2 | 2 ns | 2 | 60 ns | 15 |",
    ]


def test_figures_take_the_place_of_those_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- figures -->\nold\n\n| old |\n<!-- end -->\nAfter.\n")
    for _ in range(2):
        write_figures(page, "word " * 30, ["| new |", "|---|"])
        wrapped = f"{'word ' * 24}".strip() + "\n" + f"{'word ' * 6}".strip()
        assert page.read_text() == f"Before.\n<!-- figures -->\n{wrapped}\n\n| new |\n|---|\n<!-- end -->\nAfter.\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="no place"):
        write_figures(page, "", [])
    assert page.read_text() == "no marks\n"
