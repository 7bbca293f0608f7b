"""A load has requests at their times, or after others; a trace becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..references import UnknownContents
from ..trace import Trace


@dataclass(slots=True)
class Job:
    """This is one request.

    at: seconds from the load's start, or, of a job that comes `after` another one, from that one's end. ids: names of
    the full blocks of its prompt and of its answer, each under its prefix; the answer's last token fills none.
    """

    at: float
    after: int
    session: str
    num_prompt: int
    num_output: int
    ids: Sequence[int]


@dataclass(slots=True)
class Load:
    """A load has jobs; one that comes after another stands behind it."""

    name: str
    block_size: int
    jobs: list[Job]


def load_of_trace(trace: Trace, first: int = 0, count: int | None = None, speedup: float = 1.0) -> Load:
    """Take `count` requests of a trace from number `first` on, `speedup` times faster; time begins at the first.

    Blocks are the trace's own. Answers match no later prompt. Raises `UnknownContents` where requests have no ids.
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
            raise UnknownContents(f"{trace.name} says nothing of contents, so no prompt can hit another's blocks")
        begin = request.arrival if begin is None else begin
        num_output = max(request.num_output_tokens, 1)
        num_full = request.num_prompt_tokens // size
        num_more = (request.num_prompt_tokens + num_output - 1) // size - num_full
        ids = [*request.hash_ids[:num_full].tolist(), *range(next_output, next_output - num_more, -1)]
        next_output -= num_more
        at = (request.arrival - begin) / speedup
        jobs.append(Job(at, -1, request.session, request.num_prompt_tokens, num_output, ids))
    return Load(trace.name, size, jobs)
