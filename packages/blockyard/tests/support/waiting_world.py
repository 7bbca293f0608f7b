"""Random programs with a queue of waiting requests, whose every answer is compared with the manager's."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import blockyard
from blockyard import CacheSalt
from blockyard_testing import states_world
from blockyard_testing.world import World
from blockyard_testing.world_memory import Seq

from .flight_world import FlightWorld
from .tenant_world import TenantWorld

#: Requests that wait at a time, at most.
MOST_WAITING = 12


class Waiters:
    """The requests that wait for a cache, and what `allocate` would be given for each."""

    def __init__(self, cache: Any, choose: random.Random) -> None:
        self.cache = cache
        self.choose = choose
        self.queue = cache.waiting()
        self.asked: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.arrivals: dict[int, float] = {}
        self.num_answers = 0
        self.num_joining = 0
        self.num_hits = 0

    def add(self, tokens: list[int], given: dict[str, Any]) -> None:
        if len(self.asked) >= MOST_WAITING:
            self.remove(self.choose.choice(list(self.asked)))
        arrived = float(self.choose.randrange(5))
        ticket = self.queue.add(tokens, arrived=arrived, **given)
        assert ticket > max(self.asked, default=0)
        self.asked[ticket] = tokens, given
        self.arrivals[ticket] = arrived

    def remove(self, ticket: int) -> None:
        self.queue.remove(ticket)
        del self.asked[ticket], self.arrivals[ticket]

    def any(self) -> int | None:
        return self.choose.choice(list(self.asked)) if self.asked else None

    def verify(self) -> None:
        """Compare every answer with the manager's."""
        assert self.queue.tickets() == list(self.asked)
        assert self.queue.oldest() == min(self.arrivals, key=lambda t: (self.arrivals[t], t), default=None)
        self.verify_order()
        for ticket, (tokens, given) in self.asked.items():
            hit = self.cache.num_cached_tokens(tokens, **given)
            missing, joining = self.queue.missing(ticket), self.queue.joining(ticket)
            assert missing == len(tokens) - hit, (ticket, missing, len(tokens), hit)
            assert 0 <= joining <= hit
            self.num_answers += 1
            self.num_joining += joining > 0
            self.num_hits += hit > 0

    def verify_order(self) -> None:
        """Compare the order of the tree with what each prompt reaches; with few waiting, all of them are looked up."""
        queue, tree = self.queue, self.queue.requests.tree
        size = tree.block_size
        lacks = [(len(self.asked[t][0]) - tree.reach(queue.requests.tickets[t]) * size, t) for t in self.asked]
        assert [int(ticket.number) for ticket in tree.ranked()] == [ticket for _, ticket in sorted(lacks)]
        first = tree.first()
        assert (int(first.number) if first is not None else None) == min(lacks, default=(0, None))[1]
        if not queue.requests.lookups.is_exact:
            lacks = [(queue.missing(ticket), ticket) for ticket in self.asked]
        assert queue.first(len(self.asked) + 1) == [ticket for _, ticket in sorted(lacks)]


