"""Frees sequences, at once or when the running call has ended."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import UnknownSequence
from ..gate import Deferred
from ..parts import Parts
from ..policies.sessions import Sessions
from ..sequences.table import UNDONE


class FreeCalls(Deferred):
    """Releases the blocks of sequences, last block first, and closes their rows.

    A free that arrives during another call is queued. Its handles are checked on arrival: a handle that is not live, or
    is queued already, is refused at once.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.joins = parts.joins
        self.store = parts.store
        self._waiting: list[int] = []

    def free(self, rows: vec[i64]) -> None:
        self.sequences.version += 1
        for index in range(i64(len(rows))):
            self._free_row(rows[index])

    def _free_row(self, row: i64) -> None:
        self.kv_pool.act("free", self.sequences.holders[row])
        self.end(row)

    def free_later(self, given: vec[i64]) -> None:
        """Queue the handles, to be freed when the running call has ended. O(handles * queued handles)."""
        handles: list[int] = []
        for index in range(i64(len(given))):
            handle = int(given[index])
            self.sequences.live_row(handle)
            if handle in self._waiting or handle in handles:
                raise UnknownSequence(
                    f"sequence {handle} was freed already; that takes effect when the running call ends"
                )
            handles.append(handle)
        self._waiting += handles

    def carry_out(self) -> None:
        """Free the queued sequences in order, except those that the call itself has freed."""
        waiting = self._waiting
        self._waiting = []
        for handle in waiting:
            if self.sequences.is_live(handle):
                row = self.sequences.live_row(handle)
                if not self._is_apart(row):
                    self.sequences.version += 1
                self._free_row(row)

    def _is_apart(self, row: i64) -> bool:
        """Return whether the plan that the running call has made stays valid and readable without this row."""
        sequences = self.sequences
        return sequences.has_new_plan and not sequences.in_batch(row) and sequences.num_waiters[row] == 0

    def end(self, row: i64) -> None:
        """Free a row and all of its blocks. O(blocks)."""
        sequences = self.sequences
        self.joins.leave(row)
        sessions = self.kv_pool.stack.sessions
        if sessions.num_slots > 0:
            self._mark(row, sessions)
        if sequences.copy_from[row]:
            self.kv_pool.release_sources(sequences.copy_from[row])
        self.store.close(row)
        num_blocks = sequences.num_blocks[row]
        cached = min(self._num_cached(row), num_blocks)
        self.token_blocks.release_row_blocks(row, sequences.blocks, row * sequences.width, num_blocks, 0, cached)
        sequences.close(row)
        self.kv_pool.fence.forget_row(row)

    def _num_cached(self, row: i64) -> i64:
        """Return how many leading blocks are certainly cached: computed and published (I5), without a later reset."""
        sequences = self.sequences
        index = self.token_blocks.index
        if not self.token_blocks.enable_prefix_caching or sequences.generation[row] != index.num_generations:
            return 0
        return min(sequences.num_published[row], sequences.num_computed[row] // self.parts.block_size)

    def _mark(self, row: i64, sessions: Sessions) -> None:
        """Record the session of the row's cached blocks. O(blocks)."""
        tag = self.sequences.session[row]
        if tag == UNDONE:
            return
        index = self.kv_pool.index
        for table in self.store.tables:
            for place in range(table.num_blocks[row]):
                block = table.block_at(row, place)
                if index.is_cached(block):
                    sessions.mark(block, tag)
