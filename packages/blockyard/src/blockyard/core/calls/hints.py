"""`hint`: sessions by name, and which of them are over."""

from typing import Final

from mypy_extensions import i64

from ...answers import HintOutcome
from ...arguments import shown
from ...errors import InvariantError, not_enough_memory
from ..blocks.eviction import EvictionOrder
from ..parts import Parts

#: Enum members, read once.
ACCEPTED: Final = HintOutcome.ACCEPTED
REFUSED: Final = HintOutcome.REFUSED
NO_SESSION: Final = HintOutcome.UNKNOWN


class HintCalls:
    """The names of sessions. A sequence without a session that receives a hint gets one named by its handle."""

    def __init__(self, parts: Parts, order: EvictionOrder) -> None:
        self.sequences = parts.sequences
        self.order = order
        self._max_sessions = parts.config.hints.max_sessions if parts.config.enable_prefix_caching else 0
        #: The slot of each session; -1 for a name that `prepare` has made room for.
        self._slots: dict[object, int] = {}
        self._names: list[object] = []

    def num_sessions(self) -> int:
        """Return how many sessions are known."""
        return int(self.order.stack.sessions.num_sessions)

    # A sequence of a session begins.

    def prepare(self, name: object) -> bool:
        """Make room for a session and its name, before `bind` or `cancel`. Return False if the cache has no sessions.

        Raises:
            PolicyError: if `takes_hints` of the policy raised.
            NotEnoughMemory: if the system has no memory for it.
        """
        if self._max_sessions == 0:
            return False
        try:
            if self.order.stack.sessions.num_slots == 0:
                self.order.know_sessions(self._max_sessions)
            self.order.stack.make_session_room()
            while len(self._names) < self.order.stack.sessions.num_slots:
                self._names.append(None)
            if name not in self._slots:
                self._slots[name] = -1
        except MemoryError as error:
            raise not_enough_memory("session: the system has no memory for one more session", error)
        return True

    def bind(self, row: i64, name: object) -> None:
        """Make the sequence in `row` the newest one of a session, for which `prepare` made room."""
        slot = i64(self._slots.get(name, -1))
        if slot < 0:
            slot = self._open(name)
        self.sequences.session[row] = self.order.stack.begin_sequence(slot)

    def cancel(self, name: object) -> None:
        """Undo `prepare`."""
        if self._slots.get(name, 0) < 0:
            del self._slots[name]

    def _open(self, name: object) -> i64:
        stack = self.order.stack
        if not stack.make_session_room():
            oldest = stack.sessions.oldest()
            stack.forget_session(oldest)
            del self._slots[self._names[int(oldest)]]
        slot = stack.sessions.open()
        self._names[int(slot)] = name
        self._slots[name] = int(slot)
        return slot

    # Hints.

    def hint_name(self, name: str, is_over: bool) -> HintOutcome:
        """Set whether the session of this name is over."""
        if self._max_sessions == 0:
            return REFUSED
        slot = i64(self._slots.get(name, -1))
        return NO_SESSION if slot < 0 else self._set_over(slot, is_over)

    def hint_row(self, row: i64, is_over: bool) -> HintOutcome:
        """Set whether the session of a sequence is over. A sequence without a session gets one named by its handle."""
        if self._max_sessions == 0:
            return REFUSED
        tag = self.sequences.session[row]
        sessions = self.order.stack.sessions
        if tag > 0:
            slot = sessions.slot_of(tag)
            if slot < 0:
                return NO_SESSION
            return self._set_over(slot, is_over) if sessions.is_latest(tag) else REFUSED
        if not is_over:
            return ACCEPTED
        handle = int(self.sequences.handle[row])
        self.prepare(handle)
        if not self.order.stack.uses_sessions():
            self.cancel(handle)
            return REFUSED
        self.bind(row, handle)
        return self._set_over(i64(self._slots[handle]), is_over)

    def _set_over(self, slot: i64, is_over: bool) -> HintOutcome:
        stack = self.order.stack
        if not stack.uses_sessions():
            return REFUSED
        stack.sessions.touch(slot)
        stack.set_over(slot, is_over)
        return ACCEPTED

    def check(self) -> None:
        """Verify that names and sessions agree. O(num_blocks + sessions). Raises `InvariantError`."""
        sessions = self.order.stack.sessions
        sessions.check()
        named = sorted(self._slots.values())
        if named != sorted(sessions.slots()):
            raise InvariantError(f"sessions: {len(named)} have a name, but {sessions.num_sessions} are known")
        for name, slot in self._slots.items():
            if self._names[slot] != name:
                raise InvariantError(f"sessions: {shown(name)} has slot {slot}, which has another name")
