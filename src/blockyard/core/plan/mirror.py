"""A copy of another process's block table."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ..arrays import zeros_i64
from ..sequences.block_table import BlockTable
from .batch import Batch
from .message import ROW_WORDS


class TableMirror:
    """The block table of one group, as the messages of a `PlanSender` tell it: checked first, then taken in."""

    def __init__(self, max_num_seqs: int, width: int, block_size: int) -> None:
        self.table = BlockTable(max_num_seqs, width, block_size)
        self._first: i64 = 0
        self._num_changed: i64 = 0
        #: How many blocks each sequence of the batch will have.
        self._lengths = zeros_i64(0)

    def check(self, words: vec[i64], first: i64, num_changed: i64, num_ids: i64, batch: Batch, num_blocks: i64) -> None:
        """Refuse changed rows and block ids, from word `first` on, that cannot be. Raises `InvalidArgument`."""
        self._first = first
        self._num_changed = num_changed
        table = self.table
        num_seqs = i64(len(batch.rows))
        if num_seqs > i64(len(self._lengths)):
            self._lengths = zeros_i64(int(num_seqs))
        for index in range(num_seqs):
            self._lengths[index] = table.num_blocks[batch.rows[index]]
        last: i64 = -1
        total: i64 = 0
        for at in range(first, first + ROW_WORDS * num_changed, ROW_WORDS):
            place = words[at]
            if place <= last or place >= num_seqs:
                raise InvalidArgument(f"data has a changed row of sequence {place} behind {last}, of {num_seqs}")
            self._check_row(batch.rows[place], words[at + 1], words[at + 2], words[at + 3])
            self._lengths[place] = words[at + 2]
            total += words[at + 2] - words[at + 1]
            last = place
        if total != num_ids:
            raise InvalidArgument(f"data has {num_ids} block ids; its changed rows have {total}")
        first_id = first + ROW_WORDS * num_changed
        for at in range(first_id, first_id + num_ids):
            if words[at] < 0 or words[at] >= num_blocks:
                raise InvalidArgument(f"data has block {words[at]} in a table; blocks are from 0 to {num_blocks - 1}")
        self._check_slots(batch)

    def _check_row(self, row: i64, first: i64, num_blocks: i64, num_null: i64) -> None:
        table = self.table
        follows = first == 0 or (first == table.num_blocks[row] and num_null >= table.num_null[row])
        if not (0 <= first <= num_blocks <= table.width and 0 <= num_null <= num_blocks and follows):
            raise InvalidArgument(
                f"data changes row {row} from block {first} to {num_blocks}, {num_null} of them null; it has "
                f"{table.num_blocks[row]}, {table.num_null[row]} of them null, and room for {table.width}"
            )

    def _check_slots(self, batch: Batch) -> None:
        """Every new token needs a place in a block."""
        block_size = self.table.block_size
        for index in range(i64(len(batch.rows))):
            end = batch.starts[index] + batch.scheduled[index]
            if batch.scheduled[index] > 0 and end > self._lengths[index] * block_size:
                raise InvalidArgument(
                    f"data has {end} tokens for sequence {index}; its {self._lengths[index]} blocks of {block_size} "
                    f"hold fewer"
                )

    def take_in(self, words: vec[i64], rows: vec[i64]) -> None:
        """Let the rows be what the latest `check` has read."""
        at = self._first
        source = at + ROW_WORDS * self._num_changed
        for _ in range(self._num_changed):
            row = rows[words[at]]
            self._change(row, words, source, words[at + 1], words[at + 2], words[at + 3])
            source += words[at + 2] - words[at + 1]
            at += ROW_WORDS

    def _change(self, row: i64, words: vec[i64], source: i64, first: i64, num_blocks: i64, num_null: i64) -> None:
        table = self.table
        if first == 0:
            table.cut_row(row, 0)
            table.num_null[row] = num_null
        for position in range(num_blocks - first):
            table.push_block(row, words[source + position])
        if num_null > table.num_null[row]:
            table.clear_front(row, num_null)
