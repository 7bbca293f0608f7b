"""The book equals the truth after every call, whatever ends a request; choices explain themselves and never raise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockyard.errors import InvalidArgument
from blockyard.routing import Ask, Candidates, PlainCost, Router, make_cost
from blockyard.routing.asking import Floats
from blockyard.routing.costs import COSTS
from blockyard.routing.prefixes import Prefixes
from blockyard_testing.fleet_asks import LINK, ask, choose, router
from blockyard_testing.seeds import draws, run_seed


class Truth:
    """What a router should have booked: plain dicts, written the slow way."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}

    def loads(self, replica: str) -> tuple[int, int, int, int]:
        there = [each for each in self.requests.values() if each["replica"] == replica]
        waiting = [each for each in there if each["waits"]]
        return len(waiting), sum(each["uncached"] for each in waiting), len(there), sum(each["held"] for each in there)


def agrees(made: Router, truth: Truth) -> None:
    made.check()
    assert made.book.bookings.keys() == truth.requests.keys()
    for replica, row in made.book.rows.items():
        assert tuple(made.book.sums[:, row].tolist()) == truth.loads(replica), replica


@pytest.mark.parametrize("name", COSTS)
def test_the_book_is_the_truth_after_every_call(name: str) -> None:
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
            made.first_token(key, float(step))
            if key in truth.requests:
                truth.requests[key]["waits"] = False
        elif what == "done":
            made.done(key, None, float(step))
            truth.requests.pop(key, None)
        elif what == "done late":
            replica = draw.choice([*alive, "elsewhere"])
            made.done(key, replica, float(step))
            if key in truth.requests and truth.requests[key]["replica"] == replica:
                del truth.requests[key]
        elif what == "moved" and alive:
            replica = draw.choice([*alive, "elsewhere"])
            made.moved(key, replica)
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
        made.done(key)
    assert not made.book.sums.any()
    assert not made.in_flight.sizes or not any(made.in_flight.sizes.values())
    made.check()


def test_a_choice_says_why() -> None:
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


def test_who_is_not_believed_has_no_hits() -> None:
    made = router(make_cost("robust"))
    hits = np.array([320, 0, 0], np.int64)
    choice = made.choose(ask(num_tokens=320), hits, hits, np.array([False, True, True]))
    assert choice.num_tokens == 0
    assert [each.num_tokens for each in choice.why] == [0, 0, 0]
    assert [each.is_believed for each in choice.why] == [False, True, True]


def test_only_those_named_are_chosen_and_the_shunned_last() -> None:
    made = router(make_cost("robust"))
    assert choose(made, ask("a"), [160, 0, 0], among=["replica-1", "replica-2", "nobody"]).replica != "replica-0"
    assert choose(made, ask("b"), [160, 0, 0], shunned=["replica-0"]).order[-1] == "replica-0"
    assert choose(made, ask("c"), among=["replica-1"], shunned=["replica-1"]).replica == "replica-1"
    none = choose(made, ask("d"), among=["nobody"])
    assert (none.replica, none.order, none.why) == (None, [], [])
    assert "no replica" in none.problem
    assert "d" not in made.book.bookings


class Broken(PlainCost):
    """Fails in the way that it is told."""

    def __init__(self, way: str) -> None:
        self.way = way

    def costs(self, asked: Ask, given: Candidates) -> Floats:
        if self.way == "raises":
            raise RuntimeError("no")
        return {"short": np.zeros(1), "nan": np.full(len(given.names), np.nan)}.get(
            self.way, np.zeros(len(given.names))
        )

    def sent(self, asked: Ask, replica: str) -> None:
        raise RuntimeError("no")

    def gone(self, replica: str) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("way", ["raises", "short", "nan"])
def test_a_cost_that_fails_leaves_the_choice_to_load(way: str) -> None:
    made = router(Broken(way))
    assert choose(made, ask("first")).replica == "replica-0"
    second = choose(made, ask("second"))
    assert second.replica == "replica-1"
    assert "Broken failed" in second.problem
    made.check()


def test_a_cost_that_fails_to_take_note_does_no_harm() -> None:
    made = router(Broken(""))
    assert choose(made, ask("first")).problem == ""
    assert made.drop("replica-0") == ["first"]
    made.check()


def test_a_name_stands_once() -> None:
    made = router(make_cost("robust"))
    with pytest.raises(InvalidArgument, match=r"replica is 'replica-1'; it is there already"):
        made.add("replica-1")
    assert made.replicas == ["replica-0", "replica-1", "replica-2"]
    assert made.drop("nobody") == []


def test_a_new_replica_is_neither_flooded_nor_left_out() -> None:
    made = router(make_cost("robust"))
    for number in range(90):
        choose(made, ask(f"r{number}"))
        made.done(f"r{number}")
    made.add("new")
    took = []
    for number in range(80):
        took.append(choose(made, ask(f"s{number}")).replica)
        made.done(f"s{number}")
    assert 10 <= took.count("new") <= 30


# ---------------------------------------------------------------- prefixes


def test_prefixes_know_how_much_each_has() -> None:
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


def test_a_limit_drops_the_prompts_that_were_added_first() -> None:
    prefixes = Prefixes(limit=4)
    for prompt in ([1, 2], [3, 4], [1, 2], [5, 6]):
        prefixes.add(prompt, "a")
        prefixes.check()
    assert [prefixes.lengths(prompt, {"a": 0})[0] for prompt in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    prefixes.add([7, 8, 9, 10, 11], "a")
    assert prefixes.sizes == {"a": 5}, "the newest stays, however long it is"
