"""Makes events of single blocks: neighbours of one chain share one, and so do removals from one place."""

import contextlib
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...config import CacheConfig
from ..tagged_keys import PlainKey, lora_name, tagged, untagged
from ..wire import MEDIA, NO_KEYS, AllBlocksCleared, BlockRemoved, BlockStored, Event, packed_keys, packed_list
from .number_writer import NameWriter, TokenWriter

#: Blocks of one event; a longer chain becomes several events.
MOST_BLOCKS_AN_EVENT: Final[i64] = 512
NO_PLACE: Final[i64] = -1


class EventWriter:
    """Collects what happened, in order. A place is 2 * layer group + medium (`wire.MEDIA`)."""

    def __init__(self, config: CacheConfig) -> None:
        groups = config.layer_groups
        self._block_sizes = [group.block_size for group in groups]
        self._windows = [group.sliding_window for group in groups]
        self._names = NameWriter()
        self._tokens = TokenWriter(config.hash_block_size)
        self._begin()

    def _begin(self) -> None:
        self._events: list[Event] = []
        #: Of the event that is open; NO_PLACE while none is.
        self._place: i64 = NO_PLACE
        self._is_stored = False
        self._last: i64 = 0
        self._before: i64 = 0
        self._request: tuple[PlainKey, ...] = ()
        #: What stands in blocks of the chain besides text, by position.
        self._spans: dict[int, tuple[PlainKey, ...]] = {}

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._close()
        self._events.append(AllBlocksCleared())

    def stored(
        self, name: i64, before: i64, place: i64, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]
    ) -> None:
        """A block is there; its `tokens` follow. before: the name of the block before it, 0 at the beginning."""
        if self.goes_on(name, before, place):
            if spans:
                self._spans[int(self._names.count) - 1] = spans
            return
        self._close()
        self._place, self._is_stored = place, True
        self._before, self._request = before, request
        if spans:
            self._spans[0] = spans
        self._names.add(name)
        self._last = name

    def goes_on(self, name: i64, before: i64, place: i64) -> bool:
        """A block is there which nothing but text decides, behind the one that was stored last; False if it is not."""
        if not self._is_stored or self._last != before or self._place != place or before == 0:
            return False
        if self._names.count == MOST_BLOCKS_AN_EVENT:
            return False
        self._names.add(name)
        self._last = name
        return True

    def tokens(self, words: vec[i64], start: i64) -> None:
        """Packed tokens of the block that was stored last, or of its next part, from word `start` on."""
        self._tokens.add(words, start)

    def removed(self, name: i64, place: i64) -> None:
        """A block is gone."""
        if self._is_stored or self._place != place:
            self._close()
            self._place = place
        self._names.add(name)

    @property
    def has_events(self) -> bool:
        """Returns whether some events are whole."""
        return len(self._events) > 0

    def take(self) -> list[Event]:
        """Returns the events that are whole, once."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Ends the last event, and returns all that were not taken."""
        self._close()
        return self.take()

    def abandon(self) -> None:
        """Forget what is begun."""
        self._names.drop()
        self._tokens.drop()
        self._begin()

    def _close(self) -> None:
        if self._place == NO_PLACE:
            return
        if self._is_stored:
            with contextlib.suppress(ValueError):  # keys that cannot be written: consumers are not told of these blocks
                self._events.append(self._stored_event())
        else:
            names = packed_list(self._names.take())
            self._events.append(BlockRemoved(names, MEDIA[int(self._place & 1)], int(self._place >> 1)))
        self._place, self._is_stored = NO_PLACE, False
        self._spans = {}

    def _stored_event(self) -> Event:
        group = int(self._place >> 1)
        count, window = int(self._names.count), self._windows[group]
        names, tokens = packed_list(self._names.take()), packed_list(self._tokens.take())
        request, spans = self._request, self._spans
        extra_keys = keys = NO_KEYS
        if request or spans:
            is_first = self._before == 0
            rows = [spans.get(place, ()) for place in range(count)]
            extra_keys = packed_keys(
                [untagged(request, row, is_first and place == 0) for place, row in enumerate(rows)]
            )
            keys = packed_keys([tagged(request, row) for row in rows])
        return BlockStored(
            names,
            int(self._before) or None,
            tokens,
            self._block_sizes[group],
            None,
            MEDIA[int(self._place & 1)],
            lora_name(request),
            extra_keys,
            group,
            "sliding_window" if window else "full_attention",
            window or None,
            keys,
            len(self._windows) if len(self._windows) > 1 else None,
        )
