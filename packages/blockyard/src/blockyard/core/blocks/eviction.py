"""What chooses victims in a pool: the order of its free queue, or a stack of a policy and its layers."""

from typing import Final

from mypy_extensions import i64

from ...answers import RetentionEnds
from ...arguments import require_int, require_number
from ...errors import InvalidArgument, OverBudget
from ..gate import Interruption
from ..policies import make_policy
from ..policies.base import EvictionPolicy
from ..policies.layers.retention import RetentionWatch
from ..policies.layers.sessions import Sessions
from ..policies.stack import EvictionStack
from ..policies.states.layer import StateLayer
from ..policies.states.registry import CheckpointRegistry
from .ledger import BlockLedger
from .observer import Clock

MAX_PRIORITY: Final = 2**20

#: What the history says of a block whose retention has ended, by cause.
ENDS: Final = tuple([f"retention {cause}" for cause in RetentionEnds.CAUSES])


class ToldRetentions(RetentionWatch):
    """Counts how retentions ended, under all policies of a pool, and tells its observers."""

    def __init__(self, ledger: BlockLedger) -> None:
        super().__init__()
        self.ledger = ledger

    def ended(self, block: i64, cause: i64) -> None:
        """Count it, and tell."""
        super().ended(block, cause)
        if self.ledger.observer is not None:
            self.ledger.observer.unretained(block, ENDS[cause])


