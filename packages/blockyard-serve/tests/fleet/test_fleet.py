"""A fleet over real publishers: it trusts engines whose events arrive, and no event makes it raise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from blockyard import KVCacheManager, LayerGroup, LoRA, Span, StateSpec
from blockyard.config import cache_config
from blockyard.errors import InvalidArgument
from blockyard.keys import ExtraKey

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from blockyard.events import KVEventPublisher
from blockyard.routing import Fleet, make_cost
from blockyard.routing.state import LINK_TOKENS, links_of
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import ROOT

PAGE = ROOT / "docs" / "fleet.md"
PROMPT = np.arange(1, 331, dtype=np.int32)
BLOCK_SIZE = 16


class Engine:
    """A manager and its publisher: all that a router receives from an engine."""

    def __init__(
        self, num_blocks: int = 200, groups: tuple[LayerGroup, ...] = (LayerGroup(BLOCK_SIZE),), **fields: Any
    ) -> None:
        config = cache_config(num_blocks=num_blocks, groups=groups, enable_kv_cache_events=True, **fields)
        self.cache = KVCacheManager(config)
        self.publisher = KVEventPublisher(self.cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=0.02)

    @property
    def addresses(self) -> tuple[str, str]:
        return self.publisher.endpoint, self.publisher.replay_endpoint

    def answer(self, tokens: Any, keys: tuple[ExtraKey, ...] = (), num_new: int = 1) -> int:
        """Compute a prompt and decode `num_new` tokens; returns the tokens of the prompt that hit."""
        seq = self.cache.allocate(tokens, extra_keys=keys)
        num_hit = self.cache.num_computed_tokens(seq)
        while self.cache.num_tokens(seq) < len(tokens) + num_new:
            plan = self.cache.reserve([seq])
            assert plan.all_fit
            is_last = int(plan.num_computed[0] + plan.num_scheduled[0]) == self.cache.num_tokens(seq)
            self.cache.commit([seq], plan.num_scheduled, [7 if is_last else -1])
        self.cache.free(seq)
        self.publisher.publish()
        return num_hit


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine() for _ in range(3)]
    yield made
    for engine in made:
        engine.publisher.close()


class Clock:
    """Seconds that a test moves on; read beside the subscriber's own, which no test can."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def fleet(engines: list[Engine]) -> Iterator[Fleet]:
    with Fleet() as made:
        for number, engine in enumerate(engines):
            made.follow(f"engine-{number}", *engine.addresses)
        until(made, lambda: all(made.is_trusted(f"engine-{number}") for number in range(3)))
        yield made


def until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        fleet.poll()
        time.sleep(0.005)


def knows(fleet: Fleet, replica: str, num_tokens: int, prompt: Any = PROMPT) -> Callable[[], bool]:
    def condition() -> bool:
        found = fleet.mirror.match(prompt).get(replica)
        return (0 if found is None else found.num_tokens) == num_tokens

    return condition


def test_a_prompt_is_sent_to_the_replica_that_has_it(fleet: Fleet, engines: list[Engine]) -> None:
    engines[1].answer(PROMPT)
    until(fleet, knows(fleet, "engine-1", 320))
    choice = fleet.choose("request", PROMPT, max_tokens=20)
    assert (choice.replica, choice.num_tokens, choice.problem) == ("engine-1", 320, "")
    assert engines[1].answer(PROMPT) == choice.num_tokens, "what was claimed came true"
    why = {each.replica: each for each in choice.why}
    assert [why[f"engine-{number}"].num_tokens for number in range(3)] == [0, 320, 0]
    assert all(each.is_believed for each in choice.why)
    booked = fleet.router.load.assignments["request"]
    assert (booked.replica, booked.uncached, booked.held) == ("engine-1", 10, 350)
    fleet.record_first_token("request")
    fleet.finish("request", "engine-0")
    assert "request" in fleet.router.load.assignments, "a late word of another replica"
    fleet.finish("request", "engine-1")
    fleet.finish("request")
    assert not fleet.router.load.sums.any()
    fleet.check()


def test_lists_and_arrays_of_any_integers_are_the_same_prompt(fleet: Fleet, engines: list[Engine]) -> None:
    engines[2].answer(PROMPT)
    until(fleet, knows(fleet, "engine-2", 320))
    for form in (PROMPT.tolist(), tuple(PROMPT.tolist()), PROMPT.astype(np.int64), PROMPT.astype(np.uint16)):
        assert fleet.choose("request", form).num_tokens == 320
        fleet.finish("request")


