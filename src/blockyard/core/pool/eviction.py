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
from ..policies.sessions import UNKNOWN, Sessions
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
        #: Where sessions are known: what is known, and what it decides, unless the policy takes no hints.
        self.sessions: Sessions | None = None
        self.hinted: Hinted | None = None
        self.caught: CaughtPolicy | None = None
        #: What hints decided under earlier policies.
        self._num_hinted_before = 0

    def install(self, policy: object) -> None:
        """Least recently used needs no policy: it is the order of the free queue. O(num_blocks)."""
        num_blocks = int(self.ledger.capacity)
        caught = CaughtPolicy(make_policy(policy, num_blocks), num_blocks, self.interruption)
        sessions = self.sessions
        hinted: Hinted | None = None
        if sessions is not None and caught.takes_hints():
            sessions.make_block_room(num_blocks)
            hinted = caught.let_hint(sessions, num_blocks, [])
        retention: Retention | None = None
        if self.retention_blocks > 0:
            retention = Retention(caught, num_blocks)
            self.ledger.choose_by(retention, caught)
        elif isinstance(policy, str) and policy == "lru" and sessions is None:
            self.ledger.choose_by(None, None)
        else:
            self.ledger.choose_by(caught, caught)
        self._num_hinted_before = self.num_hinted_evictions()
        self.retention = retention
        self.hinted = hinted
        self.caught = caught
        if self.ledger.chooser is not None:
            self.ledger.chooser.sessions = sessions

    def know_sessions(self, max_sessions: int) -> Sessions:
        """Have sessions known from now on, and hints around the policy, if it takes any. O(num_blocks).

        Raises `PolicyError`, and MemoryError; nothing has changed then.
        """
        num_blocks = int(self.ledger.capacity)
        sessions = Sessions(num_blocks, max_sessions)
        sessions.now = self.clock.now
        for block in range(num_blocks):
            # Nobody knows who used what is cached; what one sequence holds alone is taken for its own.
            if self.ledger.index.is_cached(i64(block)) and self.ledger.ref_cnt[i64(block)] != 1:
                sessions.mark(i64(block), 0)
        if self.ledger.chooser is None:
            # Least recently used, which was the order of the queue.
            self.sessions = sessions
            try:
                self.install("lru")
            except BaseException:
                self.sessions = None
                raise
            return sessions
        caught = self.ledger.chooser.caught
        if caught.takes_hints():
            self.hinted = caught.let_hint(sessions, num_blocks, self.ledger.chooser.told())
        self.sessions = sessions
        self.ledger.chooser.sessions = sessions
        return sessions

    def make_session_room(self, sessions: Sessions) -> bool:
        """Have a free slot, or say that none can be had. Raises MemoryError."""
        has_room = sessions.make_room()
        if self.hinted is not None and self.hinted.num_slots < sessions.num_slots:
            self.hinted.grow_slots()
        return has_room

    def say(self, sessions: Sessions, slot: i64, state: i64, back_at: float) -> None:
        """This is known of a session now."""
        sessions.say(slot, state, back_at)
        if self.hinted is not None and self.caught is not None:
            self.caught.restate(self.hinted, slot)

    def begin(self, sessions: Sessions, slot: i64) -> i64:
        """A new sequence of a session: what was said is over, and what it held is old. Returns the sequence's tag."""
        self.say(sessions, slot, UNKNOWN, 0.0)
        if self.hinted is not None:
            self.hinted.supersede(slot)
        return sessions.begin(slot)

    def forget_session(self, sessions: Sessions, slot: i64) -> None:
        """Forget a session."""
        self.say(sessions, slot, UNKNOWN, 0.0)
        if self.hinted is not None:
            self.hinted.forget(slot)
        sessions.close(slot)

    @property
    def num_retained(self) -> int:
        """Blocks that a wish keeps now."""
        return 0 if self.retention is None else self.retention.num_retained

    def num_hinted_evictions(self) -> int:
        """Blocks that were chosen because of a hint, whatever the policy was."""
        return self._num_hinted_before + (0 if self.hinted is None else int(self.hinted.num_evicted))

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
        if self.sessions is not None:
            self._advance_sessions(self.sessions, time)

    def _advance_sessions(self, sessions: Sessions, now: float) -> None:
        """Who should have come back before now is as if nothing had been said. O(log sessions) for each."""
        sessions.now = now
        slot = sessions.overdue()
        while slot >= 0:
            self.say(sessions, slot, UNKNOWN, 0.0)
            slot = sessions.overdue()


def wished_priority(priority: object) -> int:
    """The priority that `retain` was given."""
    return require_int("priority", priority, 0, MAX_PRIORITY)


def wished_end(expires_at: object) -> float | None:
    """The time that `retain` was given."""
    return None if expires_at is None else require_number("expires_at", expires_at)
