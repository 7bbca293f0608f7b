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


#: A run draws one part of so many.
PARTS = 6


def draws(whole: int, interpreted: int) -> int:
    """Return how much a random test draws: a sixth of `whole` in a run, all of it with TEST_DRAWS=6, before a release.

    Each run has its own seed, so six runs find as much as one with all draws. The interpreted build is slow.
    """
    import blockyard  # not before tests/conftest.py has chosen the build

    return max(1, whole * num_parts() // PARTS) if blockyard.compiled() else interpreted


def num_parts() -> int:
    """Return how many sixths of its draws a run takes: one, or TEST_DRAWS."""
    return min(max(int(os.environ.get("TEST_DRAWS", "1")), 1), PARTS)
