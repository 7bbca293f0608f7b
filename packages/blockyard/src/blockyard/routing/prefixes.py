"""The beginnings of prompts that each replica was sent, as links that stand for many tokens each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from .cost import Ints

Links = Sequence[Hashable]


class Prefixes:
    """Counts how often each link of a prompt was added for each replica. A link identifies all tokens up to its end.

    Args:
        limit: most links per replica; the least recently added prompts are dropped. None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._holders: dict[Hashable, dict[str, int]] = {}
        #: With a limit: prompts by replica, oldest first.
        self._prompts: dict[str, OrderedDict[Hashable, Links]] = {}
        #: Number of links by replica.
        self.sizes: dict[str, int] = {}

    def add(self, links: Links, replica: str) -> None:
        """Add a prompt of a replica. O(links), amortized."""
        if not links:
            return
        if self._limit is not None:
            prompts = self._prompts.setdefault(replica, OrderedDict())
            if links[-1] in prompts:
                prompts.move_to_end(links[-1])
                return
            prompts[links[-1]] = links
        self._count(links, replica)
        while self._limit is not None and self.sizes[replica] > self._limit and len(prompts) > 1:
            self.remove(prompts.popitem(last=False)[1], replica)

    def _count(self, links: Links, replica: str) -> None:
        num_new = 0
        for link in links:
            holders = self._holders.setdefault(link, {})
            num_new += replica not in holders
            holders[replica] = holders.get(replica, 0) + 1
        self.sizes[replica] = self.sizes.get(replica, 0) + num_new

    def remove(self, links: Links, replica: str) -> None:
        """Undo one `add` of the same prompt and replica. O(links)."""
        num_gone = 0
        for link in links:
            holders = self._holders[link]
            holders[replica] -= 1
            if not holders[replica]:
                num_gone += 1
                del holders[replica]
                if not holders:
                    del self._holders[link]
        if links:
            self.sizes[replica] -= num_gone

    def forget(self, replica: str) -> None:
        """Remove all links of a replica. O(links)."""
        self._prompts.pop(replica, None)
        if self.sizes.pop(replica, 0):
            for link in [link for link, holders in self._holders.items() if holders.pop(replica, 0)]:
                if not self._holders[link]:
                    del self._holders[link]

    def lengths(self, links: Links, rows: dict[str, int]) -> Ints:
        """Return the number of leading links that each replica has, int64 (rows,). O(links + replicas)."""
        found: Ints = np.zeros(len(rows), np.int64)
        path = []
        for link in links:
            holders = self._holders.get(link)
            if holders is None:
                break
            path.append(holders)
        seen: set[str] = set()
        for depth in range(len(path), 0, -1):
            for replica in path[depth - 1].keys() - seen:
                if replica in rows:
                    found[rows[replica]] = depth
            seen.update(path[depth - 1])
            if len(seen) == len(path[0]):
                break
        return found

    def check(self) -> None:
        """Raise `AssertionError` unless the sizes match the links and no count is below 1."""
        sizes: dict[str, int] = {}
        for holders in self._holders.values():
            assert min(holders.values(), default=0) > 0, holders
            for replica in holders:
                sizes[replica] = sizes.get(replica, 0) + 1
        assert sizes == {replica: size for replica, size in self.sizes.items() if size}, (sizes, self.sizes)
