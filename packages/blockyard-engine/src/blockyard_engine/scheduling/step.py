"""What the scheduler hands to the runner: the batch of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard import StepPlan

from ..request import Branch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one branch computes in a step: `count` known tokens, then `draft`, which is guessed.

    samples: whether its last known token is among them, so that its logits choose the next one.
    """

    branch: Branch
    count: int
    draft: list[int]
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Count the tokens to compute."""
        return self.count + len(self.draft)

    def cut(self, num_scheduled: int) -> StepRow:
        """Return the row with as many tokens as the plan has, which are fewer where a state is kept."""
        return self if num_scheduled == self.num_tokens else StepRow(self.branch, num_scheduled, [], False)

    @property
    def num_logits(self) -> int:
        """Tokens, the last ones, whose logits are needed."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class ScheduledStep:
    """The batch of one step. `rows` and the plan's belong together, and every row has its slots.

    num_computed, num_scheduled: (B,) tokens before the step, tokens in it. preempted: branches that were preempted to
    make room.
    """

    rows: list[StepRow] = field(default_factory=list)
    plan: StepPlan | None = None
    num_computed: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    num_scheduled: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    preempted: list[Branch] = field(default_factory=list)

    def fill(self, rows: list[StepRow], plan: StepPlan) -> None:
        """Make this the batch; a plan's arrays are the cache's, so what outlives the next call is copied."""
        self.rows, self.plan = rows, plan
        self.num_computed = plan.num_computed.astype(np.int64)
        self.num_scheduled = plan.num_scheduled.astype(np.int64)

    def clear(self) -> None:
        """Make this a step without a batch; who was preempted on the way stays so."""
        self.rows, self.plan = [], None
        self.num_computed = self.num_scheduled = np.empty(0, np.int64)

    @property
    def num_known(self) -> int:
        """Count the tokens of the step that are not guessed."""
        return sum(row.count for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Count the tokens of the step that are guessed."""
        return sum(len(row.draft) for row in self.rows)
