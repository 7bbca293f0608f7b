"""WEKA's Claude Code sessions: a tar archive with one JSON file per session (github.com/callanjfox/kv-cache-tester).

A session's `requests` have `t` and `api_time` (seconds), `in` and `out` (tokens), and `hash_ids`: one id for each full
block of 64 tokens, which names the block with its prefix, and is local to the session. Sessions with equal
`tool_tokens` and `system_tokens` are taken to share that many leading tokens.

The files do not say when a session began. In the trace, each session begins when the one before it has ended. Requests
of subagents and sessions that repeat an earlier one are left out.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from blockyard.errors import TraceError

from ..trace import Skips, TraceRequest
from . import line_fields as fields
from .lines import MAX_LINE_BYTES, MAX_PROMPT_TOKENS, LineProblem, open_regular, parse_json_object, preview

BLOCK_SIZE = 64
MAX_LOCAL_ID = 2**31 - 1
#: Ids are (session << 32) + the file's id, or + this and the request's number for the last, partly filled block.
_PARTIAL = 2**31
#: Ids of shared beginnings: above those of 2**26 sessions.
_SHARED = 2**59


def is_archive(path: Path) -> bool:
    """Return whether `path` is a tar archive, compressed or not."""
    try:
        return path.is_file() and tarfile.is_tarfile(path)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return False


def require_archive(path: Path) -> None:
    """Raise `TraceError` unless `path` is a tar archive."""
    open_regular(path).close()
    if not is_archive(path):
        raise TraceError(f"{path} is not in format 'weka': {path}:1: the file is not a tar archive")


class WekaTrace:
    """The requests of an archive, session after session. Memory is that of the longest session.

    A lenient walk counts skipped sessions and requests in `skips`; a strict one raises `TraceError` at the first.
    """

    hash_block_size = BLOCK_SIZE

    def __init__(self, path: Path, strict: bool) -> None:
        self.name, self.skips = str(path), Skips()
        self._path, self._strict = path, strict

    def __iter__(self) -> Iterator[TraceRequest]:
        self.skips, found, end = Skips(), False, 0.0
        seen: set[tuple[str, ...]] = set()
        beginnings: dict[tuple[int, int], int] = {}
        for number, (member, content) in enumerate(self._files()):
            try:
                session = parse_json_object(content)
                rows = _require_requests(session)
                beginning = (_tokens(session, "tool_tokens"), _tokens(session, "system_tokens"))
            except LineProblem as problem:
                self._leave_out(problem.cause, member, problem.text)
                continue
            timings = tuple(_timing(row) for row in rows)
            if timings in seen:
                self._leave_out(
                    "session repeats an earlier one", member, "an earlier file has the same times and lengths"
                )
                continue
            seen.add(timings)
            shared = _SHARED + (beginnings.setdefault(beginning, len(beginnings)) << 32)
            start, num_shared = end, sum(beginning) // BLOCK_SIZE
            answered: float | None = None
            for place, row in enumerate(rows):
                try:
                    request, answered = _read_request(row, answered, start, number, place, shared, num_shared)
                except LineProblem as problem:
                    self._leave_out(problem.cause, member, problem.text)
                    continue
                found, end = True, max(end, request.arrival, start + answered)
                yield request
        if not found:
            raise TraceError(f"{self.name} holds no readable request; {self.skips.total} sessions or requests skipped")

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each .json file in the archive."""
        try:
            with open_regular(self._path) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
                for member in archive:
                    if not (member.isfile() and member.name.endswith(".json")):
                        continue
                    if member.size > MAX_LINE_BYTES:
                        text = f"the file has {member.size} bytes; at most {MAX_LINE_BYTES} are read"
                        self._leave_out("session too long", member.name, text)
                        continue
                    content = archive.extractfile(member)
                    assert content is not None  # it is a regular file
                    yield member.name, content.read()
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise TraceError(f"{self.name} is damaged: {error}") from error
        except OSError as error:
            raise TraceError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def _leave_out(self, cause: str, member: str, text: str) -> None:
        where = f"{self.name}:{member}: {text}"
        if self._strict:
            raise TraceError(where)
        self.skips.add(cause, where)


def _require_requests(session: dict[str, Any]) -> list[Any]:
    rows = fields.required(session, "requests")
    if type(rows) is not list:
        raise LineProblem("requests not a list", "requests must be a list")
    if session.get("block_size", BLOCK_SIZE) != BLOCK_SIZE:
        text = f"block_size is {preview(session['block_size'])}; it must be {BLOCK_SIZE}"
        raise LineProblem("block_size is not 64", text)
    return rows


def _timing(row: Any) -> str:
    return repr((row.get("t"), row.get("in"), row.get("out"))) if type(row) is dict else ""


def _tokens(found: dict[str, Any], name: str) -> int:
    return fields.integer(name, found.get(name, 0), 0, MAX_PROMPT_TOKENS)


def _read_request(
    row: Any, answered: float | None, start: float, session: int, place: int, shared: int, num_shared: int
) -> tuple[TraceRequest, float]:
    """Return a request, and when its answer was complete, in seconds since the session began.

    Args:
        row: the request's JSON.
        answered: when the answer before it was complete; None for the first request.
        start: arrival of the session's first request.
        session: number of the session.
        place: number of the request in it.
        shared: first id of the blocks that the session shares with others.
        num_shared: number of those blocks.

    Raises:
        LineProblem: if `row` is not a request that can be used.
    """
    if type(row) is not dict:
        raise LineProblem("request not an object", f"a request is {preview(row)}; it must be an object")
    if row.get("type") == "subagent":
        raise LineProblem("requests of a subagent", "a subagent's requests are left out")
    seconds = fields.timestamp("t", fields.required(row, "t"))
    duration = max(fields.timestamp("api_time", row.get("api_time") or 0), 0)
    prompt = fields.prompt_length("in", fields.required(row, "in"))
    output = fields.output_length("out", row.get("out") or 0)
    full = fields.hash_ids(fields.required(row, "hash_ids"), prompt // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)
    if full.max(initial=0) > MAX_LOCAL_ID:
        raise LineProblem("hash_ids out of range", f"hash_ids holds {full.max()}; it must be at most {MAX_LOCAL_ID}")
    tail = np.full(1 if prompt % BLOCK_SIZE else 0, _PARTIAL + place, np.int64)
    ids = np.append(full, tail) + (session << 32)
    ids[: min(num_shared, len(full))] = np.arange(min(num_shared, len(full))) + shared
    ids = fields.read_only(fields.require_distinct(ids))
    pause = None if answered is None else max(seconds - answered, 0.0)
    request = TraceRequest(start + max(seconds, 0.0), prompt, output, ids, None, str(session), pause)
    return request, seconds + duration
