"""One failed allocation, at each of the first of a call: what becomes of the cache, each time in a process of its own.

    python -m tests.nomemory                 # every public call of a manager and its pool on seven kinds of managers,
                                             # each of the first 60 allocations, and 8 on managers with states, 90
    python -m tests.nomemory resize --all    # one call; every point with its outcome and where it came from
    python -m tests.nomemory --kind tenants  # one kind of managers

CPython's `_testcapi` makes one allocation fail, of any size. mypyc's boxing does not check: some points end the
process, whatever is written here (`ended by a signal`). At all others `check()` must hold.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockyard import KVCacheManager, LayerGroup, StateHints, StateSpec
from blockyard._build import build_name
from blockyard.config import cache_config
from blockyard_testing.failed_allocations import fail_allocation, run_in_fork, where_of
from blockyard_testing.public_calls import Call

from .support.own_calls import MANAGER_CALLS, POOL_CALLS, Site, tokens
from .support.snapshot import snapshot

KINDS = (
    "plain",
    "cpu",
    "observed",
    "tenants",
    "everything",
    "everything with a CPU pool",
    "everything with states",
)
CALLS = [*MANAGER_CALLS, *POOL_CALLS]
#: Of every call, as often as the table has it.
NAMES = tuple(dict.fromkeys(call.name for call in CALLS))
NUM_POINTS = 60
#: Kinds of managers with states, by their order, and the calls of a step on them.
STATE_KINDS = {"states": "index", "lru states": "lru"}
NUM_STATE_POINTS = 90
HINTS = (StateHints([12, 20]), StateHints(waiting_prompts=[tokens(9, 40)]))
STATE_CALLS = (
    Call(
        "cache",
        "allocate",
        lambda site: {"token_ids": [*tokens(1, 20), *tokens(2, 16)], "states": HINTS[0]},
    ),
    Call(
        "cache",
        "allocate",
        lambda site: {"token_ids": tokens(9, 30), "states": HINTS[1]},
    ),
    Call("cache", "reserve", lambda site: {"seqs": [site.waiting]}),
    Call("cache", "commit", lambda site: {"seqs": [site.reserved], "num_computed": site.num_reserved}),
    Call("cache", "fork", lambda site: {"seq": site.done}),
    Call("cache", "free", lambda site: {"seqs": [site.done, site.reserved]}),
    Call("cache", "swap_out", lambda site: {"seqs": [site.waiting, site.done]}),
    Call("cache", "swap_in", lambda site: {"seqs": site.swapped}),
)
#: After so many calls in a row in which nothing failed, there are no more allocations.
MOST_DONE = 6


@dataclass(frozen=True)
class Point:
    """What one failed allocation did. where: the line that raised, or that `check` complains of."""

    kind: str
    call: str
    number: int
    outcome: str
    where: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a promise is broken: `check` holds; failed swaps change nothing, nor does a failed `resize`."""
        is_changed = self.outcome == "changed" and self.call in ("resize", "swap_out", "swap_in")
        return self.outcome == "broken" or is_changed or (self.call == "resize" and "SystemError" in self.where)


class StateSite:
    """A manager whose states some sequences have hit, saved, or are about to; none is evicted."""

    def __init__(self, order: str) -> None:
        groups = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=100, checkpoint_every=4))
        sizes: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 7, "max_model_len": 64, "hash_seed": 3}
        sizes["num_cpu_blocks"] = 40
        self.cache = KVCacheManager(cache_config(groups=groups, state_order=order, track_misses=True, **sizes))
        first = self.computed(tokens(1, 40), (16,))
        second = self.computed([*tokens(1, 20), *tokens(3, 20)])
        self.cache.free([first])
        self.done = self.computed([*tokens(1, 24), *tokens(4, 10)])
        self.cache.free([second])
        self.waiting = self.cache.allocate(tokens(1, 33), states=StateHints([24]))
        self.reserved = self.cache.allocate(tokens(5, 25))
        self.num_reserved = self.cache.reserve([self.reserved]).num_scheduled
        self.swapped = self.cache.allocate(tokens(1, 34))
        self.cache.swap_out(self.swapped)

    def computed(self, prompt: list[int], checkpoints: tuple[int, ...] = ()) -> int:
        seq = self.cache.allocate(prompt, states=StateHints(checkpoints))
        while self.cache.num_computed_tokens(seq) < len(prompt):
            self.cache.commit([seq], self.cache.reserve([seq]).num_scheduled)
        return seq

    def check(self) -> None:
        """Now, and when all has ended: then nothing is held."""
        self.cache.check()
        self.cache.free(list(self.cache.running()))
        self.cache.check()
        if self.cache.stats().num_used_blocks:
            raise AssertionError(f"{self.cache.stats().num_used_blocks} blocks are held by nobody")


