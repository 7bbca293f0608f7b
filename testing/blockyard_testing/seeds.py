"""One seed for a test run, printed at its end with what random tests did: BLOCKYARD_SEED=N repeats the run."""

from __future__ import annotations

import os
import random

_VARIABLE = "BLOCKYARD_SEED"
#: Lines for the end of the test run.
lines: list[str] = []


def run_seed() -> int:
    """The seed given in the environment, or one drawn once for this process and its children."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(random.SystemRandom().randrange(2**32))
    return int(os.environ[_VARIABLE])


def draws(whole: int, interpreted: int) -> int:
    """How much a random test draws: a third of `whole` a run, all of it with TEST_DRAWS=3, before a release.

    Each run has a seed of its own, so three runs find what one of the whole would. The interpreted build is slow.
    """
    import blockyard  # not before tests/conftest.py has chosen the build

    return max(1, whole * thirds() // 3) if blockyard.compiled() else interpreted


def thirds() -> int:
    """How many thirds of its draws a run takes: one, or TEST_DRAWS."""
    return min(max(int(os.environ.get("TEST_DRAWS", "1")), 1), 3)
