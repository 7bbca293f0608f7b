"""Options of a random config without those that do nothing beside the others, which a config refuses."""

from __future__ import annotations

from typing import Any

from blockyard import StateSpec
from blockyard.config import UNUSED_OPTIONS


def used(options: dict[str, Any]) -> dict[str, Any]:
    groups = options.get("groups", ())
    has_states = any(isinstance(group, StateSpec) for group in groups)
    holds = {
        "enable_prefix_caching is False": not options.get("enable_prefix_caching", True),
        "groups has no StateSpec": not has_states,
        "groups has a StateSpec": has_states,
    }
    unused = {name for reason, names in UNUSED_OPTIONS.items() if holds[reason] for name in names}
    return {
        name: value for name, value in options.items() if name not in unused | ({"block_size"} if groups else set())
    }
