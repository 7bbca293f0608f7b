"""What policies have in common that stand around another one and pass on what they do not decide."""

from mypy_extensions import i64

from ...errors import PolicyError
from .base import EvictionPolicy


class AroundPolicy(EvictionPolicy):
    """`policy` is told of hits, parents and misses as if it stood alone; a subclass passes on the rest.

    A policy that raises when it is told that a block goes which it has not chosen may have missed it, and could name it
    later: from then on it is asked no more.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.policy = policy
        #: What it did when it was told of an eviction, and so may have missed it; "" while it has not.
        self._missed = ""

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        self.policy.hit(block, key)

    def needs_paths(self) -> bool:
        """As the policy wants it."""
        return self.policy.needs_paths()

    def follows(self, block: i64, parent: i64) -> None:
        """What stands before `block`."""
        self.policy.follows(block, parent)

    def miss(self, key: i64) -> None:
        """A content is asked for that is not cached."""
        self.policy.miss(key)

    def tell_gone(self, block: i64) -> None:
        """`block` goes, and was not the policy's choice."""
        try:
            self.policy.remove(block)
        except BaseException as error:
            self._missed = f"raised {type(error).__name__}"
            raise

    def require_told(self) -> None:
        """Raise `PolicyError` if the policy may have missed an eviction."""
        if self._missed:
            raise PolicyError(f"it {self._missed} when it was told of an eviction; put another in its place")

    def clear(self) -> None:
        """No block is idle any more, so that it has missed none."""
        self._missed = ""
        self.policy.clear()
