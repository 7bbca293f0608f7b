"""A bounded memory of contents that are gone."""

from collections import OrderedDict

from mypy_extensions import i64


class Ghosts:
    """The keys of the latest evicted contents, each with a number, the oldest forgotten first. O(1) an operation.

    An ordered dict has links between its items; in a plain one, finding the oldest walks over all that were deleted
    before it, which made an operation some ten times more expensive on a memory of 30,000 keys.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[int, i64] = OrderedDict()

    def remember(self, key: i64, number: i64) -> None:
        """Note `key` as the latest."""
        self._keys.pop(int(key), 0)
        while len(self._keys) >= self.capacity and self._keys:
            self._keys.popitem(last=False)
        if self.capacity > 0:
            self._keys[int(key)] = number

    def holds(self, key: i64) -> bool:
        """Whether `key` is remembered."""
        return int(key) in self._keys

    def take(self, key: i64) -> i64:
        """The number of a key, which is forgotten now; -1 if it was not remembered."""
        return self._keys.pop(int(key), -1)

    def number(self, key: i64) -> i64:
        """The number of a key; -1 if it is not remembered."""
        return self._keys.get(int(key), -1)

    def clear(self) -> None:
        """Forget all."""
        self._keys = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)
