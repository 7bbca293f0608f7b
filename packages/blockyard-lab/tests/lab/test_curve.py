"""Curves: sizes, samples, sweeps, the knee, golden counts."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from blockyard import InvalidArgument, PolicyError
from blockyard.core.policies import POLICIES
from blockyard.core.policies.simple.lru import LRU
from blockyard.errors import MissingExtra
from blockyard_lab import TraceError, TraceRequest, read_references, sweep
from blockyard_lab.curve import Knee, count_hits, hit_curves, lru_hits
from blockyard_lab.curve.hit_rates import find_knee
from blockyard_lab.policy_names import (
    OPTIMUM,
    parse_policies,
    parse_sizes,
    policy_of,
    spread_sizes,
)
from blockyard_lab.references import name_blocks
from blockyard_lab.survey import survey
from blockyard_lab.traces import make_trace, open_trace
from blockyard_testing.lab_reference import ListedTrace, belady, lengths, lru, named, prefix_trace

from ..golden import GOLDEN, SIZES, count

# ---------------------------------------------------------------- sizes and names


def test_sizes_are_parsed() -> None:
    assert parse_sizes("1000, 10k,1.5M,25%", 4000) == [1000, 10_000, 1_500_000]
    assert parse_sizes("50%,.5k", 4000) == [500, 2000]
    assert parse_sizes("0.001%", 4000) == [1]
    assert spread_sizes(40, 100_000)[0] == 1
    assert spread_sizes(40, 100_000)[-1] == 100_000
    assert spread_sizes(5, 1) == [1]
    assert spread_sizes(3, 10_000) == [1, 100, 10_000]
    assert spread_sizes(3, 10_000, 100) == [100, 1000, 10_000]
    assert spread_sizes(3, 5, 100) == [100]


@pytest.mark.parametrize("text", ["", "ten", "-5", "1,,2", "10kk", "1e5", "0", "1.5", "200M", "nan", "10%%", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="blocks"):
        parse_sizes(text, 1000)


MINE = """
from collections import OrderedDict

from blockyard.core.policies.base import EvictionPolicy


class Mine(EvictionPolicy):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.idle = OrderedDict()

    def insert(self, block, key, depth):
        self.idle[block] = None

    def remove(self, block):
        del self.idle[block]

    def evict(self):
        return self.idle.popitem(last=False)[0]


class Wrong(Mine):
    def evict(self):
        return 10**6


class Twice(Mine):
    def evict(self):
        return next(iter(self.idle))


class Half(EvictionPolicy):
    pass


class Raising(Mine):
    def evict(self):
        raise KeyError("lost")
