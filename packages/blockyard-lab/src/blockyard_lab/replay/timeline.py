"""Counts over time in a replay by timestamps: sums and peaks of equal spans, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Most spans of time. If a replay takes longer, pairs of spans are merged.
MAX_SPANS = 240
_SHORTEST = 2.0**-20
#: Names of the counts.
SUMS = (
    "arrived", "started", "resumed", "preempted", "finished",
    "prompt_tokens", "hit_tokens", "evicted_tokens", "never_seen_tokens", "tail_tokens", "moved_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replay by timestamps in equal spans of time. All arrays are (spans,).

    Attributes:
        span: modelled seconds per span.
        held_blocks: most blocks held during the span.
        running: running requests at its end.
        waiting: waiting requests at its end.
        counts: sums by name. Requests: arrived, started, resumed, preempted, finished. Tokens of started prompts:
            prompt_tokens, divided into hit_tokens, evicted_tokens, never_seen_tokens and tail_tokens (the last three
            are zero if causes were not requested). Blocks: moved_blocks, between the pool and the CPU pool.
    """

    span: float
    held_blocks: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    counts: dict[str, NDArray[np.int64]]


class TimelineRecorder:
    """Records events. O(1) amortised per event."""

    def __init__(self) -> None:
        self._span = _SHORTEST
        self._sums = {name: np.zeros(MAX_SPANS, np.int64) for name in SUMS}
        #: Most blocks held in each span, and blocks held at its end; -1 if no step ended in it.
        self._most = np.full(MAX_SPANS, -1, np.int64)
        self._last = np.full(MAX_SPANS, -1, np.int64)
        self._end = 0

    def note(self, name: str, time: float, amount: int = 1) -> None:
        """Add `amount` to a count at `time`, in seconds. Times need not be in order."""
        self._sums[name][self._place(time)] += amount

    def hold(self, time: float, num_blocks: int) -> None:
        """Record the number of held blocks from `time` on. Call it in order of time."""
        place = self._place(time)
        self._most[place] = max(int(self._most[place]), num_blocks)
        self._last[place] = num_blocks

    def result(self) -> Timeline:
        """Return the timeline."""
        end = self._end + 1
        counts = {name: sums[:end].copy() for name, sums in self._sums.items()}
        begun = counts["started"] + counts["resumed"]
        running = np.cumsum(begun - counts["finished"] - counts["preempted"])
        waiting = np.cumsum(counts["arrived"] + counts["preempted"] - begun)
        return Timeline(self._span, self._held()[:end], running, waiting, counts)

    def _held(self) -> NDArray[np.int64]:
        """Fill spans without a step with the blocks held before them."""
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
        """Merge pairs of spans, so that twice the time fits."""
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
