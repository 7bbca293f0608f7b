"""Between the pool and an eviction policy: a policy chooses, and the pool checks every answer."""

from operator import index as index_of

from mypy_extensions import i64

from ...errors import InvariantError, PolicyError
from ...ids import NULL_BLOCK
from ..arrays import clear_i64, grown_i64, zeros_i64
from ..index.prefix_index import PrefixIndex
from ..policies.base import EvictionPolicy
from ..policies.caught import CaughtPolicy, text_of
from ..policies.hinted import Hinted
from ..policies.retention import Retention
from ..policies.sessions import Sessions
from .free_queue import FreeQueue


class Chooser:
    """Tells a policy what it has to know, and asks it for victims before anything changes.

    The pool's queue stays the truth of what is free, and in least recently used order, whatever the policy does. A
    policy that raises, or names a block that is not idle, fails the allocation that asked (`PolicyError`), not the
    pool: put another policy in its place, and all goes on.
    """

    def __init__(self, policy: EvictionPolicy, caught: CaughtPolicy, capacity: int) -> None:
        self.policy = policy
        #: The same, or what stands inside of it: it knows what went wrong.
        self.caught = caught
        #: Whether the policy wants to be told of parents and misses.
        self.needs_paths = policy.needs_paths()
        #: Whose blocks they are, where sessions are known.
        self.sessions: Sessions | None = None
        self.hinted: Hinted | None = None
        #: 1 + the depth of each idle block, as the policy was told; 0 for the others.
        self._idle = zeros_i64(capacity)
        #: How many blocks the policy can name.
        self.num_idle: i64 = 0

    def follows(self, block: i64, parent: i64) -> None:
        """`parent` stands before `block` in a sequence; `insert` is next."""
        if self.needs_paths:
            self.policy.follows(block, parent)

    def miss(self, key: i64) -> None:
        """A prompt asks for a content that is not cached."""
        self.policy.miss(key)

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self._idle[block] = depth + 1
        self.num_idle += 1
        self.policy.insert(block, key, depth)

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        self.policy.hit(block, key)

    def remove(self, block: i64) -> None:
        """`block` is idle no longer."""
        self._idle[block] = 0
        self.num_idle -= 1
        self.policy.remove(block)
        if self.hinted is not None:
            self.hinted.spare(block)

    def forget(self, block: i64) -> None:
        """What `block` cached is gone, chosen or not (a shrinking pool asks no policy): nor is it retained."""
        if isinstance(self.policy, Retention):
            self.policy.forget(int(block))
        if self.sessions is not None:
            self.sessions.forget_block(block)
            if self.hinted is not None:
                self.hinted.gone(block)

    def told(self) -> list[int]:
        """The blocks that the policy inside of retention knows as idle. O(num_blocks)."""
        idle = [block for block in range(len(self._idle)) if self._idle[i64(block)] != 0]
        retention = self.policy
        return [block for block in idle if retention.is_inner(block)] if isinstance(retention, Retention) else idle

    def clear(self) -> None:
        """No block is idle any more."""
        clear_i64(self._idle)
        self.num_idle = 0
        if self.sessions is not None:
            self.sessions.forget_blocks()
        self.policy.clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1. Raises MemoryError, and has grown or not then; both are sound."""
        idle = grown_i64(self._idle, num_blocks)
        self.policy.grow(num_blocks)
        self._idle = idle

    def error(self) -> PolicyError:
        """What the question raises that comes after a failure."""
        return PolicyError(f"eviction policy {self.caught.name}: {self.caught.failure}; put another in its place")

    def choose(self, queue: FreeQueue, index: PrefixIndex, count: i64) -> list[int]:
        """Victims for `count` blocks, after those at the head of the queue that cache nothing. Raises `PolicyError`.

        Where there are too few victims, the rest are blocks that were freed to the end of the queue and cache nothing.
        O(count * cost of the policy). The victims are in the queue and in the index still.
        """
        return self.choose_exactly(index, min(count - _count_empty(queue, index, count), self.num_idle))

    def choose_exactly(self, index: PrefixIndex, missing: i64) -> list[int]:
        """`missing` victims, which must be there. Raises `PolicyError`."""
        if missing > 0 and self.caught.failure:
            raise self.error()
        victims: list[int] = []
        while missing > 0:
            problem = self._choose_one(victims, index)
            if problem:
                self._put_back(index, victims)
                raise PolicyError(f"eviction policy {self.caught.name}: {problem}")
            missing -= 1
        for victim in victims:
            self._idle[i64(victim)] = 0
        self.num_idle -= i64(len(victims))
        return victims

    def _choose_one(self, victims: list[int], index: PrefixIndex) -> str:
        """Ask for one more victim; returns what is wrong with the answer."""
        try:
            block = index_of(self.policy.evict())
        except Exception as error:
            return f"evict raised {type(error).__name__}: {text_of(error, self.caught.interruption)}"
        except BaseException:
            self._put_back(index, victims)
            raise
        if not NULL_BLOCK < block < len(self._idle) or self._idle[i64(block)] == 0:
            return f"evict returned block {block}, which is not idle"
        if self._idle[i64(block)] < 0:
            return f"evict returned block {block} twice"
        self._idle[i64(block)] = -self._idle[i64(block)]
        victims.append(block)
        return ""

    def _put_back(self, index: PrefixIndex, victims: list[int]) -> None:
        for victim in victims:
            block = i64(victim)
            self.num_idle -= 1
            self.insert(block, index.chain_hash[block], -self._idle[block] - 1)

    def check(self, idle: set[int]) -> None:
        """The policy was told of exactly the idle blocks. O(num_blocks)."""
        told = {block for block in range(len(self._idle)) if self._idle[i64(block)] != 0}
        if told != idle:
            raise InvariantError(f"policy: it was told that {sorted(told)} are idle; {sorted(idle)} are")
        if self.num_idle != len(told):
            raise InvariantError(f"policy: {len(told)} blocks are idle, the count says {self.num_idle}")
        if not self.caught.failure:
            self.policy.check()


def _count_empty(queue: FreeQueue, index: PrefixIndex, most: i64) -> i64:
    """How many blocks at the head of the queue cache nothing, up to `most`."""
    count: i64 = 0
    block = i64(queue.next_free[NULL_BLOCK])
    while count < most and block != NULL_BLOCK and not index.is_cached(block):
        count += 1
        block = i64(queue.next_free[block])
    return count


def check_empty(queue: FreeQueue, index: PrefixIndex) -> None:
    """The queue's blocks up to `last_empty` cache nothing. O(free)."""
    block = i64(queue.last_empty)
    while block != NULL_BLOCK:
        if index.is_cached(block):
            raise InvariantError(f"free queue: block {block} is cached; all up to {queue.last_empty} are empty")
        block = i64(queue.prev_free[block])
