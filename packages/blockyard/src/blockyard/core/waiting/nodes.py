"""The nodes of the tree of waiting prompts: edges, which hold blocks, and tickets, which hold requests."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...ids import NO_CONTENT
from ..arrays import zeros_i64
from ..index.prompt import Prompt

#: An order key is a number of tokens times this, plus the ticket: fewer tokens first, then the earlier ticket.
TICKETS: Final[i64] = 4294967296
#: More tokens than a prompt can have.
MOST_TOKENS: Final[i64] = 134217728
#: `Edge.under` of the edges at the top of the tree.
TOP: Final[i64] = -1
#: The key of a node without tickets.
NEVER: Final[i64] = 4611686018427387903


class Entry:
    """Position of a node in one of the heaps of the edge above it."""

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.key: i64 = 0
        self.place: i64 = -1
        #: The heap's `epoch` when the entry was added; it is in the heap only while they are equal.
        self.epoch: i64 = 0


class Heap:
    """A binary heap of entries, lowest key first. Operations other than `make_room` allocate nothing."""

    def __init__(self) -> None:
        self.items: list[Entry | None] = []
        self.count: i64 = 0
        self.epoch: i64 = 1

    def make_room(self, count: i64) -> None:
        """Make room for `count` entries."""
        if count > i64(len(self.items)):
            more: list[Entry | None] = [None] * int(max(count, 2 * i64(len(self.items))) - i64(len(self.items)))
            self.items.extend(more)

    def at(self, place: i64) -> Entry:
        """Return the entry at `place`, below `count`."""
        entry = self.items[place]
        if entry is None:
            raise IndexError(int(place))
        return entry

    def first_key(self) -> i64:
        """Return the lowest key; NEVER if the heap is empty."""
        return self.at(0).key if self.count > 0 else NEVER

    def holds(self, entry: Entry) -> bool:
        """Return whether the entry is in this heap, given that it belongs to a child of the heap's edge."""
        return entry.place >= 0 and entry.epoch == self.epoch

    def put(self, entry: Entry, key: i64) -> None:
        """Add an entry, or change its key. O(log entries)."""
        if not self.holds(entry):
            self._forget(entry)
            entry.epoch = self.epoch
            entry.place = self.count
            self.count += 1
            entry.key = key
            self._up(entry, entry.place)
            return
        before = entry.key
        entry.key = key
        if key < before:
            self._up(entry, entry.place)
        elif key > before:
            self._down(entry, entry.place)

    def take(self, entry: Entry) -> None:
        """Remove an entry, if it is in the heap. O(log entries)."""
        if not self.holds(entry):
            self._forget(entry)
            return
        place = entry.place
        entry.place = -1
        self.count -= 1
        last = self.at(self.count)
        self.items[self.count] = None
        if last is not entry:
            self._up(last, place)
            self._down(last, last.place)

    def clear(self) -> None:
        """Remove all entries. O(1): they stay in the list until others overwrite them."""
        self.count = 0
        self.epoch += 1

    def _forget(self, entry: Entry) -> None:
        """Drop the list's reference to an entry that `clear` has removed."""
        if self.count <= entry.place < i64(len(self.items)) and self.items[entry.place] is entry:
            self.items[entry.place] = None
        entry.place = -1

    def _up(self, entry: Entry, place: i64) -> None:
        while place > 0:
            above = self.at((place - 1) >> 1)
            if above.key <= entry.key:
                break
            self.items[place] = above
            above.place = place
            place = (place - 1) >> 1
        self.items[place] = entry
        entry.place = place

    def _down(self, entry: Entry, place: i64) -> None:
        child = 2 * place + 1
        while child < self.count:
            lower = self.at(child)
            if child + 1 < self.count:
                other = self.at(child + 1)
                if other.key < lower.key:
                    lower = other
                    child += 1
            if entry.key <= lower.key:
                break
            self.items[place] = lower
            lower.place = place
            place = child
            child = 2 * place + 1
        self.items[place] = entry
        entry.place = place


class Node:
    """A ticket or an edge.

    Attributes:
        up: the edge above.
        light: entry in the heap `up.lightest`, whose key is the node's order key if nothing were cached.
        warm: entry in the heap `up.warmest`, whose key is its order key if all blocks above are cached.
    """

    def __init__(self) -> None:
        self.up: Edge | None = None
        self.light = Entry(self)
        self.warm = Entry(self)

    def detach(self) -> None:
        """Break the reference cycles of a node that was removed from the tree."""
        self.up = None
        self.light.node = NOBODY
        self.warm.node = NOBODY


NOBODY: Final = Node()


