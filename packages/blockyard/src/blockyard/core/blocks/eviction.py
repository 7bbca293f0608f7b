"""Chooses the blocks to evict from a pool: by the order of the free queue, or by a policy and its layers."""

from typing import Final

from mypy_extensions import i64

from ...answers import RetentionEnds
from ...arguments import require_int, require_number
from ...errors import InvalidArgument, OverBudget
from ..budget import SharedBudget
from ..gate import Interruption
from ..policies import make_policy
from ..policies.base import EvictionPolicy, Layer
from ..policies.layers.hinted import follow_sessions
from ..policies.layers.retention import Retention, RetentionWatch, TenantRetention
from ..policies.layers.tenant_layer import TenantLayer
from ..policies.sessions import Sessions
from ..policies.stack import EvictionStack, QueueOrder
from ..policies.states.layer import StateLayer
from ..policies.states.registry import CheckpointRegistry
from .ledger import BlockLedger
from .observer import Clock

MAX_PRIORITY: Final = 2**20

#: Actions in the history for a retention that ended, by cause.
ENDS: Final = tuple([f"retention {cause}" for cause in RetentionEnds.CAUSES])


class RetentionReporter(RetentionWatch):
    """Counts how retentions end under all policies of a pool, and reports each end to the pool's observers."""

    def __init__(self, ledger: BlockLedger) -> None:
        super().__init__()
        self.ledger = ledger

    def count_end(self, block: i64, cause: i64) -> None:
        super().count_end(block, cause)
        self.ledger.observer.on_unretain(block, ENDS[cause])


