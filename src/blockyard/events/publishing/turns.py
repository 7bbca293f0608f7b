"""How a thread in the background leaves the interpreter to an engine's thread."""

from __future__ import annotations

from time import perf_counter, sleep

#: Seconds of work, and of sleep after it. Compiled calls keep the interpreter until they return, and one who waits for
#: it gets it when the thread really sleeps: a core needs some microseconds to wake up, so after `sleep(0)` the thread
#: mostly has the interpreter again before the other one has noticed.
TURN = 0.0002
REST = 0.0001


class Turns:
    """Work in turns. `rest` is called between pieces of work, and sleeps where a turn has been long enough."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def begin(self) -> None:
        """A turn begins now: nothing was done before, or without the interpreter."""
        self._began = perf_counter()

    def is_over(self) -> bool:
        """Whether the turn has been long enough."""
        return perf_counter() - self._began >= TURN

    def rest(self) -> None:
        """Sleep if it is time."""
        if self.is_over():
            sleep(REST)
            self._began = perf_counter()
