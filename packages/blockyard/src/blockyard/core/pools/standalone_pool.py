"""A pool without a manager: its own clock and policy, what it remembers, and its size."""

from ...answers import Residency, Resize
from ...arguments import require_number
from ...cache_options import MAX_BLOCKS
from ...errors import InvalidArgument
from ..blocks.eviction import EvictionOrder, wished_policy
from ..blocks.lease import LeaseBook
from ..blocks.ledger import BlockLedger
from ..blocks.observer import Clock
from ..face import read_int
from ..gate import Gate
from ..watch.history import AllocationHistory
from ..watch.residency import ResidencySampler
from .lease_pool import LeasePool


class StandalonePool(LeasePool):
    """What a manager does itself for its own pool; the base of `BlockPool` and `NamedPool`."""

    def __init__(self, ledger: BlockLedger, retention_blocks: int, history_size: int, residency_sample: int) -> None:
        super().__init__(LeaseBook(ledger), Gate(), None)
        self._clock = Clock()
        self._order = EvictionOrder(ledger, self._gate.interruption, self._clock, retention_blocks)
        self._residency: ResidencySampler | None = None
        if history_size > 0:
            self._history = AllocationHistory(history_size, ledger.queue, self._clock)
            ledger.watch(self._history)
        if residency_sample > 0:
            self._residency = ResidencySampler(residency_sample, self._clock, ledger.num_blocks)
            ledger.watch(self._residency)

    def residency(self) -> Residency:
        """Return how long sampled blocks live, lie idle and wait for reuse, in the units of `advance_time`. O(1).

        Raises `InvalidArgument` without a `residency_sample`.
        """
        self._gate.enter("residency")
        try:
            if self._residency is None:
                raise InvalidArgument("residency_sample is 0; blocks are followed with residency_sample=1 or more")
            return self._residency.residency()
        finally:
            self._gate.leave()

    def set_eviction_policy(self, policy: object) -> None:
        """Let another policy choose what is evicted: a name, or a class or callable that makes one from num_blocks.

        What retention holds back it holds back no longer. O(num_blocks). Raises `InvalidArgument`; `PolicyError` where
        making it raises.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._order.install(wished_policy(policy, self._ledger))
        finally:
            self._gate.leave()

    def advance_time(self, now: object) -> None:
        """Tell the pool what time it is, in any unit: for expiries, residency and the history. It never goes back."""
        self._gate.enter("advance_time")
        try:
            self._order.advance(require_number("now", now))
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; blocks stay with their holders. O(num_blocks).

        A lease that had cached blocks says so when it is to go on (`StaleBlocks`).
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._ledger.reset()
            self._gate.note_change()
        finally:
            self._gate.leave()

    def resize(self, num_blocks: object) -> Resize:
        """Grow or shrink to `num_blocks` blocks, the null block included. O(num_blocks); never moves a held block.

        Growing is done at once. Shrinking evicts the idle blocks beyond the end, and answers DEFERRED while some are
        held there: each goes when it is freed (`num_retiring_blocks`). Raises `InvalidArgument`, `NotEnoughMemory`.
        """
        self._gate.enter("resize")
        try:
            target = read_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
            room = self._ledger.make_room(target)
            self._gate.note_change()
            return self._ledger.resize(target, room)
        finally:
            self._gate.leave()
