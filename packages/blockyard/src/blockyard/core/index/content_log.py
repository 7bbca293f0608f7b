"""Log of the contents that were added and removed since the last reading; the source of KV events."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NULL_BLOCK
from ..arrays import clear_i32, grown_i32, zeros_i32, zeros_i64
from .rows import Rings

#: With four entries per block, at least half are void when the log is full, so compacting it costs O(1) per entry.
ENTRIES_A_BLOCK: Final = 4
FEWEST_ENTRIES: Final = 16
#: `marks` of a block whose content was already read.
READ: Final[i32] = -1


class ContentLog:
    """A log of cached contents: an entry is a block id (content added), or minus a content id (content removed).

    A content is added with its first computed block and removed with its last. A content that was added and removed
    between two readings has no entry. Of equal blocks only one is logged; if it is removed, another takes over its
    entry. The arrays are allocated once, and logging allocates nothing. The log cannot overflow: at most as many
    contents can be added as there are blocks, and only contents that were read need a removal.
    """

    def __init__(self, num_blocks: int) -> None:
        #: By block: 0 if not logged, 1 + the position of its entry, or READ.
        self.marks = zeros_i32(num_blocks)
        self.entries = zeros_i64(max(ENTRIES_A_BLOCK * num_blocks, FEWEST_ENTRIES))
        self.num_entries: i64 = 0
        #: Whether everything was cleared since the last reading; the entries are later than that.
        self.was_cleared = False
        #: New roots by content id, and removed roots that were read before.
        self.new_roots: dict[int, tuple[object, ...]] = {}
        self.lost_roots: list[int] = []

    def log_computed(self, block: i64, rings: Rings) -> None:
        """Log that an indexed block has been computed. O(1), or O(equal blocks that are not computed)."""
        if not rings.is_alone(block) and self._is_known(block, rings):
            return
        if self.num_entries == i64(len(self.entries)):
            self._close_gaps()
        self.entries[self.num_entries] = block
        self.num_entries += 1
        self.marks[block] = i32(self.num_entries)

    def _is_known(self, block: i64, rings: Rings) -> bool:
        other = i64(rings.next_equal[block])
        while other != block:
            if self.marks[other] != 0:
                return True
            other = i64(rings.next_equal[other])
        return self.marks[block] != 0

    def log_removed(self, block: i64, content: i64, heir: i64, rings: Rings, owner: vec[i32]) -> None:
        """Log that a block was removed from the index. `heir` is an equal block, 0 for none.

        O(1), or O(equal blocks).
        """
        mark = self.marks[block]
        if mark == 0:
            return
        self.marks[block] = 0
        other = self._first_computed(heir, rings, owner)
        if other != NULL_BLOCK:
            self.marks[other] = mark
        if mark > 0:
            self.entries[i64(mark) - 1] = other
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
                    self.marks[entry] = i32(kept)
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
                self.marks[self.entries[place]] = READ
        self.num_entries = 0
        self.was_cleared = False
        self.new_roots.clear()
        self.lost_roots.clear()

    def log_root(self, root: i64, extra_keys: tuple[object, ...]) -> None:
        """Log a new root for these extra keys."""
        self.new_roots[int(root)] = extra_keys

    def log_lost_root(self, root: i64) -> None:
        """Log that a root was forgotten, so that no prompt can reach its descendants."""
        if self.new_roots.pop(int(root), None) is None:
            self.lost_roots.append(int(root))

    def clear(self) -> None:
        """Log that all contents and roots were removed."""
        clear_i32(self.marks)
        self.num_entries = 0
        self.was_cleared = True
        self.new_roots.clear()
        self.lost_roots.clear()

    def enlarge(self, num_blocks: int) -> "ContentLog":
        """Return a log with the same entries and room for `num_blocks` blocks. Do not use this one afterwards.

        O(num_blocks).
        """
        larger = ContentLog(num_blocks)
        larger.marks = grown_i32(self.marks, num_blocks)
        for place in range(self.num_entries):
            larger.entries[place] = self.entries[place]
        larger.num_entries = self.num_entries
        larger.was_cleared = self.was_cleared
        larger.new_roots = self.new_roots
        larger.lost_roots = self.lost_roots
        return larger
