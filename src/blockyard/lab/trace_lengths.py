"""How long the requests of a trace are, and how fast they come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from ..errors import TraceError
from .trace import Trace


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Lengths of a trace's requests in tokens, prompt and output together; an output has at least one token.

    mean, p99, longest: of all requests. mean_output: tokens. duration: seconds from the first arrival to the last.
    has_contents: whether every request says what its prompt contains, so that hits can be known.
    """

    num_requests: int
    mean: float
    p99: int
    longest: int
    mean_output: float
    duration: float
    has_contents: bool

    def mean_running(self, seconds_per_token: float) -> float | None:
        """Requests at work at once, on average, where each takes so many seconds for each token of its output.

        Arrivals a second times seconds a request (Little, Operations Research 9, 1961). None where all arrive at once.
        """
        if self.duration <= 0:
            return None
        return (self.num_requests - 1) / self.duration * self.mean_output * seconds_per_token


def read_lengths(trace: Trace) -> TraceLengths:
    """Walk through a trace once. O(requests) time, 8 bytes of memory for each. Raises what its reader raises, and
    `TraceError` for a trace without requests."""
    lengths, outputs = array("q"), 0
    first = last = 0.0
    has_contents = True
    for request in trace:
        first, last = (first if lengths else request.arrival), request.arrival
        output = max(request.num_output_tokens, 1)
        outputs += output
        lengths.append(request.num_prompt_tokens + output)
        has_contents = has_contents and (request.hash_ids is not None or request.token_ids is not None)
    if not lengths:
        raise TraceError(f"{trace.name} has no requests")
    every = np.frombuffer(lengths, np.int64)
    return TraceLengths(
        num_requests=len(every),
        mean=float(every.mean()),
        p99=int(np.percentile(every, 99, method="higher")),
        longest=int(every.max()),
        mean_output=outputs / len(every),
        duration=last - first,
        has_contents=has_contents,
    )
