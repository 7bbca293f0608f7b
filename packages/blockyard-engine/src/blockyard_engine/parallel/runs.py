"""The data of a transfer: token runs and lanes.

A plan (`TransferPlan`) has runs of tokens from the sender's slots to the receiver's, for both sides at once. A lane is
the data that one rank sends to one other: slots and heads of this rank, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_int
from blockyard.config import MAX_BLOCK_SIZE
from blockyard.errors import HandoffError, InvalidArgument

from .offer import Offer
from .peer import HeadRun, PeerInfo, head_runs

IntArray = npt.NDArray[np.int64]
MAX_TOKENS = 2**27


@dataclass(frozen=True, slots=True, eq=False)
class TokenRuns:
    """Runs of tokens in one layer group that are contiguous on both sides, in token order.

    Attributes:
        from_slots: first slot of each run at the sender (block_id * block_size + offset), int64 (n,).
        to_slots: first slot of each run at the receiver, with its block size, int64 (n,).
        lengths: tokens of each run, int64 (n,).
        first_token: position of the first token in the sequence.
    """

    from_slots: IntArray
    to_slots: IntArray
    lengths: IntArray
    first_token: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.lengths.sum())

    def from_tokens(self) -> IntArray:
        """Return the sender's slot of every token, int64 (num_tokens,)."""
        return _spread(self.from_slots, self.lengths)

    def to_tokens(self) -> IntArray:
        """Return the receiver's slot of every token, int64 (num_tokens,)."""
        return _spread(self.to_slots, self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """The data that a transfer moves: tokens of each layer group, and heads from rank to rank.

    All ranks of a side have the same block tables, so the runs hold for all of them.

    Attributes:
        groups: runs of each layer group, in the order of `CacheConfig.layer_groups`.
        heads: heads for each pair of ranks that share some.
    """

    groups: tuple[TokenRuns, ...]
    heads: tuple[HeadRun, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to move, of the group that moves most."""
        return max((runs.num_tokens for runs in self.groups), default=0)

    @property
    def num_runs(self) -> int:
        """Runs of all groups."""
        return sum(len(runs.lengths) for runs in self.groups)


def token_runs(
    from_blocks: object, from_block_size: object, to_blocks: object, to_block_size: object, start: object, stop: object
) -> TokenRuns:
    """Return runs that carry tokens `start` to `stop` of a sequence from one block table to another. O(blocks).

    A run is as long as the slots are contiguous on both sides. Raises `HandoffError` if a token has no block on one of
    the sides, `InvalidArgument` for values outside their limits.

    Args:
        from_blocks: the sender's block ids of the sequence, integers (n,), as `KVCacheManager.block_ids` returns them;
            0 for freed blocks.
        from_block_size: the sender's block size.
        to_blocks: the receiver's block ids.
        to_block_size: the receiver's block size.
        start: first token.
        stop: end of the tokens.

    >>> runs = token_runs([5, 6], 4, [9, 3, 4], 2, 1, 6)
    >>> runs.from_slots.tolist(), runs.to_slots.tolist(), runs.lengths.tolist()
    ([21, 22], [19, 6], [1, 4])
    """
    from_size = require_int("from_block_size", from_block_size, 1, MAX_BLOCK_SIZE)
    to_size = require_int("to_block_size", to_block_size, 1, MAX_BLOCK_SIZE)
    first = require_int("start", start, 0, MAX_TOKENS)
    last = require_int("stop", stop, first, MAX_TOKENS)
    starts = _block_starts(first, last, from_size, to_size)
    from_slots = _slots("sender", from_blocks, from_size, starts, last)
    to_slots = _slots("receiver", to_blocks, to_size, starts, last)
    lengths = np.diff(starts, append=last)
    joined = (np.diff(from_slots) == lengths[:-1]) & (np.diff(to_slots) == lengths[:-1])
    keep = np.flatnonzero(np.concatenate([np.ones(min(len(starts), 1), bool), ~joined]))
    merged = np.diff(starts[keep], append=last)
    return TokenRuns(from_slots[keep], to_slots[keep], merged, first)


def _block_starts(start: int, stop: int, *sizes: int) -> IntArray:
    """Return `start`, and every later position at which a block of either side begins."""
    if start == stop:
        return np.empty(0, np.int64)
    inner = [np.arange((start // size + 1) * size, stop, size, dtype=np.int64) for size in sizes]
    return np.unique(np.concatenate([np.array([start], np.int64), *inner]))


def _slots(side: str, blocks: object, size: int, positions: IntArray, stop: int) -> IntArray:
    table = np.asarray(blocks)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"the {side}'s blocks have shape {table.shape} and dtype {table.dtype}; they must be integers of shape (n,)"
        )
    if len(positions) == 0:
        return np.empty(0, np.int64)
    if len(table) * size < stop:
        raise HandoffError(
            f"the {side} has {len(table)} blocks of {size} tokens; token {stop - 1} is not in one of them"
        )
    ids = table.astype(np.int64)[positions // size]
    if ids.min() < 1:
        gone = int(positions[np.argmax(ids < 1)])
        raise HandoffError(
            f"the {side} has freed the block of token {gone}, which has left a sliding window; a prompt longer than a "
            f"window cannot be handed over"
        )
    return ids * size + positions % size


def _spread(slots: IntArray, lengths: IntArray) -> IntArray:
    before = np.cumsum(lengths) - lengths
    spread: IntArray = np.repeat(slots - before, lengths) + np.arange(int(lengths.sum()))
    return spread


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Data that one rank exchanges with one rank of the other side.

    Attributes:
        other_rank: the other side's rank.
        first_head: first head, numbered as on this rank.
        num_heads: number of heads.
        start: position of the first token.
        slots: slot of every token, for each layer group, int64 (tokens,).
        whole_blocks: whether blocks have the same memory layout on both sides, for each layer group, so that they are
            copied as they are.
    """

    other_rank: int
    first_head: int
    num_heads: int
    start: int
    slots: tuple[IntArray, ...]
    whole_blocks: tuple[bool, ...]


def sending_lanes(offer: Offer, start: int, own: PeerInfo, theirs: PeerInfo, rank: int = 0) -> list[Lane]:
    """Return the lanes that `rank` of the sender sends, in order. O(tokens).

    Raises `HandoffError` if a block that is needed is freed.

    Args:
        offer: the offer.
        start: first token that the receiver requests.
        own: description of the sender.
        theirs: description of the receiver.
        rank: the sender's rank.
    """
    runs = [run for run in head_runs(own.shards, theirs.shards) if run.from_rank == rank]
    slots = _own_slots(offer.tables, own, start, offer.num_computed)
    return [
        Lane(run.to_rank, run.from_head, run.num_heads, start, slots, _whole_blocks(run, own, theirs)) for run in runs
    ]


def receiving_lanes(
    tables: Sequence[npt.NDArray[np.int32]], start: int, stop: int, own: PeerInfo, theirs: PeerInfo, rank: int = 0
) -> list[Lane]:
    """Return the lanes that `rank` of the receiver receives, in order. O(tokens).

    Args:
        tables: the receiver's blocks of each layer group.
        start: first token.
        stop: end of the tokens.
        own: description of the receiver.
        theirs: description of the sender.
        rank: the receiver's rank.
    """
    runs = [run for run in head_runs(theirs.shards, own.shards) if run.to_rank == rank]
    slots = _own_slots(tables, own, start, stop)
    return [
        Lane(run.from_rank, run.to_head, run.num_heads, start, slots, _whole_blocks(run, theirs, own)) for run in runs
    ]


def _own_slots(tables: Sequence[npt.NDArray[np.int32]], peer: PeerInfo, start: int, stop: int) -> tuple[IntArray, ...]:
    sizes = [group.block_size for group in peer.groups]
    runs = [token_runs(table, size, table, size, start, stop) for table, size in zip(tables, sizes, strict=True)]
    return tuple(each.from_tokens() for each in runs)


def _whole_blocks(run: HeadRun, sender: PeerInfo, receiver: PeerInfo) -> tuple[bool, ...]:
    counts = (sender.shards.ranges[run.from_rank][1], receiver.shards.ranges[run.to_rank][1])
    is_alike = sender.layout == receiver.layout and counts == (run.num_heads, run.num_heads)
    return tuple(
        is_alike and theirs.block_size == ours.block_size
        for theirs, ours in zip(sender.groups, receiver.groups, strict=True)
    )
