"""A trace as sessions of turns, each with the ids of its blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument

from ..references import SessionTracker, UnknownContents, name_blocks
from ..trace import Trace, TraceRequest

#: Pauses are cut to this many seconds unless the caller says otherwise.
MAX_PAUSE = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        arrival: seconds since the trace began.
        pause: seconds from the answer before it to this request; 0 for a session's first.
        conversation: number of the conversation, also inferred for a request without a session's name.
        num_prompt: tokens of the prompt.
        num_output: tokens of the answer, 1 or more.
        ids: (num_prompt // block size,) int32 ids of the prompt's full blocks. Ids of 0 or more are the session's own;
            below 0 stand the blocks that sessions share.
        answer: ids of the blocks that the answer fills, and of one more.
        num_kept: leading blocks that the turn before it leaves in an unlimited cache.
        num_shared: leading blocks that sessions share.
    """

    arrival: float
    pause: float
    conversation: int
    num_prompt: int
    num_output: int
    ids: NDArray[np.int32]
    answer: list[int]
    num_kept: int
    num_shared: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt + self.num_output


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Sessions to replay.

    Attributes:
        name: name of the trace.
        block_size: tokens per block.
        sessions: the turns of each session.
        num_ids: (sessions,) ids that are each session's own.
        num_shared: ids that sessions share.
    """

    name: str
    block_size: int
    sessions: list[list[Turn]]
    num_ids: list[int]
    num_shared: int


def read_sessions(trace: Trace, block_size: int, *, max_pause: float = MAX_PAUSE) -> SessionLoad:
    """Read a trace as sessions of turns. O(blocks of the trace), in memory.

    Requests without a session's name are sessions of one turn. A pause is the trace's own; if it has none, the time
    between the two arrivals. An answer has the blocks that the session's next prompt has there, if that continues it.

    Args:
        trace: a trace with contents.
        block_size: tokens per block; a multiple of the trace's own.
        max_pause: longer pauses are cut to this many seconds.

    Raises:
        UnknownContents: if the trace does not say what its prompts contain.
        InvalidArgument: if block_size is no multiple of the trace's block size.
    """
    require_int("block_size", block_size, 1, 2**20)
    if not require_number("max_pause", max_pause) >= 0:
        raise InvalidArgument(f"max_pause is {max_pause}; it must be 0 or more")
    named: dict[object, list[_Row]] = {}
    tracker = SessionTracker()
    for number, request in enumerate(trace):
        ids = _block_ids(trace, request, block_size).copy()  # a slice would keep all of the request's ids in memory
        row = _Row(
            dataclasses.replace(request, hash_ids=None, token_ids=None),
            ids,
            tracker.number(request.session, ids, len(ids)),
        )
        named.setdefault(request.session or number, []).append(row)
    own = [np.unique(np.concatenate([row.ids for row in rows])) for rows in named.values()]
    names, counts = np.unique(np.concatenate(own), return_counts=True)
    shared = names[counts > 1]
    load = SessionLoad(trace.name, block_size, [], [], len(shared))
    for rows, ids in zip(named.values(), own, strict=True):
        _add_session(load, rows, shared, np.setdiff1d(ids, shared, assume_unique=True), max_pause)
    return load


class _Row(NamedTuple):
    """A request without contents, the trace's ids of its full blocks, and its conversation."""

    request: TraceRequest
    ids: NDArray[np.int64]
    conversation: int


def _block_ids(trace: Trace, request: TraceRequest, block_size: int) -> NDArray[np.int64]:
    num_full = request.num_prompt_tokens // block_size
    if request.token_ids is not None:
        return name_blocks(request.token_ids, block_size)[:num_full]
    if request.hash_ids is None:
        raise UnknownContents(f"{trace.name} has lengths but no contents, so no prompt can hit another's blocks")
    step, rest = divmod(block_size, trace.hash_block_size)
    if rest:
        raise InvalidArgument(
            f"block_size is {block_size}; for {trace.name} it must be a multiple of {trace.hash_block_size}"
        )
    return request.hash_ids[step - 1 :: step][:num_full]


def _add_session(
    load: SessionLoad, rows: list[_Row], shared: NDArray[np.int64], own: NDArray[np.int64], max_pause: float
) -> None:
    """Append a session with its blocks renumbered. `shared` and `own` are sorted ids of the trace."""
    numbered = [
        np.where(np.isin(row.ids, own), np.searchsorted(own, row.ids), -1 - np.searchsorted(shared, row.ids))
        for row in rows
    ]
    turns: list[Turn] = []
    num_ids, left = len(own), np.empty(0, np.int64)
    for place, (row, ids) in enumerate(zip(rows, numbered, strict=True)):
        request, num_full = row.request, len(ids)
        num_output = max(request.num_output_tokens, 1)
        num_filled = (request.num_prompt_tokens + num_output) // load.block_size - num_full
        after = numbered[place + 1] if place + 1 < len(rows) else ids[:0]
        known = after[num_full : num_full + num_filled].tolist() if np.array_equal(after[:num_full], ids) else []
        num_new = num_filled + 1 - len(known)
        answer = [*known, *range(num_ids, num_ids + num_new)]
        num_ids += num_new
        gap = request.arrival - rows[place - 1].request.arrival
        pause = min(gap if request.pause is None else request.pause, max_pause) if place else 0.0
        turns.append(
            Turn(
                arrival=request.arrival,
                pause=pause,
                conversation=row.conversation,
                num_prompt=request.num_prompt_tokens,
                num_output=num_output,
                ids=ids.astype(np.int32),
                answer=answer,
                num_kept=_num_equal(left, ids),
                num_shared=_num_equal(np.minimum(ids, -1), ids),
            )
        )
        left = np.append(ids, answer[:-1])
    load.sessions.append(turns)
    load.num_ids.append(num_ids)


def _num_equal(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return how many leading ids are equal."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
