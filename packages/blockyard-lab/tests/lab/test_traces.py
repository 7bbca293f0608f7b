"""Valid traces: every format, compressed or not, written and read back."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard.errors import MissingExtra
from blockyard_lab import Skips, TraceError, TraceRequest
from blockyard_lab.traces import (
    FORMATS,
    SHIPPED,
    SHIPPED_FROM,
    block_ids,
    make_trace,
    open_trace,
    write_trace,
)
from blockyard_lab.traces.block_ids import BailianParser, chain_ids
from blockyard_lab.traces.lines import split_lines

MOONCAKE = [
    {"timestamp": 27_482, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]},
    {"timestamp": 30_482, "input_length": 1024, "output_length": 1, "hash_ids": [4, 10]},
    {"timestamp": 30_500, "input_length": 1025, "output_length": 0, "hash_ids": [4, 10, 11]},
]
BAILIAN: list[dict[str, Any]] = [
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 17, "output_length": 3, "type": "text"},
    {"chat_id": 6, "parent_chat_id": 5, "timestamp": 62.0, "input_length": 32, "output_length": 3, "type": "text"},
    {"chat_id": 7, "parent_chat_id": 6, "timestamp": 64.5, "input_length": 33, "output_length": 3, "type": "search"},
    {"chat_id": 8, "parent_chat_id": 4, "timestamp": 64.5, "input_length": 16, "output_length": 3, "type": "text"},
]
for _row, _ids in zip(BAILIAN, [[1, 2], [1, 3], [1, 3, 1], [3]], strict=True):
    _row.update(turn=1, hash_ids=_ids)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
"""


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def plain(request: TraceRequest) -> tuple[object, ...]:
    """A request that can be compared."""
    ids, tokens = request.hash_ids, request.token_ids
    return (
        request.arrival,
        request.num_prompt_tokens,
        request.num_output_tokens,
        None if ids is None else ids.tolist(),
        None if tokens is None else tokens.tolist(),
        request.session,
    )


# ---------------------------------------------------------------- formats


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a.jsonl", jsonl(MOONCAKE)), strict=True)
    assert trace.hash_block_size == 512
    assert [plain(request) for request in trace] == [
        (0.0, 1000, 7, [4, 9], None, ""),
        (3.0, 1024, 1, [4, 10], None, ""),
        (3.018, 1025, 0, [4, 10, 11], None, ""),
    ]


def test_ids_are_int64_and_cannot_be_written_to(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", jsonl(MOONCAKE))
    for trace in (open_trace(path), make_trace("chat", requests=3, seed=0), make_trace("rag", requests=3, seed=0)):
        for request in trace:
            assert request.hash_ids is not None
            assert request.hash_ids.dtype == np.int64
            assert not request.hash_ids.flags.writeable


def test_bailian_keeps_the_root_of_a_chat_and_renames_ids_under_their_prefix(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a.jsonl", jsonl(BAILIAN)), strict=True)
    assert trace.hash_block_size == 16
    requests = list(trace)
    assert [request.arrival for request in requests] == [0.0, 0.75, 3.25, 3.25]
    assert [request.session for request in requests] == ["5", "5", "5", "4"], "4 is the first ancestor that is known"
    first, second, third, fourth = (request.hash_ids.tolist() for request in requests if request.hash_ids is not None)
    assert first[0] == second[0] == third[0]
    assert second == third[:2]
    assert len({*first, *second, *third, *fourth}) == 5, "3 after 1, 3 at the start and 1 again have names of their own"
    assert max(third) < 2**60


def test_chained_ids_identify_prefixes() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 3, rng.integers(1, 12)) for _ in range(3000)]
    names: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for end, name in enumerate(chain_ids(prompt).tolist(), 1):
            assert names.setdefault(tuple(prompt[:end].tolist()), name) == name
    assert len(set(names.values())) == len(names) > 3000


def test_chats_are_remembered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 50
    monkeypatch.setattr(block_ids, "REMEMBERED_CHATS", most)
    parser = BailianParser()

    def session(chat: int, parent: int) -> str:
        fields = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
        return parser.row(json.dumps({"chat_id": chat, "parent_chat_id": parent, **fields}).encode()).session

    for chat in range(most + 10):
        assert session(chat, -1) == str(chat)
    assert len(parser._roots) == most
    assert session(most + 10, 3) == "3", "its root is forgotten, so its parent counts as the root"


