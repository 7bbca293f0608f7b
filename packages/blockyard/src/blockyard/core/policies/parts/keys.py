"""Bounded memories of content keys: of evicted contents, and of a sample in the order of last use."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arrays import grown_i32, grown_i64, zeros_i32, zeros_i64

#: Rows at first; they double when all are taken.
FEWEST_ROWS: Final = 64
#: The number of a free row, and of a key that is not remembered.
NOT_THERE: Final[i64] = -1
#: Entries per row; keys with the same hash share a row.
WAYS: Final[i64] = 4
LOW_31: Final[i64] = 2**31 - 1
MULTIPLIER: Final[i64] = 0x2545F491


def mix(key: i64) -> i64:
    """Return a pseudo-random number below 2**31 that depends only on the key."""
    mixed = (((key & LOW_31) ^ (key >> 31)) * MULTIPLIER) & (2**62 - 1)
    mixed = ((mixed ^ (mixed >> 29)) & LOW_31) * MULTIPLIER
    return (mixed >> 24) & LOW_31


class Ghosts:
    """Keys of the latest evicted contents, each with a number. The oldest is forgotten first.

    A hash table in arrays, with a row per content, chained in buckets and linked in the order of insertion. It takes 36
    bytes a row and doubles its rows when they are full. O(1) expected and amortised per operation.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: i64 = capacity
        self._start()

    def _start(self) -> None:
        self._num_keys: i64 = 0
        #: Row 0 is no row but the end of the list: the oldest row follows it.
        self._key = zeros_i64(FEWEST_ROWS)
        self._number = zeros_i64(FEWEST_ROWS)
        self._after = zeros_i32(FEWEST_ROWS)
        self._before = zeros_i32(FEWEST_ROWS)
        #: The next row in a bucket; of a free row, the next free one.
        self._chain = zeros_i32(FEWEST_ROWS)
        #: The first row of each bucket, as many as rows.
        self._bucket = zeros_i32(FEWEST_ROWS)
        self._free: i64 = 0
        self._num_made: i64 = 0

    def remember(self, key: i64, number: i64) -> None:
        """Store a key with its number, as the latest."""
        row = self._find(key)
        if row != 0 and self._num_keys <= self.capacity:
            self._number[row] = number
            self._unlink(row)
            self._link(row)
            return
        if row != 0:
            self._drop(row)
        while self._num_keys >= self.capacity and self._num_keys > 0:
            self._drop(i64(self._after[0]))
        if self.capacity > 0:
            self._put(key, number)

    def touch_last_first(self, keys: vec[i64], places: vec[i64], count: i64) -> None:
        """Make the keys at `places[:count]` the latest ones, starting with the last. All must be remembered.

        O(count) expected: each is looked for first in the row before that of the previous one.
        """
        own = self._key
        number = self._number
        after = self._after
        before = self._before
        last = i64(before[0])
        row: i64 = 0
        place = count
        while place > 0:
            place -= 1
            key = keys[places[place]]
            row -= 1
            if row <= 0 or own[row] != key or number[row] == NOT_THERE:
                row = self._find(key)
            if row == last:
                continue
            following = i64(after[row])
            previous = i64(before[row])
            after[previous] = i32(following)
            before[following] = i32(previous)
            after[last] = i32(row)
            before[row] = i32(last)
            last = row
        after[last] = 0
        before[0] = i32(last)

    def holds(self, key: i64) -> bool:
        return self._find(key) != 0

    def take(self, key: i64) -> i64:
        """Forget a key. Return its number, or `NOT_THERE` if it is not remembered."""
        row = self._find(key)
        if row == 0:
            return NOT_THERE
        number = self._number[row]
        self._drop(row)
        return number

    def oldest(self) -> i64:
        """Return the key that is forgotten next. The memory must not be empty."""
        return self._key[i64(self._after[0])]

    def number(self, key: i64) -> i64:
        """Return the number of a key; `NOT_THERE` if it is not remembered."""
        row = self._find(key)
        return self._number[row] if row != 0 else NOT_THERE

    def clear(self) -> None:
        """Forget all."""
        self._start()

    def __len__(self) -> int:
        return int(self._num_keys)

    def _bucket_of(self, key: i64) -> i64:
        return mix(key) & (i64(len(self._bucket)) - 1)

    def _find(self, key: i64) -> i64:
        row = i64(self._bucket[self._bucket_of(key)])
        while row != 0 and self._key[row] != key:
            row = i64(self._chain[row])
        return row

    def _put(self, key: i64, number: i64) -> None:
        row = self._new_row()
        bucket = self._bucket_of(key)
        self._key[row] = key
        self._number[row] = number
        self._chain[row] = self._bucket[bucket]
        self._bucket[bucket] = i32(row)
        self._link(row)
        self._num_keys += 1

    def _new_row(self) -> i64:
        row = self._free
        if row != 0:
            self._free = i64(self._chain[row])
            return row
        if self._num_made + 1 == len(self._key):
            self._double()
        self._num_made += 1
        return self._num_made

    def _double(self) -> None:
        """Double the rows, when all are taken."""
        num_rows = 2 * len(self._key)
        key = grown_i64(self._key, num_rows)
        number = grown_i64(self._number, num_rows)
        after = grown_i32(self._after, num_rows)
        before = grown_i32(self._before, num_rows)
        chain = zeros_i32(num_rows)
        bucket = zeros_i32(num_rows)
        self._key = key
        self._number = number
        self._after = after
        self._before = before
        self._chain = chain
        self._bucket = bucket
        for row in range(1, self._num_made + 1):
            place = self._bucket_of(key[row])
            chain[row] = bucket[place]
            bucket[place] = i32(row)

    def _link(self, row: i64) -> None:
        last = self._before[0]
        self._after[row] = 0
        self._before[row] = last
        self._after[i64(last)] = i32(row)
        self._before[0] = i32(row)

    def _unlink(self, row: i64) -> None:
        after = self._after[row]
        before = self._before[row]
        self._after[i64(before)] = after
        self._before[i64(after)] = before

    def _drop(self, row: i64) -> None:
        bucket = self._bucket_of(self._key[row])
        other = i64(self._bucket[bucket])
        if other == row:
            self._bucket[bucket] = self._chain[row]
        else:
            while i64(self._chain[other]) != row:
                other = i64(self._chain[other])
            self._chain[other] = self._chain[row]
        self._unlink(row)
        self._number[row] = NOT_THERE  # the key stays: `touch_last_first` must not take this row for the key's
        self._chain[row] = i32(self._free)
        self._free = row
        self._num_keys -= 1


