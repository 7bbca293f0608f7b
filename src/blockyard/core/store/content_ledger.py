"""Blocks known by the content that they hold, and for which layer group: a ledger, and what watches its evictions."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import MAX_GROUPS
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Prompt
from ..pool.observer import PoolObserver
from ..pool.word_ledger import WordLedger
from ..watch.misses import MissLog, stored_name
from .transfers import MOVE, Numbers, Transfers

#: A content id and a group number.
ENTRY_WORDS: Final[i64] = 2
_NOTHING: Final = zeros_i32(0)


class ContentLedger(WordLedger):
    """Blocks of keys and values below token blocks.

    With several layer groups, or a CPU pool, one content (the tokens of a token block after all before them) is stored
    in several places. The token blocks, a `BlockLedger` without keys and values, verify a prompt's tokens and give each
    its content id, which is never used twice. Here the words are (content id, group).
    """

    def __init__(self, num_blocks: int, hash_seed: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, tokens_per_block, ENTRY_WORDS, hash_seed)
        self._entry = zeros_i64(int(ENTRY_WORDS))
        #: What parts of a content are spelled in.
        self._spelled = Prompt(zeros_i64(0), 0, (), {})

    def find_content(self, content: i64, group: i64) -> i64:
        """The oldest block that holds `content` for `group`, or 0. O(1) expected."""
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
        """Fill `places` from `place` on, up (stride 1) or down (-1), with the oldest block that holds each content of
        `group`. Returns where one is missing; `end`, which is not looked at, where none is.

        The content of place p is that of the last of the `span` token blocks that it spans. Behind a block that was
        found its neighbour is compared first, up or down as the one before; hashed is what does not lie side by side.
        O(places) expected.
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
        """Index the first `count` of `blocks`, which are held and not indexed, as holding these contents for `group`.

        `contents` is written over. O(1) each expected, in passes whose iterations do not wait for one another.
        """
        words = self.index.rows.words
        root = self._root
        for place in range(count):
            row = self.index.rows.start_of(blocks[place])
            words[row] = contents[place]
            words[row + 1] = group
            contents[place] = -root
        self.index.insert_scattered(blocks, contents, count)

    def make_part_room(self, count: i64) -> None:
        """Let `find_parts` and `cache_parts` have room for `count` parts."""
        self._spelled = Prompt(zeros_i64(int(ENTRY_WORDS * count)), 0, (), {})
        self.index.make_room(count)

    def _spell(self, content: i64, group: i64, count: i64) -> Prompt:
        """Return a prompt whose blocks are the parts of a content: each stands behind the one before."""
        words = self._spelled.words
        for part in range(count):
            words[2 * part] = content
            words[2 * part + 1] = group + part
        return self._spelled

    def find_parts(self, content: i64, group: i64, count: i64) -> vec[i32]:
        """Return the blocks that hold a content in `count` parts, of groups `group`, `group + 1`, ..., as far as they
        are cached. O(parts found); only the first one, and what does not lie side by side, is hashed for."""
        if self.find_content(content, group) == NULL_BLOCK:
            return _NOTHING
        return self.index.find_under(self._root, self._spell(content, group, count), count)

    def cache_parts(self, blocks: vec[i32], start: i64, count: i64, content: i64, group: i64) -> None:
        """Index `blocks[start:start + count]`, which are held and not indexed, as these parts. O(parts)."""
        if count == 1:
            self.cache_content(i64(blocks[start]), content, group)
            return
        words = self._spell(content, group, count).words
        self.index.hash_run(words, 0, count, root_hash(self._root))
        self.index.insert_run(words, 0, count, blocks, start, self._root, NULL_BLOCK, 0)

    def cache_content(self, block: i64, content: i64, group: i64) -> None:
        """Index `block`, which is held and not indexed, as holding `content` for `group`. O(1) expected."""
        self._entry[0] = content
        self._entry[1] = group
        self.index_entry(block, self._entry, 0)

    def note_miss(self, content: i64, group: i64) -> None:
        """Tell a policy that wants to know it that a prompt asks for `content` of `group` and does not hit it. O(1)."""
        if self.stack is not None and self.stack.needs_paths:
            self._entry[0] = content
            self._entry[1] = group
            self.stack.miss(self.index.hash_words_at(self._entry, 0, self._root))

    def content_of(self, block: i64) -> i64:
        """The content that an indexed block holds."""
        return self.index.rows.words[self.index.rows.start_of(block)]

    def group_of(self, block: i64) -> i64:
        """The group that an indexed block holds its content for."""
        return self.index.rows.words[self.index.rows.start_of(block) + 1]

    def is_cached(self, block: i64) -> bool:
        """Whether the block is indexed."""
        return self.index.is_cached(block)


class CpuTier(PoolObserver):
    """Saves evicted blocks in the CPU pool, where swapped-out sequences live too and come first.

    The keys are the same content ids as in the pool, so a hit here is as exact as a hit there: salt, adapter, images
    and generation are part of it. Which block goes when the CPU pool is full is up to its own free queue.
    """

    def __init__(self, pool: ContentLedger, cpu: ContentLedger) -> None:
        self.pool = pool
        self.cpu = cpu
        #: Evicted blocks (block, CPU block, group) that no plan has saved yet, each with a CPU block of its own.
        self._saves = Numbers()
        self._saves.make_room(MOVE * cpu.num_blocks)

    def evicting(self, block: i64) -> None:
        """Keep what `block` holds, unless it is held twice or the CPU pool is full of sequences. O(1) expected."""
        content = self.pool.content_of(block)
        group = self.pool.group_of(block)
        if group >= MAX_GROUPS:
            # A part of a state: these are kept in the pool alone.
            return
        if not self.pool.index.rings.is_alone(block) or self.cpu.find_content(content, group) != 0:
            return
        if self.cpu.queue.num_free == 0:
            return
        target = self.cpu.acquire_one()
        self._saves.add_move(block, target, group)
        self.cpu.cache_content(target, content, group)

    def num_waiting(self) -> i64:
        """Count the saves that are in no plan yet."""
        return self._saves.count // MOVE

    def tell(self, transfers: Transfers) -> None:
        """Hand all saves to the plan being made. Until it is complete nothing may take their places."""
        if self._saves.count == 0:
            return
        transfers.make_room(self.num_waiting(), 0, self.num_waiting())
        saves = self._saves.items
        for place in range(0, self._saves.count, MOVE):
            transfers.swap_out(i64(saves[place]), i64(saves[place + 1]), i64(saves[place + 2]))
            transfers.hold(i64(saves[place + 1]))
        self._saves.clear()

    def waiting_blocks(self) -> list[int]:
        """CPU blocks held for saves that are in no plan yet."""
        waiting: list[int] = self._saves.array()[1::3].tolist()
        return waiting


class StoredMisses(PoolObserver):
    """Tells a `MissLog` what leaves a pool whose blocks are known by their content.

    The token blocks stay, so a prompt's tokens are found and its keys and values are not.
    """

    def __init__(self, log: MissLog, pool: ContentLedger) -> None:
        self.log = log
        self.pool = pool

    def evicting(self, block: i64) -> None:
        """Remember the content of `block`. O(1)."""
        self.log.remember(stored_name(self.pool.content_of(block)), NO_CONTENT)
