"""What hostile input does to the lab: an error in a sentence or a counted skip, never a traceback or a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockyard.cli.main import main
from blockyard.core.simulation.seen import SeenContents
from blockyard.errors import InvalidArgument, PolicyError, TraceError
from blockyard_lab import TraceRequest, read_references
from blockyard_lab.curve import hit_curves
from blockyard_lab.policy_names import parse_sizes, policy_of
from blockyard_lab.replay import ReplayOptions, replay
from blockyard_lab.replay.result import Tally
from blockyard_lab.replay.timed import ServiceModel
from blockyard_lab.sweep import WorkerDied, run_all
from blockyard_lab.traces import make_trace, open_trace
from blockyard_testing.lab_reference import ListedTrace

_OWN_POLICY = """
from __future__ import annotations
import os, sys
from collections import OrderedDict
from dataclasses import dataclass
from blockyard.core.policies.base import EvictionPolicy

@dataclass
class Entry:
    key: int

class Mine(EvictionPolicy):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.idle = OrderedDict()
    def insert(self, block, key, depth): self.idle[block] = Entry(key)
    def hit(self, block, key): pass
    def remove(self, block): del self.idle[block]
    def evict(self): {evict}
    def clear(self): self.idle.clear()
    def check(self): pass
"""
_SOUND = "return self.idle.popitem(last=False)[0]"


def _own(folder: Path, evict: str) -> str:
    path = folder / "mine.py"
    path.write_text(_OWN_POLICY.format(evict=evict))
    return f"{path}:Mine"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---------------------------------------------------------------- policies of users


def test_a_policy_file_may_have_dataclasses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "replay", "--policies", f"lru,{_own(tmp_path, _SOUND)}", "--blocks", "900")
    assert (status, err) == (0, "")
    lru, mine = (line.split()[1:10] for line in out.splitlines()[3:5])
    assert lru == mine


@pytest.mark.parametrize("command", ["replay", "curve"])
@pytest.mark.parametrize("evict", ["raise SystemExit(0)", "raise GeneratorExit()", "raise BaseException('x')"])
def test_a_policy_cannot_end_the_command(
    command: str, evict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _run(capsys, command, "--policies", _own(tmp_path, evict), "--blocks", "500", "--jobs", "1")
    assert (status, out) == (2, "")
    assert f"raised {evict[6:].split('(')[0]}: " in err
    assert "mine.py" in err


def test_a_policy_file_cannot_end_the_command(tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(PolicyError, match=r"leaving\.py raised SystemExit: 0"):
        policy_of(f"{path}:Mine")
    assert "_blockyard_policy_leaving" not in sys.modules


def test_ctrl_c_in_a_policy_ends_the_command(tmp_path: Path) -> None:
    assert main(["curve", "--policies", _own(tmp_path, "raise KeyboardInterrupt"), "--blocks", "500"]) == 130


def test_overlong_policy_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there is no file aaa"):
        policy_of("a" * 5000 + ":Mine")


def _leave(status: int) -> None:
    os._exit(status)


def test_a_process_that_dies_is_an_error() -> None:
    pytest.importorskip("joblib")
    with pytest.raises(WorkerDied, match="a worker process was killed"):
        run_all(_leave, [(3,), (3,)], jobs=2)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("unit", ["", "k", "%"])
def test_size_of_four_hundred_digits_is_refused(unit: str) -> None:
    with pytest.raises(InvalidArgument, match="blocks has a number of 400 digits; it must be at most"):
        parse_sizes("9" * 400 + unit, 1000)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seconds-per-step", "1e308", r"seconds_per_step is 1e+308; it must be from 0 to 3600"),
        ("--speedup", "1e-308", "speedup is 1e-308; it must be from"),
        ("--speedup", "1e308", "speedup is 1e+308; it must be from"),
        ("--jobs", "-4", "--jobs is -4; it must be from 1 to 4096"),
        ("--backend", "cloud", "backend is 'cloud'; it must be one of processes, ray, dask"),
    ],
)
def test_infinite_and_unused_options_are_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _run(capsys, "replay", "--timed", "--blocks", "900", option, value)
    assert (status, out) == (2, "")
    assert said in err


def test_there_are_at_most_as_many_processes_as_runs() -> None:
    from argparse import Namespace

    from blockyard_lab.cli.lab_options import chosen_jobs

    assert chosen_jobs(Namespace(jobs=4096, backend="processes"), 3) == 3


def test_percentages_of_a_trace_without_contents_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _azure(tmp_path)
    status, _, err = _run(capsys, "replay", path, "--timed")
    assert status == 2
    assert "--blocks is '10%,25%,50%,100%'" in err
    assert "give numbers" in err
    assert "--timed" not in err
    assert _run(capsys, "replay", path, "--timed", "--blocks", "1000")[0] == 0


def test_plan_reports_skipped_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "plan", "llama-3.1-8b", "--trace", _azure(tmp_path, "yesterday,10,1\n"))
    assert status == 0
    assert "blockyard: 1 x TIMESTAMP" in err


def _azure(folder: Path, more: str = "") -> str:
    path = folder / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,900,5\n2024-05-10 00:00:01,900,5\n" + more
    )
    return str(path)


# ---------------------------------------------------------------- output


@pytest.mark.parametrize("arguments", [("replay", "--blocks", "900"), ("plan", "--list-models")])
def test_closed_or_full_output_ends_quietly_or_with_an_error(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "blockyard.cli.main", *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    unread = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (unread.returncode, unread.stderr) == (0, "")
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "blockyard: No space left on device\n")


def test_no_file_is_written_if_one_of_several_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "missing" / "second.svg"
    status, _, err = _run(capsys, "curve", "--policies", "lru", "--blocks", "900", "-o", str(first), "-o", str(second))
    assert status == 2
    assert "there is no folder" in err
    assert not first.exists()


def test_picture_is_written_through_a_link_but_not_into_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    link, target, pipe = tmp_path / "link.svg", tmp_path / "target.svg", tmp_path / "pipe.svg"
    link.symlink_to(target)
    os.mkfifo(pipe)
    options = ("curve", "--policies", "lru", "--blocks", "900", "-o")
    assert _run(capsys, *options, str(link))[0] == 0
    assert link.is_symlink()
    assert target.read_bytes().startswith(b"<?xml")
    status, _, err = _run(capsys, *options, str(pipe))
    assert status == 2
    assert "a pipe or device" in err
    assert pipe.is_fifo()


# ---------------------------------------------------------------- traces


def test_giant_request_is_left_out_and_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "giant.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2], "hash_block_size": 16}
    path.write_text("".join(json.dumps({**line, "output_length": output}) + "\n" for output in (3, 2**27, 3)))
    for how in ([], ["--timed"]):
        status, out, err = _run(capsys, "replay", str(path), "--blocks", "100", "--json", *how)
        run = json.loads(out)["runs"][0]
        assert (status, run["num_requests"], run["num_refused"], run["num_hit_tokens"]) == (0, 2, 1, 16)
        assert "it needs 8388610 blocks" in run["first_refused"], err


class _Counted(ListedTrace):
    """Counts the requests that were asked for."""

    num_given = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in super().__iter__():
            self.num_given += 1
            yield request


def test_requests_that_wait_stay_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _Counted([TraceRequest(0.0, 40, 5, np.arange(3) + 3 * number) for number in range(300)])
    ahead: list[int] = []
    finish = Tally.finish

    def noted(tally: Tally, *arguments: int) -> None:
        ahead.append(trace.num_given - tally.num_requests)
        finish(tally, *arguments)

    monkeypatch.setattr(Tally, "finish", noted)
    found = replay(trace, ReplayOptions(num_blocks=50, max_num_seqs=2, service=ServiceModel()))
    assert (found.num_requests, len(ahead)) == (300, 300)
    assert max(ahead) <= 4


def test_chunks_of_long_prompts_are_short() -> None:
    trace = _Counted([TraceRequest(0.0, 2**22, 1, None, np.zeros(2**22, np.int32)) for _ in range(1)] * 12, 0)
    given: list[int] = []
    read_references(trace, block_size=2**20, on_request=given.append)
    assert given == [4, 8, 12, 12]


def test_few_slots_are_enough_for_many_ids() -> None:
    for num_slots in (1, 2, 4, 4096):
        seen = SeenContents(num_slots)
        for number in range(10_000):
            seen.add(np.array([number], np.int64))
        assert seen.halvings > 0


def test_sampled_curve_stays_below_what_few_blocks_can_hit() -> None:
    trace = make_trace("agents", requests=600, seed=0)
    sampled = read_references(trace, max_references=4096)
    assert sampled.halvings > 4
    sizes = [1, 10, 50]
    curves = hit_curves(sampled, ["lru", "fifo", "optimum"], sizes)
    bound = np.array(sizes) * sampled.num_requests / sampled.num_references
    for rates in curves.hit_rates.values():
        assert (rates <= bound).all()


def test_arrival_beyond_the_clocks_precision_is_refused() -> None:
    trace = ListedTrace([TraceRequest(float(at), 20, 3, np.arange(2)) for at in (0, 2**53)])
    with pytest.raises(TraceError, match=r"request 2 arrives after 9\.0072e\+15 s; the limit is"):
        replay(trace, ReplayOptions(num_blocks=50, service=ServiceModel()))


def test_field_names_cannot_send_terminal_codes(tmp_path: Path) -> None:
    path = tmp_path / "names.jsonl"
    path.write_text(json.dumps({"\x1b[31mred": 1, "two\nlines": 2}) + "\n")
    with pytest.raises(TraceError, match="is missing; the line has") as caught:
        list(open_trace(path, format="mooncake"))
    assert str(caught.value).isprintable()
