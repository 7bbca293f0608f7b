"""Counts of prompt tokens, hit tokens and causes of misses. A prompt is counted when it is first computed."""

from librt.vecs import vec
from mypy_extensions import i64

from ..sequences.table import SequenceTable
from ..watch.misses import Misses


class PromptCounts:
    """Counts each admitted prompt when the first of its tokens are computed.

    Admission is too early to count: a request that gets no blocks in its step is preempted and admitted again, and a
    sequence whose producer ends early loses the hit that it waited for. A sequence that is freed before it computes is
    not counted. Counting makes no objects, so it cannot fail within a commit.
    """

    def __init__(self, sequences: SequenceTable, misses: Misses) -> None:
        self.sequences = sequences
        self.misses = misses
        self.num_prompt_tokens: i64 = 0
        self.num_hit_tokens: i64 = 0
        self.num_resumed_tokens: i64 = 0
        self.num_resumed_hit_tokens: i64 = 0

    def count(self, rows: vec[i64], counts: vec[i64]) -> None:
        """Count the prompts of those sequences that compute for the first time. O(batch).

        `counts` has the computed tokens of each.
        """
        uncounted = self.sequences.uncounted
        for index in range(i64(len(rows))):
            if counts[index] > 0 and uncounted[rows[index]] != 0:
                self.count_row(rows[index])

    def count_row(self, row: i64) -> None:
        """Count the prompt of a sequence, unless it was counted. Its computed tokens are the hit. O(1)."""
        sequences = self.sequences
        num_tokens = sequences.uncounted[row]
        if num_tokens == 0:
            return
        sequences.set_uncounted(row, 0)
        num_hit = sequences.num_computed[row]
        if num_tokens < 0:
            self.num_resumed_tokens -= num_tokens
            self.num_resumed_hit_tokens += num_hit
        else:
            self.num_prompt_tokens += num_tokens
            self.num_hit_tokens += num_hit
        self.misses.count(row, num_hit, num_tokens < 0)
