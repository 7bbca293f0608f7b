"""`LeasePool`: blocks handed out as leases. The pool of a manager, and the base of standalone pools."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import AllocationEvent
from ...arguments import shown
from ...cache_options import MAX_BLOCKS
from ...errors import InvalidArgument, OutOfBlocks
from ..arrays import view_i32, view_i64, zeros_i32
from ..blocks.block import KVCacheBlock, block_states
from ..blocks.lease import (
    BlockLease,
    LeaseRegistry,
    check_leases,
    cut_off,
    grow,
    held_blocks,
    part_of,
    release_range,
    require_countable,
)
from ..blocks.observer import ChangeNotifier, LossCollector, LossNotifier
from ..face import read_bool, read_int, read_str, refuse_copy, refuse_pickle, refuse_subclass
from ..gate import Gate
from ..watch.history import AllocationHistory

#: The package of this class, whose classes may stand on it.
_PACKAGE = __name__.rpartition(".")[0]


class LeasePool:
    """Blocks that are handed out as leases.

    This is the pool of a `KVCacheManager`, whose sequences hold blocks too, and the base of `BlockPool` and
    `NamedPool`. Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1. One
    call runs at a time, as in `KVCacheManager`.
    """

    def __init__(self, registry: LeaseRegistry, gate: Gate, history: AllocationHistory | None) -> None:
        self._ledger = registry.ledger
        self._leases = registry
        self._gate = gate
        self._history = history
        self._losses: LossNotifier | None = None
        self._changes: ChangeNotifier | None = None
        gate.deferred.append(registry)

    # What is there. One number each: these may be asked at any time, also while a call runs.

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self._ledger.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block; 1 in a `NamedPool`, which knows no tokens."""
        return self._ledger.block_size

    @property
    def enable_prefix_caching(self) -> bool:
        """True if full blocks are indexed, for later prompts to hit."""
        return self._ledger.enable_prefix_caching

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block; while the pool shrinks, retiring ones included."""
        return self._ledger.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included. O(1)."""
        return self._ledger.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that leases or sequences hold. O(1)."""
        return self._ledger.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, held or not. O(1)."""
        return self._ledger.num_cached_blocks

    @property
    def num_retiring_blocks(self) -> int:
        """Held blocks beyond the end of a pool that has shrunk; each is removed when it is freed. O(1)."""
        return int(self._ledger.num_retiring)

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks evicted so far, by allocations or by shrinking. O(1)."""
        return int(self._ledger.num_evicted_blocks)

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks taken from the free queue so far, by allocations or hits. O(1)."""
        return int(self._ledger.num_allocated_blocks)

    @property
    def num_freed_blocks(self) -> int:
        """Blocks returned to the free queue so far. O(1)."""
        return int(self._ledger.num_freed_blocks)

    @property
    def peak_used_blocks(self) -> int:
        """Most blocks held at once so far. O(1)."""
        return int(self._ledger.peak_used_blocks)

    @property
    def version(self) -> int:
        """Number that grows whenever the set of cached contents changes, so that copies of the set can be updated.

        O(1).
        """
        return int(self._ledger.index.version)

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that are in use, 0 to 1. O(1)."""
        return self._ledger.usage

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """Return the number of holders of each block, int32 (num_blocks,), as a read-only view.

        The view is current until the pool grows. After shrinking it is longer than num_blocks, because it includes
        retiring blocks.
        """
        return view_i32(self._ledger.ref_cnt)

    def cached_mask(self) -> npt.NDArray[np.bool_]:
        """Return a bool for each block, True if it is in the index; as long as `ref_counts`, a copy."""
        cached: npt.NDArray[np.bool_] = view_i64(self._ledger.index.identity)[: 2 * len(self._ledger.ref_cnt) : 2] != 0
        return cached

    def states(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the `BlockState` of each block, uint8, as long as `ref_counts`. O(num_blocks)."""
        return block_states(self._ledger)

    def free_block_ids(self) -> npt.NDArray[np.int32]:
        """Return a copy of the free queue: blocks in the order of allocation, int32 (num_free_blocks,)."""
        self._gate.enter("free_block_ids")
        try:
            return np.array(self._ledger.queue.block_ids(), dtype=np.int32)
        finally:
            self._gate.leave()

    def free_block_after(self, block_id: object = 0) -> int:
        """Return the free block that is allocated next after `block_id`, or 0. O(1).

        Args:
            block_id: a free block; 0 for the first of the queue.

        Raises:
            InvalidArgument: if the block is held, or there is no such block.
        """
        return int(self._ledger.queue.next_free[self._free_or_null(block_id)])

    def free_block_before(self, block_id: object = 0) -> int:
        """Return the free block that is allocated right before `block_id`, or 0. O(1).

        Args:
            block_id: a free block; 0 for the last of the queue.

        Raises:
            InvalidArgument: if the block is held, or there is no such block.
        """
        return int(self._ledger.queue.prev_free[self._free_or_null(block_id)])

    def _free_or_null(self, block_id: object) -> i64:
        block = i64(read_int("block_id", block_id, 0, self._ledger.num_blocks - 1))
        if self._ledger.ref_cnt[block] > 0:
            raise InvalidArgument(f"block_id is {block}, which is held; only free blocks are in the queue")
        return block

    def leases(self) -> list[BlockLease]:
        """Return the leases that are not freed, oldest first; for a standalone pool, these are its leaks."""
        return list(self._leases.live.values())

    def block(self, block_id: object) -> KVCacheBlock:
        """Return one block with the leases that hold it. O(leases).

        Args:
            block_id: id of the block, 0 to num_blocks - 1.

        Raises:
            InvalidArgument: if there is no such block.
        """
        number = read_int("block_id", block_id, 0, int(self._ledger.capacity) - 1)
        self._gate.enter("block")
        try:
            return self._leases.describe(number)
        finally:
            self._gate.leave()

    # Leases.

    def get_new_blocks(self, num_blocks: object, *, holder: object = "") -> BlockLease:
        """Hold blocks from the head of the free queue; cached ones are evicted. O(num_blocks).

        In a manager with a CPU pool, the next plan saves what this evicts: carry one out (`reserve([])`) before you
        write into the blocks.

        Args:
            num_blocks: number of blocks.
            holder: a name for errors and leak reports.

        Raises:
            OutOfBlocks: if fewer are free.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("get_new_blocks")
        try:
            count = read_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            name = read_str("holder", holder)
            self._require_free(count)
            self._ledger.act("get_new_blocks", name)
            blocks = zeros_i32(count)
            lease = self._leases.make(blocks, name)
            self._take_new(lease, blocks, 0, count)
            return lease
        finally:
            self._gate.leave_with_result()

    def _require_free(self, count: int) -> None:
        ledger = self._ledger
        if count > ledger.queue.num_free:
            raise OutOfBlocks(
                f"num_blocks is {count}; only {self.num_free_blocks} of {self.num_usable_blocks} blocks are free",
                count,
                self.num_free_blocks,
            )
        ledger.budget.act_for(0)
        if count > ledger.room(0):
            limits = ledger.budget.limits(0, ledger.queue.num_free)
            raise OutOfBlocks(f"num_blocks is {count}; {limits}", count, max(int(ledger.room(0)), 0))

    def _take_new(self, lease: BlockLease, blocks: vec[i32], start: i64, count: i64) -> None:
        """Take blocks for a new lease; undo the lease if the eviction policy fails."""
        try:
            self._ledger.evict_ahead(count)
        except BaseException:
            self._leases.delist(lease)
            raise
        self._ledger.acquire(blocks, start, count)

    def extend(self, lease: object, num_blocks: object) -> npt.NDArray[np.int32]:
        """Add new blocks to the end of a lease, as `get_new_blocks` takes them. Amortised O(num_blocks).

        Args:
            lease: a lease that is not freed.
            num_blocks: number of blocks.

        Returns:
            Their ids, int32 (num_blocks,).

        Raises:
            OutOfBlocks: if fewer are free.
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("extend")
        try:
            count = read_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            self._require_free(count)
            self._ledger.act("extend", held.holder)
            return view_i32(grow(self._ledger, held, count))
        finally:
            self._gate.leave_with_result()

    def touch(self, lease: object, *, holder: object = "", start: object = 0, stop: object = None) -> BlockLease:
        """Return another lease on blocks of a lease. O(blocks).

        Args:
            lease: a lease that is not freed.
            holder: a name for errors and leak reports.
            start: position of the first block.
            stop: position after the last block; None for the end of the lease.

        Raises:
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if a position is outside the lease.
        """
        self._gate.enter("touch")
        try:
            name = read_str("holder", holder)
            first = read_int("start", start, 0, MAX_BLOCKS)
            last: int | None = None if stop is None else read_int("stop", stop, first, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            end = self._require_part(held, first, last)
            require_countable(self._ledger, held._blocks, first, end)
            self._ledger.act("touch", name)
            blocks = held_blocks(held, first, end)
            another = part_of(self._leases, held, first, end, name)
            self._ledger.share(blocks, 0, i64(len(blocks)))
            return another
        finally:
            self._gate.leave_with_result()

    def copy_on_write(self, lease: object, position: object) -> tuple[int, int] | None:
        """Make a block of a lease writable: held only by this lease, and not cached. O(blocks).

        A block that others hold too is replaced by a new block. A block that only this lease holds is removed from the
        index, because its content is about to change. For a manager with a CPU pool see `get_new_blocks`.

        Args:
            lease: a lease that is not freed.
            position: position of the block in the lease.

        Returns:
            (old, new) if the block was replaced: copy its keys and values. Otherwise None.

        Raises:
            OutOfBlocks: if no block is free for the copy.
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if the position is outside the lease.
        """
        self._gate.enter("copy_on_write")
        try:
            place = read_int("position", position, -MAX_BLOCKS, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            if not 0 <= place < len(held):
                raise InvalidArgument(f"position is {place}; the lease has {len(held)} blocks, numbered from 0")
            self._ledger.act("copy_on_write", held._holder)
            return self._leases.make_own(held, place)
        finally:
            self._gate.leave_with_result()

    def release(self, lease: object, start: object, stop: object = None) -> int:
        """Release blocks of a lease whose positions stay, for instance when a sliding window has passed them.

        O(blocks released). The null block (0) replaces them, so that the other blocks keep their positions in a block
        table. To release the end of a lease, such as rejected drafts, free the lease that `split` returns.

        Args:
            lease: a lease that is not freed.
            start: position of the first block.
            stop: position after the last block; None for the end of the lease.

        Returns:
            How many blocks were released; those released before do not count.

        Raises:
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if a position is outside the lease.
        """
        self._gate.enter("release")
        try:
            first = read_int("start", start, 0, MAX_BLOCKS)
            last: int | None = None if stop is None else read_int("stop", stop, first, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            end = self._require_part(held, first, last)
            self._ledger.act("release", held._holder)
            return release_range(self._ledger, held, first, end)
        finally:
            self._gate.leave()

    def _require_part(self, lease: BlockLease, first: int, last: int | None) -> int:
        end = len(lease) if last is None else last
        if not first <= end <= len(lease):
            raise InvalidArgument(
                f"start is {first} and stop is {end}; both must be from 0 to the {len(lease)} blocks of the lease"
            )
        return end

    def split(self, lease: object, at: object, *, holder: object = "") -> BlockLease:
        """Cut a lease in two. It keeps its first `at` blocks; the new lease has the others. O(others).

        `pool.free_blocks(pool.split(lease, n))` shortens a lease to n blocks.

        Args:
            lease: a lease that is not freed.
            at: position of the cut.
            holder: name of the new lease, for errors and leak reports.

        Raises:
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if the position is outside the lease.
        """
        self._gate.enter("split")
        try:
            name = read_str("holder", holder)
            position = read_int("at", at, 0, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            if position > len(held):
                raise InvalidArgument(f"at is {position}; it must be from 0 to the {len(held)} blocks of the lease")
            return cut_off(self._leases, held, position, name)
        finally:
            self._gate.leave_with_result()

    def free_blocks(self, lease: object, *, last: object = False) -> None:
        """Free a lease, last block first. O(blocks).

        Blocks that nobody else holds join the free queue: cached ones at its tail, the others at its head, to be
        allocated first. During another call the lease is freed when that call ends.

        Args:
            lease: a lease that is not freed.
            last: True to put blocks that are not cached at the tail too, so that they are allocated as late as cached
                ones.

        Raises:
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
        """
        to_tail = last is not False and read_bool("last", last)
        if not self._gate.enter_free("free_blocks"):
            self._leases.close_later(self._leases.require_live(lease), to_tail)
            self._gate.wait()
            return
        try:
            held = self._leases.require_live(lease)
            if to_tail:
                self._leases.close_to_tail(held)
            else:
                self._leases.close(held)
        finally:
            self._gate.leave()

    # What happened, and checks.

    def history(self) -> list[AllocationEvent]:
        """Return the latest `history_size` events, oldest first; empty if it is 0. O(history_size)."""
        self._gate.enter("history")
        try:
            return [] if self._history is None else self._history.events()
        finally:
            self._gate.leave()

    @property
    def on_evict(self) -> Callable[[npt.NDArray[np.int32]], object] | None:
        """Callback after each call that made blocks lose their content, with their ids, int32 (n,), in order; or None.

        The content was evicted, uncached, dropped by shrinking, or overwritten (`copy_on_write`); a reset does not
        count. The callback may call the pool. An error in it becomes a RuntimeWarning, and counts in
        `num_on_evict_failures`.
        """
        return None if self._losses is None else self._losses.callback

    @on_evict.setter
    def on_evict(self, callback: object) -> None:
        self._gate.enter("on_evict")
        try:
            if callback is not None and not callable(callback):
                raise InvalidArgument(f"on_evict is {shown(callback)}; it must be a callable that takes ids, or None")
            if self._losses is None:
                self._losses = LossNotifier(self._gate)
                self._gate.listeners.append(self._losses)
                self._ledger.watch(LossCollector(self._losses))
            self._losses.callback = callback
        finally:
            self._gate.leave()

    @property
    def num_on_evict_failures(self) -> int:
        """Number of times that `on_evict` raised, was interrupted or could not be called: blocks were missed then."""
        return 0 if self._losses is None else int(self._losses.num_failures)

    @property
    def on_events(self) -> Callable[[], object] | None:
        """Callback after `reset_prefix_cache`, `resize` and `publish_events`, without arguments; or None.

        A `KVEventPublisher` sets it to publish at once, because no step may follow these calls. Calls of the manager
        count too. The callback may call the pool. An error in it becomes a RuntimeWarning.
        """
        return None if self._changes is None else self._changes.callback

    @on_events.setter
    def on_events(self, listener: object) -> None:
        self._gate.enter("on_events")
        try:
            if listener is not None and not callable(listener):
                raise InvalidArgument(f"on_events is {shown(listener)}; it must be a callable, or None")
            if self._changes is None:
                self._changes = ChangeNotifier(self._gate)
                self._gate.listeners.append(self._changes)
            self._changes.callback = listener
        finally:
            self._gate.leave()

    def publish_events(self) -> None:
        """Call `on_events` now, for changes between steps: an abort, a transfer, a load from a tier. O(1)."""
        self._gate.enter("publish_events")
        try:
            self._gate.note_change()
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify the free queue, the counts, and that the leases add up to them (I1, I4). O(num_blocks).

        Raises:
            InvariantError: if one does not hold.
        """
        self._gate.enter("check")
        try:
            self._ledger.check()
            check_leases(self._ledger, self._leases.leases(), self._other_holds())
        finally:
            self._gate.leave()

    def _other_holds(self) -> list[int] | None:
        """Return how often each block is held other than by leases, or None if unknown."""
        return None

    def __repr__(self) -> str:
        ledger = self._ledger
        used = f"{ledger.num_used_blocks} of {ledger.num_usable_blocks} blocks used"
        return f"<{type(self).__name__}: {used}, {ledger.num_cached_blocks} cached, {ledger.num_free_blocks} free>"

    def __init_subclass__(cls) -> None:
        """Refuse subclasses outside of this package: the class is compiled."""
        if getattr(cls, "__module__", "").rpartition(".")[0] != _PACKAGE:
            raise refuse_subclass(cls.__mro__[1].__name__)

    def __copy__(self) -> "LeasePool":
        raise refuse_copy(f"a {type(self).__name__}", "make another one")

    def __deepcopy__(self, memo: object) -> "LeasePool":
        raise refuse_copy(f"a {type(self).__name__}", "make another one")

    def __reduce__(self) -> str:
        raise refuse_pickle(f"a {type(self).__name__}", "make one in the other process")
