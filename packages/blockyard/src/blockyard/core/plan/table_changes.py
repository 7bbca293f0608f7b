"""Changes of the block tables from step to step as arrays, read from a cache and applied to a copy.

A changed row is four numbers: its position in the batch, its first new block's position, its number of blocks, and how
many of these are null. If the position of the first new block is 0, the whole row is new.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...config import CacheConfig
from ..arrays import grown_i64, view_i64, zeros_i64
from ..sequences.block_table import BlockTable
from ..store.transfers import Transfers, numbers_of
from .batch import Batch, GivenTokens
from .plans import StepPlan, SwapPlan
from .tables import SeenRows

#: Numbers per changed row.
CHANGE: Final[i64] = 4


class TableReader:
    """Reads how a cache's block tables have changed since the last reading."""

    def __init__(self, config: CacheConfig) -> None:
        self._seen = [
            SeenRows(config.max_num_seqs, -(-config.max_model_len // group.block_size)) for group in config.layer_groups
        ]
        self._words = zeros_i64(0)

    def read(self, plan: StepPlan, group: int) -> list[npt.NDArray[np.int64]]:
        """Return the n rows that changed in one layer group, int64 (4 * n,) in the form above, and their new block ids.

        O(B + new blocks).
        """
        table = plan._tables[group]
        rows = plan._batch.rows
        seen = self._seen[group]
        num_changes = self._note_changes(seen, table, rows)
        words = self._words
        end = CHANGE * num_changes
        for at in range(0, CHANGE * num_changes, CHANGE):
            row = rows[words[at]]
            first = words[at + 1]
            count = words[at + 2] - first
            words = self._room(end + count)
            source = row * table.width + first
            for index in range(count):
                words[end + index] = i64(table.blocks[source + index])
            end += count
            seen.note(row, table, row)
        whole = view_i64(words)
        return [whole[: int(CHANGE * num_changes)].copy(), whole[int(CHANGE * num_changes) : int(end)].copy()]

    def _note_changes(self, seen: SeenRows, table: BlockTable, rows: vec[i64]) -> i64:
        """Write the changed rows to the beginning of the buffer; return their number."""
        words = self._room(CHANGE * i64(len(rows)))
        num_words: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            is_new = seen.is_new(row, table, row)
            if is_new or seen.num_blocks[row] != table.num_blocks[row] or seen.num_null[row] != table.num_null[row]:
                words[num_words] = index
                words[num_words + 1] = i64(0) if is_new else seen.num_blocks[row]
                words[num_words + 2] = table.num_blocks[row]
                words[num_words + 3] = table.num_null[row]
                num_words += CHANGE
        return num_words // CHANGE

    def _room(self, count: i64) -> vec[i64]:
        if count > len(self._words):
            self._words = grown_i64(self._words, int(2 * count))
        return self._words

    def forget(self) -> None:
        """Treat all rows as new at the next reading."""
        for seen in self._seen:
            seen.forget()


class TableCopy:
    """Copies of another process's block tables, and plans made with them. Arguments are not checked."""

    def __init__(self, config: CacheConfig) -> None:
        self.tables = [
            BlockTable(config.max_num_seqs, -(-config.max_model_len // group.block_size), group.block_size)
            for group in config.layer_groups
        ]

    def num_blocks(self, group: int) -> npt.NDArray[np.int64]:
        """Return the number of blocks of each row of a layer group, as a read-only live view."""
        return view_i64(self.tables[group].num_blocks)

    def num_null(self, group: int) -> npt.NDArray[np.int64]:
        """Return the number of leading null blocks of each row of a layer group, as a read-only live view."""
        return view_i64(self.tables[group].num_null)

    def swap_plan(self, moves: list[list[int]]) -> SwapPlan:
        """Return a plan of swaps. `moves` has swap_outs, swap_ins and copies, each a flat list of (from, to, group)."""
        return SwapPlan(self.tables, _transfers(moves))

    def step_plan(
        self,
        batch: list[npt.NDArray[np.int64]],
        token_ids: npt.NDArray[np.int64],
        changes: list[list[npt.NDArray[np.int64]]],
        moves: list[list[int]],
    ) -> StepPlan:
        """Apply a step's changes and return its plan. O(B + T + new blocks).

        `batch` has rows, starts, scheduled tokens and statuses; `changes` the results of `TableReader.read` by layer
        group.
        """
        rows = vec[i64](batch[0])
        clock = self.tables[0]
        clock.version += 1
        tokens = GivenTokens(vec[i64](token_ids))
        made = Batch(clock, tokens, rows, vec[i64](batch[1]), vec[i64](batch[2]), vec[i64](batch[3]))
        for table, (changed, blocks) in zip(self.tables, changes, strict=True):
            _change_rows(table, rows, vec[i64](changed), vec[i64](blocks))
        return StepPlan(self.tables, made, zeros_i64(0), _transfers(moves))

    def tell_states(self, plan: StepPlan, state_blocks: int, lists: list[list[int]]) -> None:
        """Set a plan's state operations: copies, clears, loads, saves and refusals, each flat."""
        told = plan._transfers
        told.state_blocks = state_blocks
        told.state_copies, told.state_clears, told.state_loads = [numbers_of(each) for each in lists[:3]]
        told.state_saves, told.state_refused = [numbers_of(each) for each in lists[3:]]


def _change_rows(table: BlockTable, rows: vec[i64], changed: vec[i64], blocks: vec[i64]) -> None:
    source: i64 = 0
    for at in range(0, i64(len(changed)), CHANGE):
        row = rows[changed[at]]
        count = changed[at + 2] - changed[at + 1]
        num_null = changed[at + 3]
        if changed[at + 1] == 0:
            table.cut_row(row, 0)
            table.num_null[row] = num_null
        for index in range(count):
            table.push_block(row, blocks[source + index])
        if num_null > table.num_null[row]:
            table.clear_front(row, num_null)
        source += count


def _transfers(moves: list[list[int]]) -> Transfers:
    transfers = Transfers()
    transfers.swap_outs = numbers_of(moves[0])
    transfers.swap_ins = numbers_of(moves[1])
    transfers.copies = numbers_of(moves[2])
    return transfers
