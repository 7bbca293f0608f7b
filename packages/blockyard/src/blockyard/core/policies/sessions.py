"""Sessions: which blocks only one session has used, and which sessions are over."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvariantError
from ..arrays import clear_i64, grown_i64, zeros_i64
from .parts.lists import BlockLists

#: Owners of blocks that belong to no session: not used yet; used by several sessions or by requests without one.
NO_SESSION: Final[i64] = 0
SHARED: Final[i64] = -1
#: A tag is serial * 2**20 + slot. Serials are drawn anew for each sequence of a session.
SLOT_MASK: Final[i64] = 1048575
SLOT_SPAN: Final[i64] = 1048576
FIRST_SLOTS: Final[i64] = 64


class Sessions:
    """Up to `max_sessions` sessions, and for each block the tag of the sequence that used it last.

    A block belongs to a session while only that session has used it. A block used by two sessions, or by a request
    without one, is shared, and no hint affects it. So all blocks after a block of a session belong to the session. The
    newest sequence of a session is current; blocks that only earlier sequences used are old.

    8 bytes a block and about 100 bytes a session. All operations are O(1) unless they say otherwise.
    """

    def __init__(self, num_blocks: int, max_sessions: int) -> None:
        self.max_sessions: i64 = max_sessions
        self.num_slots: i64 = min(FIRST_SLOTS, self.max_sessions)
        slots = int(self.num_slots)
        #: 1 for a session that is over.
        self._is_over = zeros_i64(slots)
        #: The tags of the first and of the latest sequence of the session in each slot; 0 in a free one.
        self._first = zeros_i64(slots)
        self._latest = zeros_i64(slots)
        self._free = zeros_i64(slots)
        self._num_free: i64 = 0
        self._offer(0)
        self._num_drawn: i64 = 0
        #: Slots in use, least recently used first.
        self._recent = BlockLists(1, slots)
        self._owner = zeros_i64(num_blocks)

    def _offer(self, first: i64) -> None:
        """Mark the slots from `first` on as free. The lowest is used first."""
        slot = self.num_slots - 1
        while slot >= first:
            self._free[self._num_free] = slot
            self._num_free += 1
            slot -= 1

    @property
    def num_sessions(self) -> i64:
        """How many sessions are known."""
        return self.num_slots - self._num_free

    # Slots.

    def make_room(self) -> bool:
        """Make sure that a slot is free, allocating memory if needed. Return False if `max_sessions` are known."""
        if self._num_free > 0:
            return True
        if self.num_slots >= self.max_sessions:
            return False
        slots = int(min(2 * self.num_slots, self.max_sessions))
        is_over = grown_i64(self._is_over, slots)
        first = grown_i64(self._first, slots)
        latest = grown_i64(self._latest, slots)
        free = grown_i64(self._free, slots)
        self._recent.grow(slots)
        self._is_over = is_over
        self._first = first
        self._latest = latest
        self._free = free
        old = self.num_slots
        self.num_slots = slots
        self._offer(old)
        return True

    def open(self) -> i64:
        """Return a slot for a new session; there must be a free one."""
        self._num_free -= 1
        slot = self._free[self._num_free]
        self._recent.append(0, slot)
        self._first[slot] = 0
        return slot

    def close(self, slot: i64) -> None:
        """Forget a session. Its blocks belong to none, and are shared when they are used again."""
        self.set_over(slot, False)
        self._first[slot] = 0
        self._latest[slot] = 0
        self._recent.remove(slot)
        self._free[self._num_free] = slot
        self._num_free += 1

    def oldest(self) -> i64:
        """Return the least recently used session; there must be one."""
        return self._recent.head(0)

    def begin(self, slot: i64) -> i64:
        """Begin a new sequence of a session. Return its tag."""
        self._num_drawn += 1
        tag = self._num_drawn * SLOT_SPAN + slot
        if self._first[slot] == 0:
            self._first[slot] = tag
        self._latest[slot] = tag
        return tag

    def slot_of(self, tag: i64) -> i64:
        """Return the slot of the session that a tag belongs to; -1 if it has none or its session was forgotten."""
        if tag <= 0:
            return -1
        slot = tag & SLOT_MASK
        return slot if self._first[slot] != 0 and tag >= self._first[slot] else -1

    def number(self, slot: i64) -> i64:
        """Return the tag of the session's first sequence, which identifies the session."""
        return self._first[slot]

    def is_over(self, slot: i64) -> bool:
        """Return whether a session is over."""
        return self._is_over[slot] != 0

    def is_latest(self, tag: i64) -> bool:
        """Return whether a tag belongs to the newest sequence of its session."""
        return tag > 0 and self._latest[tag & SLOT_MASK] == tag

    # Hints.

    def set_over(self, slot: i64, is_over: bool) -> None:
        """Set whether the session is over."""
        self._is_over[slot] = i64(1) if is_over else i64(0)

    def touch(self, slot: i64) -> None:
        """Make the session the most recently used one."""
        self._recent.remove(slot)
        self._recent.append(0, slot)

    # Blocks.

    def owner(self, block: i64) -> i64:
        """Return the tag of the sequence that used `block` last, or `NO_SESSION` or `SHARED`."""
        return self._owner[block]

    def mark(self, block: i64, tag: i64) -> None:
        """Record that a sequence which used `block` ends. `tag` is 0 for a sequence without a session."""
        if block >= i64(len(self._owner)):
            # The pool grew while its policy took no hints.
            return
        owner = self._owner[block]
        slot = self.slot_of(tag)
        if slot < 0:
            self._owner[block] = SHARED
        elif owner == NO_SESSION:
            self._owner[block] = tag
        elif self.slot_of(owner) != slot:
            self._owner[block] = SHARED
        elif tag > owner:
            self._owner[block] = tag

    def forget_block(self, block: i64) -> None:
        """Forget the session of a block that is uncached."""
        if block < i64(len(self._owner)):
            self._owner[block] = NO_SESSION

    def forget_blocks(self) -> None:
        """Forget the sessions of all blocks. O(num_blocks)."""
        clear_i64(self._owner)

    def make_block_room(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1."""
        if num_blocks > len(self._owner):
            self._owner = grown_i64(self._owner, num_blocks)

    def room_for(self, num_blocks: int) -> vec[i64]:
        """Return a copy of the owners with room for `num_blocks` blocks, for `move_into`."""
        return grown_i64(self._owner, num_blocks)

    def move_into(self, owner: vec[i64]) -> None:
        """Replace the array of owners."""
        self._owner = owner

    # Checks.

    def slots(self) -> list[int]:
        """Return the slots in use, least recently used first."""
        return self._recent.blocks(0)

    def check(self) -> None:
        """Verify that slots and tags agree. O(num_blocks + sessions). Raises `InvariantError`."""
        self._recent.check()
        used = set(self.slots())
        if len(used) != self.num_sessions or self.num_sessions > self.max_sessions:
            raise InvariantError(
                f"sessions: {len(used)} are in use, {self.num_sessions} are counted, of at most {self.max_sessions}"
            )
        for slot in range(self.num_slots):
            if (self._first[slot] != 0) != (int(slot) in used) or self._latest[slot] < self._first[slot]:
                raise InvariantError(f"sessions: slot {slot} has tags {self._first[slot]} to {self._latest[slot]}")
            if self._is_over[slot] != 0 and int(slot) not in used:
                raise InvariantError(f"sessions: slot {slot} is marked as over, but has no session")
        for block in range(i64(len(self._owner))):
            tag = self._owner[block]
            if tag > 0 and self.slot_of(tag) >= 0 and tag > self._latest[tag & SLOT_MASK]:
                raise InvariantError(f"sessions: block {block} has tag {tag}, which was never given out")
