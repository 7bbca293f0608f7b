"""The eviction order of a pool: a policy with its layers, or the free queue."""

from operator import index as index_of
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError, PolicyError
from ..arrays import clear_i64, grown_i64, zeros_i64
from ..gate import Interruption
from .base import EvictionPolicy, Layer
from .sessions import Sessions

NONE: Final[i64] = 0


class QueueOrder:
    """Eviction in the order of the free queue, least recently used. It ignores all calls and chooses no victims.

    This is also the interface of `EvictionStack`.
    """

    def __init__(self) -> None:
        #: Whether a policy names the victims.
        self.has_policy = False
        #: Idle blocks that the policy can choose.
        self.num_idle: i64 = 0
        #: Whether the policy needs `hit`.
        self.needs_hits = False
        #: The first exception in a notification of the policy; "" for none.
        self.failure = ""
        self.layers: list[Layer] = []
        #: Which session used each block; none until `follow`.
        self.sessions = Sessions(0, 0)

    # Blocks.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """Record that `block` became idle."""

    def hit(self, block: i64, key: i64) -> None:
        """Record that a prompt hit `block`."""

    def remove(self, block: i64) -> None:
        """Record that `block` is no longer idle."""

    def insert_run(self, blocks: vec[i64], count: i64, keys: vec[i64]) -> None:
        """Insert the first `count` of `blocks`, each at depth 0. O(count) calls.

        `keys` has the keys of all blocks, by block.
        """

    def remove_run(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Remove those of `blocks[start:start + count]` that are idle. O(count) calls."""

    def move_state(
        self,
        blocks: vec[i32],  # noqa: ARG002
        start: i64,  # noqa: ARG002
        count: i64,  # noqa: ARG002
        record: i64,  # noqa: ARG002
        is_idle: bool,  # noqa: ARG002
        key: i64,  # noqa: ARG002
        ref_cnt: vec[i32],  # noqa: ARG002
    ) -> bool:
        """Make the blocks of a state idle, or held again; False if only `insert` and `remove` can.

        record: the number of its save record. ref_cnt: holders of all blocks, to be set.
        """
        return False

    def judge_again(self, block: i64, key: i64) -> None:
        """Remove and insert an idle block, because the layers have new information about it."""

    def uncache(self, block: i64) -> None:
        """Record that the content of `block` left the cache, whether the policy chose it or not."""

    def clear(self) -> None:
        """Forget all idle blocks: the cache was reset."""

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. It may have grown before a MemoryError, which is harmless."""

    # Victims.

    def error(self) -> PolicyError:
        """Return the error that calls raise after the policy has failed."""
        return PolicyError(self.failure)

    def choose(self, count: i64, keys: vec[i64]) -> list[int]:  # noqa: ARG002
        """Return `count` idle blocks to evict, or fewer if the guarantees of tenants leave fewer.

        `keys` has the keys of all blocks. Raises `PolicyError` and changes nothing.
        """
        return []

    def num_withheld(self) -> i64:
        """Return how many idle blocks the policy does not know because a state needs them."""
        return 0

    def num_idle_of(self, tenant: i64) -> int:
        """Return how many of a tenant's blocks are idle, if tenants share the pool."""
        return sum([int(layer.num_idle_of(tenant)) for layer in self.layers])

    # Retention, and time.

    def num_retained(self) -> int:
        """Return how many blocks are retained."""
        return sum([int(layer.retained()) for layer in self.layers])

    def num_retained_of(self, tenant: i64) -> int:
        """Return how many blocks are retained for a tenant, if tenants share the pool."""
        return sum([int(layer.retained_of(tenant)) for layer in self.layers])

    def is_retained(self, block: i64) -> bool:
        """Return whether the block has a priority above 0."""
        for layer in self.layers:
            if layer.is_retained(block):
                return True
        return False

    def retain(self, block: i64, priority: int, expires_at: float | None) -> None:
        """Set the priority of a cached block, if the pool retains blocks."""

    def advance(self, now: float) -> None:
        """Set the time, which ends retentions. O(log n) for each that ends."""

    # Sessions. O(log sessions) a call.

    def uses_sessions(self) -> bool:
        """Return whether hints about sessions affect evictions."""
        for layer in self.layers:
            if layer.uses_sessions():
                return True
        return False

    def make_session_room(self) -> bool:
        """Make a free slot for a session. Return False at the limit of sessions. Raises MemoryError."""
        has_room = self.sessions.make_room()
        for layer in self.layers:
            layer.make_session_room(self.sessions.num_slots)
        return has_room

    def set_over(self, slot: i64, is_over: bool) -> None:
        """Set whether a session is over."""
        if self.sessions.is_over(slot) != is_over:
            self.sessions.set_over(slot, is_over)
            for layer in self.layers:
                layer.on_session_change(self.sessions, slot)

    def begin_sequence(self, slot: i64) -> i64:
        """Begin a new sequence of a session, and mark its earlier blocks as old. Return the sequence's tag."""
        self.sessions.touch(slot)
        self.set_over(slot, False)
        for layer in self.layers:
            layer.on_session_begin(slot)
        return self.sessions.begin(slot)

    def forget_session(self, slot: i64) -> None:
        """Forget a session and free its slot."""
        self.set_over(slot, False)
        for layer in self.layers:
            layer.on_session_end(slot)
        self.sessions.close(slot)

    def num_hinted_evictions(self) -> int:
        """Return how many blocks were evicted because their session was over."""
        return sum([int(layer.num_hinted()) for layer in self.layers])

    def check(self, idle: set[int]) -> None:
        """Verify that the policy knows exactly the idle blocks; run its own check unless it failed. O(num_blocks)."""


class EvictionStack(QueueOrder):
    """An eviction policy with its layers, from the outermost: retention, tenants, states, hints about sessions.

    Each layer has the interface of a policy and contains the next one. The stack calls `top`; each layer handles a call
    or passes it on.

    The stack catches exceptions of the policy, so that the change of the pool is completed. After an exception the
    policy has failed, because it may have missed a change: the next `choose` raises `PolicyError`. A KeyboardInterrupt,
    SystemExit or the like is raised when the running call is completed or undone (`interruption`). If `evict` raises,
    the call that needs a victim fails before it changes anything. Every answer is checked: if a policy returns a block
    that is not idle, that call fails and the pool is intact. `set_eviction_policy` replaces a failed policy.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, interruption: Interruption) -> None:
        super().__init__()
        self.has_policy = True
        self.interruption = interruption
        self.top = policy
        #: For errors.
        self.name = type(policy).__name__
        #: 1 + the depth of each idle block; 0 for others, below 0 for those just chosen.
        self._idle = zeros_i64(num_blocks)
        self.needs_hits = self._asks("needs_hits")

    def add_layer(self, layer: Layer) -> None:
        """Add a layer made around `top` as the outermost."""
        self.layers.insert(0, layer)
        self.top = layer

    def add_inside(self, layer: Layer) -> None:
        """Add a layer made around `innermost` as the innermost."""
        if self.layers:
            self.layers[-1].put_around(layer)
        else:
            self.top = layer
        self.layers.append(layer)

    def capacity(self) -> int:
        """Return how many blocks the stack has room for, the null block included."""
        return len(self._idle)

    def innermost(self) -> EvictionPolicy:
        """Return the policy inside all layers."""
        return self.layers[-1].policy if self.layers else self.top

    def idle_inside(self) -> list[int]:
        """Return the idle blocks that the innermost policy knows. O(num_blocks)."""
        idle = [block for block in range(len(self._idle)) if self._idle[i64(block)] != 0]
        for layer in self.layers:
            idle = [block for block in idle if layer.knows(i64(block))]
        return idle

    def takes_hints(self) -> bool:
        """Return whether hints about sessions may decide before the policy. Raises `PolicyError`."""
        return self._asks("takes_hints")

    def _asks(self, method: str) -> bool:
        try:
            return self.top.needs_hits() if method == "needs_hits" else self.top.takes_hints()
        except Exception as error:
            text = text_of(error, self.interruption)
            raise PolicyError(f"eviction policy {self.name}: {method} raised {type(error).__name__}: {text}")

    # What happens to blocks.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        self._idle[block] = depth + 1
        self.num_idle += 1
        try:
            self.top.insert(block, key, depth)
        except BaseException as error:
            self._note_failure("insert", error)

    def hit(self, block: i64, key: i64) -> None:
        try:
            self.top.hit(block, key)
        except BaseException as error:
            self._note_failure("hit", error)

    def remove(self, block: i64) -> None:
        self._idle[block] = 0
        self.num_idle -= 1
        try:
            self.top.remove(block)
        except BaseException as error:
            self._note_failure("remove", error)

    def insert_run(self, blocks: vec[i64], count: i64, keys: vec[i64]) -> None:
        inserted = self.layers[0].insert_run(blocks, count, keys, self._idle) if self.layers else NONE
        self.num_idle += inserted
        for place in range(count if inserted < count else 0):
            if self._idle[blocks[place]] == 0:
                self.insert(blocks[place], keys[blocks[place]], 0)

    def remove_run(self, blocks: vec[i32], start: i64, count: i64) -> None:
        removed = self.layers[0].remove_run(blocks, start, count, self._idle) if self.layers else NONE
        self.num_idle -= removed
        for place in range(start, start + count if removed < count else start):
            if self._idle[i64(blocks[place])] != 0:
                self.remove(i64(blocks[place]))

    def move_state(
        self, blocks: vec[i32], start: i64, count: i64, record: i64, is_idle: bool, key: i64, ref_cnt: vec[i32]
    ) -> bool:
        if not self.layers:
            return False
        if not self.layers[0].move_state(blocks, start, count, record, is_idle, key, self._idle, ref_cnt):
            return False
        self.num_idle += count if is_idle else -count
        return True

    def judge_again(self, block: i64, key: i64) -> None:
        depth = self._idle[block] - 1
        if depth >= 0:
            self.remove(block)
            self.insert(block, key, depth)

    def num_withheld(self) -> i64:
        num_withheld: i64 = 0
        for layer in self.layers:
            num_withheld += layer.num_withheld()
        return num_withheld

    def uncache(self, block: i64) -> None:
        self.sessions.forget_block(block)
        try:
            self.top.uncache(block)
        except BaseException as error:
            self._note_failure("uncache", error)

    def clear(self) -> None:
        clear_i64(self._idle)
        self.num_idle = 0
        self.sessions.forget_blocks()
        try:
            self.top.clear()
        except BaseException as error:
            self._note_failure("clear", error)

    def grow(self, num_blocks: int) -> None:
        idle = grown_i64(self._idle, num_blocks)
        try:
            self.top.grow(num_blocks)
        except MemoryError:
            raise
        except BaseException as error:
            self._note_failure("grow", error)
        self._idle = idle

    def _note_failure(self, method: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self.interruption.note(error)
        if not self.failure:
            # The name first: what follows runs the exception's own code.
            self.failure = f"{method} raised {type(error).__name__}"
            self.failure = f"{self.failure}: {text_of(error, self.interruption)}"

    # Victims.

    def error(self) -> PolicyError:
        return PolicyError(f"eviction policy {self.name}: {self.failure}; set another policy")

    def choose(self, count: i64, keys: vec[i64]) -> list[int]:
        if count > 0 and self.failure:
            raise self.error()
        victims: list[int] = []
        while count > 0 and self._find_requester():
            problem = self._choose_one(victims, keys)
            if problem:
                self._put_back(victims, keys)
                raise PolicyError(f"eviction policy {self.name}: {problem}")
            count -= 1
        for victim in victims:
            self._idle[i64(victim)] = 0
        self.num_idle -= i64(len(victims))
        return victims

    def _find_requester(self) -> bool:
        for layer in self.layers:
            if not layer.find_requester():
                return False
        return True

    def _choose_one(self, victims: list[int], keys: vec[i64]) -> str:
        """Choose one more victim. Return the error in the policy's answer, "" for none."""
        try:
            block = index_of(self.top.evict())
        except Exception as error:
            return f"evict raised {type(error).__name__}: {text_of(error, self.interruption)}"
        except BaseException:
            self._put_back(victims, keys)
            raise
        if not NONE < block < len(self._idle) or self._idle[i64(block)] == 0:
            return f"evict returned block {block}, which is not idle"
        if self._idle[i64(block)] < 0:
            return f"evict returned block {block} twice"
        self._idle[i64(block)] = -self._idle[i64(block)]
        victims.append(block)
        return ""

    def _put_back(self, victims: list[int], keys: vec[i64]) -> None:
        for victim in victims:
            block = i64(victim)
            self.num_idle -= 1
            self.insert(block, keys[block], -self._idle[block] - 1)

    # Retention, and time.

    def retain(self, block: i64, priority: int, expires_at: float | None) -> None:
        try:
            for layer in self.layers:
                layer.retain(block, priority, expires_at)
        except BaseException as error:
            self._note_failure("remove" if priority > 0 else "insert", error)

    def advance(self, now: float) -> None:
        try:
            self.top.advance(now)
        except BaseException as error:
            self._note_failure("advance", error)

    def check(self, idle: set[int]) -> None:
        told = {block for block in range(len(self._idle)) if self._idle[i64(block)] != 0}
        if told != idle:
            raise InvariantError(f"policy: blocks {sorted(told)} were inserted as idle, but {sorted(idle)} are idle")
        if self.num_idle != len(told):
            raise InvariantError(f"policy: {len(told)} blocks are idle, but num_idle is {self.num_idle}")
        for layer in self.layers:
            layer.check_sessions(self.sessions)
        if not self.failure:
            self.top.check()
            return
        for layer in self.layers:
            layer.check_retained()


def text_of(error: BaseException, interruption: Interruption) -> str:
    """Return the text of an exception, whose `__str__` may be the user's code and raise."""
    try:
        return str(error)
    except BaseException as second:
        if not isinstance(second, Exception):
            interruption.note(second)
        return f"its text raised {type(second).__name__}"
