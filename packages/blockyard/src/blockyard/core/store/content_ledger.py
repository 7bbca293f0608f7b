"""A ledger of blocks that are cached under a content and a layer group, and observers of its evictions."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import MAX_GROUPS
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import grown_i64, zeros_i32, zeros_i64
from ..blocks.observer import PoolObserver
from ..blocks.word_ledger import WordLedger
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Prompt
from ..index.room import IndexRoom
from ..watch.misses import MissLog, stored_name
from .transfers import MOVE, Numbers, Transfers

#: A content id and a group number.
ENTRY_WORDS: Final[i64] = 2
#: The group of the first block of a checkpoint; the other parts follow.
FIRST_PART: Final[i64] = MAX_GROUPS
_NOTHING: Final = zeros_i32(0)


class ContentLedger(WordLedger):
    """The blocks that hold keys and values, or states, where token blocks do not.

    With several layer groups, or a CPU pool, one content (the tokens of a token block after all earlier ones) is stored
    in several blocks. Token blocks verify a prompt's tokens and give each content an id, which is never used twice. A
    block here is cached under (content id, group).
    """

    def __init__(self, num_blocks: int, hash_seed: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, tokens_per_block, ENTRY_WORDS, hash_seed)
        self._entry = zeros_i64(int(ENTRY_WORDS))
        #: The words of a checkpoint's parts, for lookups.
        self._spelled = Prompt(zeros_i64(0), 0, (), {})
        #: By first part, the number below 0 that the other parts are cached under; empty if that is the content.
        self._tails = zeros_i64(0)
        self._renames = False

    def find_content(self, content: i64, group: i64) -> i64:
        """Return the oldest block that holds `content` for `group`; 0 for none. O(1) expected."""
        self._entry[0] = content
        self._entry[1] = group
        return self.entry_of(self._entry, 0)

    def find_run(
        self,
        index: PrefixIndex,
        token_blocks: vec[i32],
        span: i64,
        group: i64,
        places: vec[i64],
        place: i64,
        end: i64,
        stride: i64,
    ) -> i64:
        """Find the oldest block of each content of a prompt. Returns the first place without one; `end` for none.

        After a block its neighbour is tried first, and hashed only if that is another content. O(places) expected.

        Args:
            index: index of the token blocks.
            token_blocks: token blocks of the prompt.
            span: token blocks of a place; the last one has its content.
            group: layer group.
            places: gets the block of each place.
            place: the first place.
            end: where to stop; not looked at.
            stride: 1 goes up, -1 down.
        """
        contents = index.identity
        identity = self.index.identity
        next_equal = self.index.rings.next_equal
        words = self.index.rows.words
        first_word = self.index.rows.first_word
        num_blocks = i64(len(next_equal))
        block: i64 = 0
        step = stride
        while place != end:
            content = contents[2 * i64(token_blocks[(place + 1) * span - 1])]
            other = block + step
            is_next = block != 0 and 0 < other < num_blocks and next_equal[other] == 0
            if is_next and identity[2 * other] != NO_CONTENT:
                at = first_word + other * ENTRY_WORDS
                is_next = words[at] == content and words[at + 1] == group
            else:
                is_next = False
            if not is_next:
                other = self.find_content(content, group)
                if other == 0:
                    return place
                step = -1 if other == block - 1 else (1 if other == block + 1 else stride)
            block = other
            places[place] = other
            place += stride
        return end

    def cache_run(self, blocks: vec[i64], contents: vec[i64], count: i64, group: i64) -> None:
        """Cache the first `count` of `blocks`, which are held and not cached, under these contents for `group`.

        `contents` is overwritten. O(1) each expected, in passes whose iterations are independent.
        """
        words = self.index.rows.words
        root = self._root
        for place in range(count):
            row = self.index.rows.start_of(blocks[place])
            words[row] = contents[place]
            words[row + 1] = group
            contents[place] = -root
        self.index.insert_scattered(blocks, contents, count)

    def make_part_room(self, count: i64, num_rows: i64, renames: bool) -> None:
        """Make room for the parts of a checkpoint (`find_parts`, `cache_parts`), and for `load_contents`.

        Args:
            count: parts of a checkpoint.
            num_rows: contents that `load_contents` gets at most.
            renames: whether all parts but the first are cached under a number of the checkpoint, so that they follow
                the first part when it is cached under another content. Otherwise each is cached under the content.
        """
        self._spelled = Prompt(zeros_i64(int(ENTRY_WORDS * count)), 0, (), {})
        self.index.make_room(max(count, num_rows))
        self._renames = renames
        self._tails = zeros_i64(self.num_blocks if renames and count > 1 else 0)

    def make_index_room(self, num_blocks: int) -> IndexRoom:
        """Make room for a larger index, and for the numbers of checkpoints."""
        if len(self._tails) > 0:
            self._tails = grown_i64(self._tails, num_blocks)
        return super().make_index_room(num_blocks)

    def _spell(self, number: i64, group: i64, count: i64) -> Prompt:
        """Return a prompt whose blocks are `count` parts from `group` on."""
        words = self._spelled.words
        for part in range(count):
            words[2 * part] = number
            words[2 * part + 1] = group + part
        return self._spelled

    def find_parts(self, content: i64, group: i64, count: i64) -> vec[i32]:
        """Return the blocks of a checkpoint's `count` parts, from `group` on, up to the first missing one. O(parts)."""
        block = self.find_content(content, group)
        if block == NULL_BLOCK:
            return _NOTHING
        rest = _NOTHING
        if count > 1:
            tail = content if len(self._tails) == 0 else self._tails[block]
            rest = self.index.find_under(self._root, self._spell(tail, group + 1, count - 1), count - 1)
        found = zeros_i32(1 + len(rest))
        found[0] = i32(block)
        for place in range(i64(len(rest))):
            found[place + 1] = rest[place]
        return found

    def cache_parts(self, blocks: vec[i32], start: i64, count: i64, content: i64, group: i64) -> None:
        """Cache `blocks[start:start + count]`, which are held and not cached, as a checkpoint. O(parts)."""
        self.cache_first_part(i64(blocks[start]), content, group)
        tail = content
        if len(self._tails) > 0:
            tail = -self.index.new_content()
            self._tails[i64(blocks[start])] = tail
        if count > 1:
            words = self._spell(tail, group + 1, count - 1).words
            self.index.hash_run(words, 0, count - 1, root_hash(self._root))
            self.index.insert_run(words, 0, count - 1, blocks, start + 1, self._root, NULL_BLOCK, 0)

    def cache_first_part(self, block: i64, content: i64, group: i64) -> None:
        """Cache a block, which is held and not cached, as the first part of a checkpoint. O(1) expected.

        The other parts that it had still follow it. An incomplete checkpoint of this content is uncached.
        """
        other = self.find_content(content, group)
        if other != NULL_BLOCK:
            self.uncache(other)
        self.cache_content(block, content, group)

    def load_contents(self, contents: vec[i64], count: i64, group: i64) -> i64:
        """Load the table entries of contents into the CPU cache, before `find_content` needs them.

        The returned sum means nothing: it keeps the compiler from dropping the reads.
        """
        place = count - 1
        while place >= 0:
            self._entry[0] = contents[place]
            self._entry[1] = group
            # It writes what it returns to the first place.
            self.index.hashes[place] = self.index.hash_words_at(self._entry, 0, self._root)
            place -= 1
        return self.index.load_homes(0, count)

    def hold_state(self, blocks: vec[i32], start: i64, count: i64, record: i64) -> bool:
        """Hold `blocks[start:start + count]`, the latest checkpoint of an output, and uncache its first part only.

        If it returns False, nothing has changed: the blocks must be idle, and one after another in the queue. O(parts).

        Args:
            blocks: block ids.
            start: index of the first one.
            count: how many count.
            record: number of the checkpoint's record in `SaveRecords`.
        """
        last = start + count - 1
        next_free = self.queue.next_free
        for place in range(start, last):
            if next_free[i64(blocks[place])] != blocks[place + 1]:
                return False
        if not self._renames or self.is_watched or not self._move_state(blocks, start, count, record, False):
            return False
        self.queue.remove_chain(blocks[start], blocks[last], count)
        self.num_allocated_blocks += count
        self._note_peak()
        self.index.remove(i64(blocks[start]))
        self.num_losses += 1
        return True

    def release_state(self, row: i64, blocks: vec[i32], start: i64, count: i64, record: i64) -> None:
        """Release a checkpoint that `hold_state` held, in order, after its first part was cached anew."""
        is_held_on = self.num_retiring > 0 or self.fence.is_open(row)
        if is_held_on or not self._move_state(blocks, start, count, record, True):
            self.release_row_blocks_in_order(row, blocks, start, count)
            return
        self.queue.append_chain(blocks[start], blocks[start + count - 1], count)
        self.num_freed_blocks += count

    def _move_state(self, blocks: vec[i32], start: i64, count: i64, record: i64, is_idle: bool) -> bool:
        key = self.index.chain_hash[i64(blocks[start])]
        return self.stack.move_state(blocks, start, count, record, is_idle, key, self.ref_cnt)

    def cache_content(self, block: i64, content: i64, group: i64) -> None:
        """Cache `block`, which is held and not cached, under `content` for `group`. O(1) expected."""
        self._entry[0] = content
        self._entry[1] = group
        self.index_entry(block, self._entry, 0)

    def content_of(self, block: i64) -> i64:
        """Return the content of a cached block."""
        return self.index.rows.words[self.index.rows.start_of(block)]

    def group_of(self, block: i64) -> i64:
        """Return the group of a cached block."""
        return self.index.rows.words[self.index.rows.start_of(block) + 1]

    def is_cached(self, block: i64) -> bool:
        """Return whether the block is cached."""
        return self.index.is_cached(block)


