"""Policies that are told when a session's next request comes: exact small cases, and the command."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard import InvalidArgument
from blockyard.cli.main import main
from blockyard.core.policies import POLICIES, make_policy
from blockyard.core.simulation.hinted_run import HintedRun
from blockyard_lab import References, read_references
from blockyard_lab.curve import count_hits, hit_curves
from blockyard_lab.oracle import HintOracle
from blockyard_lab.traces import open_trace

from .test_sessions import references_of

LOADS = ("chat:requests=300,seed=31", "agents:requests=60,seed=31,instruction_tokens=1000", "mix:requests=200,seed=31")


def said_of(*is_over: bool) -> NDArray[np.int64]:
    """Return what the oracle says after each request."""
    return np.array(is_over, np.int64)


@pytest.fixture(scope="module", params=LOADS)
def load(request: Any) -> References:
    return read_references(open_trace(request.param), with_sessions=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_hints_that_are_never_given_change_nothing(load: References, policy: str) -> None:
    nothing = HintOracle(coverage=0.0).mark_ends(load)
    assert not nothing.any()
    for share in (20, 5, 2):
        capacity = load.num_contents // share
        assert count_hits(load, policy, capacity, nothing) == count_hits(load, policy, capacity)


def test_ended_sessions_are_evicted_before_older_blocks() -> None:
    # Room for two of three sessions of two blocks; the second says that it is over.
    asked = references_of((0, [1, 2], 8), (1, [11, 12], 8), (2, [21, 22], 8), (3, [1, 2], 8))
    assert count_hits(asked, "lru", 4, said_of(False, False, False, False)) == 0
    assert count_hits(asked, "lru", 4, said_of(False, True, False, False)) == 2


def test_new_turn_cancels_the_hint() -> None:
    # The first session says that it is over, and comes back all the same: 11 goes for 21, and not 3.
    asked = references_of(
        (0, [1, 2], 8), (1, [11], 4), (2, [1, 2, 3], 12), (3, [21], 4), (4, [11], 4), (5, [1, 2, 3], 12)
    )
    assert count_hits(asked, "lru", 4, said_of(True, False, False, False, False, False)) == 4
    assert count_hits(asked, "lru", 4, said_of(True, False, True, False, False, False)) == 5


def test_structures_are_sound_at_the_end(load: References) -> None:
    said = HintOracle(wrong=0.3, seed=2).mark_ends(load)
    capacity, longest = load.num_contents // 8, load.longest_sampled
    for name in ("lru", "density", "lfu"):
        policy = make_policy(name, capacity + longest + 1)
        run = HintedRun(policy, capacity, load.num_contents, longest, int(load.sessions.max()) + 1)
        run.run_turns(load.ids, load.starts, load.sessions, said)
        assert run.num_hits == count_hits(load, name, capacity, said)
        run.check()


def test_good_hints_win() -> None:
    references = read_references(open_trace("chat:requests=800,seed=32"), with_sessions=True)
    capacity = references.num_contents // 6
    lru, optimum = count_hits(references, "lru", capacity), count_hits(references, "optimum", capacity)
    whole, half = (
        count_hits(references, "lru", capacity, HintOracle(coverage).mark_ends(references)) - lru
        for coverage in (1.0, 0.5)
    )
    assert 0 < half < whole
    assert 0.25 * (optimum - lru) < whole <= optimum - lru


def test_curves_have_a_row_with_hints_for_each_policy() -> None:
    references = read_references(open_trace("chat:requests=120,seed=3"), with_sessions=True)
    oracle = HintOracle(coverage=0.5)
    curves = hit_curves(references, ["lru", "density", "optimum"], [100, 1000], hints=oracle)
    assert list(curves.hit_rates) == ["lru", "lru + hints", "density", "density + hints", "optimum"]
    assert curves.hints == "over, by 50 % of the sessions"
    said = oracle.mark_ends(references)
    assert curves.num_hits["lru + hints"].tolist() == [
        count_hits(references, "lru", size, said) for size in (100, 1000)
    ]
    assert curves.num_hits["lru"].tolist() == [count_hits(references, "lru", size) for size in (100, 1000)]


def test_curves_with_hints_need_sessions() -> None:
    references = read_references(open_trace("chat:requests=20,seed=3"))
    with pytest.raises(InvalidArgument, match="with_sessions"):
        hit_curves(references, ["lru"], [100], hints=HintOracle())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["curve", "chat:requests=120,seed=3", "--quiet", "--jobs", "1", *arguments]) == 0
    return capsys.readouterr().out


def test_command_prints_how_much_of_the_gap_hints_close(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policies", "lru,density,optimum", "--sizes", "4", "--hints")
    text = run(capsys, *options, "--hint-coverage", "0.5")
    assert "hints: over, by 50 % of the sessions" in text
    table = text.partition("above lru over")[2]
    assert "lru + hints" in table
    assert "density + hints" in table
    found = json.loads(run(capsys, *options, "--hint-wrong", "1", "--json"))
    assert found["hints"] == "over, by 100 % of the sessions; 100 % wrong"
    assert set(found["claims"]) == {"lru + hints", "density", "density + hints"}
    assert run(capsys, *options, "--hint-coverage", "0.5") == run(capsys, *options, "--hint-coverage", "0.5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hints", "--hint-coverage", "2"), "hint_coverage is 2.0; it must be from 0 to 1"),
        (("--hint-wrong", "1"), "--hint-wrong was given without --hints"),
        (("--hints", "--hint-seed", "-1"), "hint_seed is -1"),
    ],
)
def test_invalid_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["curve", "chat:requests=20,seed=3", "--quiet", *arguments]) == 2
    assert words in capsys.readouterr().err
