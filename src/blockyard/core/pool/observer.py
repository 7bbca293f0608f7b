"""Observers are told what happens to blocks: the CPU tier, the history, residency, the causes of misses."""

from librt.vecs import vec
from mypy_extensions import i32, i64


class PoolObserver:
    """Told by a pool of what it does, after it is done (`evicting`: before). It must not change the pool, nor raise."""

    def acting(self, actor: str) -> None:
        """What follows is done by the call that `actor` names, and for whom."""

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """`blocks[start:start + count]` were free and are held now."""

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """`blocks[start:start + count]` are held once more; some were idle before."""

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """`blocks[start:start + count]` are held once less."""

    def evicting(self, block: i64) -> None:
        """`block` is cached, and about to be taken for something else."""

    def dropping(self, block: i64) -> None:
        """`block` is cached, and about to lose its content without an eviction."""

    def unretained(self, block: i64, action: str) -> None:
        """A wish keeps `block` no longer, for the reason that `action` names."""

    def joined_by(self, other: "PoolObserver") -> "PoolObserver":
        """Return an observer that tells this one and then `other`."""
        return Observers([self, other])


class Observers(PoolObserver):
    """Several observers, told in turn."""

    def __init__(self, members: list[PoolObserver]) -> None:
        self.members = members

    def joined_by(self, other: PoolObserver) -> PoolObserver:
        """Add one more."""
        self.members.append(other)
        return self

    def acting(self, actor: str) -> None:
        """Tell all."""
        for member in self.members:
            member.acting(actor)

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Tell all."""
        for member in self.members:
            member.acquired(blocks, start, count)

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Tell all."""
        for member in self.members:
            member.shared(blocks, start, count)

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Tell all."""
        for member in self.members:
            member.released(blocks, start, count)

    def evicting(self, block: i64) -> None:
        """Tell all."""
        for member in self.members:
            member.evicting(block)

    def dropping(self, block: i64) -> None:
        """Tell all."""
        for member in self.members:
            member.dropping(block)

    def unretained(self, block: i64, action: str) -> None:
        """Tell all."""
        for member in self.members:
            member.unretained(block, action)


class Clock:
    """Logical time: whatever the caller says it is. The library reads no clock of its own."""

    def __init__(self) -> None:
        self.now: float = 0.0
