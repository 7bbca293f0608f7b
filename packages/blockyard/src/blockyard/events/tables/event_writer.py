"""Makes events from changes of single blocks: consecutive blocks of a chain, or removals from a place, share an event.

Lists of numbers are encoded in msgpack with numpy, without a Python object per number.
"""

import contextlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...config import CacheConfig
from ...core.arrays import grown_i64, view_i64, zeros_i64
from ...core.tokens import LOW_HALF, words_per_block
from ..wire import (
    MEDIA,
    NO_KEYS,
    STATE_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    PlainKey,
    lora_name,
    pack_keys,
    pack_list,
    tag_keys,
    untag_keys,
)

FEWEST_ITEMS: Final = 64
LAST_FIXARRAY: Final = 15
FIXARRAY: Final = 0x90
ARRAY_16: Final = b"\xdc"
ARRAY_32: Final = b"\xdd"
SPAN_16: Final[i64] = 2**16
SPAN_32: Final[i64] = 2**32


class WordList:
    """A growing list of words. `clear` keeps its memory."""

    def __init__(self) -> None:
        self._items = zeros_i64(FEWEST_ITEMS)
        self.count: i64 = 0
        #: Union of their bits.
        self.bits: i64 = 0

    def add(self, word: i64) -> None:
        """Append a word. O(1), amortized."""
        if self.count == i64(len(self._items)):
            self._items = grown_i64(self._items, 2 * len(self._items))
        self._items[self.count] = word
        self.bits |= word
        self.count += 1

    def add_run(self, words: vec[i64], start: i64, size: i64) -> None:
        """Append `size` words from `start` on. O(size), amortized."""
        at = self.count
        if at + size > i64(len(self._items)):
            self._items = grown_i64(self._items, 2 * int(at + size))
        items, bits = self._items, self.bits
        for place in range(size):
            word = words[start + place]
            items[at + place] = word
            bits |= word
        self.bits = bits
        self.count = at + size

    def clear(self) -> None:
        """Remove all words."""
        self.count = self.bits = 0

    def view(self) -> npt.NDArray[np.int64]:
        """Return the words as a view, valid until others are added. O(1)."""
        return view_i64(self._items)[: int(self.count)]


class _Rows:
    """Encoded numbers of one width, each after its tag. The memory is reused.

    A number is written as the signed integer of the same bits.
    """

    def __init__(self, tag: int, width: str) -> None:
        self._tag = tag
        self._width = np.dtype(width)
        self._row = np.dtype([("tag", "u1"), ("number", ">" + width)])
        self.size = self._row.itemsize
        self._make(FEWEST_ITEMS)

    def _make(self, count: int) -> None:
        rows = np.empty(count, self._row)
        rows["tag"] = self._tag
        self._numbers = rows["number"]
        self.bytes = rows.view(np.uint8).data

    def write(self, numbers: npt.NDArray[Any]) -> None:
        """Encode these numbers in place of the earlier ones. O(numbers)."""
        count = len(numbers)
        if count > len(self._numbers):
            self._make(2 * count)
        self._numbers[:count] = numbers.astype(self._width, copy=False)


class NumberWriter:
    """Encodes numbers from 0 to 2**63 - 1 in equal widths, so that any range of them can be sent as a list.

    The width is that of the largest. msgpack allows wider encodings than necessary, and numbers of one width are rows
    of an array.
    """

    def __init__(self) -> None:
        self._narrow, self._middle, self._wide = _Rows(0xCD, "i2"), _Rows(0xCE, "i4"), _Rows(0xCF, "i8")
        self._rows = self._narrow

    def write(self, numbers: npt.NDArray[Any], bits: i64) -> None:
        """Encode these numbers in place of the earlier ones. `bits` is their bitwise or. O(numbers)."""
        self._rows = self._narrow if bits < SPAN_16 else self._middle if bits < SPAN_32 else self._wide
        self._rows.write(numbers)

    def part(self, first: int, last: int) -> bytes:
        """Return the list of the numbers from `first` up to `last`. O(bytes)."""
        size = self._rows.size
        return _head(last - first) + self._rows.bytes[first * size : last * size]


def _head(count: int) -> bytes:
    """Return the header of a list of `count` items."""
    if count <= LAST_FIXARRAY:
        return bytes((FIXARRAY + count,))
    return ARRAY_16 + count.to_bytes(2, "big") if count < SPAN_16 else ARRAY_32 + count.to_bytes(4, "big")


#: Most blocks per event; a longer chain becomes several events.
MOST_BLOCKS_AN_EVENT: Final[i64] = 512
#: Chains are encoded together once they have `MOST_BLOCKS_AN_EVENT` blocks or are `MOST_CHAINS`.
MOST_CHAINS: Final = 64


