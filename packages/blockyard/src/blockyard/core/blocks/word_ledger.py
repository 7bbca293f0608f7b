"""Ledgers that find blocks by a few words: those of a content, or those of one or more names."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import Resize
from ...cache_options import MAX_BLOCKS
from ...errors import InvalidArgument, InvariantError, not_enough_memory
from ...ids import NULL_BLOCK
from ..arrays import grown_i32, zeros_i32
from ..index.room import IndexRoom, move_links_up
from .ledger import BlockLedger, LedgerRoom
from .names import CAME, CLEARED, NAME_WORDS, WENT, NameLog, unpack_name

#: Room for additional names is made for at least this many at once.
FEWEST_MORE: Final[i64] = 16


class WordLedger(BlockLedger):
    """A ledger with an exact index from a few words that identify a content to the blocks that have it.

    All words have the same root as parent. An *entry* of the index is a block, or an additional entry of a subclass.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, num_words: i64, hash_seed: int) -> None:
        super().__init__(num_blocks, tokens_per_block, 2 * int(num_words), True, hash_seed)
        self.knows_tokens = False
        self.num_words = num_words
        self._root: i64 = self.index.root(())

    def entry_of(self, words: vec[i64], place: i64) -> i64:
        """Return the oldest entry with the words from `place` on, or 0. O(1) expected."""
        return self.index.find(words, place, self.index.hash_words_at(words, place, self._root), self._root)

    def index_entry(self, entry: i64, words: vec[i64], place: i64) -> None:
        """Index an entry, which is not indexed yet, by the words from `place` on. O(1) expected."""
        row = self.index.rows.start_of(entry)
        for word in range(self.num_words):
            self.index.rows.words[row + word] = words[place + word]
        self.index.insert(entry, self.index.hash_words_at(words, place, self._root), self._root, NULL_BLOCK)

    def reset(self) -> None:
        super().reset()
        self._root = self.index.root(())


class NamedRoom(LedgerRoom):
    """Larger arrays for a `NamedLedger`, not installed yet."""

    def __init__(self, room: LedgerRoom, next_entry: vec[i32], first_unused: i64) -> None:
        super().__init__(room.num_blocks, room.index, room.queue, room.ref_cnt, room.fence)
        self.next_entry = next_entry
        self.first_unused = first_unused


