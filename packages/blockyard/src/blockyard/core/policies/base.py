"""The interface of eviction policies, and of the layers around them."""

from librt.vecs import vec
from mypy_extensions import i32, i64, mypyc_attr

from ...errors import PolicyError
from .sessions import Sessions


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy:
    """Chooses the idle cached block that is evicted next. Subclass it, in plain Python or compiled.

    A block is *idle* while it is cached and nothing holds it; only idle blocks may be chosen. Free blocks that cache
    nothing are taken first, without asking. The pool calls:

    - `insert(block, key, depth)`: the block became idle. `key` (an integer below 2**62) names its content and
      everything before it: equal content has an equal key, before and after an eviction. `depth` is its position in
      its sequence, 0 for the first block. A sequence is inserted from its last block to its first, so that among equals
      a suffix is evicted first.
    - `hit(block, key)`: a prompt hit the block, idle or held; `remove` follows if it was idle.
    - `remove(block)`: the idle block was revived and may not be chosen now.
    - `clear()`: the cache was reset; no block is idle.
    - `evict()`: return the idle block to evict, which is idle no longer. It is called only while a block is idle.

    No method may cost more than O(log num_blocks). Policies read no clock; they count events.

    Args:
        num_blocks: size of the pool; block ids are 1 to num_blocks - 1 until `grow`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks: i64 = num_blocks

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """Add `block` to the idle blocks."""
        raise NotImplementedError("an EvictionPolicy must have insert()")

    def hit(self, block: i64, key: i64) -> None:
        """Record that a prompt hit `block`, idle or held. Optional."""

    def remove(self, block: i64) -> None:
        """Remove `block`, which was revived, from the idle blocks."""
        raise NotImplementedError("an EvictionPolicy must have remove()")

    def evict(self) -> i64:
        """Choose an idle block and remove it from the idle blocks."""
        raise NotImplementedError("an EvictionPolicy must have evict()")

    def clear(self) -> None:
        """Remove all idle blocks: the cache was reset."""
        raise NotImplementedError("an EvictionPolicy must have clear()")

    def needs_hits(self) -> bool:
        """Return whether the pool must call `hit`, which costs time. Called once."""
        return True

    def uncache(self, block: i64) -> None:
        """Record that the content of `block` has left the cache: after `evict`, or after `remove`. Optional."""

    def advance(self, now: float) -> None:
        """Set the time, in the caller's logical units. Optional."""

    def takes_hints(self) -> bool:
        """Return whether hints (`KVCacheManager.hint`) may decide before this policy; if not, they are refused."""
        return True

    def as_layer(self) -> "Layer | None":
        """Return this policy if it is a layer around another one."""
        return None

    def grow(self, num_blocks: int) -> None:
        """Accept block ids up to num_blocks - 1."""
        self.num_blocks = num_blocks

    def check(self) -> None:
        """Raise `InvariantError` if the policy's own structures disagree. O(num_blocks)."""