"""


@pytest.mark.parametrize(
    ("member", "what"),
    [
        ("Wrong", "block 1000000"),
        ("Twice", "not idle"),
        ("Raising", r"mine\.py:\d+\): KeyError"),
        ("Half", r"must have insert\(\)"),
    ],
)
def test_failing_policy_gives_no_number(tmp_path: Path, member: str, what: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    references = read_references(named(prefix_trace(1, 50)))
    with pytest.raises(PolicyError, match=what):
        count_hits(references, f"{path}:{member}", 20)


def test_policies_by_name_and_from_a_file(tmp_path: Path) -> None:
    assert parse_policies("lru, optimum,lru") == ["lru", OPTIMUM]
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    (name,) = parse_policies(f"{mine}:Mine")
    assert getattr(policy_of(name), "__name__", "") == "Mine"
    references = read_references(named(prefix_trace(1, 50)))
    assert count_hits(references, name, 20) == count_hits(references, "lru", 20)


def test_policy_files_are_labelled_without_their_folder(tmp_path: Path) -> None:
    references = read_references(named(prefix_trace(1, 50)))
    paths = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(MINE)
    first, second = (f"{path}:Mine" for path in paths)
    assert list(hit_curves(references, ["lru", first], [20]).hit_rates) == ["lru", "mine.py:Mine"]
    assert list(hit_curves(references, [first, second], [20]).hit_rates) == [first, second]


def test_invalid_policies_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=r"'optimumm'; it must be one of arc,.* score, optimum \(only in `curve`"):
        parse_policies("lru,optimumm")
    with pytest.raises(InvalidArgument, match=r"'lur'.*lru"):
        parse_policies("lru,lur")
    with pytest.raises(InvalidArgument, match=r"there is no file nowhere\.py"):
        parse_policies("nowhere.py:Mine")
    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        parse_policies(f"{broken}:Mine")
    broken.write_text("")
    with pytest.raises(InvalidArgument, match="has no class Mine"):
        parse_policies(f"{broken}:Mine")
    with pytest.raises(InvalidArgument, match="policies"):
        parse_policies("")


# ---------------------------------------------------------------- references


def test_references_number_contents_in_order() -> None:
    trace = ListedTrace(
        [
            TraceRequest(5.0, 40, 3, np.array([7, 2**59, 9], np.int64)),
            TraceRequest(8.0, 16, 9, np.array([7], np.int64)),
        ]
    )
    found = read_references(trace)
    assert found.starts.tolist() == [0, 3, 4]
    assert found.ids.tolist() == [0, 2, 1, 0]
    assert (found.num_requests, found.num_references, found.num_contents) == (2, 4, 3)
    assert (found.longest_request, found.survey.longest_sequence, found.survey.duration) == (3, 43, 3.0)
    assert (found.tokens_a_block, found.rate, found.working_set) == (16, 1.0, 3)


def test_token_blocks_are_named_with_their_prefix() -> None:
    tokens = np.arange(40, dtype=np.int32)
    other = tokens.copy()
    other[20] = 99
    first, second = name_blocks(tokens, 16), name_blocks(other, 16)
    assert len(first) == 3
    assert first[0] == second[0]
    assert (first[1:] != second[1:]).all()
    assert first.min() >= 0
    assert first.max() < 2**60
    assert name_blocks(np.tile(tokens[:16], 3), 16).tolist() != [first[0]] * 3


def test_a_trace_without_contents_has_no_curve() -> None:
    with pytest.raises(TraceError, match="has lengths but no contents"):
        read_references(lengths([(10, 1)]))
    assert survey(lengths([(10, 1), (5, 0)])).longest_sequence == 11
    assert not survey(lengths([(10, 1)])).has_contents


def test_sampling_keeps_totals_exact() -> None:
    trace = make_trace("mix", requests=400, seed=1)
    whole = read_references(trace)
    part = read_references(trace, max_references=5000)
    assert len(part.ids) <= 5000
    assert part.halvings > 0
    for name in ("survey", "num_references", "longest_request"):
        assert getattr(part, name) == getattr(whole, name)
    assert abs(part.working_set - whole.num_contents) < 0.15 * whole.num_contents
    assert part.starts[-1] == len(part.ids)
    again = read_references(trace, halvings=part.halvings)
    assert (again.ids == part.ids).all()
    assert (again.starts == part.starts).all()


def test_quarters_partition_a_sample() -> None:
    whole = read_references(make_trace("chat", requests=100, seed=1))
    quarters = [whole.select(group) for group in range(4)]
    assert sum(len(quarter.ids) for quarter in quarters) == len(whole.ids)
    assert sum(quarter.num_contents for quarter in quarters) == whole.num_contents


# ---------------------------------------------------------------- curves


@pytest.mark.parametrize("seed", range(5))
def test_curves_agree_with_slow_references(seed: int) -> None:
    requests = prefix_trace(seed, 80)
    references = read_references(named(requests))
    sizes = [1, 3, 10, 30, 300]
    curves = hit_curves(references, ["optimum", "lru"], sizes)
    assert list(curves.hit_rates) == ["optimum", "lru"]
    assert curves.num_hits["lru"].tolist() == [lru(requests, size) for size in sizes]
    assert curves.num_hits["optimum"].tolist() == [belady(requests, size) for size in sizes]
    assert curves.hit_rates["lru"][-1] == pytest.approx(curves.infinite)
    assert curves.error == {}


def test_a_sampled_curve_is_near_the_exact_one() -> None:
    trace = make_trace("mix", requests=3000, seed=5)
    exact = read_references(trace)
    sample = read_references(trace, halvings=3)
    sizes = [exact.working_set // 20, exact.working_set // 4, exact.working_set]
    wanted = hit_curves(exact, ["lru", "s3fifo", "optimum"], sizes)
    found = hit_curves(sample, ["lru", "s3fifo", "optimum"], sizes)
    for policy, rates in wanted.hit_rates.items():
        assert np.abs(found.hit_rates[policy] - rates).max() < 0.03, policy
    assert (found.error["lru"] > 0).all()
    assert found.error["lru"].max() < 0.03
    assert found.sample_rate == 0.125


def test_the_knee_is_the_point_farthest_above_the_line() -> None:
    sizes = np.array([1.0, 2, 3, 4, 10])
    rates = np.array([0.2, 0.4, 0.41, 0.42, 0.43])
    assert find_knee(sizes, rates, 10.0, 0.43) == 1
    assert find_knee(sizes, np.zeros(5), 10.0, 0.0) == 0
    assert find_knee(np.array([0.001, 0.2]), np.array([0.02, 0.8]), 1.0, 1.0) == 1


def test_knee_does_not_depend_on_requested_sizes_or_policies() -> None:
    references = read_references(open_trace("small"))
    every = range(1, references.working_set + 1)
    wanted = hit_curves(references, ["lru"], every)
    gains = wanted.hit_rates["lru"] / wanted.infinite - wanted.sizes / references.working_set
    assert wanted.knee.blocks == every[int(np.argmax(gains))] == 4576
    assert wanted.knee.hit_rate == wanted.hit_rates["lru"][4575]
    for sizes in ([1000, 3000], [1000, 10_000, 3_000_000], [17], [4576]):
        for policies in (["lru"], ["s3fifo", "lru"], ["optimum"]):
            assert hit_curves(references, policies, sizes).knee == wanted.knee


def test_knee_of_a_sample_is_close() -> None:
    trace = make_trace("mix", requests=3000, seed=5)
    exact, sample = read_references(trace), read_references(trace, halvings=3)
    found, wanted = (hit_curves(references, ["lru"], [100]).knee for references in (sample, exact))
    assert found.blocks == pytest.approx(wanted.blocks, rel=0.2)
    assert found.hit_rate == pytest.approx(wanted.hit_rate, abs=0.03)


def test_trace_without_hits_has_its_knee_at_the_first_size() -> None:
    assert hit_curves(read_references(named([[1], [2], [3]])), ["lru"], [2]).knee == Knee("lru", 1, 0.0)


def test_a_policy_may_be_given_as_a_class() -> None:
    references = read_references(named(prefix_trace(1, 50)))
    curves = hit_curves(references, ["lru", LRU], [5, 20])
    assert curves.num_hits["LRU"].tolist() == curves.num_hits["lru"].tolist()
    with pytest.raises(InvalidArgument, match=r"policies has lru, lru"):
        hit_curves(references, ["lru", "lru"], [5])
    with pytest.raises(InvalidArgument, match="policies has 3"):
        count_hits(references, 3, 5)  # type: ignore[arg-type]


def test_no_policies_or_sizes_is_an_error() -> None:
    references = read_references(named([[1]]))
    with pytest.raises(InvalidArgument, match="policies has 0"):
        hit_curves(references, [], [1])
    with pytest.raises(InvalidArgument, match="sizes 0"):
        hit_curves(references, ["lru"], [])


@pytest.mark.parametrize("policy", [*POLICIES, OPTIMUM])
def test_counts_equal_the_golden_ones(policy: str) -> None:
    """If a policy's counts changed on purpose, print new ones with `python -m tests.golden`."""
    assert count(policy) == GOLDEN[policy]


