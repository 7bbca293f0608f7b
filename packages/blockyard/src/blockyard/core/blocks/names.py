"""Names of blocks, packed into words: bytes chosen by the caller (such as a hash of tokens), and a group number."""

from struct import Struct
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...answers import NameEvent
from ...arguments import shown
from ...errors import InvalidArgument
from ..arrays import zeros_i64
from ..face import read_int

#: The longest name: a SHA-256. All of it is stored and compared.
MAX_NAME_BYTES: Final = 32
MAX_GROUP: Final = 2**31 - 1
#: Four words of bytes, and one that holds the group and the length.
NAME_WORDS: Final[i64] = 5
BYTE_WORDS: Final[i64] = 4
WORD_BYTES: Final[i64] = 8
GROUP_STEP: Final[i64] = 64
_FOUR_WORDS = Struct("<4q")


def pack_name(words: vec[i64], place: i64, name: object, group: i64) -> None:
    """Write a name into the five words from `place` on. Raises `InvalidArgument`, and then writes nothing."""
    if type(name) is not bytes or not 0 < len(name) <= MAX_NAME_BYTES:
        raise _refused("name", name)
    _pack(words, place, name, group)


def _pack(words: vec[i64], place: i64, name: bytes, group: i64) -> None:
    length = i64(len(name))
    padded = name if length == MAX_NAME_BYTES else name.ljust(MAX_NAME_BYTES, b"\0")
    for word in range(BYTE_WORDS):
        words[place + word] = _word(padded, word * WORD_BYTES)
    words[place + BYTE_WORDS] = group * GROUP_STEP + length


def _word(name: bytes, at: i64) -> i64:
    """Return eight bytes as a signed little-endian integer.

    This takes a ninth of the time of `struct`, which makes an object of each word.
    """
    value = i64(name[at + 7])
    if value > 127:
        value -= 256
    for place in range(i64(7)):
        value = value * 256 + i64(name[at + 6 - place])
    return value


def listed(names: object) -> list[object]:
    """Return a sequence of names as a list, read once. Raises `InvalidArgument` if it is not a sequence."""
    if isinstance(names, (bytes, bytearray, memoryview, str)):
        raise InvalidArgument(f"names is {shown(names)}; it must be a list of bytes")
    try:
        given: list[object] = list(names)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidArgument(f"names is {shown(names)}; it must be a list of bytes")
    return given


def pack_names(given: list[object], group: i64) -> vec[i64]:
    """Return the names packed into five words each. O(names). Raises `InvalidArgument` naming the position."""
    words = zeros_i64(len(given) * int(NAME_WORDS))
    for place in range(i64(len(given))):
        name = given[place]
        if type(name) is not bytes or not 0 < len(name) <= MAX_NAME_BYTES:
            raise _refused(f"names[{place}]", name)
        _pack(words, place * NAME_WORDS, name, group)
    return words


def _refused(what: str, name: object) -> InvalidArgument:
    if isinstance(name, bytes):
        return InvalidArgument(f"{what} has {len(name)} bytes; a name has 1 to {MAX_NAME_BYTES}")
    return InvalidArgument(f"{what} is {shown(name)}; a name is bytes, 1 to {MAX_NAME_BYTES} of them")


def unpack_name(words: vec[i64], place: i64) -> tuple[bytes, int]:
    """Return the name and the group in the five words from `place` on."""
    last = words[place + BYTE_WORDS]
    padded = _FOUR_WORDS.pack(int(words[place]), int(words[place + 1]), int(words[place + 2]), int(words[place + 3]))
    return padded[: int(last % GROUP_STEP)], int(last // GROUP_STEP)


def group_numbers(groups: object) -> list[int]:
    """Return a list of at least one group number. Raises `InvalidArgument` naming the position."""
    if not isinstance(groups, (list, tuple)) or len(groups) == 0:
        raise InvalidArgument("groups must be a list of group numbers, at least one")
    return [read_int(f"groups[{place}]", groups[place], 0, MAX_GROUP) for place in range(len(groups))]


CAME: Final[i64] = 0
WENT: Final[i64] = 1
CLEARED: Final[i64] = 2
#: What happened, the block, and the name.
ROW_WORDS: Final[i64] = 7
KINDS: Final = ["stored", "removed", "cleared"]


class NameLog:
    """A ring of `max_events` events. When it is full, the oldest event is lost and counted."""

    def __init__(self, max_events: int) -> None:
        self._limit: i64 = max_events
        self._rows = zeros_i64(max_events * int(ROW_WORDS))
        self._first: i64 = 0
        self._count: i64 = 0
        self.num_lost: i64 = 0

    def add(self, kind: i64, block: i64, words: vec[i64], place: i64) -> None:
        """Record one event; the name is in the five words from `place` on. O(1)."""
        if self._count == self._limit:
            self._first = (self._first + 1) % self._limit
            self._count -= 1
            self.num_lost += 1
        row = (self._first + self._count) % self._limit * ROW_WORDS
        self._rows[row] = kind
        self._rows[row + 1] = block
        for word in range(NAME_WORDS):
            self._rows[row + 2 + word] = words[place + word]
        self._count += 1

    def take(self) -> list[NameEvent]:
        """Return the events, oldest first, and clear the log. O(events)."""
        events = [self._event((self._first + i64(place)) % self._limit * ROW_WORDS) for place in range(self._count)]
        self._count = 0
        return events

    def _event(self, row: i64) -> NameEvent:
        kind = self._rows[row]
        if kind == CLEARED:
            return NameEvent(KINDS[kind], b"", 0, 0)
        name, group = unpack_name(self._rows, row + 2)
        return NameEvent(KINDS[kind], name, group, int(self._rows[row + 1]))
