"""Hints and wishes to retain go to all engines of a fleet: each has sessions and prompts of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ...answers import HintOutcome
from ..errors import ApiError, unavailable
from ..http.routes import Wish, retain, tell
from ..openai.hints import Hint

#: The first of these that an engine says is what came of a hint.
_BEST = [each.value for each in (HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.REFUSED, HintOutcome.UNKNOWN)]
#: Has each engine do something between two steps; returns what they say, errors for clients included.
AskEngines = Callable[[Callable[[Any], Any]], Awaitable[list[Any]]]


class AllEngines:
    """Asks the engines of a fleet (an `EngineAsker`)."""

    def __init__(self, ask: AskEngines) -> None:
        self._ask = ask

    async def hint(self, said: list[Hint]) -> list[str]:
        """Give the hints to all: a session may have been on several. Of what came of each, return the best."""
        told = _counts(await self._ask(partial(tell, said)))
        return [min(outcomes, key=_BEST.index) for outcomes in zip(*told, strict=True)]

    async def retain(self, wish: Wish) -> tuple[int, int]:
        """Have each retain what it has of the prompt; return the numbers of the one that retains most."""
        counts: list[tuple[int, int]] = _counts(await self._ask(partial(retain, wish)))
        return max(counts, key=lambda count: count[::-1])


def _counts(told: list[Any]) -> list[Any]:
    """Return answers without errors. Raises `ApiError`, the first one, where there is no other answer."""
    answers = [each for each in told if not isinstance(each, ApiError)]
    if not answers:
        raise told[0] if told else unavailable("no replica is ready", 1)
    return answers
