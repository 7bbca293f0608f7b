"""Random numbers, a batch at a time: numpy draws them, plain Python takes them one by one.

Each stream has a generator of its own, so what one draws does not move another, and a longer trace begins as a shorter.

Texts that many prompts begin with are drawn here too. A block that such a text fills alone has one id forever. The
block in which it ends also holds what follows, so that one is new in each prompt: equal ids mean equal prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..fields import read_only

BATCH = 1024


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Make independent generators from one seed."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def lognormal(rng: np.random.Generator, median: float, spread: float, high: int, count: int) -> NDArray[np.int64]:
    """(count,) lengths in tokens from 1 to high: exp of a normal of mean ln(median) and deviation `spread`."""
    logarithms = np.minimum(np.log(median) + spread * rng.standard_normal(count), 60.0)
    clipped: NDArray[np.float64] = np.clip(np.rint(np.exp(logarithms)), 1, high)
    return clipped.astype(np.int64)


def lengths(rng: np.random.Generator, median: float, spread: float, high: int) -> Iterator[int]:
    """Yield lengths without end, as `lognormal` draws them."""
    while True:
        yield from lognormal(rng, median, spread, high, BATCH).tolist()


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Yield numbers from 0 to below 1 without end."""
    while True:
        yield from rng.random(BATCH).tolist()


def numbers_below(rng: np.random.Generator, count: int) -> Iterator[int]:
    """Yield integers from 0 to below count, each as likely, without end."""
    while True:
        yield from rng.integers(0, count, BATCH).tolist()


def zipf(rng: np.random.Generator, count: int, exponent: float) -> Iterator[int]:
    """Yield integers from 0 to below count without end; number k is drawn in proportion to 1 / (k + 1)**exponent."""
    weights = np.cumsum(1.0 / np.arange(1, count + 1) ** exponent)
    while True:
        found = np.searchsorted(weights, rng.random(BATCH) * weights[-1], side="right")
        yield from np.minimum(found, count - 1).tolist()


def geometric(rng: np.random.Generator, mean: float) -> Iterator[int]:
    """Integers from 1 with the given mean (1 or more), without end."""
    while True:
        yield from rng.geometric(1.0 / mean, BATCH).tolist()


def arrivals(
    rng: np.random.Generator, rate: float, on_seconds: float, off_seconds: float
) -> Iterator[tuple[float, int]]:
    """(seconds, burst) of arrivals without end, the first at 0; to the microsecond. burst: number of the on-phase.

    Without off-phases a Poisson process of the given rate, and one burst. With them an on/off process: a Poisson
    process during exponential on-phases, so much faster that the mean rate is the given one.
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
    """`count` texts of fixed lengths. 16 bytes each; the ids are made when asked for.

    tokens: (count,) their lengths. num_ids: how many ids they take, from 0.
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


def continued(prefix: NDArray[np.int64], num_tokens: int, block_size: int, next_id: int) -> NDArray[np.int64]:
    """The ids of a prompt of num_tokens that begins with the full blocks `prefix`; the others are new, from next_id."""
    missing = -(-num_tokens // block_size) - len(prefix)
    return read_only(np.concatenate((prefix, np.arange(next_id, next_id + missing))))
