"""Hostile objects in every argument of every public call of an offload and its tiers, and values of wrong types.

An argument acts while it is read: it frees a sequence, forgets a request, or raises. Values of wrong types are refused
with a `BlockyardError`, or are right. Afterwards all that `OffloadSite.problem` requires holds.

    python -m tests.tiers.hostile_arguments
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blockyard import BlockyardError
from blockyard._build import build_name
from blockyard_testing.hostile_values import disguises
from blockyard_testing.public_calls import Arguments, Call
from blockyard_tiers import BackendError, BadObject

from .offload_site import ALL_CALLS, KINDS, OffloadSite

#: Calls of the manager have a sweep of their own.
TARGETS = [call for call in ALL_CALLS if call.owner != "cache" and call.name != "reserve_and_move"]
#: Values that are no argument of most calls.
WRONG: dict[str, Any] = {
    "None": None,
    "a negative number": -1,
    "a large number": 2**70,
    "a fraction": 0.5,
    "no number": float("nan"),
    "text": "text",
    "bytes": b"bytes",
    "an empty list": [],
    "a list of a list": [[1]],
    "a list of None": [None],
    "a dict": {"a": 1},
    "an object": object(),
    "a class": int,
}


def _raise(error: BaseException) -> None:
    raise error


ACTS: dict[str, Callable[[OffloadSite], object]] = {
    "frees the sequence": lambda s: s.cache.free(s.decoding.seq),
    "forgets the request": lambda s: s.offload.forget(s.ready),
    "raises KeyboardInterrupt": lambda s: _raise(KeyboardInterrupt("hostile")),
    "raises ValueError": lambda s: _raise(ValueError("hostile")),
}


def once(act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that acts the first time only: an argument may be read several times."""
    done: list[bool] = []

    def run() -> None:
        if not done:
            done.append(True)
            act()

    return run


@dataclass
class Sweep:
    """How many arguments were given, what the calls came to, and what was wrong afterwards."""

    num_tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def all_of(self, share: float, draw: random.Random, kinds: list[str] | None = None) -> None:
        """Give a random share of all hostile and wrong arguments, on these kinds of managers (all, if None)."""
        for kind in kinds or KINDS:
            self.some_of(kind, TARGETS, share, draw)

    def some_of(self, kind: str, targets: list[Call], share: float, draw: random.Random) -> None:
        """Give a random share of the arguments of these calls, at least one a call."""
        logging.getLogger("blockyard_tiers").setLevel(logging.CRITICAL)
        for target in targets:
            site = OffloadSite(kind)
            given = target.arguments(site)
            cases = [
                (name, disguise, act)
                for name, value in given.items()
                for disguise in disguises(value, lambda: None)
                for act in ACTS
            ]
            cases += [(name, wrong, "") for name in given for wrong in WRONG]
            site.remove()
            for case in draw.sample(cases, min(max(1, round(share * len(cases))), len(cases))):
                self.give(kind, target, *case)

    def give(self, kind: str, target: Call, name: str, disguise: str, act: str) -> None:
        site = OffloadSite(kind)
        arguments = target.arguments(site)
        if act:
            arguments[name] = disguises(arguments[name], once(partial(ACTS[act], site)))[disguise]
        else:
            arguments[name] = WRONG[disguise]
        outcome = self._attempt(target, site, arguments)
        allowed = {"done", "refused", *(("TypeError", "ValueError", "KeyboardInterrupt") if act else ())}
        if target.owner in ("memory", "files", "adapter"):
            allowed |= {"BadObject", "BackendError"}
        problem = site.problem()
        if outcome.split(":")[0] not in allowed:
            problem = problem or "raised by itself"
        self.num_tried += 1
        self.outcomes[outcome.split(":")[0]] += 1
        if problem:
            self.wrong.append(f"{kind}: {target.owner}.{target.name}, {name} is {disguise} {act}, {outcome}: {problem}")

    def _attempt(self, target: Call, site: OffloadSite, arguments: Arguments) -> str:
        try:
            target.run(site, arguments)
        except BlockyardError:
            return "refused"
        except (BadObject, BackendError) as error:
            return type(error).__name__
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "done"


def main() -> None:
    """Print what was wrong, one line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--share", type=float, default=1.0, help="of the arguments, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sweep = Sweep()
    sweep.all_of(options.share, random.Random(options.seed), options.kind)
    for line in sweep.wrong:
        print(line)
    for outcome, count in sorted(sweep.outcomes.items()):
        print(f"{count:8} {outcome}")
    print(f"{len(sweep.wrong)} of {sweep.num_tried} hostile or wrong arguments did harm, {build_name()}")
    raise SystemExit(bool(sweep.wrong))


if __name__ == "__main__":
    main()
