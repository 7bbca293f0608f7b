"""Which contents came and went since the log was last read, in order: what KV events are made of."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NULL_BLOCK
from ..arrays import clear_i32, grown_i32, zeros_i32, zeros_i64
from .rows import Rings

#: Of four entries a block at least half are void when the log is full, so that closing the gaps costs O(1) an entry.
ENTRIES_A_BLOCK: Final = 4
FEWEST_ENTRIES: Final = 16
#: `told` of a block whose content was read already.
READ: Final[i32] = -1


class ContentLog:
    """An entry for each content whose first computed block came (its block id), and whose last one went (minus its id).

    A content that came and went between two readings leaves no entry. Of equal blocks one is logged; when it goes,
    another takes its place without an entry. The arrays are made once: no operation asks for memory. At most as many
    contents can come as there are blocks, and only what was read before can go, so the log cannot overflow.
    """

    def __init__(self, num_blocks: int) -> None:
        #: By block: 0 not logged, 1 + the place of its entry, or READ.
        self.told = zeros_i32(num_blocks)
        self.entries = zeros_i64(max(ENTRIES_A_BLOCK * num_blocks, FEWEST_ENTRIES))
        self.num_entries: i64 = 0
        #: Whether all content was forgotten at once since the last reading; the entries came after that.
        self.was_cleared = False
        #: Roots that were made, by content id, and known ones that were forgotten.
        self.new_roots: dict[int, tuple[object, ...]] = {}
        self.lost_roots: list[int] = []

    def came(self, block: i64, rings: Rings) -> None:
        """The keys and values of an indexed block are there. O(1), or O(equal blocks still to be computed)."""
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
        """A block leaves the index. heir: a block of the ring that it was in, 0 for none. O(1), as `came`."""
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
        """Drop void entries. O(entries)."""
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
        """Return the entries, a copy without gaps; the log stays as it is until `set_read`. O(entries)."""
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
        """What `read` gave is known now, and the log is empty. It asks for no memory. O(entries)."""
        for place in range(self.num_entries):
            if self.entries[place] > 0:
                self.told[self.entries[place]] = READ
        self.num_entries = 0
        self.was_cleared = False
        self.new_roots.clear()
        self.lost_roots.clear()

    def root_made(self, root: i64, extra_keys: tuple[object, ...]) -> None:
        """A root that stands for these extra keys."""
        self.new_roots[int(root)] = extra_keys

    def root_lost(self, root: i64) -> None:
        """No prompt reaches what comes after this root any more."""
        if self.new_roots.pop(int(root), None) is None:
            self.lost_roots.append(int(root))

    def clear(self) -> None:
        """All content and all roots are forgotten."""
        clear_i32(self.told)
        self.num_entries = 0
        self.was_cleared = True
        self.new_roots.clear()
        self.lost_roots.clear()

    def grown(self, num_blocks: int) -> "ContentLog":
        """The same with room for blocks up to `num_blocks - 1`; this one is to be used no more. O(num_blocks)."""
        larger = ContentLog(num_blocks)
        larger.told = grown_i32(self.told, num_blocks)
        for place in range(self.num_entries):
            larger.entries[place] = self.entries[place]
        larger.num_entries = self.num_entries
        larger.was_cleared = self.was_cleared
        larger.new_roots = self.new_roots
        larger.lost_roots = self.lost_roots
        return larger
