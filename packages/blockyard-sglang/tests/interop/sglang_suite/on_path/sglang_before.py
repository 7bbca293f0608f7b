"""A pytest plug-in for SGLang's tests from before 0.5.23, whose matches had other fields."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache import radix_cache
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.radix_cache import RadixCache


def _with_indices(match_prefix: Any) -> Any:
    """Let a cache's matches have the slots of their tokens; since 0.5.23 the cache is asked for them."""

    def match(self: Any, params: Any) -> Any:
        result = match_prefix(self, params)
        return Indexed(*result, self.path_device_indices(result.last_device_node))

    return match


class Indexed(MatchResult):  # type: ignore[misc]
    """A match with the fields from before 0.5.23."""

    device_indices: torch.Tensor

    def __new__(cls, *fields: Any) -> Indexed:
        """The fields of a match, and its slots."""
        made: Indexed = super().__new__(cls, *fields[:-1])
        made.device_indices = fields[-1]
        return made


def give_indices(cache: type) -> None:
    """Let the matches of a cache have `device_indices`."""
    cache.match_prefix = _with_indices(cache.match_prefix)  # type: ignore[attr-defined]


if not hasattr(MatchResult, "device_indices"):
    give_indices(radix_cache.RadixCache)

__all__ = ["RadixCache", "give_indices"]
