"""Retention: blocks that should stay longer, within a policy that decides about all others."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap, order_of
from .shares import Shares

#: Why retentions end, in the order of the fields of `RetentionEnds`.
EVICTED: Final[i64] = 0
EXPIRED: Final[i64] = 1
RELEASED: Final[i64] = 2
DROPPED: Final[i64] = 3
NONE: Final[i64] = 0


class RetentionWatch:
    """Counts the blocks whose retention ended, by cause; a subclass may tell others. It must not raise."""

    def __init__(self) -> None:
        self.counts = zeros_i64(int(DROPPED) + 1)

    def ended(self, block: i64, cause: i64) -> None:  # noqa: ARG002
        """The retention of `block` has ended."""
        self.counts[cause] += 1

    def all_dropped(self, num_blocks: i64) -> None:
        """All there are have ended at once: the cache was reset, or another policy came."""
        self.counts[DROPPED] += num_blocks


class Retention(Layer):
    """A wish around a policy: blocks with a priority above 0 are evicted only when no other block is idle.

    Among them the lowest priority goes first, then the one idle longest. A priority can be set, changed and taken back
    at any time, for idle and held blocks; it ends at its expiry, or with the block's eviction. Hard pins starve a
    pool (SGLang took theirs back); a wish cannot. O(log n) an operation.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        num_blocks: int,
        watch: RetentionWatch | None = None,
        shares: Shares | None = None,
    ) -> None:
        super().__init__(policy, num_blocks)
        #: Where tenants share the pool, the layer right inside of this one: who gives is chosen before what goes.
        self.shares = shares
        #: How many blocks are retained for each tenant.
        self.retained_for = zeros_i64(1 if shares is None else int(shares.book.num_tenants))
        #: Told how wishes end.
        self.watch = RetentionWatch() if watch is None else watch
        self.num_retained = 0
        self._priority = zeros_i64(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._depth = zeros_i64(num_blocks)
        #: Blocks whose priority ends, by the time at which it does.
        self._expiries = BlockHeap(num_blocks)
        self._retained = BlockHeap(num_blocks)
        #: Idle blocks that the policy knows.
        self._num_inner: i64 = 0
        self._is_inner = zeros_i64(num_blocks)

    def is_retained(self, block: int) -> bool:
        """Return whether the block has a priority above 0."""
        return self._priority[i64(block)] > 0

    def set_priority(self, block: int, priority: int, expires_at: float | None) -> None:
        """Retain what `block` holds until `expires_at` (None: for good), or with priority 0 no longer. O(log n).

        An idle block whose priority changes counts as idle from now on; with the priority that it has, it keeps its
        place.
        """
        index = i64(block)
        before = self._priority[index]
        self._count(index, (1 if priority > 0 else 0) - (1 if before > 0 else 0))
        self._priority[index] = priority
        self._expire_never(index)
        if priority == 0 and before > 0:
            self.watch.ended(index, RELEASED)
        if priority > 0 and expires_at is not None:
            self._expiries.insert(index, order_of(expires_at))
        if self._retained.holds(index) and priority != before:
            self._let_go(index)
            self._put_in(index)
        elif self._is_inner[index] != 0 and priority > 0:
            self._retained.insert(index, priority)
            self._leave_policy(index)
            try:
                self.policy.remove(index)
            finally:
                self._keep(index)

    def _count(self, block: i64, change: i64) -> None:
        self.num_retained += change
        if self.shares is not None:
            self.retained_for[self.shares.book.of_block[block]] += change

    def _keep(self, block: i64) -> None:
        """Tell the shares of an idle block that is retained."""
        if self.shares is not None:
            self.shares.keep(block)

    def _let_go(self, block: i64) -> None:
        """Take an idle block from those that are retained."""
        self._retained.remove(block)
        if self.shares is not None:
            self.shares.keep_no_more(block)

    def _expire_never(self, block: i64) -> None:
        if self._expiries.holds(block):
            self._expiries.remove(block)

    def advance(self, now: float) -> None:
        """End what expires at `now` or before. O(log n) for each."""
        latest = order_of(now)
        ended: list[int] = []
        while self._expiries.num_items > 0 and self._expiries.lowest() <= latest:
            block = self._expiries.pop()
            self._priority[block] = 0
            self._count(block, -1)
            self.watch.ended(block, EXPIRED)
            if self._retained.holds(block):
                self._let_go(block)
                ended.append(int(block))
        for number in ended:
            self._put_in(i64(number))
        super().advance(now)

    def passes(self, block: i64) -> bool:
        """Return whether the policy knows the block as idle."""
        return self._is_inner[block] != 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self._key[block] = key
        self._depth[block] = depth
        self._put_in(block)

    def _put_in(self, block: i64) -> None:
        if self._priority[block] > 0:
            self._retained.insert(block, self._priority[block])
            self._keep(block)
        else:
            self._is_inner[block] = 1
            self._num_inner += 1
            self.policy.insert(block, self._key[block], self._depth[block])

    def _leave_policy(self, block: i64) -> None:
        self._is_inner[block] = 0
        self._num_inner -= 1

    def remove(self, block: i64) -> None:
        """The idle `block` was revived; it keeps its priority."""
        if self._retained.holds(block):
            self._let_go(block)
        else:
            self._leave_policy(block)
            self.policy.remove(block)

    def evict(self) -> i64:
        """Return the policy's choice; a retained block only when there is no other, of the tenant that gives.

        The choice may be wrong. One that is not even idle is left to who asked; a retained block is idle, but the
        policy was never told so: ValueError.
        """
        retained = self._retained_choice()
        if retained == NONE:
            block = self.policy.evict()
            if not 0 < block < len(self._is_inner) or self._is_inner[block] == 0:
                if 0 < block < len(self._is_inner) and self._retained.holds(block):
                    raise ValueError(f"block {block} is retained and not the policy's to choose")
                return block
            self._leave_policy(block)
            return block
        self._let_go(retained)
        self._forget(retained, EVICTED)
        return retained

    def _retained_choice(self) -> i64:
        """Return the retained block that goes next, 0 where another goes. O(what a tenant retains)."""
        if self.shares is None:
            return NONE if self._num_inner > 0 else self._retained.first()
        slot = self.shares.choose()
        if self.shares.has_plain(slot):
            return NONE
        choice = NONE
        for number in self.shares.retained_of(slot):
            block = i64(number)
            if choice == NONE or self._retained.is_before(block, choice):
                choice = block
        self.shares.book.chosen()
        return choice

    def gone(self, block: i64) -> None:
        """The content of `block` is gone, and the wish to keep it with it."""
        self._forget(block, DROPPED)
        super().gone(block)

    def _forget(self, block: i64, cause: i64) -> None:
        if self._priority[block] > 0:
            self._count(block, -1)
            self._priority[block] = 0
            self._expire_never(block)
            self.watch.ended(block, cause)

    def clear(self) -> None:
        """The cache was reset: nothing is retained any more. It asks for no memory."""
        self._retained.clear()
        self._expiries.clear()
        clear_i64(self._priority)
        clear_i64(self._is_inner)
        self._num_inner = 0
        self.watch.all_dropped(self.num_retained)
        self.num_retained = 0
        clear_i64(self.retained_for)
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1, also where the policy raises; for MemoryError nothing has grown."""
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
        """All wishes are sound, and the policy. O(num_blocks). Raises `InvariantError`."""
        self.check_wishes()
        self.policy.check()

    def check_wishes(self) -> None:
        """The policy knows no retained block; the counts agree. O(num_blocks). Raises `InvariantError`."""
        self._retained.check()
        self._expiries.check()
        num_inner = 0
        num_retained = 0
        for block in range(len(self._is_inner)):
            num_inner += 1 if self._is_inner[block] != 0 else 0
            num_retained += 1 if self._priority[block] > 0 else 0
            if self._retained.holds(block) and (self._is_inner[block] != 0 or self._priority[block] == 0):
                raise InvariantError(f"retention: block {block} is retained, and the policy's or of priority 0")
            if self._expiries.holds(block) and self._priority[block] == 0:
                raise InvariantError(f"retention: block {block} has an expiry and no priority")
        if num_inner != self._num_inner or num_retained != self.num_retained:
            raise InvariantError(f"retention: {num_inner} blocks are the policy's, {num_retained} are retained")