class CpuTier(PoolObserver):
    """Saves evicted blocks in the CPU pool, as far as swapped-out sequences leave room there.

    Blocks have the same content ids as in the pool, so a hit is as exact: salt, adapter, images and generation are part
    of it. The CPU pool evicts by its own free queue.
    """

    def __init__(self, pool: ContentLedger, cpu: ContentLedger) -> None:
        self.pool = pool
        self.cpu = cpu
        #: (block, CPU block, group) of each evicted block that no plan has saved yet.
        self._saves = Numbers()
        self._saves.make_room(MOVE * cpu.num_blocks)

    def on_evict(self, block: i64) -> None:
        """Save `block`, unless another block has its content, or the CPU pool is full of sequences. O(1) expected."""
        content = self.pool.content_of(block)
        group = self.pool.group_of(block)
        if group >= FIRST_PART:
            # Checkpoints stay in the pool.
            return
        if not self.pool.index.rings.is_alone(block) or self.cpu.find_content(content, group) != 0:
            return
        if self.cpu.queue.num_free == 0:
            return
        target = self.cpu.acquire_one()
        self._saves.add_move(block, target, group)
        self.cpu.cache_content(target, content, group)

    def num_waiting(self) -> i64:
        """Return the number of saves that are in no plan yet."""
        return self._saves.count // MOVE

    def tell(self, transfers: Transfers) -> None:
        """Add all saves to the plan, which holds their CPU blocks until it is complete."""
        if self._saves.count == 0:
            return
        transfers.make_room(self.num_waiting(), 0, self.num_waiting())
        saves = self._saves.items
        for place in range(0, self._saves.count, MOVE):
            transfers.swap_out(i64(saves[place]), i64(saves[place + 1]), i64(saves[place + 2]))
            transfers.hold(i64(saves[place + 1]))
        self._saves.clear()

    def waiting_blocks(self) -> list[int]:
        """Return the CPU blocks of saves that are in no plan yet."""
        waiting: list[int] = self._saves.array()[1::3].tolist()
        return waiting


class StoredMisses(PoolObserver):
    """Reports evicted contents to a `MissLog`: their token blocks stay, so lookups find the tokens only."""

    def __init__(self, log: MissLog, pool: ContentLedger) -> None:
        self.log = log
        self.pool = pool

    def on_evict(self, block: i64) -> None:
        self.log.remember(stored_name(self.pool.content_of(block)), NO_CONTENT)
