"""Hostile objects in every argument of every public call: the call is done whole, or refused and nothing changed.

An argument acts while it is read: it frees a sequence or a lease that the call is about, changes the list it stands in,
or raises. Whatever the call comes to, the state afterwards is one that honest calls reach as well.

    python -m tests.hostile        # every disguise of every argument, on managers of ten kinds
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blockyard import BlockyardError
from blockyard._build import build_name

from .interrupts import state
from .support.hostile import disguises
from .support.own_calls import KINDS, Site, tokens
from .support.own_policies import MRU

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A public call with good arguments, by name."""

    owner: str
    name: str
    arguments: Callable[[Site], Arguments]

    def run(self, site: Site, arguments: Arguments) -> Any:
        return getattr(getattr(site, self.owner), self.name)(**arguments)


def _cache(name: str, arguments: Callable[[Site], Arguments]) -> Target:
    return Target("cache", name, arguments)


def _pool(name: str, arguments: Callable[[Site], Arguments]) -> Target:
    return Target("pool", name, arguments)


TARGETS = [
    _cache("can_allocate", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys, "num_seqs": 2}),
    _cache(
        "allocate",
        lambda s: {"token_ids": tokens(1, 14), "holder": "h", "extra_keys": s.keys, "num_seqs": 2, "resumed": True},
    ),
    _cache("allocate", lambda s: {"token_ids": tokens(1, 14), "session": "idle"}),
    _cache(
        "try_allocate",
        lambda s: {"token_ids": tokens(1, 14), "holder": "h", "extra_keys": s.keys, "num_seqs": 2, "resumed": True},
    ),
    _cache("can_allocate_batch", lambda s: {"prompts": [tokens(1, 9), tokens(8, 5)], "extra_keys": s.keys}),
    _cache(
        "allocate_batch",
        lambda s: {"prompts": [tokens(1, 9), tokens(8, 5)], "holders": ["a", "b"], "extra_keys": s.keys},
    ),
    _cache("reserve", lambda s: {"seqs": [s.reserved, s.waiting, s.decoding], "num_new_tokens": [9, 2, 6]}),
    _cache("commit", lambda s: {"seqs": [s.reserved], "num_computed": [9], "next_tokens": [[3]], "step": s.step}),
    _cache("end_step", lambda s: {"step": s.cache.steps_in_flight.start}),
    _cache("can_append", lambda s: {"seqs": [s.decoding, s.done], "num_new_tokens": 5}),
    _cache("append", lambda s: {"seqs": [s.done], "next_tokens": [5]}),
    _cache("fork", lambda s: {"seq": s.decoding, "num_forks": 2}),
    _cache("regroup", lambda s: {"seqs": [s.decoding, s.done], "parents": [0, 0, 0]}),
    _cache("truncate", lambda s: {"seq": s.decoding, "num_tokens": 3}),
    _cache("free", lambda s: {"seqs": [s.decoding, s.waiting]}),
    _cache("free", lambda s: {"seqs": s.decoding}),
    _cache("swap_out", lambda s: {"seqs": [s.done, s.decoding]}),
    _cache("swap_in", lambda s: {"seqs": [s.swapped]}),
    _cache("can_swap_out", lambda s: {"seqs": [s.done, s.decoding]}),
    _cache("can_swap_in", lambda s: {"seqs": s.swapped}),
    _cache("resize", lambda s: {"num_blocks": 64}),
    _cache("resize", lambda s: {"num_blocks": 9}),
    _cache("set_eviction_policy", lambda s: {"policy": MRU}),
    _cache("retain", lambda s: {"token_ids": tokens(1, 12), "priority": 2, "expires_at": 5.0, "extra_keys": s.keys}),
    _cache("num_retained_of", lambda s: {"token_ids": tokens(1, 12), "extra_keys": s.keys}),
    _cache("advance_time", lambda s: {"now": 9.5}),
    _cache("hint", lambda s: {"target": "idle", "over": True}),
    _cache("hint", lambda s: {"target": s.decoding, "back_in": 2.5}),
    _cache("hint", lambda s: {"target": s.done, "back_at": 9}),
    _cache("token_ids", lambda s: {"seq": s.decoding}),
    _cache("block_ids", lambda s: {"seq": s.decoding, "group": 0}),
    _cache("num_cached_tokens", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys}),
    _cache("num_tokens", lambda s: {"seqs": s.decoding}),
    _cache("num_tokens", lambda s: {"seqs": [s.decoding, s.done]}),
    _cache("num_computed_tokens", lambda s: {"seqs": [s.decoding]}),
    _cache("num_owned_blocks", lambda s: {"seqs": [s.decoding, s.done]}),
    _cache("is_swapped_out", lambda s: {"seq": s.decoding}),
    _cache("group_table", lambda s: {"group": 0}),
    _cache("block", lambda s: {"block_id": 3}),
    _cache("miss_causes", lambda s: {"seq": s.decoding}),
    _pool("block", lambda s: {"block_id": 3}),
    _pool("get_new_blocks", lambda s: {"num_blocks": 2, "holder": "h"}),
    _pool("extend", lambda s: {"lease": s.lease, "num_blocks": 3}),
    _pool("touch", lambda s: {"lease": s.lease, "holder": "h"}),
    _pool("touch", lambda s: {"lease": s.lease, "holder": "h", "start": 0, "stop": 1}),
    _pool("copy_on_write", lambda s: {"lease": s.lease, "position": 1}),
    _pool("free_blocks", lambda s: {"lease": s.lease}),
    _cache("hold_cached", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys, "holder": "h"}),
    Target("alone", "get_cached_blocks", lambda s: {"token_ids": tokens(1, 14), "extra_keys": (), "holder": "h"}),
    Target("alone", "get_cached_block", lambda s: {"token_ids": tokens(1, 12), "extra_keys": (), "holder": "h"}),
    Target("alone", "num_cached_tokens", lambda s: {"token_ids": tokens(1, 12), "extra_keys": ()}),
    Target("alone", "cached_block_ids", lambda s: {"token_ids": tokens(1, 12), "extra_keys": ()}),
    Target("alone", "find_cached_blocks", lambda s: {"token_ids": tokens(1, 14), "extra_keys": ()}),
    _pool("release", lambda s: {"lease": s.lease, "start": 0, "stop": 1}),
    _pool("split", lambda s: {"lease": s.lease, "at": 1, "holder": "h"}),
    Target("alone", "hold", lambda s: {"found": s.alone_found, "holder": "h", "num_blocks": 1, "extend_by": 2}),
    Target(
        "alone",
        "cache_next_blocks",
        lambda s: {
            "lease": s.alone_lease,
            "token_ids": tokens(1, 16)[8:],
            "extra_keys": (),
            "num_cached_blocks": 2,
        },
    ),
    Target("alone", "release", lambda s: {"lease": s.alone_lease, "start": 1, "stop": 3}),
    Target("alone", "split", lambda s: {"lease": s.alone_lease, "at": 2, "holder": "h"}),
    Target("alone", "free_blocks", lambda s: {"lease": s.alone_lease, "last": True}),
    Target("alone", "uncache", lambda s: {"block_ids": [5, 2]}),
    Target("alone", "adopt", lambda s: {"block_ids": [6, 8], "holder": "h"}),
    Target("alone", "evict", lambda s: {"num_blocks": 1}),
    Target(
        "alone",
        "retain",
        lambda s: {"token_ids": tokens(1, 12), "priority": 2, "expires_at": 5.0, "extra_keys": ()},
    ),
    Target("alone", "advance_time", lambda s: {"now": 9.5}),
    Target("alone", "resize", lambda s: {"num_blocks": 30}),
    Target("alone", "set_eviction_policy", lambda s: {"policy": MRU}),
    Target(
        "alone",
        "cache_full_blocks",
        lambda s: {"lease": s.alone_lease, "token_ids": tokens(1, 12), "num_cached_blocks": 3, "extra_keys": ()},
    ),
]


