"""A bounded memory of a sample of contents, in the order of their last use."""

from typing import Final

from mypy_extensions import i64

from ..arrays import zeros_i64

#: Contents whose keys fall together share a row of this many entries.
WAYS: Final[i64] = 4
LOW_31: Final[i64] = 2**31 - 1
MULTIPLIER: Final[i64] = 0x2545F491


def mix(key: i64) -> i64:
    """A number below 2**31 that looks random, the same for the same key."""
    mixed = (((key & LOW_31) ^ (key >> 31)) * MULTIPLIER) & (2**62 - 1)
    mixed = ((mixed ^ (mixed >> 29)) & LOW_31) * MULTIPLIER
    return (mixed >> 24) & LOW_31


class Tracked:
    """A ring of (key, state), the oldest overwritten first, and a table of rows with four entries to find a key.

    Where a fifth content falls into a row, the one of the five that was used longest ago is forgotten before its time.
    24 bytes an entry. O(1) an operation.

    num_entries: a multiple of 4.
    """

    def __init__(self, num_entries: int) -> None:
        self.capacity: i64 = num_entries
        #: How many were ever put; entry number s is in place s % capacity as long as it is among the latest.
        self.num_put: i64 = 0
        self._num_rows: i64 = num_entries // 4
        #: 1 + the key in each place; 0 for none.
        self._key = zeros_i64(num_entries)
        self._state = zeros_i64(num_entries)
        #: Places, four to a row, and perhaps out of date: the key in the place tells.
        self._table = zeros_i64(num_entries)

    def _row(self, key: i64) -> i64:
        return WAYS * ((mix(key) >> 5) % self._num_rows)

    def find(self, key: i64) -> i64:
        """The place of a key, or -1."""
        row = self._row(key)
        for way in range(row, row + WAYS):
            place = self._table[way]
            if self._key[place] == key + 1:
                return place
        return -1

    def state(self, place: i64) -> i64:
        """The state that was put for the key in this place."""
        return self._state[place]

    def key(self, place: i64) -> i64:
        """The key in a place, or -1."""
        return self._key[place] - 1

    def place(self, number: i64) -> i64:
        """The place of the entry that was put as number `number`, one of the latest `capacity`."""
        return number % self.capacity

    def number(self, place: i64) -> i64:
        """When the entry in this place was put: how many were put before."""
        number = self.num_put - self.num_put % self.capacity + place
        return number if number < self.num_put else number - self.capacity

    def forget(self, place: i64) -> None:
        """Forget the content in a place."""
        self._key[place] = 0

    def put(self, key: i64, state: i64) -> None:
        """Note a content that is not in the memory as the one used last."""
        place = self.num_put % self.capacity
        self.num_put += 1
        self._key[place] = 0
        way = self._free_way(self._row(key))
        self._key[place] = key + 1
        self._state[place] = state
        self._table[way] = place

    def _free_way(self, row: i64) -> i64:
        """An entry of the row whose content is gone; if there is none, the one used longest ago goes."""
        oldest = row
        oldest_number = self.num_put
        for way in range(row, row + WAYS):
            place = self._table[way]
            is_gone = self._key[place] == 0 or self._row(self._key[place] - 1) != row
            if is_gone or self._is_named_before(way, row):
                return way
            number = self.number(place)
            if number < oldest_number:
                oldest_number = number
                oldest = way
        self._key[self._table[oldest]] = 0
        return oldest

    def _is_named_before(self, way: i64, row: i64) -> bool:
        """Whether the row names the place of this entry once already, so that the entry holds no content of its own.

        An entry that is out of date names a place that the next content may take, and at first all name place 0.
        """
        for other in range(row, way):
            if self._table[other] == self._table[way]:
                return True
        return False
