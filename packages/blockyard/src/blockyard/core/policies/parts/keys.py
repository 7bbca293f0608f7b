"""Bounded memories of contents by their keys: of those that are gone, and of a sample in the order of last use."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arrays import grown_i32, grown_i64, zeros_i32, zeros_i64

#: Rows at first; there are twice as many whenever all are taken.
FEWEST_ROWS: Final = 64
#: The number of a row that is free, and of a key that is not remembered.
NOT_THERE: Final[i64] = -1
#: Contents whose keys fall together share a row of this many entries.
WAYS: Final[i64] = 4
LOW_31: Final[i64] = 2**31 - 1
MULTIPLIER: Final[i64] = 0x2545F491


def mix(key: i64) -> i64:
    """A number below 2**31 that looks random, the same for the same key."""
    mixed = (((key & LOW_31) ^ (key >> 31)) * MULTIPLIER) & (2**62 - 1)
    mixed = ((mixed ^ (mixed >> 29)) & LOW_31) * MULTIPLIER
    return (mixed >> 24) & LOW_31


class Ghosts:
    """The keys of the latest evicted contents, each with a number, the oldest forgotten first.

    A hash table in arrays: contents are rows, chained in buckets and linked in order of memory. 36 bytes a row, for as
    many rows as were needed, and up to twice that. O(1) expected and amortised an operation.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: i64 = capacity
        self._start()

    def _start(self) -> None:
        self._num_keys: i64 = 0
        #: Row 0 is none, and the end of the order: after it the oldest.
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
        """Note `key` as the latest."""
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
        """Note the keys at `places[:count]` of `keys`, which are remembered, as the latest, the last one first. Each is
        looked for in the row before that of the one before it. O(count) expected."""
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
        """Whether `key` is remembered."""
        return self._find(key) != 0

    def take(self, key: i64) -> i64:
        """Forget a key, and return its number; `NOT_THERE` if it was not remembered."""
        row = self._find(key)
        if row == 0:
            return NOT_THERE
        number = self._number[row]
        self._drop(row)
        return number

    def oldest(self) -> i64:
        """Return the key that is forgotten next, of a memory that is not empty."""
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
        """Twice the rows. All of them are taken."""
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
        self._number[row] = NOT_THERE  # the key stays: a guess must not take the row for that key's
        self._chain[row] = i32(self._free)
        self._free = row
        self._num_keys -= 1


class KeyRing:
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
