"""A KeyboardInterrupt at every event of every Python frame inside every public call of an offload and its tiers.

Afterwards all that `OffloadSite.problem` requires holds.

    python -m tests.tiers.interrupts                      # all points
    python -m tests.tiers.interrupts fill --kind states   # one call on one kind of manager
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from blockyard._build import build_name
from blockyard_testing import patience, public_calls, tiers_offload_world
from blockyard_testing.interrupter import Findings, Injection
from blockyard_testing.public_calls import Call

from . import offload_site
from .offload_site import ALL_CALLS, KINDS, OffloadSite


class _Outside:
    """Frames of the calls' table and the engine's memory are the caller's; the core has a sweep of its own.

    Nor are enums interrupted: numpy swallows what is raised while it looks for their attributes.
    """

    files = (__file__, offload_site.__file__, patience.__file__, public_calls.__file__, tiers_offload_world.__file__)

    parts = ("/src/blockyard/", "mypy_extensions", "librt", "/enum.py")

    def __contains__(self, file: object) -> bool:
        return file in self.files or any(
            part in str(file) for part in ("/src/blockyard/", "mypy_extensions", "librt", "/enum.py")
        )


OUTSIDE = _Outside()


def num_points(kind: str, call: Call) -> int:
    site = OffloadSite(kind)
    whole = Injection(-1, OUTSIDE)
    whole.run(call.make(site))
    site.remove()
    return whole.num_events


def problem_at(kind: str, call: Call, point: int, found: Findings) -> None:
    """Interrupt the call there, and note what is wrong afterwards."""
    site = OffloadSite(kind)
    injection = Injection(point, OUTSIDE)
    ignored: list[Any] = []
    sys.unraisablehook, hook = ignored.append, sys.unraisablehook  # Python cannot raise from a generator that it closes
    try:
        error: Any = injection.run(call.make(site))
    finally:
        sys.unraisablehook = hook
    if not isinstance(error, KeyboardInterrupt) and injection.where:
        try:
            site.cache.running()  # raises the interruption of a callback
        except KeyboardInterrupt as raised:
            error = raised
    found.num_points += 1
    problem = site.problem()
    if injection.where and not ignored and not isinstance(error, KeyboardInterrupt):
        problem = problem or "the interrupt got lost"
    found.outcomes["interrupted" if injection.where else "not reached"] += 1
    if problem:
        found.broken.append(f"{kind}: {call.owner}.{call.name}, point {point} at {injection.where}: {problem}")


def interrupt_all(
    share: float, seed: int, kinds: Iterable[str] = KINDS, calls: Container[str] = (), most: int = 10**9
) -> Findings:
    """Interrupt these calls (all, if none is named) at a random share of their points, at least one a call."""
    draw, found = random.Random(seed), Findings()
    logging.getLogger("blockyard_tiers").setLevel(logging.CRITICAL)
    gc.disable()
    try:
        drawn = [(kind, call) for kind in kinds for call in ALL_CALLS if not calls or call.name in calls]
        for kind, call in drawn if len(drawn) <= most else draw.sample(drawn, most):
            count = num_points(kind, call)
            for point in sorted(draw.sample(range(count), min(count, max(1, round(share * count))))):
                problem_at(kind, call, point, found)
            gc.collect()
    finally:
        gc.enable()
    return found


def main() -> None:
    """Print what broke, one line a point."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--share", type=float, default=1.0, help="of the points, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_broken = 0
    names = options.names or dict.fromkeys(call.name for call in ALL_CALLS)
    for kind in options.kind or KINDS:
        counts: Counter[str] = Counter()
        for name in names:
            found = interrupt_all(options.share, options.seed, [kind], [name])
            for line in found.broken:
                print(line, flush=True)
            counts += Counter({**found.outcomes, "broken": len(found.broken)})
        print(f"{kind}: {dict(counts)}", flush=True)
        num_broken += counts["broken"]
    print(f"{len(ALL_CALLS)} calls, {build_name()}")
    raise SystemExit(bool(num_broken))


if __name__ == "__main__":
    main()
