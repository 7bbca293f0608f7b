"""Traces that are damaged or hostile: a clear error or a counted skip, never a wrong number."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import InvalidArgument
from blockyard_lab import TraceError
from blockyard_lab.traces import make_trace, open_trace, write_trace
from blockyard_lab.traces.lines import MAX_LINE_BYTES, OverlongLine, TruncatedFile, read_pieces, split_lines

GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
LATER = {**GOOD, "timestamp": 2000, "hash_ids": [1, 3]}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


#: Each bad line, the cause it is counted by, and what the error says beside file and line.
BAD_LINES: list[tuple[bytes, str, str]] = [
    (b'{"timestamp": 1', "not JSON", "the line is not JSON"),
    (b"{'timestamp': 1}", "not JSON", "the line is not JSON"),
    (b"[" * 100_000, "not JSON", "nested too deep"),
    (b'{"a":' * 100_000, "not JSON", "nested too deep"),
    (b"[1, 2]", "not a JSON object", "must be a JSON object"),
    (b"null", "not a JSON object", "the line is None"),
    (b'"text"', "not a JSON object", "'text'"),
    (b"\xff\xfe{}", "not UTF-8", "byte 1 of the line is 0xff"),
    (b'{"timestamp": "\xc3("}', "not UTF-8", "0xc3"),
    (line()[:-1] + b', "input_length": 700}', "not JSON", "duplicate key"),
    (line(timestamp=float("nan")), "not JSON", "NaN is not a JSON number"),
    (line(input_length=float("inf")), "not JSON", "Infinity is not a JSON number"),
    (line(output_length=float("-inf")), "not JSON", "-Infinity is not a JSON number"),
    (line(input_length=0).replace(b": 0", b": " + b"9" * 5000), "not JSON", "the line is not JSON"),
    (without("timestamp"), "timestamp missing", "the line has hash_ids, input_length, output_length"),
    (without("input_length"), "input_length missing", "input_length is missing"),
    (without("output_length"), "output_length missing", "output_length is missing"),
    (without("hash_ids"), "hash_ids missing", "hash_ids is missing"),
    (line(timestamp="now"), "timestamp not a number", "'now'"),
    (line(timestamp=True), "timestamp not a number", "True"),
    (line(timestamp=None), "timestamp not a number", "None"),
    (line(timestamp=0).replace(b": 0", b": 1e999"), "timestamp out of range", "inf"),
    (line(timestamp=10**17), "timestamp out of range", "from -2**53 to 2**53"),
    (line(input_length=-5), "input_length out of range", "input_length is -5; it must be from 1 to 134217728"),
    (line(input_length=0, hash_ids=[]), "input_length out of range", "input_length is 0"),
    (line(input_length=10**12), "input_length out of range", "1000000000000"),
    (line(input_length=True), "input_length not an integer", "True"),
    (line(input_length=600.0), "input_length not an integer", "600.0"),
    (line(input_length="600"), "input_length not an integer", "'600'"),
    (line(input_length="6" * 10**6), "input_length not an integer", "666..."),
    (line(output_length=-1), "output_length out of range", "from 0 to 134217728"),
    (line(output_length=[]), "output_length not an integer", "[]"),
    (line(hash_ids=[1]), "hash_ids do not match input_length", "hash_ids has 1 ids; input_length 600 needs 2 of 512"),
    (line(hash_ids=[1, 2, 3]), "hash_ids do not match input_length", "hash_ids has 3 ids"),
    (line(hash_ids=[]), "hash_ids do not match input_length", "hash_ids has 0 ids"),
    (line(hash_ids=[1, 1]), "hash_ids repeat", "hash_ids holds 1 twice"),
    (line(hash_ids=[1, -2]), "hash_ids out of range", "hash_ids holds -2"),
    (line(hash_ids=[1, 2**60]), "hash_ids out of range", "ids must be from 0 to 1152921504606846975"),
    (line(hash_ids=[1, 10**40]), "hash_ids out of range", "hash_ids holds 1000"),
    (line(hash_ids=[1, 2.0]), "hash_ids not integers", "hash_ids holds 2.0"),
    (line(hash_ids=[1, True]), "hash_ids not integers", "hash_ids holds True"),
    (line(hash_ids=[1, None]), "hash_ids not integers", "hash_ids holds None"),
    (line(hash_ids=[[1], [2]]), "hash_ids not integers", "hash_ids holds [1]"),
    (line(hash_ids="12"), "hash_ids not a list", "'12'"),
    (line(hash_ids={"1": 2}), "hash_ids not a list", "{'1': 2}"),
    (line(hash_block_size=16), "hash_block_size changes", "it must be 512, as on the first line"),
    (line(hash_block_size="512"), "hash_block_size changes", "'512'"),
    (line(session=[1]), "session not a name", "[1]"),
    (line(session="x" * 201), "session not a name", "short text"),
]


def in_file(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize(("bad", "cause", "says"), BAD_LINES, ids=[f"{n}-{c[1]}" for n, c in enumerate(BAD_LINES)])
def test_bad_line_is_counted_by_cause_or_refused_if_strict(tmp_path: Path, bad: bytes, cause: str, says: str) -> None:
    path = in_file(tmp_path, json.dumps(GOOD).encode(), bad, bad, json.dumps(LATER).encode())
    trace = open_trace(path)
    assert [(r.arrival, r.num_prompt_tokens) for r in trace] == [(0.0, 600), (1.0, 600)]
    assert list(trace.skips.causes) == [cause]
    count, first = trace.skips.causes[cause]
    assert count == trace.skips.total == 2
    assert first.startswith(f"{path}:2: ")
    assert says in first
    assert len(first) < 500 + len(str(path))
    with pytest.raises(TraceError) as caught:
        list(open_trace(path, strict=True))
    assert str(caught.value) == first
    with pytest.raises(TraceError):
        list(open_trace(in_file(tmp_path, bad)))


def test_all_lines_left_out_is_an_error_with_the_first_cause(tmp_path: Path) -> None:
    path = in_file(tmp_path, line(hash_ids=[1]), line(hash_ids=[1]), line(input_length=-1))
    with pytest.raises(TraceError, match=r"no readable request; 3 lines .* 2 of them for: hash_ids do not match.*:1: "):
        list(open_trace(path))


# ---------------------------------------------------------------- time


def test_timestamps_that_go_back_are_raised_and_counted(tmp_path: Path) -> None:
    path = in_file(tmp_path, line(timestamp=5000), line(timestamp=4000), line(timestamp=7000), line(timestamp=6999.5))
    trace = open_trace(path)
    assert [request.arrival for request in trace] == [0.0, 0.0, 2.0, 2.0]
    ((cause, (count, first)),) = trace.skips.causes.items()
    assert "raised to the latest" in cause
    assert count == 2
    assert first == f"{path}:2: timestamp is 4000; it must not be before 5000, the latest so far"
    with pytest.raises(TraceError, match="must not be before 5000"):
        list(open_trace(path, strict=True))


@given(st.lists(st.integers(-(2**53), 2**53) | st.floats(-1e15, 1e15), min_size=1))
@settings(max_examples=60, deadline=None)
def test_arrivals_never_go_back(tmp_path_factory: pytest.TempPathFactory, timestamps: list[float]) -> None:
    path = in_file(tmp_path_factory.mktemp("t"), *(line(timestamp=timestamp) for timestamp in timestamps))
    arrivals = [request.arrival for request in open_trace(path)]
    assert len(arrivals) == len(timestamps)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)


# ---------------------------------------------------------------- other formats

BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 1}
BAD_IN_OTHERS: list[tuple[bytes, bytes, str]] = [
    *[
        (json.dumps({**BAILIAN, "hash_ids": [1, 2]}).encode(), json.dumps({**BAILIAN, **change}).encode(), cause)
        for change, cause in [
            ({}, "hash_ids missing"),
            ({"hash_ids": [1]}, "hash_ids do not match input_length"),
            ({"hash_ids": [1, 2], "chat_id": "x"}, "chat_id not an integer"),
            ({"hash_ids": [1, 2], "chat_id": -1}, "chat_id out of range"),
            ({"hash_ids": [1, 2], "parent_chat_id": None}, "parent_chat_id not an integer"),
            ({"hash_ids": [1, 2], "timestamp": "0"}, "timestamp not a number"),
            ({"hash_ids": [1, 2**60]}, "hash_ids out of range"),
        ]
    ],
    *[
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4", bad, cause)
        for bad, cause in [
            (b"2023-11-16 18:15:46,3", "cells do not match the header"),
            (b"2023-11-16 18:15:46,3,4,5", "cells do not match the header"),
            (b"2023-11-16 18:15:46,-3,4", "ContextTokens out of range"),
            (b"2023-11-16 18:15:46,0,4", "ContextTokens out of range"),
            (b"2023-11-16 18:15:46,1_0,4", "ContextTokens not an integer"),
            (b"2023-11-16 18:15:46,+-3,4", "ContextTokens not an integer"),
            (b"2023-11-16 18:15:46,nan,4", "ContextTokens not an integer"),
            (b"2023-11-16 18:15:46,3,4.0", "GeneratedTokens not an integer"),
            (b"2023-11-16 18:15:46,3," + b"9" * 6000, "GeneratedTokens not an integer"),
            (b"2023-11-16 18:15:46,3,1000000000000", "GeneratedTokens out of range"),
            (b"2023-13-16 18:15:46,3,4", "TIMESTAMP not a date"),
            (b"5,3,4", "TIMESTAMP not a date"),
            (b',"3,4', "not CSV"),
            (b"\xff,3,4", "not UTF-8"),
        ]
    ],
    *[
        (b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,2,3,5,API log", bad, cause)
        for bad, cause in [
            (b"6,m,2,3,6,API log", "Total tokens do not match"),
            (b"6,m,2,3,,API log", "Total tokens not an integer"),
            (b"NaN,m,2,3,5,API log", "Timestamp not a number"),
            (b"inf,m,2,3,5,API log", "Timestamp out of range"),
            (b"1_0,m,2,3,5,API log", "Timestamp not a number"),
            (b"6,m,,3,3,API log", "Request tokens not an integer"),
            (b"6,m,2,-3,-1,API log", "Response tokens out of range"),
        ]
    ],
    *[
        (b'{"token_ids": [1]}', bad, cause)
        for bad, cause in [
            (b'{"token_ids": []}', "the length of token_ids out of range"),
            (b'{"token_ids": [-1]}', "token_ids out of range"),
            (b'{"token_ids": [2147483648]}', "token_ids out of range"),
            (b'{"token_ids": [1.5]}', "token_ids not integers"),
            (b'{"token_ids": "abc"}', "token_ids not a list"),
            (b'{"token_ids": [1], "input_length": 2}', "token_ids do not match input_length"),
            (b'{"token_ids": [1], "output_length": -2}', "output_length out of range"),
        ]
    ],
]


@pytest.mark.parametrize(
    ("good", "bad", "cause"), BAD_IN_OTHERS, ids=[f"{n}-{c[2]}" for n, c in enumerate(BAD_IN_OTHERS)]
)
def test_bad_line_of_other_formats_is_counted_by_cause(tmp_path: Path, good: bytes, bad: bytes, cause: str) -> None:
    path = in_file(tmp_path, good, bad)
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert list(trace.skips.causes) == [cause]
    number = len(good.splitlines()) + 1
    with pytest.raises(TraceError, match=rf"trace\.jsonl:{number}: "):
        list(open_trace(path, strict=True))


# ---------------------------------------------------------------- files


def test_overlong_line_is_skipped_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(GOOD).encode() + b"\n")
        file.seek(3 * MAX_LINE_BYTES, os.SEEK_CUR)
        file.write(b"\n" + json.dumps(LATER).encode())
    trace = open_trace(path)
    tracemalloc.start()
    try:
        assert len(list(trace)) == 2
        assert tracemalloc.get_traced_memory()[1] < 1.2 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()
    assert trace.skips.causes["line too long"] == (1, f"{path}:2: the line has more than {MAX_LINE_BYTES} bytes")


def test_the_limit_of_a_line_is_exact() -> None:
    half = b"x" * (MAX_LINE_BYTES // 2)
    short, long = split_lines([half, half, b"\n", half, half, b"x\n"])
    assert short == half + half
    assert isinstance(long, OverlongLine)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n", gzip.compress(b"", mtime=0)])
def test_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is empty"):
        open_trace(path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in [("none", "there is no file"), ("pipe", "is a pipe"), (".", "is a folder"), ("a\0b", "no file")]:
        with pytest.raises(TraceError, match=says):
            open_trace(tmp_path / name)
    with pytest.raises(TraceError, match="is a device or socket; a trace must be a regular file"):
        open_trace("/dev/null")
    with pytest.raises(TraceError, match="cannot be read"):
        open_trace(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("name", ["chatt", "chatt:seed=1"])
def test_misspelt_generator_error_lists_generators(name: str) -> None:
    with pytest.raises(TraceError, match=f"source is '{name}'; it is neither a file nor a generator: chat, "):
        open_trace(name)


def test_file_with_only_a_header_is_refused(tmp_path: Path) -> None:
    path = in_file(tmp_path, b"TIMESTAMP,ContextTokens,GeneratedTokens")
    with pytest.raises(TraceError, match="holds no readable request"):
        list(open_trace(path))


#: Enough for several blocks of zstd, of 128 KiB each.
NUM_PACKED = 2000


def packed(tmp_path: Path, kind: str) -> bytes:
    pytest.importorskip("zstandard")
    path = tmp_path / f"whole.{kind}"
    write_trace(make_trace("scan", requests=NUM_PACKED, seed=1), path)
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_truncated_file_keeps_its_whole_lines(tmp_path: Path, kind: str) -> None:
    whole = packed(tmp_path, kind)
    for keep in (len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path = tmp_path / "cut"
        path.write_bytes(whole[:keep])
        with pytest.raises(TruncatedFile):
            list(read_pieces(path))
        trace = open_trace(path)
        found = list(trace)
        assert 0 < len(found) <= NUM_PACKED
        assert trace.skips.causes["file cut short"][0] == 1
        assert f"{path}:{len(found) + 1}: the" in trace.skips.causes["file cut short"][1]
        expected = make_trace("scan", requests=NUM_PACKED, seed=1)
        assert all(a.hash_ids.tolist() == b.hash_ids.tolist() for a, b in zip(found, expected, strict=False))
        with pytest.raises(TraceError, match="before its end marker"):
            list(open_trace(path, strict=True))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_file_truncated_in_its_first_line_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "cut"
    path.write_bytes(packed(tmp_path, kind)[:20])
    with pytest.raises(TraceError, match="before its end marker"):
        open_trace(path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_damaged_file_is_an_error_even_when_lenient(tmp_path: Path, kind: str) -> None:
    whole = bytearray(packed(tmp_path, kind))
    path = tmp_path / "damaged"
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(TraceError, match="is damaged"):
        list(open_trace(path))


def test_bytes_after_a_gzip_member_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(packed(tmp_path, "gz") + b"rubbish")
    with pytest.raises(TraceError, match="is damaged"):
        list(open_trace(path))


def test_compression_bomb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = json.dumps(GOOD).encode() + b"\n" + bytes(3 * MAX_LINE_BYTES)
    for number, bomb in enumerate([gzip.compress(content, 1), zstandard.ZstdCompressor(level=3).compress(content)]):
        path = tmp_path / f"bomb{number}"
        path.write_bytes(bomb)
        tracemalloc.start()
        try:
            trace = open_trace(path)
            assert len(list(trace)) == 1
            assert tracemalloc.get_traced_memory()[1] < 2.2 * MAX_LINE_BYTES
        finally:
            tracemalloc.stop()
        assert list(trace.skips.causes) == ["line too long"]


# ---------------------------------------------------------------- anything at all

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)), inner, max_size=5),
    max_leaves=10,
)
names = st.sampled_from([*sorted(GOOD), "hash_block_size", "session", "chat_id", "token_ids"])
objects = st.dictionaries(names, json_values | st.just([1, 2]) | st.just(600)).map(lambda v: json.dumps(v).encode())
any_line = (st.binary(max_size=60) | objects).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b""))


@given(st.lists(any_line, max_size=8))
@settings(max_examples=200, deadline=None)
def test_bad_lines_do_not_affect_other_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = in_file(tmp_path_factory.mktemp("t"), line(timestamp=-(2**53)), *lines, line(timestamp=2**53, session="z"))
    trace = open_trace(path, format="mooncake")
    requests = list(trace)
    assert requests[-1].session == "z"
    skipped = sum(count for cause, (count, _) in trace.skips.causes.items() if "raised" not in cause)
    assert len(requests) == 2 + sum(1 for text in lines if text.strip()) - skipped
    for request in requests:
        assert request.hash_ids is not None
        assert len(request.hash_ids) == -(-request.num_prompt_tokens // 512)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_trace_or_a_trace_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "a"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        list(open_trace(path))


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"source": ""}, "source is ''"),
        ({"source": 5}, "source is 5"),
        ({"source": "default", "format": "csv"}, "format is 'csv'; it must be auto, mooncake"),
        ({"source": "default", "strict": 1}, "strict is 1"),
        ({"source": "default", "max_requests": 0}, "max_requests is 0"),
        ({"source": "default", "max_requests": 1.5}, "max_requests is 1.5"),
        ({"source": "chat:seed"}, "has option 'seed'; options are name=value"),
        ({"source": "chat:seed=1,seed=2"}, "each given once"),
        ({"source": "chat:seed=x"}, "seed is 'x'; it must be a number"),
        ({"source": "chat:seed=1.5"}, "seed is 1.5; it must be an integer"),
        ({"source": "chat:color=1"}, "chat has no option 'color'; it has requests, seed"),
        ({"source": "chat:requests=0"}, "requests is 0; it must be from 1"),
        ({"source": "chat:rate=nan"}, "rate is nan; it must be finite"),
        ({"source": "chat", "format": "mooncake"}, "omit both for a generator"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_trace(**arguments)
    assert says in str(caught.value)
