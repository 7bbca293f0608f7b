"""The status line: one every few seconds of work, by a clock that moves with the steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard import InvalidArgument
from blockyard.cli.main import main
from blockyard_engine import SamplingParams, StepReport
from blockyard_serve import EngineThread
from blockyard_serve.http.request_log import log_config
from blockyard_serve.jobs.status_line import StatusLine
from blockyard_testing.servers import MODEL, tiny_engine

from ..support.engine_jobs import run_jobs

PROMPT = list(range(40))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("blockyard_serve.status")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_line_is_written_every_ten_seconds_of_work(lines: list[str]) -> None:
    """The prompt, and 25 tokens, a second each."""
    run_jobs(tiny_engine(), [PROMPT], sampling(25))
    assert lines == [
        "1 running, 0 waiting; 1.0 new and 4.9 computed tokens a second; 2.0% of the blocks held; "
        "0.0% of 40 prompt tokens hit",
        "1 running, 0 waiting; 1.0 new and 1.0 computed tokens a second; 2.0% of the blocks held; "
        "no prompt was looked up",
    ]


def test_status_line_has_queue_and_hit_rate(lines: list[str]) -> None:
    """Two requests one after the other, ten steps each: the second one hits two blocks."""
    run_jobs(tiny_engine(max_num_seqs=1), [PROMPT, PROMPT, PROMPT], sampling(9))
    assert len(lines) == 2
    assert lines[0].startswith("1 running, 1 waiting;")
    assert lines[0].endswith("40.0% of 80 prompt tokens hit")


@pytest.mark.parametrize(("seconds", "number"), [(0, 0), (5, 5), (25, 1), (30, 0)])
def test_status_line_interval_can_be_set(lines: list[str], seconds: float, number: int) -> None:
    run_jobs(tiny_engine(), [PROMPT], sampling(25), status_seconds=seconds)
    assert len(lines) == number


def test_time_without_work_does_not_count(lines: list[str]) -> None:
    engine = tiny_engine()
    status, report = StatusLine(engine, 10.0, now=0.0), StepReport(1, 1, 0, 1, 0)
    status.note(report, 4.0)
    status.skip(3600.0)
    status.note(report, 3609.0)
    assert lines == []
    status.note(report, 3610.0)
    assert lines[0].startswith("1 running, 0 waiting; 0.0 new and 0.3 computed tokens a second;")


def test_idle_time_of_the_thread_is_skipped(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A day passes before the first request, and another behind it."""
    skipped: list[float] = []
    monkeypatch.setattr(StatusLine, "skip", lambda self, seconds: skipped.append(seconds))
    now = iter(float(number) for number in range(10**6))
    thread = EngineThread(tiny_engine(), 100, MODEL, clock=lambda: next(now))
    thread.start()
    assert thread.call(lambda engine: engine.num_running).result(60) == 0
    assert thread.stop(60)
    assert skipped
    assert all(seconds == 1.0 for seconds in skipped), "nothing but the wait lies between the two looks at the clock"
    assert lines == []


@pytest.mark.parametrize("seconds", [-1, float("nan"), "10", None])
def test_invalid_status_seconds_are_refused(seconds: object) -> None:
    with pytest.raises(InvalidArgument, match="status_seconds is"):
        StatusLine(tiny_engine(), seconds, 0.0)  # type: ignore[arg-type]


def test_command_checks_status_seconds_before_it_loads_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--status-seconds", "-1", "--model", "no/such/model"]) != 0
    assert "status_seconds is -1; it must be at least 0 (0: no status line)" in capsys.readouterr().err


@pytest.mark.parametrize("access_log", [False, True])
def test_the_status_line_does_not_need_the_access_log(access_log: bool) -> None:
    loggers = log_config(access_log)["loggers"]
    assert loggers["blockyard_serve.status"] == {"handlers": ["stderr"], "level": "INFO", "propagate": False}
