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
    """Drives the parts that know about states; each sequence has a working state in the slot of its row.

    A checkpoint takes `num_parts` blocks of the pool, cached as (content, part) under the content of the token block
    before its position. So all that holds for a block holds for it. It is complete while all of its parts are cached.

    Attributes:
        positions: where checkpoints are wanted.
        refused: those that are not worth saving.
        decisions: which ones the step being planned saves.
        saves: checkpoints that are being saved.
        working: the slots, and the checkpoints that hits restore.
        running: running sequences, as the registry knows them.
        registry: past prompts and their checkpoints.
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
        self.running = RunningRequests(self.registry, pool, token_blocks, sequences)
        self.positions = CheckpointPositions(config, sequences)
        self.refused = RefusedCheckpoints(pool, sequences, self.running, self.num_parts)
        self.decisions = StepDecisions(self.positions, self.refused, config.max_num_seqs)
        self.saves = CheckpointSaves(pool, token_blocks, sequences, self.positions, self.running, self.num_parts)
        self.working = WorkingStates(pool, sequences, self.num_parts, self.alignment)
        self._tokens = NeededTokens(token_blocks, self.registry)
        is_announced = config.observe.track_misses or config.observe.enable_kv_cache_events
        pool.make_part_room(self.num_parts, config.max_num_seqs, not is_announced)

    # A sequence's life.

    def _open(self, row: i64, last: i64) -> None:
        self.positions.open(row, last)
        self.refused.open(row)
        self.saves.end_latest(row)
        self.running.open(row)
        self.working.is_filled[row] = 0

    def admit(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Begin the record of an admitted prompt, and choose its checkpoint positions. O(blocks)."""
        last = (prompt.num_tokens - 1) // self.alignment * self.alignment
        self._open(row, last)
        if not self.positions.is_caching:
            return
        start = hit.num_usable * self.block_size
        self.running.begin(row, prompt, hit, last)
        record = self.running.records[row]
        self.positions.choose(row, prompt, start, max(record.known, hit.num_served * self.block_size))
        if hit.state and record.checkpoint == NO_CHECKPOINT:
            # The registry may have forgotten it; the hit shows what it is worth.
            self.running.add_checkpoint(row, start, BRANCH, hit.state)
        if prompt.external_state_tokens > start:
            self.positions.skip(row, prompt.external_state_tokens, 0)
            if hit.lacks_state:
                self.positions.expect(row, prompt.external_state_tokens)

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` go on from the state of `row`, which the next plan copies."""
        self._open(child, self.positions.last[row])
        self.positions.fork(row, child)
        self.running.fork(row, child)
        self.working.fork(row, child)

    def shortest_cut(self, row: i64) -> i64:
        """Return the fewest computed tokens that a cut may leave: a state cannot be cut."""
        is_uncut = self.working.is_filled[row] == 0 and not self.positions.is_missing(row)
        return 0 if is_uncut else self.sequences.num_computed[row]

    def end(self, row: i64, tables: list[GroupTable]) -> None:
        """End the record of a row, which still holds its blocks. O(blocks)."""
        if self.running.records[row] is NO_RECORD:
            return
        self.running.extend(row)
        self.running.place_blocks(row, tables)
        self.refused.register(row, self.saves.register_latest(row))
        computed = self.sequences.num_computed[row]
        last = self.positions.last[row]
        is_short = self.positions.rules.takes_output_end and computed - computed % self.alignment == last
        self.running.end(row, last, is_short)

    def close(self, row: i64) -> None:
        """Drop the saves of a row, and forget it."""
        self.saves.drop(row, -1)
        self.working.copies.drop(row)
        self._open(row, 0)

    # The step.

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """Decide which states the step saves, and end chunks there. O(batch), one comparison for most rows.

        Rows with more to do than that lose `ready`: `begin` serves them. A decoding row stays ready if it reaches no
        position, or one whose save replaces its latest checkpoint.

        Raises:
            InvalidArgument: a row would go on from a state that is missing.
        """
        positions, decisions, saves = self.positions, self.decisions, self.saves
        decisions.begin()
        saves.requests.clear()
        self.working.opening.clear()
        ready = self.sequences.ready
        seen_from = positions.seen_from
        following = positions.next_position
        num_saves = saves.records.num_of_row
        num_refused = self.refused.num_pending
        missing_until = positions.missing_until
        for place in range(i64(len(rows))):
            row = rows[place]
            start = first[row]
            # Not a sum: counts that are too large are refused later.
            if seen_from[row] <= start and counts[place] < following[row] - start:
                if num_saves[row] > 0 or num_refused[row] > 0:
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
        if self.decisions.has_refusals(row):
            return False
        if self.decisions.num_accepted(row) == 0:
            return True
        if count > 1 or start >= self.sequences.ready[row] or not self.saves.replaces(row, start + 1):
            return False
        self.saves.request(row, start + 1)
        return True

    def _refuse(self, row: i64, place: i64, start: i64, count: i64) -> None:
        until = self.positions.missing_until[row]
        raise InvalidArgument(
            f"num_new_tokens[{place}] is {count} for {self.sequences.name(row)}; it must be 0 or at least "
            f"{until - start}: {start} tokens are computed, and the next state is supplied after {until}"
        )

    def num_to_save(self, row: i64) -> i64:
        """Return the blocks that the row's checkpoints in the step take."""
        count = self.decisions.num_accepted(row)
        if count > 0 and self.saves.replaces(row, self.decisions.accepted(row, 0)):
            count -= 1
        return self.num_parts * count

    def begin(self, row: i64, end: i64, transfers: Transfers) -> None:
        """Let the plan fill the slot of a row, and save its states up to `end` tokens."""
        self.saves.settle(row)
        self.working.fill(row, transfers)
        for number in range(self.decisions.num_accepted(row)):
            self.saves.request(row, self.decisions.accepted(row, number))
        self.decisions.record(row)
        self.refused.list_until(row, end, transfers)

    def save(self, transfers: Transfers) -> None:
        """Complete a plan, once all rows have their blocks, with copies, saves and fills of slots."""
        self.decisions.record_rest()
        self._tokens.keep()
        transfers.state_blocks = int(self.num_parts)
        self.working.copy_slots(transfers)
        self.saves.make(transfers)
        self.working.note_filled(transfers)
