"""After Ctrl-C in a caller at any moment of any call the tier works, and a transfer was queued or was not."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockyard_testing.patience import wait_until
from blockyard_testing.seeds import draws, run_seed
from blockyard_tiers import FileTier

from .support import load, load_transfer, name_of, store, store_transfer


@contextmanager
def alarms() -> Iterator[None]:
    """Let SIGALRM, which has a timer, do what SIGINT does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(call: Callable[[], Any], seconds: float) -> bool:
    """Call a function; return whether it was interrupted."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupted_call_leaves_a_tier_that_works(tmp_path: Path) -> None:
    draw, counts = random.Random(run_seed()), Counter[str]()
    tier = FileTier(tmp_path, 2**30)
    assert store(tier, [1, 2, 3]).is_done
    number = 100

    def is_quiet() -> bool:
        tier.take_results()
        return not tier._busy and not tier._has_work()

    with alarms():
        while counts.total() < draws(2000, 400):
            number += 1
            other = draw.randrange(4, 60)
            stored, loaded = store_transfer(number, [other, 2]), load_transfer(number, [1, 2])
            names = [name_of(1), name_of(other + 50)]
            calls: dict[str, Callable[[], Any]] = {
                "store": lambda transfer=stored: tier.store(transfer),
                "load": lambda transfer=loaded: tier.load(transfer),
                "ask": lambda names=names: tier.longest_prefix(names),
                "first": lambda names=names: tier.first_present(names[::-1]),
                "drop": lambda names=names: tier.drop(names[1:]),
                "results": tier.take_results,
                "stats": tier.stats,
            }
            what = draw.choice(list(calls))
            counts[what] += interrupted(calls[what], draw.uniform(1e-6, 6e-5))
            if draw.random() < 0.1:
                wait_until(is_quiet)
                tier.check()
                assert tier.stats().num_waiting == 0
    wait_until(is_quiet)
    assert load(tier, [1, 2, 3]) == {}
    assert tier.close()
    tier.check()
