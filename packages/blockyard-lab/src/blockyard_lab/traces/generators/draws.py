"""Endless streams of random values, drawn by numpy in batches.

Each stream has its own generator, so draws of one do not affect another, and a longer trace starts with the shorter
one.

`SharedTexts` are texts that many prompts start with. A block that such a text fills has a fixed id. The text's last,
partly filled block also holds the tokens that follow, so its id is new in each prompt: equal ids mean equal prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..line_fields import read_only

BATCH = 1024


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Return `count` independent random generators made from one seed."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def lognormal(rng: np.random.Generator, median: float, spread: float, high: int, count: int) -> NDArray[np.int64]:
    """Return (count,) lengths from 1 to `high`: exp of a normal with mean ln(median) and deviation `spread`."""
    logarithms = np.minimum(np.log(median) + spread * rng.standard_normal(count), 60.0)
    clipped: NDArray[np.float64] = np.clip(np.rint(np.exp(logarithms)), 1, high)
    return clipped.astype(np.int64)


def lengths(rng: np.random.Generator, median: float, spread: float, high: int) -> Iterator[int]:
    """Yield lognormal lengths (see `lognormal`)."""
    while True:
        yield from lognormal(rng, median, spread, high, BATCH).tolist()


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Yield numbers from 0 up to, but not including, 1."""
    while True:
        yield from rng.random(BATCH).tolist()


def numbers_below(rng: np.random.Generator, count: int) -> Iterator[int]:
    """Yield uniform integers from 0 to count - 1."""
    while True:
        yield from rng.integers(0, count, BATCH).tolist()


def zipf(rng: np.random.Generator, count: int, exponent: float) -> Iterator[int]:
    """Yield integers from 0 to count - 1. Number k has a probability proportional to 1 / (k + 1)**exponent."""
    weights = np.cumsum(1.0 / np.arange(1, count + 1) ** exponent)
    while True:
        found = np.searchsorted(weights, rng.random(BATCH) * weights[-1], side="right")
        yield from np.minimum(found, count - 1).tolist()


def geometric(rng: np.random.Generator, mean: float) -> Iterator[int]:
    """Yield geometric integers from 1 with the given mean, 1 or more."""
    while True:
        yield from rng.geometric(1.0 / mean, BATCH).tolist()


def arrivals(
    rng: np.random.Generator, rate: float, on_seconds: float, off_seconds: float
) -> Iterator[tuple[float, int]]:
    """Yield (seconds, burst) of each arrival, the first at 0, rounded to microseconds.

    Without off-phases this is a Poisson process of the given rate, and `burst` is 0. With them, arrivals come only in
    on-phases, at a rate raised so that the mean stays the same; `burst` numbers the on-phase.

    Args:
        rng: source of randomness.
        rate: mean arrivals per second.
        on_seconds: mean length of an on-phase (exponential).
        off_seconds: mean length of an off-phase (exponential); 0 for none.
    """
    if off_seconds == 0:
        yield from ((seconds, 0) for seconds in _poisson(rng, rate))
        return
    phases, pause, burst = rng.spawn(1)[0], 0.0, 0
    end = phases.exponential(on_seconds)
    for seconds in _poisson(rng, rate * (on_seconds + off_seconds) / on_seconds):
        while seconds > end:
            end += phases.exponential(on_seconds)
            pause += phases.exponential(off_seconds)
            burst += 1
        yield round(seconds + pause, 6), burst


def _poisson(rng: np.random.Generator, rate: float) -> Iterator[float]:
    now = 0.0
    yield now
    while True:
        times = now + np.cumsum(rng.standard_exponential(BATCH)) / rate
        now = float(times[-1])
        yield from np.round(times, 6).tolist()


class SharedTexts:
    """`count` texts of fixed lengths. Stores 16 bytes per text and computes the ids on demand.

    Attributes:
        tokens: (count,) length of each text.
        num_ids: number of ids in use, from 0.
    """

    def __init__(
        self, rng: np.random.Generator, count: int, median: float, spread: float, longest: int, block_size: int
    ) -> None:
        self.tokens: list[int] = lognormal(rng, median, spread, longest, count).tolist()
        ends = np.cumsum([length // block_size for length in self.tokens])
        self.num_ids = int(ends[-1])
        self._starts: list[int] = [0, *ends.tolist()]

    def ids(self, text: int) -> NDArray[np.int64]:
        """Return the ids of the blocks that the text fills, in order."""
        return np.arange(self._starts[text], self._starts[text + 1])


def extend_prefix(prefix: NDArray[np.int64], num_tokens: int, block_size: int, next_id: int) -> NDArray[np.int64]:
    """Return the block ids of a prompt that starts with the full blocks `prefix`. Other ids are new, from `next_id`."""
    missing = -(-num_tokens // block_size) - len(prefix)
    return read_only(np.concatenate((prefix, np.arange(next_id, next_id + missing))))
