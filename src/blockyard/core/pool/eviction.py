"""What chooses victims in a pool: the order of its free queue, or a policy, with retention around it."""

from typing import Final

from ...arguments import require_int, require_number
from ...errors import InvalidArgument, OverBudget
from ..gate import Interruption
from ..policies import make_policy
from ..policies.caught import CaughtPolicy
from ..policies.retention import Retention
from .ledger import BlockLedger
from .observer import Clock

MAX_PRIORITY: Final = 2**20


class EvictionOrder:
    """Installs policies, and keeps wishes within a budget of `retention_blocks` blocks, until their time is over."""

    def __init__(self, ledger: BlockLedger, interruption: Interruption, clock: Clock, retention_blocks: int) -> None:
        self.ledger = ledger
        self.interruption = interruption
        self.clock = clock
        self.retention_blocks = retention_blocks
        self.retention: Retention | None = None

    def install(self, policy: object) -> None:
        """Least recently used needs no policy: it is the order of the free queue. O(num_blocks)."""
        num_blocks = int(self.ledger.capacity)
        caught = CaughtPolicy(make_policy(policy, num_blocks), num_blocks, self.interruption)
        retention: Retention | None = None
        if self.retention_blocks > 0:
            retention = Retention(caught, num_blocks)
            self.ledger.choose_by(retention, caught)
        elif isinstance(policy, str) and policy == "lru":
            self.ledger.choose_by(None, None)
        else:
            self.ledger.choose_by(caught, caught)
        self.retention = retention

    @property
    def num_retained(self) -> int:
        """Blocks that a wish keeps now."""
        return 0 if self.retention is None else self.retention.num_retained

    def retain(self, blocks: list[int], priority: int, expires_at: float | None) -> int:
        """Give these cached blocks a priority, all or none. Returns how many they are."""
        retention = self.retention
        if retention is None:
            raise InvalidArgument("retention_blocks is 0; retain needs a budget of blocks in the config")
        new = len([block for block in blocks if not retention.is_retained(block)]) if priority > 0 else 0
        if retention.num_retained + new > self.retention_blocks:
            raise OverBudget(
                f"retain: {new} more blocks would be retained; {retention.num_retained} of {self.retention_blocks} are "
                f"already"
            )
        if self.ledger.chooser is not None and self.ledger.chooser.caught.failure:
            raise self.ledger.chooser.error()
        for block in blocks:
            retention.set_priority(block, priority, expires_at)
        return len(blocks)

    def advance(self, now: object) -> None:
        """It is `now`: wishes whose time is over end. Raises `InvalidArgument` for a time before the last one."""
        time = require_number("now", now)
        if time < self.clock.now:
            raise InvalidArgument(f"now is {time}; it must be at least {self.clock.now}, the time told before")
        self.clock.now = time
        if self.retention is not None:
            self.retention.advance(time)


def wished_priority(priority: object) -> int:
    """The priority that `retain` was given."""
    return require_int("priority", priority, 0, MAX_PRIORITY)


def wished_end(expires_at: object) -> float | None:
    """The time that `retain` was given."""
    return None if expires_at is None else require_number("expires_at", expires_at)
