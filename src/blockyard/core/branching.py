"""Sequences that branch and are cut: fork, beam search's regrouping, truncate. Their end is `ending`."""

from librt.vecs import vec
from mypy_extensions import i64

from ..arguments import require_int
from ..errors import InvalidArgument, SequenceNotReady
from ..keys import cut_spans
from .block_ledger import BlockLedger
from .ending import Ending
from .joining import Joining
from .mapping import Mapping
from .reserving import NO_TOKEN
from .sequences import SequenceTable, read_handle, read_handles
from .tokens import int64_items


class Branching:
    """Shares the blocks of a sequence with others, and gives them back; who writes first copies (`reserving`)."""

    def __init__(
        self,
        pages: BlockLedger,
        sequences: SequenceTable,
        joining: Joining,
        mapping: Mapping | None,
        ending: Ending,
    ) -> None:
        self.ending = ending
        self.pages = pages
        self.sequences = sequences
        self.joining = joining
        self.mapping = mapping
        self.block_size: i64 = pages.block_size

    def _num_blocks(self, num_tokens: i64) -> i64:
        return (num_tokens + self.block_size - 1) // self.block_size

    # Forks.

    def fork(self, seq: object, num_forks: object) -> list[int]:
        """See `KVCacheManager.fork`."""
        sequences = self.sequences
        handle = read_handle(seq)
        count = i64(require_int("num_forks", num_forks, 1, int(sequences.max_num_seqs)))
        row = sequences.live_row(handle)
        self._require_forkable(row, "fork")
        promised = min(sequences.num_promised[row], count)
        sequences.require_rows(count - promised)
        handles = [0] * int(count)
        sequences.version += 1
        sequences.promise(row, sequences.num_promised[row] - promised)
        for index in range(count):
            handles[index] = self._fork_once(row)
        return handles

    def _require_forkable(self, row: i64, action: str) -> None:
        sequences = self.sequences
        self._require_settled(row, action)
        if sequences.num_computed[row] < sequences.num_tokens[row] - 1:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} "
                f"of {sequences.num_tokens[row]} tokens; all but the last are needed"
            )

    def _require_settled(self, row: i64, action: str) -> None:
        """Nothing in flight: no reservation, nothing published that is not computed, no prefix to wait for or load."""
        sequences = self.sequences
        if sequences.num_reserved[row] > 0:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has {sequences.num_reserved[row]} reserved tokens; commit them first"
            )
        if self.mapping is not None and sequences.is_swapped[row] == 0 and self.mapping.num_loads(row) > 0:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has {self.mapping.num_loads(row)} blocks to bring back from the CPU; "
                f"its next step does"
            )
        if sequences.copy_from[row]:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has the beginning of a block to copy; its next step does"
            )
        promised = sequences.num_published[row] * self.block_size
        if promised > sequences.num_computed[row] or sequences.is_waiting(row):
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} of its prompt; "
                f"{max(promised, sequences.num_computed[row] + 1)} tokens are needed"
            )

    def _fork_once(self, row: i64) -> int:
        sequences = self.sequences
        child = sequences.open(sequences.holders[row])
        shared = min(sequences.num_blocks[row], self._num_blocks(sequences.num_tokens[row]))
        first = row * sequences.width
        for position in range(shared):
            sequences.blocks[child * sequences.width + position] = sequences.blocks[first + position]
        self.pages.share(sequences.blocks, first, shared)
        sequences.num_blocks[child] = shared
        sequences.num_tokens[child] = sequences.num_tokens[row]
        sequences.num_computed[child] = sequences.num_computed[row]
        sequences.num_published[child] = sequences.num_published[row]
        sequences.pending_token[child] = sequences.pending_token[row]
        sequences.root[child] = sequences.root[row]
        sequences.generation[child] = sequences.generation[row]
        sequences.spans[child] = sequences.spans[row]
        sequences.is_swapped[child] = sequences.is_swapped[row]
        sequences.raise_alert(child)
        sequences.raise_alert(row)
        if self.mapping is not None:
            self.mapping.fork(row, child)
        return int(sequences.handle[child])

    # Beam search.

    def regroup(self, seqs: object, parents: object) -> list[int]:
        """See `KVCacheManager.regroup`."""
        sequences = self.sequences
        given = read_handles(seqs)
        chosen = int64_items("parents", parents)
        rows = sequences.rows_of(given)
        num_children = self._count_children(len(rows), chosen)
        num_new = i64(len(chosen))
        for index in range(i64(len(rows))):
            num_new -= 1 + self._num_promised(rows[index], num_children[index])
            if num_children[index] > 1:
                self._require_forkable(rows[index], "regroup")
        if num_new > 0:
            sequences.require_rows(num_new)
        handles = [int(sequences.handle[rows[index]]) for index in range(i64(len(rows)))]
        children = [0] * len(chosen)
        sequences.version += 1
        for index in range(i64(len(rows))):
            promised = self._num_promised(rows[index], num_children[index])
            sequences.promise(rows[index], sequences.num_promised[rows[index]] - promised)
        for index in range(i64(len(rows))):
            if num_children[index] == 0:
                self.ending.end(rows[index])
        self._branch(rows, chosen, handles, children)
        return children

    def _num_promised(self, row: i64, num_children: i64) -> i64:
        """Of the rows set aside for the forks of `row`, those that a regrouping with so many children frees or uses."""
        promised = self.sequences.num_promised[row]
        return promised if num_children == 0 else min(promised, num_children - 1)

    def _count_children(self, num_seqs: int, chosen: vec[i64]) -> list[int]:
        counts = [0] * num_seqs
        for index in range(i64(len(chosen))):
            if not 0 <= chosen[index] < num_seqs:
                raise InvalidArgument(
                    f"parents[{index}] is {chosen[index]}; it must be from 0 to {num_seqs - 1}, a position in seqs"
                )
            counts[int(chosen[index])] += 1
        return counts

    def _branch(self, rows: vec[i64], chosen: vec[i64], handles: list[int], children: list[int]) -> None:
        """The first child of a sequence is the sequence itself, the others are forks of it."""
        for index in range(i64(len(chosen))):
            parent = int(chosen[index])
            if handles[parent] != 0:
                children[index] = handles[parent]
                handles[parent] = 0
            else:
                children[index] = self._fork_once(rows[chosen[index]])

    # Cuts.

    def truncate(self, seq: object, num_tokens: object) -> None:
        """See `KVCacheManager.truncate`."""
        sequences = self.sequences
        handle = read_handle(seq)
        limit = int(sequences.num_tokens[sequences.live_row(handle)])
        length = i64(require_int("num_tokens", num_tokens, 1, limit))
        row = sequences.live_row(handle)
        self._require_settled(row, "truncate")
        spans = sequences.spans[row]
        if spans and length < sequences.num_tokens[row]:
            spans = cut_spans(spans, int(length), int(self.block_size))
        if self.mapping is not None:
            self._require_window(row, min(length, sequences.num_computed[row]))
            self.mapping.truncate(row, length)
        sequences.version += 1
        sequences.spans[row] = spans
        self.joining.settle_waiters(row)
        self.joining.settle(row)
        keep = min(self._num_blocks(length), sequences.num_blocks[row])
        self.pages.release(sequences.blocks, row * sequences.width + keep, sequences.num_blocks[row] - keep)
        sequences.cut_row(row, keep)
        if length < sequences.num_tokens[row]:
            sequences.pending_token[row] = NO_TOKEN
        sequences.num_tokens[row] = length
        sequences.num_computed[row] = min(sequences.num_computed[row], length)
        sequences.num_published[row] = min(sequences.num_published[row], length // self.block_size)
        sequences.raise_alert(row)

    def _require_window(self, row: i64, num_computed: i64) -> None:
        """The tokens that a cut leaves must still have their windows."""
        shortest = self.mapping.shortest_cut(row) if self.mapping is not None else 0
        if num_computed < shortest:
            raise InvalidArgument(
                f"num_tokens leaves {num_computed} computed tokens of {self.sequences.name(row)}; at least {shortest} "
                f"are needed, because blocks behind its sliding window were given back"
            )