class Layer(EvictionPolicy):
    """A policy around another one, `policy`. It passes on all calls that it does not handle.

    The defaults are those of a layer without states, tenants, retention or sessions, so an `EvictionStack` can call the
    same methods of all layers.

    A layer changes its own state before it calls the policy, which may raise. The policy is not called again after it
    has raised in `remove` for a block that it did not choose: it may still know that block and could choose it later.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.policy = policy
        #: The exception of the policy when a block was evicted that it did not choose; "" for none.
        self._failure = ""

    def as_layer(self) -> "Layer | None":
        return self

    def put_around(self, policy: EvictionPolicy) -> None:
        """Replace the inner policy by one that has the same idle blocks."""
        self.policy = policy

    # What the policy inside answers.

    def hit(self, block: i64, key: i64) -> None:
        self.policy.hit(block, key)

    def needs_hits(self) -> bool:
        return self.policy.needs_hits()

    def uncache(self, block: i64) -> None:
        self.policy.uncache(block)

    def advance(self, now: float) -> None:
        self.policy.advance(now)

    def takes_hints(self) -> bool:
        return self.policy.takes_hints()

    def clear(self) -> None:
        self._failure = ""
        self.policy.clear()

    def knows(self, block: i64) -> bool:  # noqa: ARG002
        """Return whether the policy knows `block`, which is idle."""
        return True

    def note_revived(self, block: i64) -> None:
        """Record that a hit revived `block`, which `evict` had returned, before it was evicted."""
        inside = self.policy.as_layer()
        if inside is not None:
            inside.note_revived(block)

    def remove_unchosen(self, block: i64) -> None:
        """Remove a block that was evicted without being the policy's choice."""
        try:
            self.policy.remove(block)
        except BaseException as error:
            self._failure = f"raised {type(error).__name__}"
            raise

    def require_sound(self) -> None:
        """Raise `PolicyError` if the policy failed in `remove` for a block that it did not choose."""
        if self._failure:
            raise PolicyError(f"it {self._failure} in remove(), for an evicted block; set another policy")

    # Runs of blocks. idle: 1 + the depth of each idle block and 0 for others, by block; a layer that takes note of a
    # block writes it there.

    def insert_run(self, blocks: vec[i64], count: i64, keys: vec[i64], idle: vec[i64]) -> i64:  # noqa: ARG002
        """Insert those of the first `count` of `blocks` that this layer keeps from the policy. Return their number.

        `keys` has the keys of all blocks, by block.
        """
        return 0

    def remove_run(self, blocks: vec[i32], start: i64, count: i64, idle: vec[i64]) -> i64:  # noqa: ARG002
        """Remove those of `blocks[start:start + count]` that this layer keeps from the policy. Return their number."""
        return 0

    def move_state(
        self,
        blocks: vec[i32],  # noqa: ARG002
        start: i64,  # noqa: ARG002
        count: i64,  # noqa: ARG002
        record: i64,  # noqa: ARG002
        is_idle: bool,  # noqa: ARG002
        key: i64,  # noqa: ARG002
        idle: vec[i64],  # noqa: ARG002
        ref_cnt: vec[i32],  # noqa: ARG002
    ) -> bool:
        """Make the blocks of a state idle, or held again. Return False, and change nothing, if this layer cannot.

        Args:
            blocks: blocks of the state.
            start: position of the first one.
            count: number of blocks.
            record: number of the state's save record.
            is_idle: True to make them idle.
            key: key of the first block; the others keep theirs.
            idle: by block, 1 if the pool counts it as idle.
            ref_cnt: by block, its holders; to be set.
        """
        return False

    def num_withheld(self) -> i64:
        """Return how many idle blocks the policy does not know because a state needs them."""
        return 0

    # Tenants.

    def find_requester(self) -> bool:
        """Go on to the next tenant for which a block may be evicted. Return False if there is none."""
        return True

    def num_idle_of(self, tenant: i64) -> i64:  # noqa: ARG002
        """Return how many of a tenant's blocks are idle, if tenants share the pool."""
        return 0

    # Retention.

    def retained(self) -> i64:
        """Return how many blocks are retained."""
        return 0

    def retained_of(self, tenant: i64) -> i64:  # noqa: ARG002
        """Return how many blocks are retained for a tenant, if tenants share the pool."""
        return 0

    def is_retained(self, block: i64) -> bool:  # noqa: ARG002
        """Return whether `block` has a priority above 0."""
        return False

    def retain(self, block: i64, priority: int, expires_at: float | None) -> None:
        """Set the priority of a cached block; 0 ends its retention."""

    # Sessions.

    def uses_sessions(self) -> bool:
        """Return whether hints about sessions affect which block this layer evicts."""
        return False

    def make_session_room(self, num_slots: i64) -> None:
        """Make room for `num_slots` sessions. Raises MemoryError."""

    def on_session_change(self, sessions: Sessions, slot: i64) -> None:
        """Record that a session has ended, or has not ended after all."""

    def on_session_begin(self, slot: i64) -> None:
        """Record that a session begins a new sequence: its earlier blocks are old."""

    def on_session_end(self, slot: i64) -> None:
        """Forget a session, which is not marked as over. O(its idle blocks)."""

    def num_hinted(self) -> i64:
        """Return how many blocks were evicted because their session was over."""
        return 0

    # The size, and checks.

    def grow_policy(self, num_blocks: int) -> BaseException | None:
        """Grow the policy. Return its exception, if any, so that the layer can grow first; a MemoryError is raised."""
        try:
            self.policy.grow(num_blocks)
        except MemoryError:
            raise
        except BaseException as error:
            return error
        return None

    def check_sessions(self, sessions: Sessions) -> None:
        """Raise `InvariantError` unless this layer agrees with `sessions`."""

    def check_retained(self) -> None:
        """Verify the retained blocks, which stay sound when the policy has failed. Raises `InvariantError`."""
