"""What is cached as a forest of branches: from who follows whom, for each block, with no loop over blocks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """Branches: contents one behind another, up to where several follow one. A branch comes after the one before it.

    contents: int64 (n,), ids in rising order. blocks: int64 (n,), a block that caches each. branch: int64 (n,), which
    branch it is of. The rest is by branch: size: its contents. weight: those of it and of all behind it. parent: the
    branch before it, -1 for none. start: contents before its first one. root: the id of what stands at the very
    beginning. is_marked: whether something besides text stands in its first content (an image).
    """

    contents: Ints
    blocks: Ints
    branch: Ints
    size: Ints
    weight: Ints
    parent: Ints
    start: Ints
    root: Ints
    is_marked: NDArray[np.bool_]

    def children(self, branch: int) -> Ints:
        """The branches right behind one, or behind none (-1). O(branches)."""
        return np.flatnonzero(self.parent == branch)

    def members(self, branch: int) -> Ints:
        """The places of a branch's contents, in order. O(contents)."""
        return np.flatnonzero(self.branch == branch)


def forest_of(pairs: Ints, keys: Mapping[int, tuple[object, ...]]) -> Forest:
    """The forest of what blocks cache. O(n log n) for n blocks, in numpy.

    pairs: int64 (blocks, 2), what each block caches, 0 for nothing, and what is before that. keys: of roots, by id; one
    that stands in the middle of a prompt has (what is before it, ...). A content whose parent has gone begins anew.
    """
    cached = np.flatnonzero(pairs[:, 0])
    contents, first = np.unique(pairs[cached, 0], return_index=True)
    blocks = cached[first]
    inner = {root: each[0] for root, each in keys.items() if each and isinstance(each[0], int)}
    is_marked = np.isin(pairs[blocks, 1], list(inner))
    before = _past_roots(pairs[blocks, 1], inner)
    parent = _places(contents, before)
    num_children = np.bincount(parent[parent >= 0], minlength=len(contents))
    is_first = (parent < 0) | (num_children[parent] != 1) | is_marked
    heads = np.flatnonzero(is_first)
    branch = np.searchsorted(heads, _last_of(np.where(is_first, NONE, parent)))
    size = np.bincount(branch, minlength=len(heads))
    above = np.where(parent[heads] < 0, NONE, branch[parent[heads]])
    weight, start = _sums(above, size)
    root = before[heads][_last_of(above)]
    return Forest(contents, blocks, branch, size, weight, above, start, root, is_marked[heads])


def _past_roots(before: Ints, inner: Mapping[int, int]) -> Ints:
    """The same, with what stands before a root in the middle of a prompt in its place."""
    if not inner:
        return before
    seen, inverse = np.unique(before, return_inverse=True)
    for place in np.flatnonzero(np.isin(seen, list(inner))):
        while int(seen[place]) in inner:
            seen[place] = inner[int(seen[place])]
    return seen[inverse]


def _places(contents: Ints, names: Ints) -> Ints:
    """Where names stand among sorted contents, -1 for those that do not."""
    if len(contents) == 0:
        return np.zeros(0, np.int64)
    places = np.minimum(np.searchsorted(contents, names), len(contents) - 1)
    return np.where(contents[places] == names, places, NONE)


def _last_of(above: Ints) -> Ints:
    """The end of each one's way up. O(n log longest way), by steps that double."""
    ends = np.where(above < 0, np.arange(len(above)), above)
    while True:
        further = ends[ends]
        if np.array_equal(further, ends):
            return ends
        ends = further


def _sums(above: Ints, size: Ints) -> tuple[Ints, Ints]:
    """For each node of a forest the sizes of it and all below, and those of all above it. O(n log depth).

    After k steps the sums reach 2**k levels.
    """
    below, over = size.astype(np.float64), np.where(above < 0, 0, size[above])
    while (moving := np.flatnonzero(above >= 0)).size:
        higher = above[moving]
        below = below + np.bincount(higher, below[moving], minlength=len(size))
        over[moving] += over[higher]
        above = np.where(above < 0, NONE, above[above])
    return below.astype(np.int64), over


def heaviest(forest: Forest, most: int) -> list[int]:
    """The branches with most behind them, each after the one before it, at most `most`. O(branches * most)."""
    found: list[int] = []
    waiting: list[tuple[int, int]] = []
    _offer(waiting, forest, NONE, most)
    while waiting and len(found) < most:
        branch = heapq.heappop(waiting)[1]
        found.append(branch)
        _offer(waiting, forest, branch, most)
    return found


def _offer(waiting: list[tuple[int, int]], forest: Forest, branch: int, most: int) -> None:
    children = forest.children(branch)
    if len(children) > most:
        children = children[np.argpartition(-forest.weight[children], most)[:most]]
    for child in children.tolist():
        heapq.heappush(waiting, (-int(forest.weight[child]), child))
