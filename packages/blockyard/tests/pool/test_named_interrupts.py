"""A KeyboardInterrupt at every event of every Python frame inside every call of a `NamedPool`.

As `tests.interrupts` does it for managers: afterwards all laws hold, and the state is the one before the call or, where
nothing that it returns is lost, the one after it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blockyard
from blockyard.named import NamedPool
from blockyard_testing.own_policies import MRU

from .. import interrupts
from ..interrupts import OF_A_POLICY, WORDS_TO_ALIGN, Injection, differences
from ..support.snapshot import snapshot

pytestmark = pytest.mark.skipif(
    not blockyard.compiled(), reason="interpreted code is interrupted between any two lines"
)

POLICIES: dict[str, Any] = {
    "lru": "lru",
    "density": "density",
    "own": MRU,
}
#: Frames of this file are the caller's.
OUTSIDE = (__file__, interrupts.__file__)
NAMES = [bytes([number]) * 9 for number in range(40)]


class Site:
    """A pool in the middle of its work: blocks with one name, two and none, held by leases, by ids and by nobody."""

    def __init__(self, policy: str) -> None:
        self.pool = NamedPool(16, hash_seed=5, eviction_policy=POLICIES[policy], max_events=50)
        self.held = self.pool.get_new_blocks(3, holder="held")
        self.pool.name_blocks(self.held, NAMES[:3])
        self.pool.name_blocks(self.held, NAMES[10:13])
        idle = self.pool.get_new_blocks(4, holder="idle")
        self.pool.name_blocks(idle, NAMES[3:7])
        self.pool.name_blocks(idle, NAMES[13:17], 1)
        self.pool.free_blocks(idle)
        self.ids = self.pool.new_ids(3)
        self.pool.name_blocks(self.ids[:1], NAMES[8:9])
        self.bare = self.pool.get_new_blocks(2, holder="bare")


#: Blocks 1 to 3 are held and named twice, 4 to 7 idle, 8 to 10 held by ids, 11 and 12 without a name.
#: numpy's integers are read by Python code, where an interrupt can arrive; plain ones are not.
CALLS: dict[str, Callable[[Site], object]] = {
    "get_new_blocks": lambda s: s.pool.get_new_blocks(6, holder="new"),
    "new_ids": lambda s: s.pool.new_ids(np.int64(6)),
    "get_cached_blocks": lambda s: s.pool.get_cached_blocks(NAMES[1:7]),
    "hold": lambda s: s.pool.hold([4, 5, 1, 4], holder="new"),
    "hold_ids": lambda s: s.pool.hold_ids([4, 5, 1, 4, 15]),
    "free_blocks": lambda s: s.pool.free_blocks(s.held),
    "free_blocks, last": lambda s: s.pool.free_blocks(s.held, last=True),
    "free_ids": lambda s: s.pool.free_ids(s.ids),
    "free_ids, last": lambda s: s.pool.free_ids(s.ids, last=True),
    "name_blocks": lambda s: s.pool.name_blocks([4, 5, 15, 14, 1], NAMES[20:25], np.int64(2)),
    "name_blocks, a lease": lambda s: s.pool.name_blocks(s.bare, NAMES[20:22], np.int64(2)),
    "name_one": lambda s: s.pool.name_one(np.int64(15), NAMES[20], np.int64(2)),
    "move_names": lambda s: s.pool.move_names(np.int64(1), np.int64(s.bare[0])),
    "uncache": lambda s: s.pool.uncache([4, 1, 6, 15, 8]),
    "set_eviction_policy": lambda s: s.pool.set_eviction_policy(MRU),
    "reset_prefix_cache": lambda s: s.pool.reset_prefix_cache(),
    "take_events": lambda s: s.pool.take_events(),
    "find": lambda s: s.pool.find(NAMES[:6], np.int64(0)),
    "find_prefix": lambda s: s.pool.find_prefix(NAMES[3:6], [0, 1]),
    "names_of": lambda s: s.pool.names_of(np.int64(4)),
    "check": lambda s: s.pool.check(),
}
#: What these return nobody could find again.
GIVE = ("get_new_blocks", "new_ids", "get_cached_blocks", "hold", "take_events")


def state(site: Site, policy: str) -> dict[str, Any]:
    """All of the pool, but what only its policy knows, and where an array begins in its memory."""
    whole = {path: value for path, value in snapshot(site.pool).items() if OF_A_POLICY.search(path) is None}
    for path in [path for path in whole if path.endswith(".first_word")]:
        words, first = whole[path.replace("first_word", "words")], whole.pop(path)
        whole[path.replace("first_word", "words")] = words[first : first + len(words) - WORDS_TO_ALIGN]
    if policy != "lru":
        return {path: value for path, value in whole.items() if ".stack" not in path}
    return whole


def is_raised_next(site: Site) -> bool:
    try:
        site.pool.find_one(NAMES[0])
    except KeyboardInterrupt:
        return True
    return False


def problem(site: Site, name: str, error: BaseException | None, reached: bool, after: bool) -> str:
    if not isinstance(error, KeyboardInterrupt) and not is_raised_next(site):
        return f"the interrupt got lost: {error!r}"
    site.pool.check()
    if not reached and not after:
        return "neither before nor after"
    return "done, and its result is lost" if after and isinstance(error, KeyboardInterrupt) and name in GIVE else ""


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_anywhere_leaves_the_state_before_or_after(policy: str) -> None:
    num_points, broken = 0, []
    gc.disable()
    try:
        for name, call in CALLS.items():
            # Once for what Python remembers after the first time.
            Injection(-1, OUTSIDE).run(lambda call=call: call(Site(policy)))
            site, whole = Site(policy), Injection(-1, OUTSIDE)
            before = state(site, policy)
            whole.run(lambda call=call, site=site: call(site))
            after = state(site, policy)
            for point in range(whole.num_events):
                site, injection = Site(policy), Injection(point, OUTSIDE)
                error = injection.run(lambda call=call, site=site: call(site))
                reached = state(site, policy)
                found = problem(site, name, error, reached == before, reached == after and after != before)
                if found:
                    told = differences(reached, before, after)
                    broken.append(f"{name}, point {point} at {injection.where}: {found}: {told}")
                num_points += 1
    finally:
        gc.enable()
    assert broken == []
    assert num_points > 150