class Edge(Node):
    """Consecutive blocks that the same waiting prompts have, from where they branch off to where they branch again.

    A *gate* has no blocks: it stands for a root, at the top of the tree for extra keys, elsewhere for the spans of the
    block after it. It is full while the root exists.

    Attributes:
        serial: number of the edge.
        words: packed tokens; those of the edge begin at `first_word`.
        start: position of its first block in the prompts.
        length: number of its blocks.
        contents: content of each block that is or was cached; below 0 while it is pending; 0 for none. Exactly these
            are in the tree's table of contents. A gate has none.
        filled: how many of the first blocks are indexed.
        computed: how many of the first blocks are computed.
        under: content above the first block when it was cached. If that is no longer `up.last()`, `filled` is void.
        root: root of a gate, 0 if it does not exist.
        keys: extra keys or spans of a gate.
        gates: gates directly below, by spans.
        branch_hash: key in the tree's table of branches.
        is_changed: whether the tree has noted it for `settle`.
        lightest: all nodes directly below.
        warmest: of these, edges whose blocks were cached since this edge is full. Empty while it is not full.
    """

    def __init__(self, serial: i64, words: vec[i64], start: i64, length: i64, is_gate: bool) -> None:
        super().__init__()
        self.serial = serial
        self.words = words
        self.first_word: i64 = 0
        self.start = start
        self.length = length
        self.contents = zeros_i64(int(length))
        self.filled: i64 = 0
        self.computed: i64 = 0
        self.under: i64 = NO_CONTENT
        self.is_gate = is_gate
        self.root: i64 = NO_CONTENT
        self.keys: object = None
        self.gates: dict[object, Edge] = {}
        self.branch_hash: i64 = 0
        self.is_changed = False
        self.lightest = Heap()
        self.warmest = Heap()

    def is_full(self) -> bool:
        """Return whether all blocks are indexed; for a gate, whether the root exists."""
        return self.root != NO_CONTENT if self.is_gate else self.filled == self.length

    def last(self) -> i64:
        """Return the content at the end of a full edge."""
        if self.is_gate:
            return self.root
        content = self.contents[self.length - 1]
        return content if content > 0 else -content

    def is_live(self) -> bool:
        """Return whether `filled` is true: the edge above is full, with the content under which this one was cached."""
        up = self.up
        return up is None or (up.is_full() and self.under == up.last())

    def make_room(self) -> None:
        """Make room for one more node below."""
        self.lightest.make_room(self.lightest.count + 1)
        self.warmest.make_room(self.lightest.count + 1)

    def best(self, block_cost: i64) -> i64:
        """Return the lowest order key below, if all blocks above are cached. `block_cost`: a block's tokens in keys."""
        key = self.lightest.first_key() - (self.start + self.filled) * block_cost
        return min(key, self.warmest.first_key()) if self.warmest.count > 0 else key


class Ticket(Node):
    """A waiting request.

    Attributes:
        number: the caller's ticket.
        num_tokens: tokens of the prompt.
        tail: packed tokens after the blocks that can be hit.
        keys: extra keys of the prompt.
        spans: its spans by block.
        num_seqs: sequences that it will be forked into.
        weight: added to the missing tokens in the order.
        session: name of its session, or None.
        max_new_tokens: most tokens of the answer.
        arrived: time of its arrival.
        asked_index: version of the index when the manager was last asked for its hit; -1 for never.
        asked_sequences: version of the sequences then.
        num_missing: tokens that it lacks; exact after `WaitingQueue.missing`.
        num_joining: tokens of its hit that a running sequence is computing.
        work: seconds to compute it if nothing is cached.
        work_ahead: the same of it and the requests ahead, when it was added.
        entered: time from which the lane counts it.
        drained: the lane's `drained` then.
        service: seconds to compute its missing tokens when `next` last counted them.
        generation: how often the prefix cache had been reset when it was admitted.
    """

    def __init__(self, number: i64, prompt: Prompt, tail: vec[i64], num_seqs: i64) -> None:
        super().__init__()
        self.number = number
        self.num_tokens = prompt.num_tokens
        self.tail = tail
        self.keys = prompt.keys
        self.spans = prompt.spans
        self.num_seqs = num_seqs
        self.weight: i64 = 0
        self.session: str | None = None
        self.max_new_tokens: i64 = 0
        self.arrived = 0.0
        self.asked_index: i64 = -1
        self.asked_sequences: i64 = -1
        self.num_missing: i64 = 0
        self.num_joining: i64 = 0
        self.work = 0.0
        self.work_ahead = 0.0
        self.entered = 0.0
        self.drained = 0.0
        self.service = 0.0
        self.generation: i64 = 0

    def light_key(self) -> i64:
        """Return the order key if nothing is cached."""
        return (self.num_tokens + self.weight) * TICKETS + self.number % TICKETS
