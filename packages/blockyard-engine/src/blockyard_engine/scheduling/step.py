"""The batch of a step, as the scheduler passes it to the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard import StepPlan

from ..request import Branch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens that one branch computes in a step: `count` known tokens, then the guessed ones of `draft`.

    Attributes:
        samples: whether its last known token is included, so that its logits choose the next one.
    """

    branch: Branch
    count: int
    draft: list[int]
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return self.count + len(self.draft)

    def cut(self, num_scheduled: int) -> StepRow:
        """Return the row shortened to `num_scheduled`: the plan ends a prompt's chunk at a checkpoint position."""
        return self if num_scheduled == self.num_tokens else StepRow(self.branch, num_scheduled, [], False)

    @property
    def num_logits(self) -> int:
        """Number of last tokens whose logits are needed."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class ScheduledStep:
    """The batch of one step; each entry of `rows` has its slots in `plan`.

    Attributes:
        num_computed: tokens of each sequence before the step, (B,).
        num_scheduled: tokens of each sequence in the step, (B,).
        preempted: branches that were preempted to make room.
    """

    rows: list[StepRow] = field(default_factory=list)
    plan: StepPlan | None = None
    num_computed: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    num_scheduled: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    preempted: list[Branch] = field(default_factory=list)

    def fill(self, rows: list[StepRow], plan: StepPlan) -> None:
        """Set the batch. Copies the plan's arrays that are needed after the next call of the cache."""
        self.rows, self.plan = rows, plan
        self.num_computed = plan.num_computed.astype(np.int64)
        self.num_scheduled = plan.num_scheduled.astype(np.int64)

    def clear(self) -> None:
        """Remove the batch; the list of preempted branches stays."""
        self.rows, self.plan = [], None
        self.num_computed = self.num_scheduled = np.empty(0, np.int64)

    @property
    def num_known(self) -> int:
        """Number of tokens in the step that are not drafts."""
        return sum(row.count for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens in the step."""
        return sum(len(row.draft) for row in self.rows)
