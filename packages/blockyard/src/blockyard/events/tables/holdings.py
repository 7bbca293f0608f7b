"""An open-addressing hash table from (holder, name) to a node, which is a row number from 1."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import zeros_i64

FEWEST_SLOTS: Final = 64
HOLDER_SPAN: Final[i64] = 4294967296
NODE_MASK: Final[i64] = 4294967295
LOW_31: Final[i64] = 2147483647
#: Smallest hash factor; factors are less than twice this, so that sums of products stay below 2**62.
LEAST_FACTOR: Final = 2**28


class HoldingTable:
    """A hash table with linear probing, loaded from one eighth to two thirds. 16 bytes per slot. Names are any 64 bits.

    Random factors from a secret seed mix the halves of the name and the holder, so that senders cannot choose names
    that collide.
    """

    def __init__(self, hash_seed: int) -> None:
        factors = vec[i64](np.random.default_rng(hash_seed).integers(LEAST_FACTOR, 2 * LEAST_FACTOR, 3))
        self._low, self._high, self._whose = factors[0] | 1, factors[1] | 1, factors[2] | 1
        self.num_holdings: i64 = 0
        self._make(FEWEST_SLOTS)

    def _make(self, num_slots: int) -> None:
        self._mask: i64 = num_slots - 1
        #: (name, holder * 2**32 + node); the second is 0 in an empty slot.
        self._slots = zeros_i64(2 * num_slots)

    def _home(self, holder: i64, name: i64) -> i64:
        mixed = (name & LOW_31) * self._low + ((name >> 31) & LOW_31) * self._high + holder * self._whose
        return ((mixed >> 29) ^ mixed) & self._mask

    def _find(self, holder: i64, name: i64) -> i64:
        """Return the slot of a holding, or the empty slot where it would be."""
        position = self._home(holder, name)
        slots = self._slots
        while slots[2 * position + 1] != 0:
            if slots[2 * position] == name and slots[2 * position + 1] >> 32 == holder:
                return position
            position = (position + 1) & self._mask
        return position

    def node_of(self, holder: i64, name: i64) -> i64:
        """Return the node of a holding, 0 for none. O(1) expected."""
        return self._slots[2 * self._find(holder, name) + 1] & NODE_MASK

    def load_homes(self, holder: i64, names: vec[i64], first: i64, last: i64) -> i64:
        """Prefetch the slots of names, so that later lookups do not wait for memory one by one. O(last - first).

        The returned sum only keeps the reads.
        """
        slots = self._slots
        total: i64 = 0
        for place in range(first, last):
            total ^= slots[2 * self._home(holder, names[place])]
        return total

    def put(self, holder: i64, name: i64, node: i64) -> None:
        """Add a holding that does not exist. O(1) expected, amortized."""
        self.put_if_new(holder, name, node)

    def put_if_new(self, holder: i64, name: i64, node: i64) -> i64:
        """Add a holding unless it exists; return the node that it had, 0 for none. O(1) expected, amortized."""
        if 3 * (self.num_holdings + 1) > 2 * (self._mask + 1):
            self._resize(2 * int(self._mask + 1))
        position = self._find(holder, name)
        if self._slots[2 * position + 1] != 0:
            return self._slots[2 * position + 1] & NODE_MASK
        self._slots[2 * position] = name
        self._slots[2 * position + 1] = holder * HOLDER_SPAN + node
        self.num_holdings += 1
        return 0

    def remove(self, holder: i64, name: i64) -> None:
        """Remove an existing holding. O(1) expected, amortized."""
        self._close_gap(self._find(holder, name))
        self.num_holdings -= 1
        if 8 * self.num_holdings < self._mask + 1 > FEWEST_SLOTS:
            self._resize(int(self._mask + 1) // 2)

    def _close_gap(self, gap: i64) -> None:
        """Move later holdings of the run back, so that no probe ends too early (Knuth, 6.4 R)."""
        slots = self._slots
        position = (gap + 1) & self._mask
        while slots[2 * position + 1] != 0:
            home = self._home(slots[2 * position + 1] >> 32, slots[2 * position])
            if (position - home) & self._mask >= (position - gap) & self._mask:
                slots[2 * gap] = slots[2 * position]
                slots[2 * gap + 1] = slots[2 * position + 1]
                gap = position
            position = (position + 1) & self._mask
        slots[2 * gap] = 0
        slots[2 * gap + 1] = 0

    def _resize(self, num_slots: int) -> None:
        old = self._slots
        self._make(num_slots)
        for slot in range(i64(len(old)) // 2):
            if old[2 * slot + 1] != 0:
                position = self._find(old[2 * slot + 1] >> 32, old[2 * slot])
                self._slots[2 * position] = old[2 * slot]
                self._slots[2 * position + 1] = old[2 * slot + 1]

    def renumber(self, moved: vec[i64]) -> None:
        """Replace every node by `moved[node]`; nodes beyond the array stay. O(slots)."""
        num_nodes = i64(len(moved))
        for slot in range(self._mask + 1):
            value = self._slots[2 * slot + 1]
            if value != 0 and value & NODE_MASK < num_nodes:
                self._slots[2 * slot + 1] = value - (value & NODE_MASK) + moved[value & NODE_MASK]

    def names_of(self, holder: i64) -> vec[i64]:
        """Return all names of a holder. O(slots)."""
        count: i64 = 0
        for slot in range(self._mask + 1):
            if self._slots[2 * slot + 1] >> 32 == holder and self._slots[2 * slot + 1] != 0:
                count += 1
        names = zeros_i64(int(count))
        count = 0
        for slot in range(self._mask + 1):
            if self._slots[2 * slot + 1] >> 32 == holder and self._slots[2 * slot + 1] != 0:
                names[count] = self._slots[2 * slot]
                count += 1
        return names

    def num_bytes(self) -> int:
        """Return the bytes of the table."""
        return 8 * len(self._slots)
