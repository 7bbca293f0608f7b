"""The tracked load equals a plain model after every call. Choices explain themselves and never raise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockyard.errors import InvalidArgument
from blockyard.routing import Candidates, Router, RouteRequest, StatelessCost, make_cost
from blockyard.routing.cost import Floats
from blockyard.routing.costs import COSTS
from blockyard.routing.prefixes import Prefixes
from blockyard_testing.fleet_asks import LINK, ask, choose, router
from blockyard_testing.seeds import draws, run_seed


class Truth:
    """The requests in flight, in plain dicts."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}

    def loads(self, replica: str) -> tuple[int, int, int, int]:
        there = [each for each in self.requests.values() if each["replica"] == replica]
        waiting = [each for each in there if each["waits"]]
        return len(waiting), sum(each["uncached"] for each in waiting), len(there), sum(each["held"] for each in there)


def agrees(made: Router, truth: Truth) -> None:
    made.check()
    assert made.load.assignments.keys() == truth.requests.keys()
    for replica, row in made.load.rows.items():
        assert tuple(made.load.sums[:, row].tolist()) == truth.loads(replica), replica


@pytest.mark.parametrize("name", COSTS)
def test_load_matches_the_model_after_every_call(name: str) -> None:
    draw = random.Random(f"{run_seed()} {name}")
    made, truth, alive, born = Router(make_cost(name, 1)), Truth(), [], 0
    for step in range(draws(300, 100)):
        what = draw.choice(["choose"] * 5 + ["first", "done", "done late", "moved", "add", "drop"])
        key = draw.choice([*truth.requests, "unknown"])
        if what == "choose" and alive:
            again = draw.random() < 0.1 and key != "unknown"
            prompt = draw.randrange(4)
            asked = ask(
                key if again else f"r{step}", 160, max_tokens=40, links=[(prompt, place) for place in range(10)]
            )
            hits = [LINK * draw.randrange(10) for _ in alive]
            choice = choose(made, asked, hits)
            assert choice.replica in alive
            assert choice.problem == ""
            claimed = max(choice.num_tokens, next(w.coming for w in choice.why if w.replica == choice.replica))
            truth.requests[asked.name] = {
                "replica": choice.replica,
                "uncached": 160 - claimed,
                "held": 200,
                "waits": True,
            }
        elif what == "first":
            made.record_first_token(key, float(step))
            if key in truth.requests:
                truth.requests[key]["waits"] = False
        elif what == "done":
            made.finish(key, None, float(step))
            truth.requests.pop(key, None)
        elif what == "done late":
            replica = draw.choice([*alive, "elsewhere"])
            made.finish(key, replica, float(step))
            if key in truth.requests and truth.requests[key]["replica"] == replica:
                del truth.requests[key]
        elif what == "moved" and alive:
            replica = draw.choice([*alive, "elsewhere"])
            made.reassign(key, replica)
            if key in truth.requests and replica in alive:
                truth.requests[key]["replica"] = replica
        elif what == "add" and len(alive) < 6:
            alive.append(f"replica-{born}")
            made.add(alive[-1])
            born += 1
        elif what == "drop" and alive and draw.random() < 0.3:
            gone = alive.pop(draw.randrange(len(alive)))
            lost = {request for request, each in truth.requests.items() if each["replica"] == gone}
            assert set(made.drop(gone)) == lost
            truth.requests = {request: each for request, each in truth.requests.items() if request not in lost}
        agrees(made, truth)
    for key in list(truth.requests):
        made.finish(key)
    assert not made.load.sums.any()
    assert not made.in_flight.sizes or not any(made.in_flight.sizes.values())
    made.check()


def test_choice_reports_hits_load_and_cost_of_all_candidates() -> None:
    made = router(make_cost("robust"))
    choose(made, ask("other", 320, max_tokens=10))
    choice = choose(made, ask("asked", 320), [0, 48, 160])
    assert (choice.replica, choice.num_tokens, choice.problem) == ("replica-2", 160, "")
    why = {each.replica: each for each in choice.why}
    assert choice.order[0] == "replica-2"
    assert set(choice.order) == set(why)
    assert [why[name].num_tokens for name in made.replicas] == [0, 48, 160]
    assert (why["replica-0"].requests, why["replica-0"].uncached, why["replica-0"].held) == (1, 320, 330)
    assert why["replica-2"].cost == min(each.cost for each in choice.why)


