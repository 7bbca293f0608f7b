"""Hints around a policy: what is over goes first; what comes back is kept, unless that is later than others may."""

from typing import Final

from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i32, grown_float, grown_i32, grown_i64, zeros_float, zeros_i32, zeros_i64
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap, order_of
from ..parts.lists import BlockLists
from .sessions import BACK, OVER, UNKNOWN, Sessions

#: What a block is here: held, idle and known to the policy, or idle and kept from it.
NONE: Final[i64] = 0
HELD: Final[i32] = 0
INNER: Final[i32] = 1
KEPT: Final[i32] = 2
#: No longer idle, and evicted on a hint's word unless it is put back.
TAKEN: Final[i32] = 3


class Hinted(Layer):
    """The policy inside decides, but for blocks of sessions of which something was said.

    - A session that is over: its blocks go before all others, the session that was over first first, its blocks from
      the last to the first.
    - A session that comes back: its blocks are kept, whatever the policy would choose, until it does. But when it comes
      back later than the policy's choice may be wanted, they go first, of the session that comes back last: least
      recently used takes a block that has been idle for some time as wanted in as long a time, and so does this. When
      its time is over they are the policy's again, as blocks that became idle at that moment if it had chosen them
      meanwhile.
    - Every other block, and what several sessions use: the policy's own.

    A policy that says `needs_hints` gets the hints instead, and chooses itself.

    Each session has two lists of idle blocks, in the order in which they became idle: list 2 s has what slot s holds
    now, list 2 s + 1 what it held before. A sequence is let go from its last block to its first, so the head is a leaf.

    sessions: what was said, changed by others, who then call `restate`. idle: blocks that `policy` knows as idle.
    O(log sessions) amortised an event on top of the policy's own; 36 bytes a block, about 80 a session.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, sessions: Sessions, idle: list[int]) -> None:
        super().__init__(policy, num_blocks)
        self.sessions = sessions
        self.tells = policy.needs_hints()
        slots = int(sessions.num_slots)
        self._lists = BlockLists(2 * slots, num_blocks)
        self._where = zeros_i32(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._depth = zeros_i32(num_blocks)
        #: Sessions with idle blocks: those that are over, the first one first, and others, the one back last first.
        self._over = BlockHeap(slots)
        self._returning = BlockHeap(slots)
        self.num_slots: i64 = slots
        self._num_inner: i64 = 0
        self._num_kept: i64 = 0
        #: The policy's latest choice, while what comes back later goes first.
        self._chosen: i64 = NONE
        #: The logical time at which each idle block became idle.
        self._since = zeros_float(num_blocks)
        #: Blocks that were evicted because of a hint.
        self.num_evicted: i64 = 0
        for block in idle:
            self._where[i64(block)] = INNER
            self._num_inner += 1

    # Told by the pool.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self._where[block] = INNER
        self._num_inner += 1
        self._key[block] = key
        self._depth[block] = i32(depth)
        self._since[block] = self.sessions.now
        self._link(block)
        self.policy.insert(block, key, depth)
        if self.tells:
            self._tell(block)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived. The policy knows of it unless it had chosen it."""
        is_inner = self._where[block] == INNER
        self._leave(block)
        if is_inner:
            self.policy.remove(block)

    def _leave(self, block: i64) -> None:
        if self._where[block] == INNER:
            self._num_inner -= 1
        elif self._where[block] == KEPT:
            self._num_kept -= 1
        if block == self._chosen:
            self._chosen = NONE
        self._where[block] = HELD
        self._unlink(block)

    # Choosing.

    def evict(self) -> i64:
        """What is over; else the policy's choice of what no session comes back for, or what comes back still later."""
        self.require_told()
        if self._over.num_items > 0 and not self.tells:
            return self._take(self._first_of(self._over.first()))
        if self._chosen != NONE and self._is_expected(self._chosen):
            self._chosen = NONE
        while self._chosen == NONE and self._num_inner > 0:
            block = self.policy.evict()
            if not 0 < block < len(self._where) or self._where[block] != INNER:
                return self._refused(block)
            if self.tells:
                self._leave(block)
                return block
            self._keep(block)
        if self._returning.num_items > 0 and (self._chosen == NONE or self._returns_later()):
            return self._take(self._first_of(self._returning.first()))
        block = self._chosen
        if block == NONE:
            raise ValueError("no block is idle")
        self._leave(block)
        return block

    def _keep(self, block: i64) -> None:
        """The policy has chosen `block`, and knows it no longer: it is the choice, unless it is wanted again."""
        self._where[block] = KEPT
        self._num_inner -= 1
        self._num_kept += 1
        if not self._is_expected(block):
            self._chosen = block

    def _returns_later(self) -> bool:
        """Return whether the session that comes back last does so later than the policy's choice may be wanted.

        Least recently used takes what was used long ago as wanted in as long a time; so it is taken here. Where no time
        has passed, the choice goes.
        """
        now = self.sessions.now
        idle = now - self._since[self._chosen]
        return idle > 0.0 and self.sessions.back_at[self._returning.first()] - now > idle

    def _refused(self, block: i64) -> i64:
        """A choice that is not idle is left to who asked. A kept block is idle, and not the policy's: ValueError."""
        if 0 < block < len(self._where) and self._where[block] == KEPT:
            raise ValueError(f"block {block} was chosen before")
        return block

    def _first_of(self, slot: i64) -> i64:
        """Return what goes first of a session: what it holds no more, then its last block."""
        old = self._lists.head(2 * slot + 1)
        return old if old >= 0 and self.sessions.state[slot] == OVER else self._lists.head(2 * slot)

    def _take(self, block: i64) -> i64:
        """`block` goes because of a hint."""
        if self._where[block] == INNER:
            self.tell_gone(block)
        self._leave(block)
        self._where[block] = TAKEN
        return block

    def spared(self, block: i64) -> None:
        if self._where[block] == TAKEN:
            self._where[block] = HELD
        super().spared(block)

    def gone(self, block: i64) -> None:
        """The content of `block` is gone: taken on a hint's word, or lost otherwise."""
        if self._where[block] == TAKEN:
            self._where[block] = HELD
            self.num_evicted += 1
        super().gone(block)

    # Sessions.

    def _list_of(self, block: i64, slot: i64) -> i64:
        return 2 * slot + (0 if self.sessions.is_latest(self.sessions.owner(block)) else 1)

    def _slot_of(self, block: i64) -> i64:
        """Return the slot in whose lists a block is; -1 for none."""
        return self._lists.list_of(block) >> 1

    def _link(self, block: i64) -> None:
        slot = self.sessions.slot_of(self.sessions.owner(block))
        if slot >= 0:
            self._lists.append(self._list_of(block, slot), block)
            if self.sessions.state[slot] != UNKNOWN:
                self._rank(slot, False)

    def _unlink(self, block: i64) -> None:
        slot = self._slot_of(block)
        if slot >= 0:
            self._lists.remove(block)
            if self.sessions.state[slot] != UNKNOWN:
                self._rank(slot, False)

    def _rank(self, slot: i64, anew: bool) -> None:
        """Have the session among those that are over or come back, if it is one of them and has idle blocks."""
        state = self.sessions.state[slot]
        held = self._lists.length[2 * slot] > 0
        is_over = state == OVER and (held or self._lists.length[2 * slot + 1] > 0)
        is_back = state == BACK and held
        if self._over.holds(slot) != is_over:
            if is_over:
                self._over.insert(slot, 0)
            else:
                self._over.remove(slot)
        if self._returning.holds(slot) and (anew or not is_back):
            self._returning.remove(slot)
        if is_back and not self._returning.holds(slot):
            self._returning.insert(slot, -order_of(self.sessions.back_at[slot]))

    def _is_expected(self, block: i64) -> bool:
        slot = self._slot_of(block)
        return slot >= 0 and self.sessions.state[slot] == BACK and self.sessions.is_latest(self.sessions.owner(block))

    def restate(self, slot: i64) -> None:
        """What is known of a session has changed. O(its idle blocks) where some were kept."""
        self._rank(slot, True)
        if self.tells:
            self._tell_all(slot)
        elif self._num_kept > 0 and self.sessions.state[slot] == UNKNOWN:
            self._give_back(2 * slot)
            self._give_back(2 * slot + 1)

    def _give_back(self, number: i64) -> None:
        """What was kept of a list is the policy's again."""
        block = self._lists.head(number)
        while block >= 0:
            following = self._lists.after(block)
            if self._where[block] == KEPT and block != self._chosen:
                self._where[block] = INNER
                self._num_kept -= 1
                self._num_inner += 1
                self.policy.insert(block, self._key[block], i64(self._depth[block]))
            block = following

    def supersede(self, slot: i64) -> None:
        """Nothing is known of the session, and a new sequence of it begins: what it held is old. `begin` follows."""
        self._lists.splice(2 * slot, 2 * slot + 1)

    def forget(self, slot: i64) -> None:
        """Nothing is known of the session, and it is forgotten next. O(its idle blocks)."""
        for number in range(2 * slot, 2 * slot + 2):
            while self._lists.length[number] > 0:
                self._lists.pop(number)

    # A policy that chooses by hints itself.

    def _tell(self, block: i64) -> None:
        slot = self._slot_of(block)
        if slot >= 0 and self.sessions.state[slot] != UNKNOWN:
            self._tell_state(block, slot)

    def _tell_state(self, block: i64, slot: i64) -> None:
        state = self.sessions.state[slot]
        if state == OVER:
            self.policy.hinted(block, True, None)
        elif state == BACK and self.sessions.is_latest(self.sessions.owner(block)):
            self.policy.hinted(block, False, self.sessions.back_at[slot])
        else:
            self.policy.hinted(block, False, None)

    def _tell_all(self, slot: i64) -> None:
        for number in range(2 * slot, 2 * slot + 2):
            block = self._lists.head(number)
            while block >= 0:
                following = self._lists.after(block)
                self._tell_state(block, slot)
                block = following

    # The size, and checks.

    def clear(self) -> None:
        """No block is idle any more, nor any session's. What was said stays."""
        self._lists.clear()
        self._over.clear()
        self._returning.clear()
        clear_i32(self._where)
        self._num_inner = 0
        self._num_kept = 0
        self._chosen = NONE
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1, also where the policy raises; for MemoryError nothing has grown."""
        where = grown_i32(self._where, num_blocks)
        key = grown_i64(self._key, num_blocks)
        depth = grown_i32(self._depth, num_blocks)
        since = grown_float(self._since, num_blocks)
        owner = self.sessions.room_for(num_blocks)
        self._lists.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._where = where
        self._key = key
        self._depth = depth
        self._since = since
        self.sessions.move_into(owner)
        if failure is not None:
            raise failure

    def grow_slots(self) -> None:
        """Make room for as many sessions as have a slot now."""
        slots = int(self.sessions.num_slots)
        self._lists.grow_lists(2 * slots)
        self._over.grow(slots)
        self._returning.grow(slots)
        self.num_slots = slots

    def check(self) -> None:
        """Lists and counts agree with what is known of sessions, which others check. O(num_blocks + sessions).

        Raises `InvariantError`.
        """
        self._lists.check()
        self._over.check()
        self._returning.check()
        self._check_counts()
        linked = 0
        for slot in self.sessions.slots():
            for number in (2 * slot, 2 * slot + 1):
                blocks = self._lists.blocks(i64(number))
                linked += len(blocks)
                for block in blocks:
                    self._check_linked(i64(block), i64(slot), i64(number))
            self._check_rank(i64(slot))
        if linked != sum(1 for block in range(len(self._where)) if self._slot_of(i64(block)) >= 0):
            raise InvariantError("hints: a block is in a list of a slot without a session")
        self.policy.check()

    def _check_counts(self) -> None:
        num_inner = sum(1 for where in self._where if where == INNER)
        num_kept = sum(1 for where in self._where if where == KEPT)
        if num_inner != self._num_inner or num_kept != self._num_kept:
            raise InvariantError(
                f"hints: {num_inner} idle blocks are the policy's and {num_kept} are kept; counted {self._num_inner} "
                f"and {self._num_kept}"
            )

    def _check_linked(self, block: i64, slot: i64, number: i64) -> None:
        if (self._where[block] != INNER and self._where[block] != KEPT) or self._slot_of(block) != slot:
            raise InvariantError(f"hints: block {block} is in list {number}, and held or another session's")
        if self.sessions.slot_of(self.sessions.owner(block)) != slot or self._list_of(block, slot) != number:
            raise InvariantError(f"hints: block {block} is in list {number}, which is not its session's")

    def _check_rank(self, slot: i64) -> None:
        state = self.sessions.state[slot]
        held = self._lists.length[2 * slot] > 0
        is_over = state == OVER and (held or self._lists.length[2 * slot + 1] > 0)
        if self._over.holds(slot) != is_over or self._returning.holds(slot) != (state == BACK and held):
            raise InvariantError(f"hints: session {slot} is in state {state}, and not where those are")
