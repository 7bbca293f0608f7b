"""Which blocks of a pool belong to checkpoints, and which hold the keys and values under them."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64
from .checkpoint import Checkpoint
from .prefix_tree import NO_CHECKPOINT, ROOT, PrefixTree
from .request_record import RequestRecord

#: No block, and no record of `SaveRecords`.
NONE: Final[i64] = 0


class BlockMap:
    """Maps checkpoints, and the prefixes that they need, to pool blocks.

    Blocks with keys and values stand at nodes of the tree, those of one node oldest first. 64 bytes
    a block.

    Attributes:
        checkpoint_of: by block, the number of the checkpoint that it is a part of; 0 for none.
        output_of: by block, the record in `SaveRecords` of the checkpoint that it is a part of, if that is the latest
            one of a running output, which the registry does not have yet; 0 for none.
        node_of: by block, the node whose keys and values it holds; `ROOT` for none.
    """

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        self.tree = tree
        self.checkpoint_of = zeros_i64(num_blocks)
        self.output_of = zeros_i64(num_blocks)
        self.node_of = zeros_i64(num_blocks)
        self._group = zeros_i64(num_blocks)
        self._next = zeros_i64(num_blocks)
        self._before = zeros_i64(num_blocks)
        #: By node, its first and its last block.
        self._first = zeros_i64(len(tree.key))
        self._last = zeros_i64(len(tree.key))
        #: By node, the token block that stood for it last.
        self._token_block = zeros_i64(len(tree.key))

    # Keys and values.

    def add_block(self, block: i64, node: i64, group: i64) -> None:
        """Record that `block` holds the keys and values of a node for a layer group. O(1) amortised."""
        self.remove_block(block)
        self._make_node_room(node)
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

    def _make_node_room(self, node: i64) -> None:
        if node >= len(self._first):
            size = len(self.tree.key)
            last = grown_i64(self._last, size)
            self._token_block = grown_i64(self._token_block, size)
            self._first, self._last = grown_i64(self._first, size), last

    def remove_block(self, block: i64) -> None:
        """Record that a block holds no keys and values of a node. O(1)."""
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

    def forget_node(self, node: i64) -> None:
        """Remove all blocks of a node that the tree forgets. O(those)."""
        if node < len(self._first):
            while self._first[node] != NONE:
                self.remove_block(self._first[node])

    def blocks_at(self, node: i64) -> list[int]:
        """Return the blocks that hold the keys and values of a node."""
        blocks: list[int] = []
        block = self._first[node] if node < len(self._first) else NONE
        while block != NONE:
            blocks.append(int(block))
            block = self._next[block]
        return blocks

    def set_token_blocks(self, request: RequestRecord, blocks: vec[i32], first: i64, count: i64) -> None:
        """Record `blocks[first:first + count]` as the token blocks of a request. O(blocks), and amortised O(nodes)."""
        self._make_node_room(i64(len(self.tree.key)) - 1)
        token_block = self._token_block
        nodes = request.nodes
        keys = request.keys
        tree_keys = self.tree.key
        for place in range(min(count, request.num_nodes)):
            node = nodes[place]
            if tree_keys[node] == keys[place]:
                token_block[node] = i64(blocks[first + place])

    def token_block_at(self, node: i64) -> i64:
        """Return the token block that stood for a node last; 0 for none."""
        return self._token_block[node] if node < len(self._token_block) else NONE

    # Checkpoints.

    def is_needed(self, block: i64) -> bool:
        """Return whether a checkpoint needs the block, and no older one of the same content. O(blocks of its node)."""
        if self.checkpoint_of[block] != NO_CHECKPOINT or self.output_of[block] != NONE:
            return True
        node = self.node_of[block]
        if node == ROOT or self.tree.num_checkpoints[node] == 0:
            return False
        before = self._before[block]
        while before != NONE:
            if self._group[before] == self._group[block]:
                return False
            before = self._before[before]
        return True

    def set_checkpoint(self, checkpoint: Checkpoint, blocks: list[int]) -> None:
        """Record the blocks of a checkpoint that the registry has."""
        checkpoint.blocks = blocks
        for block in blocks:
            self.checkpoint_of[i64(block)] = checkpoint.number
            self.output_of[i64(block)] = NONE

    def set_output(self, blocks: vec[i32], first: i64, count: i64, record: i64) -> None:
        """Record `blocks[first:first + count]` as those of the latest checkpoint of an output; 0 for no longer."""
        for place in range(first, first + count):
            self.output_of[i64(blocks[place])] = record

    def remove_part(self, block: i64) -> i64:
        """Record that a block lost its content. Returns the checkpoint that it was a part of; 0 for none. O(1)."""
        number = self.checkpoint_of[block]
        self.checkpoint_of[block] = NO_CHECKPOINT
        self.output_of[block] = NONE
        self.remove_block(block)
        return number

    def release_blocks(self, checkpoint: Checkpoint) -> list[int]:
        """Return the blocks that only a dropped checkpoint needed: its own first, then those of the longest prefix."""
        blocks: list[int] = []
        for block in checkpoint.blocks:
            if self.checkpoint_of[i64(block)] == checkpoint.number:
                self.checkpoint_of[i64(block)] = NO_CHECKPOINT
                blocks.append(block)
        tree = self.tree
        node = checkpoint.node
        while node != ROOT and tree.num_checkpoints[node] == 0:
            blocks += self.blocks_at(node)
            node = tree.parent[node]
        return blocks

    # Size.

    def clear(self) -> None:
        """Remove all blocks. O(blocks + nodes)."""
        clear_i64(self.checkpoint_of)
        clear_i64(self.output_of)
        clear_i64(self.node_of)
        clear_i64(self._first)
        clear_i64(self._last)

    def grow(self, num_blocks: int) -> None:
        """Make room for blocks up to `num_blocks - 1`. If it raises MemoryError, nothing has changed."""
        if num_blocks <= len(self.checkpoint_of):
            return
        checkpoint_of = grown_i64(self.checkpoint_of, num_blocks)
        output_of = grown_i64(self.output_of, num_blocks)
        node_of = grown_i64(self.node_of, num_blocks)
        group = grown_i64(self._group, num_blocks)
        after = grown_i64(self._next, num_blocks)
        before = grown_i64(self._before, num_blocks)
        self.checkpoint_of, self.output_of, self.node_of = checkpoint_of, output_of, node_of
        self._group, self._next, self._before = group, after, before

    def check(self) -> None:
        """Compare the lists of blocks with their nodes. O(blocks + nodes). Raises `InvariantError`."""
        num_linked = 0
        for node in range(1, i64(len(self._first))):
            for block in self.blocks_at(node):
                num_linked += 1
                if self.node_of[i64(block)] != node:
                    raise InvariantError(f"states: block {block} is listed at node {node}, and is not there")
        num_there = sum([1 for block in range(len(self.node_of)) if self.node_of[i64(block)] != ROOT])
        if num_linked != num_there:
            raise InvariantError(f"states: {num_there} blocks have a node, but the nodes list {num_linked}")
        for block in range(len(self.output_of)):
            if self.output_of[i64(block)] != NONE and self.checkpoint_of[i64(block)] != NO_CHECKPOINT:
                raise InvariantError(f"states: block {block} is a part of two checkpoints")