class _Chain:
    """The stored or removed blocks of one event: the writer's names from `first` to `last`, and likewise its tokens.

    `before` is the name of the block before them. `spans` has the spans of blocks by position.
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
    """Collects changes, in order. A place is 2 * layer group + medium (`wire.MEDIA`).

    Several chains are encoded together, because numpy takes as long for a few numbers as for hundreds.
    """

    def __init__(self, config: CacheConfig) -> None:
        groups = config.layer_groups
        self._block_sizes = [group.block_size for group in groups]
        self._windows = [group.sliding_window for group in groups]
        self._kinds = ["sliding_window" if window else "full_attention" for window in self._windows]
        if config.state_blocks > 0:
            self._block_sizes.append(config.hash_block_size)
            self._windows.append(0)
            self._kinds.append(STATE_KIND)
        self._size = config.hash_block_size
        self._num_words: i64 = words_per_block(config.hash_block_size)
        self._names = WordList()
        self._tokens = WordList()
        self._written_names = NumberWriter()
        self._written_tokens = NumberWriter()
        self._events: list[Event] = []
        #: Chains that are complete but not encoded, and the open one.
        self._ended: list[_Chain] = []
        self._open: _Chain | None = None
        self._last: i64 = 0

    def clear(self) -> None:
        """Record that all blocks were removed."""
        self._close()
        self._write()
        self._events.append(AllBlocksCleared())

    def add_stored(
        self, name: i64, before: i64, place: i64, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]
    ) -> None:
        """Record a stored block. Call `add_tokens` next.

        `before` is the name of the block before it, 0 at the beginning of a prompt.
        """
        if not self.extend_chain(name, before, place):
            self._begin(place, True, before, request)
            self._names.add(name)
            self._last = name
        chain = self._open
        if spans and chain is not None:
            chain.spans[int(self._names.count - chain.first) - 1] = spans

    def extend_chain(self, name: i64, before: i64, place: i64) -> bool:
        """Record a stored block without spans if it follows the last one; return False if it does not."""
        chain = self._open
        if chain is None or not chain.is_stored or self._last != before or chain.place != place or before == 0:
            return False
        if self._names.count - chain.first == MOST_BLOCKS_AN_EVENT:
            return False
        self._names.add(name)
        self._last = name
        return True

    def add_tokens(self, words: vec[i64], start: i64) -> None:
        """Record packed tokens of the block stored last, or of its next part, from word `start` on."""
        self._tokens.add_run(words, start, self._num_words)

    def add_removed(self, name: i64, place: i64) -> None:
        """Record a removed block."""
        chain = self._open
        if chain is None or chain.is_stored or chain.place != place:
            self._begin(place, False, 0, ())
        self._names.add(name)

    @property
    def has_events(self) -> bool:
        """Return whether any event is encoded."""
        return len(self._events) > 0

    def take(self) -> list[Event]:
        """Return the encoded events and forget them."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Complete the last event; return all events that were not taken."""
        self._close()
        self._write()
        return self.take()

    def abandon(self) -> None:
        """Discard all changes and events."""
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
        """Encode the complete chains, while none is open."""
        if not self._ended:
            return
        rows = self._tokens.view().view(np.int32).reshape(-1, 2 * int(self._num_words))
        either = self._tokens.bits
        self._written_tokens.write(rows[:, : self._size].reshape(-1), (either | (either >> 32)) & LOW_HALF)
        self._written_names.write(self._names.view(), self._names.bits)
        for chain in self._ended:
            blocks = self._written_names.part(int(chain.first), int(chain.last))
            if not chain.is_stored:
                self._events.append(BlockRemoved(pack_list(blocks), MEDIA[chain.place & 1], int(chain.place >> 1)))
                continue
            with contextlib.suppress(ValueError):  # keys that cannot be encoded: these blocks are not published
                self._events.append(self._stored_event(chain, blocks))
        self._forget_chains()

    def _stored_event(self, chain: _Chain, names: bytes) -> Event:
        group = int(chain.place >> 1)
        window = self._windows[group]
        extra_keys = keys = NO_KEYS
        if chain.request or chain.spans:
            is_first = chain.before == 0
            rows = [chain.spans.get(place, ()) for place in range(int(chain.last - chain.first))]
            extra_keys = pack_keys(
                [untag_keys(chain.request, row, is_first and place == 0) for place, row in enumerate(rows)]
            )
            keys = pack_keys([tag_keys(chain.request, row) for row in rows])
        return BlockStored(
            pack_list(names),
            int(chain.before) or None,
            pack_list(self._written_tokens.part(chain.first_token, chain.last_token)),
            self._block_sizes[group],
            None,
            MEDIA[chain.place & 1],
            lora_name(chain.request),
            extra_keys,
            group,
            self._kinds[group],
            window or None,
            keys,
            len(self._windows) if len(self._windows) > 1 else None,
        )
