"""`NamedPool`: blocks that are found by names which their owner gives them."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import NameEvent, Resize
from ...cache_options import MAX_BLOCKS, MAX_HISTORY
from ...errors import DoubleFree, InvalidArgument, not_enough_memory
from ...hash_seeds import hash_seed_or_drawn
from ..arrays import grown_i32, view_i32, zeros_i32, zeros_i64
from ..blocks.by_id import ReleaseOrder
from ..blocks.eviction import resolve_policy
from ..blocks.lease import BlockLease
from ..blocks.names import MAX_GROUP, NAME_WORDS, group_numbers, listed, pack_name, pack_names
from ..blocks.word_ledger import NamedLedger
from ..face import read_bool, read_int, read_str
from ..tokens import int64_items
from .standalone_pool import StandalonePool

#: How often a block can be held: counts are int32.
MAX_HOLDS: Final[i64] = 2147483647


class NamedPool(StandalonePool):
    """A pool for engines that name contents themselves, for instance by chained hashes of tokens.

    The pool counts, finds and evicts blocks. A hit is as exact as the names: all of their bytes are compared. A name
    has 1 to 32 bytes and belongs to a group, a number from 0 (layers of one kind, a cache salt). A block may have
    several names. If several blocks have the same name, the oldest is found. Block 0 is the null block.

    Blocks are held by leases (`get_new_blocks`, `hold`, `free_blocks`), or as plain ids by engines that keep tables of
    single blocks (`new_ids`, `hold_ids`, `free_ids`). Ids cannot free blocks that a lease holds. One call runs at a
    time, as in `KVCacheManager`.

    Args:
        num_blocks: blocks of the pool, the null block included; 1 to 2**27.
        hash_seed: seed of the index's hash function, as in `CacheConfig`.
        eviction_policy: which idle named block is evicted first, as in `CacheConfig`.
        max_events: events kept for `take_events`; 0 for none. Older ones are lost.
        history_size: events that `history` remembers; 0 for none.
        residency_sample: follow every n-th block from allocation to eviction (`residency`); 0 for none.

    Raises:
        InvalidArgument: if a value is outside its limits.
        NotEnoughMemory: if the system has no memory for the pool.
        PolicyError: if making the eviction policy raises.

    >>> pool = NamedPool(num_blocks=10)
    >>> lease = pool.get_new_blocks(2, holder="request-1")
    >>> pool.name_blocks(lease, [b"first", b"second"])
    2
    >>> pool.free_blocks(lease)
    >>> pool.find([b"first", b"second", b"third"]).tolist()
    [1, 2, 0]
    """

    def __init__(
        self,
        num_blocks: object,
        *,
        hash_seed: object = None,
        eviction_policy: object = "lru",
        max_events: object = 0,
        history_size: object = 0,
        residency_sample: object = 0,
    ) -> None:
        blocks = read_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        seed = hash_seed_or_drawn(hash_seed)
        events = read_int("max_events", max_events, 0, MAX_HISTORY)
        history = read_int("history_size", history_size, 0, MAX_HISTORY)
        sample = read_int("residency_sample", residency_sample, 0, MAX_BLOCKS)
        try:
            self._named = NamedLedger(blocks, seed, events)
            #: How often each block is held without a lease.
            self._loose = zeros_i32(blocks)
            self._release_order = ReleaseOrder(blocks)
            super().__init__(self._named, 0, history, sample)
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {blocks}; the system has no memory for its arrays", error)
        self._name = zeros_i64(int(NAME_WORDS))
        self._order.install(resolve_policy(eviction_policy, self._ledger))

    @property
    def num_names(self) -> int:
        """Names of all blocks; a name that several blocks have counts for each. O(1)."""
        return int(self._ledger.index.num_indexed)

    def loose_counts(self) -> npt.NDArray[np.int32]:
        """Return how often each block is held by its id (`hold_ids`), int32, as long as `ref_counts`.

        A read-only view, up to date until the pool grows.
        """
        return view_i32(self._loose)

    # Finding. Nothing is held, and neither the order of eviction nor a policy hears of it.

    def find_one(self, name: object, group: object = 0) -> int:
        """Return the block that has had this name the longest, or 0. Holds nothing. O(1) expected.

        Args:
            name: 1 to 32 bytes.
            group: number of the name's group.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("find_one")
        try:
            pack_name(self._name, 0, name, read_int("group", group, 0, MAX_GROUP))
            return int(self._named.find(self._name, 0))
        finally:
            self._gate.leave()

    def find(self, names: object, group: object = 0) -> npt.NDArray[np.int32]:
        """Return for each name the block that has had it the longest, or 0: int32 (n,). Holds nothing. O(n).

        Args:
            names: names of 1 to 32 bytes.
            group: number of the names' group.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("find")
        try:
            words = pack_names(listed(names), read_int("group", group, 0, MAX_GROUP))
            return np.array(view_i32(self._named.find_all(words)))
        finally:
            self._gate.leave()

    def find_prefix(self, names: object, groups: object = (0,)) -> npt.NDArray[np.int32]:
        """Find the longest run of leading names that are found in every group: int32 (len(groups), n). O(n * groups).

        Args:
            names: names of 1 to 32 bytes.
            groups: numbers of groups, at least one.

        Returns:
            Row g has the blocks of `groups[g]`.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("find_prefix")
        try:
            numbers = group_numbers(groups)
            given = listed(names)
            rows = [self._named.find_all(pack_names(given, number)) for number in numbers]
            reached = min([_leading(row) for row in rows])
            return np.array([view_i32(row)[:reached] for row in rows], dtype=np.int32).reshape(len(rows), reached)
        finally:
            self._gate.leave()

    def names_of(self, block_id: object) -> list[tuple[bytes, int]]:
        """Return the names of a block with their groups, oldest first.

        Args:
            block_id: id of the block, 0 to num_blocks - 1.

        Raises:
            InvalidArgument: if there is no such block.
        """
        self._gate.enter("names_of")
        try:
            return self._named.names_of(read_int("block_id", block_id, 0, int(self._ledger.capacity) - 1))
        finally:
            self._gate.leave()

    # Leases.

    def get_cached_blocks(self, names: object, group: object = 0, *, holder: object = "") -> BlockLease:
        """Hold the blocks of the longest run of leading names that are found. O(names).

        Args:
            names: names of 1 to 32 bytes.
            group: number of the names' group.
            holder: a name for errors and leak reports.

        Returns:
            A lease, possibly empty.

        Raises:
            InvalidArgument: if an argument is outside its limits, or a block would be held more than 2**31 - 1 times.
        """
        self._gate.enter("get_cached_blocks")
        try:
            words = pack_names(listed(names), read_int("group", group, 0, MAX_GROUP))
            holder_name = read_str("holder", holder)
            found = self._named.find_all(words)
            self._ledger.act("get_cached_blocks", holder_name)
            return self._hold("names", found[: _leading(found)], holder_name)
        finally:
            self._gate.leave_with_result()

    def hold(self, block_ids: object, *, holder: object = "") -> BlockLease:
        """Hold blocks by ids that a lookup returned. O(blocks).

        Args:
            block_ids: blocks that have a name or are held, integers (n,).
            holder: a name for errors and leak reports.

        Raises:
            InvalidArgument: if there is no such block, or it is free and has no name, so its content is lost.
        """
        self._gate.enter("hold")
        try:
            holder_name = read_str("holder", holder)
            blocks = self._checked_ids(block_ids)
            self._require_content(blocks)
            self._ledger.act("hold", holder_name)
            return self._hold("block_ids", blocks, holder_name)
        finally:
            self._gate.leave_with_result()

    def _hold(self, argument: str, blocks: vec[i32], holder: str) -> BlockLease:
        lease = self._leases.make(blocks, holder)
        try:
            self._share(argument, blocks)
        except BaseException:
            self._leases.delist(lease)
            raise
        return lease

    def _share(self, argument: str, blocks: vec[i32]) -> None:
        """Hold the blocks of an argument, and count a hit on each. If a policy is interrupted, nothing has changed."""
        ledger = self._named
        count = i64(len(blocks))
        self._require_countable(argument, blocks)
        peak = ledger.peak_used_blocks
        ledger.note_named_hits(blocks)
        ledger.share(blocks, 0, count)
        if self._gate.interruption.error is not None:
            ledger.unshare(blocks, 0, count)
            ledger.peak_used_blocks = peak
            self._gate.interruption.raise_now()

    # Single blocks, for engines with tables of their own.

    def new_ids(self, num_blocks: object) -> list[int]:
        """Hold new blocks by their ids, without a lease.

        Like `get_new_blocks`, it takes them from the free queue's head.

        O(num_blocks).

        Args:
            num_blocks: number of blocks.

        Returns:
            Their ids.

        Raises:
            OutOfBlocks: if fewer are free.
            InvalidArgument: if the number is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("new_ids")
        try:
            count = read_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            self._require_free(count)
            self._ledger.act("new_ids", "")
            self._ledger.evict_ahead(count)
            blocks = zeros_i32(count)
            ids = [0] * count  # before anything is held: where there is no memory for the answer, nothing has changed
            self._ledger.acquire(blocks, 0, count)
            for position in range(i64(count)):
                self._loose[i64(blocks[position])] = 1
                ids[position] = int(blocks[position])
            return ids
        finally:
            self._gate.leave_with_result()

    def hold_ids(self, block_ids: object) -> None:
        """Hold blocks by their ids once more. O(blocks).

        A free block without a name is held too: the caller must know that its content has not changed.

        Args:
            block_ids: ids of blocks, integers (n,); an id given twice is held twice.

        Raises:
            InvalidArgument: if there is no such block, or it would be held more than 2**31 - 1 times.
        """
        self._gate.enter("hold_ids")
        try:
            blocks = self._checked_ids(block_ids)
            self._ledger.act("hold_ids", "")
            self._share("block_ids", blocks)
            for position in range(i64(len(blocks))):
                self._loose[i64(blocks[position])] += 1
        finally:
            self._gate.leave()

    def free_ids(self, block_ids: object, *, last: object = False) -> None:
        """Free blocks that are held by their ids. The first is evicted first. O(blocks).

        During another call it raises `ConcurrentCall`: use leases in finalisers.

        Args:
            block_ids: ids of blocks, integers (n,).
            last: True to put blocks without a name at the tail of the free queue too, as in `free_blocks`.

        Raises:
            DoubleFree: if an id is held less often than it is given; then nothing is freed.
            InvalidArgument: if there is no such block.
        """
        self._gate.enter("free_ids")
        try:
            to_tail = last is not False and read_bool("last", last)
            blocks = self._checked_ids(block_ids)
            if len(blocks) >= MAX_BLOCKS:
                raise InvalidArgument(f"block_ids has {len(blocks)} ids; the limit is {MAX_BLOCKS - 1}")
            # All that takes memory comes first: where there is none, nothing has changed.
            ordered = self._release_order.of(self._ledger, blocks)
            backwards = _reversed(blocks) if to_tail else ordered
            self._count_down(blocks)
            self._ledger.act("free_ids", "")
            self._ledger.release(ordered, 0, i64(len(ordered)))
            if to_tail:
                self._ledger.move_last(backwards, 0, len(backwards))
        finally:
            self._gate.leave()

    def _count_down(self, blocks: vec[i32]) -> None:
        """Decrement the loose counts of all blocks, or raise and change none."""
        loose = self._loose
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if loose[block] == 0:
                for done in range(position):
                    loose[i64(blocks[done])] += 1
                raise DoubleFree(f"block_ids[{position}] is {block}, which is not held so often without a lease")
            loose[block] -= 1

    # Names.

    def name_blocks(self, blocks: object, names: object, group: object = 0) -> int:
        """Give each block the name at its position. O(names).

        A block with names gets a further one. A free block keeps its position in the free queue, or moves to its tail
        under a policy other than "lru".

        Args:
            blocks: a lease, or ids of blocks.
            names: as many names of 1 to 32 bytes.
            group: number of the names' group.

        Returns:
            How many blocks did not have their name before.

        Raises:
            InvalidArgument: if the lengths differ, there is no such block, or it is the null block.
        """
        self._gate.enter("name_blocks")
        try:
            words = pack_names(listed(names), read_int("group", group, 0, MAX_GROUP))
            ids = self._leased_or_ids(blocks)
            count = i64(len(words)) // NAME_WORDS
            if len(ids) != count:
                raise InvalidArgument(f"names has {count} items for {len(ids)} blocks; give one name for each block")
            for position in range(i64(len(ids))):
                if ids[position] == 0:
                    raise InvalidArgument(f"blocks[{position}] is 0, the null block, which cannot have a name")
            self._named.make_room_for_names(count)
            return self._name_all(ids, words)
        finally:
            self._gate.leave()

    def name_one(self, block_id: object, name: object, group: object = 0) -> bool:
        """Give a block a name. O(names of the block).

        Args:
            block_id: id of the block.
            name: 1 to 32 bytes.
            group: number of the name's group.

        Returns:
            True if it did not have the name before.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("name_one")
        try:
            number = read_int("group", group, 0, MAX_GROUP)
            block = self._block(block_id)
            pack_name(self._name, 0, name, number)
            if self._named.has(block, self._name, 0):
                return False
            self._named.make_room_for_names(1)
            self._named.name(block, self._name, 0)
            return True
        finally:
            self._gate.leave()

    def _name_all(self, ids: vec[i32], words: vec[i64]) -> int:
        given = 0
        for position in range(i64(len(ids))):
            block = i64(ids[position])
            if not self._named.has(block, words, position * NAME_WORDS):
                self._named.name(block, words, position * NAME_WORDS)
                given += 1
        return given

    def move_names(self, source: object, target: object) -> int:
        """Move all names of a block to another one. O(names).

        Use it after copying a block whose owner goes on writing to it: the copy keeps the content.

        Args:
            source: a held block that has a name.
            target: a held block without a name.

        Returns:
            How many names were moved.

        Raises:
            InvalidArgument: if a block is not as described.
        """
        self._gate.enter("move_names")
        try:
            old = i64(read_int("source", source, 1, int(self._ledger.capacity) - 1))
            new = i64(read_int("target", target, 1, int(self._ledger.capacity) - 1))
            index = self._ledger.index
            if not index.is_cached(old) or self._ledger.ref_cnt[old] == 0:
                raise InvalidArgument(f"source is {old}; it must be a block that is held and has a name")
            if index.is_cached(new) or self._ledger.ref_cnt[new] == 0:
                raise InvalidArgument(f"target is {new}; it must be a block that is held and has no name")
            return int(self._named.move_names(old, new))
        finally:
            self._gate.leave()

    def uncache(self, block_ids: object) -> int:
        """Remove all names of blocks, held or idle. O(blocks).

        An idle block keeps its position in the free queue; under a policy other than "lru" it is allocated next.

        Args:
            block_ids: ids of blocks, integers (n,).

        Returns:
            How many blocks had a name.

        Raises:
            InvalidArgument: if there is no such block.
        """
        self._gate.enter("uncache")
        try:
            gone = 0
            blocks = self._checked_ids(block_ids)
            for position in range(i64(len(blocks))):
                if self._ledger.index.is_cached(i64(blocks[position])):
                    self._named.uncache(i64(blocks[position]))
                    gone += 1
            return gone
        finally:
            self._gate.leave()

    # Events, and the size.

    def take_events(self) -> list[NameEvent]:
        """Return the events since the last call, oldest first, at most `max_events`. O(events)."""
        self._gate.enter("take_events")
        try:
            return [] if self._named.log is None else self._named.log.take()
        finally:
            self._gate.leave_with_result()

    @property
    def num_lost_events(self) -> int:
        """Events that were dropped because `max_events` newer ones followed. O(1)."""
        return 0 if self._named.log is None else int(self._named.log.num_lost)

    def resize(self, num_blocks: object) -> Resize:
        """Grow or shrink the pool. Blocks that are removed lose their names. O(num_blocks + names).

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
            room = self._named.make_room(target)
            loose = self._loose
            if room is not None:
                try:
                    loose = grown_i32(loose, target)
                    self._release_order.make_room(target)
                    if self._residency is not None:
                        self._residency.make_room(target)
                except MemoryError as error:
                    raise not_enough_memory(f"num_blocks is {target}; the system has no memory for its arrays", error)
            answer = self._named.resize(target, room)
            self._loose = loose
            return answer
        finally:
            self._gate.leave()

    def _other_holds(self) -> list[int]:
        return [int(count) for count in self._loose]

    # Arguments.

    def _checked_ids(self, block_ids: object) -> vec[i32]:
        items = int64_items("block_ids", block_ids)
        blocks = zeros_i32(len(items))
        for position in range(i64(len(items))):
            if not self._is_there(items[position]):
                limit = self._ledger.num_blocks - 1
                raise InvalidArgument(f"block_ids[{position}] is {items[position]}; it must be from 1 to {limit}")
            block = items[position]
            blocks[position] = i32(block)
        return blocks

    def _is_there(self, block: i64) -> bool:
        """Return whether the pool has the block; True also for a retiring block beyond its end."""
        if 0 < block < i64(self._ledger.num_blocks):
            return True
        return 0 < block < self._ledger.capacity and self._ledger.ref_cnt[block] > 0

    def _leased_or_ids(self, blocks: object) -> vec[i32]:
        if isinstance(blocks, BlockLease):
            held = self._leases.require_live(blocks)
            return held._blocks[: held._count]
        return self._checked_ids(blocks)

    def _require_countable(self, argument: str, blocks: vec[i32]) -> None:
        """Raise `InvalidArgument` if a block could be held more often than 2**31 - 1 times."""
        room = MAX_HOLDS - i64(len(blocks))
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if i64(self._ledger.ref_cnt[block]) > room:
                raise InvalidArgument(
                    f"{argument}[{position}] is block {block}, which is held {self._ledger.ref_cnt[block]} times; with "
                    f"{len(blocks)} more it could exceed the limit of {MAX_HOLDS} times"
                )

    def _require_content(self, blocks: vec[i32]) -> None:
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self._ledger.ref_cnt[block] == 0 and not self._ledger.index.is_cached(block):
                raise InvalidArgument(f"block_ids[{position}] is {block}, which is free and has no name")

    def _block(self, block_id: object) -> i64:
        """Return a block id as a number.

        A plain int is not passed to `require_int`, which costs as much as a lookup.
        """
        last = self._ledger.num_blocks - 1
        if type(block_id) is int and 0 < block_id <= last:
            return i64(block_id)
        if type(block_id) is int and block_id < int(self._ledger.capacity) and self._is_there(i64(block_id)):
            return i64(block_id)
        return i64(read_int("block_id", block_id, 1, last))


def _leading(blocks: vec[i32]) -> i64:
    """Return how many blocks precede the first 0."""
    for position in range(i64(len(blocks))):
        if blocks[position] == 0:
            return position
    return i64(len(blocks))


def _reversed(blocks: vec[i32]) -> vec[i32]:
    count = i64(len(blocks))
    backwards = zeros_i32(int(count))
    for position in range(count):
        backwards[position] = blocks[count - 1 - position]
    return backwards
