"""Whole blocks that the data plane has to move before a step writes anything."""

import numpy as np
import numpy.typing as npt


class Transfers:
    """Three lists of (from, to, group), carried out in this order: swap_outs, swap_ins, copies.

    swap_outs: pool → CPU pool. swap_ins: CPU pool → pool. copies: within the pool. No target appears twice in a list,
    and no swap_out reads what this very plan writes, so each list may be carried out in any order or at once.
    """

    def __init__(self) -> None:
        self.swap_outs: list[int] = []
        self.swap_ins: list[int] = []
        self.copies: list[int] = []
        #: Of a cache with states: slots to copy (from, to), to clear, to load (slot, then blocks), and to save (slot,
        #: boundary, then blocks); each list of moves is flat.
        self.state_copies: list[int] = []
        self.state_clears: list[int] = []
        self.state_loads: list[int] = []
        self.state_saves: list[int] = []
        self.state_blocks = 0
        #: CPU blocks to release when the plan is complete: nothing of this plan may overwrite them.
        self.held: list[int] = []
        #: The same for blocks of the pool that are copied from.
        self.held_sources: list[int] = []

    def hold(self, cpu_block: int) -> None:
        """Release `cpu_block` when this plan is complete, and not before."""
        self.held.append(cpu_block)

    def swap_out(self, source: int, target: int, group: int) -> None:
        """Block `source` of the pool goes to block `target` of the CPU pool."""
        self.swap_outs += (source, target, group)

    def swap_in(self, source: int, target: int, group: int) -> None:
        """Block `source` of the CPU pool goes to block `target` of the pool."""
        self.swap_ins += (source, target, group)

    def copy(self, source: int, target: int, group: int) -> None:
        """Block `source` of the pool is copied to block `target` of the pool."""
        self.copies += (source, target, group)


def pairs(triples: list[int]) -> npt.NDArray[np.int32]:
    """(from, to), int32 (n, 2)."""
    return np.array(triples, dtype=np.int32).reshape(-1, 3)[:, :2]


def groups(triples: list[int]) -> npt.NDArray[np.int32]:
    """The layer group of each move, int32 (n,)."""
    return np.array(triples, dtype=np.int32).reshape(-1, 3)[:, 2]
