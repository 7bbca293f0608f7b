"""Crowds: requests come in bursts, and most of a burst want the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...trace import TraceRequest
from .draws import arrivals, uniforms, zipf
from .options import option
from .system import System


@dataclass(kw_only=True)
class Bursts(System):
    """Bursts: shared system prompts as in `System`, in phases, with one favourite a phase.

    focus: share of a burst's requests that take its favourite. off_seconds is 40 unless it is given.
    """

    off_seconds: float = option(40.0, 0.0, 1e6)
    focus: float = option(0.7, 0.0, 1.0)

    def endless(self) -> Iterator[TraceRequest]:
        """The requests, without end. Memory: 16 bytes a system prompt."""
        when, rest = self._streams()
        popular = rest.pop()
        choices = uniforms(popular.spawn(1)[0])
        texts = zipf(popular, self.system_prompts, self.zipf)
        times = arrivals(when, self.rate, self.on_seconds, self.off_seconds)
        return self.questions(self._asked(times, texts, choices), rest)

    def _asked(
        self, times: Iterator[tuple[float, int]], texts: Iterator[int], choices: Iterator[float]
    ) -> Iterator[tuple[float, int]]:
        current, favourite = -1, 0
        for arrival, burst in times:
            if burst != current:
                current, favourite = burst, next(texts)
            yield arrival, favourite if next(choices) < self.focus else next(texts)
