"""The end of sequences: `free` begins here, now or when the call that runs has ended."""

from librt.vecs import vec
from mypy_extensions import i64

from ..errors import UnknownSequence
from .block_ledger import BlockLedger
from .gate import Deferred
from .history import AllocationHistory
from .joining import Joining
from .mapping import Mapping
from .sequences import SequenceTable


class Ending(Deferred):
    """Frees what sequences hold, their last block first, and their rows.

    A free that arrives inside another call waits here. Handles are checked when they arrive: one that is not live, or
    waits already, is refused at once.
    """

    def __init__(
        self, token_blocks: BlockLedger, sequences: SequenceTable, joining: Joining, mapping: Mapping | None
    ) -> None:
        self.token_blocks = token_blocks
        self.sequences = sequences
        self.joining = joining
        self.mapping = mapping
        self.kv_pool: BlockLedger = token_blocks if mapping is None else mapping.pool
        self.history: AllocationHistory | None = None
        self._waiting: list[int] = []

    def free(self, given: vec[i64]) -> None:
        """End live sequences, all different, or none. O(blocks)."""
        rows = self.sequences.rows_of(given)
        self.sequences.version += 1
        for index in range(i64(len(rows))):
            self._free_row(rows[index])

    def _free_row(self, row: i64) -> None:
        if self.history is not None:
            self.history.acting(f"free {self.sequences.holders[row]}")
        self.end(row)

    def free_later(self, given: vec[i64]) -> None:
        """The same when the running call has ended. O(handles * those that wait)."""
        handles: list[int] = []
        for index in range(i64(len(given))):
            handle = int(given[index])
            self.sequences.live_row(handle)
            if handle in self._waiting or handle in handles:
                raise UnknownSequence(f"sequence {handle} was freed already; it waits for a call to end")
            handles.append(handle)
        self._waiting += handles

    def carry_out(self) -> None:
        """End what waits, in the order in which it came. What the call that ran has ended itself is done."""
        waiting = self._waiting
        self._waiting = []
        for handle in waiting:
            if self.sequences.is_live(handle):
                row = self.sequences.live_row(handle)
                if self.sequences.in_batch(row) or self.sequences.num_waiters[row] > 0:
                    # Else the plan that the call has made says what is true, and can be read.
                    self.sequences.version += 1
                self._free_row(row)

    def end(self, row: i64) -> None:
        """Free a row and all it holds. O(blocks)."""
        sequences = self.sequences
        self.joining.leave(row)
        for block in sequences.copy_from[row]:
            self.kv_pool.release_one(block)
        if self.mapping is not None:
            self.mapping.close(row)
        self.token_blocks.release(sequences.blocks, row * sequences.width, sequences.num_blocks[row])
        sequences.close(row)