def test_golden_counts_cover_every_policy() -> None:
    assert set(GOLDEN) == {*POLICIES, OPTIMUM}
    best = GOLDEN[OPTIMUM][0]
    for blocks, tokens in GOLDEN.values():
        assert all(hits <= most for hits, most in zip(blocks, best, strict=True))
        assert len(tokens) in {0, len(SIZES)}


# ---------------------------------------------------------------- sweeps


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    raise PolicyError(f"run {number}")


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order_and_are_counted(jobs: int) -> None:
    pytest.importorskip("joblib")
    seen: list[int] = []
    assert sweep.run_all(square, [(n,) for n in range(6)], jobs=jobs, on_done=seen.append) == [0, 1, 4, 9, 16, 25]
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_of_a_run_reach_the_caller(jobs: int) -> None:
    pytest.importorskip("joblib")
    with pytest.raises(PolicyError, match="run 3"):
        sweep.run_all(fail, [(3,)], jobs=jobs)


def test_processes_and_one_process_agree() -> None:
    pytest.importorskip("joblib")
    references = read_references(make_trace("rag", requests=200, seed=2))
    one = hit_curves(references, ["arc", "optimum"], [100, 1000])
    two = hit_curves(references, ["arc", "optimum"], [100, 1000], jobs=2)
    assert {name: hits.tolist() for name, hits in one.num_hits.items()} == {
        name: hits.tolist() for name, hits in two.num_hits.items()
    }