class Waiting(World):
    """A world in which prompts wait before they are allocated, or leave again."""

    def __init__(self, package: Any, seed: int) -> None:
        super().__init__(package, seed)
        self.waiters = Waiters(self.cache, random.Random(seed + 1))

    def actors(self) -> list[tuple[Any, float]]:
        return [*super().actors(), (self.wait, 12), (self.leave, 3), (self.admit, 8)]

    def wait(self) -> None:
        earlier = self.earlier()
        tokens = self.prompt(earlier)
        waiting = self.waiters.any()
        if waiting is not None and self.random.random() < 0.4:
            before = self.waiters.asked[waiting][0]
            tokens = (before[: self.random.randint(1, len(before))] + tokens)[: self.config.max_model_len]
        keys, spans = self.keys(earlier), self.spans(tokens, earlier)
        num_seqs = min(self.random.choice((1, 1, 1, 2)), self.config.max_num_seqs)
        self.waiters.add(tokens, {"extra_keys": keys + spans, "num_seqs": num_seqs})

    def leave(self) -> None:
        ticket = self.waiters.any()
        if ticket is not None:
            self.waiters.remove(ticket)

    def admit(self) -> str:
        """What waits is allocated: it computes what was missing, and waits for what it joins."""
        ticket = self.waiters.any()
        if ticket is None:
            return ""
        tokens, given = self.waiters.asked[ticket]
        missing = self.waiters.queue.missing(ticket)
        handle = self.cache.try_allocate(tokens, **given)
        if isinstance(handle, self.package.Admission):
            return handle.name
        assert self.cache.num_computed_tokens(handle) == len(tokens) - missing
        spans = tuple(key for key in given["extra_keys"] if isinstance(key, self.package.Span))
        keys = tuple(key for key in given["extra_keys"] if key not in spans)
        seq = Seq(handle, tokens, keys, spans, self.cache.generation)
        seq.num_promised = given["num_seqs"] - 1
        self.add(seq)
        self.waiters.remove(ticket)
        self.counts["admitted"] += 1
        return "OK"

    def act(self, actor: Any) -> None:
        super().act(actor)
        self.waiters.verify()

    def finish(self) -> None:
        for name in ("num_answers", "num_joining", "num_hits"):
            self.counts[name] += getattr(self.waiters, name)
        for ticket in list(self.waiters.asked):
            self.waiters.remove(ticket)
        self.cache.check()
        tree = self.waiters.queue.requests.tree
        assert (tree.num_edges, tree.num_places, tree.contents.count, tree.branches.count) == (0, 0, 0, 0)
        super().finish()


class WaitingInFlight(Waiting, FlightWorld):
    """Beside several steps in flight."""


class WaitingTenants(Waiting, TenantWorld):
    """Beside tenants."""


class WaitingForStates(states_world.World):
    """A world of states in which prompts wait."""

    def __init__(self, draw: random.Random, config: Any, is_ample: bool) -> None:
        super().__init__(draw, config, is_ample)
        self.waiters = Waiters(self.cache, random.Random(draw.random()))

    def acted(self) -> None:
        super().acted()
        choose = self.waiters.choose
        if choose.random() < 0.5:
            text = choose.choice([*self.texts, *self.tokens.values()])
            tokens = text[: choose.randint(1, 90)] + [choose.randrange(3) for _ in range(choose.randint(0, 20))]
            keys = (CacheSalt("a"),) if choose.random() < 0.3 else ()
            self.waiters.add(tokens, {"extra_keys": keys, "num_seqs": choose.choice((1, 1, 2))})
        self.waiters.verify()


def run_world(seed: int, num_calls: int) -> Counter[str]:
    """Run a world without states, of the kind that the seed says. Returns what it did."""
    kind = (Waiting, Waiting, WaitingInFlight, WaitingTenants)[seed % 4]
    world = kind(blockyard, seed)
    try:
        world.run(num_calls)
    except Exception as error:
        error.add_note(f"{kind.__name__}(blockyard, {seed}), after {len(world.story)} calls")
        raise
    return world.counts


def run_states_world(seed: int, num_calls: int) -> Counter[str]:
    """Run a world with states. Returns what it did."""
    draw = random.Random(seed)
    num_blocks = 400 if draw.random() < 0.3 else draw.randint(40, 80)
    world = WaitingForStates(draw, states_world.config(draw, num_blocks), False)
    try:
        world.run(num_calls)
    except Exception as error:
        error.add_note(f"WaitingForStates of seed {seed}")
        raise
    return Counter(num_answers=world.waiters.num_answers, num_hits=world.waiters.num_hits)


def run_any_world(seed: int, num_calls: int) -> Counter[str]:
    """Run a world of any kind; one in six has states."""
    return run_states_world(seed, num_calls) if seed % 6 == 5 else run_world(seed, num_calls)
