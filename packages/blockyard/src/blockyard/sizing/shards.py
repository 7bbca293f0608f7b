"""The heads, rows and columns of each rank of a tensor-parallel model (Megatron-LM, Shoeybi et al., 2019).

Each rank has a contiguous range, and the first ranks get one more if the number does not divide. With fewer KV heads
than ranks, neighbouring ranks keep the same head for different query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int, shown
from ..errors import InvalidArgument

#: Most ranks that share a model.
MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model on rank `rank` of `size`. Raises `InvalidArgument` for values outside their limits."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        require_int("size", self.size, 1, MAX_RANKS)
        require_int("rank", self.rank, 0, self.size - 1)

    def part(self, number: int) -> range:
        """Return this rank's range of `number` items. Ranges differ in size by at most one. O(1)."""
        share, more = divmod(number, self.size)
        start = self.rank * share + min(self.rank, more)
        return range(start, start + share + (self.rank < more))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return this rank's KV heads: a range, or one head shared with other ranks. O(1)."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self._replicated(num_kv_heads)
        return range(head, head + 1)

    def query_heads(self, num_heads: int, num_kv_heads: int) -> range:
        """Return this rank's query heads, those of its KV heads. Each is on one rank. O(1).

        Raises `InvalidArgument` if a rank would have none, or num_kv_heads does not divide num_heads.
        """
        group, rest = divmod(num_heads, num_kv_heads)
        if rest:
            raise InvalidArgument(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
        if num_heads < self.size:
            raise InvalidArgument(
                f"the number of ranks is {self.size}; it must be at most the number of attention heads, {num_heads}"
            )
        kept = self.kv_heads(num_kv_heads)
        if num_kv_heads >= self.size:
            return range(kept.start * group, kept.stop * group)
        sharing = Shard(kept.start, num_kv_heads).part(self.size)
        own = Shard(sharing.index(self.rank), len(sharing)).part(group)
        return range(kept.start * group + own.start, kept.start * group + own.stop)

    def _replicated(self, num_kv_heads: int) -> int:
        """Return the only KV head of this rank when there are more ranks than heads. Ranks of a head are neighbours."""
        share, more = divmod(self.size, num_kv_heads)
        behind = self.rank - more * (share + 1)
        return self.rank // (share + 1) if behind < 0 else more + behind // share


def require_shard(shard: object) -> Shard:
    if not isinstance(shard, Shard):
        raise InvalidArgument(f"shard is {shown(shard)}; it must be a Shard(rank, size)")
    return shard
