"""What `--additional-config '{"blockyard": {...}}'` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

LEVELS = ("auto", "tokens", "names")


@dataclass(frozen=True)
class Options:
    """How blocks are managed.

    level: "tokens" proves hits by tokens (one full-attention group), "names" by vLLM's hashes (every model), "auto"
        takes the first that serves the model.
    eviction_policy: a name, as in `CacheConfig`.
    residency_sample: how many blocks are watched for how long they stay; "tokens" only.
    """

    level: str = "auto"
    eviction_policy: str = "lru"
    residency_sample: int = 0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"blockyard: level is {self.level!r}; it must be one of {', '.join(LEVELS)}")

    @property
    def only_for_tokens(self) -> list[str]:
        """Options that are set and that the level "names" does not have."""
        return [name for name in ("residency_sample",) if getattr(self, name)]


def options_of(additional_config: Any) -> Options:
    """The options in vLLM's `additional_config`. Raises ValueError for what it does not know."""
    if not isinstance(additional_config, Mapping):
        return Options()
    given = additional_config.get("blockyard", {})
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["blockyard"] is {given!r}; it must be a dict of options')
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f'additional_config["blockyard"] has {unknown[0]!r}; it may have {", ".join(known)}')
    return Options(**given)
