"""Which rank keeps which key-value heads, and which heads go from which rank to which."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int, shown
from ..errors import InvalidArgument, PeerMismatch
from ..sizing.shards import MAX_RANKS, Shard

MAX_HEADS = 2**20


@dataclass(frozen=True, slots=True)
class HeadShards:
    """The key-value heads of each rank of one side: `ranges[rank]` is (first head, number of heads).

    Heads may be on several ranks (GQA with fewer heads than ranks; MLA, whose one head all ranks keep).
    Raises `InvalidArgument` for a range outside the heads, or a head that no rank keeps. O(ranks).

    >>> HeadShards.even(8, 2).ranges
    ((0, 4), (4, 4))
    >>> HeadShards.even(2, 4).ranges
    ((0, 1), (0, 1), (1, 1), (1, 1))
    """

    num_kv_heads: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", require_int("num_kv_heads", self.num_kv_heads, 1, MAX_HEADS))
        object.__setattr__(self, "ranges", _checked_ranges(self.ranges, self.num_kv_heads))
        missing = _first_missing(self.ranges, self.num_kv_heads)
        if missing is not None:
            raise InvalidArgument(f"ranges is {shown(self.ranges)}; head {missing} is on no rank")

    @classmethod
    def even(cls, num_kv_heads: int, num_ranks: int = 1) -> HeadShards:
        """Heads in order, as even as they go, the first ranks one more: a tensor-parallel model's (`Shard`). O(ranks).

        With more ranks than heads each rank has one, neighbours the same, the first heads on one rank more.
        """
        heads = require_int("num_kv_heads", num_kv_heads, 1, MAX_HEADS)
        ranks = require_int("num_ranks", num_ranks, 1, MAX_RANKS)
        kept = [Shard(rank, ranks).kv_heads(heads) for rank in range(ranks)]
        return cls(heads, tuple((heads_of.start, len(heads_of)) for heads_of in kept))

    @property
    def num_ranks(self) -> int:
        """Ranks of this side."""
        return len(self.ranges)


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Heads that one rank gives to another: `num_heads` from `from_head` on, as each rank numbers its own from 0."""

    from_rank: int
    to_rank: int
    from_head: int
    to_head: int
    num_heads: int


def head_runs(sender: HeadShards, receiver: HeadShards) -> tuple[HeadRun, ...]:
    """What goes from which rank to which, so that each rank of the receiver gets each of its heads once. O(heads).

    A head that several ranks of the sender keep is taken from one of them, another one for each rank that receives, so
    that all send alike. Raises `PeerMismatch` if the sides have different numbers of heads.

    >>> [(run.from_rank, run.to_rank, run.num_heads) for run in head_runs(HeadShards.even(3, 2), HeadShards.even(3))]
    [(0, 0, 2), (1, 0, 1)]
    """
    if sender.num_kv_heads != receiver.num_kv_heads:
        raise PeerMismatch(f"num_kv_heads is {sender.num_kv_heads} at the sender, {receiver.num_kv_heads} here")
    holders: list[list[int]] = [[] for _ in range(sender.num_kv_heads)]
    for rank, (first, count) in enumerate(sender.ranges):
        for head in range(first, first + count):
            holders[head].append(rank)
    runs: list[HeadRun] = []
    for to_rank, (first, count) in enumerate(receiver.ranges):
        runs += _runs_to(
            to_rank, first, [ranks[to_rank % len(ranks)] for ranks in holders[first : first + count]], sender
        )
    return tuple(runs)


def _runs_to(to_rank: int, first: int, sources: list[int], sender: HeadShards) -> list[HeadRun]:
    """The runs to one rank, whose heads from `first` on come from the ranks `sources`."""
    runs = []
    start = 0
    for place in range(1, len(sources) + 1):
        if place == len(sources) or sources[place] != sources[start]:
            rank = sources[start]
            runs.append(HeadRun(rank, to_rank, first + start - sender.ranges[rank][0], start, place - start))
            start = place
    return runs


def _checked_ranges(ranges: object, num_kv_heads: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(ranges, (tuple, list)) or not 1 <= len(ranges) <= MAX_RANKS:
        raise InvalidArgument(f"ranges is {shown(ranges)}; it must be a tuple of 1 to {MAX_RANKS} (first, number)")
    checked = []
    for rank, pair in enumerate(ranges):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgument(f"ranges[{rank}] is {shown(pair)}; it must be (first head, number of heads)")
        first = require_int(f"the first head of rank {rank}", pair[0], 0, num_kv_heads - 1)
        checked.append((first, require_int(f"the heads of rank {rank}", pair[1], 1, num_kv_heads - first)))
    return tuple(checked)


def _first_missing(ranges: tuple[tuple[int, int], ...], num_kv_heads: int) -> int | None:
    """The first head that no range covers."""
    covered = 0
    for first, count in sorted(ranges):
        if first > covered:
            return covered
        covered = max(covered, first + count)
    return covered if covered < num_kv_heads else None