class EvictionOrder:
    """The eviction policy of a pool with its layers, and retention of at most `retention_blocks` blocks."""

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
        self.retentions = RetentionReporter(ledger)
        #: Evictions that hints decided under earlier policies.
        self._num_hinted_before = 0

    def install(self, policy: EvictionPolicy | None) -> None:
        """Install a policy; None for least recently used.

        For None the free queue decides, unless the pool needs layers. O(num_blocks). Raises `PolicyError`, or the
        interruption of the policy; then nothing has changed.
        """
        self._install(policy, self.stack.sessions)

    def _install(self, policy: EvictionPolicy | None, sessions: Sessions) -> None:
        stack = self._make_stack(policy, sessions)
        num_hinted, num_retained = self.num_hinted_evictions(), self.stack.num_retained()
        self._fill(stack)
        self.ledger.stack = stack
        self.retentions.count_all_dropped(num_retained)
        self._num_hinted_before = num_hinted

    def _make_stack(self, policy: EvictionPolicy | None, sessions: Sessions) -> QueueOrder:
        """Return the policy with the layers that this pool needs around it."""
        budget, num_blocks = self.ledger.budget, int(self.ledger.capacity)
        if policy is None:
            needs_layers = self.retention_blocks > 0 or budget.is_shared or self.registry is not None
            if not needs_layers and sessions.num_slots == 0:
                return QueueOrder()
            policy = make_policy("lru", num_blocks)
        stack = EvictionStack(policy, num_blocks, self.interruption)
        if self.registry is not None:
            stack.add_layer(StateLayer(stack.top, num_blocks, self.registry))
        retention: Layer = Retention(stack.top, num_blocks, self.retentions)
        if isinstance(budget, SharedBudget):
            tenants = TenantLayer(stack.top, num_blocks, budget)
            stack.add_layer(tenants)
            retention = TenantRetention(tenants, num_blocks, self.retentions)
        if self.retention_blocks > 0:
            stack.add_layer(retention)
        if sessions.num_slots > 0:
            sessions.make_block_room(num_blocks)
            follow_sessions(stack, sessions)
        return stack

    def _fill(self, stack: QueueOrder) -> None:
        """Insert the idle blocks. If a callback is interrupted, the pool is unchanged. O(num_blocks)."""
        ledger = self.ledger
        if stack.has_policy:
            idle = [block for block in ledger.queue.block_ids() if ledger.index.is_cached(i64(block))]
            for block in idle:
                stack.insert(i64(block), ledger.index.chain_hash[i64(block)], 0)
            self.interruption.raise_now()

    def know_sessions(self, max_sessions: int) -> None:
        """Start to track which session uses which block, so that hints about sessions can decide on evictions.

        O(num_blocks). Raises `PolicyError` or MemoryError; then nothing has changed.
        """
        num_blocks = int(self.ledger.capacity)
        sessions = Sessions(num_blocks, max_sessions)
        for block in range(num_blocks):
            # The sessions of blocks cached earlier are unknown. A block with one holder is assigned to its session.
            if self.ledger.index.is_cached(i64(block)) and self.ledger.ref_cnt[i64(block)] != 1:
                sessions.mark(i64(block), 0)
        stack = self.stack
        if isinstance(stack, EvictionStack):
            follow_sessions(stack, sessions)
        else:
            self._install(None, sessions)

    @property
    def stack(self) -> QueueOrder:
        """Return the policy stack in use."""
        return self.ledger.stack

    def ended_retentions(self) -> RetentionEnds:
        """Count the blocks whose retention has ended so far, by cause."""
        return RetentionEnds(*(int(count) for count in self.retentions.counts))

    @property
    def num_retained(self) -> int:
        """Return how many blocks are retained now."""
        return self.stack.num_retained()

    def num_retained_of(self, blocks: list[int]) -> int:
        """Return how many of these blocks are retained."""
        return len([block for block in blocks if self.stack.is_retained(i64(block))])

    def num_hinted_evictions(self) -> int:
        """Return how many blocks were evicted because their session had ended, under all policies."""
        return self._num_hinted_before + self.stack.num_hinted_evictions()

    def retain(self, blocks: list[int], priority: int, expires_at: float | None) -> int:
        """Give cached blocks a priority, all or none. Return their number."""
        stack = self.stack
        if self.retention_blocks == 0:
            raise InvalidArgument("retention_blocks is 0; retain needs a budget of blocks in the config")
        new = len([block for block in blocks if not stack.is_retained(i64(block))]) if priority > 0 else 0
        num_retained = stack.num_retained()
        if num_retained + new > self.retention_blocks:
            raise OverBudget(
                f"retain: {new} more blocks would be retained; {num_retained} of {self.retention_blocks} are already"
            )
        self._require_limit(blocks, new)
        if stack.failure:
            raise stack.error()
        self.ledger.act("retain", "")
        # From last to first, as blocks are released, so that of equal blocks a suffix is evicted first.
        for block in reversed(blocks):
            stack.retain(i64(block), priority, expires_at)
        return len(blocks)

    def _require_limit(self, blocks: list[int], new: int) -> None:
        """Raise `OverBudget` if the tenant of these blocks would retain more than its limit."""
        budget = self.ledger.budget
        if not isinstance(budget, SharedBudget) or new == 0:
            return
        tenant = budget.of_block[i64(blocks[0])]
        retained = self.stack.num_retained_of(tenant)
        if retained + new > budget.max_retained[tenant]:
            raise OverBudget(
                f"retain: {new} more blocks would be retained for tenant {budget.names[int(tenant)]!r}; {retained} of "
                f"{budget.max_retained[tenant]} are already"
            )

    def advance(self, now: float) -> None:
        """Set the time, and end the retentions that expire. Raises `InvalidArgument` for a time before the last one."""
        if now < self.clock.now:
            raise InvalidArgument(f"now is {now}; it must be at least {self.clock.now}, the time of the last call")
        self.clock.now = now
        if self.stack.num_retained() > 0:
            self.ledger.act("advance_time", "")
        self.stack.advance(now)


def resolve_policy(policy: object, ledger: BlockLedger) -> EvictionPolicy | None:
    """Return the eviction policy that a name, class or function stands for; None for least recently used."""
    if isinstance(policy, str) and policy == "lru":
        return None
    return make_policy(policy, int(ledger.capacity))


def read_priority(priority: object) -> int:
    return require_int("priority", priority, 0, MAX_PRIORITY)


def read_expiry(expires_at: object) -> float | None:
    return None if expires_at is None else require_number("expires_at", expires_at)