def test_local_ray_gives_the_same_results() -> None:
    ray = pytest.importorskip("ray")
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        assert sweep.run_all(square, [(n,) for n in range(4)], jobs=2, backend="ray") == [0, 1, 4, 9]
    finally:
        ray.shutdown()


def test_invalid_sweep_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="backend is 'spark'"):
        sweep.run_all(square, [(1,)], backend="spark")
    with pytest.raises(InvalidArgument, match="jobs is 0"):
        sweep.run_all(square, [(1,)], jobs=0)
    monkeypatch.setitem(__import__("sys").modules, "joblib", None)
    with pytest.raises(MissingExtra, match=r"joblib.*blockyard\[lab\].*--jobs 1"):
        sweep.run_all(square, [(1,)], jobs=2)


def test_traces_can_be_pickled() -> None:
    trace = make_trace("chat", requests=5, seed=1)
    again = pickle.loads(pickle.dumps(trace))
    assert [request.hash_ids.tolist() for request in again] == [request.hash_ids.tolist() for request in trace]


# ---------------------------------------------------------------- published figures

PUBLISHED = {
    "lru": (0.0445, 0.0653, 0.2116, 0.2878, 0.3257, 0.3546, 0.3637),
    "lfu": (0.0823, 0.1179, 0.1879, 0.2492, 0.2799, 0.3430, 0.3631),
    "optimum": (0.1907, 0.2945, 0.3664, 0.3664, 0.3664, 0.3664, 0.3664),
}


@pytest.mark.skipif("MOONCAKE_TRACE" not in os.environ, reason="MOONCAKE_TRACE names no file")
def test_mooncake_conversation_trace_matches_published_numbers() -> None:
    references = read_references(open_trace(Path(os.environ["MOONCAKE_TRACE"]), strict=True))
    assert (references.num_requests, references.num_references) == (12_031, 288_500)
    curves = hit_curves(references, list(PUBLISHED), [1_000, 3_000, 10_000, 20_000, 30_000, 50_000, 100_000])
    found = {policy: tuple(np.round(rates, 4).tolist()) for policy, rates in curves.hit_rates.items()}
    assert found == PUBLISHED
    assert round(curves.infinite, 4) == 0.3664
    assert int(lru_hits(references)[10_000]) == int(curves.num_hits["lru"][2])
