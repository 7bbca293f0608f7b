"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidArgument


def require_output(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """`path`, if a file of one of these suffixes can stand there. Raises `InvalidArgument`, naming it."""
    found = Path(path)
    if found.suffix.lower() not in suffixes:
        raise InvalidArgument(f"path is {str(found)!r}; it must end in {' or '.join(suffixes)}")
    if not found.parent.is_dir():
        raise InvalidArgument(f"path is {str(found)!r}; there is no folder {str(found.parent)!r}")
    if found.is_dir():
        raise InvalidArgument(f"path is {str(found)!r}, which is a folder; it must be a file")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write into a file beside `path`, and then put it in its place. Raises `InvalidArgument` if that cannot be."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise InvalidArgument(f"path is {str(path)!r}; it cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
