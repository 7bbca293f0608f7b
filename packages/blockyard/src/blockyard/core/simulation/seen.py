"""Which contents appeared before, in bounded memory."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..arrays import zeros_i64

FEWEST_SLOTS: Final = 2**12
MASK: Final[i64] = 2**62 - 1
ODD: Final[i64] = 0x1E3779B97F4A7C15
OTHER_ODD: Final[i64] = 0x3F58476D1CE4E5B9


class SeenContents:
    """The set of ids that have appeared, or a sample of them once there are too many.

    It is exact for up to half of `max_slots` ids, a power of two. Beyond that, half of all ids are dropped by their
    hash, and so on: an id is in the sample with probability 2**-halvings, with all of its references or none.
    `num_references` counts the references to ids in the sample, `num_seen` those of them whose id appeared in an
    earlier request. O(1) per reference.
    """

    def __init__(self, max_slots: int) -> None:
        self.halvings: i64 = 0
        self.num_references: i64 = 0
        self.num_seen: i64 = 0
        self._max_slots: i64 = max_slots
        self._slots = zeros_i64(min(max_slots, FEWEST_SLOTS))
        self._num_ids: i64 = 0
        #: Ids with a hash below this are in the sample.
        self._limit: i64 = MASK

    def add(self, ids_array: npt.NDArray[np.int64]) -> i64:
        """Add the ids of a request, each from 0 to 2**60. Return how many leading ones appeared before; -1 if unknown.

        `ids_array` is a contiguous int64 array. The number is unknown once ids are sampled.
        """
        ids = vec[i64](ids_array)
        num_leading: i64 = 0
        is_leading = True
        for place in range(i64(len(ids))):
            name = _hash(ids[place])
            if name < self._limit:
                is_leading = self._note(ids[place], name) and is_leading
            if is_leading:
                num_leading += 1
        return -1 if self.halvings > 0 else num_leading

    def _note(self, number: i64, name: i64) -> bool:
        """Count a reference and add the id; return whether it appeared before."""
        self.num_references += 1
        if not self._put(number, name):
            # All ids may survive a halving, and a search of a full table would never end.
            while 2 * self._num_ids > len(self._slots):
                self._make_room()
            return False
        self.num_seen += 1
        return True

    def _put(self, number: i64, name: i64) -> bool:
        mask = i64(len(self._slots)) - 1
        slot = name & mask
        while self._slots[slot] != 0:
            if self._slots[slot] == number + 1:
                return True
            slot = (slot + 1) & mask
        self._slots[slot] = number + 1
        self._num_ids += 1
        return False

    def _make_room(self) -> None:
        """Double the slots, or drop half of the ids and so, on average, half of the counts."""
        old = self._slots
        num_slots = i64(len(old))
        if num_slots < self._max_slots:
            num_slots *= 2
        else:
            self._limit >>= 1
            self.halvings += 1
            self.num_references >>= 1
            self.num_seen >>= 1
        self._slots = zeros_i64(int(num_slots))
        self._num_ids = 0
        for place in range(i64(len(old))):
            if old[place] != 0:
                name = _hash(old[place] - 1)
                if name < self._limit:
                    self._put(old[place] - 1, name)


def _hash(number: i64) -> i64:
    mixed = (number * ODD) & MASK
    mixed ^= mixed >> 31
    mixed = (mixed * OTHER_ODD) & MASK
    return mixed ^ (mixed >> 29)
