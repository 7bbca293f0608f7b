"""The fields of a cache's config that an engine takes from its caller; the others it sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument

#: Which of them mean what, `CacheConfig` says.
CACHE_OPTIONS = (
    "eviction_policy",
    "history_size",
    "hash_seed",
    "hint_horizon",
    "keep_evicted",
    "max_sessions",
    "partial_hits",
    "residency_sample",
    "retention_blocks",
    "track_misses",
    "watermark",
)


def checked_options(cache_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options as a dict. Raises `InvalidArgument` for what is none of `CACHE_OPTIONS`."""
    if cache_options is None:
        return {}
    if not isinstance(cache_options, Mapping):
        raise InvalidArgument(f"cache_options is a {type(cache_options).__name__}; it must be a dict")
    for name, value in cache_options.items():
        if name not in CACHE_OPTIONS:
            raise InvalidArgument(
                f"cache_options has {name!r}: {value!r}; it may have {', '.join(CACHE_OPTIONS)} (other fields of "
                f"CacheConfig follow from the engine's own options)"
            )
    return dict(cache_options)
