"""Between the pool and an eviction policy: a policy chooses, the pool believes nothing it says without a look."""

from operator import index as index_of

from mypy_extensions import i64

from ..errors import InvariantError, PolicyError
from ..ids import NO_CONTENT, NULL_BLOCK
from .arrays import grown_i64, zeros_i64
from .free_queue import FreeKVCacheBlockQueue
from .policies.base import EvictionPolicy
from .policies.retention import Retention
from .prefix_index import PrefixIndex


class Chooser:
    """Tells a policy what it has to know, and asks it for victims before anything changes.

    The pool's queue stays the truth of what is free, and in least recently used order, whatever the policy does. A
    policy that raises, or names a block that is not idle, fails the allocation that asked (`PolicyError`), not the
    pool: put another policy in its place, and all goes on.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.name = type(policy.policy if isinstance(policy, Retention) else policy).__name__
        #: 1 + the depth of each idle block, as the policy was told; 0 for the others.
        self._idle = zeros_i64(capacity)
        #: What the policy raised when it was told something; the next question raises it.
        self._failure = ""

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self._idle[block] = depth + 1
        try:
            self.policy.insert(block, key, depth)
        except Exception as error:
            self.fail("insert", error)

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        try:
            self.policy.hit(block, key)
        except Exception as error:
            self.fail("hit", error)

    def remove(self, block: i64) -> None:
        """`block` is idle no longer."""
        self._idle[block] = 0
        try:
            self.policy.remove(block)
        except Exception as error:
            self.fail("remove", error)

    def forget(self, block: i64) -> None:
        """What `block` cached is gone, chosen or not (a pool that shrinks asks nobody): nor is it retained."""
        if isinstance(self.policy, Retention):
            self.policy.forget(int(block))

    def clear(self) -> None:
        """No block is idle any more."""
        self._idle = zeros_i64(len(self._idle))
        try:
            self.policy.clear()
        except Exception as error:
            self.fail("clear", error)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        self._idle = grown_i64(self._idle, num_blocks)
        try:
            self.policy.grow(num_blocks)
        except Exception as error:
            self.fail("grow", error)

    def fail(self, method: str, error: Exception) -> PolicyError:
        """Ask the policy no more; returns what the next question raises."""
        if not self._failure:
            self._failure = f"{method} raised {type(error).__name__}: {error}"
        return PolicyError(f"eviction policy {self.name}: {self._failure}; put another in its place")

    def choose(self, queue: FreeKVCacheBlockQueue, index: PrefixIndex, count: i64) -> list[int]:
        """Victims for `count` blocks, after those that are free and cache nothing. Raises `PolicyError`.

        O(count * cost of the policy). The victims are in the queue and in the index still.
        """
        missing = count - _count_empty(queue, index, count)
        if missing > 0 and self._failure:
            raise PolicyError(f"eviction policy {self.name}: {self._failure}; put another in its place")
        victims: list[int] = []
        while missing > 0:
            problem = self._choose_one(victims)
            if problem:
                self._put_back(index, victims)
                raise PolicyError(f"eviction policy {self.name}: {problem}")
            missing -= 1
        for victim in victims:
            self._idle[i64(victim)] = 0
        return victims

    def _choose_one(self, victims: list[int]) -> str:
        """Ask for one more victim; returns what is wrong with the answer."""
        try:
            block = index_of(self.policy.evict())
        except Exception as error:
            return f"evict raised {type(error).__name__}: {error}"
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
            self.insert(block, index.chain_hash[block], -self._idle[block] - 1)

    def check(self, idle: set[int]) -> None:
        """The policy was told of exactly the idle blocks. O(num_blocks)."""
        told = {block for block in range(len(self._idle)) if self._idle[i64(block)] != 0}
        if told != idle:
            raise InvariantError(f"policy: it was told that {sorted(told)} are idle; {sorted(idle)} are")
        if not self._failure:
            self.policy.check()


def _count_empty(queue: FreeKVCacheBlockQueue, index: PrefixIndex, most: i64) -> i64:
    """How many blocks at the head of the queue cache nothing, up to `most`."""
    count: i64 = 0
    block = i64(queue.next_free[NULL_BLOCK])
    while count < most and block != NULL_BLOCK and index.identity[2 * block] == NO_CONTENT:
        count += 1
        block = i64(queue.next_free[block])
    return count
