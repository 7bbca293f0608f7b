"""From single blocks to events: neighbours of one chain share an event, removals from one place another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...config import CacheConfig
from ..tagged_keys import PlainKey, lora_name, tagged, untagged
from ..wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

#: Blocks of one event; a longer chain is told in several.
MOST_BLOCKS_AN_EVENT = 512


class Described(NamedTuple):
    """A block as consumers see it. before: the block before it, 0 at the beginning. tokens: int32 bytes."""

    name: int
    before: int
    tokens: bytes
    request: tuple[PlainKey, ...]
    spans: tuple[PlainKey, ...]


class EventWriter:
    """Collects what happened, in order."""

    def __init__(self, config: CacheConfig) -> None:
        self._groups = config.layer_groups
        self._events: list[Event] = []
        self._chain: list[Described] = []
        self._removed: list[int | bytes] = []
        #: (group, medium) of the event that is open.
        self._place: tuple[int, str] = (0, "")

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._close()
        self._events.append(AllBlocksCleared())

    def stored(self, block: Described, group: int, medium: str) -> None:
        """A block is there."""
        chain = self._chain
        follows = chain and chain[-1].name == block.before and self._place == (group, medium)
        if not follows or len(chain) == MOST_BLOCKS_AN_EVENT:
            self._close()
            self._place = (group, medium)
        self._chain.append(block)

    def removed(self, name: int, group: int, medium: str) -> None:
        """A block is gone."""
        if not self._removed or self._place != (group, medium):
            self._close()
            self._place = (group, medium)
        self._removed.append(name)

    def finish(self) -> list[Event]:
        """All events."""
        self._close()
        return self._events

    def _close(self) -> None:
        group, medium = self._place
        if self._chain:
            self._events.append(self._stored_event(group, medium))
            self._chain = []
        if self._removed:
            self._events.append(BlockRemoved(self._removed, medium, group))
            self._removed = []

    def _stored_event(self, group: int, medium: str) -> BlockStored:
        chain, layers = self._chain, self._groups[group]
        request = chain[0].request
        has_keys = bool(request) or any(block.spans for block in chain)
        return BlockStored(
            [block.name for block in chain],
            chain[0].before or None,
            np.frombuffer(b"".join([block.tokens for block in chain]), np.int32).tolist(),
            layers.block_size,
            None,
            medium,
            lora_name(request),
            self._untagged(chain) if has_keys else None,
            group,
            "sliding_window" if layers.sliding_window else "full_attention",
            layers.sliding_window or None,
            [tagged(request, block.spans) for block in chain] if has_keys else None,
            len(self._groups) if len(self._groups) > 1 else None,
        )

    def _untagged(self, chain: list[Described]) -> list[list[Any] | None]:
        return [untagged(block.request, block.spans, block.before == 0) for block in chain]
