"""Calls of a cache from other threads. The thread that owns the cache runs them between two steps."""

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
#: Maximum of waiting calls. A page makes one at a time, and one for each block that the reader points at.
_MAX_WAITING = 256


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of the engine that owns a cache.

    Attributes:
        step: number of steps so far.
        num_running: running requests.
        num_waiting: waiting requests.
        num_preemptions: preemptions since the start.
        names: display names of holders; a holder without one is shown as it is.
        loading: int32, blocks of the pool that swap-ins fill in this step.
        tiers: a line about each tier below the pool.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    loading: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    tiers: tuple[str, ...] = ()


class CacheSource(Protocol):
    """A cache that belongs to another thread."""

    def call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> Future[AnswerT]:
        """Call `function` in the cache's thread between two steps; return a future of its result."""


class CallQueue:
    """A `CacheSource` for a loop of your own, which calls `run` between its steps.

    calls = CallQueue(cache)
    while running:
        step(cache)
        calls.run()
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._waiting: queue.Queue[Callable[[EngineStatus], None]] = queue.Queue(_MAX_WAITING)

    def call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> Future[AnswerT]:
        """See `CacheSource.call`; callable from any thread. The future raises `queue.Full` if 256 calls wait."""
        answer: Future[AnswerT] = Future()

        def run(status: EngineStatus) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(self._cache, status))
                except Exception as error:
                    answer.set_exception(error)

        try:
            self._waiting.put_nowait(run)
        except queue.Full as error:
            answer.set_exception(error)
        return answer

    def run(self, status: EngineStatus | None = None) -> int:
        """Run all waiting calls, in the thread that owns the cache; return their number. O(1) if there are none."""
        for number in range(_MAX_WAITING):
            try:
                call = self._waiting.get_nowait()
            except queue.Empty:
                return number
            call(status or EngineStatus())
        return _MAX_WAITING
