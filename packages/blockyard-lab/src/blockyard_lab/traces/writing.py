"""Writes a trace to a file that `open_trace` can read."""

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
    """Write a trace as JSONL and return the number of requests.

    Requests with hash_ids are written in Mooncake's format (timestamp in ms, to the microsecond; `session` and
    `hash_block_size` only if they are not "" and 512), those with token_ids as token ids. The suffixes .gz and .zst
    compress. Equal traces give equal bytes. The file appears whole or not at all. O(requests) time, bounded memory.

    Args:
        trace: any trace whose requests have ids.
        path: the file to write.

    Raises:
        InvalidArgument: if the trace has no requests, or requests without ids.
        MissingExtra: for .zst if the package zstandard is not installed.
        TraceError: if the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        count = 0
        with _open_compressed(partial, path.suffix) as file:
            for request in trace:
                file.write(json.dumps(_fields(request, trace)).encode() + b"\n")
                count += 1
        if count == 0:
            raise InvalidArgument(f"trace {trace.name} has no requests; an empty file cannot be read back")
        partial.replace(path)
        return count
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def _open_compressed(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if suffix == ".gz":
            # The header gets no name and no time, so that equal traces give equal files.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
                yield cast(IO[bytes], packed)
        elif suffix == ".zst":
            # With a checksum, so that a reader detects damage.
            compressor = zstandard_package().ZstdCompressor(level=10, write_checksum=True)
            with compressor.stream_writer(file, closefd=False) as packed:
                yield packed
        else:
            yield file


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
        raise InvalidArgument(f"trace {trace.name} has a request without hash_ids and token_ids; it needs one of them")
    return found
