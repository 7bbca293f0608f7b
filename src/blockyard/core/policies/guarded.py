"""A floor under any policy: its deviations from least recently used are paid from what they have won."""

from typing import Final

from mypy_extensions import i64

from ...errors import InvariantError
from .around import AroundPolicy
from .base import EvictionPolicy
from .budget import DeviationBudget
from .idle_tree import IdleTree
from .shadow_lru import ShadowLRU

NONE: Final[i64] = 0


class Guarded(AroundPolicy):
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

    def choice(self) -> i64:
        """The policy's latest choice, while blocks below it go first; 0 for none. The policy knows it no longer."""
        return self._chosen

    def needs_paths(self) -> bool:
        """It wants to be told of parents and misses."""
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
        if self._shadow.is_orphan(block):
            self._budget.hit()
        self.policy.hit(block, key)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._shadow.remove(block)
        self._leave(block)
        if block == self._chosen:
            self._chosen = NONE
        else:
            self.policy.remove(block)

    def _leave(self, block: i64) -> None:
        self._tree.unlink(block)
        self._num_idle -= 1
        if block == self._place:
            self._place = self._chosen

    def evict(self) -> i64:
        """The policy's choice, or what stands below it; without credit, the oldest orphan."""
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
        """The oldest orphan, or an orphan below it."""
        orphan = self._shadow.oldest_orphan()
        leaf = self._tree.leaf_below(orphan)
        return self._tell(leaf if self._shadow.is_orphan(leaf) else orphan)

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
