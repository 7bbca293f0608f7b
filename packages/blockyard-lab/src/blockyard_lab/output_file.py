"""Files for people: checked before the work, written whole or not at all, and pages that load nothing."""

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


_PAGES = Path(__file__).parent / "pages"
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def filled_page(name: str, texts: Mapping[str, str], parts: Mapping[str, str], data: Mapping[str, Any] | None) -> str:
    """The files of `pages/` for `name` in one: the frame, its body, the style, and its script with what that reads.

    texts: put in with every character escaped; "title" and "subtitle" are among them. parts: put in as they are: their
    names must have been escaped for the place where they stand. data: what the script reads; None: there is no script.
    """
    found = {place: html.escape(text) for place, text in texts.items()} | dict(parts)
    found |= {"name": name, "body": _filled(f"{name}.html", found), "style": _read("page.css")}
    found["script"] = "" if data is None else _script(name, data)
    found["script_src"] = "" if data is None else "; script-src 'unsafe-inline'"
    return _filled("page.html", found)


def _filled(file: str, found: Mapping[str, str]) -> str:
    """Each place is filled once: what was put in is not read again."""
    return _PLACE.sub(lambda place: found[place[1]], _read(file))


def _script(name: str, data: Mapping[str, Any]) -> str:
    code = _read("common.js") + _read(f"{name}.js")
    return f'<script type="application/json" id="data">{_script_safe(data)}</script>\n<script>\n{code}</script>\n'


def _read(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")


def _script_safe(data: Mapping[str, Any]) -> str:
    """JSON that no name in it can end: "<" would open a tag even in a string."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