def test_untrusted_replica_gets_no_hits() -> None:
    made = router(make_cost("robust"))
    hits = np.array([320, 0, 0], np.int64)
    choice = made.choose(ask(num_tokens=320), hits, hits, np.array([False, True, True]))
    assert choice.num_tokens == 0
    assert [each.num_tokens for each in choice.why] == [0, 0, 0]
    assert [each.is_believed for each in choice.why] == [False, True, True]


def test_only_allowed_replicas_are_chosen_and_avoided_ones_last() -> None:
    made = router(make_cost("robust"))
    assert choose(made, ask("a"), [160, 0, 0], allowed=["replica-1", "replica-2", "nobody"]).replica != "replica-0"
    assert choose(made, ask("b"), [160, 0, 0], avoid=["replica-0"]).order[-1] == "replica-0"
    assert choose(made, ask("c"), allowed=["replica-1"], avoid=["replica-1"]).replica == "replica-1"
    none = choose(made, ask("d"), allowed=["nobody"])
    assert (none.replica, none.order, none.why) == (None, [], [])
    assert "no replica" in none.problem
    assert "d" not in made.load.assignments


class Broken(StatelessCost):
    """A cost that fails in the given way."""

    def __init__(self, way: str) -> None:
        self.way = way

    def costs(self, asked: RouteRequest, given: Candidates) -> Floats:
        if self.way == "raises":
            raise RuntimeError("no")
        return {"short": np.zeros(1), "nan": np.full(len(given.names), np.nan)}.get(
            self.way, np.zeros(len(given.names))
        )

    def record(self, asked: RouteRequest, replica: str) -> None:
        raise RuntimeError("no")

    def forget(self, replica: str) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("way", ["raises", "short", "nan"])
def test_failing_cost_leaves_the_choice_to_load(way: str) -> None:
    made = router(Broken(way))
    assert choose(made, ask("first")).replica == "replica-0"
    second = choose(made, ask("second"))
    assert second.replica == "replica-1"
    assert "Broken failed" in second.problem
    made.check()


def test_cost_that_fails_to_record_is_ignored() -> None:
    made = router(Broken(""))
    assert choose(made, ask("first")).problem == ""
    assert made.drop("replica-0") == ["first"]
    made.check()


def test_duplicate_replica_names_are_rejected() -> None:
    made = router(make_cost("robust"))
    with pytest.raises(InvalidArgument, match=r"replica is 'replica-1'; a replica of this name exists"):
        made.add("replica-1")
    assert made.replicas == ["replica-0", "replica-1", "replica-2"]
    assert made.drop("nobody") == []


def test_new_replica_is_neither_flooded_nor_starved() -> None:
    made = router(make_cost("robust"))
    for number in range(90):
        choose(made, ask(f"r{number}"))
        made.finish(f"r{number}")
    made.add("new")
    took = []
    for number in range(80):
        took.append(choose(made, ask(f"s{number}")).replica)
        made.finish(f"s{number}")
    assert 10 <= took.count("new") <= 30


# ---------------------------------------------------------------- prefixes


def test_prefixes_count_leading_links_by_replica() -> None:
    prefixes, rows = Prefixes(), {"a": 0, "b": 1, "c": 2}
    prefixes.add([1, 2, 3], "a")
    prefixes.add([1, 2], "a")
    prefixes.add([1, 9], "b")
    assert prefixes.lengths([1, 2, 3, 4], rows).tolist() == [3, 1, 0]
    prefixes.remove([1, 2, 3], "a")
    assert prefixes.lengths([1, 2, 3, 4], rows).tolist() == [2, 1, 0]
    prefixes.forget("a")
    prefixes.check()
    assert prefixes.lengths([1, 2, 3], rows).tolist() == [0, 1, 0]
    assert prefixes.lengths([], rows).tolist() == [0, 0, 0]


def test_limit_drops_the_least_recently_added_prompts() -> None:
    prefixes = Prefixes(limit=4)
    for prompt in ([1, 2], [3, 4], [1, 2], [5, 6]):
        prefixes.add(prompt, "a")
        prefixes.check()
    assert [prefixes.lengths(prompt, {"a": 0})[0] for prompt in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    prefixes.add([7, 8, 9, 10, 11], "a")
    assert prefixes.sizes == {"a": 5}, "the newest stays, however long it is"
