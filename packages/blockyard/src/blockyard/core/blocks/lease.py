"""What the pool hands out: blocks that are already counted as held, and the book of all that are not freed yet."""

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
    """A counted hold on some blocks, in order. Freed once, by the pool that gave it (`free_blocks`).

    A lease is an object and not a list of ids because an id says nothing about who may free it: ids are reused, and
    a second free of the same id would hand one block to two owners. The pool knows each of its leases by serial,
    so a double, stale or foreign free is caught in O(1), whatever has happened to the blocks since.

    Where blocks were released (`BlockPool.release`), the null block stands in their place, so that the others keep
    their positions, which are those of a block table.
    """

    def __init__(self, serial: int, holder: str, blocks: vec[i32], book: dict[int, "BlockLease"]) -> None:
        self._serial = serial
        self._holder = holder
        #: Its blocks are the first `_count`; behind them is room to grow.
        self._blocks = blocks
        self._count: i64 = len(blocks)
        #: How many of them are the null block.
        self._num_null: i64 = 0
        #: The book of its pool, in which a live lease stands under its serial.
        self._book = book
        #: Leading blocks that its calls have cached or found cached; how many of them have not been written into since;
        #: and the losses of the pool (`num_losses`) when all of these were last known to be cached.
        self._num_cached: i64 = 0
        self._num_sure: i64 = 0
        self._losses: i64 = 0
        #: Token blocks that it holds besides, where other blocks have the keys and values (`hold_cached`).
        self._token_blocks = zeros_i32(0)
        #: Freed while another call runs: whether its blocks go to the end of the queue.
        self._goes_last = False
        #: Which block of its prompt it begins with.
        self._first_block: i64 = 0
        #: The content before the block at `_anchor`, and its chained hash, where no held block tells: 0 for the
        #: prompt's root at its block 0, and elsewhere for what is not known.
        self._anchor: i64 = 0
        self._before: i64 = 0
        self._before_hash: i64 = 0

    @property
    def serial(self) -> int:
        """Return its number, used once in its pool."""
        return self._serial

    @property
    def holder(self) -> str:
        """The name it was taken under."""
        return self._holder

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Its blocks in order, int32 (n,), 0 where one was released; read-only, no copy: ask again after a change."""
        if self._count == len(self._blocks):
            return view_i32(self._blocks)
        return view_i32(self._blocks)[: int(self._count)]

    @property
    def num_cached_blocks(self) -> int:
        """Leading blocks that its calls have cached or found cached: `cache_next_blocks` goes on behind them. O(1)."""
        return int(self._num_cached)

    @property
    def first_block(self) -> int:
        """Which block of its prompt it begins with: more than 0 for a tail (`split`) and for `get_cached_block`."""
        return int(self._first_block)

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: object) -> int:
        """Return the id at a position; take slices of `block_ids`."""
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
        """Return the ids without the places that were released. O(blocks)."""
        return [block for block in self if block != NULL_BLOCK]

    def __repr__(self) -> str:
        return f"<BlockLease {self._called()}: blocks {list(self)}>"

    def _called(self) -> str:
        return f"{self._serial} of {self._holder!r}" if self._holder else str(self._serial)

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("BlockLease")

    def __copy__(self) -> "BlockLease":
        raise refuse_copy("a BlockLease", "take another hold with `touch`")

    def __deepcopy__(self, memo: object) -> "BlockLease":
        raise refuse_copy("a BlockLease", "take another hold with `touch`")

    def __reduce__(self) -> str:
        raise refuse_pickle("a BlockLease", "send its `block_ids`")


def check_leases(ledger: BlockLedger, leases: list[BlockLease], others: list[int] | None) -> None:
    """What leases hold adds up to the counts, with what others hold of each block. O(blocks).

    others: None where it is not known; then leases hold no more than the counts.
    """
    held = [0] * int(ledger.capacity) if others is None else others
    for lease in leases:
        ids = lease.held_ids()
        if len(lease) - len(ids) != lease._num_null:
            raise InvariantError(f"I8: {lease!r} counts {lease._num_null} places that were released")
        if not 0 <= lease._num_sure <= lease._num_cached <= lease._count <= len(lease._blocks):
            raise InvariantError(f"I8: {lease!r} says that {lease._num_cached} of its blocks are cached")
        if lease._losses == ledger.num_losses:
            for block in lease._blocks[: lease._num_sure]:
                if block != NULL_BLOCK and not ledger.index.is_cached(i64(block)):
                    raise InvariantError(f"I8: {lease!r} is sure of {lease._num_sure} blocks; {block} is not cached")
        for block in ids:
            held[block] += 1
    for block in range(int(ledger.capacity)):
        references = int(ledger.ref_cnt[i64(block)])
        if held[block] > references or (others is not None and held[block] < references):
            raise InvariantError(f"I8: block {block} has ref_cnt {references}, but is held {held[block]} times")


def require_countable(ledger: BlockLedger, blocks: vec[i32], first: i64, last: i64) -> None:
    """Raise `InvalidArgument` where one of these blocks is held so often that no lease more may count it. O(blocks)."""
    ref_cnt = ledger.ref_cnt
    for position in range(first, last):
        block = i64(blocks[position])
        if i64(ref_cnt[block]) >= MAX_LEASES:
            raise InvalidArgument(
                f"block {block} is held {ledger.ref_cnt[block]} times; the limit of leases on a block is {MAX_LEASES}"
            )


def held_blocks(lease: BlockLease, first: i64, last: i64) -> vec[i32]:
    """Return the blocks at `first` to `last` that are still held, in order, a copy. O(last - first)."""
    blocks = lease._blocks[first:last]
    if lease._num_null == 0:
        return blocks
    count: i64 = 0
    for position in range(i64(len(blocks))):
        if blocks[position] != NULL_BLOCK:
            blocks[count] = blocks[position]
            count += 1
    return blocks[:count]


class LeaseBook(Deferred):
    """The leases of a pool that are not freed yet, oldest first, and those whose free waits for a call to end."""

    def __init__(self, ledger: BlockLedger) -> None:
        self.ledger = ledger
        #: Where leases hold token blocks besides: those.
        self.token_blocks: BlockLedger | None = None
        self.live: dict[int, BlockLease] = {}
        self._last_serial = 0
        self._waiting: list[BlockLease] = []

    def make(self, blocks: vec[i32], holder: str) -> BlockLease:
        """Return a lease on `blocks`, live from now on: its maker takes the blocks next, which cannot fail."""
        lease = self.draft(blocks, holder)
        self.enlist(lease)
        return lease

    def draft(self, blocks: vec[i32], holder: str) -> BlockLease:
        """Return a lease that is not live before `enlist`; nothing has changed until then."""
        lease = BlockLease(self._last_serial + 1, holder, blocks, self.live)
        lease._losses = self.ledger.num_losses
        return lease

    def enlist(self, lease: BlockLease) -> None:
        """Let the latest draft be live."""
        self.live[lease._serial] = lease
        self._last_serial = lease._serial

    def take_back(self, lease: BlockLease) -> None:
        """Undo the latest `make`."""
        del self.live[lease._serial]
        self._last_serial -= 1

    def hold(self, blocks: vec[i32], holder: str, interruption: Interruption) -> BlockLease:
        """Return a lease on cached blocks, which their policy takes for a hit. O(blocks).

        Raises `InvalidArgument`. A policy that is interrupted when it is told leaves all as it was.
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
            self.let_go(lease, peak)
            interruption.raise_now()
        return lease

    def let_go(self, lease: BlockLease, peak: i64) -> None:
        """Undo the latest `hold`, before which at most `peak` blocks were used at once."""
        self.ledger.unshare(lease._blocks, 0, lease._count)
        self.ledger.peak_used_blocks = peak
        self.take_back(lease)

    def require_live(self, lease: object) -> BlockLease:
        """Raise `DoubleFree` for a lease that was freed, `ForeignBlock` for another pool's. O(1)."""
        if not isinstance(lease, BlockLease):
            raise InvalidArgument(f"lease is {shown(lease)}; it must be a BlockLease, as get_new_blocks returns it")
        if self.live.get(lease._serial) is lease:
            return lease
        if lease._book is self.live:
            raise DoubleFree(f"lease {lease._called()} on blocks {list(lease)} was already freed")
        raise ForeignBlock(f"lease {lease._called()} was handed out by another pool")

    def leases(self) -> list[BlockLease]:
        """Return all that are live, oldest first."""
        return list(self.live.values())

    def describe(self, number: int) -> KVCacheBlock:
        """Return one block as people see it, with the leases that hold it. O(leases)."""
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
        """See `BlockPool.copy_on_write`."""
        ledger = self.ledger
        old = i64(lease._blocks[position])
        if old == NULL_BLOCK:
            raise InvalidArgument(f"position is {position}; the lease has given that block back")
        others_hold = ledger.ref_cnt[old] > 1
        ledger.budget.act_for(0)
        if others_hold and ledger.room(0) <= 0:
            raise OutOfBlocks(f"block {old} is held {ledger.ref_cnt[old]} times, and none is free to copy it to", 1, 0)
        blocks = lease._blocks[:]
        if others_hold:
            ledger.evict_ahead(1)
        new = ledger.writable(old)
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

    def close_to_the_end(self, lease: BlockLease) -> None:
        """The same; what becomes free is the last to be taken, cached or not."""
        held = held_blocks(lease, 0, lease._count)
        self.close(lease)
        self.ledger.move_last(held, 0, len(held))

    def close_later(self, lease: BlockLease, goes_last: bool) -> None:
        """Free a live lease when the call that runs has ended. Raises `DoubleFree` for one that waits already."""
        if lease in self._waiting:
            raise DoubleFree(f"lease {lease._called()} was already freed; it waits for a call to end")
        lease._goes_last = goes_last
        self._waiting.append(lease)

    def carry_out(self) -> None:
        """Free what waits, in the order in which it came. What the call that ran has freed itself is done."""
        waiting = self._waiting
        self._waiting = []
        for lease in waiting:
            if self.live.get(lease._serial) is lease:
                if lease._goes_last:
                    self.close_to_the_end(lease)
                else:
                    self.close(lease)


