"""The exact prefix index: from the tokens of a prompt to the blocks that hold their keys and values."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import (
    clear_i32,
    clear_i64,
    zeros_i32,
    zeros_i64,
)
from ..tokens import words_per_block
from .content_log import ContentLog
from .continuations import Continuations
from .hashing import WORDS_OF_16_TOKENS, hash_keys, hash_rows, root_hash
from .observer import IndexObserver
from .prefetch import load_parents, load_slots
from .prompt import Prompt
from .room import ID_BITS, ID_MASK, ID_SPAN, TAG_BITS, IndexRoom, bits_for
from .roots import Roots
from .rows import FOLLOWS, Rings, TokenRows

#: Blocks per tile: enough for memory loads to overlap, few enough to stay in the first-level cache.
TILE_BLOCKS: Final[i64] = 64
#: Length of a run of neighbours from which a single probe for the next run is cheaper than a tile.
LONG_RUN: Final[i64] = 16
#: Blocks per tile if neighbours are expected after them.
FIRST_TILE: Final[i64] = 4
#: A tile ends after this many blocks that the table does not know: they are following blocks, or missing.
MOST_UNKNOWN: Final[i64] = 16
#: identity 16, chain hash 8, owner 4, ring 8, two slots of 8; in the ledger ref_cnt 4 and the free queue's links 8.
BYTES_A_BLOCK: Final = 64


class PrefixIndex:
    """An open-addressing table (linear probing, load at most one half) of full blocks, verified by content.

    The chained hash of a prompt's blocks finds candidates. A candidate is verified by its tokens (`rows`), by its
    parent, which must be the content found for the block before, and by the root at the start of the chain (`roots`).

    A content id is the value of a counter, given to each distinct content under a distinct prefix and never reused;
    equal blocks share it. It is neither a block id (reused) nor a hash (may collide), so no collision, accidental or
    crafted, makes one prompt hit another's blocks. A root represents extra keys (LoRA, cache salt) and a generation.
    Without the roots, as after `clear`, no old block is reachable.

    Each content is represented by the oldest block that has it. Blocks of a prompt are allocated together, so they are
    mostly neighbours by id: a block next to its parent's needs no slot, hash or search. Its link in `rings` tells how a
    block is found:

    state      next_equal   found by
    listed     0 or a link  its slot: the hash of all tokens up to it
    following  FOLLOWS      the block that represents its parent, a neighbour; not at all once that is removed
    duplicate  a link       the listed block that represents its content

    A block is following if its parent was new when it was published, so that no equal block could exist. It becomes
    listed when it gets a duplicate, when another block comes to represent its parent, or when a lease remembers it or
    its parent only by hash (`remember`). If its parent is removed nothing is done, because that content id is never
    used again.

    Lookups run in short passes over a tile of blocks (hash, probe, load, verify). The iterations of a pass are
    independent, so the processor overlaps their cache misses.

    Only this class writes `identity`, `chain_hash`, the rings and the slots; `joins` changes owners, and the calls
    write the tokens of blocks that are not indexed.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_seed: int) -> None:
        self.rows = TokenRows(num_blocks, block_size)
        self._make_table(2 * num_blocks)
        #: identity[2b] is block b's content, 0 if it is not indexed; identity[2b + 1] is its parent's content.
        self.identity = zeros_i64(2 * num_blocks)
        self.chain_hash = zeros_i64(num_blocks)
        #: 1 + the row of the sequence that still has to compute the block; 0 if it is computed.
        self.owner = zeros_i32(num_blocks)
        self.rings = Rings(num_blocks)
        self.num_indexed: i64 = 0
        #: Number of indexed blocks that are not computed yet.
        self.num_pending: i64 = 0
        self._one_hash = zeros_i64(1)
        self._keys = hash_keys(hash_seed, words_per_block(block_size))
        self._last_content: i64 = NO_CONTENT
        self.num_generations: i64 = 0
        #: Incremented whenever the result of a lookup may change.
        self.version: i64 = 0
        self.roots = Roots(num_blocks + 1)
        self.hashes = zeros_i64(int(TILE_BLOCKS))
        #: Buffer for the block ids that a lookup finds.
        self._found = zeros_i32(int(TILE_BLOCKS))
        #: Blocks by parent and first token, for hits that end inside a block; None if partial hits are off.
        self.continuations: Continuations | None = None
        #: Added and removed contents, for KV events; None if they are off.
        self.log: ContentLog | None = None
        #: The index of waiting requests; None if nobody asked for it.
        self.observer: IndexObserver | None = None

    def _make_table(self, min_slots: int) -> None:
        bits = bits_for(min_slots)
        self._slots = zeros_i64(2**bits)
        self._slot_mask: i64 = 2**bits - 1
        self._home_shift: i64 = TAG_BITS - bits

    def is_cached(self, block: i64) -> bool:
        """Return whether a prompt can hit the block."""
        return self.identity[2 * block] != NO_CONTENT

    def content_of(self, block: i64) -> i64:
        """Return the content id of a block, shared by equal blocks under equal prefixes; 0 if it is not cached."""
        return self.identity[2 * block]

    def parent_of(self, block: i64) -> i64:
        """Return the content id of the block before a cached block; for a first block, its root."""
        return self.identity[2 * block + 1]

    def known_root(self, extra_keys: tuple[object, ...]) -> i64:
        """Return the root of these extra keys, 0 if nothing was indexed under them. Does not mark it as used."""
        return self.roots.find(extra_keys)

    def root(self, extra_keys: tuple[object, ...]) -> i64:
        """Return the root of prompts with these extra keys, creating it if needed. O(1).

        As many roots are remembered as the pool has blocks; the least recently used is forgotten first.
        """
        found = self.roots.touch(extra_keys)
        if found == NO_CONTENT:
            found = self.new_content()
            forgotten = self.roots.remember(extra_keys, found)
            if self.log is not None:
                self.log.log_root(found, extra_keys)
                if forgotten != NO_CONTENT:
                    self.log.log_lost_root(forgotten)
            if self.observer is not None:
                self.observer.root_made(found, extra_keys)
                if forgotten != NO_CONTENT:
                    self.observer.root_lost(forgotten)
        return found

    def ensure_root(self, extra_keys: tuple[object, ...], known: i64) -> i64:
        """Return the root of these extra keys, created if needed. `known` is the result of `known_root`.

        If `known` is the latest root, nothing is looked up.
        """
        if known != NO_CONTENT and known == self.roots.latest_content:
            return known
        return self.root(extra_keys)

    def new_content(self) -> i64:
        """Return an unused content id."""
        self._last_content += 1
        return self._last_content

    def find_prompt(self, prompt: Prompt, max_blocks: i64) -> vec[i32]:
        """Return the ids of the leading indexed blocks of a prompt, at most `max_blocks`. O(blocks found)."""
        return self.find_under(self.known_root(prompt.keys), prompt, max_blocks)

    def find_under(self, root: i64, prompt: Prompt, max_blocks: i64) -> vec[i32]:
        """Return the ids of the leading indexed blocks of a prompt whose root is known (0 for none).

        O(blocks found).
        """
        # First, because it may replace `_found` by a longer array.
        reached = self._reach(root, prompt, max_blocks)
        return self._found[:reached]

    def _reach(self, root: i64, prompt: Prompt, max_blocks: i64) -> i64:
        """Return how many leading blocks of a prompt are indexed; their ids are in `_found`.

        At each block with spans the chain of hashes and identities restarts at a root made of the spans and all before
        them.
        """
        first: i64 = 0
        for position in prompt.span_blocks:
            if root == NO_CONTENT or position >= max_blocks:
                break
            reached = self._find_run(prompt.words, first, position, root)
            if reached < position:
                return reached
            parent = self.content_of(i64(self._found[position - 1])) if position > 0 else root
            root = self.known_root((int(parent), prompt.spans[position]))
            first = position
        return first if root == NO_CONTENT else self._find_run(prompt.words, first, max_blocks, root)

    def _find_run(self, words: vec[i64], first: i64, max_blocks: i64, root: i64) -> i64:
        """Look up the blocks from `first`, which follows `root`, and return the first one that is not indexed.

        The ids of the indexed ones are in `_found`. O(blocks found). After each verified block its neighbours by id are
        tried first (`_follow`). If they do not match, a tile of blocks is hashed and probed. Tiles double up to
        `TILE_BLOCKS` and restart after a long run of neighbours, because for short runs overlapping loads are faster
        than following. Blocks of a tile that the table does not have are assumed to be following blocks (`_guess`), so
        that runs of two need no dependent loads either.
        """
        self.make_room(max_blocks)
        found = self._found
        identity = self.identity
        chain = root_hash(root)
        parent = root
        begin = first
        tile = FIRST_TILE
        while first < max_blocks:
            reached = self._follow(words, first, max_blocks, parent) if first > begin else first
            if reached > first:
                if reached - first >= LONG_RUN:
                    tile = FIRST_TILE
                first = reached
                parent = identity[2 * i64(found[first - 1])]
                chain = self.chain_hash[i64(found[first - 1])]
                continue
            hashed = min(first + tile, max_blocks)
            hash_rows(words, 0, self._keys, chain, self.hashes, first, hashed)
            last = self._probe(first, hashed)
            tile = min(2 * tile, TILE_BLOCKS) if last == hashed else FIRST_TILE
            before = i64(found[first - 1]) if first > begin else NULL_BLOCK
            self._guess(first, last, before)
            reached = self.verify(found, words, first, last, parent)
            if reached < last:
                before = i64(found[reached - 1]) if reached > begin else NULL_BLOCK
                if not self._resolve(words, reached, before, root):
                    return reached
                reached += 1
            first = reached
            parent = identity[2 * i64(found[first - 1])]
            chain = self.hashes[first - 1]
        return max_blocks

    def _follow(self, words: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """Return the end of the run of blocks from `first` whose ids are neighbours of each other, up or down.

        O(words). Each block is verified like any candidate, but nothing is hashed. The run ends at a block with
        duplicates, because only the table knows the oldest one.
        """
        found = self._found
        identity = self.identity
        next_equal = self.rings.next_equal
        stored = self.rows.words
        num_words = self.rows.num_words
        num_blocks = i64(len(self.chain_hash))
        before = i64(found[first - 1])
        step: i64 = 1
        if before + 1 >= num_blocks or identity[2 * before + 3] != parent:
            step = -1
        block = before + step
        if identity[2 * block + 1] != parent:
            return first
        row = self.rows.first_word + block * num_words
        at = first * num_words
        for position in range(first, last):
            if block <= 0 or block >= num_blocks or next_equal[block] > 0:
                return position
            difference = identity[2 * block + 1] ^ parent
            if num_words == WORDS_OF_16_TOKENS:
                difference |= (stored[row] ^ words[at]) | (stored[row + 1] ^ words[at + 1])
                difference |= (stored[row + 2] ^ words[at + 2]) | (stored[row + 3] ^ words[at + 3])
                difference |= (stored[row + 4] ^ words[at + 4]) | (stored[row + 5] ^ words[at + 5])
                difference |= (stored[row + 6] ^ words[at + 6]) | (stored[row + 7] ^ words[at + 7])
            else:
                for word in range(num_words):
                    difference |= stored[row + word] ^ words[at + word]
            parent = identity[2 * block]
            if difference != 0 or parent == NO_CONTENT:
                return position
            found[position] = i32(block)
            block += step
            row += step * num_words
            at += num_words
        return last

    def make_room(self, num_blocks: i64) -> None:
        """Make `hashes` and `_found` large enough for a prompt of `num_blocks` blocks, keeping their contents."""
        if num_blocks > len(self.hashes):
            hashes = zeros_i64(int(2 * num_blocks))
            found = zeros_i32(int(2 * num_blocks))
            for position in range(i64(len(self.hashes))):
                hashes[position] = self.hashes[position]
                found[position] = self._found[position]
            self.hashes = hashes
            self._found = found

    def _probe(self, first: i64, last: i64) -> i64:
        """Fill `_found` with the first block with each hash's tag, 0 for none; return where it stops.

        It stops at `last`, or after `MOST_UNKNOWN` consecutive hashes without a block.
        """
        hashes = self.hashes
        found = self._found
        slots = self._slots
        mask = self._slot_mask
        shift = self._home_shift
        num_unknown: i64 = 0
        for index in range(first, last):
            tag = hashes[index] >> ID_BITS
            position = tag >> shift
            slot = slots[position]
            while slot != 0 and slot >> ID_BITS != tag:
                position = (position + 1) & mask
                slot = slots[position]
            found[index] = i32(slot & ID_MASK)
            if slot != 0:
                num_unknown = 0
            else:
                num_unknown += 1
                if num_unknown == MOST_UNKNOWN:
                    return index + 1
        return last

    def _guess(self, first: i64, last: i64, before: i64) -> i64:
        """Fill the gaps in `_found` with neighbours that continue the block before them, or 0.

        `before` is the block before the first, 0 for none. This also prefetches everything that verifying reads. The
        returned sum only keeps the compiler from dropping those reads.
        """
        found = self._found
        words = self.rows.words
        identity = self.identity
        start = self.rows.first_word
        num_words = self.rows.num_words
        num_blocks = i64(len(self.chain_hash))
        total: i64 = 0
        for index in range(first, last):
            block = i64(found[index])
            if block == 0 and before != 0:
                content = identity[2 * before]
                block = before + 1
                if block == num_blocks or identity[2 * block + 1] != content or identity[2 * block] == NO_CONTENT:
                    block = before - 1
                    if identity[2 * block + 1] != content or identity[2 * block] == NO_CONTENT:
                        block = 0
                found[index] = i32(block)
            total ^= words[start + block * num_words] ^ identity[2 * block]
            before = block
        return total

    def _follower(self, before: i64) -> i64:
        """Return the block that follows `before` in the index without a slot, 0 for none. There is at most one."""
        content = self.identity[2 * before]
        if self._follows(before + 1, content):
            return before + 1
        return before - 1 if self._follows(before - 1, content) else 0

    def verify(self, found: vec[i32], prompt: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """Return the first position in `found[first:last]` whose block differs from the prompt in tokens or parent.

        O(words).
        """
        words = self.rows.words
        identity = self.identity
        num_words = self.rows.num_words
        start = self.rows.first_word
        if num_words == WORDS_OF_16_TOKENS:
            return self._verify_16(found, prompt, first, last, parent)
        position = first * num_words
        for index in range(first, last):
            block = i64(found[index])
            stored = start + block * num_words
            difference = identity[2 * block + 1] ^ parent
            for word in range(num_words):
                difference |= words[stored + word] ^ prompt[position + word]
            if difference != 0:
                return index
            parent = identity[2 * block]
            position += num_words
        return last

    def _verify_16(self, found: vec[i32], prompt: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """Verify blocks of 16 tokens, unrolled."""
        words = self.rows.words
        identity = self.identity
        start = self.rows.first_word
        at = first * WORDS_OF_16_TOKENS
        for index in range(first, last):
            block = i64(found[index])
            row = start + block * WORDS_OF_16_TOKENS
            difference = identity[2 * block + 1] ^ parent
            difference |= (words[row] ^ prompt[at]) | (words[row + 1] ^ prompt[at + 1])
            difference |= (words[row + 2] ^ prompt[at + 2]) | (words[row + 3] ^ prompt[at + 3])
            difference |= (words[row + 4] ^ prompt[at + 4]) | (words[row + 5] ^ prompt[at + 5])
            difference |= (words[row + 6] ^ prompt[at + 6]) | (words[row + 7] ^ prompt[at + 7])
            if difference != 0:
                return index
            parent = identity[2 * block]
            at += WORDS_OF_16_TOKENS
        return last

    def _resolve(self, prompt: vec[i64], index: i64, before: i64, root: i64) -> bool:
        """Replace a false candidate for block `index`, which only has the same tag.

        Return False if no block matches.
        """
        if self._found[index] == 0:
            return False
        position = index * self.rows.num_words
        parent = self.identity[2 * before] if before != 0 else root
        block = self.find(prompt, position, self.hashes[index], parent)
        if block == 0:
            block = self.equal_follower(prompt, position, before)
        self._found[index] = i32(block)
        return block != 0

    def find(self, words: vec[i64], position: i64, chain_hash: i64, parent: i64) -> i64:
        """Return the listed block with these words under this parent content, or 0. O(1) expected."""
        tag = chain_hash >> ID_BITS
        slot_position = tag >> self._home_shift
        slot = self._slots[slot_position]
        while slot != 0:
            if slot >> ID_BITS == tag and self._equal(words, position, slot & ID_MASK, parent):
                return slot & ID_MASK
            slot_position = (slot_position + 1) & self._slot_mask
            slot = self._slots[slot_position]
        return 0

    def _equal(self, words: vec[i64], position: i64, block: i64, parent: i64) -> bool:
        return self.identity[2 * block + 1] == parent and self.rows.equal(words, position, block)

    def hash_run(self, words: vec[i64], first: i64, last: i64, chain: i64) -> None:
        """Fill `hashes` for blocks `first` to `last` of a packed prompt. `chain` is the hash before them."""
        self.make_room(last)
        hash_rows(words, 0, self._keys, chain, self.hashes, first, last)

    def hash_alone(self, words: vec[i64]) -> i64:
        """Return a hash of one block's words, independent of its prefix."""
        return hash_rows(words, 0, self._keys, 0, zeros_i64(1), 0, 1)

    def hash_words_at(self, words: vec[i64], place: i64, root: i64) -> i64:
        """Return the chained hash of the block whose words begin at `place`, as the first block after a root."""
        return hash_rows(words, place, self._keys, root_hash(root), self.hashes, 0, 1)

    def hash_block(self, block: i64, before: i64, root: i64) -> i64:
        """Return the chained hash of the tokens of `block`, after the indexed block `before` (0: after the root)."""
        chain = root_hash(root) if before == 0 else self.chain_hash[before]
        return hash_rows(self.rows.words, self.rows.start_of(block), self._keys, chain, self.hashes, 0, 1)

    def insert_run(
        self,
        words: vec[i64],
        first: i64,
        last: i64,
        blocks: vec[i32],
        start: i64,
        parent: i64,
        before: i64,
        owner: i64,
    ) -> None:
        """Store blocks `first` to `last` of a packed prompt in `blocks[start + first:]` and index them. O(words).

        `before` is the block that represents `parent` (`representative`), 0 for a root. Fill `hashes` first
        (`hash_run`). The work is done in three short passes, like a lookup.
        """
        self.rows.store(words, first, last, blocks, start)
        load_slots(self.hashes, self._slots, self._home_shift, blocks, start, first, last)
        self._link_run(blocks, start, first, last, parent, before, owner)
        self.num_indexed += last - first
        self.version += 1
        if self.continuations is not None:
            for position in range(start + first, start + last):
                block = i64(blocks[position])
                first_word = self.rows.words[self.rows.start_of(block)]
                self.continuations.add(block, self.identity[2 * block + 1], first_word)
        if owner != 0:
            self.num_pending += last - first
        elif self.log is not None:
            for position in range(start + first, start + last):
                self.log.log_computed(i64(blocks[position]), self.rings)
        if self.observer is not None:
            self.observer.indexed(blocks, start + first, start + last)

    def _link_run(
        self, blocks: vec[i32], start: i64, first: i64, last: i64, parent: i64, before: i64, owner: i64
    ) -> None:
        """Give content ids to a chain of blocks whose tokens are stored and whose hashes are in `hashes`.

        After the first new content, all others are new too: nothing is searched, and a neighbour needs no slot.
        """
        hashes = self.hashes
        slots = self._slots
        mask = self._slot_mask
        shift = self._home_shift
        identity = self.identity
        chain_hash = self.chain_hash
        next_equal = self.rings.next_equal
        owners = self.owner
        is_new = False
        for position in range(first, last):
            block = i64(blocks[start + position])
            chain_hash[block] = hashes[position]
            owners[block] = i32(owner)
            identity[2 * block + 1] = parent
            if is_new:
                if block - before == 1 or before - block == 1:
                    next_equal[block] = FOLLOWS
                else:
                    tag = hashes[position] >> ID_BITS
                    index = tag >> shift
                    while slots[index] != 0:
                        index = (index + 1) & mask
                    slots[index] = tag * ID_SPAN + block
                self._last_content += 1
                identity[2 * block] = self._last_content
                before = block
            else:
                before = self._place(block, hashes[position], parent, before)
                is_new = before == block
            parent = identity[2 * block]

    def _place(self, block: i64, chain_hash: i64, parent: i64, before: i64) -> i64:
        """Give a block the content id of an equal block, or a new one. Return the block that represents the content.

        O(1) expected. If the equal block followed `before` without a slot, it gets one, because it has a duplicate now.
        """
        slots = self._slots
        tag = chain_hash >> ID_BITS
        position = tag >> self._home_shift
        slot = slots[position]
        row = self.rows.start_of(block)
        while slot != 0 and (slot >> ID_BITS != tag or not self._equal(self.rows.words, row, slot & ID_MASK, parent)):
            position = (position + 1) & self._slot_mask
            slot = slots[position]
        equal = slot & ID_MASK
        if slot == 0:
            equal = self.equal_follower(self.rows.words, row, before)
            slots[position] = tag * ID_SPAN + (block if equal == 0 else equal)
        if equal == 0:
            self.identity[2 * block] = self.new_content()
            return block
        self.identity[2 * block] = self.identity[2 * equal]
        self.rings.join(equal, block)
        return equal

    def equal_follower(self, words: vec[i64], position: i64, before: i64) -> i64:
        """Return the block that follows `before` without a slot if it has these words, else 0.

        `before` is 0 after a root.
        """
        follower = self._follower(before) if before != 0 else NULL_BLOCK
        return follower if follower != 0 and self.rows.equal(words, position, follower) else 0

    def _follows(self, block: i64, parent: i64) -> bool:
        """Return whether `block` follows the block that represents `parent`, given that they are neighbours."""
        if block >= i64(len(self.chain_hash)) or self.identity[2 * block + 1] != parent:
            return False
        return self.rings.follows(block)

    def representative(self, content: i64, chain_hash: i64, block: i64) -> i64:
        """Return the block that a lookup finds for a content; 0 if no block has the content. O(1) expected.

        `block` is a block that may have the content, or 0; the chained hash finds the oldest of equal blocks.
        """
        if block != 0 and self.rings.is_alone(block) and self.identity[2 * block] == content:
            return block
        tag = chain_hash >> ID_BITS
        position = tag >> self._home_shift
        slot = self._slots[position]
        while slot != 0:
            if slot >> ID_BITS == tag and self.identity[2 * (slot & ID_MASK)] == content:
                return slot & ID_MASK
            position = (position + 1) & self._slot_mask
            slot = self._slots[position]
        return 0

    def give_slot(self, block: i64) -> None:
        """Give an indexed block a slot, so that it stays reachable if its parent is removed. O(1) expected."""
        if not self.rings.follows(block):
            return
        self.rings.next_equal[block] = 0
        tag = self.chain_hash[block] >> ID_BITS
        position = tag >> self._home_shift
        while self._slots[position] != 0:
            position = (position + 1) & self._slot_mask
        self._slots[position] = tag * ID_SPAN + block

    def remember(self, block: i64) -> None:
        """Give an indexed block and its follower a slot each. O(1) expected.

        A lease may cache further blocks after its content, which it knows only by id and hash, even when no block has
        it.
        """
        self.give_slot(block)
        standing = self.representative(self.identity[2 * block], self.chain_hash[block], block)
        follower = self._follower(standing) if standing != 0 else NULL_BLOCK
        if follower != 0:
            self.give_slot(follower)

    def insert(self, block: i64, chain_hash: i64, parent: i64, before: i64) -> None:
        """Index a computed block whose tokens are stored. O(1) expected.

        `before` is the block that represents `parent` (`representative`), 0 if that is a root.
        """
        self._place(block, chain_hash, parent, before)
        self.identity[2 * block + 1] = parent
        self.chain_hash[block] = chain_hash
        self.owner[block] = 0
        self.num_indexed += 1
        self.version += 1
        if self.continuations is not None:
            self.continuations.add(block, parent, self.rows.words[self.rows.start_of(block)])
        if self.log is not None:
            self.log.log_computed(block, self.rings)
        if self.observer is not None:
            self.observer.indexed_one(block)

    def insert_scattered(self, blocks: vec[i64], parents: vec[i64], count: i64) -> None:
        """Index `count` computed blocks of different chains, whose tokens are stored. O(words) each.

        `parents` has the indexed block before each, or minus the root for a first block. The work is done in short
        passes, like a lookup.
        """
        self.make_room(count)
        load_parents(self.hashes, self.chain_hash, self.identity, self.rings.next_equal, parents, count)
        hashes = self.hashes
        for position in range(count):
            row = self.rows.start_of(blocks[position])
            hashes[position] = hash_rows(self.rows.words, row, self._keys, hashes[position], self._one_hash, 0, 1)
        self.load_homes(0, count)
        for position in range(count):
            before = parents[position]
            parent = -before
            if before > 0:
                parent = self.identity[2 * before]
                before = self._followed(before)
            self.insert(blocks[position], hashes[position], parent, max(before, 0))

    def _followed(self, before: i64) -> i64:
        """Return the block that represents the content of `before`, 0 if no block may follow it without a slot."""
        identity = self.identity
        content = identity[2 * before]
        if not self.rings.is_alone(before):
            return self.representative(content, self.chain_hash[before], before)
        if identity[2 * before - 1] == content:
            return before
        return before if 2 * before + 3 < i64(len(identity)) and identity[2 * before + 3] == content else 0

    def load_homes(self, first: i64, last: i64) -> i64:
        """Prefetch the home slots of these `hashes`. The returned sum only keeps the reads."""
        hashes = self.hashes
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        for position in range(first, last):
            total ^= slots[(hashes[position] >> ID_BITS) >> shift]
        return total

    def set_computed(self, blocks: vec[i32], start: i64, count: i64, owner: i64) -> None:
        """Mark those of `blocks[start:start + count]` that `owner` had to compute as computed."""
        owners = self.owner
        num_computed: i64 = 0
        for position in range(start, start + count):
            block = i64(blocks[position])
            if i64(owners[block]) == owner:
                owners[block] = 0
                num_computed += 1
                if self.log is not None:
                    self.log.log_computed(block, self.rings)
                if self.observer is not None:
                    self.observer.changed(block)
        self.num_pending -= num_computed
        self.version += num_computed

    def load_run(self, blocks: vec[i32], start: i64, count: i64) -> i64:
        """Prefetch the memory that `remove` reads of each block. The returned sum only keeps the reads."""
        chain_hash = self.chain_hash
        next_equal = self.rings.next_equal
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        for position in range(start, start + count):
            block = i64(blocks[position])
            if next_equal[block] >= 0:
                total ^= slots[(chain_hash[block] >> ID_BITS) >> shift]
        return total

    def remove_run(self, blocks: vec[i32], start: i64, count: i64) -> i64:
        """Remove the indexed ones of `blocks[start:start + count]`, all computed. Return their number.

        O(count) expected. Most have no slot, and then nothing else refers to them.
        """
        identity = self.identity
        next_equal = self.rings.next_equal
        is_told = self.continuations is not None or self.log is not None
        num_removed: i64 = 0
        num_following: i64 = 0
        for position in range(start, start + count):
            block = i64(blocks[position])
            if identity[2 * block] == NO_CONTENT:
                continue
            num_removed += 1
            if is_told or next_equal[block] >= 0:
                self.remove(block)
            else:
                next_equal[block] = 0
                if self.observer is not None:
                    self.observer.removed(identity[2 * block])
                identity[2 * block] = NO_CONTENT
                num_following += 1
        self.num_indexed -= num_following
        self.version += num_following
        return num_removed

    def remove(self, block: i64) -> None:
        """Remove an indexed block; its oldest duplicate, if any, takes over. O(1) expected.

        A following block has no slot. If it was the last of its content, its own follower becomes unreachable and needs
        no slot either; if a duplicate takes over, the follower gets a slot.
        """
        heir: i64 = 0
        if self.rings.follows(block):
            self.rings.next_equal[block] = 0
        else:
            position = self._slot_of(block)
            heir = self.rings.leave(block)
            if position >= 0 and heir == 0:
                self._close_gap(position)
            elif position >= 0:
                self._slots[position] += heir - block
                follower = self._follower(block)
                if follower != 0:
                    self.give_slot(follower)
        if self.continuations is not None:
            word = self.rows.words[self.rows.start_of(block)]
            self.continuations.remove(block, self.identity[2 * block + 1], word)
        if self.owner[block] != 0:
            self.owner[block] = 0
            self.num_pending -= 1
        elif self.log is not None:
            self.log.log_removed(block, self.content_of(block), heir, self.rings, self.owner)
        if self.observer is not None:
            if heir == 0:
                self.observer.removed(self.identity[2 * block])
            else:
                self.observer.changed(heir)
        self.identity[2 * block] = NO_CONTENT
        self.num_indexed -= 1
        self.version += 1

    def _slot_of(self, block: i64) -> i64:
        """Return the slot of `block`; -1 if another block represents its content."""
        slots = self._slots
        position = (self.chain_hash[block] >> ID_BITS) >> self._home_shift
        slot = slots[position]
        while slot != 0:
            if slot & ID_MASK == block:
                return position
            position = (position + 1) & self._slot_mask
            slot = slots[position]
        return -1

    def _close_gap(self, gap: i64) -> None:
        """Empty slot `gap` and move later slots of the run back, so that no probe ends too early (Knuth, 6.4 R)."""
        slots = self._slots
        mask = self._slot_mask
        position = (gap + 1) & mask
        slot = slots[position]
        while slot != 0:
            home = (slot >> ID_BITS) >> self._home_shift
            if (position - home) & mask >= (position - gap) & mask:
                slots[gap] = slot
                gap = position
            position = (position + 1) & mask
            slot = slots[position]
        slots[gap] = 0

    def clear(self) -> None:
        """Remove all blocks and roots, without allocating. Content ids are not reused. O(num_blocks)."""
        self.roots.clear()
        clear_i64(self.identity)
        clear_i64(self._slots)
        clear_i32(self.owner)
        self.rings.clear()
        self.num_indexed = 0
        self.num_pending = 0
        self.num_generations += 1
        self.version += 1
        if self.continuations is not None:
            self.continuations.clear()
        if self.log is not None:
            self.log.clear()
        if self.observer is not None:
            self.observer.cleared()

    def make_room_for(self, num_blocks: int) -> IndexRoom:
        """Return larger arrays for `num_blocks` blocks with the present contents, for `move_into`. O(num_blocks)."""
        room = IndexRoom(num_blocks, int(self.rows.num_words))
        room.take_words(self.rows.words, self.rows.first_word, i64(len(self.chain_hash)) * self.rows.num_words)
        room.take_blocks(self.identity, self.chain_hash, self.owner)
        room.take_rings(self.rings.next_equal, self.rings.prev_equal)
        room.take_slots(self._slots)
        if self.continuations is not None:
            room.continuations = self.continuations.enlarge(num_blocks)
        if self.log is not None:
            room.log = self.log.enlarge(num_blocks)
        return room

    def move_into(self, room: IndexRoom) -> None:
        """Replace the arrays by larger ones."""
        self.rows.words = room.words
        self.rows.first_word = room.first_word
        self.identity = room.identity
        self.chain_hash = room.chain_hash
        self.owner = room.owner
        self.rings.move_into(room.next_equal, room.prev_equal)
        self.continuations = room.continuations
        self.log = room.log
        self.roots.limit = room.num_blocks + 1
        self._slots = room.slots
        self._slot_mask = i64(len(room.slots)) - 1
        self._home_shift = room.home_shift

    def bytes_a_block(self) -> int:
        """Return the bytes per block of the index and the pool's other arrays, without policies."""
        return 8 * int(self.rows.num_words) + BYTES_A_BLOCK
