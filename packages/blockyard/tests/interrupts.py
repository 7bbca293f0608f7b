"""A KeyboardInterrupt at every event of every Python frame inside every public call, on managers of ten kinds.

`Injection` raises at the k-th event, for every k. Afterwards all laws hold, and the state is the one before the call
or, where nothing that it returns is lost, the one after it.

    python -m tests.interrupts        # all points
"""

from __future__ import annotations

import argparse
import gc
import random
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from blockyard._build import build_name
from blockyard_testing import public_calls
from blockyard_testing.interrupter import Findings, Injection
from blockyard_testing.public_calls import Call

from .support import own_calls
from .support.own_calls import ALL_CALLS, KINDS, Site
from .support.snapshot import snapshot

#: Every call on every kind of manager.
EVERY_CALL = [(kind, call) for kind in KINDS for call in ALL_CALLS]
#: Frames of the calls' table are the caller's.
OUTSIDE = (public_calls.__file__, own_calls.__file__, __file__)
#: What these return nobody could find again.
GIVE_HANDLES = ("allocate", "allocate_batch", "fork", "regroup", "get_new_blocks", "touch", "get_cached_blocks")
#: An interrupted callback leaves a policy that has failed, and says so (`PolicyError`).
OF_A_POLICY = re.compile(r"\.stack\.(top|layers|sessions|failure)|\.interruption\.")

#: Drawn, told or made room for during a call that a policy's callback interrupted, and of no consequence.
UNDONE_BUT_SEEN = (
    *("sequences._epoch", "sequences._serials._last", "stack._idle", "free_rows", ".num_rewrites"),
    "stack.sessions",
    # Tenants that are to be ranked anew, and whose blocks were taken last.
    *(".budget._has_changed", ".budget.changed", ".budget.num_changed", ".budget.acting"),
)
#: What was watched of blocks that were taken and given back.
WATCHED = ("._entries[", ".num_events", ".reuse_gap.")
#: What the first call that names a session makes room in.
NAMES = ".hints._names"
#: Words of slack in an array that begins at a cache line.
WORDS_TO_ALIGN = 8


def state(site: Site) -> dict[str, Any]:
    """All of the manager and of the lone pool, but what only the policy knows."""
    whole = {**snapshot(site.cache), **snapshot(site.alone, "alone")}
    for path in [path for path in whole if path.endswith(".first_word")]:
        # Where an array begins in its memory is chance.
        words, first = whole[path.replace("first_word", "words")], whole.pop(path)
        whole[path.replace("first_word", "words")] = words[first : first + len(words) - WORDS_TO_ALIGN]
    whole = {path: value for path, value in whole.items() if OF_A_POLICY.search(path) is None}
    return without_traces(whole, site) if site.kind.endswith("own policy") else whole


def without_traces(whole: dict[str, Any], site: Site) -> dict[str, Any]:
    """The same but for what an undone call may leave behind: values in empty rows, serials and depths told."""
    rows = site.cache._parts.sequences.max_num_seqs
    live = set(site.cache._parts.sequences.live_rows())
    for path, value in list(whole.items()):
        if path.endswith(UNDONE_BUT_SEEN) or NAMES in path or any(part in path for part in WATCHED):
            del whole[path]
        elif ".sequences." in path and isinstance(value, list) and value and len(value) % rows == 0:
            width = len(value) // rows
            whole[path] = [item for at, item in enumerate(value) if at // width in live]
    return whole


class Interrupted:
    """One call on one kind of manager, with the states before it and after it."""

    def __init__(self, kind: str, call: Call) -> None:
        self.kind = kind
        self.call = call
        # Once for what Python remembers after the first time, as which classes are sequences.
        Injection(-1, OUTSIDE).run(call.make(Site(kind)))
        site = Site(kind)
        run = call.make(site)
        # `check` ranks the tenants that have changed since they were ranked last.
        site.check()
        self.before = state(site)
        whole = Injection(-1, OUTSIDE)
        whole.run(run)
        self.num_points = whole.num_events
        site.check()
        self.after = state(site)

    def problem_at(self, point: int, outcomes: Counter[str]) -> str:
        """Interrupt it there; returns what is wrong afterwards."""
        site = Site(self.kind)
        injection = Injection(point, OUTSIDE)
        error = injection.run(self.call.make(site))
        problem = self.problem(site, error, outcomes)
        return f"{self.kind}: {self.call.name}, point {point} at {injection.where}: {problem}" if problem else ""

    def problem(self, site: Site, error: BaseException | None, outcomes: Counter[str]) -> str:
        if not isinstance(error, KeyboardInterrupt) and not is_raised_next(site):
            return "the interrupt got lost"
        try:
            site.check()
        except Exception as broken:
            return f"{type(broken).__name__}: {broken}"
        reached = state(site)
        outcomes["raised by the call" if isinstance(error, KeyboardInterrupt) else "raised by the next call"] += 1
        if reached == self.before:
            outcomes["nothing changed"] += 1
            return ""
        if reached != self.after:
            return f"neither before nor after: {differences(reached, self.before, self.after)}"
        if isinstance(error, KeyboardInterrupt) and self.call.name in GIVE_HANDLES:
            return "done, and its result is lost"
        outcomes["done"] += 1
        return ""


def is_raised_next(site: Site) -> bool:
    """Whether the next call raises what interrupted a policy's callback; once."""
    try:
        site.cache.running()
    except KeyboardInterrupt:
        return True
    return False


def differences(reached: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> str:
    paths = [path for path in {**reached, **before} if reached.get(path) != before.get(path)]
    parts = [
        f"{path}: {before.get(path)!s:.60} → {reached.get(path)!s:.60} / {after.get(path)!s:.60}" for path in paths
    ]
    return "; ".join(parts[:6])


def interrupt_all(share: float, seed: int, calls: Iterable[tuple[str, Call]] = EVERY_CALL) -> Findings:
    """Interrupt these calls of a kind of manager at a random share of their points, at least two a call."""
    draw, found = random.Random(seed), Findings()
    gc.disable()
    try:
        for kind, call in calls:
            interrupt(Interrupted(kind, call), share, draw, found)
            gc.collect()
    finally:
        gc.enable()
    return found


def interrupt(call: Interrupted, share: float, draw: random.Random, found: Findings) -> None:
    count = min(call.num_points, max(2, round(share * call.num_points)))
    for point in sorted(draw.sample(range(call.num_points), count)):
        found.num_points += 1
        problem = call.problem_at(point, found.outcomes)
        if problem:
            found.broken.append(problem)


def main() -> None:
    """All points of all calls; what broke, one line a point."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the points, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = interrupt_all(options.share, options.seed)
    for line in found.broken:
        print(line)
    for name, count in sorted(found.outcomes.items()):
        print(f"{count:8} {name}")
    print(f"{len(ALL_CALLS)} calls on {len(KINDS)} kinds of managers, {build_name()}")
    print(f"{len(found.broken)} of {found.num_points} points broken")
    raise SystemExit(bool(found.broken))


if __name__ == "__main__":
    main()