class EvictionOrder:
    """Installs policies, and keeps wishes within a budget of `retention_blocks` blocks, until their time is over."""

    def __init__(
        self,
        ledger: BlockLedger,
        interruption: Interruption,
        clock: Clock,
        retention_blocks: int,
        registry: CheckpointRegistry | None = None,
    ) -> None:
        self.ledger = ledger
        #: The checkpoints of a cache with states.
        self.registry = registry
        self.interruption = interruption
        self.clock = clock
        self.retention_blocks = retention_blocks
        #: How retentions ended, under all policies.
        self.retentions = ToldRetentions(ledger)
        #: Who uses which blocks, from the first session on.
        self.sessions: Sessions | None = None
        #: What hints decided under earlier policies.
        self._num_hinted_before = 0

    def install(self, policy: EvictionPolicy | None) -> None:
        """Let a policy choose. None is least recently used: the order of the free queue, unless layers stand on it.

        O(num_blocks).
        """
        stack: EvictionStack | None = None
        num_blocks = int(self.ledger.capacity)
        stands_on_it = self.retention_blocks > 0 or self.sessions is not None or self.registry is not None
        if policy is None and (stands_on_it or self.ledger.tenants is not None):
            policy = make_policy("lru", num_blocks)
        if policy is not None and self.registry is not None:
            policy = StateLayer(policy, num_blocks, self.registry)
        if policy is not None:
            retains = self.retentions if self.retention_blocks > 0 else None
            stack = EvictionStack(policy, num_blocks, self.interruption, retains, self.sessions, self.ledger.tenants)
        num_hinted, num_retained = self.num_hinted_evictions(), self.num_retained
        self._choose_by(stack)
        self.retentions.all_dropped(num_retained)
        self._num_hinted_before = num_hinted

    def _choose_by(self, stack: EvictionStack | None) -> None:
        """Let a stack choose from now on. A callback that is interrupted here leaves all as it was. O(num_blocks)."""
        ledger = self.ledger
        if stack is not None:
            idle = [block for block in ledger.queue.block_ids() if ledger.index.is_cached(i64(block))]
            for block in idle:
                stack.insert(i64(block), ledger.index.chain_hash[i64(block)], 0)
            stack.interruption.raise_now()
        ledger.stack = stack

    def know_sessions(self, max_sessions: int) -> Sessions:
        """Have sessions known from now on, and hints around the policy, if it takes any. O(num_blocks).

        Raises `PolicyError`, and MemoryError; nothing has changed then.
        """
        num_blocks = int(self.ledger.capacity)
        sessions = Sessions(num_blocks, max_sessions)
        for block in range(num_blocks):
            # Which session used what is cached is not known; what one sequence holds alone is taken for its own.
            if self.ledger.index.is_cached(i64(block)) and self.ledger.ref_cnt[i64(block)] != 1:
                sessions.mark(i64(block), 0)
        if self.ledger.stack is not None:
            self.ledger.stack.know(sessions)
            self.sessions = sessions
            return sessions
        # Least recently used, which was the order of the queue.
        self.sessions = sessions
        try:
            self.install(None)
        except BaseException:
            self.sessions = None
            raise
        return sessions

    @property
    def stack(self) -> EvictionStack | None:
        """Return what chooses now; None for the order of the queue. Never None where sessions are known."""
        return self.ledger.stack

    @property
    def num_retained(self) -> int:
        """Blocks that a wish keeps now."""
        return 0 if self.ledger.stack is None else self.ledger.stack.num_retained

    def ended_retentions(self) -> RetentionEnds:
        """Count the blocks whose retention has ended so far, by cause."""
        return RetentionEnds(*(int(count) for count in self.retentions.counts))

    def num_retained_of(self, blocks: list[int]) -> int:
        """Count those of these blocks that a wish keeps now."""
        stack = self.ledger.stack
        return 0 if stack is None else len([block for block in blocks if stack.is_retained(block)])

    def num_hinted_evictions(self) -> int:
        """Blocks that were evicted because of a hint, under all policies."""
        stack = self.ledger.stack
        return self._num_hinted_before + (0 if stack is None else stack.num_hinted_evictions())

    def retain(self, blocks: list[int], priority: int, expires_at: float | None) -> int:
        """Give these cached blocks a priority, all or none. Returns how many they are."""
        stack = self.ledger.stack
        if stack is None or self.retention_blocks == 0:
            raise InvalidArgument("retention_blocks is 0; retain needs a budget of blocks in the config")
        new = len([block for block in blocks if not stack.is_retained(block)]) if priority > 0 else 0
        if stack.num_retained + new > self.retention_blocks:
            raise OverBudget(
                f"retain: {new} more blocks would be retained; {stack.num_retained} of {self.retention_blocks} are "
                f"already"
            )
        self._require_share(stack, blocks, new)
        if stack.failure:
            raise stack.error()
        self.ledger.act("retain", "")
        # From the last to the first, as blocks are released: among equals a suffix goes first.
        for block in reversed(blocks):
            stack.retain(block, priority, expires_at)
        return len(blocks)

    def _require_share(self, stack: EvictionStack, blocks: list[int], new: int) -> None:
        """Raise `OverBudget` if a tenant would retain more than it may. All blocks are one tenant's."""
        book = self.ledger.tenants
        if book is None or stack.retention is None or new == 0:
            return
        slot = book.of_block[i64(blocks[0])]
        retained = stack.retention.retained_for[slot]
        if retained + new > book.max_retained[slot]:
            raise OverBudget(
                f"retain: {new} more blocks would be retained for tenant {book.names[int(slot)]!r}; {retained} of "
                f"{book.max_retained[slot]} are already"
            )

    def advance(self, now: float) -> None:
        """It is `now`: wishes whose time is over end. Raises `InvalidArgument` for a time before the last one."""
        if now < self.clock.now:
            raise InvalidArgument(f"now is {now}; it must be at least {self.clock.now}, the time told before")
        self.clock.now = now
        if self.ledger.stack is not None:
            if self.num_retained > 0:
                self.ledger.act("advance_time", "")
            self.ledger.stack.advance(now)


def wished_policy(policy: object, ledger: BlockLedger) -> EvictionPolicy | None:
    """Return the policy that a caller asks for, made for a ledger's blocks; None for least recently used."""
    if isinstance(policy, str) and policy == "lru":
        return None
    return make_policy(policy, int(ledger.capacity))


def wished_priority(priority: object) -> int:
    """Return the priority that `retain` was given."""
    return require_int("priority", priority, 0, MAX_PRIORITY)


def wished_end(expires_at: object) -> float | None:
    """Return the time that `retain` was given."""
    return None if expires_at is None else require_number("expires_at", expires_at)
