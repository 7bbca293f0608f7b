"""What the same memory holds when a request's slots are reserved in one piece, and when they are paged."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int
from blockyard.cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from blockyard.config import MAX_BLOCK_SIZE

from ..trace import Trace

#: Tokens filled and tokens at the end of each of some requests, to the slots that each of them holds.
_Held = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
#: A request that waits: its tokens so far, and at its end.
_Lengths = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a way to reserve memory makes of a trace.

    scheme: "longest", max_model_len slots for each request; "power of two", the next one above its own length; "paged",
    blocks as it grows. num_slots: of the memory, in tokens. num_requests: served. num_refused: longer than
    max_model_len or than the memory. wasted_share: slots held and not filled, of all slots held, when each request
    ended, 0 to 1. mean_running, peak_running: requests at once while others wait.
    """

    scheme: str
    num_slots: int
    max_model_len: int
    num_requests: int
    num_refused: int
    wasted_share: float
    mean_running: float
    peak_running: int


def compare_reservations(
    trace: Trace, num_blocks: int, *, block_size: int = 16, max_model_len: int
) -> list[Reservation]:
    """Serve a trace's requests from a full queue, with contiguous memory and with paged memory.

    num_blocks, block_size: the memory; a paged pool loses its null block of it. max_model_len: tokens of the longest
    request that the model serves. The three schemes are those of the PagedAttention paper (Kwon et al., SOSP 2023),
    with the odds in favour of contiguous memory: it never breaks into pieces too small, and the next power of two is
    known although it depends on an output that is not there yet. All requests wait from the beginning, in the order of
    the trace, and share no prefixes; a step gives each running one a token, prompts take no time, and where a paged
    pool is short the youngest request waits again. O(requests * running), and a walk through the trace for each
    scheme. Raises `InvalidArgument`, and what the trace's reader raises.
    """
    require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
    require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
    require_int("max_model_len", max_model_len, 1, MAX_MODEL_LEN)
    num_slots = num_blocks * block_size
    schemes: list[tuple[str, int, _Held]] = [
        ("longest", num_slots, lambda filled, _: np.full_like(filled, max_model_len)),
        ("power of two", num_slots, lambda _, total: next_power_of_two(total)),
        ("paged", num_slots - block_size, lambda filled, _: -(-filled // block_size) * block_size),
    ]
    return [_FullQueue(trace, scheme, size, max_model_len, held).run(num_slots) for scheme, size, held in schemes]


def next_power_of_two(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the least powers of two that are not below `lengths`, each from 1 to 2**52. O(lengths)."""
    fraction, exponent = np.frexp(lengths.astype(np.float64))
    shifts: NDArray[np.int64] = exponent.astype(np.int64) - (fraction == 0.5)
    return np.array(1, np.int64) << shifts


class _FullQueue:
    """Requests in order, each admitted as soon as its slots are free, and all of them waiting from the beginning."""

    def __init__(self, trace: Trace, scheme: str, size: int, max_model_len: int, held: _Held) -> None:
        self._scheme = scheme
        self._size = size
        self._max_model_len = max_model_len
        self._held = held
        self._waiting: deque[_Lengths] = deque()
        self._coming = self._served(trace)
        #: (running,) each, in the order of admission.
        self._filled = np.empty(0, np.int64)
        self._total = np.empty(0, np.int64)
        self._num_requests = self._num_refused = self._num_slots = self._num_filled = 0
        self._steps = self._running_steps = self._peak = 0

    def run(self, num_slots: int) -> Reservation:
        """Run until nothing waits; those that run then would only be fewer and fewer."""
        self._admit()
        while self._waiting:
            self._advance(self._free_steps())
            self._admit()
        return Reservation(
            scheme=self._scheme,
            num_slots=num_slots,
            max_model_len=self._max_model_len,
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            wasted_share=1 - self._num_filled / self._num_slots if self._num_slots else 0.0,
            mean_running=self._running_steps / self._steps if self._steps else float(self._peak),
            peak_running=self._peak,
        )

    def _served(self, trace: Trace) -> Iterator[_Lengths]:
        """Yield the requests that this memory can hold, and what each leaves unused at its end."""
        for request in trace:
            total = request.num_prompt_tokens + max(request.num_output_tokens, 1)
            slots = self._held_by(total, total)
            if total > self._max_model_len or slots > self._size:
                self._num_refused += 1
                continue
            self._num_requests += 1
            self._num_slots += slots
            self._num_filled += total
            yield request.num_prompt_tokens, total

    def _held_by(self, filled: int, total: int) -> int:
        return int(self._held(np.array([filled], np.int64), np.array([total], np.int64))[0])

    def _admit(self) -> None:
        """Start what waits, in order, while there are slots for it as it is now."""
        free = self._size - int(self._held(self._filled, self._total).sum())
        started: list[_Lengths] = []
        while (lengths := self._next()) is not None and self._held_by(*lengths) <= free:
            free -= self._held_by(*lengths)
            started.append(self._waiting.popleft())
        if started:
            filled, total = np.array(started, np.int64).T
            self._filled = np.concatenate([self._filled, filled])
            self._total = np.concatenate([self._total, total])
        self._peak = max(self._peak, len(self._filled))

    def _next(self) -> _Lengths | None:
        if not self._waiting:
            self._waiting.extend([lengths] if (lengths := next(self._coming, None)) is not None else [])
        return self._waiting[0] if self._waiting else None

    def _free_steps(self) -> int:
        """Steps before anything can be admitted again: until a request ends, or until slots are short. Where they are
        short at once, the youngest wait again, and one step is taken before they may come back."""
        if not self._fits(1):
            while not self._fits(1):
                self._waiting.appendleft((int(self._filled[-1]), int(self._total[-1])))
                self._filled, self._total = self._filled[:-1], self._total[:-1]
            return 1
        steps = range(1, int((self._total - self._filled).min()) + 1)
        return steps[-1] if self._fits(steps[-1]) else bisect_left(steps, True, key=lambda step: not self._fits(step))

    def _fits(self, num_steps: int) -> bool:
        return int(self._held(self._filled + num_steps, self._total).sum()) <= self._size

    def _advance(self, num_steps: int) -> None:
        self._steps += num_steps
        self._running_steps += num_steps * len(self._filled)
        self._filled = self._filled + num_steps
        running = self._filled < self._total
        self._filled, self._total = self._filled[running], self._total[running]
