"""A trace's block references as the simulation loops need them: numbered from 0, sampled if the trace is too long.

Optionally with each request's session, as named in the trace or inferred from the prompts.
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

#: Sessions remembered while a trace is read; the least recent one is forgotten first.
MAX_SESSIONS = 2**20


class SessionTracker:
    """Numbers sessions in order of their first request.

    A session name in the trace decides. Without one, a request belongs to the session whose latest prompt's full blocks
    all start its prompt (of several, the longest). So a repeated prompt stays in its session. A prompt without a full
    block, or one that branches off an older turn, begins a new session, since a session has only one latest state.

    O(blocks) per request.

    Args:
        max_sessions: sessions remembered of each kind, named and inferred. The least recent one is forgotten; its next
            turn begins a new session.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._by_name: dict[str, int] = {}
        #: By the last full block of a session's latest prompt, which identifies the whole prefix.
        self._by_end: dict[int, int] = {}

    def number(self, name: str, block_ids: NDArray[np.int64], num_full_blocks: int) -> int:
        """Return the session number of the next request.

        Args:
            name: the session's name, or "".
            block_ids: (n,) ids of the prompt's blocks.
            num_full_blocks: how many of them are full.
        """
        if name:
            return self._put(self._by_name, name, self._by_name.pop(name, None))
        full = block_ids[:num_full_blocks].tolist()
        if not full:
            return self._new()
        end = next((block for block in reversed(full) if block in self._by_end), None)
        return self._put(self._by_end, full[-1], None if end is None else self._by_end.pop(end))

    def _put(self, sessions: dict[Key, int], key: Key, number: int | None) -> int:
        """Mark a session as the most recent; None makes a new one."""
        found = self._new() if number is None else number
        sessions[key] = found
        if len(sessions) > self._max_sessions:
            del sessions[next(iter(sessions))]
        return found

    def _new(self) -> int:
        self._num_sessions += 1
        return self._num_sessions - 1


#: References kept in memory before the sample is halved: 64 MiB.
MAX_REFERENCES = 2**23
#: The smallest sample is one content in 2**40.
_MOST_HALVINGS = 40
#: Limits of a chunk, in requests and in prompt tokens (whose arrays may be long).
_REQUESTS_A_CHUNK = 4096
_TOKENS_A_CHUNK = 2**24


class UnknownContents(TraceError):
    """The trace does not say what its prompts contain."""


