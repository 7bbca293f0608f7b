"""Compares contiguous memory per request with paged memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int
from blockyard.cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from blockyard.cli import as_text
from blockyard.config import MAX_BLOCK_SIZE

from ..printing import fine_percent, short_number
from ..trace import Trace

#: Maps requests' tokens so far, and tokens at their end, to the slots that each holds.
_Held = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
#: A waiting request's tokens so far, and at its end.
_Lengths = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reservation:
    """The result of serving a trace with one way to reserve memory.

    Attributes:
        scheme: "longest" (max_model_len slots per request), "power of two" (the next one above the request's length) or
            "paged" (blocks as it grows).
        num_slots: size of the memory in tokens.
        max_model_len: longest request that the model serves.
        num_requests: served requests.
        num_refused: requests longer than max_model_len or the memory.
        wasted_share: fraction of the held slots that were empty, over all requests at their end.
        mean_running: mean number of running requests while others wait.
        peak_running: largest number of running requests.
    """

    scheme: str
    num_slots: int
    max_model_len: int
    num_requests: int
    num_refused: int
    wasted_share: float
    mean_running: float
    peak_running: int

    def as_row(self, block_size: int, baseline: float) -> dict[str, str]:
        """Return the cells of a table row. `baseline` is `mean_running` of the longest scheme."""
        held = {
            "longest": f"the model's {self.max_model_len:,} tokens",
            "power of two": "its length's next power of two",
            "paged": f"blocks of {block_size}, as it grows",
        }
        return {
            "a request holds": held[self.scheme],
            "blocks": f"{self.num_slots // block_size:,}",
            "tokens": short_number(self.num_slots),
            "left out": f"{self.num_refused:,}",
            "waste": fine_percent(self.wasted_share) if self.num_requests else "-",
            "at once": f"{self.mean_running:,.1f}",
            "times": f"{self.mean_running / baseline:.1f}" if baseline else "-",
        }


def reservations_as_text(found: Sequence[Reservation], block_size: int) -> str:
    """Return a heading and a table. "times" compares with the first scheme of the same size."""
    rows, baseline = [], 0.0
    for reservation in found:
        baseline = reservation.mean_running if reservation.scheme == "longest" else baseline
        rows.append(reservation.as_row(block_size, baseline))
    if not any(reservation.num_refused for reservation in found):
        rows = [{name: cell for name, cell in row.items() if name != "left out"} for row in rows]
    return f"Contiguous memory against paging: requests always wait, and share no prefixes\n\n{as_text(rows)}"


def compare_reservations(
    trace: Trace, num_blocks: int, *, block_size: int = 16, max_model_len: int
) -> list[Reservation]:
    """Serve a trace's requests from a full queue, with contiguous and with paged memory.

    The schemes are those of the PagedAttention paper (Kwon et al., SOSP 2023). Contiguous memory is favoured: it never
    fragments, and a request's length is known in advance. All requests wait from the start, in the order of the trace,
    and share no prefixes. Each step adds one token to each running request, and prompts take no time. If the paged pool
    runs short, the youngest request waits again. O(requests * running), with one walk through the trace per scheme.

    Args:
        trace: any trace.
        num_blocks: size of the memory; paged memory loses one block of it, the null block.
        block_size: tokens per block.
        max_model_len: longest request that the model serves, in tokens.

    Raises:
        InvalidArgument: for a value outside its limits.
        TraceError: if the trace cannot be read.
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
    """Return the smallest power of two at or above each length, for lengths from 1 to 2**52. O(lengths)."""
    fraction, exponent = np.frexp(lengths.astype(np.float64))
    shifts: NDArray[np.int64] = exponent.astype(np.int64) - (fraction == 0.5)
    return np.array(1, np.int64) << shifts


class _FullQueue:
    """Requests that all wait from the start. Each is admitted in order as soon as its slots are free."""

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
        """Run until no request waits, and return the statistics.

        The rest is not simulated: without waiting requests, memory is no longer full.
        """
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
        """Yield the requests that this memory can hold, and count their slots."""
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
        """Start waiting requests in order while their present slots are free."""
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
        """Return the number of steps until the next request ends or slots run short.

        If slots are short now, move the youngest requests back to the queue, and return 1.
        """
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
