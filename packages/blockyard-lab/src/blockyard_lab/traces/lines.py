"""Reads a trace file's bytes, decompresses them, and splits them into numbered lines of bounded length.

The constants are the largest values that a trace may hold.
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

#: Bytes of a line, decompressed. A longer line is skipped in bounded memory.
MAX_LINE_BYTES = 64 * 2**20
#: Tokens of a prompt and of an output: the longest sequence that `CacheConfig` allows.
MAX_PROMPT_TOKENS = 2**27
MAX_OUTPUT_TOKENS = 2**27
MAX_HASH_ID = 2**60 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_HASH_BLOCK_SIZE = 4096
#: In the format's unit. Up to here a double is exact to the unit.
MAX_TIMESTAMP = 2**53
#: Limit of `max_requests` and of a generator's `requests`.
MAX_REQUESTS = 10**12
#: Lines that may be read to find out a file's format.
DETECTION_LINES = 64

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class LineProblem(Exception):
    """A line cannot be used.

    Attributes:
        cause: short and without values, for counting.
        text: the field, its value and its limit.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause
        self.text = text


def preview(value: object) -> str:
    """Return `value` as error messages show it: a few dozen characters, however large it is."""
    return _REPR.repr(value)


GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PIECE = 2**18
#: A zstd block has at least 4 bytes and at most 128 KiB decompressed, so this many bytes become at most 32 MiB.
ZSTD_PIECE = 1024


class TruncatedFile(Exception):
    """The compressed file ends before its end marker."""


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a regular file in pieces of bounded size.

    Raises:
        TraceError: if the path is not a regular file, cannot be read, or is damaged.
        TruncatedFile: if the end of the compressed data is missing.
        MissingExtra: for zstd if the package zstandard is not installed.
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
    """Open a regular file. A pipe is refused: it can be read only once, and reading it could wait forever."""
    if not path.exists():
        raise TraceError(f"there is no file {path}")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or socket"
        raise TraceError(f"{path} is {kind}; a trace must be a regular file, because it is read more than once")
    return path.open("rb")


def _gzip_pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    member, data = zlib.decompressobj(wbits=31), b""
    started = False
    while True:
        data = data or file.read(PIECE)
        if not data:
            break
        if not started:
            data = data.lstrip(b"\0")  # zeros may follow a member (tape padding)
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
        raise TruncatedFile("the gzip file ends before its end marker")


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
        raise TruncatedFile("the zstd file ends before its end marker")


def zstandard_package() -> Any:
    """Import the package zstandard.

    Raises:
        MissingExtra: if it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("a zstd trace needs zstandard: pip install 'blockyard[lab]'") from error
    return zstandard


BOM = b"\xef\xbb\xbf"


class OverlongLine:
    """Stands for a skipped line of more than `MAX_LINE_BYTES`."""


Line = bytes | OverlongLine


def numbered_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield (line number, line) of the non-blank lines, without line ends (LF or CRLF) or BOM. Numbers start at 1.

    Memory: the longest line, at most `MAX_LINE_BYTES`. Raises what `read_pieces` raises; of a truncated file, an
    incomplete last line is not yielded.
    """
    for number, line in enumerate(split_lines(read_pieces(path)), 1):
        if isinstance(line, OverlongLine):
            yield number, line
            continue
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
        line = line.strip()
        if line:
            yield number, line


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines of a byte stream that arrives in arbitrary pieces. The last line may lack its end."""
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
            yield OverlongLine() if size > MAX_LINE_BYTES else b"".join(parts)
            yield from rest[:-1]
            parts, size = [rest[-1]], len(rest[-1])
    if size:
        yield OverlongLine() if size > MAX_LINE_BYTES else b"".join(parts)


def decode_line(line: Line) -> str:
    """Return the line as text.

    Raises:
        LineProblem: if it is too long or not UTF-8.
    """
    if isinstance(line, OverlongLine):
        raise LineProblem("line too long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise LineProblem("not UTF-8", f"byte {error.start + 1} of the line is {line[error.start]:#x}, not UTF-8")


def parse_json_object(line: Line) -> dict[str, Any]:
    """Return the JSON object on a line. NaN, Infinity and duplicate keys are refused.

    Raises:
        LineProblem: if the line is not such an object.
    """
    text = decode_line(line)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise LineProblem("not JSON", "the JSON is nested too deep") from None
    except ValueError as error:
        raise LineProblem("not JSON", f"the line is not JSON: {str(error)[:100]}; it begins {preview(text)}") from None
    if not isinstance(value, dict):
        raise LineProblem("not a JSON object", f"the line is {preview(value)}; it must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def parse_csv_row(line: Line) -> list[str]:
    """Return the cells of a CSV line, without surrounding blanks.

    Raises:
        LineProblem: if the line is not valid CSV.
    """
    text = decode_line(line)
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise LineProblem("not CSV", f"the line is not CSV: {error}; it begins {preview(text)}") from None
