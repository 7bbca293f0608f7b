"""Makes events of single blocks: neighbours of one chain share one, and so do removals from one place."""

import contextlib
from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...config import CacheConfig
from ...core.tokens import LOW_HALF, words_per_block
from ..tagged_keys import PlainKey, lora_name, tagged, untagged
from ..wire import MEDIA, NO_KEYS, AllBlocksCleared, BlockRemoved, BlockStored, Event, packed_keys, packed_list
from .number_writer import NumberWriter, WordList

#: Blocks of one event; a longer chain becomes several events.
MOST_BLOCKS_AN_EVENT: Final[i64] = 512
#: Chains are written together as soon as they have as many blocks as an event may have, or are so many.
MOST_CHAINS: Final = 64


class _Chain:
    """Blocks of one event, stored or removed: the writer's names from `first` up to `last`, its tokens likewise.

    before: the name of the block before them. spans: by position, what stands in a block besides text.
    """

    def __init__(
        self,
        place: i64,
        is_stored: bool,
        before: i64,
        request: tuple[PlainKey, ...],
        first: i64,
        first_token: int,
    ) -> None:
        self.place = place
        self.is_stored = is_stored
        self.before = before
        self.request = request
        self.spans: dict[int, tuple[PlainKey, ...]] = {}
        self.first = self.last = first
        self.first_token = self.last_token = first_token


class EventWriter:
    """Collects what happened, in order. A place is 2 * layer group + medium (`wire.MEDIA`).

    The numbers of some chains are written together, because to write few takes numpy as long as hundreds.
    """

    def __init__(self, config: CacheConfig) -> None:
        groups = config.layer_groups
        self._block_sizes = [group.block_size for group in groups]
        self._windows = [group.sliding_window for group in groups]
        self._size = config.hash_block_size
        self._num_words: i64 = words_per_block(config.hash_block_size)
        self._names = WordList()
        self._tokens = WordList()
        self._written_names = NumberWriter()
        self._written_tokens = NumberWriter()
        self._events: list[Event] = []
        #: Chains that are ended and not yet written, and the one that is not.
        self._ended: list[_Chain] = []
        self._open: _Chain | None = None
        self._last: i64 = 0

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._close()
        self._write()
        self._events.append(AllBlocksCleared())

    def stored(
        self, name: i64, before: i64, place: i64, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]
    ) -> None:
        """A block is there; its `tokens` follow. before: the name of the block before it, 0 at the beginning."""
        if not self.goes_on(name, before, place):
            self._begin(place, True, before, request)
            self._names.add(name)
            self._last = name
        chain = self._open
        if spans and chain is not None:
            chain.spans[int(self._names.count - chain.first) - 1] = spans

    def goes_on(self, name: i64, before: i64, place: i64) -> bool:
        """A block is there which nothing but text decides, behind the one that was stored last; False if it is not."""
        chain = self._open
        if chain is None or not chain.is_stored or self._last != before or chain.place != place or before == 0:
            return False
        if self._names.count - chain.first == MOST_BLOCKS_AN_EVENT:
            return False
        self._names.add(name)
        self._last = name
        return True

    def tokens(self, words: vec[i64], start: i64) -> None:
        """Packed tokens of the block that was stored last, or of its next part, from word `start` on."""
        self._tokens.add_run(words, start, self._num_words)

    def removed(self, name: i64, place: i64) -> None:
        """A block is gone."""
        chain = self._open
        if chain is None or chain.is_stored or chain.place != place:
            self._begin(place, False, 0, ())
        self._names.add(name)

    @property
    def has_events(self) -> bool:
        """Returns whether some events are written."""
        return len(self._events) > 0

    def take(self) -> list[Event]:
        """Returns the events that are written, once."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Ends the last event, and returns all that were not taken."""
        self._close()
        self._write()
        return self.take()

    def abandon(self) -> None:
        """Forget what is begun."""
        self._open = None
        self._forget_chains()
        self._events = []

    def _begin(self, place: i64, is_stored: bool, before: i64, request: tuple[PlainKey, ...]) -> None:
        self._close()
        self._open = _Chain(place, is_stored, before, request, self._names.count, self._num_tokens())

    def _num_tokens(self) -> int:
        return int(self._tokens.count // self._num_words) * self._size

    def _close(self) -> None:
        chain = self._open
        if chain is None:
            return
        chain.last, chain.last_token = self._names.count, self._num_tokens()
        self._ended.append(chain)
        self._open = None
        if chain.last >= MOST_BLOCKS_AN_EVENT or len(self._ended) == MOST_CHAINS:
            self._write()

    def _forget_chains(self) -> None:
        self._ended = []
        self._names.clear()
        self._tokens.clear()

    def _write(self) -> None:
        """Makes events of the chains that are ended, while none is open."""
        if not self._ended:
            return
        rows = self._tokens.view().view(np.int32).reshape(-1, 2 * int(self._num_words))
        either = self._tokens.bits
        self._written_tokens.write(rows[:, : self._size].reshape(-1), (either | (either >> 32)) & LOW_HALF)
        self._written_names.write(self._names.view(), self._names.bits)
        for chain in self._ended:
            blocks = self._written_names.part(int(chain.first), int(chain.last))
            if not chain.is_stored:
                self._events.append(BlockRemoved(packed_list(blocks), MEDIA[chain.place & 1], int(chain.place >> 1)))
                continue
            with contextlib.suppress(ValueError):  # keys that cannot be written: consumers are not told of these blocks
                self._events.append(self._stored_event(chain, blocks))
        self._forget_chains()

    def _stored_event(self, chain: _Chain, names: bytes) -> Event:
        group = int(chain.place >> 1)
        window = self._windows[group]
        extra_keys = keys = NO_KEYS
        if chain.request or chain.spans:
            is_first = chain.before == 0
            rows = [chain.spans.get(place, ()) for place in range(int(chain.last - chain.first))]
            extra_keys = packed_keys(
                [untagged(chain.request, row, is_first and place == 0) for place, row in enumerate(rows)]
            )
            keys = packed_keys([tagged(chain.request, row) for row in rows])
        return BlockStored(
            packed_list(names),
            int(chain.before) or None,
            packed_list(self._written_tokens.part(chain.first_token, chain.last_token)),
            self._block_sizes[group],
            None,
            MEDIA[chain.place & 1],
            lora_name(chain.request),
            extra_keys,
            group,
            "sliding_window" if window else "full_attention",
            window or None,
            keys,
            len(self._windows) if len(self._windows) > 1 else None,
        )
