"""The layer for retention: blocks with a priority are evicted last."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap, order_of
from .tenant_layer import TenantLayer

#: Why retentions end, in the order of the fields of `RetentionEnds`.
EVICTED: Final[i64] = 0
EXPIRED: Final[i64] = 1
RELEASED: Final[i64] = 2
DROPPED: Final[i64] = 3
NONE: Final[i64] = 0


class RetentionWatch:
    """Counts the blocks whose retention ended, by cause. It must not raise."""

    def __init__(self) -> None:
        self.counts = zeros_i64(int(DROPPED) + 1)

    def count_end(self, block: i64, cause: i64) -> None:  # noqa: ARG002
        """Count the end of the retention of `block`."""
        self.counts[cause] += 1

    def count_all_dropped(self, num_blocks: i64) -> None:
        """Count the end of all retentions at once: the cache was reset, or another policy was set."""
        self.counts[DROPPED] += num_blocks


class Retention(Layer):
    """Evicts blocks with a priority above 0 only when no other block is idle.

    Among these, the lowest priority is evicted first, then the block that was idle the longest. A priority can be set,
    changed and withdrawn at any time, for idle and held blocks. It ends at its expiry, or when the block is evicted.
    Retention cannot starve a pool as a hard pin can (SGLang removed theirs). O(log n) per operation.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        num_blocks: int,
        watch: RetentionWatch | None = None,
    ) -> None:
        super().__init__(policy, num_blocks)
        self.watch = watch or RetentionWatch()
        self.num_retained: i64 = 0
        self._priority = zeros_i64(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._depth = zeros_i64(num_blocks)
        #: Blocks whose priority ends, by the time at which it does.
        self._expiries = BlockHeap(num_blocks)
        self._retained = BlockHeap(num_blocks)
        #: Idle blocks that the policy knows.
        self._num_inner: i64 = 0
        self._is_inner = zeros_i64(num_blocks)

    def retained(self) -> i64:
        return self.num_retained

    def is_retained(self, block: i64) -> bool:
        return self._priority[block] > 0

    def retain(self, block: i64, priority: int, expires_at: float | None) -> None:
        """Retain `block` until `expires_at`, or without end if that is None. Priority 0 ends the retention. O(log n).

        An idle block whose priority changes counts as idle from now on; with the same priority it keeps its position.
        """
        before = self._priority[block]
        self._count(block, (1 if priority > 0 else 0) - (1 if before > 0 else 0))
        self._priority[block] = priority
        self._expire_never(block)
        if priority == 0 and before > 0:
            self.watch.count_end(block, RELEASED)
        if priority > 0 and expires_at is not None:
            self._expiries.insert(block, order_of(expires_at))
        if self._retained.holds(block) and priority != before:
            self._remove_idle(block)
            self._put_in(block)
        elif self._is_inner[block] != 0 and priority > 0:
            self._leave_policy(block)
            try:
                self.policy.remove(block)
            finally:
                self._add_idle(block)

    def _count(self, block: i64, change: i64) -> None:  # noqa: ARG002
        self.num_retained += change

    def _add_idle(self, block: i64) -> None:
        """Add a retained block that became idle."""
        self._retained.insert(block, self._priority[block])

    def _remove_idle(self, block: i64) -> None:
        self._retained.remove(block)

    def _expire_never(self, block: i64) -> None:
        if self._expiries.holds(block):
            self._expiries.remove(block)

    def advance(self, now: float) -> None:
        """End the retentions that expire at `now` or earlier. O(log n) for each."""
        latest = order_of(now)
        ended: list[int] = []
        while self._expiries.num_items > 0 and self._expiries.lowest() <= latest:
            block = self._expiries.pop()
            self._priority[block] = 0
            self._count(block, -1)
            self.watch.count_end(block, EXPIRED)
            if self._retained.holds(block):
                self._remove_idle(block)
                ended.append(int(block))
        for number in ended:
            self._put_in(i64(number))
        super().advance(now)

    def knows(self, block: i64) -> bool:
        return self._is_inner[block] != 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        self._key[block] = key
        self._depth[block] = depth
        self._put_in(block)

    def _put_in(self, block: i64) -> None:
        if self._priority[block] > 0:
            self._add_idle(block)
        else:
            self._is_inner[block] = 1
            self._num_inner += 1
            self.policy.insert(block, self._key[block], self._depth[block])

    def _leave_policy(self, block: i64) -> None:
        self._is_inner[block] = 0
        self._num_inner -= 1

    def remove(self, block: i64) -> None:
        if self._retained.holds(block):
            self._remove_idle(block)
        else:
            self._leave_policy(block)
            self.policy.remove(block)

    def evict(self) -> i64:
        """Return the policy's choice, or a retained block if the policy knows no idle block.

        The stack checks whether the choice is idle. A retained block is idle, but the policy does not know it: it
        raises ValueError.
        """
        retained = self._retained_choice()
        if retained == NONE:
            block = self.policy.evict()
            if not 0 < block < len(self._is_inner) or self._is_inner[block] == 0:
                if 0 < block < len(self._is_inner) and self._retained.holds(block):
                    raise ValueError(f"block {block} is retained; the policy must not choose it")
                return block
            self._leave_policy(block)
            return block
        self._remove_idle(retained)
        self._forget(retained, EVICTED)
        return retained

    def _retained_choice(self) -> i64:
        """Return the retained block to evict next; 0 if the policy chooses."""
        return NONE if self._num_inner > 0 else self._retained.first()

    def uncache(self, block: i64) -> None:
        self._forget(block, DROPPED)
        super().uncache(block)

    def _forget(self, block: i64, cause: i64) -> None:
        if self._priority[block] > 0:
            self._count(block, -1)
            self._priority[block] = 0
            self._expire_never(block)
            self.watch.count_end(block, cause)

    def clear(self) -> None:
        """Remove all idle blocks and priorities. Allocates nothing."""
        self._retained.clear()
        self._expiries.clear()
        clear_i64(self._priority)
        clear_i64(self._is_inner)
        self._num_inner = 0
        self.watch.count_all_dropped(self.num_retained)
        self.num_retained = 0
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Grow, also if the policy raises; after a MemoryError nothing has grown."""
        priority = grown_i64(self._priority, num_blocks)
        key = grown_i64(self._key, num_blocks)
        depth = grown_i64(self._depth, num_blocks)
        is_inner = grown_i64(self._is_inner, num_blocks)
        self._retained.grow(num_blocks)
        self._expiries.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._priority = priority
        self._key = key
        self._depth = depth
        self._is_inner = is_inner
        if failure is not None:
            raise failure

    def check(self) -> None:
        self.check_retained()
        self.policy.check()

    def check_retained(self) -> None:
        """Verify that the policy knows no retained block, and the counts. O(num_blocks). Raises `InvariantError`."""
        self._retained.check()
        self._expiries.check()
        num_inner = 0
        num_retained = 0
        for block in range(len(self._is_inner)):
            num_inner += 1 if self._is_inner[block] != 0 else 0
            num_retained += 1 if self._priority[block] > 0 else 0
            if self._retained.holds(block) and (self._is_inner[block] != 0 or self._priority[block] == 0):
                raise InvariantError(
                    f"retention: block {block} is listed as retained, but the policy knows it or its priority is 0"
                )
            if self._expiries.holds(block) and self._priority[block] == 0:
                raise InvariantError(f"retention: block {block} has an expiry but priority 0")
        if num_inner != self._num_inner or num_retained != self.num_retained:
            raise InvariantError(
                f"retention: the policy knows {num_inner} blocks and {num_retained} are retained; the counts are "
                f"{self._num_inner} and {self.num_retained}"
            )


class TenantRetention(Retention):
    """Retention in a pool that tenants share: first the tenant that gives a block is chosen, then the block.

    `tenants` is the layer directly inside this one.
    """

    def __init__(self, tenants: TenantLayer, num_blocks: int, watch: RetentionWatch) -> None:
        super().__init__(tenants, num_blocks, watch)
        self.tenants = tenants
        self.budget = tenants.budget
        #: How many blocks are retained for each tenant.
        self._retained_for = zeros_i64(int(self.budget.num_tenants))

    def retained_of(self, tenant: i64) -> i64:
        return self._retained_for[tenant]

    def _count(self, block: i64, change: i64) -> None:
        super()._count(block, change)
        self._retained_for[self.budget.of_block[block]] += change

    def _add_idle(self, block: i64) -> None:
        super()._add_idle(block)
        self.tenants.add_retained(block)

    def _remove_idle(self, block: i64) -> None:
        super()._remove_idle(block)
        self.tenants.remove_retained(block)

    def _retained_choice(self) -> i64:
        """Return the retained block to evict next; 0 if the policy chooses. O(the tenant's retained blocks)."""
        tenant = self.tenants.choose()
        if self.tenants.has_plain(tenant):
            return NONE
        choice = NONE
        for number in self.tenants.retained_blocks(tenant):
            block = i64(number)
            if choice == NONE or self._retained.is_before(block, choice):
                choice = block
        self.budget.note_choice()
        return choice

    def clear(self) -> None:
        clear_i64(self._retained_for)
        super().clear()