#: A lease that grows gets room for half as many blocks again and a few, so that a block costs the same at any length.
FEW_BLOCKS: Final[i64] = 4


def grow(ledger: BlockLedger, lease: BlockLease, count: i64) -> vec[i32]:
    """Take `count` blocks, which must be free, behind those of a lease; returns them. Amortised O(count).

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


def part_of(book: LeaseBook, lease: BlockLease, first: i64, last: i64, holder: str) -> BlockLease:
    """A lease on the blocks at `first` to `last` of another, which are not counted for it yet. O(last - first)."""
    part = book.draft(lease._blocks[first:last], holder)
    if lease._num_null > 0:
        for position in range(part._count):
            if part._blocks[position] == NULL_BLOCK:
                part._num_null += 1
    part._first_block = lease._first_block + first
    part._num_cached = max(min(lease._num_cached - first, part._count), 0)
    part._num_sure = max(min(lease._num_sure - first, part._count), 0)
    part._losses = lease._losses
    _anchor_at(book.ledger, part, lease, first)
    book.enlist(part)
    return part


def _anchor_at(ledger: BlockLedger, part: BlockLease, lease: BlockLease, position: i64) -> None:
    """Let the beginning of `part` know what stands before the block at `position` of `lease`, if that is known.

    A block that is released may be the last of what was cached; its content is known under its number all the same.
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


def cut_off(book: LeaseBook, lease: BlockLease, position: i64, holder: str) -> BlockLease:
    """Let the blocks from `position` on be another lease's. O(blocks of that)."""
    tail = part_of(book, lease, position, lease._count, holder)
    lease._count = position
    lease._num_null -= tail._num_null
    lease._num_cached = min(lease._num_cached, position)
    lease._num_sure = min(lease._num_sure, position)
    if lease._anchor > position:
        lease._anchor = 0
        lease._before = NO_CONTENT
    return tail


def give_back(ledger: BlockLedger, lease: BlockLease, first: i64, last: i64) -> int:
    """Release the blocks at `first` to `last`; the null block takes their places. O(last - first)."""
    blocks = lease._blocks
    held = held_blocks(lease, first, last)
    end = lease._num_cached
    if first < end <= last and blocks[end - 1] != NULL_BLOCK:
        # What is cached next comes behind this one, though it is no longer held.
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


def adopt(book: LeaseBook, blocks: vec[i32], holder: str) -> BlockLease:
    """Return a lease on these blocks, which must be free. O(blocks)."""
    lease = book.make(blocks, holder)
    book.ledger.take(blocks)
    return lease
