"""Leases on blocks, and the registry of the leases of a pool."""

from collections.abc import Iterator
from operator import index as index_of
from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arguments import shown
from ...errors import DoubleFree, ForeignBlock, InvalidArgument, InvariantError, OutOfBlocks
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import view_i32, zeros_i32
from ..face import refuse_copy, refuse_pickle, refuse_subclass
from ..gate import Deferred, Interruption
from .block import KVCacheBlock
from .ledger import BlockLedger

#: How many leases may hold a block. Counts are int32; what is left of them is for the rows of a manager's sequences.
MAX_LEASES: Final[i64] = 2147483647 - 16777216


class BlockLease:
    """A counted hold on some blocks, in order. It is freed once, by the pool that made it (`free_blocks`).

    A lease is an object, not a list of ids, because an id does not say who may free it: ids are reused, and a second
    free of the same id would give one block to two owners. The pool knows each of its leases by serial number, so it
    detects a double, stale or foreign free in O(1), whatever has happened to the blocks since.

    After `BlockPool.release` the null block replaces the released blocks, so the others keep their positions, which are
    those of a block table.
    """

    def __init__(self, serial: int, holder: str, blocks: vec[i32], live: dict[int, "BlockLease"]) -> None:
        self._serial = serial
        self._holder = holder
        #: Its blocks are the first `_count`; the rest is room to grow.
        self._blocks = blocks
        self._count: i64 = len(blocks)
        #: How many of them are the null block.
        self._num_null: i64 = 0
        #: The live leases of its pool by serial number.
        self._live = live
        #: Leading blocks that its calls have cached or found cached; how many of them were not written to since; and
        #: the losses of the pool (`num_losses`) when all of these were last known to be cached.
        self._num_cached: i64 = 0
        self._num_sure: i64 = 0
        self._losses: i64 = 0
        #: Token blocks that it holds too, if other blocks have the keys and values (`hold_cached`).
        self._token_blocks = zeros_i32(0)
        #: If it is freed while another call runs: whether its blocks are put at the end of the queue.
        self._to_tail = False
        #: Position of its first block in the prompt.
        self._first_block: i64 = 0
        #: The content before the block at `_anchor`, and its chained hash, if no held block has it; 0 for the prompt's
        #: root at its block 0, and if unknown.
        self._anchor: i64 = 0
        self._before: i64 = 0
        self._before_hash: i64 = 0

    @property
    def serial(self) -> int:
        """Return the number of the lease, unique in its pool."""
        return self._serial

    @property
    def holder(self) -> str:
        """Return the holder's name, as given when the lease was made."""
        return self._holder

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Return the blocks in order, int32 (n,), 0 for a released one.

        Read-only and not copied; read it again after a change.
        """
        if self._count == len(self._blocks):
            return view_i32(self._blocks)
        return view_i32(self._blocks)[: int(self._count)]

    @property
    def num_cached_blocks(self) -> int:
        """Return how many leading blocks this lease has cached or found cached. O(1).

        `cache_next_blocks` continues there.
        """
        return int(self._num_cached)

    @property
    def first_block(self) -> int:
        """Return the position of the first block in its prompt; not 0 for a tail (`split`) and `get_cached_block`."""
        return int(self._first_block)

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: object) -> int:
        """Return the id at a position. For slices, use `block_ids`."""
        count = int(self._count)
        try:
            position = index_of(index)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"index is {shown(index)}; it must be an integer: take slices of block_ids")
        if not -count <= position < count:
            raise IndexError(f"index is {position}; the lease has {count} blocks")
        return int(self._blocks[i64(position % count)])

    def __iter__(self) -> Iterator[int]:
        return iter([int(block) for block in self._blocks[: self._count]])

    def held_ids(self) -> list[int]:
        """Return the ids without the released ones. O(blocks)."""
        return [block for block in self if block != NULL_BLOCK]

    def __repr__(self) -> str:
        return f"<BlockLease {self._called()}: blocks {list(self)}>"

    def _called(self) -> str:
        return f"{self._serial} of {self._holder!r}" if self._holder else str(self._serial)

    def __init_subclass__(cls) -> None:
        """Refuse subclasses: the class is compiled."""
        raise refuse_subclass("BlockLease")

    def __copy__(self) -> "BlockLease":
        raise refuse_copy("a BlockLease", "take another hold with `touch`")

    def __deepcopy__(self, memo: object) -> "BlockLease":
        raise refuse_copy("a BlockLease", "take another hold with `touch`")

    def __reduce__(self) -> str:
        raise refuse_pickle("a BlockLease", "send its `block_ids`")


def check_leases(ledger: BlockLedger, leases: list[BlockLease], others: list[int] | None) -> None:
    """Check that the leases and other holders of each block add up to its ref_cnt. O(blocks).

    Args:
        ledger: the blocks.
        leases: all leases.
        others: other references by block; None if unknown, so that leases may hold fewer than ref_cnt.
    """
    held = [0] * int(ledger.capacity) if others is None else others
    for lease in leases:
        ids = lease.held_ids()
        if len(lease) - len(ids) != lease._num_null:
            raise InvariantError(f"I8: {lease!r} has {lease._num_null} released blocks by its count")
        if not 0 <= lease._num_sure <= lease._num_cached <= lease._count <= len(lease._blocks):
            raise InvariantError(f"I8: {lease!r} has {lease._num_cached} cached blocks by its count")
        if lease._losses == ledger.num_losses:
            for block in lease._blocks[: lease._num_sure]:
                if block != NULL_BLOCK and not ledger.index.is_cached(i64(block)):
                    raise InvariantError(
                        f"I8: {lease!r} relies on {lease._num_sure} cached blocks; {block} is not cached"
                    )
        for block in ids:
            held[block] += 1
    for block in range(int(ledger.capacity)):
        references = int(ledger.ref_cnt[i64(block)])
        if held[block] > references or (others is not None and held[block] < references):
            raise InvariantError(f"I8: block {block} has ref_cnt {references}, but is held {held[block]} times")


def require_countable(ledger: BlockLedger, blocks: vec[i32], first: i64, last: i64) -> None:
    """Raise `InvalidArgument` if one of these blocks has the most leases already. O(blocks)."""
    ref_cnt = ledger.ref_cnt
    for position in range(first, last):
        block = i64(blocks[position])
        if i64(ref_cnt[block]) >= MAX_LEASES:
            raise InvalidArgument(
                f"block {block} is held {ledger.ref_cnt[block]} times; the limit of leases on a block is {MAX_LEASES}"
            )


def held_blocks(lease: BlockLease, first: i64, last: i64) -> vec[i32]:
    """Return a copy of the blocks `first` to `last` without the released ones, in order. O(last - first)."""
    blocks = lease._blocks[first:last]
    if lease._num_null == 0:
        return blocks
    count: i64 = 0
    for position in range(i64(len(blocks))):
        if blocks[position] != NULL_BLOCK:
            blocks[count] = blocks[position]
            count += 1
    return blocks[:count]


class LeaseRegistry(Deferred):
    """The live leases of a pool, oldest first, and those to be freed when the running call ends."""

    def __init__(self, ledger: BlockLedger) -> None:
        self.ledger = ledger
        #: The token blocks, if leases hold some.
        self.token_blocks: BlockLedger | None = None
        self.live: dict[int, BlockLease] = {}
        self._last_serial = 0
        self._waiting: list[BlockLease] = []

    def make(self, blocks: vec[i32], holder: str) -> BlockLease:
        """Return a live lease on blocks that the caller takes next, which must not fail."""
        lease = self.draft(blocks, holder)
        self.enlist(lease)
        return lease

    def draft(self, blocks: vec[i32], holder: str) -> BlockLease:
        """Return a lease that becomes live with `enlist`. Changes nothing."""
        lease = BlockLease(self._last_serial + 1, holder, blocks, self.live)
        lease._losses = self.ledger.num_losses
        return lease

    def enlist(self, lease: BlockLease) -> None:
        """Make the latest draft a live lease."""
        self.live[lease._serial] = lease
        self._last_serial = lease._serial

    def delist(self, lease: BlockLease) -> None:
        del self.live[lease._serial]
        self._last_serial -= 1

    def hold(self, blocks: vec[i32], holder: str, interruption: Interruption) -> BlockLease:
        """Return a lease on cached blocks, and report a hit to their policy. O(blocks).

        Raises `InvalidArgument`. If the policy is interrupted, nothing has changed.
        """
        ledger = self.ledger
        count = i64(len(blocks))
        require_countable(ledger, blocks, 0, count)
        lease = self.make(blocks, holder)
        lease._num_cached = count
        lease._num_sure = count
        peak = ledger.peak_used_blocks
        ledger.note_hits(blocks, 0, count)
        ledger.share(blocks, 0, count)
        if interruption.error is not None:
            self.undo_hold(lease, peak)
            interruption.raise_now()
        return lease

    def undo_hold(self, lease: BlockLease, peak: i64) -> None:
        """Undo the latest `hold`, and restore the peak of used blocks."""
        self.ledger.unshare(lease._blocks, 0, lease._count)
        self.ledger.peak_used_blocks = peak
        self.delist(lease)

    def require_live(self, lease: object) -> BlockLease:
        """Return a live lease.

        O(1). Raises `DoubleFree` if it was freed, `ForeignBlock` if it belongs to another pool.
        """
        if not isinstance(lease, BlockLease):
            raise InvalidArgument(f"lease is {shown(lease)}; it must be a BlockLease, as get_new_blocks returns it")
        if self.live.get(lease._serial) is lease:
            return lease
        if lease._live is self.live:
            raise DoubleFree(f"lease {lease._called()} on blocks {list(lease)} was already freed")
        raise ForeignBlock(f"lease {lease._called()} was handed out by another pool")

    def leases(self) -> list[BlockLease]:
        return list(self.live.values())

    def describe(self, number: int) -> KVCacheBlock:
        """Return a snapshot of one block, with the holders of its leases. O(leases)."""
        ledger = self.ledger
        block = i64(number)
        cached = ledger.index.is_cached(block)
        known = cached and ledger.knows_tokens
        return KVCacheBlock(
            number,
            int(ledger.ref_cnt[block]),
            ledger.block_tokens(vec[i32]([i32(block)]), ledger.block_size).tolist() if known else [],
            int(ledger.index.chain_hash[block]) if cached else None,
            ledger.index.owner[block] == 0,
            [lease.holder for lease in self.live.values() if number in lease.held_ids()],
            ledger.block_size if known else 0,
            0 if known else None,
        )

    def make_own(self, lease: BlockLease, position: i64) -> tuple[int, int] | None:
        """Make the block at a position writable: copy it if it is shared, else uncache it.

        Return (old, new) if the caller has to copy a block, else None.
        """
        ledger = self.ledger
        old = i64(lease._blocks[position])
        if old == NULL_BLOCK:
            raise InvalidArgument(f"position is {position}; the lease has released that block")
        others_hold = ledger.ref_cnt[old] > 1
        ledger.budget.act_for(0)
        if others_hold and ledger.room(0) <= 0:
            raise OutOfBlocks(f"block {old} is held {ledger.ref_cnt[old]} times, and none is free to copy it to", 1, 0)
        blocks = lease._blocks[:]
        if others_hold:
            ledger.evict_ahead(1)
        new = ledger.make_writable(old)
        lease._num_sure = min(lease._num_sure, position)
        if not others_hold:
            return None
        blocks[position] = i32(new)
        lease._blocks = blocks
        ledger.release_one(old)
        return int(old), int(new)

    def close(self, lease: BlockLease) -> None:
        """Free a live lease, last block first. O(blocks)."""
        held = lease._blocks if lease._num_null == 0 else held_blocks(lease, 0, lease._count)
        del self.live[lease._serial]
        self.ledger.act("free_blocks", lease._holder)
        if self.token_blocks is not None:
            self.token_blocks.release(lease._token_blocks, 0, len(lease._token_blocks))
        if lease._num_null == 0:
            sure = lease._num_sure if lease._losses == self.ledger.num_losses else 0
            self.ledger.release(lease._blocks, 0, lease._count, 0, sure)
        else:
            self.ledger.release(held, 0, len(held))

    def close_to_tail(self, lease: BlockLease) -> None:
        """Free a live lease, and put all its blocks that become free at the tail of the queue, cached or not."""
        held = held_blocks(lease, 0, lease._count)
        self.close(lease)
        self.ledger.move_last(held, 0, len(held))

    def close_later(self, lease: BlockLease, to_tail: bool) -> None:
        """Free a live lease when the running call ends. Raises `DoubleFree` if that was requested before."""
        if lease in self._waiting:
            raise DoubleFree(f"lease {lease._called()} was already freed; that takes effect when the running call ends")
        lease._to_tail = to_tail
        self._waiting.append(lease)

    def carry_out(self) -> None:
        """Free the queued leases in order, except those that the call itself has freed."""
        waiting = self._waiting
        self._waiting = []
        for lease in waiting:
            if self.live.get(lease._serial) is lease:
                if lease._to_tail:
                    self.close_to_tail(lease)
                else:
                    self.close(lease)


#: A lease grows by half of its blocks and a few, so that a block costs the same at any length.
FEW_BLOCKS: Final[i64] = 4


def grow(ledger: BlockLedger, lease: BlockLease, count: i64) -> vec[i32]:
    """Append `count` new blocks to a lease, and return them. So many must be free. Amortised O(count).

    Raises `PolicyError` and changes nothing.
    """
    blocks = lease._blocks
    first = lease._count
    if first + count > len(blocks):
        blocks = zeros_i32(int(max(first + count, first + first // 2 + FEW_BLOCKS)))
        for position in range(first):
            blocks[position] = lease._blocks[position]
    ledger.evict_ahead(count)
    ledger.acquire(blocks, first, count)
    lease._blocks = blocks
    lease._count = first + count
    return blocks[first : first + count]


def part_of(registry: LeaseRegistry, lease: BlockLease, first: i64, last: i64, holder: str) -> BlockLease:
    """Return a lease on the blocks `first` to `last` of another one. Does not change their counts. O(last - first)."""
    part = registry.draft(lease._blocks[first:last], holder)
    if lease._num_null > 0:
        for position in range(part._count):
            if part._blocks[position] == NULL_BLOCK:
                part._num_null += 1
    part._first_block = lease._first_block + first
    part._num_cached = max(min(lease._num_cached - first, part._count), 0)
    part._num_sure = max(min(lease._num_sure - first, part._count), 0)
    part._losses = lease._losses
    _anchor_at(registry.ledger, part, lease, first)
    registry.enlist(part)
    return part


def _anchor_at(ledger: BlockLedger, part: BlockLease, lease: BlockLease, position: i64) -> None:
    """Store in `part` the content before the block at `position` of `lease`, if it is known.

    It is known for a released block that was the last cached one, because its content id is remembered.
    """
    block = i64(lease._blocks[position - 1]) if position > 0 else NULL_BLOCK
    if block != NULL_BLOCK and position <= lease._num_sure:
        ledger.index.remember(block)
        part._before = ledger.index.content_of(block)
        part._before_hash = ledger.index.chain_hash[block]
    elif lease._anchor == position:
        part._before = lease._before
        part._before_hash = lease._before_hash
    elif lease._anchor > position:
        part._anchor = lease._anchor - position
        part._before = lease._before
        part._before_hash = lease._before_hash


def cut_off(registry: LeaseRegistry, lease: BlockLease, position: i64, holder: str) -> BlockLease:
    """Move the blocks from `position` on to another lease. O(blocks moved)."""
    tail = part_of(registry, lease, position, lease._count, holder)
    lease._count = position
    lease._num_null -= tail._num_null
    lease._num_cached = min(lease._num_cached, position)
    lease._num_sure = min(lease._num_sure, position)
    if lease._anchor > position:
        lease._anchor = 0
        lease._before = NO_CONTENT
    return tail


def release_range(ledger: BlockLedger, lease: BlockLease, first: i64, last: i64) -> int:
    """Release the blocks `first` to `last` and replace them by the null block. O(last - first)."""
    blocks = lease._blocks
    held = held_blocks(lease, first, last)
    end = lease._num_cached
    if first < end <= last and blocks[end - 1] != NULL_BLOCK:
        # The next block to be cached follows this one, although it is no longer held.
        is_sure = end == lease._num_sure
        ledger.index.remember(i64(blocks[end - 1]))
        lease._anchor = end
        lease._before = ledger.index.content_of(i64(blocks[end - 1])) if is_sure else NO_CONTENT
        lease._before_hash = ledger.index.chain_hash[i64(blocks[end - 1])]
    for position in range(first, last):
        blocks[position] = 0
    lease._num_null += i64(len(held))
    ledger.release(held, 0, len(held))
    return len(held)


def adopt(registry: LeaseRegistry, blocks: vec[i32], holder: str) -> BlockLease:
    """Return a lease on these blocks, which must be free. O(blocks)."""
    lease = registry.make(blocks, holder)
    registry.ledger.take(blocks)
    return lease
