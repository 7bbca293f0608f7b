"""Checkpoints on their way into the cache: from the plan that saves them to the commit that reaches their position."""

from librt.vecs import vec
from mypy_extensions import i64

from ...ids import NO_CONTENT
from ..arrays import zeros_i32, zeros_i64
from ..blocks.ledger import BlockLedger
from ..policies.states.block_map import BlockMap
from ..policies.states.checkpoint import OUTPUT_END
from ..policies.states.prefix_tree import NO_CHECKPOINT
from ..sequences.table import SequenceTable
from .checkpoint_positions import CheckpointPositions
from .content_ledger import FIRST_PART, ContentLedger
from .running_requests import RunningRequests
from .save_records import DONE, NONE, OPEN, REPLACING, UNLISTED, SaveRecords
from .transfers import Numbers, Transfers


class CheckpointSaves:
    """Takes blocks for the checkpoints of a step, and caches them once their tokens are computed.

    The checkpoint of a prompt is in the registry as soon as it is cached. Of an output only the latest checkpoint stays
    cached: the next one takes its blocks (it *replaces* it), and the registry gets it when the sequence ends.

    Attributes:
        records: the saves of each row, and the latest checkpoints of outputs.
        requests: (row, position) of each save that the next plan is to make.
        num_saved, num_cached, num_replaced: counts since the start, for `stats()`.
    """

    def __init__(
        self,
        pool: ContentLedger,
        token_blocks: BlockLedger,
        sequences: SequenceTable,
        positions: CheckpointPositions,
        running: RunningRequests,
        num_parts: i64,
    ) -> None:
        self.pool = pool
        self.token_blocks = token_blocks
        self.sequences = sequences
        self.positions = positions
        self.running = running
        self.block_map: BlockMap = running.block_map
        self.num_parts = num_parts
        self.block_size: i64 = token_blocks.block_size
        rows = int(sequences.max_num_seqs)
        self.records = SaveRecords(rows, num_parts)
        self.requests = Numbers()
        self.num_saved: i64 = 0
        self.num_cached: i64 = 0
        self.num_replaced: i64 = 0
        #: By row, the record of the latest checkpoint of its output; 0 for none.
        self._latest = zeros_i64(rows)
        #: Rows of a batch that have saves, and the content before the first save of each.
        self._due = zeros_i64(rows)
        self._due_contents = zeros_i64(rows)
        self._one_state = zeros_i32(int(num_parts))

    # The plan.

    def request(self, row: i64, position: i64) -> None:
        """Let the next plan save a row's state at a position, if there are free blocks."""
        self.requests.add(row)
        self.requests.add(position)

    def replaces(self, row: i64, position: i64) -> bool:
        """Return whether a save replaces the output's latest checkpoint, and takes its blocks. O(1).

        Not if the step may end before the position, because then the latest one would be missed.
        """
        latest = self._latest[row]
        if latest == NONE or position > self.sequences.num_tokens[row]:
            return False
        head = i64(self.records.blocks[latest * self.num_parts])
        return self.pool.ref_cnt[head] == 0 and self.block_map.output_of[head] == latest

    def num_to_drop(self, row: i64) -> i64:
        """Return the blocks of saves whose step was not committed: `settle` releases them. O(saves)."""
        if self.records.num_of_row[row] == 0 or self.sequences.num_ahead[row] > 0:
            return 0
        dropped: i64 = 0
        reach: i64 = -1 if self.positions.is_missing(row) else self.sequences.num_computed[row]
        number = self.records.first[row]
        while number != NONE:
            dropped += 1 if self.records.position[number] > reach else 0
            number = self.records.following[number]
        return self.num_parts * dropped

    def make(self, transfers: Transfers) -> None:
        """Take blocks for the requested saves, in order, while some are free: a save never fails a step."""
        if self.requests.count == 0:
            return
        records = self.records
        requests = self.requests
        parts = self.num_parts
        transfers.make_state_room(requests.count // 2 * (parts + 2))
        for place in range(0, requests.count, 2):
            row = i64(requests.items[place])
            position = i64(requests.items[place + 1])
            number = self._latest[row]
            replaces = self.replaces(row, position)
            if replaces and self.pool.hold_state(records.blocks, number * parts, parts, number):
                # All blocks but the first stay cached.
                self._latest[row] = NONE
                self.num_replaced += 1
                records.append(row, number, position, REPLACING)
            else:
                if self.pool.charge_row(row) < parts:
                    continue
                if replaces and self._uncache_latest(row):
                    self.num_replaced += 1
                # Only blocks that the eviction policy has named already.
                if self.pool.queue.num_empty_first(self.pool.index, parts) < parts:
                    continue
                number = records.next_free()
                self.pool.acquire(records.blocks, number * parts, parts)
                records.add(row, position)
            self.num_saved += 1
            transfers.save_state(row, position, records.blocks, number * parts, parts)
        requests.clear()

    # The commit.

    def settle_all(self, rows: vec[i64]) -> None:
        """Settle the rows of a batch. O(batch) if anything is being saved, and O(blocks) for each save."""
        records = self.records
        if records.total == 0:
            return
        num_of_row = records.num_of_row
        count: i64 = 0
        for place in range(i64(len(rows))):
            row = rows[place]
            if num_of_row[row] > 0:
                self._due[count] = row
                self._due_contents[count] = self._content_at(row, records.position[records.first[row]])
                count += 1
        self.pool.load_contents(self._due_contents, count, FIRST_PART)
        for place in range(count):
            self.settle(self._due[place])

    def _content_at(self, row: i64, position: i64) -> i64:
        """Return the content before a position; `NO_CONTENT` if it is not published, or not cached any longer."""
        place = position // self.block_size
        if place > self.sequences.num_published[row]:
            return NO_CONTENT
        return self.token_blocks.index.content_of(self.sequences.block_at(row, place - 1))

    def settle(self, row: i64) -> None:
        """Cache the saves whose tokens are computed, and drop those that no open reservation reaches."""
        records = self.records
        if records.num_of_row[row] == 0:
            return
        computed: i64 = -1 if self.positions.is_missing(row) else self.sequences.num_computed[row]
        ahead = self.sequences.num_ahead[row]
        if computed < 0 and ahead > 0:
            return
        number = records.first[row]
        while number != NONE:
            if records.status[number] >= OPEN and records.position[number] <= computed:
                self._cache(row, number)
            number = records.following[number]
        self.drop(row, computed + ahead)

    def _cache(self, row: i64, number: i64) -> None:
        """Cache one checkpoint, unless there is one of the same content."""
        records = self.records
        position = records.position[number]
        content = self._content_at(row, position)
        if content == NO_CONTENT or not self._is_free(content):
            self._give_up(row, number)
            return
        self.num_cached += 1
        records.content[number] = content
        first = number * self.num_parts
        is_of_output = position > self.positions.last[row]
        if is_of_output:
            self.num_replaced += 1 if self._uncache_latest(row) else 0
            self._latest[row] = number
        if records.status[number] == REPLACING:
            records.status[number] = DONE
            self.pool.cache_first_part(i64(records.blocks[first]), content, FIRST_PART)
            self.pool.release_state(row, records.blocks, first, self.num_parts, number)
            return
        self.pool.cache_parts(records.blocks, first, self.num_parts, content, FIRST_PART)
        if is_of_output:
            self.block_map.set_output(records.blocks, first, self.num_parts, number)
        else:
            self.running.extend(row)
            kind = self.positions.kind_at(row, position)
            self.running.add_checkpoint(row, position, kind, records.blocks_of(number))
        self._release(row, number)

    def _is_free(self, content: i64) -> bool:
        """Return whether a content has no checkpoint; uncache one that is idle and was dropped. O(parts)."""
        parts = self.pool.find_parts(content, FIRST_PART, self.num_parts)
        if len(parts) < self.num_parts:
            return True
        block_map, stack = self.block_map, self.pool.stack
        for part in range(self.num_parts):
            block = i64(parts[part])
            is_part = block_map.checkpoint_of[block] != NO_CHECKPOINT or block_map.output_of[block] != NONE
            if is_part or self.pool.ref_cnt[block] > 0 or stack.is_retained(block):
                return False
        self.pool.uncache_run(parts, 0, self.num_parts)
        return True

    # The latest checkpoint of an output.

    def register_latest(self, row: i64) -> i64:
        """Add the latest checkpoint of an output, which ends, to the registry. Returns its position; 0 for none."""
        latest = self._latest[row]
        if latest == NONE:
            return 0
        records = self.records
        position = records.position[latest]
        found = self.pool.find_parts(records.content[latest], FIRST_PART, self.num_parts)
        blocks = [int(block) for block in found]
        if blocks == records.blocks_of(latest) and self.block_map.output_of[i64(found[0])] == latest:
            self.running.add_checkpoint(row, position, OUTPUT_END, blocks)
        self._uncache_latest(row)
        return position

    def end_latest(self, row: i64) -> None:
        """Forget which checkpoint is the latest of a row's output."""
        if self._latest[row] != NONE:
            self.records.free(self._latest[row])
            self._latest[row] = NONE

    def _uncache_latest(self, row: i64) -> bool:
        """Uncache the latest checkpoint of an output, unless the registry has it. Returns whether it was cached."""
        records = self.records
        number = self._latest[row]
        first = number * self.num_parts
        count: i64 = 0
        for part in range(self.num_parts if number != NONE else 0):
            block = records.blocks[first + part]
            if self.block_map.output_of[i64(block)] == number:
                self._one_state[count] = block
                count += 1
        if count > 0:
            self.pool.uncache_run(self._one_state, 0, count)
        if number != NONE and records.status[number] == UNLISTED:
            self.end_latest(row)
        return count > 0

    # Dropping saves.

    def _give_up(self, row: i64, number: i64) -> None:
        if self.records.status[number] == REPLACING:
            first = number * self.num_parts
            self.block_map.set_output(self.records.blocks, first, 1, NONE)
            self.pool.uncache_run(self.records.blocks, first + 1, self.num_parts - 1)
        self._release(row, number)

    def _release(self, row: i64, number: i64) -> None:
        self.records.status[number] = DONE
        self.pool.release_row_blocks_in_order(row, self.records.blocks, number * self.num_parts, self.num_parts)

    def drop(self, row: i64, reach: i64) -> None:
        """Drop the saves of a row after `reach` tokens, -1 for all, and unlink those that are done. O(saves)."""
        records = self.records
        before = NONE
        number = records.first[row]
        while number != NONE:
            after = records.following[number]
            if records.status[number] >= OPEN and records.position[number] > reach:
                self._give_up(row, number)
            if records.status[number] >= OPEN:
                before = number
            else:
                records.unlink(row, number, before)
                if number != self._latest[row]:
                    records.free(number)
            number = after

    def pending_blocks(self, row: i64) -> list[int]:
        """Return the blocks that a row holds for saves. O(blocks)."""
        records = self.records
        return [block for number in records.numbers_of(row) for block in records.blocks_of(i64(number))]

    def check(self) -> None:
        """Check that each record is where it belongs. O(records + rows). Raises `InvariantError`."""
        rows = range(i64(len(self._latest)))
        self.records.check([int(self._latest[row]) for row in rows if self._latest[row] != NONE])
