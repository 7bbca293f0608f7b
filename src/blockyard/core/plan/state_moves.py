"""A plan says as arrays what a step does with the states of its sequences."""

import numpy as np
import numpy.typing as npt

from ..store.transfers import Transfers


class StateMoves:
    """A slot has the working state of one sequence, and the number of its row (`StepPlan.rows`).

    Carry out, after the plan's moves of blocks: `copies`, in their order, then `clears` and `loads`, then the step, and
    last `saves`. All but the saves are to be carried out also where the plan is not run because `reserve` was called
    again. After a step, a slot must have the state of as many tokens as `commit` says are computed.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def __repr__(self) -> str:
        moves = f"{len(self.copies)} copies, {len(self.clears)} clears, {len(self.loads)} loads"
        return f"<StateMoves: {moves}, {len(self.saves)} saves>"

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return slots to copy, int32 (n, 2) as (from, to), of sequences that were forked."""
        return np.array(self._transfers.state_copies, dtype=np.int32).reshape(-1, 2)

    @property
    def clears(self) -> npt.NDArray[np.int32]:
        """Return the slots of sequences that begin with nothing, int32 (n,)."""
        return np.array(self._transfers.state_clears, dtype=np.int32)

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Slots that a kept state goes to, int32 (n,)."""
        return self._loads()[:, 0]

    @property
    def load_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the pool that it is read from, int32 (n, blocks of a state), in order of its bytes."""
        return self._loads()[:, 1:]

    @property
    def saves(self) -> npt.NDArray[np.int32]:
        """Return slots whose states are to be kept, int32 (n,), one several times unless chunks are cut."""
        return self._saves()[:, 0]

    @property
    def save_boundaries(self) -> npt.NDArray[np.int32]:
        """Say after how many tokens of its sequence each is taken, int32 (n,); where chunks are cut, the step's end."""
        return self._saves()[:, 1]

    @property
    def save_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the pool that each is written to, int32 (n, blocks of a state)."""
        return self._saves()[:, 2:]

    @property
    def refused(self) -> npt.NDArray[np.int32]:
        """Return where this step passes a boundary at which no state is kept, int32 (n, 2) as (slot, tokens).

        Such a state would be the first to go (`CacheConfig.state_order`): it is not worth writing.
        """
        return np.array(self._transfers.state_refused, dtype=np.int32).reshape(-1, 2)

    def _loads(self) -> npt.NDArray[np.int32]:
        return np.array(self._transfers.state_loads, dtype=np.int32).reshape(-1, self._transfers.state_blocks + 1)

    def _saves(self) -> npt.NDArray[np.int32]:
        return np.array(self._transfers.state_saves, dtype=np.int32).reshape(-1, self._transfers.state_blocks + 2)
