"""One failed allocation, at each of the first of a call: an offload and its tiers stay sound, in a process each.

    python -m tests.tiers.nomemory                  # every public call on three kinds of managers, 60 allocations each
    python -m tests.tiers.nomemory fill --all       # one call; every point with its outcome and where it came from

The allocation may be one of the tiers' threads, which run beside the call.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from blockyard._build import build_name
from blockyard_testing.failed_allocations import fail_allocation, run_in_fork, where_of
from blockyard_testing.public_calls import Arguments, Call
from blockyard_tiers import FileTier, Transfer, WorkingTier
from blockyard_tiers.header import require_whole

from .offload_site import ALL_CALLS, KINDS, SECONDS, MemoryTier, OffloadSite

NUM_POINTS = 60
#: After so many calls in a row in which nothing failed, there are no more allocations.
MOST_DONE = 8


class Site(OffloadSite):
    """The same site, with two more tiers whose transfers are waited for: allocations fail in their threads too."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.others: tuple[WorkingTier, ...] = (MemoryTier("other"), FileTier(self.folder / "other", 2**30))

    def moved(self, tier: WorkingTier, transfer: Transfer, is_load: bool) -> None:
        assert (tier.load if is_load else tier.store)(transfer) is None
        end = time.monotonic() + SECONDS
        while transfer.id not in [result.id for result in tier.take_results()]:
            assert time.monotonic() < end, "a transfer has no result"
            time.sleep(0.001)

    def transferred(self, number: int, is_load: bool) -> Arguments:
        tier = self.others[number]
        if is_load:
            self.moved(tier, self.transfer(9), False)
        return {"tier": tier, "transfer": self.transfer(9, is_load), "is_load": is_load}

    def problem(self) -> str:
        try:
            for tier in self.others:
                end = time.monotonic() + SECONDS
                while tier.stats().num_waiting:
                    assert time.monotonic() < end, f"{tier.name} still has transfers"
                    tier.take_results()
                tier.check()
                for name in list(tier.names()):
                    require_whole(memoryview(tier.get(name)), name)
                self.moved(tier, self.transfer(40), False)
                self.moved(tier, self.transfer(40, is_load=True), True)
        except Exception as error:
            super().problem()
            return f"{type(error).__name__}: {error}"
        finally:
            for tier in self.others:
                tier.close()
        return super().problem()


THREAD_CALLS = [
    Call("site", "moved", lambda s, number=number, is_load=is_load: s.transferred(number, is_load))  # type: ignore[misc]
    for number in (0, 1)
    for is_load in (False, True)
]
CALLS = [*ALL_CALLS, *THREAD_CALLS]


@dataclass(frozen=True)
class Point:
    """What one failed allocation did. where: the line that raised, or what is wrong."""

    kind: str
    call: str
    number: int
    outcome: str
    where: str = ""


def points(kind: str, call: Call, num_points: int = NUM_POINTS, step: int = 1) -> Iterator[Point]:
    """Let every `step`-th of the first allocations of a call fail, until the call makes no more of them."""
    num_done = 0
    for number in range(1, num_points + 1, step):
        outcome, where = run_in_fork(lambda number=number: _tried(kind, call, number))
        yield Point(kind, f"{call.owner}.{call.name}", number, outcome, where)
        num_done = num_done + 1 if outcome == "done" else 0
        if num_done == MOST_DONE:
            return


def _tried(kind: str, call: Call, number: int) -> tuple[str, str]:
    """In the child: make the call, then look."""
    logging.disable(logging.CRITICAL)
    site = Site(kind)
    method, arguments = call.of(site), call.arguments(site)
    gc.collect()
    gc.disable()
    raised = fail_allocation(number, lambda: method(**arguments))
    where = "" if raised is None else where_of(raised)
    problem = f"AssertionError: {raised}" if isinstance(raised, AssertionError) else ""
    problem = site.problem() or problem
    if problem:
        return "broken", f"{problem} | {type(raised).__name__} {where}"
    return ("done", "") if raised is None else (type(raised).__name__, where)


def sweep(
    names: list[str], kinds: list[str], share: float = 1.0, seed: int = 0, num_points: int = NUM_POINTS
) -> Iterator[Point]:
    """Yield the points of these calls (all, if none is named), or of a random share of the calls."""
    draw = random.Random(seed)
    for kind in kinds:
        for call in [call for call in CALLS if not names or call.name in names]:
            if draw.random() < share:
                yield from points(kind, call, num_points)


def main() -> None:
    """Print how often which outcome came, and each point that is broken."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--share", type=float, default=1.0, help="of the calls, drawn by --seed")
    parser.add_argument("--points", type=int, default=NUM_POINTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="print every point")
    options = parser.parse_args()
    print(build_name(), flush=True)
    counts: Counter[str] = Counter()
    for point in sweep(options.names, options.kind or list(KINDS), options.share, options.seed, options.points):
        counts[point.outcome] += 1
        if options.all or point.outcome == "broken":
            print(f"{point.kind:10} {point.call:24} {point.number:3} {point.outcome:12} {point.where}", flush=True)
    for outcome, count in counts.most_common():
        print(f"{count:8,}  {outcome}")
    sys.exit(counts["broken"] > 0)


if __name__ == "__main__":
    main()
