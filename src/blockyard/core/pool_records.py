"""What a pool remembers and what it keeps: history, residency, events, who is told of evictions, and the policy."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..answers import AllocationEvent, Residency
from ..arguments import shown
from ..errors import InvalidArgument
from ..kv_events import KVCacheEvents
from .gate import Gate
from .index.prompt import make_chunk
from .pool.eviction import EvictionOrder, wished_end, wished_priority
from .pool.figures import PoolFigures
from .pool.found import find_computed
from .pool.ledger import BlockLedger
from .pool.listener import LossListener, LossTeller
from .pool.observer import Clock
from .store.event_reader import EventReader
from .watch.history import AllocationHistory
from .watch.residency import ResidencySampler


class PoolRecords(PoolFigures):
    """The part of `BlockPool` that a manager does itself for its own pool: of that one, ask the manager."""

    def __init__(self, ledger: BlockLedger, gate: Gate, manager: str, history: AllocationHistory | None) -> None:
        super().__init__(ledger)
        self._gate = gate
        self._manager = manager
        self._history = history
        self._clock = Clock()
        self._order = EvictionOrder(ledger, gate.interruption, self._clock, 0)
        self._residency: ResidencySampler | None = None
        self._events: EventReader | None = None
        self._teller: LossTeller | None = None

    # What happened.

    def history(self) -> list[AllocationEvent]:
        """The latest `history_size` events, oldest first. O(history_size). Empty when it is off."""
        self._gate.enter("history")
        try:
            return [] if self._history is None else self._history.events()
        finally:
            self._gate.leave()

    def residency(self) -> Residency:
        """How long sampled blocks live, lie idle and wait for reuse, in the units of `advance_time`. O(1).

        Raises `InvalidArgument` without a `residency_sample`.
        """
        self._gate.enter("residency")
        try:
            self._require_alone("residency")
            if self._residency is None:
                raise InvalidArgument("residency_sample is 0; blocks are followed with residency_sample=1 or more")
            return self._residency.residency()
        finally:
            self._gate.leave()

    def take_events(self) -> KVCacheEvents:
        """What prompts can hit, and can hit no more, since the last call. O(what happened).

        See `KVCacheManager.take_events`; a `KVEventPublisher` takes a pool too. Raises `InvalidArgument` unless the
        pool was made with `enable_kv_cache_events=True`.
        """
        self._gate.enter("take_events")
        try:
            self._require_alone("take_events")
            if self._events is None:
                raise InvalidArgument(
                    "enable_kv_cache_events is False; events are noted with enable_kv_cache_events=True"
                )
            return self._events.take()
        finally:
            self._gate.leave_with_result()

    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether this pool notes events itself, for `take_events`."""
        return self._events is not None

    @property
    def on_evict(self) -> Callable[[npt.NDArray[np.int32]], object] | None:
        """Called after each call in which blocks lost their content, with their ids, int32 (n,), in order; or None.

        The content was evicted, dropped by a shrinking pool, uncached, or written over (`copy_on_write`). A reset is
        no such call. It may call the pool; what it raises becomes a RuntimeWarning.
        """
        return None if self._teller is None else self._teller.callback

    @on_evict.setter
    def on_evict(self, callback: object) -> None:
        self._gate.enter("on_evict")
        try:
            if callback is not None and not callable(callback):
                raise InvalidArgument(f"on_evict is {shown(callback)}; it must be a callable that takes ids, or None")
            if self._teller is None:
                self._teller = LossTeller(self._gate)
                self._gate.told.append(self._teller)
                self._ledger.watch(LossListener(self._teller))
            self._teller.callback = callback
        finally:
            self._gate.leave()

    # What stays cached.

    def set_eviction_policy(self, policy: object) -> None:
        """Let another policy choose what is evicted: a name, or a class or callable that makes one from num_blocks.

        What retention holds back it holds back no longer. O(num_blocks). Raises `InvalidArgument`; `PolicyError` where
        making it raises.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._require_alone("set_eviction_policy")
            self._order.install(policy)
        finally:
            self._gate.leave()

    def retain(
        self, token_ids: object, priority: object = 1, expires_at: object = None, extra_keys: object = ()
    ) -> int:
        """Ask that the cached blocks `token_ids` begins with be evicted after all others. O(blocks * log retained).

        See `KVCacheManager.retain`. Returns how many blocks it concerns. Raises `OverBudget`, and `InvalidArgument`
        without `retention_blocks`.
        """
        self._gate.enter("retain")
        try:
            self._require_alone("retain")
            prompt = make_chunk(token_ids, extra_keys, self.block_size).at(0, self.block_size)
            level = wished_priority(priority)
            until = wished_end(expires_at)
            found = find_computed(self._ledger, prompt)
            blocks = [int(block) for block in self._ledger.index.found[:found]]
            return self._order.retain(blocks, level, until)
        finally:
            self._gate.leave()

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that `retain` keeps now, held or idle; 0 without a budget. O(1)."""
        return self._order.num_retained

    def advance_time(self, now: object) -> None:
        """Tell the pool what time it is, in any unit: for expiries, residency and the history. It never goes back."""
        self._gate.enter("advance_time")
        try:
            self._require_alone("advance_time")
            self._order.advance(now)
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; blocks stay with their holders. O(num_blocks).

        A lease that had cached blocks says so when it is to go on (`StaleBlocks`).
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._require_alone("reset_prefix_cache")
            self._ledger.reset()
        finally:
            self._gate.leave()

    def reset(self) -> None:
        """The same as `reset_prefix_cache`."""
        self._gate.enter("reset")
        try:
            self._require_alone("reset_prefix_cache")
            self._ledger.reset()
        finally:
            self._gate.leave()

    def _require_alone(self, call: str) -> None:
        if self._manager:
            raise InvalidArgument(f"this pool belongs to a KVCacheManager; ask the manager for {call}")
