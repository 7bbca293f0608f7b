"""Where states are kept and which go first, without a manager: against a slow reference, and a simulator's figures."""

from __future__ import annotations

import random

import pytest
from librt.vecs import vec
from mypy_extensions import i64

from blockyard import InvalidArgument
from blockyard.core.policies.states.ages import NUM_AGES, AgeCounts
from blockyard.core.policies.states.checkpoint import BRANCH, OUTPUT_END, Checkpoint
from blockyard.core.policies.states.checkpoint_rules import CheckpointRules
from blockyard.core.policies.states.orders import FIRST_OVER, NUM_CLASSES, LearnedOrder, make_order
from blockyard.core.policies.states.registry import CheckpointRegistry
from blockyard.core.simulation.state_run import StateRun
from blockyard_testing import seeds
from blockyard_testing.state_loads import BLOCK, Keys, Request, chats, pattern

DEFAULT = ("branch", "ends", "pow2")
ENDS = ("branch", "ends")


def parting(prompt: list[int], other: list[int]) -> int:
    """Whole blocks in which two prompts begin alike, in tokens."""
    alike = 0
    while alike < min(len(prompt), len(other)) and prompt[alike] == other[alike]:
        alike += 1
    return min(alike, len(prompt) - 1, len(other) - 1) // BLOCK * BLOCK


def replay(
    run: StateRun, requests: list[Request], *, tells: bool = False, queue: int = 0, checks: int = 0
) -> list[int]:
    keys, hits = Keys(), []
    for number, request in enumerate(requests):
        waiting = requests[number + 1 : number + 1 + queue]
        hits.append(
            run.request(
                keys.of(request.prompt + request.output),
                len(request.prompt),
                len(request.prompt) + len(request.output),
                request.requested if tells else [],
                sorted({parting(request.prompt, other.prompt) for other in waiting} - {0}),
            )
        )
        if checks and number % checks == 0:
            run.registry.check()
    run.registry.check()
    return hits


# ---------------------------------------------------------------- the pattern of vllm#45238


@pytest.mark.parametrize(("shared", "unique"), [(1600, 600), (1500, 700)])
def test_the_second_request_hits_half_and_the_third_all(shared: int, unique: int) -> None:
    run = StateRun("index", DEFAULT, 3144, 400_000)
    full = shared // BLOCK * BLOCK
    assert replay(run, pattern(shared, unique)) == [0, 1024] + [full] * 62


@pytest.mark.parametrize("kind", ["requested", "waiting"])
def test_told_or_queued_all_is_hit_from_the_second(kind: str) -> None:
    run = StateRun("index", DEFAULT, 3144, 400_000)
    hits = replay(run, pattern(1500, 700), tells=kind == "requested", queue=16 if kind == "waiting" else 0)
    assert hits == [0] + [1488] * 63


def test_eight_in_flight_hit_all_from_the_tenth() -> None:
    run = StateRun("index", DEFAULT, 3144, 400_000, in_flight=8)
    assert replay(run, pattern(1600, 600)) == [0] * 8 + [1024] + [1600] * 55


@pytest.mark.parametrize(
    ("places", "hits"),
    [
        (("last",), [0] * 64),
        (("every:512",), [0] + [1536] * 63),
        (("branch",), [0, 0] + [1600] * 62),
        (("ends", "branch"), [0, 0] + [1600] * 62),
        (("pow2",), [0] + [1024] * 63),
    ],
)
def test_what_each_rule_alone_hits(places: tuple[str, ...], hits: list[int]) -> None:
    assert replay(StateRun("lru", places, 3144, 400_000), pattern(1600, 600)) == hits


