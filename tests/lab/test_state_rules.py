"""Rules for states against the bound that no cache passes, and a schedule that knows the future."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from benchmarks.state_rules.__main__ import main, managed
from benchmarks.state_rules.bound import StateBound, StateLoad, read_state_load
from benchmarks.state_rules.rules import SCHEDULE, STATE_RULES, parse_state_rule, rule_hits

from blockyard import InvalidArgument
from blockyard_lab import StateRun, TraceRequest
from blockyard_lab.policy_names import OPTIMUM
from blockyard_lab.traces import open_trace
from blockyard_testing.lab_reference import ListedTrace, prefix_trace
from blockyard_testing.seeds import draws, run_seed

SIZE = 4


def small_load(draw: random.Random) -> StateLoad:
    """Prompts of a few blocks that grow like branches of a tree."""
    requests = prefix_trace(draw.randrange(2**30), 6, branches=2, longest=4)
    keys = [np.array(request, np.int64) + 1 for request in requests]
    prompts = np.array([len(part) * SIZE + draw.randrange(SIZE) for part in keys])
    sessions = np.arange(1, 1 + len(keys))
    return StateLoad("small", SIZE, np.concatenate(keys), np.cumsum([0, *map(len, keys)]), prompts, sessions)


def best_of_all(load: StateLoad, state_tokens: int, budget: int) -> int:
    """Every choice of hits at every block, and of these that fit the most: a state from the last that could have it."""
    count = len(load.prompts)
    keys = [load.keys_of(number).tolist() for number in range(count)]
    places = []
    for number in range(count):
        known = 0
        while known < (load.prompts[number] - 1) // SIZE and any(keys[number][known] in old for old in keys[:number]):
            known += 1
        places.append(range(known + 1))
    best = 0
    for hits in itertools.product(*places):
        if sum(hits) * SIZE > best and fits(keys, hits, state_tokens, budget):
            best = sum(hits) * SIZE
    return best


def fits(keys: list[list[int]], hits: tuple[int, ...], state_tokens: int, budget: int) -> bool:
    """Whether what these hits need fits after every request."""
    held: list[set[int]] = [set() for _ in keys]
    states: list[set[int]] = [set() for _ in keys]
    for number, hit in enumerate(hits):
        for place in range(hit):
            since = max(old for old in range(number) if keys[number][place] in keys[old])
            for slot in range(since, number):
                held[slot].add(keys[number][place])
        if hit:
            end = keys[number][hit - 1]
            makers = [old for old in range(number) if end in keys[old] and hits[old] <= hit]
            if not makers:
                return False
            for slot in range(max(makers), number):
                states[slot].add(end)
    return all(
        len(blocks) * SIZE + len(kept) * state_tokens <= budget for blocks, kept in zip(held, states, strict=True)
    )


def test_the_bound_is_above_the_best_of_all_choices_and_the_schedule_is_one_of_them() -> None:
    draw = random.Random(run_seed())
    num_loads = reached = 0
    while num_loads < draws(60, 6) or reached == 0:
        num_loads += 1
        load = small_load(draw)
        state_tokens, budget = draw.choice([1, 4, 20]), draw.choice([8, 20, 40, 100])
        best, bound = best_of_all(load, state_tokens, budget), StateBound(load)
        most, prices = bound.at(state_tokens, budget)
        found = bound.schedule(state_tokens, budget, prices)
        assert found <= best <= most <= bound.ideal, (load, state_tokens, budget)
        reached += found == best


@pytest.mark.parametrize("state_tokens", [16, 400])
def test_no_rule_passes_the_bound_and_the_schedule_passes_all_rules(state_tokens: int) -> None:
    load = read_state_load(open_trace(f"chat:requests=200,seed={run_seed() % 1000}"))
    rules = ["lru:last", "lru:branch+ends", "index:branch+ends+pow2", "lru:every:64+branch"]
    sizes = [load.working_set // 8, load.working_set, 4 * load.working_set]
    hits = rule_hits(load, rules, sizes, state_tokens)
    most, found = hits[OPTIMUM], hits[SCHEDULE]
    assert (found <= most).all()
    assert most[-1] == StateBound(load).ideal
    for rule in rules:
        assert (hits[rule] <= most).all(), rule
        run = StateRun(*parse_state_rule(rule), state_tokens, sizes[1] * 16)
        own = [run.request(load.keys_of(n), int(t), int(t), [], []) for n, t in enumerate(load.prompts)]
        assert hits[rule][1] == sum(own)
    assert (found[1:] >= max(hits[rule][1] for rule in rules)).all()


def test_a_trace_of_hash_ids_keeps_its_own_blocks_that_are_full() -> None:
    requests = [TraceRequest(0.0, 17, 1, np.array([5, 9])), TraceRequest(0.0, 32, 1, np.array([5, 8]))]
    load = read_state_load(ListedTrace(requests, 16))
    assert (load.tokens_a_block, load.keys.tolist(), load.starts.tolist()) == (16, [1, 1, 2], [0, 1, 3])
    assert (load.sessions.tolist(), load.last_turns()) == ([1, 1], {1})


@pytest.mark.parametrize("order", ["lru", "index"])
def test_sessions_that_say_that_they_are_over_hit_more(order: str) -> None:
    load = read_state_load(open_trace("chat:requests=400,seed=11"))
    rules = [f"{order}:branch+ends", f"{order}:branch+ends+over"]
    sizes = [load.working_set // 8, load.working_set // 4]
    found = rule_hits(load, rules, sizes, 40)
    assert (found[rules[1]] > found[rules[0]]).all()
    assert (found[rules[1]] <= found[OPTIMUM]).all()


CHAT = "chat:requests=60,seed=3"


def test_the_table_has_a_line_for_each_rule_and_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--state-tokens", "40", "--rules", "lru:last,index:ends", "--blocks", "100,1k"]
    monkeypatch.setattr("sys.argv", ["state_rules", CHAT, *options])
    main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[:2] for line in lines[1:]] == [[r, b] for r in ("lru:last", "index:ends") for b in ("100", "1,000")]
    for line in lines[1:]:
        hit_rate, best_found, optimum = map(float, line[2:])
        assert 0 <= hit_rate <= optimum
        assert best_found <= optimum


def test_the_manager_replays_states_below_the_bound() -> None:
    load = read_state_load(open_trace(CHAT))
    rules = STATE_RULES.split(",")
    bound = rule_hits(load, rules, [load.working_set], 40)[OPTIMUM][0]
    runs = {rule: managed(load, rule, 40, load.working_set) for rule in rules}
    assert all(0 <= run["hits"] <= bound for run in runs.values())
    assert runs["index:branch+ends+pow2"]["hits"] > runs["lru:last"]["hits"] > 0


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("clock:last", "state rules have 'clock:last'; .* one of index, lru"),
        ("lru:middle", "state rule 'lru:middle' is"),
    ],
)
def test_bad_rules_are_named(rule: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_state_rule(rule)


def test_rates_need_rules_and_sizes() -> None:
    load = read_state_load(open_trace(CHAT))
    with pytest.raises(InvalidArgument, match="rules has 0 names"):
        rule_hits(load, [], [10], 4)
