"""Queue of block moves, carried out in the order of their plans before the next step writes anything."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blockyard import StepPlan
from blockyard.errors import ModelError
from blockyard.steps import SwapPlan
from blockyard.storage import KVCache, MoveLists, SlotLists, StateSlots


class MoveQueue:
    """Block moves of plans that are not carried out yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[SwapPlan, MoveLists | SlotLists]] = []
        self._is_broken = False
        #: Blocks that swap-ins fill since the moves were last carried out, and whether these are carried out.
        self._loads: list[npt.NDArray[np.int32]] = []
        self._is_carried = False

    @property
    def plans(self) -> list[SwapPlan]:
        """Plans with pending moves, in order."""
        return list({id(plan): plan for plan, _ in self._waiting}.values())

    def note(self, plan: SwapPlan) -> None:
        """Add the moves of a plan. The plan's arrays are not copied."""
        if self._is_carried:
            self._loads, self._is_carried = [], False
        for lists in move_lists(plan):
            self._waiting.append((plan, lists))
            if isinstance(lists, MoveLists):
                self._loads.append(plan.swap_ins[:, 1])

    def loading(self) -> npt.NDArray[np.int32]:
        """Return the blocks that swap-ins of the latest or next step fill, int32 (n,). O(n)."""
        return np.concatenate(self._loads) if self._loads else np.empty(0, np.int32)

    def carry_out(self, kv_cache: KVCache, slots: StateSlots | None = None) -> None:
        """Carry out all pending moves, blocks before states; on CUDA they overlap with computation. O(blocks).

        If a move fails halfway, this raises until `clear`: repeating it could save new data in place of the old block.
        """
        if self._is_broken:
            raise ModelError("block moves failed halfway, so the blocks' contents are unknown; call clear first")
        while self._waiting:
            self._is_broken = True
            _, moves = self._waiting[0]
            carry_out(moves, kv_cache, slots)
            self._is_broken = False
            self._waiting.pop(0)
        self._is_carried = True

    def clear(self) -> None:
        """Drop all pending moves."""
        self._waiting.clear()
        self._loads = []
        self._is_broken = False


def move_lists(plan: SwapPlan) -> list[MoveLists | SlotLists]:
    """Return the moves of a plan, blocks before states; empty if there are none."""
    lists = [plan.swap_outs, plan.swap_ins, *([plan.copies] if isinstance(plan, StepPlan) else [])]
    moves: list[MoveLists | SlotLists] = [MoveLists(*lists)] if any(len(pairs) for pairs in lists) else []
    if isinstance(plan, StepPlan):
        slots = SlotLists.of(plan.states)
        moves += [slots] if slots.has_any else []
    return moves


def carry_out(moves: MoveLists | SlotLists, kv_cache: KVCache, slots: StateSlots | None) -> None:
    """Move blocks, or the states of a hybrid model. O(bytes)."""
    if isinstance(moves, MoveLists):
        kv_cache.start_moves(moves)
    elif slots is not None:
        slots.move(moves)
