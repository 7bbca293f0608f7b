"""What one rank gives to one other: its own side of a transfer, as slots, heads, and the order in which they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .offer import Offer
from .peer import PeerInfo
from .runs import IntArray, token_runs
from .shards import HeadRun, head_runs


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One rank's side of what it gives to, or takes from, one rank of the other side.

    other_rank: that rank. first_head, num_heads: as this rank numbers its own heads. start: the position of the first
    token. slots: of each layer group, the slot of every token, int64 (tokens,). whole_blocks: of each layer group,
    whether a block lies in memory alike on both sides, so that it is copied as it lies.
    """

    other_rank: int
    first_head: int
    num_heads: int
    start: int
    slots: tuple[IntArray, ...]
    whole_blocks: tuple[bool, ...]


def sending_lanes(offer: Offer, start: int, own: PeerInfo, theirs: PeerInfo, rank: int = 0) -> list[Lane]:
    """What `rank` of the sender sends, in order. start: the first token that the receiver asks for. O(tokens).

    Raises `HandoffError` where a block that is needed is gone.
    """
    runs = [run for run in head_runs(own.shards, theirs.shards) if run.from_rank == rank]
    slots = _slots(offer.tables, own, start, offer.num_computed)
    return [
        Lane(run.to_rank, run.from_head, run.num_heads, start, slots, _whole_blocks(run, own, theirs)) for run in runs
    ]


def receiving_lanes(
    tables: Sequence[npt.NDArray[np.int32]], start: int, stop: int, own: PeerInfo, theirs: PeerInfo, rank: int = 0
) -> list[Lane]:
    """What `rank` of the receiver takes, in order. tables: the receiver's blocks of each layer group. O(tokens)."""
    runs = [run for run in head_runs(theirs.shards, own.shards) if run.to_rank == rank]
    slots = _slots(tables, own, start, stop)
    return [
        Lane(run.from_rank, run.to_head, run.num_heads, start, slots, _whole_blocks(run, theirs, own)) for run in runs
    ]


def _slots(tables: Sequence[npt.NDArray[np.int32]], peer: PeerInfo, start: int, stop: int) -> tuple[IntArray, ...]:
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
