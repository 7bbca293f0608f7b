"""The exact prefix index: from the tokens of a prompt to the blocks that hold their keys and values."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..errors import InvariantError
from ..ids import NO_CONTENT
from .arrays import (
    clear_i32,
    clear_i64,
    view_i32,
    view_i64,
    words_to_cache_line,
    zeros_i32,
    zeros_i64,
)
from .children import Children
from .hashing import WORDS_OF_16_TOKENS, hash_keys, hash_rows, root_hash
from .index_room import ID_BITS, ID_MASK, ID_SPAN, TAG_BITS, IndexRoom, bits_for
from .roots import Roots
from .tokens import words_per_block

#: Blocks looked up together: long enough for memory loads to overlap, short enough to stay in the first cache.
TILE_BLOCKS: Final[i64] = 64
#: identity 16, chain hash 8, owner 4, ring 8, two slots of 8; in the ledger ref_cnt 4 and the free queue's links 8.
BYTES_A_BLOCK: Final = 64


class PrefixIndex:
    """An open-addressing table (linear probing, load at most one half) of full blocks, and what proves each of them.

    The chained hash of a prompt's blocks finds candidates. Three things prove one: its own tokens; that its parent
    is the very content found for the block before; and that the chain began at the right root. A content id is a
    counter's value, given to each distinct content under a distinct prefix and never used twice; equal blocks share
    it. It is neither a block id (reused) nor a hash (can be made to collide), so no collision, by chance or by an
    attacker, makes one prompt hit another's blocks. A root stands for extra keys (LoRA, cache salt) and
    a generation; forgetting the roots, as `clear` does, leaves no way to any old block.

    Only one block of each content stands in the table, the oldest one; its duplicates hang on it in a ring, so that
    a thousand equal blocks cost a look-up nothing.

    Looking up runs in short passes over a tile of blocks (hash, probe, load, verify), whose iterations do
    not wait for one another: the processor overlaps their cache misses.

    Only this class writes `identity`, `chain_hash`, the ring and the slots; the manager writes `owner`, and the
    tokens of blocks that are not in the index.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_seed: int) -> None:
        self.num_words: i64 = words_per_block(block_size)
        self.words = zeros_i64(num_blocks * words_per_block(block_size) + 8)
        self.first_word: i64 = words_to_cache_line(self.words)
        self._make_table(2 * num_blocks)
        #: identity[2b] is block b's content, 0 when it is not indexed; identity[2b + 1] is its parent's content.
        self.identity = zeros_i64(2 * num_blocks)
        self.chain_hash = zeros_i64(num_blocks)
        #: 1 + the row of the sequence that has yet to compute the block; 0 when its keys and values are there.
        self.owner = zeros_i32(num_blocks)
        self.next_equal = zeros_i32(num_blocks)
        self.prev_equal = zeros_i32(num_blocks)
        self.num_indexed: i64 = 0
        #: How many of them are still to be computed by their owner.
        self.num_pending: i64 = 0
        self._one_hash = zeros_i64(1)
        self._keys = hash_keys(hash_seed, words_per_block(block_size))
        self._last_content: i64 = NO_CONTENT
        self.num_generations: i64 = 0
        self.roots = Roots(num_blocks + 1)
        self.hashes = zeros_i64(int(TILE_BLOCKS))
        self.found = zeros_i32(int(TILE_BLOCKS))
        #: What continues each content, for hits that end inside a block; None where nobody asks.
        self.children: Children | None = None

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
            found = self._new_content()
            self.roots.remember(extra_keys, found)
        return found

    def _new_content(self) -> i64:
        self._last_content += 1
        return self._last_content

    def find_prefix(self, words: vec[i64], first: i64, max_blocks: i64, root: i64) -> i64:
        """How far blocks `first` to `max_blocks` of a packed prompt, the first of them after `root`, are indexed.

        Returns where the first one is missing; `found` has the ids of those before, `hashes` their chained hashes.
        O(blocks found).
        """
        self.make_room(max_blocks)
        chain = root_hash(root)
        parent = root
        while first < max_blocks:
            last = min(first + TILE_BLOCKS, max_blocks)
            hash_rows(words, 0, self._keys, chain, self.hashes, first, last)
            reached = self._probe(first, last)
            self._load(first, reached)
            proved = self._verify(words, first, reached, parent)
            if proved > first:
                parent = self.identity[2 * i64(self.found[proved - 1])]
            if proved < last:
                if proved == reached or not self._resolve(words, proved, parent):
                    return proved
                parent = self.identity[2 * i64(self.found[proved])]
                proved += 1
            first = proved
            chain = self.hashes[first - 1]
        return max_blocks

    def make_room(self, num_blocks: i64) -> None:
        """Let `hashes` and `found` hold a prompt of `num_blocks` blocks; what they hold stays."""
        if num_blocks > len(self.hashes):
            hashes = zeros_i64(int(2 * num_blocks))
            found = zeros_i32(int(2 * num_blocks))
            for position in range(i64(len(self.hashes))):
                hashes[position] = self.hashes[position]
                found[position] = self.found[position]
            self.hashes = hashes
            self.found = found

    def _probe(self, first: i64, last: i64) -> i64:
        """Fill `found` with the first block under each hash's tag; returns where the first hash has none."""
        hashes = self.hashes
        found = self.found
        slots = self._slots
        mask = self._slot_mask
        shift = self._home_shift
        for index in range(first, last):
            tag = hashes[index] >> ID_BITS
            position = tag >> shift
            slot = slots[position]
            while slot != 0 and slot >> ID_BITS != tag:
                position = (position + 1) & mask
                slot = slots[position]
            if slot == 0:
                return index
            found[index] = i32(slot & ID_MASK)
        return last

    def _load(self, first: i64, last: i64) -> i64:
        """Read the first word of each found block; the returned sum only keeps the loop from being dropped."""
        found = self.found
        words = self.words
        identity = self.identity
        start = self.first_word
        num_words = self.num_words
        total: i64 = 0
        for index in range(first, last):
            block = i64(found[index])
            total ^= words[start + block * num_words] ^ identity[2 * block]
        return total

    def _verify(self, prompt: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """Where the first found block fails to prove itself: tokens and parent must be equal."""
        found = self.found
        words = self.words
        identity = self.identity
        num_words = self.num_words
        start = self.first_word
        if num_words == WORDS_OF_16_TOKENS:
            return self._verify_16(prompt, first, last, parent)
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

    def _verify_16(self, prompt: vec[i64], first: i64, last: i64, parent: i64) -> i64:
        """The same for blocks of 16 tokens, written out."""
        found = self.found
        words = self.words
        identity = self.identity
        start = self.first_word
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

    def _resolve(self, prompt: vec[i64], index: i64, parent: i64) -> bool:
        """Look past a false candidate for block `index`: another content whose hash has the same tag."""
        block = self.find(prompt, index * self.num_words, self.hashes[index], parent)
        self.found[index] = i32(block)
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
        if self.identity[2 * block + 1] != parent:
            return False
        stored = self.first_word + block * self.num_words
        for word in range(self.num_words):
            if self.words[stored + word] != words[position + word]:
                return False
        return True

    def hash_run(self, words: vec[i64], first: i64, last: i64, chain: i64) -> None:
        """Fill `hashes` for blocks `first` to `last` of a packed prompt, which come after the hash `chain`."""
        self.make_room(last)
        hash_rows(words, 0, self._keys, chain, self.hashes, first, last)

    def hash_alone(self, words: vec[i64]) -> i64:
        """A hash of one block's words, whatever comes before them."""
        return hash_rows(words, 0, self._keys, 0, zeros_i64(1), 0, 1)

    def hash_words(self, words: vec[i64], root: i64) -> i64:
        """The chained hash of one block's words right after a root."""
        return hash_rows(words, 0, self._keys, root_hash(root), self.hashes, 0, 1)

    def hash_block(self, block: i64, before: i64, root: i64) -> i64:
        """The chained hash of the tokens that `block` holds, after the indexed block `before` (0: after the root)."""
        chain = root_hash(root) if before == 0 else self.chain_hash[before]
        return hash_rows(self.words, self.first_word + block * self.num_words, self._keys, chain, self.hashes, 0, 1)

    def insert_run(
        self, words: vec[i64], first: i64, last: i64, blocks: vec[i32], start: i64, parent: i64, owner: i64
    ) -> None:
        """Store blocks `first` to `last` of a packed prompt in `blocks[start + first:]` and index them. O(words).

        `hashes` holds their hashes already (`hash_run`). Three short passes, as in a look-up.
        """
        self.store_rows(words, first, last, blocks, start)
        self._load_slots(first, last)
        self._link_run(blocks, start, first, last, parent, owner)

    def store_rows(self, words: vec[i64], first: i64, last: i64, blocks: vec[i32], start: i64) -> None:
        """Copy blocks `first` to `last` of a packed prompt into the rows of `blocks[start + first:]`."""
        num_words = self.num_words
        stored = self.words
        start_word = self.first_word
        if num_words == WORDS_OF_16_TOKENS:
            self._store_rows_of_16(words, first, last, blocks, start)
            return
        source = first * num_words
        for position in range(first, last):
            target = start_word + i64(blocks[start + position]) * num_words
            for word in range(num_words):
                stored[target + word] = words[source + word]
            source += num_words

    def _store_rows_of_16(self, words: vec[i64], first: i64, last: i64, blocks: vec[i32], start: i64) -> None:
        """The same for blocks of 16 tokens, written out."""
        stored = self.words
        start_word = self.first_word
        source = first * WORDS_OF_16_TOKENS
        for position in range(first, last):
            target = start_word + i64(blocks[start + position]) * WORDS_OF_16_TOKENS
            stored[target] = words[source]
            stored[target + 1] = words[source + 1]
            stored[target + 2] = words[source + 2]
            stored[target + 3] = words[source + 3]
            stored[target + 4] = words[source + 4]
            stored[target + 5] = words[source + 5]
            stored[target + 6] = words[source + 6]
            stored[target + 7] = words[source + 7]
            source += WORDS_OF_16_TOKENS

    def _load_slots(self, first: i64, last: i64) -> i64:
        """Read the home slot of each hash; the returned sum only keeps the loop from being dropped."""
        hashes = self.hashes
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        for position in range(first, last):
            total ^= slots[(hashes[position] >> ID_BITS) >> shift]
        return total

    def insert(self, block: i64, chain_hash: i64, parent: i64) -> None:
        """Index a computed `block`, whose tokens are in its row, under `parent`. O(1) expected."""
        tag = chain_hash >> ID_BITS
        index = tag >> self._home_shift
        slot = self._slots[index]
        while slot != 0 and (slot >> ID_BITS != tag or not self._is_equal(block, slot & ID_MASK, parent)):
            index = (index + 1) & self._slot_mask
            slot = self._slots[index]
        if slot == 0:
            self._last_content += 1
            self._slots[index] = tag * ID_SPAN + block
            self.identity[2 * block] = self._last_content
        else:
            self.identity[2 * block] = self.identity[2 * (slot & ID_MASK)]
            self._join_ring(slot & ID_MASK, block)
        self.identity[2 * block + 1] = parent
        self.chain_hash[block] = chain_hash
        self.owner[block] = 0
        self.num_indexed += 1
        if self.children is not None:
            self.children.add(block, parent, self.words[self.first_word + block * self.num_words])

    def insert_scattered(self, blocks: vec[i64], parents: vec[i64], count: i64) -> None:
        """Index `count` computed blocks of different chains, whose tokens are in their rows. O(words) each.

        parents: the indexed block before each; minus its root for a first block. Short passes, as in a look-up.
        """
        self.make_room(count)
        self._hash_scattered(blocks, parents, count)
        self._load_slots(0, count)
        for position in range(count):
            before = parents[position]
            parent = self.identity[2 * before] if before > 0 else -before
            self.insert(blocks[position], self.hashes[position], parent)

    def _hash_scattered(self, blocks: vec[i64], parents: vec[i64], count: i64) -> None:
        hashes = self.hashes
        chain_hash = self.chain_hash
        for position in range(count):
            before = parents[position]
            chain = chain_hash[before] if before > 0 else root_hash(-before)
            row = self.first_word + blocks[position] * self.num_words
            hash_rows(self.words, row, self._keys, chain, self._one_hash, 0, 1)
            hashes[position] = self._one_hash[0]

    def _link_run(self, blocks: vec[i32], start: i64, first: i64, last: i64, parent: i64, owner: i64) -> None:
        """Index a chain of blocks whose tokens are in their rows and whose hashes are in `hashes`."""
        hashes = self.hashes
        slots = self._slots
        mask = self._slot_mask
        shift = self._home_shift
        identity = self.identity
        chain_hash = self.chain_hash
        owners = self.owner
        for position in range(first, last):
            block = i64(blocks[start + position])
            tag = hashes[position] >> ID_BITS
            index = tag >> shift
            slot = slots[index]
            while slot != 0 and (slot >> ID_BITS != tag or not self._is_equal(block, slot & ID_MASK, parent)):
                index = (index + 1) & mask
                slot = slots[index]
            if slot == 0:
                self._last_content += 1
                slots[index] = tag * ID_SPAN + block
                identity[2 * block] = self._last_content
            else:
                identity[2 * block] = identity[2 * (slot & ID_MASK)]
                self._join_ring(slot & ID_MASK, block)
            identity[2 * block + 1] = parent
            chain_hash[block] = hashes[position]
            owners[block] = i32(owner)
            parent = identity[2 * block]
        self.num_indexed += last - first
        if self.children is not None:
            self._add_children(self.children, blocks, start + first, start + last)
        if owner != 0:
            self.num_pending += last - first

    def _add_children(self, children: Children, blocks: vec[i32], first: i64, last: i64) -> None:
        for position in range(first, last):
            block = i64(blocks[position])
            children.add(block, self.identity[2 * block + 1], self.words[self.first_word + block * self.num_words])

    def _is_equal(self, block: i64, other: i64, parent: i64) -> bool:
        return self._equal(self.words, self.first_word + block * self.num_words, other, parent)

    def set_computed(self, block: i64) -> None:
        """The keys and values of an indexed block are there now: nobody has to wait for it."""
        if self.owner[block] != 0:
            self.owner[block] = 0
            self.num_pending -= 1

    def load_run(self, blocks: vec[i32], start: i64, count: i64) -> i64:
        """Read what `remove` will need of each block; the returned sum only keeps the loop from being dropped."""
        chain_hash = self.chain_hash
        slots = self._slots
        shift = self._home_shift
        total: i64 = 0
        for position in range(start, start + count):
            total ^= slots[(chain_hash[i64(blocks[position])] >> ID_BITS) >> shift]
        return total

    def remove(self, block: i64) -> None:
        """Take an indexed block out: its oldest duplicate takes its place, if it has one. O(1) expected."""
        position = self._slot_of(block)
        heir = self._leave_ring(block)
        if position >= 0:
            if heir != 0:
                self._slots[position] += heir - block
            else:
                self._close_gap(position)
        if self.children is not None:
            word = self.words[self.first_word + block * self.num_words]
            self.children.remove(block, self.identity[2 * block + 1], word)
        self.set_computed(block)
        self.identity[2 * block] = NO_CONTENT
        self.num_indexed -= 1

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

    def _join_ring(self, oldest: i64, block: i64) -> None:
        """Hang `block` at the end of the ring of `oldest`; a block alone has links of 0."""
        newest = i64(self.prev_equal[oldest])
        if newest == 0:
            newest = oldest
        self.next_equal[newest] = i32(block)
        self.prev_equal[block] = i32(newest)
        self.next_equal[block] = i32(oldest)
        self.prev_equal[oldest] = i32(block)

    def _leave_ring(self, block: i64) -> i64:
        """Unlink `block`; returns the next older-to-newer duplicate, or 0 when it was alone."""
        after = i64(self.next_equal[block])
        if after == 0:
            return 0
        before = i64(self.prev_equal[block])
        self.next_equal[block] = 0
        self.prev_equal[block] = 0
        if after == before:
            self.next_equal[after] = 0
            self.prev_equal[after] = 0
        else:
            self.next_equal[before] = i32(after)
            self.prev_equal[after] = i32(before)
        return after

    def clear(self) -> None:
        """Forget all blocks and roots at once. O(num_blocks); the content counter goes on. It asks for no memory."""
        self.roots.clear()
        clear_i64(self.identity)
        clear_i64(self._slots)
        clear_i32(self.owner)
        clear_i32(self.next_equal)
        clear_i32(self.prev_equal)
        self.num_indexed = 0
        self.num_pending = 0
        self.num_generations += 1
        if self.children is not None:
            self.children.clear()

    def make_room_for(self, num_blocks: int) -> IndexRoom:
        """Arrays for blocks up to `num_blocks - 1` that hold what is indexed, not put in place yet. O(num_blocks)."""
        room = IndexRoom(num_blocks, int(self.num_words))
        room.take_words(self.words, self.first_word, i64(len(self.chain_hash)) * self.num_words)
        room.take_blocks(self.identity, self.chain_hash, self.owner)
        room.take_rings(self.next_equal, self.prev_equal)
        room.take_slots(self._slots)
        if self.children is not None:
            room.children = self.children.grown(num_blocks)
        return room

    def move_into(self, room: IndexRoom) -> None:
        """Put the larger arrays in place."""
        self.words = room.words
        self.first_word = room.first_word
        self.identity = room.identity
        self.chain_hash = room.chain_hash
        self.owner = room.owner
        self.next_equal = room.next_equal
        self.prev_equal = room.prev_equal
        self.children = room.children
        self.roots.limit = room.num_blocks + 1
        self._slots = room.slots
        self._slot_mask = i64(len(room.slots)) - 1
        self._home_shift = room.home_shift

    def bytes_a_block(self) -> int:
        """Bytes of the index and of the pool's other arrays for one block, without policies."""
        return 8 * int(self.num_words) + BYTES_A_BLOCK

    def check(self) -> None:
        """Every indexed block is found from its own tokens, exactly once, and the counts agree. O(num_blocks)."""
        indexed = [block for block in range(len(self.chain_hash)) if self.identity[2 * i64(block)] != NO_CONTENT]
        if len(indexed) != self.num_indexed:
            raise InvariantError(f"index: {len(indexed)} blocks have a content, the count says {self.num_indexed}")
        pending = sum(1 for owner in self.owner if owner != 0)
        if pending != self.num_pending:
            raise InvariantError(f"I3: {pending} blocks have an owner, the count says {self.num_pending}")
        in_table = [int(slot) & int(ID_MASK) for slot in view_i64(self._slots).tolist() if slot]
        if in_table and not 0 < min(in_table) <= max(in_table) < len(self.chain_hash):
            raise InvariantError(
                f"index: the table leads to block {max(in_table)}; the pool has {len(self.chain_hash)}"
            )
        reached = sorted(block for oldest in in_table for block in self.equal_blocks(oldest))
        if reached != indexed:
            raise InvariantError("index: table and rings reach other blocks than those with a content")
        linked = np.flatnonzero(view_i32(self.next_equal) | view_i32(self.prev_equal)).tolist()
        for block in sorted(set(linked) - set(indexed)):
            raise InvariantError(f"index: block {block} has no content, but a link in a ring")
        blocks = {int(self.identity[2 * i64(block)]): block for block in in_table}
        for block in in_table:
            self._check_block(block)
            self._check_chain(block, blocks.get(int(self.identity[2 * i64(block) + 1]), 0))

    def equal_blocks(self, oldest: i64) -> list[int]:
        """All blocks that hold the content of the one in the table, oldest first. O(duplicates)."""
        ring = [int(oldest)]
        block = i64(self.next_equal[oldest])
        while block != 0 and block != oldest and len(ring) < len(self.chain_hash):
            ring.append(int(block))
            if not 0 < block < len(self.chain_hash):
                raise InvariantError(f"index: a ring leads to block {block}; the pool has {len(self.chain_hash)}")
            block = i64(self.next_equal[block])
        return ring

    def _check_block(self, oldest: i64) -> None:
        content = self.identity[2 * oldest]
        parent = self.identity[2 * oldest + 1]
        if not parent < content <= self._last_content:
            raise InvariantError(f"I5: block {oldest} has content {content} under parent {parent}")
        ring = self.equal_blocks(oldest)
        for position, member in enumerate(ring):
            block = i64(member)
            row = self.first_word + block * self.num_words
            before = self.prev_equal[block]
            if before != (ring[position - 1] if len(ring) > 1 else 0):
                raise InvariantError(f"index: block {block} points back to {before} in the ring {ring}")
            if self.identity[2 * block] != content or self.identity[2 * block + 1] != parent:
                raise InvariantError(f"I5: block {block} is a duplicate of block {oldest} with another identity")
            if self.find(self.words, row, self.chain_hash[block], parent) != oldest:
                raise InvariantError(f"I5: block {block} is not found from its own tokens")

    def _check_chain(self, block: i64, before: i64) -> None:
        """A block is hashed after its parent, if that is still indexed or a root that is still known."""
        parent = self.identity[2 * block + 1]
        if before == 0 and not self.roots.holds(parent):
            return
        if self.hash_block(block, before, parent) != self.chain_hash[block]:
            raise InvariantError(f"index: the hash of block {block} does not follow from its parent's")
