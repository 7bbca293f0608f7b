"""One call at a time: how a cache and its pools treat calls that arrive during another call.

A finaliser, a policy written in Python, an argument with `__index__` or `__array__`, a signal handler or another thread
can call the cache during a call. A `free` is then queued and carried out when the running call ends. Any other call is
refused, because the running call would continue with outdated values.
"""

from typing import Final

from mypy_extensions import i64

from ..errors import ConcurrentCall

OPEN: Final[i64] = 0
ENTERED: Final[i64] = 1
#: Entered; frees or notifications wait for the call to end.
FREES_WAIT: Final[i64] = 2


class Interruption:
    """A KeyboardInterrupt, SystemExit or the like that a policy's callback raised in the middle of a change."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Store the exception until it can be raised. Later ones are ignored."""
        if self.error is None:
            self.error = error

    def raise_now(self) -> None:
        """Raise the stored exception, if any."""
        error = self.error
        if error is not None:
            self.error = None
            raise error


class Deferred:
    """Frees that arrived during another call."""

    def carry_out(self) -> None:
        """Carry out the queued frees, including those that are queued meanwhile."""
        raise NotImplementedError("Deferred must have carry_out()")


class Listener:
    """An object that notifies the caller's code after calls."""

    def notify(self) -> bool:
        """Notify the caller if there is something to report. Return whether there was."""
        raise NotImplementedError("Listener must have notify()")


class Gate:
    """The gate that a manager shares with its pools.

    Every public call that reads or changes more than one number enters it:

        gate.enter("reserve")      # raises if another call runs
        try: ...
        finally: gate.leave()      # carries out queued frees and notifies listeners

    Listeners run the caller's code, so the gate is open while they are notified. A call that is interrupted raises the
    interruption when it is finished or undone. If that would lose the call's result (`leave_with_result`), the next
    call raises it before it does anything. Entering and leaving cost a compare each (docs/benchmarks.md).
    """

    def __init__(self) -> None:
        self.state: i64 = OPEN
        self.running = ""
        self.interruption = Interruption()
        self.deferred: list[Deferred] = []
        self.listeners: list[Listener] = []
        #: Whether a call outside of steps changed the cached contents; a listener resets it.
        self.has_changed = False
        self._is_notifying = False

    def enter(self, call: str) -> None:
        """Begin a call. Raises `ConcurrentCall` while another runs."""
        if self.state != OPEN:
            self._refuse(call)
        if self.interruption.error is not None:
            self.interruption.raise_now()
        self.state = ENTERED
        self.running = call

    def enter_free(self, call: str) -> bool:
        """Begin a call that frees. Return False if another call runs: queue the free."""
        if self.state != OPEN:
            return False
        self.state = ENTERED
        self.running = call
        return True

    def wait(self) -> None:
        """Make the running call carry out a queued free when it ends."""
        if self.state == OPEN:
            # In the interpreted build another thread's call may have ended meanwhile.
            self.state = ENTERED
            self._carry_out()
        else:
            self.state = FREES_WAIT

    def leave(self) -> None:
        """End a call. Raises its interruption, because the call is completed or undone now."""
        if self.state == ENTERED:
            self.state = OPEN
        else:
            self._end()
        if self.interruption.error is not None:
            self.interruption.raise_now()

    def leave_with_result(self) -> None:
        """End a call whose result must not be lost. Its interruption is raised by the next call."""
        if self.state == ENTERED:
            self.state = OPEN
        else:
            self._end()

    def notify_later(self) -> None:
        """Notify listeners when the running call ends."""
        self.state = FREES_WAIT

    def note_change(self) -> None:
        """Record that the running call changes the cached contents outside of a step."""
        if len(self.listeners) > 0:
            self.has_changed = True
            self.state = FREES_WAIT

    def _end(self) -> None:
        self._carry_out()
        if not self._is_notifying:
            self._is_notifying = True
            try:
                # A listener's call of the pool may be the next event for another listener.
                while self._notify_all():
                    pass
            finally:
                self._is_notifying = False

    def _notify_all(self) -> bool:
        has_notified = False
        for listener in self.listeners:
            if listener.notify():
                has_notified = True
        return has_notified

    def _carry_out(self) -> None:
        try:
            while self.state != ENTERED:
                self.state = ENTERED
                for deferred in self.deferred:
                    deferred.carry_out()
        finally:
            self.state = OPEN

    def _refuse(self, call: str) -> None:
        raise ConcurrentCall(
            f"{call} was called while {self.running} runs on the same cache: by a policy, a finaliser, an argument, a "
            f"signal handler or another thread; only one call may run at a time; use a lock between threads"
        )
