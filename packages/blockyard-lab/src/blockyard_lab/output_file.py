"""Writes output files: paths are checked before the work starts, and files appear whole or not at all."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blockyard.errors import InvalidArgument


def require_output(path: str | os.PathLike[str], suffixes: Sequence[str]) -> Path:
    """Return `path` if a file with one of these suffixes can be written there.

    Raises:
        InvalidArgument: if not; it names the path.
    """
    found = Path(path)
    if found.suffix.lower() not in suffixes:
        raise InvalidArgument(f"path is {str(found)!r}; it must end in {' or '.join(suffixes)}")
    with _system_errors(found):
        if not found.parent.is_dir():
            raise InvalidArgument(f"path is {str(found)!r}; there is no folder {str(found.parent)!r}")
        if found.is_dir():
            raise InvalidArgument(f"path is {str(found)!r}, a folder; it must be a file")
        if found.exists() and not found.is_file():
            raise InvalidArgument(f"path is {str(found)!r}, a pipe or device; it must be a regular file")
        if not os.access(found.parent, os.W_OK):
            raise InvalidArgument(f"path is {str(found)!r}; folder {str(found.parent)!r} is not writable")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file next to `path`, then rename it.

    Raises:
        InvalidArgument: if the file cannot be written.
    """
    with _system_errors(path):
        target = Path(os.path.realpath(path))  # a symbolic link stays, and its target is written
        # Only the end of the name, which may already be as long as the file system allows.
        partial = target.with_name(f".{target.name[-50:]}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            with suppress(OSError, ValueError):
                partial.unlink()


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors about a path into `InvalidArgument`. An impossible file name raises ValueError."""
    try:
        yield
    except InvalidArgument:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"path is {str(path)!r}; it cannot be written: {reason}") from error


_PAGES = Path(__file__).parent / "pages"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def fill_page(name: str, texts: Mapping[str, str], parts: Mapping[str, str], data: Mapping[str, Any] | None) -> str:
    """Return one HTML page made of the files in `pages/`: frame, body, style and script.

    Args:
        name: name of the files with the page's body and script.
        texts: placeholders to fill with escaped text, including "title" and "subtitle".
        parts: placeholders to fill with HTML, whose text is already escaped.
        data: read by the script; None for a page without script.
    """
    found = {key: html.escape(text) for key, text in texts.items()} | dict(parts)
    found |= {"name": name, "body": _fill(f"{name}.html", found), "style": _read("page.css")}
    found |= {"script": "", "script_src": ""}
    if data is not None:
        # "<" would open a tag even inside a JSON string.
        safe = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
        code = _read("common.js") + _read(f"{name}.js")
        found["script"] = f'<script type="application/json" id="data">{safe}</script>\n<script>\n{code}</script>\n'
        found["script_src"] = "; script-src 'unsafe-inline'"
    return _fill("page.html", found)


def _fill(file: str, found: Mapping[str, str]) -> str:
    """Replace each placeholder once; inserted text is not scanned again."""
    return _PLACEHOLDER.sub(lambda match: found[match[1]], _read(file))


def _read(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")
