"""A load of requests with arrival times, possibly made from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..references import UnknownContents
from ..trace import Trace


@dataclass(slots=True)
class Job:
    """One request.

    Attributes:
        at: seconds since the load's start, or since the end of the job `after`.
        after: number of the job that must end first, or -1.
        session: name of the conversation.
        num_prompt: tokens of the prompt.
        num_output: tokens of the answer.
        ids: prefix-dependent ids of the full blocks of prompt and answer. The answer's last token fills no block.
    """

    at: float
    after: int
    session: str
    num_prompt: int
    num_output: int
    ids: Sequence[int]


@dataclass(slots=True)
class Load:
    """Jobs; each comes after the job that it waits for."""

    name: str
    block_size: int
    jobs: list[Job]


def load_of_trace(trace: Trace, first: int = 0, count: int | None = None, speedup: float = 1.0) -> Load:
    """Return a part of a trace as a load. Time begins at its first request; answers match no later prompt.

    Args:
        trace: a trace with hash ids.
        first: number of the first request.
        count: number of requests; None for all that follow.
        speedup: arrivals come this many times faster.

    Raises:
        UnknownContents: if a request has no ids.
    """
    jobs: list[Job] = []
    begin: float | None = None
    size, next_output = trace.hash_block_size, -1
    for number, request in enumerate(trace):
        if number < first:
            continue
        if count is not None and len(jobs) >= count:
            break
        if request.hash_ids is None:
            raise UnknownContents(f"{trace.name} has lengths but no contents, so no prompt can hit another's blocks")
        begin = request.arrival if begin is None else begin
        num_output = max(request.num_output_tokens, 1)
        num_full = request.num_prompt_tokens // size
        num_more = (request.num_prompt_tokens + num_output - 1) // size - num_full
        ids = [*request.hash_ids[:num_full].tolist(), *range(next_output, next_output - num_more, -1)]
        next_output -= num_more
        at = (request.arrival - begin) / speedup
        jobs.append(Job(at, -1, request.session, request.num_prompt_tokens, num_output, ids))
    return Load(trace.name, size, jobs)