def once(act: Callable[[], object]) -> Callable[[], None]:
    """The first time alone: an argument may be read several times."""
    done: list[bool] = []

    def run() -> None:
        if not done:
            done.append(True)
            act()

    return run


def _raise(error: BaseException) -> None:
    raise error


#: What an argument does, and the same done beside the call by an honest caller.
ACTS: dict[str, Callable[[Site], object]] = {
    "frees the sequence": lambda s: s.cache.free(s.decoding),
    "frees the owner": lambda s: s.cache.free(s.reserved),
    "frees the lease": lambda s: s.pool.free_blocks(s.lease),
    "frees the lone lease": lambda s: s.alone.free_blocks(s.alone_lease),
    "raises KeyboardInterrupt": lambda s: _raise(KeyboardInterrupt("hostile")),
    "raises ValueError": lambda s: _raise(ValueError("hostile")),
}


def attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except (BlockyardError, TypeError, ValueError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "done"


def honest_states(kind: str, target: Target, act: Callable[[Site], object]) -> list[dict[str, Any]]:
    """What is reached by the call alone, by the act alone, by neither, and by both in either order."""
    orders: list[list[str]] = [[], ["call"], ["act"], ["call", "act"], ["act", "call"]]
    found = []
    for order in orders:
        site = Site(kind)
        arguments = target.arguments(site)
        steps = {"call": partial(target.run, site, arguments), "act": partial(act, site)}
        for step in order:
            attempt(steps[step])
        found.append(state(site))
    return found


@dataclass
class Sweep:
    """How many hostile arguments were given, what the calls came to, and what was wrong afterwards."""

    num_tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def all_of(self, share: float, draw: random.Random) -> None:
        """A random share of all acts in all calls on all kinds of managers, each in every argument and disguise."""
        for kind in KINDS:
            for target in TARGETS:
                for act in ACTS:
                    if draw.random() < share:
                        self.give(kind, target, act)

    def give(self, kind: str, target: Target, act: str) -> None:
        allowed = honest_states(kind, target, ACTS[act])
        for name, value in target.arguments(Site(kind)).items():
            for disguise in disguises(value, lambda: None):
                site = Site(kind)
                arguments = target.arguments(site)
                arguments[name] = disguises(arguments[name], once(partial(ACTS[act], site)))[disguise]
                outcome = attempt(partial(target.run, site, arguments))
                self.note(outcome, problem_of(site, allowed), f"{kind}: {target.name}, {name} is {disguise} and {act}")

    def note(self, outcome: str, problem: str, what: str) -> None:
        self.num_tried += 1
        self.outcomes[outcome] += 1
        if problem:
            self.wrong.append(f"{what}, {outcome}: {problem}")


def problem_of(site: Site, allowed: list[dict[str, Any]]) -> str:
    try:
        site.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    reached = state(site)
    # A free that waited leaves the running call's plan readable where it can, so it need not count as a change.
    for each in [reached, *allowed]:
        for path in [path for path in each if path.endswith("sequences.version")]:
            del each[path]
    if reached in allowed:
        return ""
    paths = [[path for path in reached if reached.get(path) != other.get(path)] for other in allowed]
    return f"a state that no honest caller reaches: {min(paths, key=len)[:5]}"


def changed_while_read(target: Target, name: str, change: Callable[[Any], object]) -> str:
    for disguise in [found for found in disguises([1], lambda: None) if found.startswith("beginning")]:
        site = Site("plain")
        arguments = target.arguments(site)
        plain = list(arguments[name])
        hostile: list[Any] = []
        item = disguises(plain, once(partial(change, hostile)))
        if disguise not in item:
            continue
        hostile += item[disguise]
        arguments[name] = hostile
        outcome = attempt(partial(target.run, site, arguments))
        try:
            site.check()
        except Exception as error:
            return f"{disguise}, {outcome}: {type(error).__name__}: {error}"
        if outcome != "done" and state(site) != state(Site("plain")):
            return f"{disguise}, {outcome}, and something changed"
    return ""


def main() -> None:
    """Everything; what was wrong, one line each."""
    sweep = Sweep()
    sweep.all_of(1.0, random.Random(0))
    for line in sweep.wrong:
        print(line)
    for outcome, count in sorted(sweep.outcomes.items()):
        print(f"{count:8} {outcome}")
    print(f"{len(sweep.wrong)} of {sweep.num_tried} hostile arguments did harm, {build_name()}")
    raise SystemExit(bool(sweep.wrong))


if __name__ == "__main__":
    main()