class NamedLedger(WordLedger):
    """Reference counts, the free queue, and an exact index from (name, group) to the blocks that have it.

    The index holds an *entry* for each name of each block. Entry b is the first name of block b, so readers of the
    index see block b as cached when it has a name. Additional names of a block have entries from `capacity` on;
    `next_entry` links the entries of a block. Equal names of several blocks form a ring, and the oldest is found, as
    for equal blocks in a token index.
    """

    def __init__(self, num_blocks: int, hash_seed: int, max_events: int) -> None:
        super().__init__(num_blocks, 1, NAME_WORDS, hash_seed)
        #: The next entry of the same block, 0 after the last; of an unused entry, the next unused one.
        self.next_entry = zeros_i32(num_blocks)
        #: The block of an entry from `capacity` on: `owner_of[entry - capacity]`.
        self.owner_of = zeros_i32(0)
        self.num_more: i64 = 0
        self._first_unused: i64 = 0
        self.log: NameLog | None = None
        if max_events > 0:
            self.log = NameLog(max_events)

    @property
    def num_cached_blocks(self) -> int:
        """Count the blocks with a name, held or not. O(1)."""
        return int(self.index.num_indexed - self.num_more)

    # Looking up.

    def find(self, words: vec[i64], place: i64) -> i64:
        """Return the block that has had this name the longest, or 0. O(1) expected."""
        return self.block_of(self.entry_of(words, place))

    def find_all(self, words: vec[i64]) -> vec[i32]:
        """Return for each packed name the block that has had it the longest, or 0. O(names) expected.

        Consecutive names mostly belong to consecutive blocks, so after two such names the next block is compared first.
        """
        count = i64(len(words)) // NAME_WORDS
        found = zeros_i32(int(count))
        entry: i64 = 0
        step: i64 = 0
        for place in range(count):
            at = place * NAME_WORDS
            if (step == 1 or step == -1) and self._is_alone(entry + step, words, at):
                entry += step
            else:
                before = entry
                entry = self.entry_of(words, at)
                step = entry - before
            block = self.block_of(entry)
            found[place] = i32(block)
        return found

    def _is_alone(self, entry: i64, words: vec[i64], place: i64) -> bool:
        """Return whether this entry, and no other, has the name."""
        index = self.index
        if entry <= 0 or entry >= i64(len(index.chain_hash)) or index.identity[2 * entry + 1] != self._root:
            return False
        return index.is_cached(entry) and index.rings.is_alone(entry) and index.rows.equal(words, place, entry)

    def block_of(self, entry: i64) -> i64:
        """Return the block that an entry belongs to."""
        count = self.capacity
        return entry if entry < count else i64(self.owner_of[entry - count])

    def has(self, block: i64, words: vec[i64], place: i64) -> bool:
        """Return whether the block has exactly this name. O(names of the block)."""
        entry = block if self.index.is_cached(block) else 0
        while entry != 0:
            if self.index.rows.equal(words, place, entry):
                return True
            entry = i64(self.next_entry[entry])
        return False

    def names_of(self, block: i64) -> list[tuple[bytes, int]]:
        """Return the names of a block with their groups, oldest first."""
        found: list[tuple[bytes, int]] = []
        entry = block if self.index.is_cached(block) else 0
        while entry != 0:
            found.append(unpack_name(self.index.rows.words, self.index.rows.start_of(entry)))
            entry = i64(self.next_entry[entry])
        return found

    # The size.

    def make_room(self, num_blocks: i64, requested: i64 = 0) -> LedgerRoom | None:
        """Return larger arrays. The entries of additional names move, because they come after all blocks."""
        more = i64(len(self.owner_of))
        if num_blocks + more > MAX_BLOCKS:
            raise InvalidArgument(f"num_blocks is {num_blocks}; with {more} more names the limit is {MAX_BLOCKS}")
        room = super().make_room(num_blocks, requested)
        if room is None:
            return None
        step = num_blocks - self.capacity
        try:
            next_entry = grown_i32(self.next_entry, int(num_blocks + more))
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {num_blocks}; the system has no memory for its arrays", error)
        entry = self.capacity + more - 1
        while entry >= self.capacity:
            next_entry[entry + step] = next_entry[entry]
            entry -= 1
        for block in range(self.capacity, num_blocks):
            next_entry[block] = 0
        move_links_up(next_entry, self.capacity, step)
        return NamedRoom(room, next_entry, self._first_unused + step if self._first_unused != 0 else 0)

    def make_index_room(self, num_blocks: int) -> IndexRoom:
        """Return larger arrays for the index, with the entries of additional names after the blocks."""
        more = i64(len(self.owner_of))
        room = self.index.make_room_for(num_blocks + int(more))
        room.move_up(self.capacity, self.capacity + more, num_blocks - self.capacity)
        return room

    def resize(self, num_blocks: i64, room: LedgerRoom | None) -> Resize:
        if isinstance(room, NamedRoom):
            self.next_entry = room.next_entry
            self._first_unused = room.first_unused
        return super().resize(num_blocks, room)

    # Naming.

    def make_room_for_names(self, count: i64) -> None:
        """Make room for `count` additional names. All or nothing; amortised O(count)."""
        room = i64(len(self.owner_of))
        if self.num_more + count <= room:
            return
        blocks = self.capacity
        wanted = max(self.num_more + count, 2 * room, FEWEST_MORE)
        if blocks + wanted > MAX_BLOCKS:
            raise InvalidArgument(f"the pool has {blocks} blocks and {wanted} more names; the limit is {MAX_BLOCKS}")
        made = self.index.make_room_for(int(blocks + wanted))
        next_entry = grown_i32(self.next_entry, int(blocks + wanted))
        owners = grown_i32(self.owner_of, int(wanted))
        self.index.move_into(made)
        self.next_entry = next_entry
        self.owner_of = owners
        self._link_unused(blocks + room, blocks + wanted)

    def _link_unused(self, first: i64, last: i64) -> None:
        entry = last - 1
        while entry >= first:
            self.next_entry[entry] = i32(self._first_unused)
            self._first_unused = entry
            entry -= 1

    def name(self, block: i64, words: vec[i64], place: i64) -> None:
        """Give a block a name that it does not have; call `make_room_for_names` before. O(names of the block)."""
        entry = block
        is_first = not self.index.is_cached(block)
        if not is_first:
            entry = self._first_unused
            self._first_unused = i64(self.next_entry[entry])
            self.next_entry[self._last_entry(block)] = i32(entry)
            self.owner_of[entry - self.capacity] = i32(block)
            self.num_more += 1
        self.next_entry[entry] = 0
        self.index_entry(entry, words, place)
        if is_first and self.ref_cnt[block] == 0:
            # It keeps its position in the queue.
            self.queue.last_empty = NULL_BLOCK
            if self.stack.has_policy:
                # Blocks without a name must come before it.
                self.queue.remove(block)
                self.queue.append(block)
                self.stack.insert(block, self.index.chain_hash[block], 0)
        if self.log is not None:
            self.log.add(CAME, block, words, place)

    def _last_entry(self, block: i64) -> i64:
        entry = block
        while self.next_entry[entry] != 0:
            entry = i64(self.next_entry[entry])
        return entry

    def move_names(self, source: i64, target: i64) -> i64:
        """Move all names from `source` to `target`, which has none; return how many. It cannot fail."""
        names = self.names_as_words(source)
        self.uncache(source)
        for place in range(i64(len(names)) // NAME_WORDS):
            self.name(target, names, place * NAME_WORDS)
        return i64(len(names)) // NAME_WORDS

    def names_as_words(self, block: i64) -> vec[i64]:
        """Return the names of a cached block, five words each."""
        count: i64 = 1
        entry = i64(self.next_entry[block])
        while entry != 0:
            count += 1
            entry = i64(self.next_entry[entry])
        words = vec[i64]([0] * int(count * NAME_WORDS))
        entry = block
        for position in range(count):
            row = self.index.rows.start_of(entry)
            for word in range(NAME_WORDS):
                words[position * NAME_WORDS + word] = self.index.rows.words[row + word]
            entry = i64(self.next_entry[entry])
        return words

    def evict(self, block: i64) -> None:
        self._forget_more(block)
        super().evict(block)

    def uncache(self, block: i64, keeps_position: bool = False) -> None:
        """Remove all names of a cached block without an eviction. O(names).

        An idle block keeps its position in the queue. With a policy it moves to the head, where all blocks without a
        name must be, because the policy is called for each block that is missing there.
        """
        self._forget_more(block)
        super().uncache(block, keeps_position or not self.stack.has_policy)

    def share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Add a holder to each block.

        Free blocks without a name are only removed from the queue: no policy knows them.
        """
        if not self.stack.has_policy:
            super().share(blocks, start, count)
            return
        for position in range(start, start + count):
            block = i64(blocks[position])
            if self.ref_cnt[block] == 0 and not self.index.is_cached(block):
                self.queue.remove(block)
                self.ref_cnt[block] = 1
                self.num_allocated_blocks += 1
                self._note_peak()
                self.observer.on_share(blocks, position, 1)
            else:
                super().share(blocks, position, 1)

    def unshare(self, blocks: vec[i32], start: i64, count: i64) -> None:
        if not self.stack.has_policy:
            super().unshare(blocks, start, count)
            return
        position = start + count - 1
        while position >= start:
            block = i64(blocks[position])
            if self.ref_cnt[block] == 1 and not self.index.is_cached(block):
                self.ref_cnt[block] = 0
                self.num_allocated_blocks -= 1
                self.queue.put_back(block)
                self.observer.on_release(blocks, position, 1)
            else:
                super().unshare(blocks, position, 1)
            position -= 1

    def note_named_hits(self, blocks: vec[i32]) -> None:
        """Report a hit to the policy for each block that has a name."""
        if self.stack.has_policy:
            for position in range(i64(len(blocks))):
                if self.index.is_cached(i64(blocks[position])):
                    self.note_hit(i64(blocks[position]))

    def _forget_more(self, block: i64) -> None:
        self._log_removal(block, block)
        entry = i64(self.next_entry[block])
        self.next_entry[block] = 0
        while entry != 0:
            after = i64(self.next_entry[entry])
            self._log_removal(block, entry)
            self.index.remove(entry)
            self.next_entry[entry] = i32(self._first_unused)
            self._first_unused = entry
            self.num_more -= 1
            entry = after

    def _log_removal(self, block: i64, entry: i64) -> None:
        if self.log is not None:
            self.log.add(WENT, block, self.index.rows.words, self.index.rows.start_of(entry))

    def reset(self) -> None:
        super().reset()
        for block in range(self.capacity):
            self.next_entry[block] = 0
        self.num_more = 0
        self._first_unused = 0
        self._link_unused(self.capacity, self.capacity + i64(len(self.owner_of)))
        if self.log is not None:
            self.log.add(CLEARED, 0, self.index.rows.words, 0)

    def check(self) -> None:
        """Verify the ledger, and that every entry either belongs to one block or is unused. O(num_blocks + names)."""
        super().check()
        capacity = int(self.capacity)
        used = [0] * (capacity + len(self.owner_of))
        for block in range(1, capacity):
            if not self.index.is_cached(i64(block)) and self.next_entry[i64(block)] != 0:
                raise InvariantError(f"names: block {block} has a second name, but no first one")
            self._check_entries(block, used)
        num_more = sum(used[capacity:])
        if num_more != self.num_more:
            raise InvariantError(f"names: {num_more} names are additional ones, but num_more is {self.num_more}")
        entry = int(self._first_unused)
        while entry != 0:
            used[entry] += 1
            entry = int(self.next_entry[i64(entry)])
        if used[capacity:] != [1] * len(self.owner_of):
            raise InvariantError("names: an entry belongs to two blocks, or is neither used nor listed as unused")

    def _check_entries(self, block: int, used: list[int]) -> None:
        entry = int(self.next_entry[i64(block)])
        while entry != 0:
            used[entry] += 1
            if self.block_of(i64(entry)) != block or not self.index.is_cached(i64(entry)) or used[entry] > 1:
                raise InvariantError(f"names: entry {entry} of block {block} belongs to another block or has no name")
            entry = int(self.next_entry[i64(entry)])
