"""Whole blocks that the data plane has to move before a step writes anything."""

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
    """Integers that stand one after another. Those for which `make_room` has made room are added without memory."""

    def __init__(self) -> None:
        self.items = _NOTHING
        self.count: i64 = 0

    def make_room(self, count: i64) -> None:
        """Have room for `count` more. Raises MemoryError; nothing has changed then."""
        needed = self.count + count
        if needed > i64(len(self.items)):
            self.items = grown_i32(self.items, int(needed))

    def add(self, number: i64) -> None:
        """Add one number."""
        if self.count == i64(len(self.items)):
            self.make_room(self.count + MOVE)
        self.items[self.count] = i32(number)
        self.count += 1

    def add_move(self, source: i64, target: i64, group: i64) -> None:
        """Add its three numbers."""
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
        """Add all of these, or none where there is no memory for them."""
        self.make_room(len(numbers))
        for number in numbers:
            self.add(number)

    def clear(self) -> None:
        """Take all out; the room stays."""
        self.count = 0

    def array(self) -> npt.NDArray[np.int32]:
        """Return them in an array of its own, int32 (count,)."""
        return np.array(view_i32(self.items)[: self.count]) if self.count > 0 else np.zeros(0, np.int32)


def numbers_of(items: list[int]) -> Numbers:
    """Return these numbers, with room for no more."""
    numbers = Numbers()
    numbers.add_all(items)
    return numbers


#: What a plan begins with, so that one without moves costs nothing; never added to.
_EMPTY: Final = Numbers()


def _own(numbers: Numbers) -> Numbers:
    return Numbers() if numbers is _EMPTY else numbers


class Transfers:
    """Three lists of (from, to, group), carried out in this order: swap_outs, swap_ins, copies.

    swap_outs: pool → CPU pool. swap_ins: CPU pool → pool. copies: within the pool. No target appears twice in a list,
    and no swap_out reads what this very plan writes, so each list may be carried out in any order or at once.
    """

    def __init__(self) -> None:
        empty = _EMPTY
        self.swap_outs = empty
        self.swap_ins = empty
        self.copies = empty
        #: Of a cache with states: slots to copy (from, to), to clear, to load (slot, then blocks), and to save (slot,
        #: boundary, then blocks).
        self.state_copies = empty
        self.state_clears = empty
        self.state_loads = empty
        self.state_saves = empty
        #: Where no state is kept, because it would go at once (slot, boundary).
        self.state_refused = empty
        self.state_blocks = 0
        #: CPU blocks to release when the plan is complete: nothing of this plan may overwrite them.
        self.held = empty
        #: The same for blocks of the pool that are copied from.
        self.held_sources = empty

    def make_room(self, num_outs: i64, num_ins: i64, num_held: i64) -> None:
        """Have room for more moves between the pools, and for CPU blocks to hold. Raises MemoryError."""
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
        """Block `source` of the pool goes to block `target` of the CPU pool."""
        self.swap_outs = _own(self.swap_outs)
        self.swap_outs.add_move(source, target, group)

    def swap_in(self, source: i64, target: i64, group: i64) -> None:
        """Block `source` of the CPU pool goes to block `target` of the pool."""
        self.swap_ins = _own(self.swap_ins)
        self.swap_ins.add_move(source, target, group)

    def copy(self, source: i64, target: i64, group: i64) -> None:
        """Block `source` of the pool is copied to block `target` of the pool."""
        self.copies = _own(self.copies)
        self.copies.add_move(source, target, group)

    # States.

    def hold_sources(self, blocks: list[int]) -> None:
        """Release these blocks of the pool when this plan is complete, and not before."""
        if blocks:
            self.held_sources = _own(self.held_sources)
            self.held_sources.add_all(blocks)

    def copy_states(self, slots: list[int]) -> None:
        """Slots are copied, (from, to) one after another."""
        self.state_copies = _own(self.state_copies)
        self.state_copies.add_all(slots)

    def clear_state(self, slot: i64) -> None:
        """A slot begins with nothing."""
        self.state_clears = _own(self.state_clears)
        self.state_clears.add(slot)

    def load_state(self, slot: i64, blocks: list[int]) -> None:
        """A slot gets the state that lies in these blocks."""
        self.state_loads = _own(self.state_loads)
        self.state_loads.make_room(1 + i64(len(blocks)))
        self.state_loads.add(slot)
        self.state_loads.add_all(blocks)

    def make_state_room(self, count: i64) -> None:
        """Have room for `count` numbers of saves. Raises MemoryError; nothing has changed then."""
        self.state_saves = _own(self.state_saves)
        self.state_saves.make_room(count)

    def save_state(self, slot: i64, boundary: i64, blocks: vec[i32], first: i64, count: i64) -> None:
        """The state of a slot after `boundary` tokens goes to `blocks[first:first + count]`; there is room for it."""
        saves = self.state_saves
        saves.add(slot)
        saves.add(boundary)
        saves.add_run(blocks, first, count)

    def refuse_state(self, slot: i64, boundary: i64) -> None:
        """The state of a slot after `boundary` tokens is not kept."""
        self.state_refused = _own(self.state_refused)
        self.state_refused.add(slot)
        self.state_refused.add(boundary)


def pairs(moves: Numbers) -> npt.NDArray[np.int32]:
    """Return (from, to) of each move, int32 (n, 2)."""
    return moves.array().reshape(-1, 3)[:, :2]


def groups(moves: Numbers) -> npt.NDArray[np.int32]:
    """Return the layer group of each move, int32 (n,)."""
    return moves.array().reshape(-1, 3)[:, 2]
