"""Roots: the content before the first block of a prompt, one for each combination of extra keys."""

from collections import OrderedDict
from typing import cast

from mypy_extensions import i64

from ...ids import NO_CONTENT


class Roots:
    """The latest `limit` roots by extra keys; the least recently used is forgotten first. O(1) per operation.

    Keys are tuples of strings and numbers, so hashing and comparing them runs no Python code. The dict is an
    OrderedDict because finding the oldest key of a plain dict scans all deleted entries before it.
    """

    def __init__(self, limit: i64) -> None:
        self.limit = limit
        self._contents: OrderedDict[object, i64] = OrderedDict()
        #: The most recently used root; 0 if there is none.
        self.latest_content: i64 = NO_CONTENT

    def find(self, keys: object) -> i64:
        """Return the root of these keys, or 0. Does not mark it as used."""
        return self._contents.get(keys, NO_CONTENT)

    def touch(self, keys: object) -> i64:
        """Return the root of these keys, or 0, and mark it as used."""
        found = self._contents.get(keys, NO_CONTENT)
        if found != NO_CONTENT:
            self._contents.move_to_end(keys)
            self.latest_content = found
        return found

    def remember(self, keys: object, content: i64) -> i64:
        """Add a new root, the most recently used one. Return the root that was forgotten to make room, or 0."""
        self._contents[keys] = content
        self.latest_content = content
        if len(self._contents) <= self.limit:
            return NO_CONTENT
        _, forgotten = self._contents.popitem(last=False)
        return forgotten

    def keys_by_root(self) -> dict[int, tuple[object, ...]]:
        """Return the extra keys of each root. O(roots)."""
        return self.latest(len(self._contents))

    def latest(self, most: int) -> dict[int, tuple[object, ...]]:
        """Return the extra keys of the `most` most recently used roots. O(most)."""
        found: dict[int, tuple[object, ...]] = {}
        for keys, content in reversed(self._contents.items()):
            if len(found) >= most:
                break
            found[int(content)] = cast(tuple[object, ...], keys)
        return found

    def holds(self, content: i64) -> bool:
        """Return whether a root is known. O(roots)."""
        return content in self._contents.values()

    def clear(self) -> None:
        """Remove all roots."""
        self._contents.clear()
        self.latest_content = NO_CONTENT

    def __len__(self) -> int:
        return len(self._contents)
