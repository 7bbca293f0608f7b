"""Truncates sequences, after rejected speculation or to continue a conversation from an earlier turn."""

from mypy_extensions import i64

from ...errors import InvalidArgument
from ...keys import cut_spans
from ..parts import Parts
from ..sequences.table import NO_TOKEN
from .counting import PromptCounts
from .in_flight import require_settled


class TruncateCalls:
    """Releases the blocks after the cut. The next step copies or uncaches a block that is cut in the middle."""

    def __init__(self, parts: Parts, counts: PromptCounts) -> None:
        self.parts = parts
        self.counts = counts
        self.token_blocks = parts.token_blocks
        self.sequences = parts.sequences
        self.joins = parts.joins
        self.store = parts.store

    def truncate(self, row: i64, length: i64) -> None:
        """Keep the first `length` tokens of the sequence in `row`, which has at least as many."""
        sequences = self.sequences
        require_settled(self.parts, row, "truncate")
        spans = sequences.spans[row]
        if spans and length < sequences.num_tokens[row]:
            spans = cut_spans(spans, int(length), int(self.parts.block_size))
        self._require_window(row, min(length, sequences.num_computed[row]))
        self.counts.count_row(row)
        self.store.truncate(row, length)
        sequences.version += 1
        sequences.spans[row] = spans
        self.joins.settle_waiters(row)
        self.joins.settle(row)
        keep = min(self.store.num_token_blocks(length), sequences.num_blocks[row])
        first = row * sequences.width + keep
        self.token_blocks.release_row_blocks(row, sequences.blocks, first, sequences.num_blocks[row] - keep, keep)
        sequences.cut_row(row, keep)
        if length < sequences.num_tokens[row]:
            sequences.pending_token[row] = NO_TOKEN
        sequences.num_tokens[row] = length
        sequences.num_computed[row] = min(sequences.num_computed[row], length)
        sequences.num_published[row] = min(sequences.num_published[row], length // self.parts.block_size)
        sequences.raise_alert(row)

    def _require_window(self, row: i64, num_computed: i64) -> None:
        """Refuse a cut that leaves tokens whose window is partly freed."""
        shortest = self.store.shortest_cut(row)
        if num_computed < shortest:
            raise InvalidArgument(
                f"num_tokens leaves {num_computed} computed tokens of {self.sequences.name(row)}; at least {shortest} "
                f"are needed, because {self.store.cut_limit}"
            )
