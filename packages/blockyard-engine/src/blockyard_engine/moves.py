"""Whole blocks to move before the next step writes anything: noted as plans are made, carried out in that order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blockyard import StepPlan
from blockyard.errors import ModelError
from blockyard.steps import SwapPlan
from blockyard.storage import KVCache, MoveLists, SlotLists, StateSlots


class MoveQueue:
    """Moves that were decided and not yet carried out."""

    def __init__(self) -> None:
        self._waiting: list[tuple[SwapPlan, MoveLists | SlotLists]] = []
        self._is_broken = False
        #: What swap_ins fill since moves were last carried out, and whether they have been.
        self._loads: list[npt.NDArray[np.int32]] = []
        self._is_carried = False

    @property
    def plans(self) -> list[SwapPlan]:
        """Return those whose moves wait, in order."""
        return list({id(plan): plan for plan, _ in self._waiting}.values())

    def note(self, plan: SwapPlan) -> None:
        """Remember what a plan moves. The arrays are the plan's own, made for its caller."""
        if self._is_carried:
            self._loads, self._is_carried = [], False
        for lists in lists_of(plan):
            self._waiting.append((plan, lists))
            if isinstance(lists, MoveLists):
                self._loads.append(plan.swap_ins[:, 1])

    def loading(self) -> npt.NDArray[np.int32]:
        """Return the blocks that the latest step's swap_ins fill, or those of the next one, int32 (n,). O(n)."""
        return np.concatenate(self._loads) if self._loads else np.empty(0, np.int32)

    def carry_out(self, kv_cache: KVCache, slots: StateSlots | None = None) -> None:
        """Move all that waits, on CUDA beside the computing (`KVCache.start_moves`). O(blocks).

        slots: the states of a hybrid model, which plans move behind blocks.

        Once that broke half-way it is not tried again, and raises until `clear`: the same moves a second time could
        save, as an old block, what the first time has put in its place.
        """
        if self._is_broken:
            raise ModelError("block moves broke half-way; what they moved is not known")
        while self._waiting:
            self._is_broken = True
            _, moves = self._waiting[0]
            carry_out(moves, kv_cache, slots)
            self._is_broken = False
            self._waiting.pop(0)
        self._is_carried = True

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._loads = []
        self._is_broken = False


def lists_of(plan: SwapPlan) -> list[MoveLists | SlotLists]:
    """Return what a plan moves, blocks first; empty if nothing."""
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
