"""The bytes of a file, plain, gzip or zstd, a piece at a time.

What a file is, its first bytes say, not its name. Both compressed forms may hold several members one after another. A
file that ends inside a member raises `CutShort` after everything that could be read was given; one whose bytes are
wrong (a failed checksum included) raises `TraceError`, because what was read before cannot be trusted either.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import MissingExtra, TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PIECE = 2**18
#: A block of zstd is 4 bytes at least and 128 KiB at most when unpacked, so this many bytes become 32 MiB at most.
ZSTD_PIECE = 1024


class CutShort(Exception):
    """The compressed file ends before its end mark."""


def pieces(path: Path) -> Iterator[bytes]:
    """The unpacked bytes of a regular file in pieces of bounded size.

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
    """The package zstandard. Raises `MissingExtra` if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("a zstd trace needs zstandard: pip install 'blockyard[lab]'") from error
    return zstandard
