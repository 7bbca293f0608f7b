"""The option `admission`: vLLM's waiting queue, ordered by what each request lacks (docs/admission.md)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

from blockyard.admission import AdmissionRule, ServiceEstimate

from .manager import KVCacheManager
from .token_pool import tokens_of


class AdmissionQueue(RequestQueue):
    """The waiting requests of a scheduler; the front is the one that an `AdmissionRule` admits next.

    `bool(queue)` is False while the rule admits nobody, which ends the scheduler's loop over waiting requests;
    `len(queue)` counts them all. A request that vLLM skips leaves the index until the end of the step.

    Args:
        manager: the scheduler's block manager, on level "tokens".
        order: "fewest" or "room".
        lane: whoever waits longest gets one part in `lane` of the time.
    """

    def __init__(self, manager: KVCacheManager, order: str, lane: float) -> None:
        self._manager = manager
        self.index = manager.pool.waiting()
        self.estimate = ServiceEstimate()
        self.rule = AdmissionRule(self.index, order, seconds=self.estimate.seconds, k=lane)
        self._waiting: dict[int, Any] = {}
        self._tickets: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._chosen: Any = None
        #: The clock of `Request.arrival_time`.
        self.clock = time.time
        self._last_time = self._step_began = 0.0
        self._num_in_flight = 0

    def _now(self) -> float:
        """Return the time, or that of the last call if the clock was set back."""
        self._last_time = max(self._last_time, self.clock())
        return self._last_time

    # The pace of the device.

    def begin_step(self) -> None:
        """Note that the scheduler plans a step."""
        if self._num_in_flight == 0:
            self._step_began = self._now()

    def note_planned(self, output: Any) -> None:
        """Note the planned step."""
        self._num_in_flight += output.total_num_scheduled_tokens > 0

    def end_step(self, output: Any) -> None:
        """Measure a step whose outputs have arrived, if it computed prompts. Steps in flight overlap."""
        count = output.total_num_scheduled_tokens
        if count:
            self._num_in_flight -= 1
            began, self._step_began = self._step_began, self._now()
            if max(output.num_scheduled_tokens.values()) > 1:
                self.estimate.note_step(count, self._step_began - began)

    # vLLM's queue.

    def add_request(self, request: Any) -> None:
        """Add a request, which may have been preempted."""
        self.finish(request)
        left = max(request.max_tokens - request.num_output_tokens, 0)
        ticket = self.index.add(
            tokens_of(request, 0, request.num_tokens),
            extra_keys=self._manager.keys_of(request),
            session=request.session_id or None,
            max_new_tokens=self.estimate.expected_answer(left),
            arrived=min(request.arrival_time, self._now()),
        )
        self._waiting[ticket] = request
        self._tickets[request.request_id] = ticket
        self._chosen = None

    def prepend_request(self, request: Any) -> None:
        """Add a request; its arrival decides its position."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Add requests; their arrival decides their position."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        """Return the request that the rule admits next. Raises IndexError if it admits nobody now."""
        if not self:
            raise IndexError("peek_request: no waiting request may start now")
        return self._chosen

    def pop_request(self) -> Any:
        """Remove and return the request of `peek_request`: it runs now if it has blocks, else it is skipped."""
        request = self.peek_request()
        name = request.request_id
        if name in self._manager.leases:
            ticket = self._tickets.pop(name)
            del self._waiting[ticket]
            self.index.admitted(ticket, self._now())
            self._running[name] = ticket
            self._chosen = None
        else:
            self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        """Remove a request if it waits here."""
        ticket = self._tickets.pop(request.request_id, None)
        if ticket is not None:
            self.index.remove(ticket)
            del self._waiting[ticket]
            self._chosen = None

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that wait here."""
        for request in requests:
            self.remove_request(request)

    def finish(self, request: Any) -> None:
        """Note that a running request is about to be freed: it has ended, or was preempted."""
        ticket = self._running.pop(request.request_id, None)
        if ticket is None:
            return
        if request.is_finished():
            self.estimate.note_answer(request.num_output_tokens)
        self.index.finished(ticket, self._now(), blocks=self._manager.leases.get(request.request_id))

    def __bool__(self) -> bool:
        if not self._waiting:
            return False
        if self._chosen is None:
            ticket = self.rule.next(self._now())
            self._chosen = None if ticket is None else self._waiting[ticket]
        return self._chosen is not None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        """Yield the waiting requests by arrival. O(n log n)."""
        return iter(sorted(self._waiting.values(), key=lambda request: request.arrival_time))