@dataclass(frozen=True, slots=True)
class References:
    """The blocks named by a trace's prompts, in order.

    Attributes:
        ids: (num_sampled,) int64, contents numbered from 0.
        starts: (sampled requests + 1,) int64; request r has ids[starts[r]:starts[r + 1]]. Requests without a sampled
            block are left out.
        group: (num_contents,) uint8, 0 to 3, from other bits of the hash: four independent samples to compare.
        tokens_a_block: tokens per id.
        survey: totals of the whole trace.
        num_references: block references in the whole trace.
        longest_request: blocks of the longest prompt.
        halvings: a content is sampled with probability 2**-halvings, by a hash of its id; 0 means everything.
        sessions: (sampled requests,) int64, the session of each (`SessionTracker`); empty unless requested.
        arrivals: (sampled requests,) int64, microseconds since the trace began; empty unless requested.
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
        """Number of requests in the whole trace."""
        return self.survey.num_requests

    @property
    def num_contents(self) -> int:
        """Number of contents in the sample."""
        return len(self.group)

    @property
    def rate(self) -> float:
        """Fraction of the contents that is sampled."""
        return 0.5**self.halvings

    @property
    def working_set(self) -> int:
        """Number of blocks that would hold the whole trace; estimated if sampled."""
        return round(self.num_contents / self.rate)

    @property
    def longest_sampled(self) -> int:
        """Largest number of sampled blocks in one request."""
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
    """Walk through a trace once and return its references, or a sample of them.

    If a sample outgrows `max_references`, half of its contents are dropped, repeatedly (fixed-size SHARDS: Waldspurger
    et al., FAST 2015). So memory is bounded for any trace.

    Args:
        trace: any trace that says what its prompts contain.
        block_size: tokens per block, for a trace with tokens; one with hash ids has its own.
        max_references: largest number of references to keep.
        halvings: sampling to start with, as in `References`.
        with_sessions: also find each request's session, for hints.
        on_request: called now and then with the number of requests read.

    Raises:
        UnknownContents: if the trace does not say what its prompts contain.
        TraceError: if it has no requests, or its reader fails.
    """
    require_int("block_size", block_size, 1, 2**20)
    require_int("max_references", max_references, 1024, 2**31)
    sample = _Sample(max_references, require_int("halvings", halvings, 0, _MOST_HALVINGS))
    surveyor = Surveyor(trace.name)
    tokens_a_block = trace.hash_block_size or block_size
    tracker = SessionTracker() if with_sessions else None
    num_requests = 0
    for chunk in _chunks(trace):
        prompts = [_named_blocks(trace, request, tokens_a_block) for request in chunk]
        for request in chunk:
            surveyor.add(request)
        sample.add(prompts, _turns(tracker, chunk, prompts, tokens_a_block))
        num_requests += len(chunk)
        if on_request is not None:
            on_request(num_requests)
    return sample.finish(surveyor.result(), tokens_a_block)


@dataclass(slots=True)
class _Sample:
    """References kept so far, in chunks, and totals."""

    max_references: int
    halvings: int
    num_references: int = 0
    longest_request: int = 0
    ids: list[NDArray[np.int64]] = field(default_factory=list)
    lengths: list[NDArray[np.int64]] = field(default_factory=list)
    #: (n, 2) session and arrival of each kept request of a chunk; (n, 0) if not requested.
    turns: list[NDArray[np.int64]] = field(default_factory=list)
    num_kept: int = 0

    def add(self, prompts: list[NDArray[np.int64]], turns: NDArray[np.int64]) -> None:
        """Add some requests, then halve the sample if it is too large."""
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
        kept = (mix_bits(ids) >> np.uint64(64 - self.halvings)) == 0
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
        """Return the sampled references with contents numbered from 0.

        Raises:
            TraceError: if the sample is empty.
        """
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int64)
        if len(ids) == 0:
            raise TraceError(
                f"a sample of one block in {2**self.halvings} holds none of the trace's {self.num_references}"
            )
        contents, dense = np.unique(ids, return_inverse=True)
        starts = _starts_from(np.concatenate(self.lengths))
        group = (mix_bits(contents) & np.uint64(3)).astype(np.uint8)
        turns = np.concatenate(self.turns)
        known = turns if turns.shape[1] else np.empty((0, 2), np.int64)
        return References(
            ids=dense.astype(np.int64),
            starts=starts,
            group=group,
            tokens_a_block=tokens_a_block,
            survey=survey,
            num_references=self.num_references,
            longest_request=self.longest_request,
            halvings=self.halvings,
            sessions=known[:, 0].copy(),
            arrivals=known[:, 1].copy(),
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
    tracker: SessionTracker | None, chunk: list[TraceRequest], prompts: list[NDArray[np.int64]], tokens_a_block: int
) -> NDArray[np.int64]:
    """Return (n, 2) session and arrival of each request, or (n, 0) without a tracker."""
    if tracker is None:
        return np.empty((len(chunk), 0), np.int64)
    turns = np.empty((len(chunk), 2), np.int64)
    for row, request, prompt in zip(turns, chunk, prompts, strict=True):
        row[0] = tracker.number(request.session, prompt, request.num_prompt_tokens // tokens_a_block)
        row[1] = round(request.arrival * 1_000_000)
    return turns


def _named_blocks(trace: Trace, request: TraceRequest, block_size: int) -> NDArray[np.int64]:
    ids = blocks_of(request, block_size)
    if ids is None:
        raise UnknownContents(
            f"{trace.name} has lengths but no contents, so its hit rate and working set are unknown; "
            f"a replay with absolute sizes (no percentages) shows how many blocks its requests need"
        )
    return ids


def blocks_of(request: TraceRequest, block_size: int) -> NDArray[np.int64] | None:
    """Return the ids of a prompt's blocks, hashed from its tokens if the trace has no ids. None if it has neither."""
    if request.hash_ids is None and request.token_ids is not None:
        return name_blocks(request.token_ids, block_size)
    return request.hash_ids


def name_blocks(token_ids: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Return a 60-bit hash of each block and its prefix, including a partly filled last block. O(tokens).

    The hashes are chained BLAKE2b: two different prefixes collide with probability 2**-60.
    """
    data = np.ascontiguousarray(token_ids, np.int32).tobytes()
    step, name = 4 * block_size, b""
    names = []
    for start in range(0, len(data), step):
        name = hashlib.blake2b(name + data[start : start + step], digest_size=8).digest()
        names.append(int.from_bytes(name, "little") >> 4)
    return np.array(names, np.int64)


def mix_bits(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value: SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014), a bijection."""
    mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _starts_of(kept: NDArray[np.bool_], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each request after the references that are not `kept` are removed."""
    return _starts_from(kept)[starts]


def _starts_from(lengths: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where runs of these lengths start, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
