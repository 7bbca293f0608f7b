"""`StandalonePool`: a pool without a manager, with its own clock, policy, history and size."""

from ...answers import Residency, Resize
from ...arguments import require_number
from ...cache_options import MAX_BLOCKS
from ...errors import InvalidArgument
from ..blocks.eviction import EvictionOrder, resolve_policy
from ..blocks.lease import LeaseRegistry
from ..blocks.ledger import BlockLedger
from ..blocks.observer import Clock
from ..face import read_int
from ..gate import Gate
from ..watch.history import AllocationHistory
from ..watch.residency import ResidencySampler
from .lease_pool import LeasePool


class StandalonePool(LeasePool):
    """Base of `BlockPool` and `NamedPool`: clock, policy, history and size, which a manager has for its pool."""

    def __init__(self, ledger: BlockLedger, retention_blocks: int, history_size: int, residency_sample: int) -> None:
        super().__init__(LeaseRegistry(ledger), Gate(), None)
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
        """Return how long sampled blocks lived, lay idle and waited for reuse, in the units of `advance_time`. O(1).

        Raises:
            InvalidArgument: if the pool was made without `residency_sample`.
        """
        self._gate.enter("residency")
        try:
            if self._residency is None:
                raise InvalidArgument(
                    "residency_sample is 0; make the pool with residency_sample=1 or more to follow blocks"
                )
            return self._residency.residency()
        finally:
            self._gate.leave()

    def set_eviction_policy(self, policy: object) -> None:
        """Replace the eviction policy. All retentions end. O(num_blocks).

        Args:
            policy: the name of a policy, or a class or function that makes one from num_blocks.

        Raises:
            InvalidArgument: if the name is unknown, or it makes no `EvictionPolicy`.
            PolicyError: if making it raises.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._order.install(resolve_policy(policy, self._ledger))
        finally:
            self._gate.leave()

    def advance_time(self, now: object) -> None:
        """Set the time for expiries, residency and the history, in any unit. It never goes back.

        Args:
            now: the time, at least that of the last call.

        Raises:
            InvalidArgument: if it is before the last time, or not finite.
        """
        self._gate.enter("advance_time")
        try:
            self._order.advance(require_number("now", now))
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """Uncache all blocks; their holders keep them. O(num_blocks).

        A lease that had cached blocks raises `StaleBlocks` when it caches further ones.
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._ledger.reset()
            self._gate.note_change()
        finally:
            self._gate.leave()

    def resize(self, num_blocks: object) -> Resize:
        """Grow or shrink the pool. Held blocks are never moved. O(num_blocks).

        Shrinking evicts idle blocks beyond the new end; held ones there are removed when they are freed
        (`num_retiring_blocks`).

        Args:
            num_blocks: blocks of the pool, the null block included; 1 to 2**27.

        Returns:
            APPLIED, or DEFERRED while blocks beyond the new end are held.

        Raises:
            InvalidArgument: if the size is outside its limits.
            NotEnoughMemory: if the system has no memory for it.
        """
        self._gate.enter("resize")
        try:
            target = read_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
            room = self._ledger.make_room(target)
            self._gate.note_change()
            return self._ledger.resize(target, room)
        finally:
            self._gate.leave()
