"""The offline optimum: a cache that knows future requests."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..arrays import zeros_i64


def next_uses(ids: vec[i64], num_contents: i64) -> vec[i64]:
    """Return, for each reference, the position of the next one to the same content, or -1. O(references)."""
    following = zeros_i64(len(ids))
    latest = zeros_i64(int(num_contents))
    place = i64(len(ids))
    while place > 0:
        place -= 1
        following[place] = latest[ids[place]] - 1
        latest[ids[place]] = place + 1
    return following


class Belady:
    """A cache of `capacity` blocks that evicts the block needed latest (Belady, IBM Systems Journal 1966).

    A request hits the blocks cached when it begins. Then all its ids are cached, and the blocks whose next reference is
    farthest are evicted until `capacity` remain; within one request the deepest first. Blocks that are never needed
    again are not cached.

    A hit keeps a block from one reference to the next, and at most `capacity` such intervals may overlap. Dropping the
    interval that ends last keeps the most intervals (Faigle and Nawijn, 1995), so no cache of this capacity has more
    hits. O(references * log references).
    """

    def __init__(self, capacity: i64, ids_array: npt.NDArray[np.int64], num_contents: i64) -> None:
        """Prepare the references `ids_array`, a contiguous int64 array."""
        ids = vec[i64](ids_array)
        self.num_hits: i64 = 0
        self._capacity = capacity
        self._ids = ids
        self._following = next_uses(ids, num_contents)
        #: 1 + the position of the next reference of each cached content; 0 for others.
        self._kept = zeros_i64(int(num_contents))
        self._num_kept: i64 = 0
        #: A heap of future positions, the farthest on top. Positions that were reached remain below all others.
        self._heap = zeros_i64(len(ids))
        self._num_heap: i64 = 0

    def run(self, starts_array: npt.NDArray[np.int64]) -> None:
        """Run all requests. Request r has the ids ids[starts[r]:starts[r + 1]].

        `starts_array` is a contiguous int64 array.
        """
        starts = vec[i64](starts_array)
        for request in range(i64(len(starts)) - 1):
            self._hit(starts[request], starts[request + 1])
            self._keep(starts[request], starts[request + 1])
            while self._num_kept > self._capacity:
                self._kept[self._ids[self._pop()]] = 0
                self._num_kept -= 1

    def _hit(self, start: i64, stop: i64) -> None:
        for place in range(start, stop):
            if self._kept[self._ids[place]] != 0:
                self.num_hits += 1

    def _keep(self, start: i64, stop: i64) -> None:
        for place in range(start, stop):
            content = self._ids[place]
            if self._kept[content] != 0:
                self._num_kept -= 1
            following = self._following[place]
            self._kept[content] = following + 1
            if following >= 0:
                self._num_kept += 1
                if following >= stop:
                    self._push(following)

    def _push(self, item: i64) -> None:
        heap = self._heap
        place = self._num_heap
        self._num_heap += 1
        while place > 0 and heap[(place - 1) >> 1] < item:
            heap[place] = heap[(place - 1) >> 1]
            place = (place - 1) >> 1
        heap[place] = item

    def _pop(self) -> i64:
        heap = self._heap
        top = heap[0]
        self._num_heap -= 1
        item = heap[self._num_heap]
        place: i64 = 0
        below: i64 = 1
        while below < self._num_heap:
            if below + 1 < self._num_heap and heap[below + 1] > heap[below]:
                below += 1
            if heap[below] <= item:
                break
            heap[place] = heap[below]
            place = below
            below = 2 * place + 1
        heap[place] = item
        return top
