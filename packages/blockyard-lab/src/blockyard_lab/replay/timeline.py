"""What happened when, in a replay by timestamps: sums and peaks of equal spans of time, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Spans of time at most; where a replay takes longer, two become one.
MAX_SPANS = 240
_SHORTEST = 2.0**-20
#: What is counted as it happens.
SUMS = (
    "arrived", "started", "resumed", "preempted", "finished",
    "prompt_tokens", "hit_tokens", "evicted_tokens", "never_seen_tokens", "tail_tokens", "moved_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replay by timestamps, span by span; all arrays are (spans,).

    span: seconds of each, of the model. held_blocks: most blocks held in it. running, waiting: requests at its end.
    counts: by name, how much of it happened. arrived, started, resumed, preempted, finished: requests. prompt_tokens:
    of those started, and of them by what became of them: hit_tokens, evicted_tokens, never_seen_tokens, tail_tokens
    (zeros but for the hits where causes were not looked for). moved_blocks: between the pool and the CPU pool.
    """

    span: float
    held_blocks: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    counts: dict[str, NDArray[np.int64]]


class TimelineRecorder:
    """Takes notes. O(1) a note, amortised."""

    def __init__(self) -> None:
        self._span = _SHORTEST
        self._sums = {name: np.zeros(MAX_SPANS, np.int64) for name in SUMS}
        #: Most blocks held, and those held at the end, of each span; -1 where no step ended in it.
        self._most = np.full(MAX_SPANS, -1, np.int64)
        self._last = np.full(MAX_SPANS, -1, np.int64)
        self._end = 0

    def note(self, name: str, time: float, amount: int = 1) -> None:
        """Add `amount` of it at `time`, in seconds; times need not be in order."""
        self._sums[name][self._place(time)] += amount

    def hold(self, time: float, num_blocks: int) -> None:
        """`num_blocks` are held; call it in the order of time."""
        place = self._place(time)
        self._most[place] = max(int(self._most[place]), num_blocks)
        self._last[place] = num_blocks

    def result(self) -> Timeline:
        """Return all notes."""
        end = self._end + 1
        counts = {name: sums[:end].copy() for name, sums in self._sums.items()}
        begun = counts["started"] + counts["resumed"]
        running = np.cumsum(begun - counts["finished"] - counts["preempted"])
        waiting = np.cumsum(counts["arrived"] + counts["preempted"] - begun)
        return Timeline(self._span, self._held()[:end], running, waiting, counts)

    def _held(self) -> NDArray[np.int64]:
        """Fill spans in which no step ended: what was held before is held still."""
        known = np.where(self._last >= 0, np.arange(MAX_SPANS), 0)
        before = np.maximum(self._last[np.maximum.accumulate(known)], 0)
        return np.where(self._most >= 0, self._most, before)

    def _place(self, time: float) -> int:
        while time >= self._span * MAX_SPANS:
            self._halve()
        place = int(time / self._span)
        self._end = max(self._end, place)
        return place

    def _halve(self) -> None:
        """Two spans become one, so that as much time again has room."""
        self._span *= 2
        self._end //= 2
        for sums in self._sums.values():
            sums[: MAX_SPANS // 2] = sums.reshape(-1, 2).sum(axis=1)
            sums[MAX_SPANS // 2 :] = 0
        pairs = self._last.reshape(-1, 2)
        last = np.where(pairs[:, 1] >= 0, pairs[:, 1], pairs[:, 0])
        for held, merged in ((self._most, self._most.reshape(-1, 2).max(axis=1)), (self._last, last)):
            held[: MAX_SPANS // 2] = merged
            held[MAX_SPANS // 2 :] = -1
