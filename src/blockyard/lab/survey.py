"""What a trace is like, before anything is done with it."""

from __future__ import annotations

from dataclasses import dataclass

from .trace import Trace


@dataclass(frozen=True, slots=True)
class TraceSurvey:
    """Totals of a trace.

    longest_sequence: tokens of the longest prompt with its output, of which one is generated at least. duration:
    seconds from the first arrival to the last. has_contents: whether anything is known of what prompts contain.
    """

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    longest_sequence: int
    duration: float
    has_contents: bool


def survey(trace: Trace) -> TraceSurvey:
    """Walk through a trace once. O(requests), in constant memory. Raises what its reader raises."""
    num_requests = prompt_tokens = output_tokens = longest = 0
    first = last = 0.0
    has_contents = False
    for request in trace:
        if num_requests == 0:
            first = request.arrival
        last = request.arrival
        num_requests += 1
        prompt_tokens += request.num_prompt_tokens
        output_tokens += request.num_output_tokens
        longest = max(longest, request.num_prompt_tokens + max(request.num_output_tokens, 1))
        has_contents = has_contents or request.hash_ids is not None or request.token_ids is not None
    return TraceSurvey(trace.name, num_requests, prompt_tokens, output_tokens, longest, last - first, has_contents)
