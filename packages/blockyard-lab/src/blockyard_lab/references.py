"""A trace as the loops want it: references to contents that are numbered from 0, sampled where it is too long.

Each request gets the session of which it is a turn, as the trace says, or as its prompt tells.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int
from blockyard.errors import TraceError

from .survey import Surveyor, TraceSurvey
from .trace import Trace, TraceRequest

Key = TypeVar("Key", str, int)

#: Sessions that are remembered while a trace is read; the one that was used longest ago is forgotten first.
MAX_SESSIONS = 2**20


class SessionTeller:
    """Gives each request the number of its session, in the order of the trace.

    Where a request names its session, that is it. Else it is told from the prompts: a request whose prompt begins with
    all full blocks of the newest prompt of a session is its next turn (where several are, of the longest of these), and
    so is one that repeats it. A prompt without a full block is a session of its own, and so is one that branches off
    from an older turn: a session has one newest state.

    O(blocks) a request. Remembers `max_sessions` of either kind; a turn of a forgotten one begins a new session.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._by_name: dict[str, int] = {}
        #: The last full block of a session's newest prompt, which names all that is before it too.
        self._by_end: dict[int, int] = {}

    def number(self, name: str, block_ids: NDArray[np.int64], num_full_blocks: int) -> int:
        """Return the session of the next request: from 0, in the order in which they began.

        name: as the trace has it, "" for none. block_ids: (n,) of its prompt. num_full_blocks: how many of these are
        full.
        """
        if name:
            return self._put(self._by_name, name, self._by_name.pop(name, None))
        full = block_ids[:num_full_blocks].tolist()
        if not full:
            return self._new()
        end = next((block for block in reversed(full) if block in self._by_end), None)
        return self._put(self._by_end, full[-1], None if end is None else self._by_end.pop(end))

    def _put(self, sessions: dict[Key, int], key: Key, number: int | None) -> int:
        """Remember a session, as the latest one used; a new one for None."""
        found = self._new() if number is None else number
        sessions[key] = found
        if len(sessions) > self._max_sessions:
            del sessions[next(iter(sessions))]
        return found

    def _new(self) -> int:
        self._num_sessions += 1
        return self._num_sessions - 1


#: References kept in memory before the sample is halved: 64 MiB of them.
MAX_REFERENCES = 2**23
#: A trace may be sampled down to one content in 2**40.
_MOST_HALVINGS = 40
#: Requests that are taken up at once; and prompt tokens, as their arrays may be long ones.
_REQUESTS_A_CHUNK = 4096
_TOKENS_A_CHUNK = 2**24


class UnknownContents(TraceError):
    """A trace that does not say what its prompts contain."""


