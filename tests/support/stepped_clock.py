"""A clock that moves when an engine makes a step, and at no other time."""

from __future__ import annotations

from typing import Any

from blockyard.engine import Engine, StepReport


class SteppedClock:
    """Seconds since the test began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick_each_step(self, engine: Engine, seconds: float) -> None:
        """From now on a step of the engine takes so long."""
        step = engine.step

        def slow_step(**options: Any) -> StepReport:
            self.now += seconds
            return step(**options)

        engine.step = slow_step  # type: ignore[method-assign]
