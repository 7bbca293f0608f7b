"""Waiting requests and the order of admission: `from blockyard.admission import AdmissionRule`.

`KVCacheManager.waiting` and `BlockPool.waiting` make the queue. docs/admission.md explains when to use it.
"""

from .core.waiting.queue import WaitingQueue
from .core.waiting.rule import AdmissionRule

__all__ = ["AdmissionRule", "ServiceEstimate", "WaitingQueue"]

#: Seconds per prompt token before the first measurement.
_FIRST_PACE = 1e-4
#: Weight of the earlier steps in the measured pace, at each step.
_PACE_DECAY = 0.98
#: Expected tokens of an answer before the first one ends, and the weight of each one that ends.
_FIRST_ANSWER = 256.0
_ANSWER_WEIGHT = 0.05


class ServiceEstimate:
    """Measures the pace of a device and the length of answers, for an `AdmissionRule`."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._answer = _FIRST_ANSWER

    @property
    def pace(self) -> float:
        """Seconds per prompt token, over the last fifty or so steps with prompts; 0.1 ms before the first."""
        return self._seconds / self._tokens if self._tokens else _FIRST_PACE

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Measure a step that computed prompt tokens, as part of its `num_tokens`; steps of 0 seconds are ignored."""
        if seconds > 0:
            self._seconds = _PACE_DECAY * self._seconds + seconds
            self._tokens = _PACE_DECAY * self._tokens + num_tokens

    def seconds(self, num_missing: int, _: int) -> float:
        """Return the seconds to compute the missing tokens of a prompt: `seconds` of an `AdmissionRule`."""
        return num_missing * self.pace

    def expected_answer(self, max_tokens: int) -> int:
        """Return how many tokens to expect of an answer that has at most `max_tokens`."""
        return min(max_tokens, round(self._answer))

    def note_answer(self, num_tokens: int) -> None:
        """Count an answer that has ended."""
        self._answer += _ANSWER_WEIGHT * (num_tokens - self._answer)
