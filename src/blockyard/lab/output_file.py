"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InvalidArgument


def require_output(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """`path`, if a file of one of these suffixes can stand there. Raises `InvalidArgument`, naming it."""
    found = Path(path)
    if found.suffix.lower() not in suffixes:
        raise InvalidArgument(f"path is {str(found)!r}; it must end in {' or '.join(suffixes)}")
    with _told(found):
        if not found.parent.is_dir():
            raise InvalidArgument(f"path is {str(found)!r}; there is no folder {str(found.parent)!r}")
        if found.is_dir():
            raise InvalidArgument(f"path is {str(found)!r}, which is a folder; it must be a file")
        if found.exists() and not found.is_file():
            raise InvalidArgument(f"path is {str(found)!r}, which is a pipe or a device; it must be a file")
        if not os.access(found.parent, os.W_OK):
            raise InvalidArgument(f"path is {str(found)!r}; nothing can be written in {str(found.parent)!r}")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write into a file beside `path`, and then put it in its place. Raises `InvalidArgument` if that cannot be."""
    with _told(path):
        target = Path(os.path.realpath(path))  # what a link leads to is written, and the link stays
        # Only the end of the name: a name may be as long as the file system allows, and this one must not be longer.
        partial = target.with_name(f".{target.name[-50:]}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            with suppress(OSError, ValueError):
                partial.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system says of a path becomes the error of an argument; a name it cannot have is a ValueError."""
    try:
        yield
    except InvalidArgument:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"path is {str(path)!r}; it cannot be written: {reason}") from error
