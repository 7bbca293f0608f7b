"""What an eviction policy is asked and told."""

from mypy_extensions import i64, mypyc_attr


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

    def needs_paths(self) -> bool:
        """Whether it wants `follows` and `miss`, which cost their caller something."""
        return False

    def follows(self, block: i64, parent: i64) -> None:
        """In its sequence `block` comes right after `parent`; `insert(block, ...)` is next. Optional."""

    def miss(self, key: i64) -> None:
        """A prompt asks for this content, which is not cached. Told before room is made for it. Optional."""

    def takes_hints(self) -> bool:
        """Whether hints may decide before it (`KVCacheManager.hint`); they are refused otherwise."""
        return True

    def needs_hints(self) -> bool:
        """Whether it wants `hinted`, and to choose by hints itself: none decides before it then."""
        return False

    def hinted(self, block: i64, is_over: bool, back_at: float | None) -> None:
        """What is known of the session of the idle `block`, right after `insert` and when it changes. Optional.

        is_over: it does not come back. back_at: the logical time at which it does; None where nothing is known.
        """

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        self.num_blocks = num_blocks

    def check(self) -> None:
        """Raise `InvariantError` where the policy's own structures disagree. O(num_blocks)."""
