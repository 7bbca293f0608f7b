"""What stands before the first block of a prompt: a content of its own for each combination of extra keys."""

from collections import OrderedDict
from typing import cast

from mypy_extensions import i64

from ...ids import NO_CONTENT


class Roots:
    """The latest `limit` roots, by extra keys, the least recently used forgotten first. O(1) an operation.

    Keys are tuples of strings and numbers: hashing and comparing them runs no Python code. The dict is an ordered one,
    because finding the oldest key of a plain one walks over all that were deleted before it.
    """

    def __init__(self, limit: i64) -> None:
        self.limit = limit
        self._contents: OrderedDict[object, i64] = OrderedDict()
        #: The root that was used last; 0 where there is none.
        self.latest_content: i64 = NO_CONTENT

    def find(self, keys: object) -> i64:
        """Return the root of these keys, or 0. A question: it changes nothing."""
        return self._contents.get(keys, NO_CONTENT)

    def touch(self, keys: object) -> i64:
        """The same, and it is the latest one now."""
        found = self._contents.get(keys, NO_CONTENT)
        if found != NO_CONTENT:
            self._contents.move_to_end(keys)
            self.latest_content = found
        return found

    def remember(self, keys: object, content: i64) -> i64:
        """Make a new root, the latest one. Returns the one that is forgotten for it, or 0."""
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
        """Return the extra keys of at most `most` roots, the latest used ones. O(most)."""
        found: dict[int, tuple[object, ...]] = {}
        for keys, content in reversed(self._contents.items()):
            if len(found) >= most:
                break
            found[int(content)] = cast(tuple[object, ...], keys)
        return found

    def holds(self, content: i64) -> bool:
        """Return whether some keys still have this root. O(roots)."""
        return content in self._contents.values()

    def clear(self) -> None:
        """Forget all."""
        self._contents.clear()
        self.latest_content = NO_CONTENT

    def __len__(self) -> int:
        return len(self._contents)
