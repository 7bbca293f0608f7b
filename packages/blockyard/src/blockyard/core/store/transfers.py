"""Blocks and states that the data plane moves before a step writes anything."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import grown_i32, view_i32, zeros_i32

#: (from, to, group).
MOVE: Final[i64] = 3
_NOTHING: Final = zeros_i32(0)


class Numbers:
    """A growing array of integers. After `make_room`, adding that many takes no memory."""

    def __init__(self) -> None:
        self.items = _NOTHING
        self.count: i64 = 0

    def make_room(self, count: i64) -> None:
        """Make room for `count` more. If it raises MemoryError, nothing has changed."""
        needed = self.count + count
        if needed > i64(len(self.items)):
            self.items = grown_i32(self.items, int(needed))

    def add(self, number: i64) -> None:
        if self.count == i64(len(self.items)):
            self.make_room(self.count + MOVE)
        self.items[self.count] = i32(number)
        self.count += 1

    def add_move(self, source: i64, target: i64, group: i64) -> None:
        self.add(source)
        self.add(target)
        self.add(group)

    def add_run(self, numbers: vec[i32], first: i64, count: i64) -> None:
        """Add `numbers[first:first + count]`, for which there is room."""
        items = self.items
        at = self.count - first
        for place in range(first, first + count):
            items[at + place] = numbers[place]
        self.count += count

    def add_all(self, numbers: list[int]) -> None:
        """Add all of these, or none if there is no memory for them."""
        self.make_room(len(numbers))
        for number in numbers:
            self.add(number)

    def clear(self) -> None:
        """Remove all; the room stays."""
        self.count = 0

    def array(self) -> npt.NDArray[np.int32]:
        """Return a copy of them, int32 (count,)."""
        return np.array(view_i32(self.items)[: self.count]) if self.count > 0 else np.zeros(0, np.int32)


def numbers_of(items: list[int]) -> Numbers:
    """Return these numbers as `Numbers`."""
    numbers = Numbers()
    numbers.add_all(items)
    return numbers


#: The lists of a new plan, so that one without moves costs nothing; never added to.
_EMPTY: Final = Numbers()


def _own(numbers: Numbers) -> Numbers:
    return Numbers() if numbers is _EMPTY else numbers


class Transfers:
    """The moves of a plan, carried out in this order: swap_outs, swap_ins, copies.

    No target appears twice in a list, and no swap-out reads what this plan writes, so each list may be carried out in
    any order or at once.

    Attributes:
        swap_outs: (block, CPU block, group) of each block that goes to the CPU pool.
        swap_ins: (CPU block, block, group) of each block that comes back.
        copies: (from, to, group) of each copy within the pool.
        state_copies: (from, to) of slots, in order.
        state_clears: slots.
        state_loads: a slot and the blocks of a checkpoint, for each restored state.
        state_saves: a slot, a checkpoint position and blocks, for each checkpoint.
        state_refused: (slot, position) of each checkpoint that the order of states refuses.
        state_blocks: blocks of a checkpoint; 0 without states.
        held: CPU blocks that are released once the plan is complete.
        held_sources: blocks of the pool that are released then.
    """

    def __init__(self) -> None:
        empty = _EMPTY
        self.swap_outs = empty
        self.swap_ins = empty
        self.copies = empty
        self.state_copies = empty
        self.state_clears = empty
        self.state_loads = empty
        self.state_saves = empty
        self.state_refused = empty
        self.state_blocks = 0
        self.held = empty
        self.held_sources = empty

    def make_room(self, num_outs: i64, num_ins: i64, num_held: i64) -> None:
        """Make room for more moves between the pools, and for CPU blocks to hold. Raises MemoryError."""
        self.swap_outs = _own(self.swap_outs)
        self.swap_ins = _own(self.swap_ins)
        self.held = _own(self.held)
        self.swap_outs.make_room(MOVE * num_outs)
        self.swap_ins.make_room(MOVE * num_ins)
        self.held.make_room(num_held)

    def hold(self, cpu_block: i64) -> None:
        """Release `cpu_block` when this plan is complete, and not before."""
        self.held = _own(self.held)
        self.held.add(cpu_block)

    def swap_out(self, source: i64, target: i64, group: i64) -> None:
        """Move block `source` of the pool to block `target` of the CPU pool."""
        self.swap_outs = _own(self.swap_outs)
        self.swap_outs.add_move(source, target, group)

    def swap_in(self, source: i64, target: i64, group: i64) -> None:
        """Move block `source` of the CPU pool to block `target` of the pool."""
        self.swap_ins = _own(self.swap_ins)
        self.swap_ins.add_move(source, target, group)

    def copy(self, source: i64, target: i64, group: i64) -> None:
        """Copy block `source` of the pool to block `target`."""
        self.copies = _own(self.copies)
        self.copies.add_move(source, target, group)

    # States.

    def hold_sources(self, blocks: list[int]) -> None:
        """Release these blocks of the pool when this plan is complete, and not before."""
        if blocks:
            self.held_sources = _own(self.held_sources)
            self.held_sources.add_all(blocks)

    def copy_states(self, slots: list[int]) -> None:
        """Copy slots. slots: (from, to) of each, one after another."""
        self.state_copies = _own(self.state_copies)
        self.state_copies.add_all(slots)

    def clear_state(self, slot: i64) -> None:
        """Clear a slot."""
        self.state_clears = _own(self.state_clears)
        self.state_clears.add(slot)

    def load_state(self, slot: i64, blocks: list[int]) -> None:
        """Restore the checkpoint in these blocks to a slot."""
        self.state_loads = _own(self.state_loads)
        self.state_loads.make_room(1 + i64(len(blocks)))
        self.state_loads.add(slot)
        self.state_loads.add_all(blocks)

    def make_state_room(self, count: i64) -> None:
        """Make room for `count` numbers of checkpoints. If it raises MemoryError, nothing has changed."""
        self.state_saves = _own(self.state_saves)
        self.state_saves.make_room(count)

    def save_state(self, slot: i64, position: i64, blocks: vec[i32], first: i64, count: i64) -> None:
        """Checkpoint the state of a slot in `blocks[first:first + count]`, for which there is room."""
        saves = self.state_saves
        saves.add(slot)
        saves.add(position)
        saves.add_run(blocks, first, count)

    def refuse_state(self, slot: i64, position: i64) -> None:
        """Announce that the state of a slot is not checkpointed at a position."""
        self.state_refused = _own(self.state_refused)
        self.state_refused.add(slot)
        self.state_refused.add(position)


def pairs(moves: Numbers) -> npt.NDArray[np.int32]:
    """Return (from, to) of each move, int32 (n, 2)."""
    return moves.array().reshape(-1, 3)[:, :2]


def groups(moves: Numbers) -> npt.NDArray[np.int32]:
    """Return the layer group of each move, int32 (n,)."""
    return moves.array().reshape(-1, 3)[:, 2]
