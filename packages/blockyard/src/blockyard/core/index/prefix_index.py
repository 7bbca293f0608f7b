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
from .prompt import Prompt
from .room import ID_BITS, ID_MASK, ID_SPAN, TAG_BITS, IndexRoom, bits_for
from .roots import Roots
from .rows import FOLLOWS, Rings, TokenRows

#: Blocks looked up together: long enough for memory loads to overlap, short enough to stay in the first cache.
TILE_BLOCKS: Final[i64] = 64
#: Neighbours behind one another from which on a single probe for the next run costs less than a tile of them.
LONG_RUN: Final[i64] = 16
#: Blocks looked up together where neighbours are to be expected behind them.
FIRST_TILE: Final[i64] = 4
#: Behind as many blocks that the table does not know, a tile ends: they follow one another, or are not there.
MOST_UNKNOWN: Final[i64] = 16
#: identity 16, chain hash 8, owner 4, ring 8, two slots of 8; in the ledger ref_cnt 4 and the free queue's links 8.
BYTES_A_BLOCK: Final = 64


class PrefixIndex:
    """An open-addressing table (linear probing, load at most one half) of full blocks, and what verifies each of them.

    The chained hash of a prompt's blocks finds candidates. Three things verify one: its own tokens (`rows`); that its
    parent is the very content found for the block before; and that the chain began at the right root (`roots`).

    A content id is a counter's value, given to each distinct content under a distinct prefix and never used twice;
    equal blocks share it. It is neither a block id (reused) nor a hash (can be made to collide), so no collision, by
    chance or by an attacker, makes one prompt hit another's blocks. A root stands for extra keys (LoRA, cache salt) and
    a generation; forgetting the roots, as `clear` does, leaves no way to any old block.

    One block stands for each content, the oldest one that has it. Blocks of a prompt are taken together, so they mostly
    lie side by side: a block that is the neighbour by id of the one before it needs no slot, hash or search. What leads
    to a block follows from its link in `rings`:

    state      next_equal   led to by
    listed     0 or a link  its slot: the hash of all tokens up to it
    following  FOLLOWS      the block that stands for the content before it, a neighbour; by none once that is gone
    duplicate  a link       the listed block that stands for its content

    A block follows where the content before it was new when it was published: no equal block could exist. It is listed
    when a duplicate comes, when another block comes to stand for the content before it, or when a lease remembers it or
    the content before it by the hash alone (`remember`). Otherwise it needs nothing when the content before it is gone:
    that number is never used again.

    Looking up runs in short passes over a tile of blocks (hash, probe, load, verify), whose iterations do
    not wait for one another: the processor overlaps their cache misses.

    Only this class writes `identity`, `chain_hash`, the rings and the slots; `joins` passes owners on, and the calls
    write the tokens of blocks that are not indexed.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_seed: int) -> None:
        self.rows = TokenRows(num_blocks, block_size)
        self._make_table(2 * num_blocks)
        #: identity[2b] is block b's content, 0 when it is not indexed; identity[2b + 1] is its parent's content.
        self.identity = zeros_i64(2 * num_blocks)
        self.chain_hash = zeros_i64(num_blocks)
        #: 1 + the row of the sequence that has yet to compute the block; 0 when its keys and values are there.
        self.owner = zeros_i32(num_blocks)
        self.rings = Rings(num_blocks)
        self.num_indexed: i64 = 0
        #: How many of them are still to be computed by their owner.
        self.num_pending: i64 = 0
        self._one_hash = zeros_i64(1)
        self._keys = hash_keys(hash_seed, words_per_block(block_size))
        self._last_content: i64 = NO_CONTENT
        self.num_generations: i64 = 0
        #: Grows whenever what a prompt can find changes.
        self.version: i64 = 0
        self.roots = Roots(num_blocks + 1)
        self.hashes = zeros_i64(int(TILE_BLOCKS))
        #: Where a lookup collects block ids before it returns them.
        self._found = zeros_i32(int(TILE_BLOCKS))
        #: What continues each content, for hits that end inside a block; None where partial hits are off.
        self.continuations: Continuations | None = None
        #: What came and went, for KV events; None where they are off.
        self.log: ContentLog | None = None

    def _make_table(self, min_slots: int) -> None:
        bits = bits_for(min_slots)
        self._slots = zeros_i64(2**bits)
        self._slot_mask: i64 = 2**bits - 1
        self._home_shift: i64 = TAG_BITS - bits

    def is_cached(self, block: i64) -> bool:
        """Whether a prompt can hit the block."""
        return self.identity[2 * block] != NO_CONTENT

    def content_of(self, block: i64) -> i64:
        """What the block holds, a number that equal contents under equal prefixes share; 0 when it is not cached."""
        return self.identity[2 * block]

    def parent_of(self, block: i64) -> i64:
        """The content before that of a cached block; its root for a first block."""
        return self.identity[2 * block + 1]

    def known_root(self, extra_keys: tuple[object, ...]) -> i64:
        """The root of these extra keys, or 0 if nothing was indexed under them. A question: it changes nothing."""
        return self.roots.find(extra_keys)

    def root(self, extra_keys: tuple[object, ...]) -> i64:
        """The content id that stands before the first block of prompts with these extra keys. O(1).

        As many roots are remembered as the pool has blocks, the least recently used is forgotten first.
        """
        found = self.roots.touch(extra_keys)
        if found == NO_CONTENT:
            found = self.new_content()
            forgotten = self.roots.remember(extra_keys, found)
            if self.log is not None:
                self.log.root_made(found, extra_keys)
                if forgotten != NO_CONTENT:
                    self.log.root_lost(forgotten)
        return found

    def keep_root(self, extra_keys: tuple[object, ...], known: i64) -> i64:
        """The same, where `known_root` has answered `known`: nothing is looked up again if that is the latest root."""
        if known != NO_CONTENT and known == self.roots.latest_content:
            return known
        return self.root(extra_keys)

    def new_content(self) -> i64:
        """Return a number that is no content's yet."""
        self._last_content += 1
        return self._last_content

    def find_prompt(self, prompt: Prompt, max_blocks: i64) -> vec[i32]:
        """Returns the ids of the indexed blocks that a prompt begins with, at most `max_blocks`. O(blocks found)."""
        return self.find_under(self.known_root(prompt.keys), prompt, max_blocks)

    def find_under(self, root: i64, prompt: Prompt, max_blocks: i64) -> vec[i32]:
        """The same, where the root of the prompt's keys is known: 0 if there is none."""
        # First, because it may put a longer array in the place of `_found`.
        reached = self._reach(root, prompt, max_blocks)
        return self._found[:reached]

    def _reach(self, root: i64, prompt: Prompt, max_blocks: i64) -> i64:
        """Returns how far a prompt is indexed; `_found` has the ids.

        The chain of hashes and identities begins anew at each block that a span overlaps: what stands there, together
        with all before it, has a root of its own.
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
        """How far blocks `first` to `max_blocks` of a packed prompt, the first of them after `root`, are indexed.

        Returns where the first one is missing; `_found` has the ids of those before. O(blocks found).
        Behind each verified block its neighbours are tried first (`_follow`); where they are others, a tile of blocks
        is hashed and probed. Tiles double up to `TILE_BLOCKS`, and begin anew behind a long run of neighbours: where
        runs are short, loads that overlap are faster than following. What a tile does not find in the table is taken
        for what follows (`_guess`), so that in runs of two no load waits for another either.
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
        """How far the blocks of a prompt go on side by side behind the found block before `first`, up or down.

        Each is verified as any candidate is; one with equal blocks is left to the table, which knows the oldest of
        them. Nothing is hashed. O(words).
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
        """Let `hashes` and lookups hold a prompt of `num_blocks` blocks; what they hold stays."""
        if num_blocks > len(self.hashes):
            hashes = zeros_i64(int(2 * num_blocks))
            found = zeros_i32(int(2 * num_blocks))
            for position in range(i64(len(self.hashes))):
                hashes[position] = self.hashes[position]
                found[position] = self._found[position]
            self.hashes = hashes
            self._found = found

    def _probe(self, first: i64, last: i64) -> i64:
        """Fill `_found` with the first block under each hash's tag, 0 for none; returns where it stops.

        That is `last`, or behind `MOST_UNKNOWN` hashes in a row that have none.
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
        """Fill `_found`, where the table knows no block, with a neighbour that continues the block before, or with 0.

        before: the block before the first, 0 for none. All that verifying needs is read on the way, and no more; the
        returned sum only keeps that from being dropped.
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
        """Return the block that follows one that stands for its content, 0 for none: there is one at most."""
        content = self.identity[2 * before]
        if self._follows(before + 1, content):
            return before + 1
        return before - 1 if self._follows(before - 1, content) else 0

    def verify(self, found: vec[i32], prompt: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """Where the first of the blocks `found[first:last]` fails: tokens and parent must be equal. All are indexed.

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
        """The same for blocks of 16 tokens, written out."""
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
        """Look past a false candidate for block `index`: another content whose hash has the same tag."""
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
        """The block in the table with these words under this parent content, or 0. O(1) expected."""
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
        """Fill `hashes` for blocks `first` to `last` of a packed prompt, which come after the hash `chain`."""
        self.make_room(last)
        hash_rows(words, 0, self._keys, chain, self.hashes, first, last)

    def hash_alone(self, words: vec[i64]) -> i64:
        """A hash of one block's words, whatever comes before them."""
        return hash_rows(words, 0, self._keys, 0, zeros_i64(1), 0, 1)

    def hash_words_at(self, words: vec[i64], place: i64, root: i64) -> i64:
        """The chained hash of one block's words, which begin at `place`, right after a root."""
        return hash_rows(words, place, self._keys, root_hash(root), self.hashes, 0, 1)

    def hash_block(self, block: i64, before: i64, root: i64) -> i64:
        """The chained hash of the tokens that `block` holds, after the indexed block `before` (0: after the root)."""
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

        before: the block that stands for `parent` (`standing_for`), 0 for a root. `hashes` holds their hashes already
        (`hash_run`). Three short passes, as in a lookup.
        """
        self.rows.store(words, first, last, blocks, start)
        self._load_slots(blocks, start, first, last)
        self._link_run(blocks, start, first, last, parent, before, owner)
        self.num_indexed += last - first
        self.version += 1
        if self.continuations is not None:
            self._add_continuations(self.continuations, blocks, start + first, start + last)
        if owner != 0:
            self.num_pending += last - first
        elif self.log is not None:
            for position in range(start + first, start + last):
                self.log.came(i64(blocks[position]), self.rings)

    def _load_slots(self, blocks: vec[i32], start: i64, first: i64, last: i64) -> i64:
        """Read the home slot of the blocks that will stand in the table; the returned sum only keeps the loop from
        being dropped."""
        hashes = self.hashes
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        before = i64(blocks[start + first])
        for position in range(first, last):
            block = i64(blocks[start + position])
            if block - before != 1 and before - block != 1:
                total ^= slots[(hashes[position] >> ID_BITS) >> shift]
            before = block
        return total

    def _link_run(
        self, blocks: vec[i32], start: i64, first: i64, last: i64, parent: i64, before: i64, owner: i64
    ) -> None:
        """Give a chain of blocks, whose tokens are in their rows and whose hashes are in `hashes`, their contents.

        Behind a new content all are new: nothing is searched for, and a neighbour needs no slot.
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
        """Give a block the content of its equal, or a new one; returns the block that stands for it. O(1) expected.

        An equal block that follows `before` gets the slot: it has a duplicate now.
        """
        slots = self._slots
        tag = chain_hash >> ID_BITS
        position = tag >> self._home_shift
        slot = slots[position]
        while slot != 0 and (slot >> ID_BITS != tag or not self._is_equal(block, slot & ID_MASK, parent)):
            position = (position + 1) & self._slot_mask
            slot = slots[position]
        equal = slot & ID_MASK
        if slot == 0:
            equal = self.equal_follower(self.rows.words, self.rows.start_of(block), before)
            slots[position] = tag * ID_SPAN + (block if equal == 0 else equal)
        if equal == 0:
            self.identity[2 * block] = self.new_content()
            return block
        self.identity[2 * block] = self.identity[2 * equal]
        self.rings.join(equal, block)
        return equal

    def equal_follower(self, words: vec[i64], position: i64, before: i64) -> i64:
        """Return the block that follows `before` and has these words; 0 for none, and behind a root (`before` is 0)."""
        follower = self._follower(before) if before != 0 else NULL_BLOCK
        return follower if follower != 0 and self.rows.equal(words, position, follower) else 0

    def _follows(self, block: i64, parent: i64) -> bool:
        """Return whether `block` follows the block that stands for `parent`, given that it is a neighbour of that."""
        if block >= i64(len(self.chain_hash)) or self.identity[2 * block + 1] != parent:
            return False
        return self.rings.follows(block)

    def standing_for(self, content: i64, chain_hash: i64, block: i64) -> i64:
        """Return the block that a lookup finds for a content; 0 where no block has it.

        block: one that may have it, or 0. The chained hash finds the oldest of equal blocks. O(1) expected.
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
        """Let the table lead to an indexed block, wherever the one before it goes. O(1) expected."""
        if not self.rings.follows(block):
            return
        self.rings.next_equal[block] = 0
        tag = self.chain_hash[block] >> ID_BITS
        position = tag >> self._home_shift
        while self._slots[position] != 0:
            position = (position + 1) & self._slot_mask
        self._slots[position] = tag * ID_SPAN + block

    def remember(self, block: i64) -> None:
        """Let the table lead to an indexed block and to what follows it: a lease goes on behind its content, which it
        knows by number and hash, even when no block has that any more. O(1) expected."""
        self.give_slot(block)
        standing = self.standing_for(self.identity[2 * block], self.chain_hash[block], block)
        follower = self._follower(standing) if standing != 0 else NULL_BLOCK
        if follower != 0:
            self.give_slot(follower)

    def insert(self, block: i64, chain_hash: i64, parent: i64, before: i64) -> None:
        """Index a computed `block`, whose tokens are in its row, under `parent`. O(1) expected.

        before: the block that stands for `parent` (`standing_for`), 0 for a root.
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
            self.log.came(block, self.rings)

    def insert_scattered(self, blocks: vec[i64], parents: vec[i64], count: i64) -> None:
        """Index `count` computed blocks of different chains, whose tokens are in their rows. O(words) each.

        parents: the indexed block before each; minus its root for a first block. Short passes, as in a lookup.
        """
        self.make_room(count)
        self._load_parents(parents, count)
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
        """Return the block that stands for the content of `before` where one may follow that; 0 where none does."""
        identity = self.identity
        content = identity[2 * before]
        if not self.rings.is_alone(before):
            return self.standing_for(content, self.chain_hash[before], before)
        if identity[2 * before - 1] == content:
            return before
        return before if 2 * before + 3 < i64(len(identity)) and identity[2 * before + 3] == content else 0

    def _load_parents(self, parents: vec[i64], count: i64) -> i64:
        """Fill `hashes` with those of the parents, and read what linking needs; the returned sum only keeps that from
        being dropped."""
        hashes = self.hashes
        chain_hash = self.chain_hash
        identity = self.identity
        next_equal = self.rings.next_equal
        total: i64 = 0
        for position in range(count):
            before = parents[position]
            if before > 0:
                hashes[position] = chain_hash[before]
                total ^= identity[2 * before] ^ i64(next_equal[before])
            else:
                hashes[position] = root_hash(-before)
        return total

    def load_homes(self, first: i64, last: i64) -> i64:
        """Read the home slots of these `hashes`; the returned sum only keeps the loop from being dropped."""
        hashes = self.hashes
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        for position in range(first, last):
            total ^= slots[(hashes[position] >> ID_BITS) >> shift]
        return total

    def _add_continuations(self, continuations: Continuations, blocks: vec[i32], first: i64, last: i64) -> None:
        for position in range(first, last):
            block = i64(blocks[position])
            continuations.add(block, self.identity[2 * block + 1], self.rows.words[self.rows.start_of(block)])

    def _is_equal(self, block: i64, other: i64, parent: i64) -> bool:
        return self._equal(self.rows.words, self.rows.start_of(block), other, parent)

    def set_computed(self, blocks: vec[i32], start: i64, count: i64, owner: i64) -> None:
        """The keys and values of those of `blocks[start:start + count]` that `owner` has to compute are there now."""
        owners = self.owner
        num_computed: i64 = 0
        for position in range(start, start + count):
            block = i64(blocks[position])
            if i64(owners[block]) == owner:
                owners[block] = 0
                num_computed += 1
                if self.log is not None:
                    self.log.came(block, self.rings)
        self.num_pending -= num_computed
        self.version += num_computed

    def load_run(self, blocks: vec[i32], start: i64, count: i64) -> i64:
        """Read what `remove` will need of each block; the returned sum only keeps the loop from being dropped."""
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
        """Take the indexed ones of `blocks[start:start + count]`, all computed, out; returns how many there were.

        O(count) expected. Most follow, and nothing else knows of them.
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
                identity[2 * block] = NO_CONTENT
                num_following += 1
        self.num_indexed -= num_following
        self.version += num_following
        return num_removed

    def remove(self, block: i64) -> None:
        """Take an indexed block out: its oldest duplicate takes its place, if it has one. O(1) expected.

        A block that follows has no slot. Where it is the last of its content, what follows it cannot be found any
        more, and needs none either; where another takes its place, what follows it gets a slot.
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
            self.log.went(block, self.content_of(block), heir, self.rings, self.owner)
        self.identity[2 * block] = NO_CONTENT
        self.num_indexed -= 1
        self.version += 1

    def _slot_of(self, block: i64) -> i64:
        """Where `block` stands in the table; -1 when another block stands for its content."""
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
        """Forget all blocks and roots at once. O(num_blocks); the content counter goes on. It asks for no memory."""
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

    def make_room_for(self, num_blocks: int) -> IndexRoom:
        """Arrays for blocks up to `num_blocks - 1` that hold what is indexed, not put in place yet. O(num_blocks)."""
        room = IndexRoom(num_blocks, int(self.rows.num_words))
        room.take_words(self.rows.words, self.rows.first_word, i64(len(self.chain_hash)) * self.rows.num_words)
        room.take_blocks(self.identity, self.chain_hash, self.owner)
        room.take_rings(self.rings.next_equal, self.rings.prev_equal)
        room.take_slots(self._slots)
        if self.continuations is not None:
            room.continuations = self.continuations.grown(num_blocks)
        if self.log is not None:
            room.log = self.log.grown(num_blocks)
        return room

    def move_into(self, room: IndexRoom) -> None:
        """Put the larger arrays in place."""
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
        """Bytes of the index and of the pool's other arrays for one block, without policies."""
        return 8 * int(self.rows.num_words) + BYTES_A_BLOCK
