"""What an eviction policy is asked and told, and what stands around one and passes on what it does not decide."""

from mypy_extensions import i64, mypyc_attr

from ...errors import PolicyError


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy:
    """Chooses which idle cached block is evicted next. Subclass it, in plain Python or compiled.

    A block is *idle* while it is cached and nothing holds it; only idle blocks may be chosen. Free blocks that cache
    nothing are taken first, without asking. The pool tells the policy:

    - `insert(block, key, depth)`: the block became idle. `key` (an integer below 2**62) names its content and
      everything before it: equal content has an equal key, before and after an eviction. `depth` is its position in
      its sequence, 0 for the first block. A sequence is inserted from its last block to its first, so that among equals
      a suffix goes first.
    - `hit(block, key)`: a prompt hit the block, idle or held; `remove` follows if it was idle.
    - `remove(block)`: the idle block was revived and may not be chosen now.
    - `clear()`: the cache was reset; no block is idle any more.

    and asks `evict()` for the idle block to take, which is idle no longer. It asks only while a block is idle. No
    method may cost more than O(log num_blocks). Policies read no clock; they count events.

    num_blocks: ids are 1 to num_blocks - 1. `grow(num_blocks)` says that there are more of them now.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks: i64 = num_blocks

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        raise NotImplementedError("an EvictionPolicy must have insert()")

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`, idle or held. Does nothing unless overridden."""

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        raise NotImplementedError("an EvictionPolicy must have remove()")

    def evict(self) -> i64:
        """Choose an idle block; it is idle no longer."""
        raise NotImplementedError("an EvictionPolicy must have evict()")

    def clear(self) -> None:
        """No block is idle any more: the cache was reset."""
        raise NotImplementedError("an EvictionPolicy must have clear()")

    def needs_hits(self) -> bool:
        """Return whether it wants `hit`, which costs its caller something. It is asked once."""
        return True

    def gone(self, block: i64) -> None:
        """What `block` cached is gone: evicted as it was chosen, or lost otherwise, after `remove`. Optional."""

    def advance(self, now: float) -> None:
        """It is `now` in the caller's logical time. Optional."""

    def takes_hints(self) -> bool:
        """Whether hints may decide before it (`KVCacheManager.hint`); they are refused otherwise."""
        return True

    def as_layer(self) -> "Layer | None":
        """This policy, if it stands around another one."""
        return None

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        self.num_blocks = num_blocks

    def check(self) -> None:
        """Raise `InvariantError` where the policy's own structures disagree. O(num_blocks)."""


class Layer(EvictionPolicy):
    """Stands around `policy`, which is told everything as if it stood alone; a subclass changes what it must.

    A layer changes its own state before it tells the policy, which may raise. A policy that raises when it is told that
    a block goes which it has not chosen may have missed it, and could name it later: it is asked no more.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.policy = policy
        #: What the policy did when it was told of an eviction, and so may have missed it; "" while it has not.
        self._missed = ""

    def as_layer(self) -> "Layer | None":
        """This layer."""
        return self

    def passes(self, block: i64) -> bool:  # noqa: ARG002
        """Whether the policy was told that the idle `block` is idle, and has not chosen it."""
        return True

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        self.policy.hit(block, key)

    def needs_hits(self) -> bool:
        """Return what the policy wants."""
        return self.policy.needs_hits()

    def gone(self, block: i64) -> None:
        """What `block` cached is gone."""
        self.policy.gone(block)

    def spared(self, block: i64) -> None:
        """Tell the layers inside that `block`, which `evict` named, was revived before it was evicted."""
        inside = self.policy.as_layer()
        if inside is not None:
            inside.spared(block)

    def advance(self, now: float) -> None:
        """It is `now`."""
        self.policy.advance(now)

    def takes_hints(self) -> bool:
        """As the policy inside wants it."""
        return self.policy.takes_hints()

    def clear(self) -> None:
        """No block is idle any more, so that the policy has missed none."""
        self._missed = ""
        self.policy.clear()

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

    def grow_policy(self, num_blocks: int) -> BaseException | None:
        """Let the policy grow. What it raises is returned, so that the layer can grow too; MemoryError is raised."""
        try:
            self.policy.grow(num_blocks)
        except MemoryError:
            raise
        except BaseException as error:
            return error
        return None
