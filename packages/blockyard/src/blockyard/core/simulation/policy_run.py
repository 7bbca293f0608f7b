"""A cache of numbered contents under an eviction policy: the loop that hit-rate curves run."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import PolicyError
from ..arrays import zeros_i64
from ..policies.base import EvictionPolicy


class PolicyRun:
    """Runs requests one after another through a cache of `capacity` blocks.

    A request hits its leading cached blocks, up to the first missing one. Then all its ids are cached, and the policy
    evicts blocks until `capacity` remain, so a request may exceed the capacity for a moment. The policy is called as by
    a pool.

    Contents are numbers from 0 to num_contents - 1. Slots, the policy's block ids, are 1 to capacity + longest_request,
    so the policy must be made for capacity + longest_request + 1 blocks. The running time is that of the policy's
    calls.
    """

    def __init__(self, policy: EvictionPolicy, capacity: i64, num_contents: i64, longest_request: i64) -> None:
        self.num_hits: i64 = 0
        self.num_evicted: i64 = 0
        self._policy = policy
        self._capacity = capacity
        num_slots = capacity + longest_request
        #: The slot of each content, 0 if it is not cached, and the content of each slot.
        self._slot = zeros_i64(int(num_contents))
        self._content = zeros_i64(int(num_slots) + 1)
        #: 1 + the latest request that held this content.
        self._holder = zeros_i64(int(num_contents))
        self._free = zeros_i64(int(num_slots))
        self._num_free = num_slots
        for index in range(num_slots):
            self._free[index] = num_slots - index
        self._num_requests: i64 = 0

    def run(self, ids_array: npt.NDArray[np.int64], starts_array: npt.NDArray[np.int64]) -> None:
        """Run all requests. Request r has the ids ids[starts[r]:starts[r + 1]]. Both are contiguous int64 arrays."""
        ids, starts = vec[i64](ids_array), vec[i64](starts_array)
        for request in range(i64(len(starts)) - 1):
            self._request(ids, starts[request], starts[request + 1])

    def _request(self, ids: vec[i64], start: i64, stop: i64) -> None:
        self._num_requests += 1
        place = start
        while place < stop and self._slot[ids[place]] != 0:
            self._take(ids[place])
            place += 1
        self.num_hits += place - start
        while place < stop:
            self._take(ids[place])
            place += 1
        self._release(ids, start, stop)
        while len(self._content) - 1 - self._num_free > self._capacity:
            self._evict()

    def _take(self, content: i64) -> None:
        """Hold a content, which is cached already or computed now."""
        if self._holder[content] == self._num_requests:
            return
        self._holder[content] = self._num_requests
        slot = self._slot[content]
        if slot != 0:
            self._policy.hit(slot, content)
            self._policy.remove(slot)
            return
        self._num_free -= 1
        slot = self._free[self._num_free]
        self._slot[content] = slot
        self._content[slot] = content

    def _release(self, ids: vec[i64], start: i64, stop: i64) -> None:
        """Release the contents, from the last to the first.

        An id that occurs twice is released once, at its first position.
        """
        place = stop
        while place > start:
            place -= 1
            content = ids[place]
            if self._holder[content] == self._num_requests:
                self._holder[content] = -place - 1
        place = stop
        while place > start:
            place -= 1
            content = ids[place]
            if self._holder[content] == -place - 1:
                self._policy.insert(self._slot[content], content, place - start)

    def _evict(self) -> i64:
        """Evict the block that the policy chooses; return its slot."""
        slot = self._policy.evict()
        if slot < 1 or slot >= len(self._content) or self._slot[self._content[slot]] != slot:
            raise PolicyError(f"evict returned block {slot}, which is not idle")
        self._slot[self._content[slot]] = 0
        self._free[self._num_free] = slot
        self._num_free += 1
        self.num_evicted += 1
        return slot
