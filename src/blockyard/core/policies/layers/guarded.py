"""A floor under any policy: its deviations from least recently used are paid from what they have won."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ..base import EvictionPolicy, Layer
from .shadow import IdleTree, ShadowLRU

NONE: Final[i64] = 0
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


class Guarded(Layer):
    """`policy` chooses as long as its hits, with a small budget, stay above those of least recently used.

    A shadow of the same size, of keys alone, is kept in order of last use. When the policy's choice is a content that
    the shadow has, that content is *exposed*: a hit may be lost. It may choose while there is credit for one more
    exposed content; else the oldest *orphan* goes, a block that the shadow has dropped already. Blocks below the choice
    are evicted before it, so that no prefix loses its beginning first.

    strict: exposed contents count as lost, and the hits are at any time at least those of least recently used minus
    0.2 % of the references, whatever the policy does (docs/guard.md has the proof). Otherwise an exposed content counts
    for as much as such contents were asked for of late, times three, and a fifth at least; then it is 0.3 %.

    O(1) amortised an event on top of the policy's own cost; 54 to 56 bytes a block.
    """

    def __init__(self, policy: EvictionPolicy, strict: bool = False) -> None:
        num_blocks = int(policy.num_blocks)
        super().__init__(policy, num_blocks)
        self.strict = strict
        self._shadow = ShadowLRU(num_blocks)
        self._tree = IdleTree(self._shadow.rows, num_blocks)
        self._budget = DeviationBudget(num_blocks, strict)
        self._num_idle: i64 = 0
        self._num_hits: i64 = 0
        #: The block whose parent was told last.
        self._told: i64 = NONE
        #: The block that is hit next, if another one has the same content, and that one.
        self._doubled: i64 = NONE
        self._other: i64 = NONE
        #: The policy's latest choice, while blocks below it are evicted first, and where among them the next one is.
        self._chosen: i64 = NONE
        self._place: i64 = NONE
        #: Whether the call that runs has asked for a victim, and whether that failed and is being undone.
        self._has_asked = False
        self._is_undoing = False

    @property
    def num_shadow_hits(self) -> int:
        """Hits that least recently used would have had. O(1)."""
        return int(self._num_hits - self._budget.num_ahead)

    @property
    def num_exposed(self) -> int:
        """Contents that least recently used would still have, and the pool has not. O(1)."""
        return int(self._shadow.num_exposed)

    def passes(self, block: i64) -> bool:
        """False for the policy's latest choice, while blocks below it go first: the policy knows it no longer."""
        return block != self._chosen

    def needs_paths(self) -> bool:
        """It wants to be told of parents and misses."""
        return True

    def needs_hits(self) -> bool:
        """It counts them."""
        return True

    def follows(self, block: i64, parent: i64) -> None:
        """`parent` stands before `block`; `insert` follows."""
        self._tree.set_parent(block, parent)
        self._told = block

    def miss(self, key: i64) -> None:
        """A prompt asks for a content that is not cached."""
        self._begin()
        self._budget.reference()
        if self._shadow.ask(key):
            self._budget.lost_hit()

    def _begin(self) -> None:
        """A call that asks for something begins, or goes on."""
        if self._has_asked:
            self._budget.begin()
            self._has_asked = False
            self._is_undoing = False

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle. If the shadow has its content and no request asked, that is a lost hit too."""
        if self._shadow.ask(key) and not self._is_undoing:
            self._budget.lost_hit()
        if block != self._told and key != self._shadow.key(block):
            self._tree.set_parent(block, NONE)
        self._told = NONE
        self._shadow.insert(block, key)
        self._tree.link(block)
        self._num_idle += 1
        self.policy.insert(block, key, depth)

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        self._begin()
        self._budget.reference()
        self._num_hits += 1
        if self._shadow.ask(key):
            # LRU would have hit an equal block, which the pool has evicted; the shadow needs none besides this one.
            self._budget.exposures_ended(1)
        elif self._shadow.is_orphan(block):
            if block == self._doubled:
                self._take_place_of(self._other, key)
            else:
                self._budget.hit()
        self._doubled = NONE
        self.policy.hit(block, key)

    def doubled(self, block: i64, other: i64) -> None:
        """`other` has the content of `block`, and the shadow may have that one: a hit brings no credit."""
        self._doubled = block
        self._other = other
        self.policy.doubled(block, other)

    def _take_place_of(self, other: i64, key: i64) -> None:
        """An orphan is hit where LRU would have hit `other`, if the shadow has that: only one of them is used now."""
        if self._shadow.is_idle(other) and not self._shadow.is_orphan(other) and self._shadow.key(other) == key:
            self._shadow.drop(other)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._shadow.remove(block)
        self._leave(block)
        if block == self._chosen:
            self._chosen = NONE
            self.policy.spared(block)
        else:
            self.policy.remove(block)

    def _leave(self, block: i64) -> None:
        self._tree.unlink(block)
        self._num_idle -= 1
        if block == self._place:
            self._place = self._chosen

    def evict(self) -> i64:
        """Return the policy's choice, or what stands below it; without credit, the oldest orphan."""
        self.require_told()
        self._has_asked = True
        self._is_undoing = False
        self._budget.exposures_ended(self._shadow.trim(max(self._num_idle - 1, 0)))
        try:
            block = self._choice() if self._budget.allows(self._shadow.num_exposed) else self._orphan()
        except BaseException:
            self._fail()
            raise
        if not self._shadow.is_idle(block):
            self._fail()
            return block
        self._give(block)
        return block

    def _fail(self) -> None:
        self._budget.undo(self._shadow.num_exposed)
        self._is_undoing = True

    def _choice(self) -> i64:
        """The policy's choice, unless blocks stand below it; whatever it is, if it is not idle."""
        if self._chosen == NONE:
            chosen = self.policy.evict()
            if not self._shadow.is_idle(chosen):
                return chosen
            self._chosen = chosen
            self._place = chosen
        return self._tell(self._tree.leaf_below(self._place))

    def _orphan(self) -> i64:
        """Return the oldest orphan, or an orphan below it.

        One above what the shadow has is an equal block of a content that the shadow has too. It goes if the pool keeps
        that content in the shadow's block; else the next orphan goes.
        """
        oldest = self._shadow.oldest_orphan()
        orphan = oldest
        while orphan != NONE:
            leaf = self._tree.leaf_below(orphan)
            if self._shadow.is_orphan(leaf):
                return self._tell(leaf)
            if not self._shadow.is_exposed(self._shadow.key(orphan)):
                return self._tell(orphan)
            orphan = self._shadow.next_orphan(orphan)
        return self._tell(oldest)

    def _tell(self, block: i64) -> i64:
        """`block` goes, which the policy knows only if it was its choice."""
        if block != self._chosen:
            self.tell_gone(block)
        return block

    def _give(self, block: i64) -> None:
        if self._shadow.is_orphan(block):
            self._shadow.remove(block)
        else:
            self._shadow.expose(block)
        if block == self._place:
            self._place = self._tree.parent(block)
        self._leave(block)
        if block == self._chosen:
            self._chosen = NONE

    def clear(self) -> None:
        """No block is idle any more, in the shadow neither. What was won stays."""
        self._shadow.clear()
        self._num_idle = 0
        self._chosen = NONE
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1; the shadow fills as the pool does."""
        self.policy.grow(num_blocks)  # first: where it finds no memory, the guard is as it was
        self._shadow.grow(num_blocks)
        self._tree.move(self._shadow.rows, num_blocks)
        super().grow(num_blocks)
        self._budget.num_blocks = num_blocks

    def check(self) -> None:
        """Shadow and links are sound, and the inequality holds. O(num_blocks). Raises `InvariantError`."""
        self._shadow.check()
        idle = self._shadow.idle_blocks()
        if len(idle) != self._num_idle:
            raise InvariantError(f"guard: {len(idle)} blocks are idle, {self._num_idle} are counted")
        self._tree.check(idle)
        self._budget.check(self._shadow.num_exposed)
        self.policy.check()


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
        """Return whether one more content may be exposed besides `num_exposed`."""
        needed = (num_exposed + 1) * HIT
        if self.credit < needed and self.credit * WHOLE < self.share() * needed:
            return False
        return self.strict or self.credit + self._num_references * RISK >= needed

    def share(self) -> i64:
        """Return how much of a hit an exposed content is taken for, in 1,024ths."""
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
