"""A shelf knows which blocks of a pool are what a book judges: parts of states, and keys and values under them."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from .book import Shelf, StateBook, Visit
from .state import State
from .tree import ROOT

NONE: Final[i64] = 0


class StateShelf(Shelf):
    """Blocks of keys and values stand at the nodes of the book's tree, the oldest of a node first.

    part_of: by block, the number of the state that it is a part of; one below 0 of a state that the book does not know
    yet, the latest one in the output of a sequence that runs; 0 for none. 56 bytes a block.
    """

    def __init__(self, book: StateBook, num_blocks: int) -> None:
        self.book = book
        self.part_of = zeros_i64(num_blocks)
        self.node_of = zeros_i64(num_blocks)
        self._group = zeros_i64(num_blocks)
        self._next = zeros_i64(num_blocks)
        self._before = zeros_i64(num_blocks)
        #: By node, its first and its last block.
        self._first = zeros_i64(len(book.tree.key))
        self._last = zeros_i64(len(book.tree.key))
        #: By node, the token block that stands for it, if it still does.
        self._token = zeros_i64(len(book.tree.key))
        book.shelf = self

    def put(self, block: i64, node: i64, group: i64) -> None:
        """`block` holds the keys and values of a node for a layer group. O(1) amortised."""
        self.take(block)
        self._make_room(node)
        last = self._last[node]
        self.node_of[block] = node
        self._group[block] = group
        self._before[block] = last
        self._next[block] = NONE
        self._last[node] = block
        if last == NONE:
            self._first[node] = block
        else:
            self._next[last] = block

    def _make_room(self, node: i64) -> None:
        if node >= len(self._first):
            size = len(self.book.tree.key)
            last = grown_i64(self._last, size)
            self._token = grown_i64(self._token, size)
            self._first, self._last = grown_i64(self._first, size), last

    def put_tokens(self, visit: Visit, blocks: vec[i32], first: i64, count: i64) -> None:
        """The token blocks `blocks[first:first + count]` hold those of a request. O(blocks), and amortised O(nodes)."""
        self._make_room(i64(len(self.book.tree.key)) - 1)
        token = self._token
        nodes = visit.nodes
        keys = visit.keys
        tree_keys = self.book.tree.key
        for place in range(min(count, visit.num_nodes)):
            node = nodes[place]
            if tree_keys[node] == keys[place]:
                token[node] = i64(blocks[first + place])

    def token_at(self, node: i64) -> i64:
        """Return the token block that was put there last; 0 for none."""
        return self._token[node] if node < len(self._token) else NONE

    def take(self, block: i64) -> None:
        """It does not any more. O(1)."""
        node = self.node_of[block]
        if node == ROOT:
            return
        before, after = self._before[block], self._next[block]
        self.node_of[block] = ROOT
        if before == NONE:
            self._first[node] = after
        else:
            self._next[before] = after
        if after == NONE:
            self._last[node] = before
        else:
            self._before[after] = before

    def forget(self, node: i64) -> None:
        """A node is forgotten, and with it what stood there."""
        if node < len(self._first):
            while self._first[node] != NONE:
                self.take(self._first[node])

    def at(self, node: i64) -> list[int]:
        """Return the blocks of a node."""
        blocks: list[int] = []
        block = self._first[node] if node < len(self._first) else NONE
        while block != NONE:
            blocks.append(int(block))
            block = self._next[block]
        return blocks

    def is_needed(self, block: i64) -> bool:
        """Return whether a state stands behind a block, and no older block has the same. O(blocks of its node)."""
        if self.part_of[block] != NONE:
            return True
        node = self.node_of[block]
        if node == ROOT or self.book.tree.num_states[node] == 0:
            return False
        before = self._before[block]
        while before != NONE:
            if self._group[before] == self._group[block]:
                return False
            before = self._before[before]
        return True

    def own(self, blocks: list[int], number: i64) -> None:
        """These blocks are a state's; no state's with number 0."""
        for block in blocks:
            self.part_of[i64(block)] = number

    def own_run(self, blocks: vec[i32], first: i64, count: i64, number: i64) -> None:
        """The same for `blocks[first:first + count]`."""
        for place in range(first, first + count):
            self.part_of[i64(blocks[place])] = number

    def no_longer_needed(self, state: State) -> list[int]:
        """Return the blocks that only this state needed, which went: its parts, then the longest prefix first."""
        blocks: list[int] = []
        for block in state.parts:
            if self.part_of[i64(block)] == state.number:
                self.part_of[i64(block)] = NONE
                blocks.append(block)
        tree = self.book.tree
        node = state.node
        while node != ROOT and tree.num_states[node] == 0:
            blocks += self.at(node)
            node = tree.parent[node]
        return blocks

    def clear(self) -> None:
        """No block holds anything any more. O(blocks + nodes)."""
        clear_i64(self.part_of)
        clear_i64(self.node_of)
        clear_i64(self._first)
        clear_i64(self._last)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1. Raises MemoryError; nothing has changed then."""
        if num_blocks <= len(self.part_of):
            return
        part_of = grown_i64(self.part_of, num_blocks)
        node_of = grown_i64(self.node_of, num_blocks)
        group = grown_i64(self._group, num_blocks)
        after = grown_i64(self._next, num_blocks)
        before = grown_i64(self._before, num_blocks)
        self.part_of, self.node_of, self._group, self._next, self._before = part_of, node_of, group, after, before

    def check(self) -> None:
        """Raise `InvariantError` where lists and nodes disagree. O(blocks + nodes)."""
        num_linked = 0
        for node in range(1, i64(len(self._first))):
            for block in self.at(node):
                num_linked += 1
                if self.node_of[i64(block)] != node:
                    raise InvariantError(f"states: block {block} is listed at node {node}, and is not there")
        num_there = sum([1 for block in range(len(self.node_of)) if self.node_of[i64(block)] != ROOT])
        if num_linked != num_there:
            raise InvariantError(f"states: {num_there} blocks are at nodes, {num_linked} are listed there")
