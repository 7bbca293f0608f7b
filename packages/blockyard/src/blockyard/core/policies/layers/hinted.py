"""The layer for hints: blocks of sessions that are over are evicted first."""

from typing import Final

from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i32, grown_i32, zeros_i32
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap
from ..parts.lists import BlockLists
from ..sessions import Sessions
from ..stack import EvictionStack

#: A block is held, idle and known to the policy, or named for eviction because its session is over.
HELD: Final[i32] = 0
INNER: Final[i32] = 1
TAKEN: Final[i32] = 2


class Hinted(Layer):
    """Evicts the idle blocks of sessions that are over first; otherwise `policy` chooses.

    The session that ended first comes first. Within a session, old blocks come first, then those of its newest
    sequence, from the last block to the first.

    Each session has two lists of idle blocks, oldest first: list 2 s has the current blocks of slot s, list 2 s + 1 its
    old ones. A sequence is freed from its last block to its first, so the head is a leaf. O(log sessions) amortised per
    event on top of the policy's own cost; 16 bytes a block, about 50 a session.

    Args:
        policy: the inner policy.
        num_blocks: blocks of the pool.
        sessions: the sessions; whoever changes them calls `on_session_change`.
        idle: blocks that `policy` knows as idle.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, sessions: Sessions, idle: list[int]) -> None:
        super().__init__(policy, num_blocks)
        self.sessions = sessions
        slots = int(sessions.num_slots)
        self._lists = BlockLists(2 * slots, num_blocks)
        self._where = zeros_i32(num_blocks)
        #: Sessions that are over and have idle blocks, in the order in which they ended.
        self._over = BlockHeap(slots)
        self._num_slots: i64 = slots
        #: Blocks that were evicted because their session was over.
        self.num_evicted: i64 = 0
        for block in idle:
            self._where[i64(block)] = INNER

    # What happens to blocks.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        self._where[block] = INNER
        self._link(block)
        self.policy.insert(block, key, depth)

    def remove(self, block: i64) -> None:
        self._leave(block)
        self.policy.remove(block)

    def _leave(self, block: i64) -> None:
        self._where[block] = HELD
        self._unlink(block)

    # Choosing.

    def evict(self) -> i64:
        self.require_sound()
        if self._over.num_items > 0:
            return self._take(self._first_of(self._over.first()))
        block = self.policy.evict()
        if 0 < block < len(self._where) and self._where[block] == INNER:
            self._leave(block)
        return block

    def _first_of(self, slot: i64) -> i64:
        """Return the block of a session to evict first: an old one if there is any."""
        old = self._lists.head(2 * slot + 1)
        return old if old >= 0 else self._lists.head(2 * slot)

    def _take(self, block: i64) -> i64:
        self.remove_unchosen(block)
        self._leave(block)
        self._where[block] = TAKEN
        return block

    def note_revived(self, block: i64) -> None:
        if self._where[block] == TAKEN:
            self._where[block] = HELD
        super().note_revived(block)

    def uncache(self, block: i64) -> None:
        if self._where[block] == TAKEN:
            self._where[block] = HELD
            self.num_evicted += 1
        super().uncache(block)

    # Sessions.

    def uses_sessions(self) -> bool:
        return True

    def num_hinted(self) -> i64:
        return self.num_evicted

    def _list_of(self, block: i64, slot: i64) -> i64:
        return 2 * slot + (0 if self.sessions.is_latest(self.sessions.owner(block)) else 1)

    def _slot_of(self, block: i64) -> i64:
        """Return the slot in whose lists a block is; -1 for none."""
        return self._lists.list_of(block) >> 1

    def _link(self, block: i64) -> None:
        slot = self.sessions.slot_of(self.sessions.owner(block))
        if slot >= 0:
            self._lists.append(self._list_of(block, slot), block)
            self._rank(slot)

    def _unlink(self, block: i64) -> None:
        slot = self._slot_of(block)
        if slot >= 0:
            self._lists.remove(block)
            self._rank(slot)

    def _has_idle(self, slot: i64) -> bool:
        return self._lists.length[2 * slot] > 0 or self._lists.length[2 * slot + 1] > 0

    def _rank(self, slot: i64) -> None:
        """Put a session in the ranking if it is over and has idle blocks, else remove it. O(log sessions)."""
        is_over = self.sessions.is_over(slot) and self._has_idle(slot)
        if self._over.holds(slot) != is_over:
            if is_over:
                self._over.insert(slot, 0)
            else:
                self._over.remove(slot)

    def on_session_change(self, sessions: Sessions, slot: i64) -> None:  # noqa: ARG002
        self._rank(slot)

    def on_session_begin(self, slot: i64) -> None:
        self._lists.splice(2 * slot, 2 * slot + 1)

    def on_session_end(self, slot: i64) -> None:
        for number in range(2 * slot, 2 * slot + 2):
            while self._lists.length[number] > 0:
                self._lists.pop(number)

    # The size, and checks.

    def clear(self) -> None:
        """Remove all idle blocks; sessions that are over stay so."""
        self._lists.clear()
        self._over.clear()
        clear_i32(self._where)
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Grow, also if the policy raises; after a MemoryError nothing has grown."""
        where = grown_i32(self._where, num_blocks)
        owner = self.sessions.room_for(num_blocks)
        self._lists.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._where = where
        self.sessions.move_into(owner)
        if failure is not None:
            raise failure

    def make_session_room(self, num_slots: i64) -> None:
        if num_slots > self._num_slots:
            self._lists.grow_lists(2 * int(num_slots))
            self._over.grow(int(num_slots))
            self._num_slots = num_slots

    def check(self) -> None:
        """Verify that the lists agree with the sessions, which have a check of their own. O(num_blocks + sessions)."""
        self._lists.check()
        self._over.check()
        linked = 0
        for slot in self.sessions.slots():
            for number in (2 * slot, 2 * slot + 1):
                blocks = self._lists.blocks(i64(number))
                linked += len(blocks)
                for block in blocks:
                    self._check_linked(i64(block), i64(slot), i64(number))
            if self._over.holds(i64(slot)) != (self.sessions.is_over(i64(slot)) and self._has_idle(i64(slot))):
                raise InvariantError(f"hints: session {slot} must be ranked exactly if it is over and has idle blocks")
        if linked != sum(1 for block in range(len(self._where)) if self._slot_of(i64(block)) >= 0):
            raise InvariantError("hints: a block is in the list of a slot that has no session")
        self.policy.check()

    def _check_linked(self, block: i64, slot: i64, number: i64) -> None:
        if self._where[block] != INNER or self._slot_of(block) != slot:
            raise InvariantError(f"hints: block {block} is in list {number}, but is held or another session's")
        if self.sessions.slot_of(self.sessions.owner(block)) != slot or self._list_of(block, slot) != number:
            raise InvariantError(f"hints: block {block} is in list {number}, which is not a list of its session")


def follow_sessions(stack: EvictionStack, sessions: Sessions) -> None:
    """Give a stack the sessions, and a layer for hints about them if its policy takes hints. O(num_blocks).

    Raises `PolicyError`, and MemoryError; nothing has changed then.
    """
    if stack.takes_hints():
        stack.add_inside(Hinted(stack.innermost(), stack.capacity(), sessions, stack.idle_inside()))
    stack.sessions = sessions
