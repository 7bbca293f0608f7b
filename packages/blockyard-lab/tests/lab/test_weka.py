"""WEKA's agent sessions: what the reader makes of an archive."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from blockyard_lab import TraceError, TraceRequest
from blockyard_lab.traces import open_trace


def row(t: float, length: int, ids: list[int], *, out: int = 5, api_time: float = 1.0, **others: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": length, "out": out, "hash_ids": ids, "api_time": api_time, **others}


def session(rows: list[dict[str, Any]], tool_tokens: int = 64, system_tokens: int = 64) -> dict[str, Any]:
    beginning = {"tool_tokens": tool_tokens, "system_tokens": system_tokens}
    return {"id": "x", "block_size": 64, "hash_id_scope": "local", **beginning, "requests": rows, "totals": {}}


def archive(path: Path, *sessions: object, mode: str = "w:xz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for number, content in enumerate(sessions):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(f"./traces/trace_{number:04}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


FIRST = session(
    [row(0.0, 200, [1, 2, 3]), row(10.0, 320, [1, 2, 3, 4, 5], api_time=2.5), row(12.0, 321, [1, 2, 9, 8, 7])]
)
SECOND = session([row(3.0, 200, [1, 2, 3])])
OTHER = session([row(0.0, 130, [1, 2])], tool_tokens=0)


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(open_trace(path, **options))


def ids(request: TraceRequest) -> list[int]:
    assert request.hash_ids is not None
    return request.hash_ids.tolist()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_sessions_follow_one_another_and_pauses_count_from_the_answer(tmp_path: Path, mode: str) -> None:
    found = read(archive(tmp_path / "a.tar", FIRST, SECOND, mode=mode))
    assert [request.pause for request in found] == [None, 9.0, 0.0, None]
    assert [request.arrival for request in found] == [0.0, 10.0, 12.0, 16.0]
    assert [request.session for request in found] == ["0", "0", "0", "1"]
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in found[:2]] == [(200, 5), (320, 5)]


def test_ids_are_a_sessions_own_beyond_the_tools_and_the_system_prompt(tmp_path: Path) -> None:
    first, second, third, again, other = (ids(each) for each in read(archive(tmp_path / "a", FIRST, SECOND, OTHER)))
    assert first[:3] == second[:3]
    assert third[:2] == first[:2]
    assert not set(third[2:]) & set(second)
    assert again[:2] == first[:2]
    assert not set(again[2:]) & set(first)
    assert not set(other) & {*first, *again}


def test_partly_filled_blocks_equal_no_other(tmp_path: Path) -> None:
    found = read(archive(tmp_path / "a", session([row(0.0, 200, [1, 2, 3]), row(5.0, 210, [1, 2, 3])])))
    assert [len(ids(request)) for request in found] == [4, 4]
    assert ids(found[0])[:3] == ids(found[1])[:3]
    assert ids(found[0])[3] != ids(found[1])[3]


BAD: list[tuple[object, str]] = [
    (FIRST, "session repeats an earlier one"),
    (b"{", "not JSON"),
    ({"id": "x"}, "requests missing"),
    ({**SECOND, "requests": 3}, "requests not a list"),
    ({**SECOND, "block_size": 32}, "block_size is not 64"),
    (session([row(0.0, 64, [1], type="subagent")]), "requests of a subagent"),
    (session([row(0.0, 64, [1, 2])]), "hash_ids do not match input_length"),
    (session([row(0.0, 128, [1, 1])], 0, 0), "hash_ids repeat"),
    (session([row(0.0, 64, [2**31])]), "hash_ids out of range"),
    (session([{"t": 0.0}]), "in missing"),
    ({**SECOND, "requests": [7]}, "request not an object"),
]


@pytest.mark.parametrize(("bad", "cause"), BAD)
def test_what_cannot_be_read_is_counted_or_an_error(tmp_path: Path, bad: object, cause: str) -> None:
    path = archive(tmp_path / "a", FIRST, bad, SECOND)
    trace = open_trace(path)
    assert len(list(trace)) == 4
    assert list(trace.skips.causes) == [cause]
    assert trace.skips.causes[cause][1].startswith(f"{path}:./traces/trace_0001.json: ")
    with pytest.raises(TraceError, match=r"trace_0001\.json"):
        read(path, strict=True)


def test_a_damaged_archive_and_one_without_sessions_are_errors(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole", FIRST, SECOND).read_bytes()
    cut, empty, text = (tmp_path / name for name in ("cut", "empty", "text"))
    cut.write_bytes(whole[: len(whole) // 2])
    text.write_text("no archive\n")
    with pytest.raises(TraceError, match="damaged"):
        read(cut)
    with pytest.raises(TraceError, match="not a tar archive"):
        read(text, format="weka")
    with pytest.raises(TraceError, match="holds no readable request"):
        read(archive(empty), format="weka")
    with pytest.raises(TraceError, match="no file"):
        read(tmp_path / "none", format="weka")


def test_a_walk_stops_after_max_requests_and_starts_again(tmp_path: Path) -> None:
    path = archive(tmp_path / "a", FIRST, SECOND)
    trace = open_trace(path, max_requests=2)
    assert [len(list(trace)), len(list(trace)), trace.hash_block_size] == [2, 2, 64]