@dataclass(frozen=True, slots=True)
class References:
    """The blocks that a trace's prompts name, in order.

    ids: (num_sampled,) int64, contents from 0 to num_contents - 1. starts: (requests with a sampled block + 1,) int64;
    the ids of such a request r are ids[starts[r]:starts[r + 1]]. tokens_a_block: tokens that an id stands for.
    survey, num_references: of the whole trace, exactly. longest_request: blocks of the longest prompt.
    halvings: a content is in the sample with probability 2**-halvings, by a hash of its id; 0 is the whole trace.
    group: (num_contents,) uint8, 0 to 3, by another part of the same hash: four samples in one, to see how they differ.
    sessions, arrivals: (requests with a sampled block,) int64: the session that each is a turn of (`SessionTeller`),
    and when it arrived, in microseconds since the trace began. Empty unless they were asked for.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    group: NDArray[np.uint8]
    tokens_a_block: int
    survey: TraceSurvey
    num_references: int
    longest_request: int
    halvings: int
    sessions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    arrivals: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_requests(self) -> int:
        """Count the requests of the whole trace."""
        return self.survey.num_requests

    @property
    def num_contents(self) -> int:
        """Count the contents in the sample."""
        return len(self.group)

    @property
    def rate(self) -> float:
        """Return the share of contents that is in the sample."""
        return 0.5**self.halvings

    @property
    def working_set(self) -> int:
        """Contents of the whole trace: blocks that would hold everything. An estimate if sampled."""
        return round(self.num_contents / self.rate)

    @property
    def longest_sampled(self) -> int:
        """Return the most sampled blocks of one request."""
        return int(np.diff(self.starts).max(initial=0))

    def select(self, group: int) -> References:
        """Return one of the four samples, a quarter of this one, without sessions."""
        kept = self.group[self.ids] == group
        lengths = np.diff(_starts_of(kept, self.starts))
        starts = _starts_from(lengths[lengths > 0])
        contents, dense = np.unique(self.ids[kept], return_inverse=True)
        none = np.empty(0, np.int64)
        return dataclasses.replace(
            self,
            ids=dense.astype(np.int64),
            starts=starts,
            group=self.group[contents],
            halvings=self.halvings + 2,
            sessions=none,
            arrivals=none,
        )


def read_references(
    trace: Trace,
    *,
    block_size: int = 16,
    max_references: int = MAX_REFERENCES,
    halvings: int = 0,
    with_sessions: bool = False,
    on_request: Callable[[int], None] | None = None,
) -> References:
    """Walk through a trace once and keep its references, or a sample of them.

    block_size: tokens a block of traces that have tokens; one with hash ids has its own. max_references: where the
    sample grows above it, half of the contents are dropped, and so on (fixed-size SHARDS: Waldspurger et al.,
    FAST 2015), so memory is bounded whatever the trace. halvings: where to begin. with_sessions: also tell whose turn
    each request is (`SessionTeller`), for hints. on_request: called with the number of requests read, now and then.

    Raises `UnknownContents` for a trace that does not say what its prompts contain, `TraceError` for one without
    requests, and what the trace's reader raises.
    """
    require_int("block_size", block_size, 1, 2**20)
    require_int("max_references", max_references, 1024, 2**31)
    sample = _Sample(max_references, require_int("halvings", halvings, 0, _MOST_HALVINGS))
    surveyor = Surveyor(trace.name)
    tokens_a_block = trace.hash_block_size or block_size
    teller = SessionTeller() if with_sessions else None
    num_requests = 0
    for chunk in _chunks(trace):
        prompts = [_named_blocks(trace, request, tokens_a_block) for request in chunk]
        for request in chunk:
            surveyor.add(request)
        sample.add(prompts, _turns(teller, chunk, prompts, tokens_a_block))
        num_requests += len(chunk)
        if on_request is not None:
            on_request(num_requests)
    return sample.finish(surveyor.result(), tokens_a_block)


@dataclass(slots=True)
class _Sample:
    """References kept so far, in chunks; and how many there were."""

    max_references: int
    halvings: int
    num_references: int = 0
    longest_request: int = 0
    ids: list[NDArray[np.int64]] = field(default_factory=list)
    lengths: list[NDArray[np.int64]] = field(default_factory=list)
    #: Session and arrival of each request that is kept, (n, 2) a chunk; (n, 0) where they are not wanted.
    turns: list[NDArray[np.int64]] = field(default_factory=list)
    num_kept: int = 0

    def add(self, prompts: list[NDArray[np.int64]], turns: NDArray[np.int64]) -> None:
        """Keep the references of some requests, and halve the sample where it has become too large."""
        ids = np.concatenate(prompts) if prompts else np.empty(0, np.int64)
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.num_references += len(ids)
        self.longest_request = max(self.longest_request, int(lengths.max(initial=0)))
        starts = _starts_from(lengths)
        self._append(*self._filtered(ids, starts), turns)
        while self.num_kept > self.max_references and self.halvings < _MOST_HALVINGS:
            self._halve()

    def _filtered(
        self, ids: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.halvings == 0:
            return ids, np.diff(starts)
        kept = (_mixed(ids) >> np.uint64(64 - self.halvings)) == 0
        return ids[kept], np.diff(_starts_of(kept, starts))

    def _append(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], turns: NDArray[np.int64]) -> None:
        self.ids.append(ids)
        self.lengths.append(lengths[lengths > 0])
        self.turns.append(turns[lengths > 0])
        self.num_kept += len(ids)

    def _halve(self) -> None:
        chunks = list(zip(self.ids, self.lengths, self.turns, strict=True))
        self.ids, self.lengths, self.turns, self.num_kept = [], [], [], 0
        self.halvings += 1
        for ids, lengths, turns in chunks:
            self._append(*self._filtered(ids, _starts_from(lengths)), turns)

    def finish(self, survey: TraceSurvey, tokens_a_block: int) -> References:
        """Return the references kept, with contents numbered from 0. Raises `TraceError` where none is left."""
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int64)
        if len(ids) == 0:
            raise TraceError(f"none of {self.num_references} blocks is in a sample of one in {2**self.halvings}")
        contents, dense = np.unique(ids, return_inverse=True)
        starts = _starts_from(np.concatenate(self.lengths))
        group = (_mixed(contents) & np.uint64(3)).astype(np.uint8)
        turns = np.concatenate(self.turns)
        told = turns if turns.shape[1] else np.empty((0, 2), np.int64)
        return References(
            ids=dense.astype(np.int64),
            starts=starts,
            group=group,
            tokens_a_block=tokens_a_block,
            survey=survey,
            num_references=self.num_references,
            longest_request=self.longest_request,
            halvings=self.halvings,
            sessions=told[:, 0].copy(),
            arrivals=told[:, 1].copy(),
        )


def _chunks(trace: Trace) -> Iterator[list[TraceRequest]]:
    chunk: list[TraceRequest] = []
    num_tokens = 0
    for request in trace:
        chunk.append(request)
        num_tokens += request.num_prompt_tokens
        if len(chunk) == _REQUESTS_A_CHUNK or num_tokens >= _TOKENS_A_CHUNK:
            yield chunk
            chunk, num_tokens = [], 0
    yield chunk


def _turns(
    teller: SessionTeller | None, chunk: list[TraceRequest], prompts: list[NDArray[np.int64]], tokens_a_block: int
) -> NDArray[np.int64]:
    """Return session and arrival of each request, (n, 2); (n, 0) without a teller."""
    if teller is None:
        return np.empty((len(chunk), 0), np.int64)
    turns = np.empty((len(chunk), 2), np.int64)
    for row, request, prompt in zip(turns, chunk, prompts, strict=True):
        row[0] = teller.number(request.session, prompt, request.num_prompt_tokens // tokens_a_block)
        row[1] = round(request.arrival * 1_000_000)
    return turns


def _named_blocks(trace: Trace, request: TraceRequest, block_size: int) -> NDArray[np.int64]:
    ids = blocks_of(request, block_size)
    if ids is None:
        raise UnknownContents(
            f"{trace.name} has lengths and arrivals and says nothing of contents, so neither its hit rate nor the "
            f"blocks of all prompts can be known; a replay with sizes in numbers says how many blocks its requests need"
        )
    return ids


def blocks_of(request: TraceRequest, block_size: int) -> NDArray[np.int64] | None:
    """Return the ids of a prompt's blocks; made from its tokens, `block_size` to a block, where the trace has those.

    None where it has neither.
    """
    if request.hash_ids is None and request.token_ids is not None:
        return name_blocks(request.token_ids, block_size)
    return request.hash_ids


def name_blocks(token_ids: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Make 60-bit names of a prompt's blocks, the last partly filled one too, each with its prefix. O(tokens).

    A chained BLAKE2b: two different prefixes share a name with probability 2**-60.
    """
    data = np.ascontiguousarray(token_ids, np.int32).tobytes()
    step, name = 4 * block_size, b""
    names = []
    for start in range(0, len(data), step):
        name = hashlib.blake2b(name + data[start : start + step], digest_size=8).digest()
        names.append(int.from_bytes(name, "little") >> 4)
    return np.array(names, np.int64)


def _mixed(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a well-mixed 64-bit hash of each id (the finalizer of SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _starts_of(kept: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each request starts once only the kept references are left."""
    return _starts_from(kept)[starts]


def _starts_from(lengths: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where each of the runs of these lengths starts, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
