"""Every cost keeps the contract, and each decides by its own rule."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from blockyard.errors import InvalidArgument
from blockyard.routing import Candidates, make_cost
from blockyard.routing.costs import COSTS
from blockyard.routing.costs.by_trees import Preble, RayAffinity
from blockyard_testing.fleet_asks import LINK, ask, candidates, choose, router
from blockyard_testing.seeds import draws, run_seed

every_cost = pytest.mark.parametrize("name", COSTS)


def drawn(draw: random.Random) -> Candidates:
    count = draw.randrange(1, 7)
    tokens = [draw.randrange(0, 160) for _ in range(count)]
    requests = [draw.choice([0, 0, 3, 200]) for _ in range(count)]
    return candidates(
        count,
        hits=tokens,
        gpu_hits=[draw.randrange(0, each + 1) for each in tokens],
        coming=[draw.choice([0, 80]) for _ in range(count)],
        requests=requests,
        waiting=[draw.randrange(0, each + 1) for each in requests],
        uncached=[100 * each for each in requests],
        held=[500 * each for each in requests],
        work=[draw.random() * 1e6 for _ in range(count)],
        seconds_a_token=[draw.choice([1e-5, 1e-3]) for _ in range(count)],
    )


@every_cost
def test_costs_are_numbers_and_leave_their_arguments_unchanged(name: str) -> None:
    draw = random.Random(run_seed())
    cost = make_cost(name, 7)
    for number in range(draws(150, 50)):
        asked = ask(f"r{number % 5}", draw.choice([1, 160, 5000]), session=draw.choice(["", "s"]), now=float(number))
        given = drawn(draw)
        before = copy.deepcopy(given)
        found = cost.costs(asked, given)
        assert found.shape == (len(given.names),)
        assert not np.isnan(found).any()
        assert np.isfinite(found).any()
        assert given.names == before.names
        for column in ("hits", "gpu_hits", "coming", "waiting", "uncached", "requests", "held", "work"):
            assert np.array_equal(getattr(given, column), getattr(before, column)), column
        cost.record(asked, given.names[int(found.argmin())])
        if number % 10 == 9:
            cost.forget("replica-0")


@every_cost
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    def choices() -> list[str | None]:
        made = router(make_cost(name, 3))
        return [choose(made, ask(f"r{number % 7}", now=float(number))).replica for number in range(30)]

    assert choices() == choices()


@every_cost
def test_removed_replica_is_never_chosen(name: str) -> None:
    made = router(make_cost(name))
    for number in range(6):
        choose(made, ask(f"r{number}", session="same", links=["a", "b"]))
    made.drop("replica-1")
    later = {choose(made, ask(f"later{number}", session="same", links=["a", "b"])).replica for number in range(12)}
    assert later <= {"replica-0", "replica-2"}
    made.check()


def test_unknown_cost_is_rejected_with_the_known_names() -> None:
    with pytest.raises(InvalidArgument, match=r"router is 'best'; it must be one of robust, dynamo"):
        make_cost("best")


# ---------------------------------------------------------------- each one's own rule


def best(name: str, given: Candidates, num_tokens: int = 1000) -> int:
    return int(make_cost(name).costs(ask(num_tokens=num_tokens), given).argmin())


def test_dynamo_adds_tokens_to_compute_and_tokens_held() -> None:
    assert best("dynamo", candidates(2, hits=[900, 0], held=[0, 0])) == 0
    assert best("dynamo", candidates(2, hits=[900, 0], held=[901, 0])) == 1
    assert best("dynamo", candidates(2, hits=[900, 0], uncached=[901, 0])) == 1
    assert best("dynamo", candidates(2, hits=[800, 640], gpu_hits=[0, 640])) == 1, (
        "0.75 for what is in the host's memory"
    )


def test_lmetric_multiplies_tokens_to_compute_with_requests() -> None:
    assert best("lmetric", candidates(2, hits=[900, 0], requests=[8, 0])) == 0
    assert best("lmetric", candidates(2, hits=[900, 0], requests=[10, 0])) == 1


def test_llmd_keeps_replicas_with_four_fifths_of_the_prompt_unless_far_behind() -> None:
    assert best("llm-d", candidates(2, hits=[800, 799], held=[10**6, 0])) == 0
    assert best("llm-d", candidates(2, hits=[799, 0], held=[10**6, 0])) == 1
    late = candidates(2, hits=[800, 0], held=[10**6, 0], uncached=[180_801, 0])
    assert best("llm-d", late) == 1, "18 s at 1e-4 s a token"


def test_production_stack_weighs_the_matched_share_against_load_above_the_mean() -> None:
    assert best("production-stack", candidates(2, hits=[500, 0], requests=[12, 10])) == 0
    assert best("production-stack", candidates(2, hits=[100, 0], requests=[12, 10])) == 1


@pytest.mark.parametrize("name", ["sglang", "ray-affinity", "aibrix", "preble"])
def test_costs_with_history_send_equal_prompts_to_one_replica(name: str) -> None:
    made = router(make_cost(name))
    first = choose(made, ask("first")).replica
    made.finish("first")
    for number in range(3):
        assert choose(made, ask(f"r{number}", links=ask("first").links)).replica == first
        made.finish(f"r{number}")


def test_sglang_sends_a_short_match_to_the_smallest_tree_and_leaves_a_long_queue() -> None:
    cost = make_cost("sglang")
    cost.record(ask("long", 1600), "replica-0")
    cost.record(ask("short", 320), "replica-1")
    new = ask("new", 320)
    assert cost.costs(new, candidates(2)).argmin() == 1
    known = ask("known", 1600, links=ask("long", 1600).links)
    assert cost.costs(known, candidates(2, requests=[64, 0])).argmin() == 0
    assert cost.costs(known, candidates(2, requests=[65, 0])).argmin() == 1


def test_aibrix_leaves_a_match_that_is_a_deviation_above_the_mean() -> None:
    cost = make_cost("aibrix")
    cost.record(ask("first"), "replica-0")
    again = ask("again", links=ask("first").links)
    assert cost.costs(again, candidates(3, requests=[1, 1, 1])).argmin() == 0
    assert cost.costs(again, candidates(3, requests=[3, 0, 0])).argmin() == 1
    assert cost.costs(again, candidates(2, requests=[1, 0])).argmin() == 0, "a deviation above, but not beyond"


def test_preble_explores_by_the_load_of_three_minutes() -> None:
    cost = Preble()
    cost.record(ask("busy", 8000, now=0.0), "replica-0")
    half = ask("half", 160, links=[*ask("busy").links[:5], *"abcde"], now=1.0)
    assert cost.costs(half, candidates(2)).argmin() == 1, "half of it matches, which is not more than is missing"
    late = ask("late", 160, links=half.links, now=181.0)
    assert cost.costs(late, candidates(2)).argmin() == 0, "the load has left the window"


def test_ray_affinity_ignores_matches_beyond_the_queue_threshold() -> None:
    cost = RayAffinity(0, 4)
    cost.record(ask("first"), "replica-0")
    again = ask("again", links=ask("first").links)
    assert cost.costs(again, candidates(2, requests=[4, 0])).argmin() == 0
    assert cost.costs(again, candidates(2, requests=[5, 0])).argmin() == 1


def test_few_sessions_move_when_a_replica_is_removed() -> None:
    cost = make_cost("session-hash")

    def places(names: int) -> list[int]:
        given = candidates(names)
        return [int(cost.costs(ask(session=f"s{number}"), given).argmin()) for number in range(300)]

    before, after = places(4), places(3)
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 3)
    assert min(before.count(replica) for replica in range(4)) > 40


def test_round_robin_takes_turns() -> None:
    made = router(make_cost("round-robin"))
    assert [choose(made, ask(f"r{number}")).replica for number in range(4)] == [
        "replica-0",
        "replica-1",
        "replica-2",
        "replica-0",
    ]


# ---------------------------------------------------------------- ours


def test_an_idle_fleet_sends_a_prompt_to_its_longest_hit() -> None:
    assert best("robust", candidates(3, hits=[100, 900, 300])) == 1


def test_a_queue_outweighs_a_hit_where_nobody_else_waits_for_the_tokens() -> None:
    queue = candidates(2, hits=[100, 0], uncached=[800, 0], requests=[1, 0], waiting=[1, 0])
    assert best("robust", queue) == 1
    crowd = candidates(2, hits=[100, 0], uncached=[10_800, 10_000], requests=[11, 10], waiting=[11, 10])
    assert best("robust", crowd) == 0, "the busier all are, the more a miss costs: no death spiral"


def test_a_cold_burst_of_equal_prompts_stays_together() -> None:
    made = router(make_cost("robust"))
    took = [choose(made, ask(f"r{number}", 4000, links=ask("burst", 4000).links)).replica for number in range(10)]
    assert took == [took[0]] * 10
    assert made.load.sums[1].sum() <= 4000 + 9 * LINK, "the others wait for the first one's blocks"


def test_hot_prefix_is_copied_once_its_replica_has_had_its_share() -> None:
    made = router(make_cost("robust"))
    prefix = ask("hot", 800).links
    holders, took = {"replica-0"}, []
    for number in range(200):
        asked = ask(f"r{number}", 1600, links=[*prefix, *((number, place) for place in range(50))])
        hits = [800 if name in holders else 0 for name in made.replicas]
        choice = choose(made, asked, hits)
        assert choice.replica is not None
        holders.add(choice.replica)
        took.append(choice.replica)
        made.finish(asked.name)
    assert took[0] == "replica-0"
    assert holders == set(made.replicas)
    counts = [took.count(name) for name in made.replicas]
    assert max(counts) <= 1.2 * 200 / 3, counts
    changes = sum(1 for number, name in enumerate(took) if name not in took[:number])
    assert changes == 3, "each copy is made once"


def test_no_replica_starves_and_a_slow_one_gets_less() -> None:
    made = router(make_cost("robust"))
    now, busy = 0.0, dict.fromkeys(made.replicas, 0.0)
    counts = dict.fromkeys(made.replicas, 0)
    for number in range(600):
        length = 500 + 997 * number % 1000
        choice = choose(made, ask(f"r{number}", length, now=now))
        assert choice.replica is not None
        counts[choice.replica] += 1
        seconds = length * (4e-4 if choice.replica == "replica-2" else 1e-4)
        begin = max(busy[choice.replica], now)
        busy[choice.replica] = begin + seconds
        made.record_first_token(f"r{number}", begin + seconds)
        made.finish(f"r{number}", None, begin + seconds)
        now += 0.2
    assert 0 < 2 * counts["replica-2"] < min(counts["replica-0"], counts["replica-1"])
