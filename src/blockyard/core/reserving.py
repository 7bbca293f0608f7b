"""The first phase of a step: blocks and slots for the tokens about to be computed."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ..errors import InvalidArgument, SequenceNotReady
from ..ids import NO_CONTENT, NO_ROW
from .arrays import zeros_i64
from .block_pool import BlockPool
from .block_table import BlockTable
from .joining import Joining
from .mapping import Mapping
from .plan import NO_BLOCKS, SCHEDULED, WAITS_FOR_PREFIX, Batch, StepPlan
from .sequences import QUIET, SequenceTable
from .tokens import int64_vector, store_token
from .transfers import Transfers

#: No token is waiting for a block.
NO_TOKEN: Final[i64] = -1


class Reserving:
    """Gives a whole batch its slots in one call; what does not fit is told apart, and nothing changes for it.

    Before a sequence writes, the block it writes to first is made its own (copy-on-write): forks share their last,
    partly filled block, and a truncated sequence may end inside a cached one. All blocks behind it are new.
    """

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        joining: Joining,
        mapping: Mapping | None,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.sequences = sequences
        self.joining = joining
        self.mapping = mapping
        #: The pool whose blocks have keys and values.
        self.stored: BlockPool = pool if mapping is None else mapping.pool
        self.tables: list[BlockTable] = [sequences] if mapping is None else mapping.tables()
        self.block_size: i64 = pool.block_size
        self.max_model_len: i64 = max_model_len
        self.num_copied_blocks: i64 = 0
        self._slots = zeros_i64(1024)
        self._transfers = Transfers()

    def reserve(self, seqs: object, num_new_tokens: object) -> StepPlan:
        """See `KVCacheManager.reserve`."""
        sequences = self.sequences
        rows = sequences.rows_of(seqs)
        counts = int64_vector("num_new_tokens", num_new_tokens, len(rows))
        starts = self._check(rows, counts)
        if self.stored.chooser is not None:
            self._secure(rows, starts, counts)
        sequences.version += 1
        transfers = Transfers()
        self._transfers = transfers
        statuses = zeros_i64(len(rows))
        total = self._place(rows, starts, counts, statuses)
        slots = self._map_slots(rows, starts, counts, total)
        if self.mapping is not None:
            self.mapping.finish(transfers)
        for block in transfers.held_sources:
            self.stored.release_one(block)
        return StepPlan(self.tables, Batch(sequences, rows, starts, counts, statuses), slots, transfers)

    def can_reserve(self, seqs: object, num_new_tokens: object) -> bool:
        """See `KVCacheManager.can_append`."""
        rows = self.sequences.rows_of(seqs)
        counts = int64_vector("num_new_tokens", num_new_tokens, len(rows))
        starts = self._check(rows, counts)
        for index in range(i64(len(rows))):
            if counts[index] > 0 and self.sequences.is_waiting(rows[index]):
                return False
        return self._num_missing_in_all(rows, starts, counts) <= self.stored.queue.num_free

    def _secure(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> None:
        """Let an eviction policy name all victims before the first change, because it might fail."""
        self.stored.secure(min(self._num_missing_in_all(rows, starts, counts), self.stored.queue.num_free))

    def _num_missing_in_all(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> i64:
        missing: i64 = 0
        for index in range(i64(len(rows))):
            if counts[index] > 0:
                missing += self._num_missing(rows[index], starts[index], starts[index] + counts[index])
        return missing

    def _num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks that writing tokens `start` to `end` takes from the pool, a copy on write included."""
        if self.mapping is not None:
            return self.mapping.num_missing(row, start, end)
        position = start // self.block_size
        copies = position < self.sequences.num_blocks[row] and self._is_shared(row, position)
        missing = max((end + self.block_size - 1) // self.block_size - self.sequences.num_blocks[row], 0)
        return missing + (1 if copies else 0)

    def _check(self, rows: vec[i64], counts: vec[i64]) -> vec[i64]:
        """Refuse bad counts before anything changes; returns where each sequence starts."""
        starts = rows[:]
        num_computed = self.sequences.num_computed
        limit = self.max_model_len
        if self.mapping is not None:
            self._require_swapped_in(rows)
        for index in range(i64(len(rows))):
            start = num_computed[rows[index]]
            if counts[index] < 0 or counts[index] > limit - start:
                raise InvalidArgument(
                    f"num_new_tokens[{index}] is {counts[index]} for {self.sequences.name(rows[index])}; "
                    f"it must be from 0 to {limit - start}: {start} tokens are computed, max_model_len is {limit}"
                )
            starts[index] = start
        return starts

    def _require_swapped_in(self, rows: vec[i64]) -> None:
        for index in range(i64(len(rows))):
            if self.sequences.is_swapped[rows[index]] != 0:
                raise SequenceNotReady(f"reserve: {self.sequences.name(rows[index])} is swapped out; swap it in first")

    def _place(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], statuses: vec[i64]) -> i64:
        """Blocks for every sequence in turn; sets the count of those that do not fit to 0. Returns all tokens."""
        sequences = self.sequences
        num_blocks = sequences.num_blocks
        num_reserved = sequences.num_reserved
        reserved_at = sequences.reserved_at
        alert = sequences.alert
        block_size = self.block_size
        total: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            count = counts[index]
            end = starts[index] + count
            if alert[row] != QUIET or end > num_blocks[row] * block_size or not self._has_room(row, end):
                status = self._grow(row, starts[index], end)
                if status != SCHEDULED:
                    statuses[index] = status
                    counts[index] = 0
                    count = 0
            num_reserved[row] = count
            reserved_at[row] = sequences.version
            total += count
        return total

    def _has_room(self, row: i64, end: i64) -> bool:
        return self.mapping is None or self.mapping.has_room(row, end)

    def _grow(self, row: i64, start: i64, end: i64) -> i64:
        """Give one sequence what it needs to write tokens `start` to `end`, or say why not."""
        if end == start:
            return SCHEDULED
        sequences = self.sequences
        if self._lacks_prefix(row):
            return WAITS_FOR_PREFIX
        position = start // self.block_size
        exists = position < sequences.num_blocks[row]
        copies = exists and self._is_shared(row, position)
        needed = max((end + self.block_size - 1) // self.block_size - sequences.num_blocks[row], 0)
        if needed + (1 if copies else 0) > self.pool.queue.num_free:
            return NO_BLOCKS
        if self.mapping is not None:
            if self.mapping.num_missing(row, start, end) > self.mapping.pool.queue.num_free:
                return NO_BLOCKS
            self.mapping.grow(row, start, end, self._transfers)
        if copies:
            self._copy_on_write(row, position, start)
        elif exists:
            self._claim(row, position)
        for _ in range(needed):
            sequences.push_block(row, self.pool.acquire_one())
        self._store_pending(row)
        if sequences.copy_from[row]:
            self._copy_beginning(row, position)
        if sequences.waits_on[row] == NO_ROW and sequences.pending_token[row] == NO_TOKEN:
            sequences.alert[row] = QUIET
        return SCHEDULED

    def _lacks_prefix(self, row: i64) -> bool:
        """Whether blocks it joined are neither computed nor being computed in this very step."""
        sequences = self.sequences
        owner = sequences.waits_on[row]
        if owner == NO_ROW:
            return False
        if not sequences.is_waiting(row):
            self.joining.settle(row)
            return False
        reached = sequences.num_computed[owner]
        if sequences.reserved_at[owner] == sequences.version:
            reached += sequences.num_reserved[owner]
        return reached < sequences.waits_for[row]

    def _is_shared(self, row: i64, position: i64) -> bool:
        """Whether writing this block needs a copy. What the sequence published it is about to compute itself."""
        if position < self.sequences.num_published[row]:
            return False
        return self.pool.ref_cnt[self.sequences.block_at(row, position)] > 1

    def _copy_on_write(self, row: i64, position: i64, start: i64) -> None:
        old = self.sequences.block_at(row, position)
        new = self.pool.acquire_one()
        self.pool.copy_words(old, new)
        self.sequences.set_block(row, position, new)
        self.pool.release_one(old)
        if start % self.block_size != 0 and self.mapping is None:
            self._transfers.copy(int(old), int(new), 0)
            self.num_copied_blocks += 1

    def _copy_beginning(self, row: i64, position: i64) -> None:
        """The prompt's hit ended inside a block: its first tokens come from another block that begins alike."""
        for group, source in enumerate(self.sequences.copy_from[row]):
            self._transfers.copy(source, int(self.tables[group].block_at(row, position)), group)
            self._transfers.held_sources.append(source)
        self.sequences.copy_from[row] = []

    def _claim(self, row: i64, position: i64) -> None:
        """A block cut by truncate and held by nobody else is about to change: it leaves the index."""
        block = self.sequences.block_at(row, position)
        if position >= self.sequences.num_published[row] and self.pool.index.identity[2 * block] != NO_CONTENT:
            self.pool.index.remove(block)

    def _store_pending(self, row: i64) -> None:
        """Put the token that waits in the row into its block, if that is there now."""
        token = self.sequences.pending_token[row]
        position = self.sequences.num_tokens[row] - 1
        logical = position // self.block_size
        if token != NO_TOKEN and logical < self.sequences.num_blocks[row]:
            index = self.pool.index
            start = index.first_word + self.sequences.block_at(row, logical) * index.num_words
            store_token(index.words, start, position - logical * self.block_size, token)
            self.sequences.pending_token[row] = NO_TOKEN

    def _map_slots(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], total: i64) -> vec[i64]:
        """block_id * block_size + offset of every new token, sequence after sequence."""
        if total > len(self._slots):
            self._slots = zeros_i64(int(2 * total))
        self.tables[0].map_slots(rows, starts, counts, self._slots)
        return self._slots[:total]
