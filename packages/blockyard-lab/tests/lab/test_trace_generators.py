"""Generated traces: equal ids mean equal prefixes, and a seed gives the same trace every time."""

from __future__ import annotations

import statistics
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import InvalidArgument
from blockyard_lab import TraceRequest
from blockyard_lab.traces import GENERATORS, make_trace, open_trace
from blockyard_lab.traces.generators import Rag
from blockyard_lab.traces.generators.draws import arrivals, geometric, lognormal, zipf

from .test_traces import plain

every_kind = pytest.mark.parametrize("kind", GENERATORS)


def ids_of(request: TraceRequest) -> list[int]:
    assert request.hash_ids is not None
    return [int(block) for block in request.hash_ids]


def shared(one: list[int], other: list[int]) -> int:
    """How many ids two prompts have in common from the start."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), min(len(one), len(other))
    )


def check_closed(requests: list[TraceRequest]) -> None:
    """Check that an id always has the same position and the same id before it, so it names a whole prefix."""
    before: dict[int, tuple[int, int]] = {}
    for request in requests:
        ids = ids_of(request)
        for place, (parent, block) in enumerate(pairwise([-1, *ids])):
            assert before.setdefault(block, (place, parent)) == (place, parent)


# ---------------------------------------------------------------- what all have in common


@every_kind
@pytest.mark.parametrize("options", [{}, {"hash_block_size": 512}, {"off_seconds": 30.0}, {"max_prompt_tokens": 900}])
def test_requests_satisfy_the_trace_contract(kind: str, options: dict[str, Any]) -> None:
    trace = make_trace(kind, requests=800, seed=3, **options)
    requests = list(trace)
    block_size, longest = (
        options.get(name, getattr(GENERATORS[kind], name)) for name in ("hash_block_size", "max_prompt_tokens")
    )
    assert trace.hash_block_size == block_size
    assert len(requests) == 800
    assert requests[0].arrival == 0.0
    assert all(one.arrival <= other.arrival for one, other in pairwise(requests))
    for request in requests:
        ids = ids_of(request)
        assert 1 <= request.num_prompt_tokens <= longest
        assert 1 <= request.num_output_tokens <= longest
        assert len(ids) == len(set(ids)) == -(-request.num_prompt_tokens // block_size)
        assert 0 <= min(ids) <= max(ids) < 2**60
    check_closed(requests)
    assert trace.skips.total == 0


@every_kind
def test_equal_seeds_give_equal_requests(kind: str) -> None:
    trace = make_trace(kind, requests=300, seed=8)
    first = [plain(request) for request in trace]
    assert first == [plain(request) for request in trace]
    assert first == [plain(request) for request in open_trace(f"{kind}:seed=8,requests=300")]
    assert first[:100] == [plain(request) for request in make_trace(kind, requests=100, seed=8)]
    assert first != [plain(request) for request in make_trace(kind, requests=300, seed=9)]


@every_kind
def test_concurrent_walks_are_independent(kind: str) -> None:
    trace = make_trace(kind, requests=60, seed=2)
    together = list(zip(trace, trace, strict=True))
    assert [plain(one) for one, _ in together] == [plain(other) for _, other in together]


@every_kind
def test_a_long_walk_takes_little_memory(kind: str) -> None:
    trace = make_trace(kind, requests=30_000, seed=0)
    walk = iter(trace)
    for _ in range(10_000):
        next(walk)
    tracemalloc.start()
    try:
        assert sum(1 for _ in walk) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 2.5 * 10**6, "100 live prompts of 16 KB at most"
    finally:
        tracemalloc.stop()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(GENERATORS)),
    seed=st.integers(0, 2**63 - 1),
    hash_block_size=st.sampled_from([1, 2, 7, 64, 4096]),
    max_prompt_tokens=st.sampled_from([201, 1000, 5000]),
)
def test_any_options_keep_prefixes(kind: str, **options: int) -> None:
    check_closed(list(make_trace(kind, requests=40, **options)))


@pytest.mark.parametrize("kind", ["chat", "system", "agents", "scan", "bursts"])
def test_prompts_may_have_one_token(kind: str) -> None:
    for block_size in (1, 16):
        requests = list(make_trace(kind, requests=20, seed=1, max_prompt_tokens=1, hash_block_size=block_size))
        assert {request.num_prompt_tokens for request in requests} == {1}
        check_closed(requests)


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize("block_size", [1, 16, 512])
def test_a_turn_of_a_chat_continues_the_one_before(block_size: int) -> None:
    last: dict[str, TraceRequest] = {}
    seen: set[int] = set()
    turns = 0
    for request in make_trace("chat", requests=1500, seed=4, users=7, hash_block_size=block_size):
        ids = ids_of(request)
        before = last.get(request.session)
        if before is not None:
            turns += 1
            full = before.num_prompt_tokens // block_size
            assert request.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert shared(ids, ids_of(before)) == full
            assert not seen & set(ids[full:]), "the last block of the former prompt was not full: its name is new"
        last[request.session] = request
        seen.update(ids)
    assert 700 < turns < 1300, "four of five requests are not the first of their chat"


def test_live_chats_are_bounded() -> None:
    requests = list(make_trace("chat", requests=3000, seed=4, users=5))
    last = {request.session: number for number, request in enumerate(requests)}
    live: set[str] = set()
    for number, request in enumerate(requests):
        live.add(request.session)
        assert len(live) <= 5
        if last[request.session] == number:
            live.remove(request.session)


def test_system_prompts_are_shared_by_popularity() -> None:
    requests = list(make_trace("system", requests=4000, seed=1, system_prompts=20, system_tokens=400))
    firsts = Counter(ids_of(request)[0] for request in requests)
    common = [count for _, count in firsts.most_common(20)]
    assert sum(common) > 3900
    assert common[0] / 4000 == pytest.approx(1 / sum(1 / k for k in range(1, 21)), rel=0.15)
    assert common[0] / common[9] == pytest.approx(10, rel=0.5)


def test_agents_retry_at_the_given_rate() -> None:
    def repeats(retry: float) -> int:
        last: dict[str, list[int]] = {}
        count = 0
        for request in make_trace("agents", requests=2000, seed=1, retry=retry):
            count += last.get(request.session) == ids_of(request)
            last[request.session] = ids_of(request)
        return count

    assert repeats(0.0) == 0
    assert 300 < repeats(0.2) < 450


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rag_ids_identify_all_tokens_up_to_their_block(block_size: int) -> None:
    """Compared with the slow way, in which a block is the tuple of all tokens up to its last."""
    trace = Rag(documents=5, retrieved=3, instruction_tokens=6, hash_block_size=block_size, max_prompt_tokens=60)
    tokens = [3, 17, 8, 21, 16]
    rng = np.random.default_rng(0)
    names: dict[tuple[object, ...], int] = {}
    for _ in range(300):
        found = rng.permutation(5)[:3].tolist()
        parts, end, num_full = trace._shared(found, tokens)
        text: list[object] = ["instruction"] * 6
        for document in found:
            if len(text) + tokens[document] >= 60:
                break
            text += [(document, place) for place in range(tokens[document])]
        assert (end, num_full) == (len(text), len(text) // block_size)
        for number, name in enumerate(np.concatenate(parts).tolist(), 1):
            assert names.setdefault(tuple(text[: number * block_size]), name) == name
    assert len(set(names.values())) == len(names)


def test_rag_shares_documents_in_the_same_order_only() -> None:
    requests = list(make_trace("rag", requests=500, seed=0, documents=6, retrieved=2, spread=0.0, question_tokens=64))
    lengths = Counter(shared(ids_of(one), ids_of(other)) for one, other in pairwise(requests))
    # 200 tokens of instructions, then two documents of 500, in blocks of 16.
    assert set(lengths) == {200 // 16, 700 // 16, 1200 // 16}


def test_scans_repeat_in_order() -> None:
    requests = [ids_of(request) for request in make_trace("scan", requests=90, seed=0, documents=30)]
    seen: set[int] = set()
    for number, ids in enumerate(requests):
        if number < 30:
            assert not seen & set(ids)
        else:
            assert len(seen & set(ids)) == shared(ids, requests[number - 30]) > 0
        seen.update(ids)


def test_a_burst_has_a_favourite() -> None:
    requests = list(make_trace("bursts", requests=3000, seed=0, focus=1.0, on_seconds=5.0))
    bursts = [[requests[0]]]
    for one, other in pairwise(requests):
        if other.arrival - one.arrival > 5:
            bursts.append([])
        bursts[-1].append(other)
    assert len(bursts) > 5
    favourites = [Counter(ids_of(request)[0] for request in burst).most_common(1)[0] for burst in bursts]
    # Two phases with a short pause between them look like one burst here.
    assert sum(count for _, count in favourites) > 0.7 * 3000
    assert len({block for block, _ in favourites}) > 3


def test_a_mix_has_all_kinds_at_their_shares() -> None:
    requests = list(make_trace("mix", requests=10_000, seed=0))
    parts = Counter(ids_of(request)[0] >> 56 for request in requests)
    assert [parts[number] / 100 for number in range(6)] == pytest.approx([40, 15, 20, 15, 5, 5], abs=3)


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize(("on_seconds", "off_seconds"), [(1.0, 0.0), (2.0, 6.0)])
def test_off_phases_do_not_change_the_mean_rate(on_seconds: float, off_seconds: float) -> None:
    walk = arrivals(np.random.default_rng(0), 5.0, on_seconds, off_seconds)
    times = [next(walk) for _ in range(100_000)]
    assert times[-1][0] == pytest.approx(20_000, rel=0.05)
    gaps = [other[0] - one[0] for one, other in pairwise(times)]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    if off_seconds == 0:
        assert variation == pytest.approx(1.0, abs=0.02), "a Poisson process"
        assert times[-1][1] == 0
    else:
        assert variation > 3
        assert times[-1][1] == pytest.approx(20_000 / 8, rel=0.1)


def test_draws_follow_their_distributions() -> None:
    rng = np.random.default_rng(0)
    drawn = lognormal(rng, 100, 0.8, 500, 50_000)
    assert np.median(drawn) == pytest.approx(100, rel=0.02)
    assert drawn.min() >= 1
    assert drawn.max() == 500
    assert lognormal(rng, 2**22, 5.0, 2**22, 1000).max() == 2**22
    counts = geometric(rng, 5.0)
    assert statistics.fmean(next(counts) for _ in range(50_000)) == pytest.approx(5.0, rel=0.03)
    numbers = zipf(rng, 4, 1.0)
    found = Counter(next(numbers) for _ in range(50_000))
    assert [found[k] / 50_000 for k in range(4)] == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.01)


# ---------------------------------------------------------------- options


@every_kind
def test_every_option_has_limits_and_is_documented(kind: str) -> None:
    generator = GENERATORS[kind]
    described = "".join(base.__doc__ or "" for base in generator.__mro__)
    for name, field in generator.__dataclass_fields__.items():
        assert name in described
        for wrong in (field.metadata["low"] - 1, field.metadata["high"] * 2 + 1, "1", True, float("nan")):
            with pytest.raises(InvalidArgument, match=name):
                generator(**{name: wrong})


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("poems", {}, "kind is 'poems'; it must be one of chat, system"),
        (None, {}, "kind is None"),
        ("chat", {"colour": 1}, "chat has no option 'colour'; it has requests, seed"),
        ("rag", {"documents": 10**6, "retrieved": 3}, "must be below 2**55"),
        ("rag", {"documents": 2, "retrieved": 3}, "there are only 2 documents"),
        ("rag", {"max_prompt_tokens": 200}, "it must be below max_prompt_tokens, 200"),
        ("mix", {"max_prompt_tokens": 200}, "it must be below max_prompt_tokens, 200"),
        ("mix", {"rate": 1e-6}, "rate is"),
    ],
)
def test_invalid_options_are_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_trace(kind, requests=10, seed=0, **options)
    assert says in str(caught.value)