def points(kind: str, call: Call, num_points: int = NUM_POINTS) -> Iterator[Point]:
    """Each of the first allocations of a call fails in turn, until the call seems to make no more of them."""
    site: Any = StateSite(STATE_KINDS[kind]) if kind in STATE_KINDS else Site(kind)
    arguments = call.arguments(site)
    # `check` ranks the tenants that have changed since they were ranked last.
    site.cache.check()
    before = snapshot(site.cache)
    gc.collect()
    gc.disable()
    num_done = 0
    try:
        for number in range(1, num_points + 1):
            outcome, where = _forked(site, call, arguments, before, number)
            yield Point(kind, call.name, number, outcome, where)
            num_done = num_done + 1 if outcome == "done" else 0
            if num_done == MOST_DONE:
                return
    finally:
        gc.enable()


def _forked(site: Any, call: Call, arguments: dict[str, Any], before: dict[str, Any], number: int) -> tuple[str, str]:
    return run_in_fork(lambda: _tried(site, call, arguments, before, number))


def _tried(site: Any, call: Call, arguments: dict[str, Any], before: dict[str, Any], number: int) -> tuple[str, str]:
    """In the child: run the call, then look."""
    method = call.of(site)
    raised = fail_allocation(number, lambda: method(**arguments))
    where = "" if raised is None else where_of(raised)
    try:
        site.cache.check()
        after = snapshot(site.cache)
        site.check()
    except BaseException as error:
        return "broken", f"{type(error).__name__}: {error} | {where}"
    if raised is None:
        return "done", ""
    if not isinstance(raised, MemoryError):
        where = f"{type(raised).__name__}: {raised} | {where}"
    names = [name for name, value in after.items() if value != before.get(name) and not _may_differ(name)]
    if names:
        return "changed", f"{names[:4]} | {where}"
    return "unchanged", where


def _may_differ(name: str) -> bool:
    """What was looked up, what the history has of a call that was undone, and when a tenant was ranked last.

    No two tenants, or groups, have equal ranks: which was inserted first decides nothing.
    """
    is_tie = ("._ranks[" in name or "._groups." in name) and name.endswith(("._tie", "._num_inserted"))
    return is_tie or name.endswith("index.found") or ".observer." in name


def sweep(names: tuple[str, ...] = NAMES, kinds: tuple[str, ...] = (*KINDS, *STATE_KINDS)) -> Iterator[Point]:
    """All points of these calls."""
    for kind in kinds:
        for call in CALLS if kind in KINDS else ():
            if call.name in names:
                yield from points(kind, call)
    for kind in [kind for kind in kinds if kind in STATE_KINDS]:
        for call in STATE_CALLS:
            if call.name in names:
                yield from points(kind, call, NUM_STATE_POINTS)


def main() -> None:
    """Print how often which outcome came, and each point that is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--kind", action="append", choices=(*KINDS, *STATE_KINDS), help="only this kind of managers")
    parser.add_argument("--all", action="store_true", help="print every point")
    options = parser.parse_args()
    print(build_name(), flush=True)
    counts: Counter[str] = Counter()
    num_wrong = 0
    for point in sweep(tuple(options.names), tuple(options.kind or (*KINDS, *STATE_KINDS))):
        counts[point.outcome] += 1
        num_wrong += point.is_wrong
        if options.all or point.is_wrong:
            print(f"{point.kind:16} {point.call:20} {point.number:3} {point.outcome:12} {point.where}", flush=True)
    for outcome, count in counts.most_common():
        print(f"{count:8,}  {outcome}")
    print(f"{num_wrong:8,}  of them wrong")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
