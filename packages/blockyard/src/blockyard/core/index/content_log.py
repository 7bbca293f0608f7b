"""The contents added and removed since the log was last read, in order, from which KV events are made."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NULL_BLOCK
from ..arrays import clear_i32, grown_i32, zeros_i32, zeros_i64
from .rows import Rings

#: With four entries per block, at least half are void when the log is full, so compacting it costs O(1) per entry.
ENTRIES_A_BLOCK: Final = 4
FEWEST_ENTRIES: Final = 16
#: `told` of a block whose content was already read.
READ: Final[i32] = -1


class ContentLog:
    """A log of contents that gained their first computed block (its id) or lost the last one (minus the content id).

    A content that was added and removed between two readings has no entry. Of equal blocks one is logged; if it is
    removed, another takes over its entry. The arrays are allocated once, and operations allocate nothing. The log
    cannot overflow, because at most as many contents can be added as there are blocks, and only contents that were
    read need a removal.
    """

    def __init__(self, num_blocks: int) -> None:
        #: By block: 0 if not logged, 1 + the position of its entry, or READ.
        self.told = zeros_i32(num_blocks)
        self.entries = zeros_i64(max(ENTRIES_A_BLOCK * num_blocks, FEWEST_ENTRIES))
        self.num_entries: i64 = 0
        #: Whether everything was cleared since the last reading; the entries are later than that.
        self.was_cleared = False
        #: New roots by content id, and removed roots that were read before.
        self.new_roots: dict[int, tuple[object, ...]] = {}
        self.lost_roots: list[int] = []

    def came(self, block: i64, rings: Rings) -> None:
        """Log that an indexed block is computed. O(1), or O(equal blocks still to be computed)."""
        if not rings.is_alone(block) and self._is_known(block, rings):
            return
        if self.num_entries == i64(len(self.entries)):
            self._close_gaps()
        self.entries[self.num_entries] = block
        self.num_entries += 1
        self.told[block] = i32(self.num_entries)

    def _is_known(self, block: i64, rings: Rings) -> bool:
        other = i64(rings.next_equal[block])
        while other != block:
            if self.told[other] != 0:
                return True
            other = i64(rings.next_equal[other])
        return self.told[block] != 0

    def went(self, block: i64, content: i64, heir: i64, rings: Rings, owner: vec[i32]) -> None:
        """Log that a block is removed from the index. `heir` is an equal block, 0 for none.

        O(1), or O(equal blocks).
        """
        told = self.told[block]
        if told == 0:
            return
        self.told[block] = 0
        other = self._first_computed(heir, rings, owner)
        if other != NULL_BLOCK:
            self.told[other] = told
        if told > 0:
            self.entries[i64(told) - 1] = other
        elif other == NULL_BLOCK:
            if self.num_entries == i64(len(self.entries)):
                self._close_gaps()
            self.entries[self.num_entries] = -content
            self.num_entries += 1

    def _first_computed(self, first: i64, rings: Rings, owner: vec[i32]) -> i64:
        block = first
        while block != NULL_BLOCK and owner[block] != 0:
            block = i64(rings.next_equal[block])
            if block == first:
                return NULL_BLOCK
        return block

    def _close_gaps(self) -> None:
        """Remove void entries. O(entries)."""
        kept: i64 = 0
        for place in range(self.num_entries):
            entry = self.entries[place]
            if entry != 0:
                self.entries[kept] = entry
                kept += 1
                if entry > 0:
                    self.told[entry] = i32(kept)
        self.num_entries = kept

    def read(self) -> vec[i64]:
        """Return a copy of the entries without gaps. The log is unchanged until `set_read`. O(entries)."""
        kept: i64 = 0
        for place in range(self.num_entries):
            if self.entries[place] != 0:
                kept += 1
        entries = zeros_i64(int(kept))
        kept = 0
        for place in range(self.num_entries):
            if self.entries[place] != 0:
                entries[kept] = self.entries[place]
                kept += 1
        return entries

    def set_read(self) -> None:
        """Mark what `read` returned as known and empty the log. Allocates nothing. O(entries)."""
        for place in range(self.num_entries):
            if self.entries[place] > 0:
                self.told[self.entries[place]] = READ
        self.num_entries = 0
        self.was_cleared = False
        self.new_roots.clear()
        self.lost_roots.clear()

    def root_made(self, root: i64, extra_keys: tuple[object, ...]) -> None:
        """Log a new root for these extra keys."""
        self.new_roots[int(root)] = extra_keys

    def root_lost(self, root: i64) -> None:
        """Log that a root was forgotten; no prompt reaches its descendants."""
        if self.new_roots.pop(int(root), None) is None:
            self.lost_roots.append(int(root))

    def clear(self) -> None:
        """Log that all contents and roots were removed."""
        clear_i32(self.told)
        self.num_entries = 0
        self.was_cleared = True
        self.new_roots.clear()
        self.lost_roots.clear()

    def grown(self, num_blocks: int) -> "ContentLog":
        """Return the same log for blocks up to `num_blocks - 1`; this one must not be used any longer.

        O(num_blocks).
        """
        larger = ContentLog(num_blocks)
        larger.told = grown_i32(self.told, num_blocks)
        for place in range(self.num_entries):
            larger.entries[place] = self.entries[place]
        larger.num_entries = self.num_entries
        larger.was_cleared = self.was_cleared
        larger.new_roots = self.new_roots
        larger.lost_roots = self.lost_roots
        return larger
