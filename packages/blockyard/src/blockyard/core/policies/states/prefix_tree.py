"""A tree of past prompts, block by block, and the checkpoints in it."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import grown_i64, zeros_i64
from ..parts.keys import Ghosts

ROOT: Final[i64] = 0
NO_CHECKPOINT: Final[i64] = 0
FEWEST_NODES: Final = 1024
MOST_KEYS: Final = 2**40


class PrefixTree:
    """Nodes are token blocks of past prompts, keyed by their chain hash.

    Hashes are not verified: they say where a checkpoint would be useful, and never decide a hit. A node stays while a
    checkpoint stands at it or below it, and otherwise until `max_idle_nodes` later ones have come. 112 bytes a node.

    Attributes:
        key: by node, its chain hash; -1 for a free node.
        parent: by node, the one before it; of a free node, the next free one.
        checkpoint: by node, the checkpoint there, cached or only remembered; 0 for none.
        num_checkpoints: by node, how many cached checkpoints stand at it or below it.
        forgotten: the node that `forget_one` forgot; `ROOT` for none.
    """

    def __init__(self, max_idle_nodes: int) -> None:
        self.max_idle_nodes: i64 = max_idle_nodes
        #: Keys to nodes, in the order of their last request; within one request the last block comes first.
        self._nodes = Ghosts(MOST_KEYS)
        self._num_made: i64 = 1
        self._free: i64 = 0
        self.forgotten: i64 = ROOT
        self.key = zeros_i64(FEWEST_NODES)
        self.parent = zeros_i64(FEWEST_NODES)
        self._num_children = zeros_i64(FEWEST_NODES)
        self.num_checkpoints = zeros_i64(FEWEST_NODES)
        #: By node, the exclusive or of the numbers of these checkpoints: with one of them, its number.
        self._mixed = zeros_i64(FEWEST_NODES)
        self.checkpoint = zeros_i64(FEWEST_NODES)
        #: Links of the nodes with checkpoints: the first child of a node, and its neighbours among its siblings.
        self._below = zeros_i64(FEWEST_NODES)
        self._beside = zeros_i64(FEWEST_NODES)
        self._before = zeros_i64(FEWEST_NODES)

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: i64) -> i64:
        """Return the node of a key, or -1. O(1) expected."""
        return self._nodes.number(key)

    def add(self, key: i64, parent: i64) -> i64:
        """Return the node of a key below `parent`; make it if it is new. O(1) expected and amortised."""
        node = self._nodes.number(key)
        if node > 0:
            return node
        if self._free == 0 and self._num_made == len(self.key):
            self._double()
        node = self._free if self._free != 0 else self._num_made
        self._nodes.remember(key, node)
        if self._free != 0:
            self._free = self.parent[node]
        else:
            self._num_made += 1
        self.key[node] = key
        self.parent[node] = parent
        self._num_children[parent] += 1
        return node

    def _double(self) -> None:
        size = 2 * len(self.key)
        self.parent = grown_i64(self.parent, size)
        self._num_children = grown_i64(self._num_children, size)
        self.num_checkpoints = grown_i64(self.num_checkpoints, size)
        self._mixed = grown_i64(self._mixed, size)
        self.checkpoint = grown_i64(self.checkpoint, size)
        self._below = grown_i64(self._below, size)
        self._beside = grown_i64(self._beside, size)
        self._before = grown_i64(self._before, size)
        # Last, because its length is the room: without memory for all arrays the next call doubles again.
        self.key = grown_i64(self.key, size)

    def walk(self, keys: vec[i64], count: i64, nodes: vec[i64]) -> i64:
        """Fill `nodes` with the nodes of the first keys of a request. Returns how many there are. O(keys) expected.

        Nodes that were made together have consecutive numbers, so the next number is tried before a lookup.
        """
        node = ROOT
        for place in range(count):
            following = node + 1
            if node == ROOT or following >= self._num_made or self.key[following] != keys[place]:
                following = self._nodes.number(keys[place])
                if following < 0:
                    return place
            node = following
            nodes[place] = node
        return count

    def touch(self, nodes: vec[i64], count: i64) -> None:
        """Mark nodes as just used. The last block of a request will be forgotten before the ones above it. O(nodes)."""
        self._nodes.touch_last_first(self.key, nodes, count)

    def forget_one(self) -> i64:
        """Forget the oldest node, unless something needs it. Returns the checkpoint there; 0 for none."""
        key = self._nodes.oldest()
        node = self._nodes.number(key)
        self.forgotten = ROOT
        if self.num_checkpoints[node] > 0 or self._num_children[node] > 0:
            self._nodes.remember(key, node)
            return NO_CHECKPOINT
        number = self.checkpoint[node]
        self.forgotten = node
        self._nodes.take(key)
        self.key[node] = -1
        self._num_children[self.parent[node]] -= 1
        self.checkpoint[node] = NO_CHECKPOINT
        self.parent[node] = self._free
        self._free = node
        return number

    # Checkpoints.

    def insert(self, checkpoint: i64, node: i64) -> i64:
        """Count a checkpoint at `node`. Returns how many blocks only it needs. O(depth)."""
        num_sole: i64 = 0
        while node != ROOT:
            if self.num_checkpoints[node] == 0:
                num_sole += 1
                self._link(node)
            self.num_checkpoints[node] += 1
            self._mixed[node] ^= checkpoint
            node = self.parent[node]
        return num_sole

    def remove(self, checkpoint: i64, node: i64) -> None:
        """Count a checkpoint at `node` no longer. O(depth)."""
        while node != ROOT:
            self.num_checkpoints[node] -= 1
            self._mixed[node] ^= checkpoint
            if self.num_checkpoints[node] == 0:
                self._unlink(node)
            node = self.parent[node]

    def _link(self, node: i64) -> None:
        beside = self._below[self.parent[node]]
        self._below[self.parent[node]] = node
        self._beside[node] = beside
        self._before[node] = ROOT
        if beside != ROOT:
            self._before[beside] = node

    def _unlink(self, node: i64) -> None:
        before, beside = self._before[node], self._beside[node]
        if before == ROOT:
            self._below[self.parent[node]] = beside
        else:
            self._beside[before] = beside
        if beside != ROOT:
            self._before[beside] = before

    def next_needed(self, node: i64, top: i64, goes_down: bool) -> i64:
        """Return the next node with checkpoints at it or below it, in a walk that visits parents first; 0 at the end.

        Args:
            node: the node where the walk stands.
            top: its root, which is not visited.
            goes_down: whether it visits the nodes below `node`.
        """
        if goes_down and self._below[node] != ROOT:
            return self._below[node]
        while node != top:
            if self._beside[node] != ROOT:
                return self._beside[node]
            node = self.parent[node]
        return ROOT

    def sole_checkpoint(self, node: i64) -> i64:
        """Return the only checkpoint that needs `node`, or the first needed node above it; 0 if there are several."""
        while node != ROOT and self.num_checkpoints[node] == 0:
            node = self.parent[node]
        return self._mixed[node] if node != ROOT and self.num_checkpoints[node] == 1 else NO_CHECKPOINT

    def num_sole_nodes(self, node: i64) -> i64:
        """Return how many blocks only the checkpoint at `node` needs. O(depth)."""
        num_sole: i64 = 0
        while node != ROOT and self.num_checkpoints[node] == 1:
            num_sole += 1
            node = self.parent[node]
        return num_sole

    def check(self) -> None:
        """Check that counts agree with links. O(nodes). Raises `InvariantError`."""
        children = [0] * int(self._num_made)
        free = set()
        node = self._free
        while node != 0:
            free.add(int(node))
            node = self.parent[node]
        live = [number for number in range(1, int(self._num_made)) if number not in free]
        for number in live:
            children[int(self.parent[i64(number)])] += 1
        if len(live) != len(self._nodes):
            raise InvariantError(f"states: {len(live)} nodes are live, {len(self._nodes)} have keys")
        for number in live:
            if children[number] != self._num_children[i64(number)] or self.find(self.key[i64(number)]) != number:
                raise InvariantError(f"states: node {number} has {children[number]} children, or is not found")
        needed_below = 0
        needed = [number for number in live if self.num_checkpoints[i64(number)] > 0]
        for number in [int(ROOT), *needed]:
            below = self._below[i64(number)]
            while below != ROOT:
                if self.parent[below] != number or self.num_checkpoints[below] == 0 or needed_below == len(needed):
                    raise InvariantError(f"states: node {below} is linked below node {number}")
                needed_below += 1
                below = self._beside[below]
        if needed_below != len(needed):
            raise InvariantError(f"states: {len(needed)} nodes have checkpoints, {needed_below} are linked")
