"""Which request made a step fail: each of the step is tried alone, and the one that fails alone is aborted.

A model gives no name with its error. Alone, the guilty request fails again, and the innocent ones compute their next
token and keep it, so that nothing of them is lost or repeated. If none fails alone (memory was short, say), all go
on; each trial gives a token, so even a batch that always fails comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...engine import Engine, StepReport


@dataclass(slots=True)
class StepOutcome:
    """What became of one request's trial: the steps it made, and the error that ended it, if one did."""

    request_id: int
    reports: list[StepReport] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_of_use(self) -> bool:
        """Whether the request is aborted, or further than before."""
        return self.error is not None or any(report.num_tokens for report in self.reports)


def try_alone(engine: Engine) -> Iterator[StepOutcome]:
    """Try each request of the engine's last, failed step alone; one that fails is aborted.

    The step must have been made with `keep_on_error`. O(requests) steps, and more where a prompt is computed in chunks.
    """
    for request_id in engine.last_step_ids:
        engine.set_back()  # every trial begins with an empty pool, so that it fits for certain
        yield _try(engine, request_id)
    engine.set_back()


def _try(engine: Engine, request_id: int) -> StepOutcome:
    outcome = StepOutcome(request_id)
    try:
        while True:
            report = engine.step(only=(request_id,), keep_on_error=True)
            outcome.reports.append(report)
            if report.new_tokens or report.finished or report.num_tokens == 0:
                return outcome
    except Exception as error:
        outcome.error = error
        engine.abort_request(request_id)
        return outcome
