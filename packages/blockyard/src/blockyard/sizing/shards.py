"""Which heads, rows and columns each rank of a tensor-parallel model has (Megatron-LM, Shoeybi et al., 2019).

Neighbouring ones stay together, and the first ranks get one more where they do not divide. Where there are fewer KV
heads than ranks, neighbouring ranks keep the same head, each for query heads of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int, shown
from ..errors import InvalidArgument

#: Largest number of ranks that share a model.
MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that rank `rank` of `size` has. Raises `InvalidArgument` for values outside their limits."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        require_int("size", self.size, 1, MAX_RANKS)
        require_int("rank", self.rank, 0, self.size - 1)

    def part(self, number: int) -> range:
        """Return its own of `number` things: neighbours, of which no rank has more than one more than another. O(1)."""
        share, more = divmod(number, self.size)
        start = self.rank * share + min(self.rank, more)
        return range(start, start + share + (self.rank < more))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads that it keeps: a part of them, or one that other ranks keep too. O(1)."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self._replicated(num_kv_heads)
        return range(head, head + 1)

    def query_heads(self, num_heads: int, num_kv_heads: int) -> range:
        """Return the query heads that it computes, those of its KV heads: each is on one rank. O(1).

        Raises `InvalidArgument` where a rank would have none, or num_kv_heads does not divide num_heads.
        """
        group, rest = divmod(num_heads, num_kv_heads)
        if rest:
            raise InvalidArgument(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
        if num_heads < self.size:
            raise InvalidArgument(
                f"the number of ranks is {self.size}; the model has {num_heads} attention heads, and a rank needs one"
            )
        kept = self.kv_heads(num_kv_heads)
        if num_kv_heads >= self.size:
            return range(kept.start * group, kept.stop * group)
        sharing = Shard(kept.start, num_kv_heads).part(self.size)
        own = Shard(sharing.index(self.rank), len(sharing)).part(group)
        return range(kept.start * group + own.start, kept.start * group + own.stop)

    def _replicated(self, num_kv_heads: int) -> int:
        """The one KV head that it keeps, where there are more ranks than heads: heads have neighbouring ranks."""
        share, more = divmod(self.size, num_kv_heads)
        behind = self.rank - more * (share + 1)
        return self.rank // (share + 1) if behind < 0 else more + behind // share


def require_shard(shard: object) -> Shard:
    """Return `shard` if it is a `Shard`."""
    if not isinstance(shard, Shard):
        raise InvalidArgument(f"shard is {shown(shard)}; it must be a Shard(rank, size)")
    return shard
