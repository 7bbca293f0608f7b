"""The pool known by names: blocks handed out, and found again by the bytes that their owner calls them."""

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
from ..blocks.eviction import wished_policy
from ..blocks.lease import BlockLease
from ..blocks.names import MAX_GROUP, NAME_WORDS, group_numbers, listed, pack_name, pack_names
from ..blocks.word_ledger import NamedLedger
from ..face import read_bool, read_int, read_str
from ..tokens import int64_items
from .standalone_pool import StandalonePool

#: How often a block can be held: counts are int32.
MAX_HOLDS: Final[i64] = 2147483647


class NamedPool(StandalonePool):
    """A pool for engines that have names for their blocks: chained hashes of tokens, or whatever else stands for
    contents. Blockyard counts, evicts and finds; what a name means is the caller's affair, so a hit is as exact as the
    names are: all bytes of them are compared, and never a hash of them alone.

    A name is 1 to 32 bytes, in a group (an int from 0: layers of one kind, a cache salt's number). A block may have
    several names, a name several blocks: the oldest is found. Block 0 is the null block, as in `BlockPool`.

    Blocks are held by leases (`get_new_blocks`, `hold`, `free_blocks`), or, by engines that keep tables of single
    blocks, as plain ids (`new_ids`, `hold_ids`, `free_ids`): the pool counts how often each id is held without a lease,
    so ids cannot free what a lease holds. One call runs at a time, as in `BlockPool`.

    num_blocks: the null block included; 1 to 2**27. hash_seed: of the index; None draws one. eviction_policy,
    history_size, residency_sample: as in `CacheConfig`. max_events: how many events are kept for `take_events`, 0 for
    none; older ones are lost. Raises `InvalidArgument`, `NotEnoughMemory`.

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
        self._order.install(wished_policy(eviction_policy, self._ledger))

    @property
    def num_names(self) -> int:
        """Count the names of all blocks; a name that several blocks have counts for each. O(1)."""
        return int(self._ledger.index.num_indexed)

    def loose_counts(self) -> npt.NDArray[np.int32]:
        """How often each block is held without a lease, int32 as long as `ref_counts`, read-only, live until the pool
        grows."""
        return view_i32(self._loose)

    # Finding. Nothing is held, and neither the order of eviction nor a policy hears of it.

    def find_one(self, name: object, group: object = 0) -> int:
        """Return the block that has had this name the longest, or 0. O(1) expected."""
        self._gate.enter("find_one")
        try:
            pack_name(self._name, 0, name, read_int("group", group, 0, MAX_GROUP))
            return int(self._named.find(self._name, 0))
        finally:
            self._gate.leave()

    def find(self, names: object, group: object = 0) -> npt.NDArray[np.int32]:
        """For each name the block that has had it the longest, or 0: int32 (n,). O(n)."""
        self._gate.enter("find")
        try:
            words = pack_names(listed(names), read_int("group", group, 0, MAX_GROUP))
            return self._as_array(self._named.find_all(words))
        finally:
            self._gate.leave()

    def find_prefix(self, names: object, groups: object = (0,)) -> npt.NDArray[np.int32]:
        """The longest run from the first name on that is there in every group: int32 (len(groups), n). O(n * groups).

        Row g has the blocks of `groups[g]`.
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

    def _as_array(self, blocks: vec[i32]) -> npt.NDArray[np.int32]:
        return np.array(view_i32(blocks))

    def names_of(self, block_id: object) -> list[tuple[bytes, int]]:
        """Return the names of one block with their groups, in the order in which it got them; often none."""
        self._gate.enter("names_of")
        try:
            return self._named.names_of(read_int("block_id", block_id, 0, int(self._ledger.capacity) - 1))
        finally:
            self._gate.leave()

    # Leases.

    def get_cached_blocks(self, names: object, group: object = 0, *, holder: object = "") -> BlockLease:
        """Hold the longest run of blocks that `names` begins with; maybe none. O(names).

        Raises `InvalidArgument`, also where a block could be held more than 2**31 - 1 times.
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
        """Hold blocks by their ids, as found: each must have a name, or be held already. O(blocks).

        Raises `InvalidArgument` for ids out of range, and for a free block without a name: it is no longer what it was.
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
        lease = self._book.make(blocks, holder)
        try:
            self._share(argument, blocks)
        except BaseException:
            self._book.take_back(lease)
            raise
        return lease

    def _share(self, argument: str, blocks: vec[i32]) -> None:
        """Count a hit on what the caller's argument names. A policy that is interrupted then leaves all as it was."""
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
        """Hold blocks from the head of the free queue without a lease; their ids. See `get_new_blocks`."""
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
        """Hold blocks once more without a lease; an id given twice is held twice. O(blocks).

        A free block without a name is taken too, out of its place in the queue: for a caller who knows that it is still
        what it was. Raises `InvalidArgument` for ids out of range, and where a block could be held more than 2**31 - 1
        times.
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
        """Let go of blocks that are held without a lease, the first to be evicted first. O(blocks).

        last: as in `free_blocks`. Raises `DoubleFree` for an id that is held less often than it is given;
        nothing is freed then. In the middle of another call it is refused (`ConcurrentCall`): use leases in finalisers.
        """
        self._gate.enter("free_ids")
        try:
            goes_last = last is not False and read_bool("last", last)
            blocks = self._checked_ids(block_ids)
            if len(blocks) >= MAX_BLOCKS:
                raise InvalidArgument(f"block_ids has {len(blocks)} ids; the limit is {MAX_BLOCKS - 1}")
            # All that takes memory comes first: where there is none, nothing has changed.
            ordered = self._release_order.of(self._ledger, blocks)
            backwards = _reversed(blocks) if goes_last else ordered
            self._count_down(blocks)
            self._ledger.act("free_ids", "")
            self._ledger.release(ordered, 0, i64(len(ordered)))
            if goes_last:
                self._ledger.move_last(backwards, 0, len(backwards))
        finally:
            self._gate.leave()

    def _count_down(self, blocks: vec[i32]) -> None:
        """Take the loose holds away, or none of them."""
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
        """Give each block the name at its position; how many it did not have yet. O(names).

        blocks: a lease, or ids. A block that has names already gets one more; a free one keeps its place in
            the queue, or goes to its tail under a policy other than "lru".
        Raises `InvalidArgument` for other lengths, ids out of range, and the null block.
        """
        self._gate.enter("name_blocks")
        try:
            words = pack_names(listed(names), read_int("group", group, 0, MAX_GROUP))
            ids = self._leased_or_ids(blocks)
            count = i64(len(words)) // NAME_WORDS
            if len(ids) != count:
                raise InvalidArgument(f"there are {count} names for {len(ids)} blocks")
            self._require_no_null(ids)
            self._named.make_room_for_names(count)
            return self._name_all(ids, words)
        finally:
            self._gate.leave()

    def name_one(self, block_id: object, name: object, group: object = 0) -> bool:
        """`name_blocks` of one block; whether it did not have the name yet. O(names of the block)."""
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
        """Take all names from one block and give them to another, which has none and is held; how many. O(names).

        For a block whose owner goes on writing, while a copy keeps what it was. Raises `InvalidArgument`.
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
        """Take all names from blocks, held or idle: nothing finds them any more; how many had one. O(blocks).

        An idle block stays where it is in the free queue; under a policy other than "lru" it is the next to be taken.
        Raises `InvalidArgument` for ids out of range.
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
        """Return what happened since the last call, oldest first, at most `max_events`. O(events)."""
        self._gate.enter("take_events")
        try:
            return [] if self._named.log is None else self._named.log.take()
        finally:
            self._gate.leave_with_result()

    @property
    def num_lost_events(self) -> int:
        """Events that came when `max_events` were waiting, each in the place of the oldest. O(1)."""
        return 0 if self._named.log is None else int(self._named.log.num_lost)

    def resize(self, num_blocks: object) -> Resize:
        """See `StandalonePool.resize`; all names of a block that goes are lost. O(num_blocks + names)."""
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
        """Whether it is one of the pool's blocks: also one beyond the end of a pool that shrank, while it is held."""
        if 0 < block < i64(self._ledger.num_blocks):
            return True
        return 0 < block < self._ledger.capacity and self._ledger.ref_cnt[block] > 0

    def _leased_or_ids(self, blocks: object) -> vec[i32]:
        if isinstance(blocks, BlockLease):
            held = self._book.require_live(blocks)
            return held._blocks[: held._count]
        return self._checked_ids(blocks)

    def _require_countable(self, argument: str, blocks: vec[i32]) -> None:
        """Refuse holds that a count of 32 bits might not have room for. A block given twice is one of both."""
        room = MAX_HOLDS - i64(len(blocks))
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if i64(self._ledger.ref_cnt[block]) > room:
                raise InvalidArgument(
                    f"{argument}[{position}] is block {block}, which is held {self._ledger.ref_cnt[block]} times; with "
                    f"{len(blocks)} holds more it could be held more often than {MAX_HOLDS} times, the limit"
                )

    def _require_content(self, blocks: vec[i32]) -> None:
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self._ledger.ref_cnt[block] == 0 and not self._ledger.index.is_cached(block):
                raise InvalidArgument(f"block_ids[{position}] is {block}, which is free and has no name")

    def _block(self, block_id: object) -> i64:
        """A block's number; a plain int is checked here, since a call of `require_int` takes as long as a lookup."""
        last = self._ledger.num_blocks - 1
        if type(block_id) is int and 0 < block_id <= last:
            return i64(block_id)
        if type(block_id) is int and block_id < int(self._ledger.capacity) and self._is_there(i64(block_id)):
            return i64(block_id)
        return i64(read_int("block_id", block_id, 1, last))

    def _require_no_null(self, blocks: vec[i32]) -> None:
        for position in range(i64(len(blocks))):
            if blocks[position] == 0:
                raise InvalidArgument(f"position {position} of the lease is the null block, which has no content")


def _leading(blocks: vec[i32]) -> i64:
    """Return how many blocks stand before the first 0."""
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
