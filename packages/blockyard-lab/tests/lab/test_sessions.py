"""Which session each request of a trace belongs to, and what an oracle says about it."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard_lab import References, Skips, TraceRequest, read_references
from blockyard_lab.oracle import HintOracle
from blockyard_lab.references import SessionTracker
from blockyard_lab.traces import open_trace


class Told:
    """A trace of given prompts: (arrival, ids, tokens of a prompt), blocks of 4 tokens."""

    name, hash_block_size, skips = "told", 4, Skips()

    def __init__(self, *requests: tuple[float, list[int], int], session: str = "") -> None:
        self.requests = [
            TraceRequest(arrival, tokens, 1, np.array(ids, np.int64), session=session)
            for arrival, ids, tokens in requests
        ]

    def __iter__(self):
        return iter(self.requests)


def tell(*prompts: tuple[list[int], int], most: int = 100) -> list[int]:
    tracker = SessionTracker(most)
    return [tracker.number("", np.array(ids, np.int64), full) for ids, full in prompts]


def test_a_prompt_that_continues_the_newest_one_is_its_next_turn() -> None:
    # Block 3 was partly filled and is another one, 9, when the answer is in it.
    assert tell(([1, 2, 3], 2), ([7, 8], 2), ([1, 2, 9, 10], 3), ([1, 2, 9, 11, 12], 5)) == [0, 1, 0, 0]


def test_a_prompt_that_is_repeated_is_the_same_session() -> None:
    assert tell(([1, 2], 2), ([1, 2], 2)) == [0, 0]


def test_a_branch_from_an_older_turn_begins_a_new_session() -> None:
    assert tell(([1, 2], 2), ([1, 2, 3], 3), ([1, 2, 4], 3), ([1, 2, 3, 5], 4)) == [0, 0, 1, 0]


def test_prompts_that_share_only_a_beginning_are_different_sessions() -> None:
    assert tell(([1, 2, 3], 3), ([1, 2, 4], 3), ([1], 0), ([1], 0)) == [0, 1, 2, 3]


def test_the_longest_matching_session_is_continued() -> None:
    assert tell(([1], 1), ([1, 2, 3], 3), ([1, 9], 2), ([1, 2, 3, 4], 4)) == [0, 0, 1, 0]
    assert tell(([1, 2], 2), ([1], 1), ([1, 2, 3], 3), ([1, 8], 2)) == [0, 1, 0, 1]


def test_session_name_overrides_prompts() -> None:
    tracker = SessionTracker()
    ids = np.array([1, 2], np.int64)
    assert [tracker.number(name, ids, 2) for name in ("a", "b", "a", "", "")] == [0, 1, 0, 2, 2]


def test_least_recent_session_is_forgotten() -> None:
    tracker = SessionTracker(2)
    ids = np.array([1], np.int64)
    assert [tracker.number(name, ids, 1) for name in ("a", "b", "a", "c", "b", "a")] == [0, 1, 0, 2, 3, 4]
    assert tell(([1], 1), ([2], 1), ([1], 1), ([3], 1), ([2], 1), most=2) == [0, 1, 0, 2, 3]


@pytest.mark.parametrize("kind", ["agents", "coding", "chat"])
def test_sessions_inferred_from_prompts_match_the_generators(kind: str) -> None:
    trace = open_trace(f"{kind}:requests=400,seed=5{',retry=0' if kind == 'agents' else ''}")
    tracker = SessionTracker()
    pairs = {
        (request.session, tracker.number("", request.hash_ids, request.num_prompt_tokens // trace.hash_block_size))
        for request in trace
        if request.hash_ids is not None
    }
    named = {name for name, _ in pairs}
    # A conversation that would exceed the longest prompt starts over, which is no continuation of anything.
    assert len(named) <= len(pairs) <= 1.05 * len(named) + 1
    # And two whose prompts end within what they share, a system prompt say, look like one.
    assert 0.95 * len(pairs) <= len({number for _, number in pairs}) <= len(pairs)


def test_references_have_sessions_only_on_request() -> None:
    trace = open_trace("chat:requests=50,seed=1")
    plain, told = read_references(trace), read_references(trace, with_sessions=True)
    assert len(plain.sessions) == len(plain.arrivals) == 0
    assert np.array_equal(plain.ids, told.ids)
    assert len(told.sessions) == len(told.arrivals) == len(told.starts) - 1
    assert told.arrivals.tolist() == [round(1e6 * request.arrival) for request in trace]
    assert len(told.select(1).sessions) == 0


def test_sample_keeps_sessions_of_its_requests() -> None:
    trace = open_trace("chat:requests=600,seed=2,users=200")
    whole = read_references(trace, with_sessions=True)
    sample = read_references(trace, with_sessions=True, halvings=6)
    assert 0 < len(sample.sessions) == len(sample.starts) - 1 < len(whole.sessions)
    at = dict(zip(whole.arrivals.tolist(), whole.sessions.tolist(), strict=True))
    assert [at[arrival] for arrival in sample.arrivals.tolist()] == sample.sessions.tolist()
    halved = read_references(trace, with_sessions=True, max_references=1024)
    assert halved.halvings > 0
    assert len(halved.sessions) == len(halved.starts) - 1


def references_of(*requests: tuple[float, list[int], int]) -> References:
    return read_references(Told(*requests), with_sessions=True)


#: Session 0 has turns at 0, 2 and 5 seconds, session 1 at 1 and 9, session 2 one at 4.
THREE = (
    (0.0, [1, 2], 8), (1.0, [11], 4), (2.0, [1, 2, 3], 12), (4.0, [21], 4), (5.0, [1, 2, 3, 4], 16), (9.0, [11, 12], 8),
)  # fmt: skip


def test_oracle_marks_the_last_request_of_each_session() -> None:
    assert HintOracle().mark_ends(references_of(*THREE)).tolist() == [0, 0, 0, 1, 1, 1]


def test_wrong_hints_are_inverted() -> None:
    assert HintOracle(wrong=1.0).mark_ends(references_of(*THREE)).tolist() == [1, 1, 1, 0, 0, 0]


def test_coverage_is_the_fraction_of_sessions() -> None:
    references = read_references(open_trace("chat:requests=2000,seed=4"), with_sessions=True)
    half, whole = HintOracle(coverage=0.5, seed=3).mark_ends(references), HintOracle().mark_ends(references)
    gives = half[whole == 1]  # each session is over once
    assert not half[whole == 0].any()
    assert 0.4 < gives.mean() < 0.6
    half, whole = (HintOracle(share, 1.0, seed=3).mark_ends(references) for share in (0.5, 1.0))
    lies = {session: set() for session in range(int(references.sessions.max()) + 1)}
    for session, said in zip(references.sessions[whole == 1].tolist(), half[whole == 1].tolist(), strict=True):
        lies[session].add(said)
    assert all(len(found) <= 1 for found in lies.values()), "a session gives all its hints or none"


def test_hints_depend_on_the_seed() -> None:
    references = read_references(open_trace("chat:requests=300,seed=4"), with_sessions=True)
    one, same, other = (HintOracle(coverage=0.5, wrong=0.2, seed=seed).mark_ends(references) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"coverage": 1.5}, "hint_coverage is 1.5; it must be from 0 to 1"),
        ({"coverage": float("nan")}, "hint_coverage is nan; it must be finite"),
        ({"wrong": "all"}, "hint_wrong is 'all'; it must be a number"),
        ({"seed": -1}, "hint_seed is -1"),
    ],
)
def test_invalid_oracle_arguments_are_refused(bad: dict, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{words}".replace("(", r"\(")):
        HintOracle(**bad)


def test_hints_need_sessions() -> None:
    with pytest.raises(InvalidArgument, match="with_sessions"):
        HintOracle().mark_ends(read_references(Told(*THREE)))
