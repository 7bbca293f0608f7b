"""`blockyard replay --closed`, `--admission` and `blockyard curve --closed`: what they print, draw and refuse."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from blockyard.cli.main import main
from blockyard_lab.replay.timed import DEVICES

pytest.importorskip("joblib")
pytest.importorskip("matplotlib")

TRACE = "chat:requests=60,seed=3"
SHORT = ("--hours", "0.02", "--warm-up", "0.01", "--jobs", "1", "--block-size", "16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_closed_replay_prints_a_row_per_pool_and_sessions_with_every_constant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--closed", "--sessions", "2,3", "--blocks", "200,50%", "--runs", "2", "--device", "70b")
    status, out, err = run(capsys, "replay", TRACE, *options, "--seconds-per-step", "0.1", *SHORT)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("chat:requests=60,seed=3: 60 requests of ")
    assert "per_step 0.1, per_prompt_token 4.4e-05" in lines[1]
    assert "seeds 0, 1" in lines[2]
    assert [line.split()[0] for line in lines[5:]] == ["2", "3", "2", "3"]


def test_json_and_csv_have_a_run_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--closed", "--blocks", "400", "--sessions", "3", "--runs", "2", "--seed", "5", *SHORT)
    status, out, _ = run(capsys, "replay", TRACE, *options, "--beside", "1:scan:requests=20,seed=1", "--json")
    assert status == 0
    runs = json.loads(out)["runs"]
    assert [found["seed"] for found in runs] == [5, 6]
    assert [group["num_sessions"] for group in runs[0]["groups"]] == [3, 1]
    _, out, _ = run(capsys, "replay", TRACE, *options, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["seed"] for row in rows] == ["5", "6"]
    assert float(rows[0]["all_waiting_max"]) >= float(rows[0]["all_waiting_p50"])


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_has_a_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "replay", TRACE, "--timed", "--blocks", "3000", "--device", name, "--json")
    (found,) = json.loads(out)["runs"]
    assert (status, found["num_requests"]) == (0, 60)
    steps = found["simulated"]["num_steps"]
    assert found["simulated"]["duration"] > steps * DEVICES[name].seconds_per_step


def test_admission_under_the_traces_own_arrivals_serves_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--timed", "--admission", "arrival", "--blocks", "400", "--speedup", "10", *SHORT)
    status, out, _ = run(capsys, "replay", TRACE, *options, "--json")
    (found,) = json.loads(out)["runs"]
    assert (status, found["counters"]["num_admissions"], found["all"]["num_unserved"]) == (0, 60, 0)


def test_a_curve_over_sessions_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pictures = [tmp_path / "a.svg", tmp_path / "b.png", tmp_path / "c.svg"]
    outputs = [option for path in pictures for option in ("-o", str(path))]
    options = ("--closed", "--sessions", "1,2,4", "--blocks", "200", *SHORT)
    status, out, err = run(capsys, "curve", TRACE, *options, *outputs)
    assert (status, err, len(out.splitlines())) == (0, "", 5 + 3)
    assert pictures[0].read_bytes() == pictures[2].read_bytes()
    assert "sessions at once" in pictures[0].read_text()
    assert pictures[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", TRACE, "--closed", "--admission", "last"), "admission is 'last'"),
        (("replay", TRACE, "--admission", "arrival"), "--admission needs either --closed or --timed"),
        (("replay", TRACE, "--closed", "--timed"), "either --closed or --timed"),
        (("replay", TRACE, "--closed", "--num-cpu-blocks", "10"), "--num-cpu-blocks was given with --closed"),
        (("replay", TRACE, "--closed", "--sessions", "many"), "--sessions has 'many'"),
        (("replay", TRACE, "--closed", "--sessions", "0"), "--sessions is 0"),
        (("replay", TRACE, "--closed", "--block-size", "16", "--beside", "3"), "--beside is '3'"),
        (("replay", TRACE, "--closed", "--policies", "lru,arc"), "must be one policy"),
        (("replay", TRACE, "--closed", "--runs", "0"), "--runs is 0"),
        (("replay", TRACE, "--closed", "--block-size", "24"), "multiple of 16"),
        (("curve", TRACE, "--closed"), "--blocks is None"),
        (("curve", TRACE, "--closed", "--blocks", "10,20"), "--blocks is '10,20'"),
        (("curve", TRACE, "--closed", "--blocks", "10", "--hints"), "--hints was given with --closed"),
        (("curve", TRACE, "--admission", "arrival"), "in a curve it needs --closed"),
        (("curve", TRACE, "--closed", "--blocks", "10", "-o", "x.html"), "must end in .png or .svg"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