def test_hit_of_a_whole_prompt_ends_before_the_block_of_its_last_token(fleet: Fleet, engines: list[Engine]) -> None:
    picture = (Span("cat", 300, 20),)
    engines[0].answer(PROMPT)
    engines[1].answer(PROMPT, picture)
    until(fleet, lambda: fleet.hits(PROMPT) == {"engine-0": 320, "engine-1": 288})
    for keys, replica in (((), "engine-0"), (picture, "engine-1")):
        choice = fleet.choose("whole", PROMPT[:320], extra_keys=keys)
        assert (choice.replica, choice.num_tokens, choice.problem) == (replica, 304, "")
        assert fleet.hits(PROMPT[:320], keys)[replica] == 304
        assert engines[int(replica[-1])].answer(PROMPT[:320], keys) == 304
        fleet.finish("whole")


WINDOW = (LayerGroup(4), LayerGroup(4, sliding_window=5))
STATE = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=16, checkpoint_every=4))


@pytest.mark.parametrize(
    ("groups", "length", "num_new"),
    [(WINDOW, 32, 8), (WINDOW[1:], 32, 3), (STATE, 40, 1)],
    ids=["window", "windows alone", "state"],
)
def test_claims_respect_windows_and_states(groups: tuple[LayerGroup, ...], length: int, num_new: int) -> None:
    """With no window or state left before the last token, a hit is far shorter than the prompt."""
    fields = {"state_checkpoints": ("every:32",)} if groups is STATE else {}
    engine, prompt = Engine(40, groups, **fields), PROMPT[:32]
    cache, num_cut = engine.cache, 0
    engine.answer(PROMPT[:length], num_new=num_new)
    with Fleet() as fleet:
        fleet.follow("engine", *engine.addresses)
        until(fleet, lambda: fleet.is_trusted("engine"))
        for number in range(40):
            lengths = range(1, 33)
            expected = [int(cache.num_cached_tokens(prompt[:n])) for n in lengths]
            num_cut += expected[-1] < 28 and int(cache.num_cached_tokens(PROMPT[:33])) == 32
            engine.publisher.publish()
            until(fleet, lambda: [fleet.hits(prompt[:n]).get("engine", 0) for n in lengths] == expected)  # noqa: B023
            assert fleet.choose("request", prompt).num_tokens == expected[-1]
            engine.answer(np.arange(1000 * number + 500, 1000 * number + 508))
    engine.publisher.close()
    assert num_cut


def test_an_adapter_has_its_own_hits(fleet: Fleet, engines: list[Engine]) -> None:
    keys = (LoRA("french"),)
    engines[0].answer(PROMPT, keys)
    until(fleet, lambda: bool(fleet.mirror.match(PROMPT, keys)))
    assert fleet.choose("plain", PROMPT).num_tokens == 0
    assert fleet.choose("french", PROMPT, extra_keys=keys).num_tokens == 320
    assert links_of(PROMPT) != links_of(PROMPT, keys)


def test_silent_replica_is_not_trusted_and_gets_one_request(engines: list[Engine]) -> None:
    with Fleet(heartbeat_timeout=0.4) as fleet:
        for number, engine in enumerate(engines):
            fleet.follow(f"engine-{number}", *engine.addresses)
        engines[1].answer(PROMPT)
        until(fleet, lambda: fleet.is_trusted("engine-1") and knows(fleet, "engine-1", 320)())
        engines[1].publisher.close()  # as a process that is killed or stopped, to those who listen
        until(fleet, lambda: not fleet.is_trusted("engine-1"))
        choices = [fleet.choose(f"r{number}", PROMPT) for number in range(9)]
        until(fleet, lambda: fleet.is_trusted("engine-0") and fleet.is_trusted("engine-2"))
        assert [choice.num_tokens for choice in choices] == [0] * 9
        assert [choice.replica for choice in choices].count("engine-1") <= 1
        alone = fleet.choose("alone", PROMPT, allowed=["engine-1"])
        assert (alone.replica, alone.num_tokens) == ("engine-1", 0)
        fleet.check()


def test_replica_without_events_gets_requests_by_load() -> None:
    with Fleet() as fleet:
        for name in ("a", "b"):
            fleet.follow(name)
        took = [fleet.choose(f"r{number}", PROMPT + 1000 * number) for number in range(10)]
        assert sorted(choice.replica or "" for choice in took) == ["a"] * 5 + ["b"] * 5
        assert not fleet.is_trusted("a")
        assert not fleet.is_trusted("nobody")


