"""Hostile objects in every argument of every public call: the call is done whole, or refused and nothing changed.

An argument acts while it is read: it frees a sequence or a lease that the call is about, changes the list it stands in,
or raises. Whatever the call comes to, the state afterwards is one that honest calls reach as well.

    python -m tests.hostile        # every disguise of every argument, on managers of ten kinds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blockyard import BlockyardError
from blockyard._build import build_name
from blockyard_testing.hostile_values import disguises

from .interrupts import state
from .support.own_calls import ALL_CALLS, KINDS, Call, Site

#: Every call that takes arguments, beside those that answer one number at any time, and a free that waits.
TARGETS = [
    *(call for call in ALL_CALLS if call.arguments(Site("plain"))),
    Call("cache", "num_tokens", lambda s: {"seqs": s.decoding}),
    Call("cache", "is_swapped_out", lambda s: {"seq": s.decoding}),
    Call("cache", "group_table", lambda _: {"group": 0}),
    Call("cache", "miss_causes", lambda s: {"seq": s.decoding}),
    Call("alone", "free_blocks", lambda s: {"lease": s.alone_lease, "last": True}),
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


#: All acts in all calls on all kinds of managers.
EVERY_GIFT = [(kind, target, act) for kind in KINDS for target in TARGETS for act in ACTS]


def attempt(call: Callable[[], object]) -> str:
    try:
        call()
    except (BlockyardError, TypeError, ValueError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "done"


def honest_states(kind: str, target: Call, act: Callable[[Site], object]) -> list[dict[str, Any]]:
    """What is reached by the call alone, by the act alone, by neither, and by both in either order."""
    orders: list[list[str]] = [[], ["call"], ["act"], ["call", "act"], ["act", "call"]]
    found = []
    for order in orders:
        site = Site(kind)
        arguments = target.arguments(site)
        steps = {"call": partial(target.run, site, arguments), "act": partial(act, site)}
        for step in order:
            attempt(steps[step])
        # `check` ranks the tenants that have changed since they were ranked last.
        site.check()
        found.append(state(site))
    return found


@dataclass
class Sweep:
    """How many hostile arguments were given, what the calls came to, and what was wrong afterwards."""

    num_tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def give(self, kind: str, target: Call, act: str) -> None:
        """Do the act in each argument of the call, in every disguise."""
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


def changed_while_read(target: Call, name: str, change: Callable[[Any], object]) -> str:
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
    for kind, target, act in EVERY_GIFT:
        sweep.give(kind, target, act)
    for line in sweep.wrong:
        print(line)
    for outcome, count in sorted(sweep.outcomes.items()):
        print(f"{count:8} {outcome}")
    print(f"{len(sweep.wrong)} of {sweep.num_tried} hostile arguments did harm, {build_name()}")
    raise SystemExit(bool(sweep.wrong))


if __name__ == "__main__":
    main()
