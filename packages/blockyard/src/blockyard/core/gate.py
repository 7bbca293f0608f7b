"""One call at a time: what a cache and its pools do with calls that arrive while one of them runs.

A finaliser, a policy written in Python, an argument with `__index__` or `__array__`, a signal handler and another
thread can all call the cache in the middle of a call. A `free` that arrives then is queued and carried out when the
running call ends; any other call is refused. Without this, the running call would go on with what it had read before.
"""

from typing import Final

from mypy_extensions import i64

from ..errors import ConcurrentCall

OPEN: Final[i64] = 0
ENTERED: Final[i64] = 1
#: Entered, and frees, or something to tell, are waiting for the call to end.
FREES_WAIT: Final[i64] = 2


class Interruption:
    """A KeyboardInterrupt, SystemExit or the like that a policy's callback raised in the middle of a change."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first one until it can be raised."""
        if self.error is None:
            self.error = error

    def raise_now(self) -> None:
        """Raise what was kept, if anything was."""
        error = self.error
        if error is not None:
            self.error = None
            raise error


class Deferred:
    """Frees that arrived inside another call."""

    def carry_out(self) -> None:
        """Do what was queued, as long as there is some."""
        raise NotImplementedError("Deferred must have carry_out()")


class Told:
    """Something that is told of what calls did, once they are over."""

    def tell(self) -> bool:
        """Pass on what there is to tell, if there is something: it runs the caller's own code."""
        raise NotImplementedError("Told must have tell()")


class Gate:
    """Shared by a manager and its pools. Every public call that reads or changes more than one number enters it.

        gate.enter("reserve")      refuses when a call runs already
        try: ...
        finally: gate.leave()      carries out the frees that arrived meanwhile, and tells listeners

    A listener is the caller's own code, so it is told when the gate is open again.

    An interruption is raised by the call it came up in, once that call is finished or undone. Where the result of a
    finished call would be lost with it (`leave_with_result`), the next call raises it, before it does anything.

    Entering and leaving cost a compare each (docs/benchmarks.md).
    """

    def __init__(self) -> None:
        self.state: i64 = OPEN
        self.running = ""
        self.interruption = Interruption()
        self.deferred: list[Deferred] = []
        self.told: list[Told] = []
        #: Whether the running call changes what is cached though it is no step's: a listener resets it.
        self.has_changed = False
        self._is_telling = False

    def enter(self, call: str) -> None:
        """Begin a call. Raises `ConcurrentCall` while another runs."""
        if self.state != OPEN:
            self._refuse(call)
        if self.interruption.error is not None:
            self.interruption.raise_now()
        self.state = ENTERED
        self.running = call

    def enter_free(self, call: str) -> bool:
        """Begin a call that frees; False says that another one runs, and the free is to be queued."""
        if self.state != OPEN:
            return False
        self.state = ENTERED
        self.running = call
        return True

    def wait(self) -> None:
        """A free was queued: the running call is to carry it out."""
        if self.state == OPEN:
            # In the interpreted build another thread's call may have ended meanwhile.
            self.state = ENTERED
            self._carry_out()
        else:
            self.state = FREES_WAIT

    def leave(self) -> None:
        """End a call. Raises what interrupted it, now that it is finished or undone."""
        if self.state == ENTERED:
            self.state = OPEN
        else:
            self._end()
        if self.interruption.error is not None:
            self.interruption.raise_now()

    def leave_with_result(self) -> None:
        """End a call whose result must not be lost: what interrupted it is raised by the next one."""
        if self.state == ENTERED:
            self.state = OPEN
        else:
            self._end()

    def tell_later(self) -> None:
        """The running call has something to tell when it is over."""
        self.state = FREES_WAIT

    def note_change(self) -> None:
        """The running call, which is no step's, changes what is cached."""
        if len(self.told) > 0:
            self.has_changed = True
            self.state = FREES_WAIT

    def _end(self) -> None:
        self._carry_out()
        if not self._is_telling:
            self._is_telling = True
            try:
                # What one listener does may be the next thing to tell another.
                while self._tell_all():
                    pass
            finally:
                self._is_telling = False

    def _tell_all(self) -> bool:
        has_told = False
        for told in self.told:
            if told.tell():
                has_told = True
        return has_told

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
            f"signal handler or another thread; one call at a time is the limit (give threads a lock)"
        )
