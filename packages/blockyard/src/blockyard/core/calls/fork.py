"""Forks: new sequences that share all blocks of another, also for beam search."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument, SequenceNotReady
from ..parts import Parts
from .counting import PromptCounts
from .free import FreeCalls
from .in_flight import require_settled


class ForkCalls:
    """Shares the blocks of a sequence with new ones. The first to write to a shared block copies it (`reserve`)."""

    def __init__(self, parts: Parts, free_calls: FreeCalls, counts: PromptCounts) -> None:
        self.parts = parts
        self.counts = counts
        self.free_calls = free_calls
        self.token_blocks = parts.token_blocks
        self.sequences = parts.sequences
        self.store = parts.store

    # Forks.

    def fork(self, row: i64, count: i64, holders: list[str]) -> list[int]:
        """Return the handles of `count` new sequences that share all blocks of the one in `row`.

        `holders` has their names; if it is empty, they have the name of the original.
        """
        sequences = self.sequences
        self._require_forkable(row, "fork")
        promised = min(sequences.num_promised[row], count)
        sequences.require_rows(count - promised)
        handles = [0] * int(count)
        sequences.version += 1
        sequences.promise(row, sequences.num_promised[row] - promised)
        for index in range(count):
            handles[index] = self._fork_once(row, holders[index] if holders else sequences.holders[row])
        return handles

    def _require_forkable(self, row: i64, action: str) -> None:
        sequences = self.sequences
        require_settled(self.parts, row, action)
        if sequences.num_computed[row] < sequences.num_tokens[row] - 1:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} "
                f"of {sequences.num_tokens[row]} tokens; compute all but the last first"
            )

    def _fork_once(self, row: i64, holder: str) -> int:
        sequences = self.sequences
        self.counts.count_row(row)  # a prompt hit up to its last token may not have computed yet
        child = sequences.open(holder)
        self.parts.misses.clear(child)
        shared = min(sequences.num_blocks[row], self.store.num_token_blocks(sequences.num_tokens[row]))
        sequences.copy_blocks(row, child, shared)
        self.token_blocks.share(sequences.blocks, row * sequences.width, shared)
        sequences.num_tokens[child] = sequences.num_tokens[row]
        sequences.num_computed[child] = sequences.num_computed[row]
        sequences.num_published[child] = sequences.num_published[row]
        sequences.pending_token[child] = sequences.pending_token[row]
        sequences.root[child] = sequences.root[row]
        sequences.generation[child] = sequences.generation[row]
        sequences.spans[child] = sequences.spans[row]
        sequences.session[child] = sequences.session[row]
        sequences.is_swapped[child] = sequences.is_swapped[row]
        self.parts.budget.assign_row(child, self.parts.budget.tenant_of_row(row))
        sequences.raise_alert(child)
        sequences.raise_alert(row)
        self.store.fork(row, child)
        return int(sequences.handle[child])

    # Beam search.

    def regroup(self, rows: vec[i64], chosen: vec[i64]) -> list[int]:
        """Return handles of sequences that continue those in `rows` at the positions `chosen`, and free the others."""
        sequences = self.sequences
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
                self.free_calls.end(rows[index])
        self._branch(rows, chosen, handles, children)
        return children

    def _num_promised(self, row: i64, num_children: i64) -> i64:
        """Return how many of the request slots reserved for forks of `row` a regrouping frees or uses.

        A sequence with children uses a slot for each but the first; one without frees all.
        """
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
        """Continue each parent as its own first child, and fork it for its other children."""
        for index in range(i64(len(chosen))):
            parent = int(chosen[index])
            if handles[parent] != 0:
                children[index] = handles[parent]
                handles[parent] = 0
            else:
                children[index] = self._fork_once(rows[chosen[index]], self.sequences.holders[rows[chosen[index]]])
