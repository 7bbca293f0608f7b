"""Extra keys on the wire: tagged for our own consumers, and in vLLM's form for others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: A key as a manager's events have it: ("salt", value), ("lora", name, path), or a span as a block sees it.
PlainKey = tuple[Any, ...]


def tagged(request: Iterable[PlainKey], spans: Iterable[PlainKey]) -> list[list[Any]]:
    """What decides a block besides tokens, each with its kind first: salt and adapter, then the spans in order."""
    return [list(key) for key in request] + [["span", *span] for span in spans]


def lora_name(request: Iterable[PlainKey]) -> str | None:
    """The adapter's name, None without one."""
    return next((key[1] for key in request if key[0] == "lora"), None)


def untagged(request: Iterable[PlainKey], spans: Iterable[PlainKey], is_first: bool) -> list[Any] | None:
    """The extra keys of one block in vLLM's order: adapter, spans as (content, start), salt on the first block."""
    keys: list[Any] = [key[1] for key in request if key[0] == "lora"]
    keys += [[span[1], span[2]] for span in spans]
    keys += [key[1] for key in request if key[0] == "salt" and is_first]
    return keys or None
