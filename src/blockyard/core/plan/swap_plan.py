"""Blocks to move between the pool and the CPU pool."""

import numpy as np
import numpy.typing as npt

from ..face import refuse_copy, refuse_pickle
from ..sequences.block_table import BlockTable
from ..store import transfers as moves
from ..store.transfers import Transfers


class SwapPlan:
    """Blocks to move between the pool and the CPU pool now, before the next step: swap_outs first, then swap_ins.

    swap_outs save what sequences leave behind, or what the pool evicted; swap_ins bring back sequences, or what a
    prompt hit in the CPU pool.
    """

    def __init__(self, tables: list[BlockTable], transfers: Transfers) -> None:
        #: Of the cache whose plan it is, one for each layer group.
        self._tables = tables
        self._transfers = transfers

    def __repr__(self) -> str:
        return f"<SwapPlan: {len(self.swap_outs)} swap_outs, {len(self.swap_ins)} swap_ins>"

    def __copy__(self) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send it by a PlanSender")

    @property
    def swap_outs(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (block, CPU block)."""
        return moves.pairs(self._transfers.swap_outs)

    @property
    def swap_out_groups(self) -> npt.NDArray[np.int32]:
        """The layer group of each swap_out, int32 (n,)."""
        return moves.groups(self._transfers.swap_outs)

    @property
    def swap_ins(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (CPU block, block)."""
        return moves.pairs(self._transfers.swap_ins)

    @property
    def swap_in_groups(self) -> npt.NDArray[np.int32]:
        """The layer group of each swap_in, int32 (n,)."""
        return moves.groups(self._transfers.swap_ins)
