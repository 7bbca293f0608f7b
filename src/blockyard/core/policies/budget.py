"""How far a policy may deviate from least recently used: what it has won, and a small share of all references."""

from typing import Final

from mypy_extensions import i64

from ...errors import InvariantError

#: One hit, in the unit of credit.
HIT: Final[i64] = 10_000
#: Credit for each reference: hits that the guard may lose, in ten-thousandths.
STRICT_BUDGET: Final[i64] = 20
LEARNED_BUDGET: Final[i64] = 25
#: Shares, in 1,024ths: all, and the least that is asked for an exposed content however seldom such contents return.
WHOLE: Final[i64] = 1024
LEAST_SHARE: Final[i64] = 205
#: What is assumed of exposed contents: at first that they are all asked for, until an eighth of the capacity was seen.
PRIOR_SHIFT: Final[i64] = 3
LEAST_PRIOR: Final[i64] = 25
#: What exposed contents may lose beyond the credit, for each reference, in ten-thousandths of a hit.
RISK: Final[i64] = 5
#: The counts of exposed contents halve in this many times the capacity, and those of a small pool's later.
HALF_LIFE: Final[i64] = 4
HALF_LIFE_AT_LEAST: Final[i64] = 2000


class DeviationBudget:
    """Credit in hits: those that the pool had and the shadow had not, minus the other ones, plus a share of references.

    strict: an exposed content, which the shadow has and the pool has not, is taken for a hit that will be lost, so that
    credit never falls below the number of exposed contents. Otherwise for three times the share of exposed contents
    that were asked for of late, and a fifth at least; and they may be more than the credit by 0.05 % of the references.

    balance: the same without the cap of credit, which is one hit a block above the budget.
    """

    def __init__(self, num_blocks: i64, strict: bool) -> None:
        self.num_blocks = num_blocks
        self.strict = strict
        self.credit: i64 = 0
        self.balance: i64 = 0
        #: Hits that the pool had and the shadow had not, minus the other ones.
        self.num_ahead: i64 = 0
        #: Credit that came with the call that is running, in case it fails.
        self._gained: i64 = 0
        self._num_references: i64 = 0
        self._next_halving: i64 = 0
        #: Exposed contents that were asked for, and all whose exposure has ended: asked for or dropped by the shadow.
        self._asked: i64 = 0
        self._ended: i64 = 0

    def reference(self) -> None:
        """A prompt asks for one content."""
        self._num_references += 1
        self._gain(STRICT_BUDGET if self.strict else LEARNED_BUDGET)
        if self._num_references >= self._next_halving:
            self._next_halving = self._num_references + HALF_LIFE * (self.num_blocks + HALF_LIFE_AT_LEAST)
            self._asked >>= 1
            self._ended >>= 1

    def hit(self) -> None:
        """The pool had it, the shadow had not."""
        self.num_ahead += 1
        self._gain(HIT)

    def _gain(self, credit: i64) -> None:
        self.balance += credit
        self._gained += credit
        per_reference = STRICT_BUDGET if self.strict else LEARNED_BUDGET
        self.credit = min(self.credit + credit, self.num_blocks * HIT + self._num_references * per_reference)

    def lost_hit(self) -> None:
        """The shadow had it, the pool had not."""
        self.num_ahead -= 1
        self.balance -= HIT
        self.credit -= HIT
        self._asked += 1
        self._ended += 1

    def exposures_ended(self, count: i64) -> None:
        """`count` exposed contents were dropped by the shadow before anybody asked for them."""
        self._ended += count

    def allows(self, num_exposed: i64) -> bool:
        """Whether one more content may be exposed besides `num_exposed`."""
        needed = (num_exposed + 1) * HIT
        if self.credit < needed and self.credit * WHOLE < self.share() * needed:
            return False
        return self.strict or self.credit + self._num_references * RISK >= needed

    def share(self) -> i64:
        """How much of a hit an exposed content is taken for, in 1,024ths."""
        if self.strict:
            return WHOLE
        prior = max(self.num_blocks >> PRIOR_SHIFT, LEAST_PRIOR)
        return max(LEAST_SHARE, min(WHOLE, 3 * (self._asked + prior) * WHOLE // (self._ended + 3 * prior)))

    def begin(self) -> None:
        """Another call begins: what came with the one before is sure."""
        self._gained = 0

    def undo(self, num_exposed: i64) -> None:
        """The call that is running fails: what came with it was no hit and no reference.

        What exposed contents stand on already stays."""
        gained = max(min(self._gained, self.credit - num_exposed * HIT), 0)
        self.balance -= gained
        self.credit -= gained
        self._gained = 0

    def check(self, num_exposed: i64) -> None:
        """The inequality on which the floor stands. Raises `InvariantError`."""
        least = num_exposed * HIT - (0 if self.strict else self._num_references * RISK)
        if self.balance < least or self.credit > self.balance:
            raise InvariantError(
                f"guard: balance {self.balance}, credit {self.credit}, in 1/{HIT} hits, with {num_exposed} exposed "
                f"contents; the floor needs {least}"
            )
