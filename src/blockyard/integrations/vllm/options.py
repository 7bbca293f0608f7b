"""What `--additional-config '{"blockyard": {...}}'` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ... import InvalidArgument
from ...policies import POLICIES, make_policy

LEVELS = ("auto", "tokens", "names")
COUNTS = ("residency_sample", "retention_blocks", "miss_causes")
ONLY_FOR_TOKENS = ("residency_sample", "retention_blocks", "events")


@dataclass(frozen=True)
class Options:
    """How blocks are managed.

    level: "tokens" proves hits by tokens (one full-attention group), "names" by vLLM's hashes (every model), "auto"
        takes the first that serves the model.
    eviction_policy: a name, as in `CacheConfig`, also after "guarded:" or "strict:".
    residency_sample: how many blocks are watched for how long they stay; "tokens" only.
    retention_blocks: how many blocks `scheduler.kv_cache_manager.pool.retain` may keep at most; "tokens" only.
    miss_causes: how many evicted hashes are remembered, to say why a prompt was not found; 0: nothing is said.
    events: the address where `blockyard.events` publishes what the pool holds, such as "tcp://127.0.0.1:5557"; "" for
        nowhere; "tokens" only.
    Raises ValueError that names the option, its value and what it may be.
    """

    level: str = "auto"
    eviction_policy: str = "lru"
    residency_sample: int = 0
    retention_blocks: int = 0
    miss_causes: int = 0
    events: str = ""

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"blockyard: {name} is {value!r}; it must be an integer from 0")
        if not isinstance(self.events, str) or (self.events and "://" not in self.events):
            raise ValueError(f"blockyard: events is {self.events!r}; it must be an address as tcp://127.0.0.1:5557 is")
        if self.level not in LEVELS:
            raise ValueError(f"blockyard: level is {self.level!r}; it must be one of {', '.join(LEVELS)}")
        if not _is_policy(self.eviction_policy):
            raise ValueError(
                f"blockyard: eviction_policy is {self.eviction_policy!r}; it must be one of "
                f"{', '.join(sorted(POLICIES))}, or one of these after 'guarded:' or 'strict:'"
            )

    @property
    def only_for_tokens(self) -> list[str]:
        """Options that are set and that the level "names" does not have."""
        return [name for name in ONLY_FOR_TOKENS if getattr(self, name)]


def _is_policy(name: object) -> bool:
    try:
        make_policy(name if isinstance(name, str) else None, 2)
    except InvalidArgument:
        return False
    return True


def options_of(additional_config: Any) -> Options:
    """Return the options in vLLM's `additional_config`. Raises ValueError for what it does not know."""
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
