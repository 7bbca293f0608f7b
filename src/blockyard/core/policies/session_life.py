"""The life of a session, from its first sequence until it is forgotten, as the policy has to hear of it."""

from mypy_extensions import i64

from .caught import CaughtPolicy
from .hinted import Hinted
from .sessions import UNKNOWN, Sessions


class SessionLife:
    """Changes what is known of sessions and tells the hints around the policy, where it takes any.

    A pool and the lab's simulation both run it. O(log sessions) a call, and O(idle blocks of the session) where some
    were kept.

    hinted: what decides by hints, or None. caught: what keeps its errors; where it is None they are raised.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.hinted: Hinted | None = None
        self.caught: CaughtPolicy | None = None

    def tell(self, hinted: Hinted | None, caught: CaughtPolicy | None) -> None:
        """From now on these are told."""
        self.hinted = hinted
        self.caught = caught

    def make_room(self) -> bool:
        """Have a free slot, or say that none can be had. Raises MemoryError."""
        has_room = self.sessions.make_room()
        if self.hinted is not None and self.hinted.num_slots < self.sessions.num_slots:
            self.hinted.grow_slots()
        return has_room

    def say(self, slot: i64, state: i64, back_at: float) -> None:
        """This is known of a session now."""
        self.sessions.say(slot, state, back_at)
        if self.hinted is None:
            return
        if self.caught is None:
            self.hinted.restate(slot)
        else:
            self.caught.restate(self.hinted, slot)

    def begin(self, slot: i64) -> i64:
        """A new sequence of a session: what was said is over, and what it held is old. Returns the sequence's tag."""
        self.sessions.hear(slot)
        self.say(slot, UNKNOWN, 0.0)
        if self.hinted is not None:
            self.hinted.supersede(slot)
        return self.sessions.begin(slot)

    def forget(self, slot: i64) -> None:
        """Forget a session; its slot is free."""
        self.say(slot, UNKNOWN, 0.0)
        if self.hinted is not None:
            self.hinted.forget(slot)
        self.sessions.close(slot)

    def advance(self, now: float) -> None:
        """It is `now`: of sessions that should have come back before, nothing is known. O(log sessions) for each."""
        self.sessions.now = now
        slot = self.sessions.overdue()
        while slot >= 0:
            self.say(slot, UNKNOWN, 0.0)
            slot = self.sessions.overdue()
