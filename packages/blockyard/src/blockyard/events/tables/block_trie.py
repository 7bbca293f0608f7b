"""A trie of the blocks that any holder has, exact because tokens are compared."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...core.arrays import grown_i32, grown_i64, view_i64, zeros_i32, zeros_i64
from ...core.index.hashing import root_hash
from ...core.index.prefix_index import TILE_BLOCKS, PrefixIndex
from ...core.index.prompt import Prompt
from ...errors import InvalidArgument
from ...ids import NO_CONTENT
from .holdings import HoldingTable
from .matching import ComparedPrompt, HolderRows, Lengths
from .packed_numbers import read_names, read_tokens

#: Fewest blocks that are compared as one piece of memory.
FEWEST_AT_ONCE: Final[i64] = 16
WORD_BYTES: Final = 8
#: Holders per word of bits.
HOLDERS_A_WORD: Final[i64] = 64
LOW_16: Final[i64] = 65535
LOW_32: Final[i64] = 4294967295
#: Media: the GPU, and slower ones.
MEDIA: Final[i64] = 2
FEWEST_NODES: Final = 64
#: Replaces the node of a name that a holder gave to two blocks, or to a descendant of such a block, until the holder is
#: cleared.
AMBIGUOUS: Final[i64] = 4294967295
#: Most names remembered per holder, so that it can be cleared without scanning the table.
FEW_NAMES: Final = 4096
#: Roots are only removed by rebuilding the trie.
NO_LIMIT: Final[i64] = 1152921504606846976


class BlockTrie:
    """A trie of blocks, built on the manager's prefix index. A node is a block of tokens after all tokens before it.

    A holder is one layer group of one cache, with its own names of blocks. If it gives the same name to two blocks, by
    a hash collision, that name is ambiguous and ignored from then on. A node exists while a holder has it or one of its
    descendants. Arrays double when they are full, and are rebuilt at half the size when only a quarter is used.
    """

    def __init__(self, block_size: int, hash_seed: int) -> None:
        self.block_size = block_size
        self._hash_seed = hash_seed
        self.holdings = HoldingTable(hash_seed)
        self.num_holders: i64 = 0
        self._words: i64 = 1
        self.num_nodes: i64 = 0
        #: Blocks ignored because their holder did not have the parent.
        self.num_orphans = 0
        #: The bit of each holder in a word, the last one negative; and all bits of the first n holders, by n.
        self._bits = vec[i64](np.left_shift(np.int64(1), np.arange(64)))
        self._all_bits = vec[i64](np.append(np.int64(0), np.cumsum(np.left_shift(np.int64(1), np.arange(64)))))
        #: By holder, the names stored since it was last cleared, while they are few.
        self._recent: list[RecentNames] = []
        self._make(FEWEST_NODES)

    def _make(self, capacity: int) -> None:
        self.capacity: i64 = capacity
        self.index = PrefixIndex(capacity, self.block_size, self._hash_seed)
        self.index.roots.limit = NO_LIMIT
        self._parent = zeros_i32(capacity)
        #: Children and holdings of each node.
        self._uses = zeros_i32(capacity)
        #: One child of each node, 0 for none; the child of node 0 is a first block.
        self._child = zeros_i32(capacity)
        self._free = zeros_i32(capacity)
        self._num_free: i64 = 0
        self._next_node: i64 = 1
        #: Buffer for the nodes of a path.
        self._nodes = zeros_i32(int(TILE_BLOCKS))
        #: Whether the nodes guessed last have consecutive numbers.
        self._in_one_piece = False
        #: held[(node * 2 + medium) * words + holder // 64] has a bit for each holder.
        self._held = zeros_i64(capacity * int(MEDIA * self._words))

    def add_holder(self) -> int:
        """Return the number of a new holder."""
        holder = self.num_holders
        if holder // HOLDERS_A_WORD >= self._words:
            self._widen()
        self.num_holders += 1
        self._recent.append(RecentNames())
        return int(holder)

    def _widen(self) -> None:
        words = self._words
        wider = zeros_i64(int(self.capacity * MEDIA * (words + 1)))
        for row in range(self.capacity * MEDIA):
            for word in range(words):
                wider[row * (words + 1) + word] = self._held[row * words + word]
        self._held = wider
        self._words = words + 1

    # Changes.

    def store(
        self,
        holder: i64,
        medium: i64,
        names: bytes,
        parent_name: int | None,
        token_ids: bytes,
        request: tuple[object, ...],
        block_keys: list[tuple[object, ...]],
        others: list[int],
    ) -> int:
        """Store a chain of blocks of a holder. Return how many were stored.

        Blocks are ignored from the first one whose parent the holder does not have, or whose name is ambiguous.

        Args:
            holder: the holder.
            medium: 0 for the GPU, 1 for slower media.
            names: names of n blocks, a msgpack list.
            parent_name: name of the block before the first, None at the beginning of a prompt.
            token_ids: n * block_size tokens, a msgpack list.
            request: extra keys of the whole request.
            block_keys: (), or a tuple of spans for each block.
            others: other holders that use the same names; one of them may have the parent instead.

        Raises:
            InvalidArgument: a list has other items or another length.
        """
        chain = read_names(names)
        packed = read_tokens(token_ids, self.block_size)
        if packed.num_tokens != i64(len(chain)) * self.block_size:
            raise InvalidArgument(
                f"token_ids has {int(packed.num_tokens)} items; {len(chain)} blocks of {self.block_size} tokens are "
                "needed"
            )
        before: i64 = 0
        if parent_name is not None:
            before = self.holdings.node_of(holder, i64(parent_name))
            for other in others:
                if before == 0:
                    before = self.holdings.node_of(other, i64(parent_name))
            if before == 0:
                self.num_orphans += len(chain)
                return 0
        self._recent[holder].add(chain)
        if before == AMBIGUOUS:
            self._leave_out(holder, chain, 0)
            return 0
        first: i64 = 0
        while first < i64(len(chain)):
            last = _next_with_keys(block_keys, first + 1, len(chain))
            before = self._store_run(holder, medium, chain, packed.words, first, last, before, request, block_keys)
            if before < 0:
                first = -before - 1
                self._leave_out(holder, chain, first)
                return int(first)
            first = last
        self._shrink()
        return int(first)

    def _store_run(
        self,
        holder: i64,
        medium: i64,
        names: vec[i64],
        words: vec[i64],
        first: i64,
        last: i64,
        before: i64,
        request: tuple[object, ...],
        block_keys: list[tuple[object, ...]],
    ) -> i64:
        """Store a run of blocks; only its first may have spans. Return the last one's node. O(blocks).

        At a block with an ambiguous name, return -1 minus its position.
        """
        index = self.index
        parent = index.content_of(before) if before > 0 else index.root(request)
        chain = index.chain_hash[before] if before > 0 else root_hash(parent)
        if block_keys and block_keys[first]:
            parent = index.root((int(parent), block_keys[first]))
            chain = root_hash(parent)
        index.hash_run(words, first, last, chain)
        index.load_homes(first, last)
        self.holdings.load_homes(holder, names, first, last)
        for position in range(first, last):
            node = index.find(words, position * index.rows.num_words, index.hashes[position], parent)
            if node == 0:
                node = self._new_node(words, position, before, parent, index.hashes[position])
            if not self._hold(holder, medium, names[position], node):
                return -1 - position
            before = node
            parent = index.content_of(node)
        return before

    def _new_node(self, words: vec[i64], position: i64, before: i64, parent: i64, chain: i64) -> i64:
        if self._num_free == 0 and self._next_node == self.capacity:
            self._grow()
        if self._num_free > 0:
            self._num_free -= 1
            node = i64(self._free[self._num_free])
        else:
            node = self._next_node
            self._next_node += 1
        index = self.index
        first = index.rows.start_of(node)
        for word in range(index.rows.num_words):
            index.rows.words[first + word] = words[position * index.rows.num_words + word]
        index.insert(node, chain, parent, 0)
        self._parent[node] = i32(before)
        self._child[before] = i32(node)
        self._uses[node] = 0
        if before > 0:
            self._uses[before] += 1
        self.num_nodes += 1
        return node

    def _hold(self, holder: i64, medium: i64, name: i64, node: i64) -> bool:
        """Add a holding of a node under a name. Return False if another node has the name."""
        known = self.holdings.put_if_new(holder, name, node)
        if known == 0:
            self._uses[node] += 1
        elif known != node:
            self._uses[node] += 1  # so that a new node is removed
            self._unuse(node)
            return False
        self._held[self._word(node, medium, holder)] |= self._bit(holder)
        return True

    def _leave_out(self, holder: i64, names: vec[i64], first: i64) -> None:
        """Ignore blocks from `first` on and mark their names as ambiguous. O(blocks)."""
        self.num_orphans += len(names) - int(first)
        for position in range(first, i64(len(names))):
            known = self.holdings.put_if_new(holder, names[position], AMBIGUOUS)
            if known != 0 and known != AMBIGUOUS:
                self._drop_name(holder, names[position], known)
                self.holdings.put(holder, names[position], AMBIGUOUS)
        self._shrink()

    def _word(self, node: i64, medium: i64, holder: i64) -> i64:
        return (node * MEDIA + medium) * self._words + holder // HOLDERS_A_WORD

    def _bit(self, holder: i64) -> i64:
        return self._bits[holder % HOLDERS_A_WORD]

    def remove(self, holder: i64, medium: i64, names: bytes) -> None:
        """Remove a holder's blocks from a medium; unknown names are ignored. O(n).

        Raises `InvalidArgument` unless `names` is a msgpack list of names.
        """
        gone = read_names(names)
        self._load_holdings(holder, gone)
        for name in gone:
            node = self.holdings.node_of(holder, name)
            if node == 0 or node == AMBIGUOUS:
                continue
            self._held[self._word(node, medium, holder)] &= ~self._bit(holder)
            if not self.is_held(node, holder):
                self._drop_name(holder, name, node)
        self._shrink()

    def _load_holdings(self, holder: i64, names: vec[i64]) -> None:
        """Prefetch the memory that `remove` needs of each block. O(n)."""
        count = i64(len(names))
        self.holdings.load_homes(holder, names, 0, count)
        nodes = zeros_i32(int(count))
        for place in range(count):
            node = self.holdings.node_of(holder, names[place])
            nodes[place] = i32(node) if node != AMBIGUOUS else i32(0)
        self.index.load_run(nodes, 0, count)

    def is_held(self, node: i64, holder: i64) -> bool:
        """Return whether a holder has a block on any medium. O(1)."""
        both = self._held[self._word(node, 0, holder)] | self._held[self._word(node, 1, holder)]
        return both & self._bit(holder) != 0

    def _drop_name(self, holder: i64, name: i64, node: i64) -> None:
        self.holdings.remove(holder, name)
        if node == AMBIGUOUS:
            return
        for medium in range(MEDIA):
            self._held[self._word(node, medium, holder)] &= ~self._bit(holder)
        self._unuse(node)

    def _unuse(self, node: i64) -> None:
        """Remove one use of a node. If it has none left, remove it and its unused ancestors. O(nodes removed)."""
        while node != 0:
            self._uses[node] -= 1
            if self._uses[node] > 0:
                return
            self.index.remove(node)
            self._free[self._num_free] = i32(node)
            self._num_free += 1
            self.num_nodes -= 1
            before = i64(self._parent[node])
            if self._child[before] == node:
                self._child[before] = 0
            node = before

    def clear(self, holder: i64) -> None:
        """Remove all blocks of a holder.

        O(names stored since it was last cleared), or O(slots of the table) if these are many. So clearing a small
        holder again and again does not cost more in a large table.
        """
        given = self._recent[holder]
        if given.num_names > FEW_NAMES:
            for name in self.holdings.names_of(holder):
                self._drop_name(holder, name, self.holdings.node_of(holder, name))
        else:
            for chain in given.chains:
                self._forget(holder, chain)
        self._recent[holder] = RecentNames()
        self._shrink()

    def _forget(self, holder: i64, names: vec[i64]) -> None:
        for name in names:
            node = self.holdings.node_of(holder, name)
            if node != 0:
                self._drop_name(holder, name, node)

    # Queries.

    def find_path(self, token_ids: object, request: tuple[object, ...], keys: dict[int, tuple[object, ...]]) -> "Path":
        """Return the nodes of a prompt's full blocks, up to the first that no holder has. O(blocks found).

        Args:
            token_ids: the prompt.
            request: extra keys of the whole request.
            keys: spans by block.

        Raises:
            InvalidArgument: bad tokens.
        """
        prompt = ComparedPrompt(token_ids, self.block_size)
        num_blocks = prompt.num_tokens // self.block_size
        if keys:
            return Path(self.index.find_prompt(Prompt(prompt.words(), prompt.num_tokens, request, keys), num_blocks))
        found = self._follow(prompt, num_blocks, self.index.known_root(request))
        prompt.require_tokens(found * self.block_size)
        return Path(self._nodes[:found])

    def _follow(self, prompt: ComparedPrompt, num_blocks: i64, root: i64) -> i64:
        """Return how many blocks after a root any holder has. Their nodes are in `_nodes`. O(blocks found).

        Most nodes have one child, which is compared with the prompt without hashing, a run at a time; runs double in
        length while they match. If a child differs, the block is looked up.
        """
        if root == NO_CONTENT:
            return 0
        index = self.index
        if num_blocks > i64(len(self._nodes)):
            self._nodes = zeros_i32(int(2 * num_blocks))
        reached: i64 = 0
        node: i64 = 0
        parent = root
        run = TILE_BLOCKS
        while reached < num_blocks:
            last = self._guess(node, reached, min(reached + run, num_blocks))
            equal = self._compare(prompt, reached, last, parent)
            run = 2 * run if equal == reached + run else TILE_BLOCKS
            if equal > reached:
                node = i64(self._nodes[equal - 1])
                parent = index.content_of(node)
            if equal == reached:
                node = self._look_up(prompt.words(), reached, node, parent)
                if node == 0:
                    return reached
                parent = index.content_of(node)
                equal += 1
            reached = equal
        return num_blocks

    def _guess(self, node: i64, first: i64, last: i64) -> i64:
        """Fill `_nodes` with first children, starting after `node`; return the end."""
        nodes, children = self._nodes, self._child
        position = first
        apart: i64 = 0
        before = i64(children[node]) - 1
        while position < last:
            node = i64(children[node])
            if node == 0:
                break
            apart |= node - before ^ 1
            before = node
            nodes[position] = i32(node)
            position += 1
        self._in_one_piece = apart == 0
        return position

    def _compare(self, prompt: ComparedPrompt, first: i64, last: i64, parent: i64) -> i64:
        """Return the position of the first guessed block that differs from the prompt. O(words).

        Nodes are mostly allocated in order, so their rows are one piece of memory, which is compared at once.
        """
        if last == first:
            return first
        if self._in_one_piece and last - first >= FEWEST_AT_ONCE and prompt.memory:
            rows = self.index.rows
            start = int(rows.start_of(i64(self._nodes[first])))
            piece = memoryview(rows.words)[start : start + int((last - first) * rows.num_words)]
            if prompt.memory.startswith(piece, int(first * rows.num_words) * WORD_BYTES):
                return last
        return self.index.verify(self._nodes, prompt.words(), first, last, parent)

    def _look_up(self, words: vec[i64], position: i64, before: i64, parent: i64) -> i64:
        """Return the node of a block after another one (0: after the root `parent`), 0 for none."""
        index = self.index
        chain = index.chain_hash[before] if before > 0 else root_hash(parent)
        index.hash_run(words, position, position + 1, chain)
        node = index.find(words, position * index.rows.num_words, index.hashes[position], parent)
        self._nodes[position] = i32(node)
        return node

    def match(self, path: "Path", rows: HolderRows, best: Lengths) -> Lengths:
        """Return the leading tokens of a path that each holder has. O(blocks + holders).

        Args:
            path: the path.
            rows: for each holder, its row in `best`, -1 for none.
            best: counts by row; those below a holder's result are replaced by it.
        """
        found = Lengths(int(self.num_holders))
        for word in range(self._words):
            self._match_word(path.nodes, word, found.items)
        lengths, size = found.items, i64(self.block_size)
        for place in range(i64(len(lengths))):
            lengths[place] = size * lengths[place]
        for holder in range(self.num_holders):
            if rows.items[holder] >= 0:
                best.raise_to(rows.items[holder], lengths[2 * holder], lengths[2 * holder + 1])
        return found

    def _match_word(self, path: vec[i32], word: i64, lengths: vec[i64]) -> None:
        """Follow the path with 64 holders, given as bits of a word, and set the lengths of those that end before it."""
        held, width = self._held, MEDIA * self._words
        first = word * HOLDERS_A_WORD
        everywhere = self._all_bits[min(self.num_holders - first, HOLDERS_A_WORD)]
        on_gpu = everywhere
        slower = word + self._words
        for position in range(i64(len(path))):
            row = i64(path[position]) * width
            gpu = held[row + word]
            if everywhere & ~gpu != 0:  # otherwise all remaining holders have this block on the GPU
                off_gpu = on_gpu & ~gpu
                missing = everywhere & ~(gpu | held[row + slower])
                self._leave(missing, off_gpu, first, position, lengths)
                everywhere &= ~missing
                on_gpu &= gpu
                if everywhere == 0:
                    return
        self._leave(everywhere, on_gpu, first, i64(len(path)), lengths)

    def _leave(self, left: i64, off_gpu: i64, first: i64, position: i64, lengths: vec[i64]) -> None:
        """Set the lengths of holders, given as bits, whose blocks end here, and of those whose GPU blocks end here."""
        both = left | off_gpu
        bits = self._bits
        holder: i64 = 0
        while both != 0:
            holder = _lowest_bit(both)
            bit = bits[holder]
            at = (first + holder) * MEDIA
            if left & bit != 0:
                lengths[at] = position
            if off_gpu & bit != 0:
                lengths[at + 1] = position
            both &= ~bit

    def child_of(self, node: i64) -> i64:
        """Return a child of a node, or for node 0 a first block; 0 if none is known."""
        return i64(self._child[node])

    def node_before(self, node: i64) -> i64:
        """Return the parent of a node, 0 at the beginning of a prompt."""
        return i64(self._parent[node])

    def num_uses(self, node: i64) -> i64:
        """Return the number of children and holdings of a node."""
        return i64(self._uses[node])

    # Resizing.

    def _grow(self) -> None:
        capacity = 2 * int(self.capacity)
        self.index.move_into(self.index.make_room_for(capacity))
        self.index.roots.limit = NO_LIMIT
        self._parent = grown_i32(self._parent, capacity)
        self._uses = grown_i32(self._uses, capacity)
        self._child = grown_i32(self._child, capacity)
        self._free = grown_i32(self._free, capacity)
        self._held = grown_i64(self._held, capacity * int(MEDIA * self._words))
        self.capacity = capacity

    def _shrink(self) -> None:
        """If a quarter of the nodes is used, rebuild the arrays at half the size. O(nodes), amortized."""
        if 4 * self.num_nodes < self.capacity > FEWEST_NODES:
            self._rebuild(int(self.capacity) // 2)
        elif len(self.index.roots) > 2 * self.capacity:
            self._rebuild(int(self.capacity))

    def _rebuild(self, capacity: int) -> None:
        """Copy all nodes, parents first, and the roots that have children, to new arrays with new numbers."""
        old, held, parents, uses = self.index, self._held, self._parent, self._uses
        width = MEDIA * self._words
        keys_of = old.roots.keys_by_root()
        contents = view_i64(old.identity)[::2][: int(self._next_node)]
        order = np.argsort(contents, kind="stable")[int((contents == 0).sum()) :].tolist()
        moved = zeros_i64(int(self._next_node))
        self._make(capacity)
        self.num_nodes = 0
        for number in order:
            node = i64(number)
            before = i64(parents[node])
            new = self._copy(old, node, before, moved[before], keys_of)
            moved[node] = new
            for word in range(width):
                self._held[new * width + word] = held[node * width + word]
        for node in range(i64(len(moved))):
            if moved[node] > 0:
                self._uses[moved[node]] = uses[node]
        self.holdings.renumber(moved)

    def _copy(
        self, old: PrefixIndex, node: i64, before: i64, new_before: i64, keys_of: dict[int, tuple[object, ...]]
    ) -> i64:
        index = self.index
        parent = old.parent_of(node)
        if before > 0 and parent == old.content_of(before):
            parent = index.content_of(new_before)
            chain = index.chain_hash[new_before]
        else:
            parent = self._copy_root(keys_of[int(parent)], new_before, keys_of)
            chain = root_hash(parent)
        first = old.rows.start_of(node)
        words = old.rows.words[first : first + old.rows.num_words]
        index.hash_run(words, 0, 1, chain)
        return self._new_node(words, 0, new_before, parent, index.hashes[0])

    def _copy_root(self, keys: tuple[object, ...], before: i64, keys_of: dict[int, tuple[object, ...]]) -> i64:
        """Return the new root for keys of a request, or for (content before, spans)."""
        if not keys or not isinstance(keys[0], int):
            return self.index.root(keys)
        follows = self.index.content_of(before) if before > 0 else self.index.root(keys_of[keys[0]])
        return self.index.root((int(follows), keys[1]))

    def num_bytes(self) -> int:
        """Return the bytes of all arrays."""
        arrays = 8 * len(self._held) + 16 * int(self.capacity)
        return arrays + self.holdings.num_bytes() + int(self.capacity) * self.index.bytes_a_block()


class RecentNames:
    """Names that a holder has stored; beyond `FEW_NAMES` only their number."""

    def __init__(self) -> None:
        self.chains: list[vec[i64]] = []
        self.num_names: i64 = 0

    def add(self, chain: vec[i64]) -> None:
        """Add a chain of names. O(1)."""
        self.num_names += i64(len(chain))
        self.chains.append(chain)
        if self.num_names > FEW_NAMES:
            self.chains = []


class Path:
    """The nodes of a prompt's leading blocks."""

    def __init__(self, nodes: vec[i32]) -> None:
        self.nodes = nodes

    def __len__(self) -> int:
        return len(self.nodes)


def _next_with_keys(block_keys: list[tuple[object, ...]], first: i64, last: i64) -> i64:
    """Return the first block from `first` on that has spans, or `last`."""
    if not block_keys:
        return last
    for position in range(first, last):
        if block_keys[position]:
            return position
    return last


def _lowest_bit(bits: i64) -> i64:
    """Return the position of the lowest set bit of a nonzero word, in six steps."""
    place: i64 = 0
    if bits & LOW_32 == 0:
        bits >>= 32
        place = 32
    if bits & LOW_16 == 0:
        bits >>= 16
        place += 16
    if bits & 255 == 0:
        bits >>= 8
        place += 8
    if bits & 15 == 0:
        bits >>= 4
        place += 4
    if bits & 3 == 0:
        bits >>= 2
        place += 2
    return place + 1 - (bits & 1)
