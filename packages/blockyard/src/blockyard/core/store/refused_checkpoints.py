"""Checkpoints of running sequences that are not saved, because they would be the next to be dropped."""

from mypy_extensions import i64

from ..arrays import zeros_i64
from ..policies.states.checkpoint import OUTPUT_END
from ..policies.states.prefix_tree import NO_CHECKPOINT
from ..policies.states.request_record import NO_RECORD
from ..sequences.table import SequenceTable
from .content_ledger import ContentLedger
from .running_requests import RunningRequests
from .transfers import Transfers


class RefusedCheckpoints:
    """Checkpoints of each row that are not worth saving, because the order of states would drop them first.

    The lists of a row hold pairs (position, kind); they are replaced, never changed.

    Attributes:
        num_pending: by row, the refused checkpoints that no plan has listed yet.
        total: those of all rows.
        num_listed: those that plans have listed since the start.
    """

    def __init__(
        self, pool: ContentLedger, sequences: SequenceTable, requests: RunningRequests, num_parts: i64
    ) -> None:
        self.pool = pool
        self.sequences = sequences
        self.requests = requests
        self.registry = requests.registry
        self.num_parts = num_parts
        self.num_listed: i64 = 0
        rows = int(sequences.max_num_seqs)
        self.num_pending = zeros_i64(rows)
        self.total: i64 = 0
        self._nothing: list[tuple[int, int]] = []
        self._pending = [self._nothing] * rows
        #: By row, all refused checkpoints, but of its output only the latest.
        self._all = [self._nothing] * rows

    def open(self, row: i64) -> None:
        """Forget the refused checkpoints of a row."""
        self.total -= self.num_pending[row]
        self.num_pending[row] = 0
        self._pending[row] = self._nothing
        self._all[row] = self._nothing

    def is_pending(self, row: i64, position: i64) -> bool:
        """Return whether a checkpoint was refused, and no plan has listed that yet."""
        for refused, _ in self._pending[row]:
            if refused == position:
                return True
        return False

    def is_worthless(self, row: i64, position: i64, kind: i64) -> bool:
        """Return whether the order of states would drop this checkpoint first. O(depth).

        Free blocks are room for it only if another request like this one has room beside it.
        """
        record = self.requests.records[row]
        if not self.registry.order.learns or record is NO_RECORD:
            return False
        num_free = self.pool.queue.num_free - self.pool.stack.num_withheld()
        if num_free >= self.num_parts + self.sequences.num_blocks[row]:
            return False
        return self.registry.would_score(record, position, kind) < self.registry.lowest_score()

    def add(self, row: i64, position: i64, kind: i64) -> None:
        """Remember a checkpoint as refused."""
        pair = (int(position), int(kind))
        self._pending[row] = [*self._pending[row], pair]
        self.num_pending[row] += 1
        self.total += 1
        before = self._all[row]
        if kind == OUTPUT_END and before and before[-1][1] == OUTPUT_END:
            before = before[:-1]
        self._all[row] = [*before, pair]

    def list_until(self, row: i64, end: i64, transfers: Transfers) -> None:
        """List the pending checkpoints of a row up to `end` tokens in the plan."""
        if self.num_pending[row] == 0:
            return
        for position, _ in self._pending[row]:
            if position <= end:
                transfers.refuse_state(row, position)
                self.num_listed += 1
        self._pending[row] = [pair for pair in self._pending[row] if pair[0] > end]
        self.total -= self.num_pending[row]
        self.num_pending[row] = len(self._pending[row])
        self.total += self.num_pending[row]

    def register(self, row: i64, latest: i64) -> None:
        """Add the checkpoints of a row that ends to the registry and drop them: their classes learn of missed hits.

        latest: position of the latest checkpoint of the output; 0 for none.
        """
        for position, kind in self._all[row]:
            if position <= self.sequences.num_computed[row] and (kind != OUTPUT_END or position > latest):
                number = self.registry.add(self.requests.records[row], position, kind)
                if number != NO_CHECKPOINT:
                    self.registry.drop(number)
