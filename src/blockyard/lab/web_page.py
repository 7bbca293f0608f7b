"""Pages of their own: one HTML file that loads nothing and needs no server."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