def test_a_dead_replica_leaves_with_its_requests(fleet: Fleet, engines: list[Engine]) -> None:
    engines[1].answer(PROMPT)
    until(fleet, knows(fleet, "engine-1", 320))
    assert fleet.choose("lost", PROMPT).replica == "engine-1"
    assert fleet.drop("engine-1") == ["lost"]
    assert fleet.drop("engine-1") == []
    again = fleet.choose("lost", PROMPT)
    assert again.replica in ("engine-0", "engine-2")
    assert again.num_tokens == 0
    fleet.reassign("lost", "engine-1")
    assert fleet.router.load.assignments["lost"].replica == again.replica
    fleet.check()


def test_a_restart_under_a_new_name_begins_with_nothing(fleet: Fleet, engines: list[Engine]) -> None:
    engines[1].answer(PROMPT)
    until(fleet, knows(fleet, "engine-1", 320))
    new = Engine()
    try:
        others = {"engine-0": engines[0].addresses, "engine-2": engines[2].addresses}
        fleet.sync(others | {"engine-3": new.addresses})
        assert fleet.router.replicas == ["engine-0", "engine-2", "engine-3"]
        until(fleet, lambda: fleet.is_trusted("engine-3"))
        assert fleet.choose("request", PROMPT).num_tokens == 0
        new.answer(PROMPT)
        until(fleet, knows(fleet, "engine-3", 320))
        assert fleet.choose("request", PROMPT).replica == "engine-3"
        fleet.sync(others | {"engine-3": new.addresses, "bad": ("no address", ""), "mute": None})
        assert not fleet.is_trusted("bad")
        fleet.sync({})
        assert fleet.choose("request", PROMPT).replica is None
        fleet.check()
    finally:
        new.publisher.close()


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        ("text", {}),
        (None, {}),
        ([1.5], {}),
        ([[1]], {}),
        ([-1], {}),
        ([2**31], {}),
        (object(), {}),
        ([1], {"max_tokens": -1}),
        ([1], {"max_tokens": "many"}),
        ([1], {"extra_keys": "french"}),
        ([1], {"extra_keys": [3]}),
    ],
)
def test_bad_input_is_a_problem_not_an_exception(tokens: Any, more: dict[str, Any]) -> None:
    with Fleet() as fleet:
        fleet.follow("a")
        choice = fleet.choose("bad", tokens, **more)
        assert (choice.replica, choice.num_tokens) == ("a", 0)
        assert "load alone decided" in choice.problem
        fleet.finish("bad")
        fleet.check()
        assert not fleet.router.load.sums.any()


class Unhashable:
    """Its hash fails as no list's does, and it is equal to nothing."""

    def __hash__(self) -> int:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


@pytest.mark.parametrize("name", [[], {}, Unhashable(), ([],)])
def test_invalid_request_name_is_unknown(name: Any) -> None:
    with Fleet() as fleet:
        fleet.follow("a")
        assert fleet.choose("request", PROMPT).replica == "a"
        choice = fleet.choose(name, PROMPT)
        assert choice.replica is None
        assert choice.problem.startswith("request is ")
        fleet.record_first_token(name)
        fleet.finish(name)
        fleet.finish("request", name)
        fleet.reassign(name, "a")
        fleet.reassign("request", name)
        assert fleet.drop(name) == []
        assert not fleet.is_trusted(name)
        fleet.check()
        assert fleet.router.load.sums.any(), "the request is booked still"
        assert fleet.choose("session", PROMPT, session=name).replica == "a"
        assert fleet.choose("among", PROMPT, allowed=[name]).replica is None
        assert fleet.choose("among", PROMPT, allowed=[name, "a"]).replica == "a"
        for request in ("request", "session", "among"):
            fleet.finish(request)
        fleet.check()
        assert not fleet.router.load.sums.any()


def interrupted() -> Iterator[str]:
    yield "a"
    raise ZeroDivisionError


@pytest.mark.parametrize("among", [5, object(), interrupted()])
def test_unreadable_allowed_names_choose_no_replica(among: Any) -> None:
    with Fleet() as fleet:
        fleet.follow("a")
        choice = fleet.choose("request", PROMPT, allowed=among)
        assert choice.replica is None
        assert choice.problem.startswith("allowed is ")
        fleet.check()
        assert not fleet.router.load.sums.any()


def test_an_empty_prompt_or_fleet_is_no_exception() -> None:
    with Fleet() as fleet:
        assert fleet.choose("early", PROMPT).replica is None
        fleet.follow("a")
        assert fleet.choose("empty", []).replica == "a"
        fleet.check()


def test_bad_set_ups_are_refused(engines: list[Engine]) -> None:
    with pytest.raises(InvalidArgument, match=r"heartbeat_timeout is -1\.0; it must be above 0"):
        Fleet(heartbeat_timeout=-1.0)
    with Fleet() as fleet:
        fleet.follow("a", *engines[0].addresses)
        with pytest.raises(InvalidArgument, match=r"replica is 'a'; a replica of this name exists"):
            fleet.follow("a")
        with pytest.raises(InvalidArgument, match="endpoint is 'no address'"):
            fleet.follow("b", "no address", "")
        assert fleet.router.replicas == ["a"]
        fleet.check()
    fleet.close()
    assert fleet.choose("late", PROMPT).num_tokens == 0


