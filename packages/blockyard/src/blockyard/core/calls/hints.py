"""`hint`, and the names of sessions: a caller says which of them are over."""

from typing import Final

from mypy_extensions import i64

from ...answers import HintOutcome
from ...arguments import shown
from ...errors import InvariantError, not_enough_memory
from ..blocks.eviction import EvictionOrder
from ..parts import Parts
from ..policies.stack import EvictionStack

#: Enum members, read once.
ACCEPTED: Final = HintOutcome.ACCEPTED
REFUSED: Final = HintOutcome.REFUSED
NO_SESSION: Final = HintOutcome.UNKNOWN


class HintCalls:
    """Sessions by name, or by the handle of a sequence that was hinted without one; all of it made at first use."""

    def __init__(self, parts: Parts, order: EvictionOrder) -> None:
        self.parts = parts
        self.sequences = parts.sequences
        self.order = order
        self._max_sessions = parts.config.hints.max_sessions if parts.config.enable_prefix_caching else 0
        #: The slot of each session; -1 for a name that `prepare` has made room for.
        self._slots: dict[object, int] = {}
        self._names: list[object] = []

    def num_sessions(self) -> int:
        """Sessions that are known."""
        sessions = self.parts.sessions
        return 0 if sessions is None else int(sessions.num_sessions)

    # A sequence of a session begins.

    def prepare(self, name: object) -> bool:
        """Have room for one session more, and its name, before anything changes; False where none are known.

        `bind` or `cancel` follows. Raises `PolicyError`, and `NotEnoughMemory`.
        """
        if self._max_sessions == 0:
            return False
        try:
            if self.parts.sessions is None:
                self.parts.sessions = self.order.know_sessions(self._max_sessions)
            stack = self.order.stack
            if stack is not None:
                stack.make_session_room()
            while len(self._names) < self.parts.sessions.num_slots:
                self._names.append(None)
            if name not in self._slots:
                self._slots[name] = -1
        except MemoryError as error:
            raise not_enough_memory("session: the system has no memory for one more session", error)
        return True

    def bind(self, row: i64, name: object) -> None:
        """The sequence in `row` is what the session of this name holds now; `prepare` came before."""
        stack = self.order.stack
        if stack is None:
            return
        slot = i64(self._slots.get(name, -1))
        if slot < 0:
            slot = self._open(stack, name)
        self.sequences.session[row] = stack.begin_sequence(slot)

    def cancel(self, name: object) -> None:
        """No sequence of the session begins after all."""
        if self._slots.get(name, 0) < 0:
            del self._slots[name]

    def _open(self, stack: EvictionStack, name: object) -> i64:
        if not stack.make_session_room():
            oldest = stack.sessions.oldest()
            stack.forget_session(oldest)
            del self._slots[self._names[int(oldest)]]
        slot = stack.sessions.open()
        self._names[int(slot)] = name
        self._slots[name] = int(slot)
        return slot

    # What is said.

    def hint_name(self, name: str, is_over: bool) -> HintOutcome:
        """Say whether the session of this name is over."""
        if self._max_sessions == 0:
            return REFUSED
        slot = i64(self._slots.get(name, -1))
        return NO_SESSION if slot < 0 else self._say(slot, is_over)

    def hint_row(self, row: i64, is_over: bool) -> HintOutcome:
        """Say whether the session of a sequence is over. A sequence without a session gets one, which has no name."""
        if self._max_sessions == 0:
            return REFUSED
        tag = self.sequences.session[row]
        sessions = self.parts.sessions
        if tag > 0 and sessions is not None:
            slot = sessions.slot_of(tag)
            if slot < 0:
                return NO_SESSION
            return self._say(slot, is_over) if sessions.is_latest(tag) else REFUSED
        if not is_over:
            return ACCEPTED
        handle = int(self.sequences.handle[row])
        self.prepare(handle)
        if not self._takes_hints():
            self.cancel(handle)
            return REFUSED
        self.bind(row, handle)
        return self._say(i64(self._slots[handle]), is_over)

    def _takes_hints(self) -> bool:
        stack = self.order.stack
        return stack is not None and stack.hints is not None

    def _say(self, slot: i64, is_over: bool) -> HintOutcome:
        stack = self.order.stack
        if stack is None or not self._takes_hints():
            return REFUSED
        stack.sessions.hear(slot)
        stack.say(slot, is_over)
        return ACCEPTED

    def check(self) -> None:
        """Names lead to the sessions that are known, and back. O(num_blocks + sessions). Raises `InvariantError`."""
        sessions = self.parts.sessions
        if sessions is None:
            return
        sessions.check()
        named = sorted(self._slots.values())
        if named != sorted(sessions.slots()):
            raise InvariantError(f"sessions: {len(named)} have a name, {sessions.num_sessions} are known")
        for name, slot in self._slots.items():
            if self._names[slot] != name:
                raise InvariantError(f"sessions: {shown(name)} leads to slot {slot}, which has another name")
