"""The layer of the eviction stack that withholds checkpoints, and the blocks under them, from the policy."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from ..base import EvictionPolicy, Layer
from ..sessions import Sessions
from .block_map import NONE
from .prefix_tree import NO_CHECKPOINT
from .registry import CheckpointRegistry

#: Where a block is: not idle, known to the policy as idle, or idle and kept from the policy.
ELSEWHERE: Final[i64] = 0
PASSED: Final[i64] = 1
NEEDED: Final[i64] = 2


class StateLayer(Layer):
    """Evicts first what no checkpoint needs, as the policy says, then checkpoint by checkpoint, as the registry says.

    With a checkpoint the policy gets the keys and values that only it needed. The latest checkpoint of a running output
    comes last. O(1) a block beside the policy; dropping a checkpoint costs O(log checkpoints) and those right below it.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, registry: CheckpointRegistry) -> None:
        super().__init__(policy, num_blocks)
        self.registry = registry
        self.block_map = registry.block_map
        self.num_passed: i64 = 0
        self.num_needed: i64 = 0
        #: Blocks of checkpoints that were dropped after their session had ended.
        self.num_over: i64 = 0
        self._where = zeros_i64(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._depth = zeros_i64(num_blocks)
        #: Where `_make_room` goes on looking for idle blocks that belong to no checkpoint in the registry.
        self._cursor: i64 = 0
        self.block_map.grow(num_blocks)

    def knows(self, block: i64) -> bool:
        return self._where[block] == PASSED

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        self._key[block] = key
        self._depth[block] = depth
        if self.block_map.is_needed(block):
            self._where[block] = NEEDED
            self.num_needed += 1
            self._set_held(block, False)
        else:
            self._pass_on(block)

    def num_withheld(self) -> i64:
        return self.num_needed

    def num_hinted(self) -> i64:
        return self.num_over

    def on_session_change(self, sessions: Sessions, slot: i64) -> None:
        self.registry.set_session_over(sessions.number(slot), sessions.is_over(slot))

    def check_sessions(self, sessions: Sessions) -> None:
        self.registry.check_sessions(sessions)

    def insert_run(self, blocks: vec[i64], count: i64, keys: vec[i64], idle: vec[i64]) -> i64:
        """Insert those of the first `count` of `blocks` that a checkpoint needs. Return how many."""
        block_map = self.block_map
        checkpoint_of = block_map.checkpoint_of
        output_of = block_map.output_of
        node_of = block_map.node_of
        num_checkpoints = block_map.tree.num_checkpoints
        where = self._where
        own_keys = self._key
        own_depths = self._depth
        last = NO_CHECKPOINT
        inserted: i64 = 0
        for place in range(count):
            block = blocks[place]
            number = checkpoint_of[block]
            is_part = number != NO_CHECKPOINT or output_of[block] != NONE
            # Most blocks stand under no checkpoint, and need no search.
            if is_part or (num_checkpoints[node_of[block]] > 0 and block_map.is_needed(block)):
                where[block] = NEEDED
                own_keys[block] = keys[block]
                own_depths[block] = 0
                idle[block] = 1
                inserted += 1
                if number != last and number != NO_CHECKPOINT:
                    self.registry.set_held(number, False)
                last = number
        self.num_needed += inserted
        return inserted

    def remove_run(self, blocks: vec[i32], start: i64, count: i64, idle: vec[i64]) -> i64:
        """Remove those of `blocks[start:start + count]` that a checkpoint needs. Return how many."""
        checkpoint_of = self.block_map.checkpoint_of
        where = self._where
        last = NO_CHECKPOINT
        removed: i64 = 0
        for place in range(start, start + count):
            block = i64(blocks[place])
            if where[block] == NEEDED:
                where[block] = ELSEWHERE
                idle[block] = 0
                removed += 1
                number = checkpoint_of[block]
                if number != last and number != NO_CHECKPOINT:
                    self.registry.set_held(number, True)
                last = number
        self.num_needed -= removed
        return removed

    def move_state(
        self,
        blocks: vec[i32],
        start: i64,
        count: i64,
        record: i64,
        is_idle: bool,
        key: i64,
        idle: vec[i64],
        ref_cnt: vec[i32],
    ) -> bool:
        """Insert or remove all blocks of the latest checkpoint of an output. If it returns False, nothing has changed.

        Args:
            blocks: block ids.
            start: index of the first one.
            count: how many count.
            record: the record in `SaveRecords` that all of them must belong to.
            is_idle: True inserts, False removes.
            key: chain hash of the first block; the others keep theirs.
            idle: 1 + depth, of all blocks; set to 1 or 0.
            ref_cnt: holders of all blocks; set to 0 or 1.
        """
        where = self._where
        output_of = self.block_map.output_of
        before, after, depth = (ELSEWHERE, NEEDED, 1) if is_idle else (NEEDED, ELSEWHERE, 0)
        for place in range(start, start + count):
            block = i64(blocks[place])
            if output_of[block] != record or where[block] != before:
                return False
        for place in range(start, start + count):
            block = i64(blocks[place])
            where[block] = after
            idle[block] = depth
            ref_cnt[block] = 0 if is_idle else 1
        self.num_needed += count if is_idle else -count
        self._key[i64(blocks[start])] = key
        return True

    def _pass_on(self, block: i64) -> None:
        self._where[block] = PASSED
        self.num_passed += 1
        self.policy.insert(block, self._key[block], self._depth[block])

    def _set_held(self, block: i64, is_held: bool) -> None:
        number = self.block_map.checkpoint_of[block]
        if number != NO_CHECKPOINT:
            self.registry.set_held(number, is_held)

    def remove(self, block: i64) -> None:
        where = self._where[block]
        self._where[block] = ELSEWHERE
        if where == NEEDED:
            self.num_needed -= 1
            self._set_held(block, True)
        else:
            self.num_passed -= 1
            self.policy.remove(block)

    def evict(self) -> i64:
        """Return the policy's choice. Drops checkpoints until the policy has a block to choose."""
        while self.num_passed == 0:
            self._make_room()
        block = self.policy.evict()
        if not 0 < block < len(self._where) or self._where[block] == ELSEWHERE:
            return block
        if self._where[block] == NEEDED:
            raise ValueError(f"block {block} is needed by a checkpoint; the policy must name one that it was given")
        self._where[block] = ELSEWHERE
        self.num_passed -= 1
        return block

    def _make_room(self) -> None:
        """Drop the next checkpoint; if the registry has none, pass on any idle block."""
        number = self.registry.next_to_drop()
        if number != NO_CHECKPOINT:
            checkpoint = self.registry.get(number)
            self.num_over += i64(len(checkpoint.blocks)) if checkpoint.is_over else 0
            self.drop(number)
            return
        if self.num_needed == 0:
            raise ValueError("no block is idle")
        while self._where[self._cursor] != NEEDED:
            self._cursor = (self._cursor + 1) % i64(len(self._where))
        self.num_needed -= 1
        self._pass_on(self._cursor)

    def drop(self, number: i64) -> None:
        """Drop a checkpoint, and pass on the blocks that only it needed."""
        checkpoint = self.registry.get(number)
        self.registry.drop(number)
        for block in self.block_map.release_blocks(checkpoint):
            if self._where[i64(block)] == NEEDED:
                self.num_needed -= 1
                self._pass_on(i64(block))

    def uncache(self, block: i64) -> None:
        """Note that the content of `block` is gone. A checkpoint is dropped with any of its blocks."""
        number = self.block_map.remove_part(block)
        if number != NO_CHECKPOINT and self.registry.get(number).is_cached:
            self.drop(number)
        super().uncache(block)

    def clear(self) -> None:
        clear_i64(self._where)
        self.num_passed = 0
        self.num_needed = 0
        self.registry.drop_all()
        self.block_map.clear()
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Make room for blocks up to `num_blocks - 1`, also if the policy raises. MemoryError changes nothing here."""
        where = grown_i64(self._where, num_blocks)
        key = grown_i64(self._key, num_blocks)
        depth = grown_i64(self._depth, num_blocks)
        self.block_map.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._where, self._key, self._depth = where, key, depth
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Check that the policy has no block that a checkpoint needs, and all counts. Raises `InvariantError`."""
        self.block_map.check()
        self.registry.check()
        passed, needed = 0, 0
        for block in range(i64(len(self._where))):
            passed += 1 if self._where[block] == PASSED else 0
            needed += 1 if self._where[block] == NEEDED else 0
            number = self.block_map.checkpoint_of[block]
            if number != NO_CHECKPOINT and not self.registry.get(number).is_cached:
                raise InvariantError(f"states: block {block} is a part of checkpoint {number}, which is not cached")
            if number != NO_CHECKPOINT and self._where[block] == PASSED:
                raise InvariantError(f"states: block {block} is a part of checkpoint {number}, and the policy has it")
        if passed != self.num_passed or needed != self.num_needed:
            raise InvariantError(
                f"states: the policy has {passed} blocks and checkpoints need {needed}; the counts are "
                f"{self.num_passed} and {self.num_needed}"
            )
        self.policy.check()
