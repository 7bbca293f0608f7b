"""How another thread asks something of a cache: the thread that owns it answers between two steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager

AnswerT = TypeVar("AnswerT")
#: Questions that may wait; one more is refused. A page asks one at a time, and one for each pointed-at block.
_MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the owner of a cache knows besides it.

    step: steps so far. num_running, num_waiting: requests. num_preemptions: since the start. names: of holders, for
    those who asked for them: a holder that has none is shown by itself. loading: blocks of the pool that swap_ins fill
    in this step, int32. tiers: a line for each tier below the pool.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    loading: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    tiers: tuple[str, ...] = ()


class Source(Protocol):
    """A cache that belongs to some thread."""

    def ask(self, question: Callable[[KVCacheManager, Surroundings], AnswerT]) -> Future[AnswerT]:
        """Call `question` in the cache's thread between two steps; the future has its answer or its error."""


class Desk:
    """A source for a loop of one's own: it calls `answer` between its steps.

        desk = Desk(cache)
        while running:
            step(cache)
            desk.answer()

    `ask` may be called from any thread.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._waiting: queue.Queue[Callable[[Surroundings], None]] = queue.Queue(_MAX_WAITING)

    def ask(self, question: Callable[[KVCacheManager, Surroundings], AnswerT]) -> Future[AnswerT]:
        """See `Source.ask`. The future has `queue.Full` where 256 questions wait already."""
        answer: Future[AnswerT] = Future()

        def give(around: Surroundings) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self._cache, around))
                except Exception as error:
                    answer.set_exception(error)

        try:
            self._waiting.put_nowait(give)
        except queue.Full as error:
            answer.set_exception(error)
        return answer

    def answer(self, around: Surroundings | None = None) -> int:
        """Answer all that waits, in the thread that owns the cache; returns how many. O(1) where nothing waits."""
        for number in range(_MAX_WAITING):
            try:
                give = self._waiting.get_nowait()
            except queue.Empty:
                return number
            give(around or Surroundings())
        return _MAX_WAITING
