"""Totals of a trace: number and length of its requests, and their rate."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from blockyard.errors import TraceError

from .trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class TraceSurvey:
    """Totals of a trace. A sequence is a prompt with its output, which has at least one token.

    Attributes:
        name: name of the trace.
        num_requests: number of requests.
        num_prompt_tokens: sum of all prompts.
        num_output_tokens: sum of all outputs, as the trace has them.
        num_generated_tokens: the same, with one token for each empty output.
        longest_sequence: tokens of the longest sequence.
        p99_sequence: 99th percentile of the sequences' tokens.
        duration: seconds from the first arrival to the last.
        has_contents: whether every request says what its prompt contains, so that hits can be computed.
    """

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_generated_tokens: int
    longest_sequence: int
    p99_sequence: int
    duration: float
    has_contents: bool

    @property
    def mean_sequence(self) -> float:
        """Mean tokens of a sequence."""
        return (self.num_prompt_tokens + self.num_generated_tokens) / self.num_requests

    @property
    def mean_output(self) -> float:
        """Mean tokens generated for a request."""
        return self.num_generated_tokens / self.num_requests

    def mean_running(self, seconds_per_token: float) -> float | None:
        """Return the mean number of running requests if each output token takes `seconds_per_token`.

        This is arrivals per second times seconds per request (Little, Operations Research 9, 1961). None if all
        requests arrive at once.
        """
        if self.duration <= 0:
            return None
        return (self.num_requests - 1) / self.duration * self.mean_output * seconds_per_token


def survey(trace: Trace) -> TraceSurvey:
    """Walk through a trace once and return its totals. O(requests).

    Raises:
        TraceError: if the trace has no requests, or its reader fails.
    """
    surveyor = Surveyor(trace.name)
    for request in trace:
        surveyor.add(request)
    return surveyor.result()


class Surveyor:
    """Collects a trace's totals during a walk that something else makes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lengths: Counter[int] = Counter()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_generated_tokens = 0
        self._first = 0.0
        self._last = 0.0
        self._has_contents = True

    def add(self, request: TraceRequest) -> None:
        """Add the next request. O(1)."""
        if not self._lengths:
            self._first = request.arrival
        self._last = request.arrival
        num_generated = max(request.num_output_tokens, 1)
        self._lengths[request.num_prompt_tokens + num_generated] += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_output_tokens += request.num_output_tokens
        self._num_generated_tokens += num_generated
        self._has_contents = self._has_contents and (request.hash_ids is not None or request.token_ids is not None)

    def result(self) -> TraceSurvey:
        """Return the totals. O(distinct lengths).

        Raises:
            TraceError: if there was no request.
        """
        if not self._lengths:
            raise TraceError(f"{self._name} has no requests")
        return TraceSurvey(
            name=self._name,
            num_requests=self._lengths.total(),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_generated_tokens=self._num_generated_tokens,
            longest_sequence=max(self._lengths),
            p99_sequence=_percentile(self._lengths, 0.99),
            duration=self._last - self._first,
            has_contents=self._has_contents,
        )


def _percentile(counts: Counter[int], share: float) -> int:
    """Return the value at this fraction of the sorted values, rounded up to the next value that occurs."""
    num_below = math.ceil(share * (counts.total() - 1))
    for value in sorted(counts):
        if num_below < counts[value]:
            return value
        num_below -= counts[value]
    return max(counts)
