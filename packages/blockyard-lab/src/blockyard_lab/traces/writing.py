"""A trace into a file that `open_trace` reads again."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from blockyard.errors import InvalidArgument, TraceError

from ..trace import Trace, TraceRequest
from .block_ids import DEFAULT_BLOCK_SIZE
from .lines import zstandard_package


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> int:
    """Write the requests as JSONL, and return how many there were.

    Requests with hash_ids are written as Mooncake's (timestamp in ms, to the microsecond, input_length,
    output_length, hash_ids; session and hash_block_size where they are not "" and 512), those with token_ids as token
    ids. A suffix .gz or .zst compresses; the same trace gives the same bytes, at any time and under any name.

    The file appears whole or not at all. O(requests) time, bounded memory. Raises `InvalidArgument` for a trace with
    neither ids, or one that ends before its first request, `MissingExtra` for .zst without the package zstandard,
    `TraceError` if the file cannot be written, and whatever the trace raises while it is walked.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        count = _write(trace, partial, path.suffix)
        if count == 0:
            raise InvalidArgument("trace has no requests; an empty file could not be read again")
        partial.replace(path)
        return count
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _write(trace: Trace, path: Path, suffix: str) -> int:
    count = 0
    with _opened(path, suffix) as file:
        for request in trace:
            file.write(json.dumps(_fields(request, trace)).encode() + b"\n")
            count += 1
    return count


@contextmanager
def _opened(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if suffix == ".gz":
            # Neither the name nor the time goes into the header, so that equal traces are equal files.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
                yield cast(IO[bytes], packed)
        elif suffix == ".zst":
            with _zstd().stream_writer(file, closefd=False) as packed:
                yield packed
        else:
            yield file


def _zstd() -> Any:
    """Compress with a checksum, so that damage is seen when the file is read."""
    return zstandard_package().ZstdCompressor(level=10, write_checksum=True)


def _fields(request: TraceRequest, trace: Trace) -> dict[str, Any]:
    milliseconds = round(request.arrival * 1000, 3)
    timestamp = int(milliseconds) if milliseconds.is_integer() else milliseconds
    found: dict[str, Any] = {
        "timestamp": timestamp,
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
    }
    if request.session:
        found["session"] = request.session
    if request.hash_ids is not None:
        if trace.hash_block_size != DEFAULT_BLOCK_SIZE:
            found["hash_block_size"] = trace.hash_block_size
        found["hash_ids"] = request.hash_ids.tolist()
    elif request.token_ids is not None:
        found["token_ids"] = request.token_ids.tolist()
    else:
        raise InvalidArgument(f"trace {trace.name} has requests without hash_ids and token_ids: nothing to write")
    return found
