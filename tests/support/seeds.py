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
