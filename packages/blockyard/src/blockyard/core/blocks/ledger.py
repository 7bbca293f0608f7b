"""Reference counts of blocks, and their way from holder to free queue. Arguments are not checked."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import Resize
from ...errors import InvariantError, not_enough_memory
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import grown_i32, zeros_i32, zeros_i64
from ..budget import Budget
from ..index.checking import check_index
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Prompt
from ..index.room import IndexRoom
from ..policies.stack import QueueOrder
from .fence import Fence, FenceRoom
from .free_queue import FreeQueue, QueueRoom
from .observer import PoolObserver

#: Looked up once: looking up a member of an Enum makes objects.
APPLIED: Final = Resize.APPLIED
DEFERRED: Final = Resize.DEFERRED
#: Blocks freed in one run.
RELEASED_TOGETHER: Final[i64] = 512


class LedgerRoom:
    """Larger arrays for a ledger, not installed yet."""

    def __init__(
        self, num_blocks: i64, index: IndexRoom, queue: QueueRoom, ref_cnt: vec[i32], fence: FenceRoom
    ) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.queue = queue
        self.ref_cnt = ref_cnt
        self.fence = fence


class BlockLedger:
    """Reference counts, the free queue and the prefix index of `num_blocks` blocks of `block_size` tokens.

    Block 0 is the null block; the others have ids 1 to num_blocks - 1 that never change. A block is in the free queue
    exactly when its ref_cnt is 0 (I1). A cached block in the queue stays in the index until a hit revives it or an
    allocation evicts it, each in O(1) (I4).

    The state of a block follows from four numbers:

    state         ref_cnt  content  owner  in the queue
    free          0        none     0      yes, before the idle ones
    idle          0        yes      0      yes: a hit revives it, an allocation evicts it (`num_free_blocks` counts it)
    private       1 ..     none     0      no: its holder writes into it; a shared one is copied by the first writer
    pending       1 ..     yes      row+1  no: indexed, and still to be computed by the sequence in that row
    shared        1 ..     yes      0      no: any prompt can hit it
    retiring      1 ..     any      any    no: its id is beyond a pool that has shrunk; it is dropped when it is freed
    fenced        1        none     0      no: released while a step in flight may use it; `Fence` holds it until then

    `block_states` returns them as an array. A cached block that the fence holds is shared: any prompt can hit it.

    The methods do not check their arguments. A manager counts by the rows of its block table; `BlockPool` is the public
    class with checks and leases.

    Attributes:
        block_size: tokens per block.
        entry_tokens: tokens that the index compares; differs if blocks are found by their contents (`WordLedger`).
    """

    def __init__(
        self, num_blocks: int, block_size: int, entry_tokens: int, enable_prefix_caching: bool, hash_seed: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        #: Whether blocks are known by their tokens.
        self.knows_tokens = True
        # Largest arrays first: the allocator fits the smaller ones into what their making leaves behind.
        self.index = PrefixIndex(self.num_blocks, entry_tokens, hash_seed)
        self.queue = FreeQueue(self.num_blocks)
        self.ref_cnt = zeros_i32(self.num_blocks)
        self._one = zeros_i32(1)
        self._idle_run = zeros_i64(int(RELEASED_TOGETHER))
        self._ended_run = zeros_i32(int(RELEASED_TOGETHER))
        #: Blocks that the arrays have room for; more than num_blocks after a pool has shrunk.
        self.capacity: i64 = self.num_blocks
        #: Blocks beyond num_blocks that are still held; each is dropped when it is freed.
        self.num_retiring: i64 = 0
        #: Keeps the blocks that steps in flight may still write or read.
        self.fence = Fence()
        self.observer = PoolObserver()
        #: Whether the pool has observers.
        self.is_watched = False
        #: The policy with its layers, or the order of the queue.
        self.stack = QueueOrder()
        #: The blocks that each tenant may take; a `SharedBudget` if tenants share the pool.
        self.budget = Budget()
        self.num_evicted_blocks: i64 = 0
        #: Blocks that left the free queue, new or revived, and that came back to it.
        self.num_allocated_blocks: i64 = 0
        self.num_freed_blocks: i64 = 0
        #: How often a block that may be held has lost its content.
        self.num_losses: i64 = 0
        self.peak_used_blocks: i64 = 0

    # Counts.

    @property
    def num_usable_blocks(self) -> int:
        """Return the number of blocks without the null block; with those still to be dropped while a pool shrinks."""
        return self.num_blocks - 1 + int(self.num_retiring)

    @property
    def num_free_blocks(self) -> int:
        """Return the number of free blocks, cached ones included. O(1)."""
        return int(self.queue.num_free)

    @property
    def num_used_blocks(self) -> int:
        """Return the number of blocks in use. O(1)."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Return the number of blocks in the index, held or not. O(1)."""
        return int(self.index.num_indexed)

    @property
    def usage(self) -> float:
        """Return the used fraction of the usable blocks, 0 to 1. O(1)."""
        usable = self.num_usable_blocks
        return self.num_used_blocks / usable if usable > 0 else 0.0

    def block_tokens(self, blocks: vec[i32], num_tokens: int) -> npt.NDArray[np.int32]:
        """Return the first `num_tokens` tokens stored for a run of blocks, int32 (num_tokens,), a copy."""
        return self.index.rows.tokens(blocks, self.block_size, num_tokens)

    # Looking up and indexing.

    def index_prompt(
        self, prompt: Prompt, first: i64, last: i64, blocks: vec[i32], start: i64, owner: i64, root: i64
    ) -> None:
        """Index blocks `first` to `last` of a prompt, after its earlier ones.

        They are `blocks[start + first:start + last]`. `root` is the content before the first block, used if `first` is
        0.
        """
        index = self.index
        if first >= last:
            return
        before = i64(blocks[start + first - 1]) if first > 0 else NULL_BLOCK
        parent = index.content_of(before) if first > 0 else root
        chain = index.chain_hash[before] if first > 0 else root_hash(parent)
        if first > 0:
            before = index.representative(parent, chain, before)
        self.index_after(prompt, first, last, blocks, start, owner, parent, chain, before)

    def index_after(
        self,
        prompt: Prompt,
        first: i64,
        last: i64,
        blocks: vec[i32],
        start: i64,
        owner: i64,
        parent: i64,
        chain: i64,
        before: i64,
    ) -> None:
        """Index blocks `first` to `last` of a prompt after the content `parent`, whose chained hash is `chain`.

        `before` is a block with that content; 0 for a root, or if no block has it.
        """
        index = self.index
        while first < last:
            if first in prompt.spans:
                parent = index.root((int(parent), prompt.spans[first]))
                chain = root_hash(parent)
                before = NULL_BLOCK
            end = min(prompt.next_span_block(first), last)
            index.hash_run(prompt.words, first, end, chain)
            index.insert_run(prompt.words, first, end, blocks, start, parent, before, owner)
            # The next block follows a span, under its own root.
            parent = index.content_of(i64(blocks[start + end - 1]))
            first = end

    # Holding and releasing.

    def count_idle(self, blocks: vec[i32], count: i64) -> i64:
        """Return how many of the first `count` blocks are free."""
        ref_cnt = self.ref_cnt
        idle: i64 = 0
        for index in range(count):
            if ref_cnt[i64(blocks[index])] == 0:
                idle += 1
        return idle

    def evict_ahead(self, count: i64) -> None:
        """Evict as many blocks as the next `count` allocations need, so that these call no policy.

        So many blocks must be free. Raises `PolicyError`, and changes nothing, if the policy breaks its contract.
        """
        stack = self.stack
        if not stack.has_policy or count <= 0:
            return
        # If there are too few victims, the rest are uncached blocks at the end of the queue.
        missing = min(count - self.queue.num_empty_first(self.index, count), stack.num_idle)
        self.budget.begin_choice(count - missing)
        for victim in stack.choose(missing, self.index.chain_hash):
            self.evict(i64(victim))
            self.move_to_front(i64(victim))

    # Tenants.

    def room(self, tenant: i64, watermark: i64 = 0) -> i64:
        """Return how many free blocks a tenant may take while `watermark` remain; see `Budget.room`. O(1)."""
        return self.budget.room(tenant, self.queue.num_free, watermark)

    def charge_row(self, row: i64) -> i64:
        """Charge the blocks taken next to the tenant of a sequence. Return how many it may take."""
        return self.budget.act_for_row(row, self.queue.num_free)

    def acquire(self, out: vec[i32], start: i64, count: i64) -> None:
        """Take `count` blocks, which must be free, from the head of the queue into `out[start:]`."""
        self.queue.popleft_n(out, start, count)
        ref_cnt = self.ref_cnt
        identity = self.index.identity
        cached: i64 = 0
        for position in range(start, start + count):
            block = i64(out[position])
            ref_cnt[block] = 1
            if identity[2 * block] != NO_CONTENT:
                cached += 1
        if cached > 0:
            self._evict(out, start, count)
        self.num_allocated_blocks += count
        self._note_peak()
        self.observer.on_acquire(out, start, count)

    def _evict(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self.index.load_run(blocks, start, count)
        if self.knows_tokens and not self.is_watched and not self.stack.has_policy:
            self.num_evicted_blocks += self.index.remove_run(blocks, start, count)
            return
        for position in range(start, start + count):
            block = i64(blocks[position])
            if self.index.is_cached(block):
                self.stack.remove(block)
                self.evict(block)

    def evict(self, block: i64) -> None:
        """Evict a cached block that nothing holds, for new content or because it leaves the pool."""
        self.observer.on_evict(block)
        self.stack.uncache(block)
        self.index.remove(block)
        self.num_evicted_blocks += 1

    def uncache(self, block: i64, keeps_position: bool = False) -> None:
        """Remove a block from the index without an eviction.

        A held block stays with its holders, who may write to it. A free one moves to the head of the queue, because it
        caches nothing now, unless `keeps_position`.
        """
        is_idle = self.ref_cnt[block] == 0
        if is_idle:
            self.stack.remove(block)
        self.observer.on_uncache(block)
        self.stack.uncache(block)
        self.index.remove(block)
        self.num_losses += 1
        if is_idle and not keeps_position:
            self.move_to_front(block)

    def uncache_run(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Uncache each of `blocks[start:start + count]`, in order. All must be cached. O(count)."""
        if self.is_watched:
            for place in range(start, start + count):
                self.uncache(i64(blocks[place]))
            return
        self.stack.remove_run(blocks, start, count)
        for place in range(start, start + count):
            self.stack.uncache(i64(blocks[place]))
        self.index.remove_run(blocks, start, count)
        self.num_losses += count
        for place in range(start, start + count):
            if self.ref_cnt[i64(blocks[place])] == 0:
                self.move_to_front(i64(blocks[place]))

    def make_writable(self, block: i64) -> i64:
        """Return a block that a holder of `block` may write to: a new one if it is shared, else itself, uncached."""
        if self.ref_cnt[block] > 1:
            return self.acquire_one()
        if self.index.is_cached(block):
            self.uncache(block)
        return block

    def move_to_front(self, block: i64) -> None:
        """Make a free block the next to be allocated."""
        self.queue.remove(block)
        self.queue.append_left(block)

    def idle_in_order(self, count: i64) -> list[int]:
        """Return the first `count` idle cached blocks in eviction order, or fewer.

        They stay in the queue. O(count), plus one step for each empty block at the head that was not passed before.
        With a policy, the cost is the policy's. Raises `PolicyError`.
        """
        if self.stack.has_policy:
            return [] if self.stack.num_idle < count else self.stack.choose(count, self.index.chain_hash)
        found: list[int] = []
        queue = self.queue
        if queue.last_empty == NULL_BLOCK:
            queue.num_empty = 0
        block = i64(queue.next_free[queue.last_empty])
        while block != NULL_BLOCK and len(found) < count:
            if self.index.is_cached(block):
                found.append(int(block))
            elif len(found) == 0:
                queue.last_empty = block
                queue.num_empty += 1
            block = i64(queue.next_free[block])
        return found

    def take(self, blocks: vec[i32]) -> None:
        """Hold blocks, which must be free, and evict those that are cached. O(blocks)."""
        for place in range(i64(len(blocks))):
            block = i64(blocks[place])
            if self.index.is_cached(block):
                self.stack.remove(block)
                self.evict(block)
            self.queue.remove(block)
            self.ref_cnt[block] = 1
        self.num_allocated_blocks += i64(len(blocks))
        self._note_peak()
        self.observer.on_acquire(blocks, 0, len(blocks))

    def move_last(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Move those of the blocks that are free to the tail of the queue, last block first, cached or not.

        O(count).
        """
        position = start + count - 1
        while position >= start:
            block = i64(blocks[position])
            if self.ref_cnt[block] == 0 and block < i64(self.num_blocks):
                self.queue.remove(block)
                self.queue.append(block)
            position -= 1

    def note_hits(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Notify the policy that a prompt hit these blocks; `share` follows."""
        if self.stack.has_policy:
            for index in range(start, start + count):
                self.note_hit(i64(blocks[index]))

    def note_hit(self, block: i64) -> None:
        """Notify the policy that a prompt hit one block."""
        self.stack.hit(block, self.index.chain_hash[block])

    def share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Add a holder to `blocks[start:start + count]`; idle ones leave the queue."""
        free = self.queue.num_free
        self.stack.remove_run(blocks, start, count)
        self.queue.remove_shared(self.ref_cnt, blocks, start, start + count)
        self.num_allocated_blocks += free - self.queue.num_free
        self._note_peak()
        self.observer.on_share(blocks, start, count)

    def unshare(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Undo the latest `share`: every block returns to its old position in the queue. O(count).

        Meanwhile the queue may have been changed only by further calls of `share` that were undone.
        """
        position = start + count - 1
        while position >= start:
            block = i64(blocks[position])
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.num_allocated_blocks -= 1
                self.queue.put_back(block)
                self.stack.insert(block, self.index.chain_hash[block], position - start)
            position -= 1
        self.observer.on_release(blocks, start, count)

    def unshare_one(self, block: i64) -> None:
        """Undo the latest `share_one`."""
        self._one[0] = i32(block)
        self.unshare(self._one, 0, 1)

    def release(
        self,
        blocks: vec[i32],
        start: i64,
        count: i64,
        num_before: i64 = 0,
        num_cached: i64 = 0,
        is_flat: bool = False,
    ) -> None:
        """Release `blocks[start:start + count]`, last first. O(count).

        Args:
            blocks: block ids.
            start: position of the first one.
            count: number of blocks.
            num_before: blocks of the same sequence right before them in `blocks`.
            num_cached: leading ones that are known to be cached. This saves a lookup of each, most of the time in large
                pools.
            is_flat: True if the policy sees every block at depth 0.
        """
        free = self.queue.num_free - self.num_retiring
        last = start + count
        known = start + num_cached if not self.stack.has_policy and self.num_retiring == 0 else start
        while last > known:
            first = max(known, last - RELEASED_TOGETHER)
            self._release_run(blocks, start - num_before, first, last, is_flat)
            last = first
        if known > start:
            self.queue.append_released(self.ref_cnt, blocks, start, known)
        self.num_freed_blocks += self.queue.num_free - self.num_retiring - free
        self.observer.on_release(blocks, start, count)

    def _release_run(self, blocks: vec[i32], start: i64, first: i64, last: i64, is_flat: bool) -> None:
        """Release `blocks[first:last]`, which belong to a sequence that begins at `start`.

        Decrementing all counts before linking the idle blocks keeps the loops short, so that memory accesses overlap.
        """
        ref_cnt = self.ref_cnt
        identity = self.index.identity
        idle = self._idle_run
        limit = i64(self.num_blocks)
        tells_each = self.stack.has_policy and not is_flat
        num_idle: i64 = 0
        position = last - 1
        while position >= first:
            block = i64(blocks[position])
            references = ref_cnt[block] - 1
            ref_cnt[block] = references
            if references == 0:
                if block >= limit:
                    self._retire(block)
                elif identity[2 * block] == NO_CONTENT:
                    self.queue.append_left(block)
                else:
                    idle[num_idle] = block
                    num_idle += 1
                    if tells_each:
                        self.stack.insert(block, self.index.chain_hash[block], position - start)
            position -= 1
        if not tells_each:
            self.stack.insert_run(idle, num_idle, self.index.chain_hash)
        self.queue.append_run(idle, num_idle)

    def release_in_order(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Release `blocks[start:start + count]` one by one, first to last. O(count)."""
        if count == 1:
            self.release(blocks, start, 1)
            return
        # `release` takes the last one first.
        run = self._ended_run
        done: i64 = 0
        while done < count:
            taken = min(count - done, RELEASED_TOGETHER)
            for place in range(taken):
                run[taken - 1 - place] = blocks[start + done + place]
            self.release(run, 0, taken, 0, 0, True)
            done += taken

    def release_sources(self, blocks: list[int]) -> None:
        """Release the source blocks of copies or loads, first to last, without allocating memory."""
        run = self._ended_run
        if len(blocks) > len(run):
            for block in blocks:
                self.release_one(block)
            return
        place = i64(len(blocks))
        for block in blocks:
            place -= 1
            run[place] = i32(block)
        if blocks:
            self.release(run, 0, i64(len(blocks)), 0, 0, True)

    def release_row_blocks(
        self, row: i64, blocks: vec[i32], start: i64, count: i64, num_before: i64, num_cached: i64 = 0
    ) -> None:
        """Release blocks of the sequence in `row` now, or when its step in flight ends. O(count)."""
        fence = self.fence
        if not fence.is_open(row):
            self.release(blocks, start, count, num_before, num_cached)
            return
        step = fence.last_step_of(row)
        position = start + count - 1
        while position >= start:
            if not fence.hold(i64(blocks[position]), step):
                self.release(blocks, position, 1, position - start + num_before)
            position -= 1

    def release_row_block(self, row: i64, block: i64) -> None:
        """Release one block of the sequence in `row` now, or when its step in flight ends."""
        fence = self.fence
        if not fence.is_open(row) or not fence.hold(block, fence.last_step_of(row)):
            self.release_one(block)

    def release_row_blocks_in_order(self, row: i64, blocks: vec[i32], start: i64, count: i64) -> None:
        """Release blocks of the sequence in `row` one by one, first to last, now or when its step in flight ends."""
        if not self.fence.is_open(row):
            self.release_in_order(blocks, start, count)
            return
        for place in range(start, start + count):
            self.release_row_block(row, i64(blocks[place]))

    def end_steps(self, step: i64) -> None:
        """End the steps up to `step`, and release the blocks that wait for them, in the order of their release."""
        fence = self.fence
        room = i64(len(self._ended_run))
        taken = fence.take(self._ended_run, step)
        while taken > 0:
            self.release(self._ended_run, room - taken, taken)
            taken = fence.take(self._ended_run, step)

    def acquire_one(self) -> i64:
        """Take one block from the head of the queue; one must be free."""
        self.acquire(self._one, 0, 1)
        return i64(self._one[0])

    def share_hits(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Add a holder to `blocks[start:start + count]` after a hit, and report each hit to the policy. O(count)."""
        if not self.stack.needs_hits:
            self.share(blocks, start, count)
            return
        for index in range(start, start + count):
            self.note_hit(i64(blocks[index]))
            self.share(blocks, index, 1)

    def release_row_blocks_flat(self, row: i64, blocks: vec[i32], start: i64, count: i64) -> None:
        """Release blocks of the sequence in `row` now, or when its step in flight ends. Policies see them at depth 0.

        O(count).
        """
        if not self.fence.is_open(row):
            self.release(blocks, start, count, 0, 0, True)
            return
        position = start + count - 1
        while position >= start:
            self.release_row_block(row, i64(blocks[position]))
            position -= 1

    def share_one(self, block: i64) -> None:
        """Add a holder to one block."""
        self._one[0] = i32(block)
        self.share(self._one, 0, 1)

    def release_one(self, block: i64) -> None:
        self._one[0] = i32(block)
        self.release(self._one, 0, 1)

    def _note_peak(self) -> None:
        used = i64(self.num_blocks) - 1 + self.num_retiring - self.queue.num_free
        if used > self.peak_used_blocks:
            self.peak_used_blocks = used

    def counters(self) -> tuple[i64, i64, i64]:
        """Return the counters of used, allocated and freed blocks, for `restore_counters`."""
        return self.peak_used_blocks, self.num_allocated_blocks, self.num_freed_blocks

    def restore_counters(self, counters: tuple[i64, i64, i64]) -> None:
        """Restore the counters of an earlier `counters`."""
        self.peak_used_blocks, self.num_allocated_blocks, self.num_freed_blocks = counters

    # The size.

    def make_room(self, num_blocks: i64, requested: i64 = 0) -> LedgerRoom | None:
        """Return larger arrays for a pool of `num_blocks` blocks; None if there is room already.

        O(num_blocks). Raises `NotEnoughMemory`, and changes nothing.

        Args:
            num_blocks: blocks of the larger pool.
            requested: size that the caller requested, for the error text; 0 for `num_blocks`.
        """
        if num_blocks <= self.capacity:
            return None
        try:
            room = LedgerRoom(
                num_blocks,
                self.make_index_room(int(num_blocks)),
                self.queue.make_room_for(int(num_blocks)),
                grown_i32(self.ref_cnt, int(num_blocks)),
                self.fence.make_room_for(int(num_blocks)),
            )
            self.stack.grow(int(num_blocks))
            return room
        except (MemoryError, SystemError) as error:  # mypyc's conversions turn the former into the latter
            size = num_blocks * self.index.bytes_a_block()
            raise not_enough_memory(
                f"num_blocks is {requested or num_blocks}; the system has no memory for its arrays of {size} bytes",
                error,
            )

    def make_index_room(self, num_blocks: int) -> IndexRoom:
        """Return larger arrays for the index."""
        return self.index.make_room_for(num_blocks)

    def resize(self, num_blocks: i64, room: LedgerRoom | None) -> Resize:
        """Grow into `room`, or shrink, to `num_blocks` blocks; see `BlockPool.resize`. It cannot fail."""
        if room is not None:
            self.index.move_into(room.index)
            self.queue.move_into(room.queue)
            self.ref_cnt = room.ref_cnt
            self.fence.move_into(room.fence)
            self.capacity = room.num_blocks
        old = i64(self.num_blocks)
        self.num_blocks = int(num_blocks)
        if num_blocks > old:
            self._bring_back(old, num_blocks)
        else:
            for block in range(num_blocks, old):
                self._drop_out(block)
        return DEFERRED if self.num_retiring > 0 else APPLIED

    def _bring_back(self, first: i64, last: i64) -> None:
        """Add blocks `first` to `last` to the pool; the free ones are allocated next, lowest first."""
        block = last - 1
        while block >= first:
            if self.ref_cnt[block] == 0:
                self.queue.append_left(block)
            else:
                self.num_retiring -= 1
            block -= 1

    def _drop_out(self, block: i64) -> None:
        if self.ref_cnt[block] > 0:
            self.num_retiring += 1
            return
        self.queue.remove(block)
        if self.index.is_cached(block):
            self.stack.remove(block)
            self.evict(block)

    def _retire(self, block: i64) -> None:
        """Remove a block beyond the end of the pool, which was just freed."""
        self.num_retiring -= 1
        if self.index.is_cached(block):
            self.evict(block)

    def act(self, call: str, holder: str = "") -> None:
        """Notify the observers of the name and holder of the running call."""
        if self.is_watched:
            try:
                self.observer.on_call(f"{call} {holder}" if holder else call)
            except MemoryError:  # no holder is named
                self.observer.on_call("")

    def watch(self, member: PoolObserver) -> None:
        self.observer = self.observer.combine(member) if self.is_watched else member
        self.is_watched = True

    # Reset and checks.

    def reset(self) -> None:
        """Uncache all blocks at once; holders keep them. O(num_blocks)."""
        self.index.clear()
        self.num_losses += 1
        self.stack.clear()

    def check(self) -> None:
        """Verify I1, I4 and the counts. O(num_blocks). Raises `InvariantError`."""
        self.queue.check()
        free = set(self.queue.block_ids())
        retiring = 0
        for block in range(self.num_blocks, int(self.capacity)):
            retiring += 1 if self.ref_cnt[i64(block)] > 0 else 0
            idle = self.ref_cnt[i64(block)] == 0
            if block in free or (idle and self.index.is_cached(i64(block))):
                raise InvariantError(f"I1: block {block} is beyond the pool of {self.num_blocks}, but free or cached")
        if retiring != self.num_retiring:
            raise InvariantError(
                f"I6: {retiring} blocks beyond the pool are held, but num_retiring is {self.num_retiring}"
            )
        for block in range(1, self.num_blocks):
            if (self.ref_cnt[i64(block)] == 0) != (block in free):
                raise InvariantError(
                    f"I1: block {block} has ref_cnt {self.ref_cnt[i64(block)]}, in queue: {block in free}"
                )
        if self.ref_cnt[NULL_BLOCK] != 0 or self.index.is_cached(0) or NULL_BLOCK in free:
            raise InvariantError("I1: the null block is held, cached or free")
        if self.num_free_blocks + self.num_used_blocks != self.num_usable_blocks:
            raise InvariantError("I6: free and used blocks do not add up to the pool")
        if self.num_allocated_blocks - self.num_freed_blocks != self.num_used_blocks:
            raise InvariantError(
                f"I6: {self.num_allocated_blocks} blocks were allocated and {self.num_freed_blocks} freed, but "
                f"{self.num_used_blocks} are in use"
            )
        check_index(self.index)
        self.queue.check_empty(self.index)
        if self.stack.has_policy:
            self.stack.check({block for block in free if self.index.is_cached(i64(block))})
