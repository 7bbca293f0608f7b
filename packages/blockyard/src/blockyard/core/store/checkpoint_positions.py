"""At which checkpoint positions the states of running sequences are wanted."""

from mypy_extensions import i64

from ...config import CacheConfig
from ..arrays import zeros_i64
from ..index.prompt import Prompt
from ..policies.states.checkpoint import BRANCH, OUTPUT_END, PROMPT_END
from ..policies.states.checkpoint_rules import CheckpointRules
from ..sequences.table import SequenceTable
from .group_table import NEVER


class CheckpointPositions:
    """Wanted positions of each row: those that the rules choose in its prompt, then those in its output.

    Attributes:
        alignment: checkpoint positions are multiples of this many tokens.
        last: by row, the last position of its prompt.
        next_position: by row, the next position after `seen_from` tokens that is not refused, or any up to it.
        seen_from: by row, the tokens from which `next_position` is known; `NEVER` if it is not.
        missing_until: by row, its slot has no state before this many tokens are computed, though some are.
    """

    def __init__(self, config: CacheConfig, sequences: SequenceTable) -> None:
        self.sequences = sequences
        self.alignment: i64 = config.hit_alignment
        self.cuts_chunks = config.states.cut_chunks
        self.is_caching = config.enable_prefix_caching
        self.rules = CheckpointRules(config.states.checkpoints, self.alignment)
        rows = config.max_num_seqs
        self.last = zeros_i64(rows)
        self.next_position = zeros_i64(rows)
        self.seen_from = zeros_i64(rows)
        self.missing_until = zeros_i64(rows)
        #: By row, tokens whose states come from outside: their chunks are not cut.
        self._external = zeros_i64(rows)
        self._nothing: list[tuple[int, int]] = []
        #: By row, ascending pairs (position, kind). The lists are replaced, never changed.
        self._wanted = [self._nothing] * rows

    def open(self, row: i64, last: i64) -> None:
        """Want nothing for a row. last: the last position of its prompt."""
        self.last[row] = last
        self.seen_from[row] = NEVER
        self.missing_until[row] = 0
        self._external[row] = 0
        self._wanted[row] = self._nothing

    def choose(self, row: i64, prompt: Prompt, hit: i64, known: i64) -> None:
        """Want the positions that the rules choose in a prompt. hit, known: in tokens. O(positions ** 2)."""
        rules = self.rules
        rules.choose(hit, known, self.last[row], 0, prompt.checkpoints, prompt.branches)
        self._wanted[row] = sorted(zip(rules.positions, rules.kinds, strict=True))

    def fork(self, row: i64, child: i64) -> None:
        """Want the same positions for `child` as for `row`."""
        self._wanted[child] = self._wanted[row]
        self.missing_until[child] = self.missing_until[row]
        self._external[child] = self._external[row]

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

    def next_after(self, row: i64, start: i64) -> i64:
        """Return the next wanted position after `start` tokens; `NEVER` for none. O(wanted)."""
        found = NEVER
        if start < self.last[row]:
            for position, _ in self._wanted[row]:
                if position > start:
                    found = position
                    break
        if self.rules.takes_output_end and self.is_caching:
            end = max(start, self.last[row])
            found = min(found, end + self.alignment - end % self.alignment)
        return found

    def cuts_at(self, row: i64, start: i64) -> bool:
        """Return whether a chunk from `start` tokens on ends at the next wanted position."""
        return self.cuts_chunks and start >= self._external[row]

    def kind_at(self, row: i64, position: i64) -> i64:
        """Return why a position is wanted."""
        if position > self.last[row]:
            return OUTPUT_END
        for wanted, kind in self._wanted[row]:
            if wanted == position:
                return kind
        return BRANCH
