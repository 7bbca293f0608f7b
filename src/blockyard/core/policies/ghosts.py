"""A bounded memory of contents that are gone."""

from typing import Final

from mypy_extensions import i32, i64

from ..arrays import grown_i32, grown_i64, zeros_i32, zeros_i64
from .tracked import mix

#: Rows at first; there are twice as many whenever all are taken.
FEWEST_ROWS: Final = 64


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

    def holds(self, key: i64) -> bool:
        """Whether `key` is remembered."""
        return self._find(key) != 0

    def take(self, key: i64) -> i64:
        """The number of a key, which is forgotten now; -1 if it was not remembered."""
        row = self._find(key)
        if row == 0:
            return -1
        self._drop(row)
        return self._number[row]

    def number(self, key: i64) -> i64:
        """The number of a key; -1 if it is not remembered."""
        row = self._find(key)
        return self._number[row] if row != 0 else -1

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
        self._chain[row] = i32(self._free)
        self._free = row
        self._num_keys -= 1