def test_azure_traces_have_lengths_only(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a.csv", AZURE), strict=True)
    assert trace.hash_block_size == 0
    assert [plain(request) for request in trace] == [
        (0.0, 374, 44, None, None, ""),
        (4.314579, 396, 109, None, None, ""),
        (60.0, 879, 55, None, None, ""),
    ]


def test_azure_timestamps_may_have_zones(tmp_path: Path) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,1\n2024-05-10 02:00:01+02:00,1,1\n"
    assert [request.arrival for request in open_trace(written(tmp_path / "a", rows), strict=True)] == [0.0, 1.0]


def test_burstgpt_traces_have_lengths_only(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a.csv", BURSTGPT), strict=True)
    assert trace.hash_block_size == 0
    assert [plain(r) for r in trace] == [(0.0, 472, 18, None, None, ""), (40.5, 1087, 0, None, None, "")]


def test_burstgpt_columns_may_be_reordered(tmp_path: Path) -> None:
    rows = 'Session ID,"Response tokens",Timestamp,Request tokens\nabc,2,0.5,3\n,2,1,3\n'
    requests = list(open_trace(written(tmp_path / "a.csv", rows), strict=True))
    assert [(r.session, r.num_prompt_tokens, r.num_output_tokens) for r in requests] == [("abc", 3, 2), ("", 3, 2)]


def test_token_id_lines_become_requests(tmp_path: Path) -> None:
    rows = [{"token_ids": [3, 1, 2**31 - 1]}, {"token_ids": [0], "output_length": 4, "timestamp": 1500, "session": 9}]
    trace = open_trace(written(tmp_path / "a.jsonl", jsonl(rows)), strict=True)
    assert trace.hash_block_size == 0
    requests = [plain(request) for request in trace]
    assert requests == [(0.0, 3, 0, None, [3, 1, 2**31 - 1], ""), (1.5, 1, 4, None, [0], "9")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small tokenizer of words, saved as transformers saves one."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "one": 1, "two": 2, "three": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def test_text_is_tokenized(tmp_path: Path, tokenizer: str) -> None:
    path = written(tmp_path / "a.jsonl", jsonl([{"text": "one two"}, {"prompt": "three four", "output_length": 2}]))
    requests = [plain(request) for request in open_trace(path, tokenizer=tokenizer, strict=True)]
    assert requests == [(0.0, 2, 0, None, [1, 2], ""), (0.0, 2, 2, None, [3, 0], "")]


def test_bad_texts_are_skipped(tmp_path: Path, tokenizer: str) -> None:
    lines = b'{"text": "one"}\n{"text": ""}\n{"text": "\\ud800"}\n{"text": 5}\n{"x": 1}\n'
    trace = open_trace(written(tmp_path / "a.jsonl", lines), tokenizer=tokenizer)
    assert len(list(trace)) == 1
    assert trace.skips.total == 4


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", jsonl([{"text": "one two"}]))
    with pytest.raises(TraceError, match="tokenizer is None; a trace of text needs a folder"):
        open_trace(path)
    with pytest.raises(TraceError, match="there is no such folder"):
        open_trace(path, tokenizer=str(tmp_path / "none"))
    pytest.importorskip("transformers")
    with pytest.raises(TraceError, match="no tokenizer can be loaded from it"):
        open_trace(path, tokenizer=str(tmp_path))


# ---------------------------------------------------------------- which format


def samples() -> dict[str, bytes]:
    tokens = jsonl([{"token_ids": [1]}])
    return {
        "mooncake": jsonl(MOONCAKE),
        "bailian": jsonl(BAILIAN),
        "azure": AZURE.encode(),
        "burstgpt": BURSTGPT.encode(),
        "tokens": tokens,
    }


@pytest.mark.parametrize("name", samples())
def test_format_is_detected_or_given(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a", samples()[name])
    found = [plain(request) for request in open_trace(path)]
    assert found == [plain(request) for request in open_trace(path, format=name)]
    for other in sorted(set(FORMATS) - {name} - ({"mooncake"} if name == "bailian" else set())):
        with pytest.raises(TraceError, match=rf"is not in format '{other}': .*a:1: "):
            open_trace(path, format=other)


def test_format_is_detected_after_a_damaged_first_line(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a", b'{"timestamp": 0, "inpu\n' + jsonl(MOONCAKE)))
    assert len(list(trace)) == 3
    assert trace.skips.causes["not JSON"][0] == 1


@pytest.mark.parametrize("content", [b'{"a": 1, "b": 2}', b"a,b,c\n1,2,3", b"\x00\x01\xff", b"[1, 2]", b"{}"])
def test_unknown_format_error_shows_the_first_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TraceError, match=r"has no known format: .*a:1: "):
        open_trace(written(tmp_path / "a", content))


# ---------------------------------------------------------------- files


def zstd(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
def test_compression_line_ends_and_bom_do_not_matter(tmp_path: Path, pack: Any, ends: bytes, bom: bytes) -> None:
    content = bom + b"\n" + jsonl(MOONCAKE).replace(b"\n", ends) + b"  \n"
    for member in (pack(content), pack(content[:100]) + pack(content[100:])):
        trace = open_trace(written(tmp_path / "any.name", member), strict=True)
        assert [request.num_prompt_tokens for request in trace] == [1000, 1024, 1025]


def test_zeros_after_a_gzip_member_are_padding(tmp_path: Path) -> None:
    path = written(tmp_path / "a", gzip.compress(jsonl(MOONCAKE)) + bytes(1000))
    assert len(list(open_trace(path, strict=True))) == 3


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    assert len(list(open_trace(written(tmp_path / "a", jsonl(MOONCAKE).rstrip()), strict=True))) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_lines_do_not_depend_on_pieces(size: int) -> None:
    content = b"one\n\ntwo\r\n\n\nthree"
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    assert list(split_lines(pieces)) == content.split(b"\n")


def test_zstd_without_its_package_raises_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a", zstd(jsonl(MOONCAKE)))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"blockyard\[lab\]"):
        open_trace(path)
    with pytest.raises(MissingExtra, match=r"blockyard\[lab\]"):
        write_trace(make_trace("scan", requests=2, seed=0), tmp_path / "b.zst")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a"]


def test_every_walk_gives_the_same_requests(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a", b"nonsense\n" + jsonl(MOONCAKE)))
    first, second = iter(trace), iter(trace)
    next(first)
    assert [plain(request) for request in second] == [plain(request) for request in trace]
    assert trace.skips.total == 1


def test_a_file_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trace(make_trace("scan", requests=3000, seed=0, output_tokens=5), path)
    assert path.stat().st_size > 3 * 10**6
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 2 * 10**6
    finally:
        tracemalloc.stop()


def test_max_requests_ends_the_walk(tmp_path: Path) -> None:
    path = written(tmp_path / "a", b"nonsense\n" + jsonl(MOONCAKE))
    trace = open_trace(path, max_requests=2)
    for _ in range(2):
        assert [request.num_prompt_tokens for request in trace] == [1000, 1024]
        assert trace.skips.total == 1
    assert trace.hash_block_size == 512
    assert len(list(open_trace(path, max_requests=99))) == 3
    assert len(list(open_trace("chat:requests=10", max_requests=4))) == 4


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("block_size", [16, 512])
def test_written_trace_reads_back_equal(tmp_path: Path, name: str, block_size: int) -> None:
    pytest.importorskip("zstandard")
    trace = make_trace("mix", requests=60, seed=5, hash_block_size=block_size)
    assert write_trace(trace, tmp_path / name) == 60
    again = open_trace(tmp_path / name, strict=True)
    assert again.hash_block_size == block_size
    assert [plain(request) for request in again] == [plain(request) for request in trace]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_written_token_ids_read_back_equal(tmp_path: Path) -> None:
    path = written(tmp_path / "a", jsonl([{"token_ids": [3, 1], "output_length": 2}, {"token_ids": [5]}]))
    write_trace(open_trace(path), tmp_path / "b")
    assert [plain(request) for request in open_trace(tmp_path / "b")] == [plain(r) for r in open_trace(path)]


def test_a_file_can_be_written_over_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "a", b"nonsense\n" + jsonl(MOONCAKE))
    before = [plain(request) for request in open_trace(path)]
    write_trace(open_trace(path), path)
    assert [plain(request) for request in open_trace(path, strict=True)] == before


class Broken:
    """A trace that fails in its middle."""

    name, hash_block_size, skips = "broken", 512, Skips()

    def __iter__(self) -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 1, 1, np.array([1]))
        raise TraceError("in the middle")


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a", b"before")
    with pytest.raises(TraceError, match="in the middle"):
        write_trace(Broken(), path)
    with pytest.raises(InvalidArgument, match="without hash_ids and token_ids"):
        write_trace(open_trace(written(tmp_path / "azure", AZURE)), path)
    assert path.read_bytes() == b"before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "azure"]


def test_unwritable_path_is_refused(tmp_path: Path) -> None:
    trace = make_trace("chat", requests=2, seed=0)
    (tmp_path / "folder").mkdir()
    for name in ("none/a.jsonl", "folder", "x" * 300):
        with pytest.raises(TraceError, match="cannot be written"):
            write_trace(trace, tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


# ---------------------------------------------------------------- the one that ships


def test_shipped_trace_is_reproduced_byte_for_byte(tmp_path: Path) -> None:
    made, again = tmp_path / "made.gz", tmp_path / "other-name.gz"
    write_trace(open_trace(SHIPPED_FROM), made)
    write_trace(open_trace(SHIPPED_FROM), again)
    assert made.read_bytes() == again.read_bytes()
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(SHIPPED.read_bytes())
    assert SHIPPED.read_bytes()[4:8] == bytes(4), "no time in it"
    assert SHIPPED.stat().st_size < 100_000
    if zlib.ZLIB_RUNTIME_VERSION.startswith("1.2."):  # others pack the same bytes in other ways
        assert made.read_bytes() == SHIPPED.read_bytes()


@pytest.mark.parametrize("name", ["default", "small"])
def test_shipped_trace_has_hits(name: str) -> None:
    trace = open_trace(name, strict=True)
    requests = list(trace)
    assert len(requests) == 320
    assert trace.hash_block_size == 16
    ids = np.concatenate([request.hash_ids for request in requests if request.hash_ids is not None])
    assert 0.4 < 1 - len(np.unique(ids)) / len(ids) < 0.6, "half of its blocks were there before"


@pytest.mark.parametrize(
    ("line", "output", "session"),
    [
        ({"prompt_ids": None, "token_ids": [1, 2], "output_tokens": 7}, 7, ""),  # vLLM's custom data sets
        ({"token_ids": [1, 2], "output_len": 7, "session_id": "a"}, 7, "a"),
        ({"token_ids": [1, 2], "output_length": 7, "output_tokens": 7, "conversation_id": 3}, 7, "3"),
        ({"timestamp": 0, "input_tokens": 5, "output_tokens": 7, "hash_ids": [1], "session_id": "a"}, 7, "a"),
    ],
)
def test_field_names_of_other_tools_are_accepted(
    tmp_path: Path, line: dict[str, object], output: int, session: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (request,) = open_trace(path, strict=True)
    assert (request.num_output_tokens, request.session) == (output, session)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"token_ids": [1], "delay": 500}, "delay is 500; only timestamp is read"),  # aiperf's turns
        ({"timestamp": 0, "input_length": 5, "output_length": 7, "hash_ids": [1], "delay": 9}, "delay is 9"),
        ({"token_ids": [1], "arrival_time": 1.5}, "arrival_time is 1.5; only timestamp is read"),
        ({"token_ids": [1], "output_length": 7, "output_tokens": 8}, "output_tokens is 8 and output_length is 7"),
        ({"token_ids": [1, 2], "input_tokens": 3}, "input_length is 3; token_ids has 2"),
    ],
)
def test_fields_that_would_be_ignored_silently_are_refused(
    tmp_path: Path, line: dict[str, object], message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=message):
        list(open_trace(path, strict=True))