class KeyRing:
    """A ring of the latest `num_entries` pairs (key, state), and a table that finds a key.

    A new entry overwrites the oldest. Rows of the table have four entries; if five keys share a row, the least recently
    used one is forgotten early. 24 bytes an entry. O(1) per operation.

    Args:
        num_entries: entries of the ring, a multiple of 4.
    """

    def __init__(self, num_entries: int) -> None:
        self.capacity: i64 = num_entries
        #: Entries inserted so far; entry number s is at position s % capacity while it is among the latest.
        self.num_put: i64 = 0
        self._num_rows: i64 = num_entries // 4
        #: 1 + the key at each position; 0 for none.
        self._key = zeros_i64(num_entries)
        self._state = zeros_i64(num_entries)
        #: Positions, four per row. A position may be out of date: the key at it decides.
        self._table = zeros_i64(num_entries)

    def _row(self, key: i64) -> i64:
        return WAYS * ((mix(key) >> 5) % self._num_rows)

    def find(self, key: i64) -> i64:
        """Return the position of a key, or -1."""
        row = self._row(key)
        for way in range(row, row + WAYS):
            place = self._table[way]
            if self._key[place] == key + 1:
                return place
        return -1

    def state(self, place: i64) -> i64:
        """Return the state of the key at a position."""
        return self._state[place]

    def key(self, place: i64) -> i64:
        """Return the key at a position, or -1."""
        return self._key[place] - 1

    def place(self, number: i64) -> i64:
        """Return the position of entry number `number`, which must be one of the latest `capacity`."""
        return number % self.capacity

    def number(self, place: i64) -> i64:
        """Return the number of entries that were inserted before the one at a position."""
        number = self.num_put - self.num_put % self.capacity + place
        return number if number < self.num_put else number - self.capacity

    def forget(self, place: i64) -> None:
        """Forget the key at a position."""
        self._key[place] = 0

    def put(self, key: i64, state: i64) -> None:
        """Insert a key, which must not be in the ring, as the most recently used."""
        place = self.num_put % self.capacity
        self.num_put += 1
        self._key[place] = 0
        way = self._free_way(self._row(key))
        self._key[place] = key + 1
        self._state[place] = state
        self._table[way] = place

    def _free_way(self, row: i64) -> i64:
        """Return an unused entry of the row. If there is none, forget the least recently used key."""
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
        """Return whether an earlier entry of the row has the same position, so that this one is unused.

        An entry that was overwritten in the ring still has its position, which another key may take. At first all have
        position 0.
        """
        for other in range(row, way):
            if self._table[other] == self._table[way]:
                return True
        return False
