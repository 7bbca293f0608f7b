"""The lines of a trace file: its bytes decompressed, and numbered lines of bounded length.

`LineProblem` says what is wrong with a line; the constants are the largest numbers that a trace may hold.
"""

from __future__ import annotations

import csv
import json
import reprlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from blockyard.errors import MissingExtra, TraceError

#: Bytes of a line, compressed or not. A longer one is passed over in bounded memory.
MAX_LINE_BYTES = 64 * 2**20
#: Tokens of a prompt, and of an output; the longest sequence that a `CacheConfig` allows.
MAX_PROMPT_TOKENS = 2**27
MAX_OUTPUT_TOKENS = 2**27
#: Ids of blocks and of tokens.
MAX_HASH_ID = 2**60 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_HASH_BLOCK_SIZE = 4096
#: Timestamps in whatever unit the format has; below it a double is exact to the unit.
MAX_TIMESTAMP = 2**53
#: Requests that `max_requests` and the generators count to.
MAX_REQUESTS = 10**12
#: Lines that are looked at for one that says what format a file has.
DETECTION_LINES = 64


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class LineProblem(Exception):
    """A line cannot be used. cause: one of few, to count by. text: field, value and limit, for people."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause
        self.text = text


def shown(value: object) -> str:
    """Return the value as an error shows it: at most a few dozen characters, however large it is."""
    return _REPR.repr(value)


GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PIECE = 2**18
#: A block of zstd is 4 bytes at least and 128 KiB at most when unpacked, so this many bytes become 32 MiB at most.
ZSTD_PIECE = 1024


class CutShort(Exception):
    """The compressed file ends before its end mark."""


def pieces(path: Path) -> Iterator[bytes]:
    """Yield the unpacked bytes of a regular file in pieces of bounded size.

    Raises `TraceError` if the file is none, cannot be read or is damaged, `CutShort` if its end is missing, and
    `MissingExtra` for zstd without the package zstandard.
    """
    try:
        with open_regular(path) as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP_MAGIC):
                yield from _gzip_pieces(file, path)
            elif magic == ZSTD_MAGIC:
                yield from _zstd_pieces(file, path)
            else:
                while piece := file.read(PIECE):
                    yield piece
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def open_regular(path: Path) -> IO[bytes]:
    """Open a file, and nothing that only looks like one: reading a pipe would wait forever, and only once."""
    if not path.exists():
        raise TraceError(f"there is no file {path}")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "no regular file"
        raise TraceError(f"{path} is {kind}; a trace is a file, so that it can be read more than once")
    return path.open("rb")


def _gzip_pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    member, data = zlib.decompressobj(wbits=31), b""
    started = False
    while True:
        data = data or file.read(PIECE)
        if not data:
            break
        if not started:
            data = data.lstrip(b"\0")  # zeros may stand behind a member: padding of tapes
            started = bool(data)
            continue
        try:
            piece = member.decompress(data, PIECE)
        except zlib.error as error:
            raise TraceError(f"{path} is damaged: {error}") from error
        data = member.unconsumed_tail or member.unused_data
        if piece:
            yield piece
        if member.eof:
            member, started = zlib.decompressobj(wbits=31), False
    if started:
        if piece := member.flush():
            yield piece
        raise CutShort("the gzip file ends before its end mark")


def _zstd_pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    zstandard = zstandard_package()
    unpacker = zstandard.ZstdDecompressor()
    member, data, started = unpacker.decompressobj(), b"", False
    while data := data or file.read(ZSTD_PIECE):
        started = True
        try:
            piece = member.decompress(data)
        except zstandard.ZstdError as error:
            raise TraceError(f"{path} is damaged: {error}") from error
        data = member.unused_data if member.eof else b""
        if piece:
            yield piece
        if member.eof:
            member, started = unpacker.decompressobj(), False
    if started:
        raise CutShort("the zstd file ends before its end mark")


def zstandard_package() -> Any:
    """Return the package zstandard. Raises `MissingExtra` if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("a zstd trace needs zstandard: pip install 'blockyard[lab]'") from error
    return zstandard


BOM = b"\xef\xbb\xbf"


class TooLong:
    """Stands for a line of more than `MAX_LINE_BYTES`, which was passed over."""


Line = bytes | TooLong


def numbered_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield the lines that are not blank, from number 1, without their ends (LF or CRLF) and without a BOM.

    O(longest line) memory, at most `MAX_LINE_BYTES` and a piece. Raises as `pieces` does; what stands before the
    place where a file is cut short and is no whole line is not given.
    """
    for number, line in enumerate(split_lines(pieces(path)), 1):
        if isinstance(line, TooLong):
            yield number, line
            continue
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
        line = line.strip()
        if line:
            yield number, line


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Yield lines out of pieces that end anywhere. The last need not have an end."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        size += len(first)
        if size <= MAX_LINE_BYTES:
            parts.append(first)
        else:
            parts.clear()
        if rest:
            yield TooLong() if size > MAX_LINE_BYTES else b"".join(parts)
            yield from rest[:-1]
            parts, size = [rest[-1]], len(rest[-1])
    if size:
        yield TooLong() if size > MAX_LINE_BYTES else b"".join(parts)


def text_of(line: Line) -> str:
    """Return the line as text. Raises `LineProblem` if it is too long or not UTF-8."""
    if isinstance(line, TooLong):
        raise LineProblem("line too long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise LineProblem("not UTF-8", f"byte {error.start + 1} of the line is {line[error.start]:#x}, not UTF-8")


def json_object(line: Line) -> dict[str, Any]:
    """Return the JSON object on a line. NaN, Infinity and a key that stands twice are refused, as JSON itself says.

    Raises `LineProblem`.
    """
    text = text_of(line)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise LineProblem("not JSON", "the JSON is nested too deep") from None
    except ValueError as error:
        raise LineProblem("not JSON", f"the line is no JSON: {str(error)[:100]}; it begins {shown(text)}") from None
    if not isinstance(value, dict):
        raise LineProblem("not a JSON object", f"the line is {shown(value)}; it must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def csv_row(line: Line) -> list[str]:
    """Return the cells of a line of CSV, without the blanks around them. Raises `LineProblem`."""
    text = text_of(line)
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise LineProblem("not CSV", f"the line is no CSV: {error}; it begins {shown(text)}") from None
