"""Warnings that clients can cause without limit: few are written, and all are counted."""

from __future__ import annotations

import logging
import socket

import pytest

pytest.importorskip("fastapi")

from blockyard_serve.http.request_log import RepeatFilter
from blockyard_testing.servers import running_server, tiny_engine


def record(words: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", level, "", 0, words, None, None)


def test_repeated_warning_is_written_every_ten_seconds_with_a_count() -> None:
    now = [100.0]
    few = RepeatFilter(lambda: now[0])
    assert [few.filter(record("Invalid.")) for _ in range(5)] == [True, False, False, False, False]
    assert few.filter(record("Exceeded."))
    now[0] += 9.9
    assert not few.filter(record("Invalid."))
    now[0] += 0.1
    last = record("Invalid.")
    assert few.filter(last)
    assert last.getMessage() == "Invalid. And 5 more since the last such line."
    assert not few.filter(record("Invalid."))


def test_errors_and_other_lines_all_pass() -> None:
    few = RepeatFilter()
    assert all(few.filter(record("it broke", level)) for level in (logging.ERROR, logging.INFO) for _ in range(3))


def test_memory_for_different_warnings_is_bounded() -> None:
    few = RepeatFilter()
    assert all(few.filter(record(f"{number}")) for number in range(1000))
    assert len(few._written) <= 64


def test_flood_of_invalid_requests_writes_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with running_server(tiny_engine()) as running:
        for _ in range(100):
            with socket.create_connection((running.host, running.port), timeout=10) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert 1 <= capfd.readouterr().err.count("Invalid HTTP request received.") <= 5
