"""What chooses victims in a pool: the order of its free queue, or a policy, with retention around it."""

from typing import Final

from mypy_extensions import i64

from ...arguments import require_int, require_number
from ...errors import InvalidArgument, OverBudget
from ..gate import Interruption
from ..policies import make_policy
from ..policies.caught import CaughtPolicy
from ..policies.hinted import Hinted
from ..policies.retention import Retention
from ..policies.session_life import SessionLife
from ..policies.sessions import Sessions
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
        #: Where sessions are known.
        self.life: SessionLife | None = None
        #: What hints decided under earlier policies.
        self._num_hinted_before = 0

    def install(self, policy: object) -> None:
        """Least recently used needs no policy: it is the order of the free queue. O(num_blocks)."""
        num_blocks = int(self.ledger.capacity)
        caught = CaughtPolicy(make_policy(policy, num_blocks), num_blocks, self.interruption)
        life = self.life
        hinted: Hinted | None = None
        if life is not None and caught.takes_hints():
            life.sessions.make_block_room(num_blocks)
            hinted = caught.let_hint(life.sessions, num_blocks, [])
        retention: Retention | None = None
        if self.retention_blocks > 0:
            retention = Retention(caught, num_blocks)
            self.ledger.choose_by(retention, caught)
        elif isinstance(policy, str) and policy == "lru" and life is None:
            self.ledger.choose_by(None, None)
        else:
            self.ledger.choose_by(caught, caught)
        self._num_hinted_before = self.num_hinted_evictions()
        self.retention = retention
        if life is not None:
            life.tell(hinted, caught)
        if life is not None and self.ledger.chooser is not None:
            self.ledger.chooser.sessions = life.sessions
            self.ledger.chooser.hinted = hinted

    def know_sessions(self, max_sessions: int) -> SessionLife:
        """Have sessions known from now on, and hints around the policy, if it takes any. O(num_blocks).

        Raises `PolicyError`, and MemoryError; nothing has changed then.
        """
        num_blocks = int(self.ledger.capacity)
        sessions = Sessions(num_blocks, max_sessions)
        sessions.now = self.clock.now
        for block in range(num_blocks):
            # Which session used what is cached is not known; what one sequence holds alone is taken for its own.
            if self.ledger.index.is_cached(i64(block)) and self.ledger.ref_cnt[i64(block)] != 1:
                sessions.mark(i64(block), 0)
        life = SessionLife(sessions)
        if self.ledger.chooser is None:
            # Least recently used, which was the order of the queue.
            self.life = life
            try:
                self.install("lru")
            except BaseException:
                self.life = None
                raise
            return life
        caught = self.ledger.chooser.caught
        hinted: Hinted | None = None
        if caught.takes_hints():
            hinted = caught.let_hint(sessions, num_blocks, self.ledger.chooser.told())
        life.tell(hinted, caught)
        self.life = life
        self.ledger.chooser.sessions = sessions
        self.ledger.chooser.hinted = hinted
        return life

    @property
    def num_retained(self) -> int:
        """Blocks that a wish keeps now."""
        return 0 if self.retention is None else self.retention.num_retained

    def num_hinted_evictions(self) -> int:
        """Blocks that were evicted because of a hint, under all policies."""
        hinted = None if self.life is None else self.life.hinted
        return self._num_hinted_before + (0 if hinted is None else int(hinted.num_evicted))

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
            if self.life is not None and self.life.hinted is not None:
                self.life.hinted.spare(i64(block))
        return len(blocks)

    def advance(self, now: object) -> None:
        """It is `now`: wishes whose time is over end. Raises `InvalidArgument` for a time before the last one."""
        time = require_number("now", now)
        if time < self.clock.now:
            raise InvalidArgument(f"now is {time}; it must be at least {self.clock.now}, the time told before")
        self.clock.now = time
        if self.retention is not None:
            self.retention.advance(time)
        if self.life is not None:
            self.life.advance(time)


def wished_priority(priority: object) -> int:
    """The priority that `retain` was given."""
    return require_int("priority", priority, 0, MAX_PRIORITY)


def wished_end(expires_at: object) -> float | None:
    """The time that `retain` was given."""
    return None if expires_at is None else require_number("expires_at", expires_at)