def test_choice_polls_only_after_5_ms() -> None:
    clock = Clock()
    with Fleet(clock=clock) as fleet:
        fleet.follow("a")
        reads = []
        fleet._subscriber.poll = lambda timeout: reads.append(timeout) or 0  # type: ignore[method-assign, func-returns-value]
        for number in range(3):
            fleet.choose(f"r{number}", [1])
        first = len(reads)
        clock.ahead += 1.0
        fleet.choose("later", [1])
        assert len(reads) == first + 1


def test_choices_read_a_fifth_of_the_time_at_most_and_every_50_ms_at_least() -> None:
    now = [0.0]
    with Fleet(clock=lambda: now[0]) as fleet:
        fleet.follow("a")
        reads = []

        def read_slowly(timeout: float) -> int:
            now[0] += took
            reads.append(timeout)
            return 0

        fleet._subscriber.poll = read_slowly  # type: ignore[method-assign]
        for took, pause in ((0.0, 0.005), (0.002, 0.008), (0.01, 0.04), (1.0, 0.05)):
            now[0] += 1.0
            for ahead, is_read in ((0.0, True), (0.9 * pause, False), (0.2 * pause, True)):
                now[0] += ahead
                reads.clear()
                fleet.choose("r", [1])
                assert bool(reads) is is_read, (took, ahead)


def test_equal_prompts_of_a_cold_burst_go_together(fleet: Fleet) -> None:
    burst = np.arange(5000, 5000 + 8 * LINK_TOKENS, dtype=np.int32)
    took = {fleet.choose(f"r{number}", burst).replica for number in range(5)}
    assert len(took) == 1


def test_every_choice_of_a_load_claims_what_the_engine_has(fleet: Fleet, engines: list[Engine]) -> None:
    """Pools of 200 blocks overflow here, so evictions are told too."""
    fleet.router.cost = make_cost("power-of-two", 3)
    draw = np.random.default_rng(5)
    by_name = {f"engine-{number}": engine for number, engine in enumerate(engines)}
    systems = [draw.integers(0, 1000, 96, dtype=np.int32) for _ in range(4)]
    num_claimed = 0
    for number in range(80):
        own = draw.integers(0, 1000, BLOCK_SIZE * int(draw.integers(2, 56)) + 5, dtype=np.int32)
        prompt = np.concatenate([systems[number % 4], own])
        choice = fleet.choose(f"r{number}", prompt)
        assert choice.replica is not None
        assert by_name[choice.replica].answer(prompt) == choice.num_tokens
        num_claimed += choice.num_tokens
        engine = by_name[choice.replica]
        until(fleet, knows(fleet, choice.replica, engine.cache.num_cached_tokens(prompt), prompt))
        fleet.finish(f"r{number}")
    assert num_claimed > 50 * 96
    assert any(engine.cache.stats().num_evicted_blocks for engine in engines)


def test_late_fleet_knows_everything_once_it_trusts(engines: list[Engine]) -> None:
    """While the engines compute and evict, it claims nothing before it trusts them, and everything afterwards."""
    rng = np.random.default_rng(5)
    kept = [rng.integers(0, 999, 200, dtype=np.int32) for _ in engines]

    def compute(number: int) -> None:
        engines[number % 3].answer(rng.integers(0, 999, rng.integers(40, 400), dtype=np.int32))
        engines[number % 3].answer(kept[number % 3])

    for number in range(60):
        compute(number)
    with Fleet(heartbeat_timeout=3600.0) as late:
        for number, engine in enumerate(engines):
            late.follow(f"engine-{number}", *engine.addresses)
        first, deadline = None, time.monotonic() + PATIENCE_SECONDS
        for number in range(10**6):
            compute(number)
            choice = late.choose("request", kept[number % 3])
            is_seeing = all(each.is_believed for each in choice.why)
            if not is_seeing:
                assert first is None, f"choice {number} was blind, and choice {first} was not"
                assert all(each.num_tokens == 0 for each in choice.why if not each.is_believed)
                assert time.monotonic() < deadline
            elif first is None:
                first = number
            elif number > first + 300:
                break
        for number, engine in enumerate(engines):
            for prompt in kept:
                until(late, knows(late, f"engine-{number}", engine.cache.num_cached_tokens(prompt), prompt))


def test_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(compile(source, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "engine-1 320 of 330\n"
