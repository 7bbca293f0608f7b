"""LRU hits at all capacities in one pass."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..arrays import zeros_i64


class LRUStack:
    """The stack of Mattson, Gecsei, Slutz and Traiger (IBM Systems Journal 1970), for prefixes.

    An LRU cache of c blocks holds exactly the top c contents of the stack, for every c. A request touches its ids from
    the last to the first. It hits id k at capacity c if the ids 0 to k are all at depth c or above, so the largest
    depth up to k counts. One pass gives the exact hits at all capacities.

    Depths are computed with a tree of partial sums over time (Fenwick 1994; Bennett and Kruskal 1975 for the idea).
    O(log references) per reference.
    """

    def __init__(self, num_references: i64, num_contents: i64) -> None:
        #: num_hits_at[d]: references that hit at capacities from d on, but not at d - 1.
        self.num_hits_at = zeros_i64(int(num_contents) + 1)
        #: Time of each content's latest reference, from 1; 0 if there was none.
        self._touched = zeros_i64(int(num_contents))
        self._sums = zeros_i64(int(num_references) + 1)
        self._num_contents: i64 = 0
        self._now: i64 = 0

    def run(self, ids_array: npt.NDArray[np.int64], starts_array: npt.NDArray[np.int64]) -> None:
        """Run all requests. Request r has the ids ids[starts[r]:starts[r + 1]]. Both are contiguous int64 arrays."""
        ids, starts = vec[i64](ids_array), vec[i64](starts_array)
        for request in range(i64(len(starts)) - 1):
            self._count(ids, starts[request], starts[request + 1])
            place = starts[request + 1]
            while place > starts[request]:
                place -= 1
                self._touch(ids[place])

    def _count(self, ids: vec[i64], start: i64, stop: i64) -> None:
        """Count the request's hits, up to the first id that was never seen."""
        deepest: i64 = 0
        for place in range(start, stop):
            touched = self._touched[ids[place]]
            if touched == 0:
                return
            deepest = max(deepest, self._num_contents - self._sum(touched - 1))
            self.num_hits_at[deepest] += 1

    def _touch(self, content: i64) -> None:
        if self._touched[content] == 0:
            self._num_contents += 1
        else:
            self._add(self._touched[content], -1)
        self._now += 1
        self._touched[content] = self._now
        self._add(self._now, 1)

    def _sum(self, time: i64) -> i64:
        """Return how many contents were last referenced at `time` or before."""
        total: i64 = 0
        while time > 0:
            total += self._sums[time]
            time &= time - 1
        return total

    def _add(self, time: i64, amount: i64) -> None:
        while time < len(self._sums):
            self._sums[time] += amount
            time += time & -time
