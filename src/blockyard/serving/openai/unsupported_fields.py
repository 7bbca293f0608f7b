"""The fields of OpenAI's requests that are not acted on: harmless ones are dropped, the others refused by name.

A field that would change the answer must not be ignored: the client would take another answer for the one it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import invalid

#: They say something about the request, or about how it is served, but nothing about the answer.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

#: Not supported, with the values that ask for nothing (null always does).
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

#: Fields of messages that OpenAI's clients know, and send with tools above all.
REFUSED_IN_MESSAGES = frozenset({"audio", "function_call", "refusal", "tool_call_id", "tool_calls"})


def asked_for(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that matter: without nulls, harmless ones and ones that ask for nothing.

    Raises `ApiError` (400), naming the field, for one that is not supported. O(fields).
    """
    kept = {}
    for name, value in fields.items():
        if value is None or name in HARMLESS:
            continue
        if name not in REFUSED:
            kept[name] = value
        elif not _asks_for_nothing(value, REFUSED[name]):
            raise invalid(f"'{name}' is not supported by this server", name, "unsupported_parameter")
    return kept


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # In Python False equals 0: a field that wants a number is not satisfied by a truth value.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
