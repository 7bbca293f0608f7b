"""The states of a hybrid model: which are checkpointed, restored and dropped, step by step."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...config import CacheConfig
from ...errors import InvalidArgument
from ..blocks.ledger import BlockLedger
from ..index.prompt import Hit, Prompt
from ..policies.states.checkpoint import BRANCH
from ..policies.states.orders import make_order
from ..policies.states.prefix_tree import NO_CHECKPOINT
from ..policies.states.registry import CheckpointRegistry
from ..policies.states.request_record import NO_RECORD
from ..sequences.table import SequenceTable
from .checkpoint_hits import CheckpointHits
from .checkpoint_positions import CheckpointPositions
from .checkpoint_saves import CheckpointSaves
from .content_ledger import ContentLedger
from .group_table import GroupTable
from .needed_tokens import NeededTokens
from .refused_checkpoints import RefusedCheckpoints
from .running_requests import RunningRequests
from .step_decisions import StepDecisions
from .transfers import Transfers
from .working_states import WorkingStates

#: Hashes of past prompts are remembered for this many pools of tokens.
REMEMBERED_POOLS: Final = 4


class StateGroup:
    """The states of all sequences: each has a working state in the slot of its row, and checkpoints in the pool.

    A checkpoint takes `num_parts` blocks of the pool, cached as (content, part) under the content of the token block
    before its position. So all that holds for a block holds for it. It is complete while all of its parts are cached.

    Attributes:
        hits: finds and holds the checkpoints that prompts hit.
        registry: past prompts and their checkpoints; the eviction policy asks it which one to drop.
        alignment: checkpoint positions are multiples of this many tokens.
        num_parts: blocks of a checkpoint.
    """

    def __init__(
        self, config: CacheConfig, pool: ContentLedger, token_blocks: BlockLedger, sequences: SequenceTable
    ) -> None:
        self.sequences = sequences
        self.block_size: i64 = config.hash_block_size
        self.alignment: i64 = config.hit_alignment
        self.num_parts: i64 = config.state_blocks
        self.max_model_len: i64 = config.max_model_len
        first = config.layer_groups[0].block_size
        max_idle_nodes = REMEMBERED_POOLS * config.num_blocks * first // config.hash_block_size
        order = make_order(config.states.order, self.num_parts * first)
        self.registry = CheckpointRegistry(order, self.block_size, max_idle_nodes, config.num_blocks)
        self._running = RunningRequests(self.registry, pool, token_blocks, sequences)
        self.hits = CheckpointHits(pool, sequences, self.num_parts, self.alignment)
        self._positions = CheckpointPositions(config, sequences)
        self._refused = RefusedCheckpoints(pool, sequences, self._running, self.num_parts)
        self._decisions = StepDecisions(self._positions, self._refused, config.max_num_seqs)
        self._saves = CheckpointSaves(pool, token_blocks, sequences, self._positions, self._running, self.num_parts)
        self._working = WorkingStates(sequences)
        self._tokens = NeededTokens(token_blocks, self.registry)
        is_announced = config.observe.track_misses or config.observe.enable_kv_cache_events
        pool.make_part_room(self.num_parts, config.max_num_seqs, not is_announced)

    # A sequence's life.

    def _open(self, row: i64, last: i64) -> None:
        self._positions.open(row, last)
        self._refused.open(row)
        self._saves.end_latest(row)
        self._running.open(row)
        self._working.is_filled[row] = 0

    def admit(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Begin the record of an admitted prompt, and choose its checkpoint positions. O(blocks)."""
        last = (prompt.num_tokens - 1) // self.alignment * self.alignment
        self._open(row, last)
        if not self._positions.is_caching:
            return
        start = hit.num_usable * self.block_size
        self._running.begin(row, prompt, hit, last)
        record = self._running.records[row]
        self._positions.choose(row, prompt, start, max(record.known, hit.num_served * self.block_size))
        if hit.state and record.checkpoint == NO_CHECKPOINT:
            # The registry may have forgotten it; the hit shows what it is worth.
            self._running.add_checkpoint(row, start, BRANCH, hit.state)
        if prompt.external_state_tokens > start:
            self._positions.skip(row, prompt.external_state_tokens, 0)
            if hit.lacks_state:
                self._positions.expect(row, prompt.external_state_tokens)

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` go on from the state of `row`, which the next plan copies."""
        self._open(child, self._positions.last[row])
        self._positions.fork(row, child)
        self._running.fork(row, child)
        self._working.fork(row, child)

    def shortest_cut(self, row: i64) -> i64:
        """Return the fewest computed tokens that a cut may leave: a state cannot be cut."""
        is_uncut = self._working.is_filled[row] == 0 and not self._positions.is_missing(row)
        return 0 if is_uncut else self.sequences.num_computed[row]

    def end(self, row: i64, tables: list[GroupTable]) -> None:
        """End the record of a row, which still holds its blocks. O(blocks)."""
        if self._running.records[row] is NO_RECORD:
            return
        self._running.extend(row)
        self._running.place_blocks(row, tables)
        self._refused.register(row, self._saves.register_latest(row))
        computed = self.sequences.num_computed[row]
        last = self._positions.last[row]
        is_short = self._positions.rules.takes_output_end and computed - computed % self.alignment == last
        self._running.end(row, last, is_short)

    def close(self, row: i64) -> None:
        """Drop the saves of a row, and forget it."""
        self.drop_saves(row)
        self._working.copies.drop(row)
        self._open(row, 0)

    def is_missing(self, row: i64) -> bool:
        """Return whether a row has no state after its computed tokens, because one is supplied later."""
        return self._positions.is_missing(row)

    def is_filled(self, row: i64) -> bool:
        """Return whether a plan has filled the slot of a row."""
        return self._working.is_filled[row] != 0

    def slot_of(self, row: i64) -> i64:
        """Return the slot that has the state of `row` now. O(1)."""
        return self._working.slot_of(row)

    def skip(self, row: i64, num_tokens: i64, checkpoint: i64) -> None:
        """Checkpoint nothing before `num_tokens` tokens, whose state is supplied, but `checkpoint`, if above 0."""
        self._positions.skip(row, num_tokens, checkpoint)

    def note_leaving(self, row: i64, group: GroupTable, last: i64) -> None:
        """Record the nodes of a row's blocks before place `last` of a group, which leave its window."""
        self._running.place_group_blocks(row, group, group.num_null[row], last)

    # The step.

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """Decide which states the step saves, and end chunks there. O(batch), one comparison for most rows.

        Rows with more to do than that lose `ready`: `begin` serves them. A decoding row stays ready if it reaches no
        position, or one whose save replaces its latest checkpoint.

        Raises:
            InvalidArgument: a row would go on from a state that is missing.
        """
        positions, decisions, saves = self._positions, self._decisions, self._saves
        decisions.begin()
        saves.requests.clear()
        self._working.opening.clear()
        ready = self.sequences.ready
        seen_from = positions.seen_from
        following = positions.next_position
        num_saves = saves.records.num_of_row
        num_refused = self._refused.num_pending
        missing_until = positions.missing_until
        some_wait = saves.records.total > 0 or self._refused.total > 0
        for place in range(i64(len(rows))):
            row = rows[place]
            start = first[row]
            # Not a sum: counts that are too large are refused later.
            if seen_from[row] <= start and counts[place] < following[row] - start:
                if some_wait and (num_saves[row] > 0 or num_refused[row] > 0):
                    ready[row] = 0
                continue
            if start < missing_until[row] and 0 < counts[place] < missing_until[row] - start:
                self._refuse(row, place, start, counts[place])
            if counts[place] > 0 and counts[place] <= self.max_model_len - start:
                is_cut = positions.cuts_at(row, start)
                decisions.plan(row, start, start + counts[place], is_cut)
                if is_cut and decisions.num_accepted(row) > 0:
                    counts[place] = decisions.accepted(row, 0) - start
                if num_saves[row] == 0 and num_refused[row] == 0 and self._is_done(row, start, counts[place]):
                    decisions.record_later(row)
                    continue
            ready[row] = 0

    def _is_done(self, row: i64, start: i64, count: i64) -> bool:
        """Return whether a planned row needs no `begin`. Requests the save that replaces its latest checkpoint."""
        if self._decisions.has_refusals(row):
            return False
        if self._decisions.num_accepted(row) == 0:
            return True
        if count > 1 or start >= self.sequences.ready[row] or not self._saves.replaces(row, start + 1):
            return False
        self._saves.request(row, start + 1)
        return True

    def _refuse(self, row: i64, place: i64, start: i64, count: i64) -> None:
        until = self._positions.missing_until[row]
        raise InvalidArgument(
            f"num_new_tokens[{place}] is {count} for {self.sequences.name(row)}; it must be 0 or at least "
            f"{until - start}: {start} tokens are computed, and the next state is supplied after {until}"
        )

    def num_to_drop(self, row: i64) -> i64:
        """Return the blocks of a row's saves whose step was not committed: `begin` releases them. O(saves)."""
        return self._saves.num_to_drop(row)

    def num_to_save(self, row: i64) -> i64:
        """Return the blocks that the row's checkpoints in the step take."""
        count = self._decisions.num_accepted(row)
        if count > 0 and self._saves.replaces(row, self._decisions.accepted(row, 0)):
            count -= 1
        return self.num_parts * count

    def begin(self, row: i64, end: i64, transfers: Transfers) -> None:
        """Let the plan fill the slot of a row, and save its states up to `end` tokens."""
        self._saves.settle(row)
        self._working.fill(row, transfers)
        for number in range(self._decisions.num_accepted(row)):
            self._saves.request(row, self._decisions.accepted(row, number))
        self._decisions.record(row)
        self._refused.list_until(row, end, transfers)

    def save(self, transfers: Transfers) -> None:
        """Complete a plan, once all rows have their blocks, with copies, saves and fills of slots."""
        self._decisions.record_rest()
        self._tokens.keep()
        transfers.state_blocks = int(self.num_parts)
        self._working.copy_slots(transfers)
        self._saves.make(transfers)
        self._working.note_filled(transfers)

    def settle(self, rows: vec[i64]) -> None:
        """Cache the saves of these rows whose tokens are computed. O(batch), and O(blocks) for each save."""
        self._saves.settle_all(rows)

    def drop_saves(self, row: i64) -> None:
        """Release the blocks of a row's saves that are not cached. O(saves)."""
        self._saves.drop(row, -1)

    # What there is.

    def pending_blocks(self, row: i64) -> list[int]:
        """Return the blocks that a row holds for saves. O(blocks)."""
        return self._saves.pending_blocks(row)

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many checkpoints were saved, cached, replaced and refused since the start."""
        saves = self._saves
        return int(saves.num_saved), int(saves.num_cached), int(saves.num_replaced), int(self._refused.num_listed)

    def check(self) -> None:
        """Check the records of saves. O(records + rows). Raises `InvariantError`."""
        self._saves.check()