@pytest.mark.parametrize(
    ("order", "places", "message"),
    [
        ("indx", DEFAULT, "order is 'indx'; it must be index or lru"),
        ("lru", ("jnction",), "places is .*; it must be a tuple of names of last, branch"),
    ],
)
def test_a_misspelt_rule_is_refused(order: str, places: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StateRun(order, places, 400, 1000)


# ---------------------------------------------------------------- a slow reference


class SlowRegistry:
    """Blocks and states in sets; least recently used states go, and what only they needed with them."""

    def __init__(self, places: tuple[str, ...], state_tokens: int, budget: int) -> None:
        self.places = CheckpointRules(places, BLOCK)
        self.state_tokens = state_tokens
        self.budget = budget
        self.known: set[tuple[int, ...]] = set()
        self.states: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def use(self, state: tuple[int, ...]) -> None:
        self.clock += 1
        self.states[state] = self.clock

    def held(self) -> int:
        under = {state[:end] for state in self.states for end in range(BLOCK, len(state) + 1, BLOCK)}
        return BLOCK * len(under) + self.state_tokens * len(self.states)

    def request(self, request: Request) -> int:
        everything = tuple(request.prompt + request.output)
        last = (len(request.prompt) - 1) // BLOCK * BLOCK
        total = len(everything) // BLOCK * BLOCK
        known = max(end for end in range(0, last + 1, BLOCK) if end == 0 or everything[:end] in self.known)
        hit = max(end for end in range(0, last + 1, BLOCK) if end == 0 or everything[:end] in self.states)
        if hit:
            self.use(everything[:hit])
        self.known |= {everything[:end] for end in range(BLOCK, total + 1, BLOCK)}
        self.places.choose(hit, known, last, total, [], [])
        for position in sorted(self.places.positions, reverse=True):
            if everything[:position] not in self.states:
                self.use(everything[:position])
        if hit:
            self.use(everything[:hit])
        while self.held() > self.budget:
            del self.states[min(self.states, key=self.states.__getitem__)]
        return hit


@pytest.mark.parametrize("places", [DEFAULT, ENDS, ("last",), ("every:64", "branch")])
def test_least_recently_used_is_the_reference_hit_for_hit(places: tuple[str, ...]) -> None:
    draw = random.Random(f"{seeds.run_seed()} {places}")
    for _ in range(seeds.draws(12, 1)):
        requests = chats(draw.randrange(2**30), 60)
        state_tokens, budget = draw.choice([1, 100, 800]), draw.choice([3000, 9000, 40_000])
        slow = SlowRegistry(places, state_tokens, budget)
        run = StateRun("lru", places, state_tokens, budget, memory=1000)
        assert replay(run, requests, checks=7) == [slow.request(request) for request in requests]


@pytest.mark.parametrize("order", ["index", "lru"])
def test_books_balance_with_little_memory_and_many_in_flight(order: str) -> None:
    draw = random.Random(f"{seeds.run_seed()} {order}")
    for _ in range(seeds.draws(12, 1)):
        budget = draw.choice([1000, 5000, 20_000])
        run = StateRun(order, DEFAULT, draw.choice([1, 400]), budget, memory=draw.choice([0, 1, 4]), in_flight=5)
        replay(run, chats(draw.randrange(2**30), 120), tells=True, queue=3, checks=11)
        assert run.registry.num_held <= budget


# ---------------------------------------------------------------- a simulator's figures

#: (seed, tokens of a state, budget) → tokens hit and states written by the simulator that the rules were found with,
#: an independent program: of lru and index, then index with waiting and requested, lru at last and at every:512.
SIMULATED = {
    (1, 100, 6000): [(226528, 930), (263264, 600), (266736, 640), (230304, 398), (233984, 161)],
    (1, 100, 20000): [(379936, 787), (380608, 804), (381904, 777), (354512, 395), (269824, 91)],
    (1, 800, 12000): [(178608, 989), (296448, 410), (299776, 422), (241728, 398), (237568, 154)],
    (1, 800, 50000): [(372480, 800), (378560, 769), (379696, 724), (350464, 396), (270336, 90)],
    (2, 100, 6000): [(183120, 917), (200736, 670), (204256, 691), (188368, 399), (150016, 118)],
    (2, 100, 20000): [(275568, 802), (271952, 741), (273312, 735), (253280, 399), (166400, 86)],
    (2, 800, 12000): [(142512, 988), (212064, 470), (210512, 474), (174672, 399), (150528, 117)],
    (2, 800, 50000): [(265136, 819), (271280, 715), (272064, 701), (252576, 399), (166400, 86)],
}


@pytest.mark.parametrize("cell", SIMULATED, ids=str)
def test_the_simulators_figures(cell: tuple[int, int, int]) -> None:
    seed, state_tokens, budget = cell
    requests = chats(seed, 400)
    num_tokens = sum(len(request.prompt) for request in requests)
    rules = [("lru", ENDS), ("index", DEFAULT), ("index", DEFAULT), ("lru", ("last",))]
    for number, (order, places) in enumerate([*rules, ("lru", ("every:512",))]):
        run = StateRun(order, places, state_tokens, budget)
        hits = sum(replay(run, requests, tells=number == 2, queue=8 if number == 2 else 0))
        wanted, _ = SIMULATED[cell][number]
        # The two remember hashes by blocks and by runs of blocks, and what is learned turns on single requests.
        allowed = {"index": 0.02, "lru": 0}[order] * num_tokens
        assert abs(hits - wanted) <= allowed, (order, places, number)


# ---------------------------------------------------------------- places, and what is forgotten


def test_a_position_is_named_once_by_the_first_rule() -> None:
    places = CheckpointRules(("branch", "ends", "pow2", "every:512"), BLOCK)
    places.choose(0, 512, 1024, 1100, [512, 1030], [512])
    kinds = dict(zip(places.positions, places.kinds, strict=True))
    assert kinds == {512: 4, 1088: 2, 1024: 1, 256: 5}


def test_positions_are_multiples_of_the_alignment_after_the_hit() -> None:
    places = CheckpointRules(("branch", "pow2"), 64)
    places.choose(256, 1000, 2000, 0, [100, 300], [])
    assert sorted(places.positions) == [512, 960, 1024]


def test_a_request_that_outlives_its_memory_keeps_nothing() -> None:
    registry = CheckpointRegistry(make_order("index", 10), BLOCK, 4)
    keys = Keys()
    first = chats(3, 1)[0]
    array = keys.of(first.prompt)
    record = registry.begin_request(vec[i64](array), len(array), len(first.prompt))
    for request in pattern(64, 64, 8):
        other = keys.of([token + 10**6 for token in request.prompt])
        registry.begin_request(vec[i64](other), len(other), 128)
    assert registry.add(record, BLOCK, 0) == 0
    registry.check()


def test_classes_that_nothing_was_seen_of_are_what_is_assumed_of_all() -> None:
    """One of them is learned and copied; here each is held against the formula."""
    order = LearnedOrder(400)
    states = [Checkpoint(number, 1, 160, kind) for number, kind in ((1, BRANCH), (2, OUTPUT_END))]
    states[1].num_hits = 1
    for now in range(1, 40):
        for state in states:
            order.note(state, now % 3 == 0, now)
            state.last_used = now
    ages = AgeCounts([Checkpoint(0, 0, 0, 0), *states], int(order.num_cells))
    for state in states:
        ages.put(state, order.cell(state, 40))
    order.learn(ages, 40)
    seen = {int(order._row(state)) for state in states}
    unseen = [row for row in range(0, int(NUM_CLASSES * NUM_AGES), int(NUM_AGES)) if row not in seen]
    first = order._chance[unseen[0]]
    assert 0 < first < 1
    first_over = int(FIRST_OVER * NUM_AGES)
    for rows, chance in (
        ([row for row in unseen if row < first_over], first),
        ([row for row in unseen if row >= first_over], first / 10),  # of sessions that are said to be over
    ):
        for row in rows:
            chances = [order._chance[row + age] for age in range(int(NUM_AGES))]
            assert chances == pytest.approx([chance * 0.9**age for age in range(int(NUM_AGES))])
            assert [order._index[row + age] for age in range(int(NUM_AGES))] == [
                order._index[rows[0] + age] for age in range(int(NUM_AGES))
            ]
    assert all(order._chance[row] != pytest.approx(first) for row in seen)
