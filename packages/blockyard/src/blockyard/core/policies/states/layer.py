"""This layer keeps states, and what they need, from a policy that decides about all other blocks."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from ..base import EvictionPolicy, Layer
from .shelf import NONE, StateShelf

#: Where a block is: not idle here, the policy's, or kept from it.
ELSEWHERE: Final[i64] = 0
INNER: Final[i64] = 1
KEPT: Final[i64] = 2


class StateLayer(Layer):
    """The policy is asked first, about keys and values that no state stands behind. Then a state goes, the first in
    the book's order, with the keys and values that only it needed; and last what is the latest of an output that grows.

    O(1) an idle block besides the policy. What a state that goes costs does not grow with the states that stay, but for
    a logarithm and those right below it.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, shelf: StateShelf) -> None:
        super().__init__(policy, num_blocks)
        self.shelf = shelf
        self.book = shelf.book
        self.num_inner: i64 = 0
        self.num_kept: i64 = 0
        #: Blocks of states that went when their session was over.
        self.num_over: i64 = 0
        self._where = zeros_i64(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._depth = zeros_i64(num_blocks)
        #: Where the search for blocks that nothing else gives goes on.
        self._cursor: i64 = 0
        shelf.grow(num_blocks)

    def passes(self, block: i64) -> bool:
        """Return whether the policy knows the block as idle."""
        return self._where[block] == INNER

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` is idle from now on."""
        self._key[block] = key
        self._depth[block] = depth
        if self.shelf.is_needed(block):
            self._where[block] = KEPT
            self.num_kept += 1
            self._note_busy(block, False)
        else:
            self._put_in(block)

    def keep_run(self, blocks: vec[i64], count: i64, keys: vec[i64], depths: vec[i64]) -> i64:
        """Take note of those of the first `count` of `blocks`, which are idle from now on, that a state needs.

        keys: of all blocks. depths: of all blocks, 1 is written for each that is noted. Returns how many there are.
        """
        shelf = self.shelf
        part_of = shelf.part_of
        node_of = shelf.node_of
        num_states = self.book.tree.num_states
        where = self._where
        own_keys = self._key
        own_depths = self._depth
        last = NONE
        kept: i64 = 0
        for place in range(count):
            block = blocks[place]
            number = part_of[block]
            # What no state stands behind is known at once.
            if number != NONE or (num_states[node_of[block]] > 0 and shelf.is_needed(block)):
                where[block] = KEPT
                own_keys[block] = keys[block]
                own_depths[block] = 0
                depths[block] = 1
                kept += 1
                if number != last and number > NONE:
                    self.book.set_busy(number, False)
                last = number
        self.num_kept += kept
        return kept

    def unkeep_run(self, blocks: vec[i32], start: i64, count: i64, depths: vec[i64]) -> i64:
        """Take note of those of `blocks[start:start + count]` that are kept from the policy: they are idle no longer.

        depths: 0 is written for each. Returns how many there were.
        """
        part_of = self.shelf.part_of
        where = self._where
        last = NONE
        taken: i64 = 0
        for place in range(start, start + count):
            block = i64(blocks[place])
            if where[block] == KEPT:
                where[block] = ELSEWHERE
                depths[block] = 0
                taken += 1
                number = part_of[block]
                if number != last and number > NONE:
                    self.book.set_busy(number, True)
                last = number
        self.num_kept -= taken
        return taken

    def move(
        self, blocks: vec[i32], start: i64, count: i64, number: i64, is_idle: bool, key: i64, depths: vec[i64]
    ) -> bool:
        """Take note that `blocks[start:start + count]` are idle now, or are no longer; False, and nothing has changed,
        unless all are parts of state `number`, and were not, or were kept.

        key: of the first one; the others have theirs. depths: as in `keep_run`.
        """
        where = self._where
        part_of = self.shelf.part_of
        before, after, depth = (ELSEWHERE, KEPT, 1) if is_idle else (KEPT, ELSEWHERE, 0)
        for place in range(start, start + count):
            if part_of[i64(blocks[place])] != number or where[i64(blocks[place])] != before:
                return False
        for place in range(start, start + count):
            where[i64(blocks[place])] = after
            depths[i64(blocks[place])] = depth
        self.num_kept += count if is_idle else -count
        self._key[i64(blocks[start])] = key
        return True

    def _put_in(self, block: i64) -> None:
        self._where[block] = INNER
        self.num_inner += 1
        self.policy.insert(block, self._key[block], self._depth[block])

    def _note_busy(self, block: i64, is_busy: bool) -> None:
        number = self.shelf.part_of[block]
        if number > NONE:
            self.book.set_busy(number, is_busy)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        where = self._where[block]
        self._where[block] = ELSEWHERE
        if where == KEPT:
            self.num_kept -= 1
            self._note_busy(block, True)
        else:
            self.num_inner -= 1
            self.policy.remove(block)

    def evict(self) -> i64:
        """Return the policy's choice; a state goes where the policy has none."""
        while self.num_inner == 0:
            self._give_up()
        block = self.policy.evict()
        if not 0 < block < len(self._where) or self._where[block] == ELSEWHERE:
            return block
        if self._where[block] == KEPT:
            raise ValueError(f"block {block} is of a state, or under one, and not the policy's to choose")
        self._where[block] = ELSEWHERE
        self.num_inner -= 1
        return block

    def _give_up(self) -> None:
        """Let the state go that the book names; without one, whatever is idle."""
        number = self.book.lowest()
        if number != NONE:
            state = self.book.state(number)
            self.num_over += i64(len(state.parts)) if state.is_over else 0
            self.drop(number)
            return
        if self.num_kept == 0:
            raise ValueError("no block is idle")
        while self._where[self._cursor] != KEPT:
            self._cursor = (self._cursor + 1) % i64(len(self._where))
        self._release(self._cursor)

    def drop(self, number: i64) -> None:
        """A state goes, and what only it needed is the policy's."""
        state = self.book.state(number)
        self.book.drop(number)
        for block in self.shelf.no_longer_needed(state):
            if self._where[i64(block)] == KEPT:
                self._release(i64(block))

    def _release(self, block: i64) -> None:
        self.num_kept -= 1
        self._put_in(block)

    def gone(self, block: i64) -> None:
        """The content of `block` is gone; a state goes with any part of it."""
        number = self.shelf.part_of[block]
        self.shelf.part_of[block] = NONE
        self.shelf.take(block)
        if number > NONE and self.book.is_kept(number):
            self.drop(number)
        super().gone(block)

    def clear(self) -> None:
        """The cache was reset: no state is there."""
        clear_i64(self._where)
        self.num_inner = 0
        self.num_kept = 0
        self.book.drop_all()
        self.shelf.clear()
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1, also where the policy raises; for MemoryError nothing has grown."""
        where = grown_i64(self._where, num_blocks)
        key = grown_i64(self._key, num_blocks)
        depth = grown_i64(self._depth, num_blocks)
        self.shelf.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._where, self._key, self._depth = where, key, depth
        if failure is not None:
            raise failure

    def check(self) -> None:
        """The policy knows no block that a state needs; counts agree. O(blocks). Raises `InvariantError`."""
        self.shelf.check()
        self.book.check()
        inner, kept = 0, 0
        for block in range(i64(len(self._where))):
            inner += 1 if self._where[block] == INNER else 0
            kept += 1 if self._where[block] == KEPT else 0
            number = self.shelf.part_of[block]
            if number > NONE and not self.book.is_kept(number):
                raise InvariantError(f"states: block {block} is a part of state {number}, which went")
            if number > NONE and self._where[block] == INNER:
                raise InvariantError(f"states: block {block} is a part of state {number}, and the policy's to choose")
        if inner != self.num_inner or kept != self.num_kept:
            raise InvariantError(f"states: {inner} blocks are the policy's and {kept} kept; the counts disagree")
        self.policy.check()
