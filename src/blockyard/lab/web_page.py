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


def filled_page(name: str, texts: Mapping[str, str], parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The files of `pages/` for `name` in one: its HTML, the style, and the scripts if it has any.

    texts: put in with every character escaped. parts: put in as they are: their names must have been escaped for the
    place where they stand. data: what the script reads.
    """
    found = {place: html.escape(text) for place, text in texts.items()} | dict(parts)
    page = _read(f"{name}.html")
    found |= {"data": _script_safe(data), "style": _read("page.css")}
    if "{{script}}" in page:
        found["script"] = _read("common.js") + _read(f"{name}.js")
    return _PLACE.sub(lambda place: found[place[1]], page)


def _read(name: str) -> str:
    return (_PAGES / name).read_text(encoding="utf-8")


def _script_safe(data: Mapping[str, Any]) -> str:
    """JSON that no name in it can end: "<" would open a tag even in a string."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
