"""Rounds in which the contestants take turns, so that a machine that becomes slower does so for all."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

from .contestant import Answer, Contestant
from .work import Work


class Standing:
    """What one contestant did: an answer a round."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.answers: list[Answer] = []
        self.rates: list[float] = []

    @property
    def rate(self) -> float:
        """New tokens a second, the median of the rounds."""
        return statistics.median(self.rates)

    def ratio_to(self, other: Standing) -> float:
        """How many times as fast as `other`: the median of the ratios within each round."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))


def play(contestants: Sequence[Contestant], work: Callable[[int], Work], rounds: int) -> list[Standing]:
    """A round that does not count, numbered 0, then `rounds` that do. Who begins changes from round to round."""
    standings = [Standing(contestant) for contestant in contestants]
    for standing in standings:
        standing.contestant.answer(work(0))
    for number in range(1, rounds + 1):
        first = (number - 1) % len(standings)
        for standing in standings[first:] + standings[:first]:
            _one_round(standing, work(number), number)
    return standings


def _one_round(standing: Standing, work: Work, number: int) -> None:
    answer = standing.contestant.answer(work)
    short = [len(tokens) for tokens in answer.token_ids if len(tokens) != work.num_new]
    if short or len(answer.token_ids) != len(work.prompts):
        raise RuntimeError(f"{standing.contestant.name} gave {short or len(answer.token_ids)} tokens or answers")
    standing.answers.append(answer)
    standing.rates.append(work.num_tokens / answer.seconds)
    print(f"round {number}: {standing.contestant.name}: {standing.rates[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
