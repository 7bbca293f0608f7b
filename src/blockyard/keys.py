"""Extra keys: what besides its tokens decides the keys and values of a block.

Each has a type of its own, so a LoRA adapter named like another tenant's salt is still another key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arguments import require_str
from .errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LoRA:
    """The adapter the request runs with."""

    name: str

    def __post_init__(self) -> None:
        require_str("name", self.name)


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """A secret of a tenant: only requests with the same salt share blocks."""

    value: str

    def __post_init__(self) -> None:
        require_str("value", self.value)


#: Any of the kinds of extra key.
ExtraKey = LoRA | CacheSalt


def canonical_keys(extra_keys: object) -> tuple[ExtraKey, ...]:
    """The keys in one order, whatever order they came in. Raises `InvalidArgument` for what is no extra key."""
    if extra_keys == ():
        return ()
    if isinstance(extra_keys, str) or not isinstance(extra_keys, (tuple, list)):
        raise InvalidArgument(f"extra_keys is {extra_keys!r}; it must be a tuple of LoRA and CacheSalt")
    for key in extra_keys:
        if not isinstance(key, (LoRA, CacheSalt)):
            raise InvalidArgument(f"extra_keys holds {key!r}; its items must be LoRA or CacheSalt")
    kinds = {type(key) for key in extra_keys}
    if len(kinds) != len(extra_keys):
        raise InvalidArgument(f"extra_keys is {extra_keys!r}; at most one key of each kind is possible")
    return tuple(sorted(extra_keys, key=lambda key: type(key).__name__))


def request_keys(keys: tuple[ExtraKey, ...]) -> tuple[ExtraKey, ...]:
    return keys


def spans_of(keys: tuple[ExtraKey, ...]) -> tuple[Any, ...]:
    return ()


def require_spans_within(spans: tuple[Any, ...], num_tokens: int) -> None:
    return


def block_spans(spans: tuple[Any, ...], block: int, block_size: int) -> tuple[Any, ...]:
    return ()
