"""At which checkpoint positions the states of running sequences are wanted."""

from mypy_extensions import i64

from ...config import CacheConfig
from ..arrays import zeros_i64
from ..index.prompt import Prompt
from ..policies.states.checkpoint import BRANCH, OUTPUT_END, PROMPT_END
from ..policies.states.checkpoint_rules import CheckpointRules
from ..policies.states.prefix_tree import NO_CHECKPOINT
from ..policies.states.request_record import NO_RECORD
from ..sequences.table import SequenceTable
from .content_ledger import ContentLedger
from .group_table import NEVER
from .running_requests import RunningRequests
from .transfers import Transfers


class CheckpointPositions:
    """Checkpoint positions of each row: those that the rules choose in its prompt, then those in its output.

    A position is skipped if the order of states refuses it, because its checkpoint would be the next to be dropped. The
    lists of a row hold pairs (position, kind); they are replaced, never changed.

    Attributes:
        alignment: checkpoint positions are multiples of this many tokens.
        last: by row, the last position of its prompt.
        next_position: by row, the next wanted position after `seen_from` tokens, or any up to it.
        seen_from: by row, the tokens from which `next_position` is known; `NEVER` if it is not.
        num_refused: by row, the refusals that no plan has announced yet.
        missing_until: by row, its slot has no state before this many tokens are computed, though some are.
    """

    def __init__(
        self, config: CacheConfig, pool: ContentLedger, sequences: SequenceTable, requests: RunningRequests
    ) -> None:
        self.pool = pool
        self.sequences = sequences
        self.requests = requests
        self.registry = requests.registry
        self.alignment: i64 = config.hit_alignment
        self.state_blocks: i64 = config.state_blocks
        self.cuts_chunks = config.states.cut_chunks
        self.is_caching = config.enable_prefix_caching
        self.rules = CheckpointRules(config.states.checkpoints, self.alignment)
        #: Refusals that plans have announced.
        self.num_announced: i64 = 0
        rows = config.max_num_seqs
        self.last = zeros_i64(rows)
        self.next_position = zeros_i64(rows)
        self.seen_from = zeros_i64(rows)
        self.num_refused = zeros_i64(rows)
        self.missing_until = zeros_i64(rows)
        #: By row, tokens whose states come from outside: their chunks are not cut.
        self._external = zeros_i64(rows)
        self._nothing: list[tuple[int, int]] = []
        #: By row, ascending.
        self._wanted = [self._nothing] * rows
        #: By row, refusals that no plan has announced yet.
        self._refused = [self._nothing] * rows
        #: By row, all refusals, but of its output only the latest.
        self._all_refused = [self._nothing] * rows
        #: The refusals of the step that is being planned: row, and the lists of the row before it.
        self._new_refusals: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]] = []

    # A sequence's life.

    def open(self, row: i64, last: i64) -> None:
        """Want nothing for a row. last: the last position of its prompt."""
        self.last[row] = last
        self.seen_from[row] = NEVER
        self.missing_until[row] = 0
        self.num_refused[row] = 0
        self._external[row] = 0
        self._wanted[row] = self._nothing
        self._refused[row] = self._nothing
        self._all_refused[row] = self._nothing

    def choose(self, row: i64, prompt: Prompt, hit: i64, known: i64) -> None:
        """Want the positions that the rules choose in a prompt. hit, known: in tokens. O(positions ** 2)."""
        rules = self.rules
        rules.choose(hit, known, self.last[row], 0, prompt.checkpoints, prompt.branches)
        self._wanted[row] = sorted(zip(rules.positions, rules.kinds, strict=True))

    def fork(self, row: i64, child: i64) -> None:
        """Want the same positions for `child` as for `row`."""
        self._wanted[child] = self._wanted[row]
        self.missing_until[child] = self.missing_until[row]

    def skip(self, row: i64, num_tokens: i64, extra: i64) -> None:
        """Want nothing before `num_tokens` tokens, whose state comes from outside, and do not cut them. O(wanted).

        Args:
            row: row of the sequence.
            num_tokens: tokens before the state; it is wanted itself if that is a checkpoint position of the prompt.
            extra: an earlier position that is wanted nevertheless; 0 for none.
        """
        wanted = [pair for pair in self._wanted[row] if pair[0] >= num_tokens]
        if self.is_caching:
            is_position = num_tokens % self.alignment == 0 and 0 < num_tokens <= self.last[row]
            if is_position and not (wanted and wanted[0][0] == num_tokens):
                wanted.insert(0, (int(num_tokens), int(BRANCH)))
            if extra > 0:
                wanted.insert(0, (int(extra), int(PROMPT_END if extra == self.last[row] else BRANCH)))
        self._wanted[row] = wanted
        self._external[row] = num_tokens
        self.seen_from[row] = NEVER

    def expect(self, row: i64, num_tokens: i64) -> None:
        """Note that a row's slot has no state before `num_tokens` tokens, when one is supplied."""
        self.missing_until[row] = num_tokens

    def is_missing(self, row: i64) -> bool:
        """Return whether a row has no state after its computed tokens, because one is supplied later."""
        return self.sequences.num_computed[row] < self.missing_until[row]

    # The step.

    def next_after(self, row: i64, start: i64) -> i64:
        """Return the next wanted position after `start` tokens; `NEVER` for none. O(1) amortised.

        Positions that the order of states refuses are skipped and noted as refused; a step that fails calls
        `undo_refusals`.
        """
        if self.seen_from[row] <= start < self.next_position[row]:
            return self.next_position[row]
        found = NEVER
        if start < self.last[row]:
            for position, kind in self._wanted[row]:
                if position > start and self._is_accepted(row, position, kind):
                    found = position
                    break
        if self.rules.takes_output_end and self.is_caching:
            end = max(start, self.last[row])
            end += self.alignment - end % self.alignment
            if end < found and self._is_accepted(row, end, OUTPUT_END):
                found = end
        self.seen_from[row] = start if start >= self.missing_until[row] else NEVER
        self.next_position[row] = found
        return found

    def first_of_step(self, row: i64, start: i64) -> i64:
        """Return the first wanted position of a step from `start` tokens on: before it, if its state is supplied."""
        return self.next_after(row, start if start >= self.missing_until[row] else 0)

    def cuts_at(self, row: i64, start: i64) -> bool:
        """Return whether a chunk from `start` tokens on ends at the next wanted position."""
        return self.cuts_chunks and start >= self._external[row]

    def kind_at(self, row: i64, position: i64) -> i64:
        """Return why a position in a prompt is wanted."""
        for wanted, kind in self._wanted[row]:
            if wanted == position:
                return kind
        return BRANCH

    # Refusals.

    def _is_accepted(self, row: i64, position: i64, kind: i64) -> bool:
        """Return whether the order of states would keep a checkpoint; note a refusal otherwise.

        Free blocks are room for it only if another request like this one has room beside it.
        """
        for refused, _ in self._refused[row]:
            if refused == position:
                return False
        record = self.requests.records[row]
        if not self.registry.order.learns or record is NO_RECORD:
            return True
        num_free = self.pool.queue.num_free - self.pool.stack.num_withheld()
        if num_free >= self.state_blocks + self.sequences.num_blocks[row]:
            return True
        if self.registry.would_score(record, position, kind) >= self.registry.lowest_score():
            return True
        pair = (int(position), int(kind))
        self._new_refusals.append((int(row), self._refused[row], self._all_refused[row]))
        self._refused[row] = [*self._refused[row], pair]
        self.num_refused[row] += 1
        refused_so_far = self._all_refused[row]
        if position > self.last[row] and refused_so_far and refused_so_far[-1][0] > self.last[row]:
            refused_so_far = refused_so_far[:-1]
        self._all_refused[row] = [*refused_so_far, pair]
        return False

    def begin_step(self) -> None:
        """Begin to note the refusals of a step."""
        self._new_refusals.clear()

    def undo_refusals(self) -> None:
        """Forget the refusals since `begin_step`: the step failed. O(refusals)."""
        while self._new_refusals:
            number, refused, refused_so_far = self._new_refusals.pop()
            row: i64 = number
            self._refused[row] = refused
            self._all_refused[row] = refused_so_far
            self.num_refused[row] = len(refused)
            self.seen_from[row] = NEVER

    def announce_refused(self, row: i64, end: i64, transfers: Transfers) -> None:
        """Let the plan list the refusals up to `end` tokens."""
        if self.num_refused[row] == 0:
            return
        for position, _ in self._refused[row]:
            if position <= end:
                transfers.refuse_state(row, position)
                self.num_announced += 1
        self._refused[row] = [pair for pair in self._refused[row] if pair[0] > end]
        self.num_refused[row] = len(self._refused[row])

    def register_refused(self, row: i64, latest: i64) -> None:
        """Add the refused checkpoints to the registry and drop them: their classes learn of missed hits.

        latest: position of the latest checkpoint of the output; 0 for none.
        """
        for position, kind in self._all_refused[row]:
            if position <= self.sequences.num_computed[row] and (position <= self.last[row] or position > latest):
                number = self.registry.add(self.requests.records[row], position, kind)
                if number != NO_CHECKPOINT:
                    self.registry.drop(number)
