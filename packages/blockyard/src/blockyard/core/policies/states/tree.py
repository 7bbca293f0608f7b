"""The contents of prompts are a tree, remembered by their keys, in which states stand."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import grown_i64, zeros_i64
from ..parts.keys import Ghosts

ROOT: Final[i64] = 0
NO_STATE: Final[i64] = 0
FEWEST_NODES: Final = 1024
MOST_KEYS: Final = 2**40


class StateTree:
    """Each node is a token block that is remembered, known by the chain hash of its prompt up to there.

    Hashes are taken on trust: they say where a state would be of use, never what is hit. A node is remembered while a
    state stands at it or below it, and else until `num_remembered` later ones came. 112 bytes a node.
    """

    def __init__(self, num_remembered: int) -> None:
        self.num_remembered: i64 = num_remembered
        #: Keys to nodes, in the order in which requests last passed, of one request the last block first.
        self._nodes = Ghosts(MOST_KEYS)
        self._num_made: i64 = 1
        self._free: i64 = 0
        #: The node that was forgotten last.
        self.forgotten: i64 = ROOT
        self.key = zeros_i64(FEWEST_NODES)
        #: The node before; of a free one, the next free one.
        self.parent = zeros_i64(FEWEST_NODES)
        self._num_children = zeros_i64(FEWEST_NODES)
        #: How many states stand at a node or below it; the numbers of them all, mixed by exclusive or.
        self.num_states = zeros_i64(FEWEST_NODES)
        self._mixed = zeros_i64(FEWEST_NODES)
        #: The state at a node, kept or remembered.
        self.state = zeros_i64(FEWEST_NODES)
        #: Of the nodes that states stand at or below: the first one right below a node, and its neighbours there.
        self._below = zeros_i64(FEWEST_NODES)
        self._beside = zeros_i64(FEWEST_NODES)
        self._before = zeros_i64(FEWEST_NODES)

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: i64) -> i64:
        """Return the node of a key, or -1. O(1) expected."""
        return self._nodes.number(key)

    def add(self, key: i64, parent: i64) -> i64:
        """Return the node of a key behind `parent`, made if need be. O(1) expected and amortised."""
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
        self.num_states = grown_i64(self.num_states, size)
        self._mixed = grown_i64(self._mixed, size)
        self.state = grown_i64(self.state, size)
        self._below = grown_i64(self._below, size)
        self._beside = grown_i64(self._beside, size)
        self._before = grown_i64(self._before, size)
        # Its length says how many there are: without memory for all of them they are made room for again.
        self.key = grown_i64(self.key, size)

    def walk(self, keys: vec[i64], count: i64, nodes: vec[i64]) -> i64:
        """Fill `nodes` with those of the first keys of a request; returns how many are remembered. O(keys) expected.

        Nodes that were made together have numbers in a row, so the next number is tried before the key is looked up.
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
        """Note that a request passed these nodes; the last one first, so that it is forgotten first. O(nodes)."""
        self._nodes.touch_last_first(self.key, nodes, count)

    def forget_one(self) -> i64:
        """Forget the oldest node, if nothing needs it. Returns the state that is forgotten with it, or 0."""
        key = self._nodes.oldest()
        node = self._nodes.number(key)
        self.forgotten = ROOT
        if self.num_states[node] > 0 or self._num_children[node] > 0:
            self._nodes.remember(key, node)
            return NO_STATE
        gone = self.state[node]
        self.forgotten = node
        self._nodes.take(key)
        self.key[node] = -1
        self._num_children[self.parent[node]] -= 1
        self.state[node] = NO_STATE
        self.parent[node] = self._free
        self._free = node
        return gone

    # States. The tokens that are counted are blocks here.

    def place(self, state: i64, node: i64) -> i64:
        """A state stands at `node` from now on. Returns how many blocks only it needs. O(depth)."""
        alone: i64 = 0
        while node != ROOT:
            if self.num_states[node] == 0:
                alone += 1
                self._link(node)
            self.num_states[node] += 1
            self._mixed[node] ^= state
            node = self.parent[node]
        return alone

    def remove(self, state: i64, node: i64) -> None:
        """It does not any more. O(depth)."""
        while node != ROOT:
            self.num_states[node] -= 1
            self._mixed[node] ^= state
            if self.num_states[node] == 0:
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
        """Return the node after `node`, of those below `top` that states stand at or below; 0 after the last.

        goes_down: whether the nodes below `node` are wanted too. Each node comes before those below it.
        """
        if goes_down and self._below[node] != ROOT:
            return self._below[node]
        while node != top:
            if self._beside[node] != ROOT:
                return self._beside[node]
            node = self.parent[node]
        return ROOT

    def lone(self, node: i64) -> i64:
        """Return the state that alone needs `node` or the first node above it that any needs; 0 if several do."""
        while node != ROOT and self.num_states[node] == 0:
            node = self.parent[node]
        return self._mixed[node] if node != ROOT and self.num_states[node] == 1 else NO_STATE

    def num_alone(self, node: i64) -> i64:
        """Return how many blocks from a state's node up only it needs. O(depth)."""
        alone: i64 = 0
        while node != ROOT and self.num_states[node] == 1:
            alone += 1
            node = self.parent[node]
        return alone

    def check(self) -> None:
        """Counts agree with links. O(nodes). Raises `InvariantError`."""
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
        needed = [number for number in live if self.num_states[i64(number)] > 0]
        for number in [int(ROOT), *needed]:
            below = self._below[i64(number)]
            while below != ROOT:
                if self.parent[below] != number or self.num_states[below] == 0 or needed_below == len(needed):
                    raise InvariantError(f"states: node {below} is linked below node {number}")
                needed_below += 1
                below = self._beside[below]
        if needed_below != len(needed):
            raise InvariantError(f"states: {len(needed)} nodes have states, {needed_below} are linked")
