"""The tree of waiting prompts, kept up to date with the index."""

import heapq
from collections.abc import Iterator

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ...ids import NO_CONTENT
from ..arrays import zeros_i64
from ..index.hashing import hash_rows, root_hash
from ..index.observer import IndexObserver
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Prompt
from .nodes import TICKETS, TOP, Edge, Entry, Heap, Ticket
from .place_table import PlaceTable


class _Run:
    """The entries of a heap from one place down, whose order keys are lower by `cost` than in the heap.

    `edge` is the edge of the heap if hits may go on below it; its nodes in `warmest` have their place there.
    """

    def __init__(self, heap: Heap, place: i64, cost: i64, edge: Edge | None) -> None:
        self.heap = heap
        self.place = place
        self.cost = cost
        self.edge = edge

    def entry(self) -> Entry:
        return self.heap.at(self.place)


class PromptTree(IndexObserver):
    """A radix tree of the full blocks of waiting prompts, which knows how many leading ones of each are indexed.

    Prompts with a common beginning share its edges, so that a block that is indexed or removed is one step, however
    many prompts wait for it: `contents` maps the content before a block to its edge. Edges below one that loses a
    block are not visited. It can never be reached again, because content ids are not reused: an edge is live only while
    the content above it is the one under which it was filled (`Edge.is_live`).

    Order keys are kept at every edge (`Edge.best`). Changes of the index only note the edges that have changed;
    `settle` passes these up, each as far as it changes the best key, before the order is read.

    The calls of an observer allocate nothing; `add` makes all room first.
    """

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self.index = index
        self.block_size: i64 = block_size
        #: A block's tokens in order keys.
        self.block_cost: i64 = self.block_size * TICKETS
        #: By content, or root: the edge that has it, and its position in the prompts; a root's is the one before.
        self.contents = PlaceTable()
        #: By hash of the first block and the edge above: edges.
        self.branches = PlaceTable()
        self._keys = index._keys
        self._hash = zeros_i64(1)
        self._last_serial: i64 = 0
        self._num_runs: i64 = 0
        self.num_places: i64 = 0
        self.num_edges: i64 = 0
        self.top = Edge(0, zeros_i64(0), 0, 0, True)
        self.top.root = TOP
        #: Edges below which the order has changed.
        self._changed: list[Edge | None] = []
        self._num_changed: i64 = 0
        #: Changes of edges so far, for tests of the cost.
        self.num_steps: i64 = 0

    # Changes of the index.

    def indexed(self, blocks: vec[i32], first: i64, last: i64) -> None:
        identity = self.index.identity
        position = first
        while position < last:
            block = i64(blocks[position])
            self.indexed_one(block)
            slot = self.contents.find(identity[2 * block])
            position += 1
            if slot < 0:
                # Nobody waits for it, so nobody waits for those under it.
                return
            edge = self.contents.edges[slot]
            if edge is not None and edge.start + edge.filled == self.contents.places[slot] + 1:
                position = self._fill_run(edge, blocks, position, last)

    def _fill_run(self, edge: Edge, blocks: vec[i32], position: i64, last: i64) -> i64:
        """Fill an edge with `blocks[position:last]`, as far as it waits for them; return the first other position."""
        before = edge.filled
        while position < last and edge.filled < edge.length:
            block = i64(blocks[position])
            if not self._equal(edge, edge.filled, self.index.rows.words, self.index.rows.start_of(block)):
                break
            self._fill(edge, self.index.identity[2 * block], self.index.owner[block] != 0)
            position += 1
        if edge.filled > before:
            self._note(edge)
        return position

    def indexed_one(self, block: i64) -> None:
        parent = self.index.identity[2 * block + 1]
        slot = self.contents.find(parent)
        if slot < 0:
            return
        edge = self.contents.edges[slot]
        if edge is not None:
            self._extend(edge, self.contents.places[slot] + 1, parent, block)

    def _extend(self, edge: Edge, position: i64, parent: i64, block: i64) -> None:
        """Note the content of `block` at a position of the prompts, if these wait for it."""
        words = self.index.rows.words
        row = self.index.rows.start_of(block)
        if position == edge.start + edge.length:
            if not edge.is_full() or edge.last() != parent:
                return
            below = self.branch(edge, words, row)
            if below is None:
                return
            edge = below
            if edge.under != parent:
                self._restart(edge, parent)
        elif not self._equal(edge, position - edge.start, words, row):
            return
        if edge.filled == position - edge.start:
            self._fill(edge, self.index.identity[2 * block], self.index.owner[block] != 0)
            self._note(edge)

    def _restart(self, edge: Edge, under: i64) -> None:
        edge.under = under
        edge.filled = 0
        edge.computed = 0
        edge.warmest.clear()

    def _fill(self, edge: Edge, content: i64, is_pending: bool) -> None:
        """Set the content of the first block of an edge that is not indexed."""
        place = edge.filled
        contents = edge.contents
        if contents[place] != 0:
            self._forget(edge, place)
        self.contents.insert(content, edge, edge.start + place)
        contents[place] = -content if is_pending else content
        edge.filled = place + 1
        if not is_pending and edge.computed == place:
            edge.computed = place + 1
        self.num_steps += 1

    def _forget(self, edge: Edge, place: i64) -> None:
        """Remove the content at a place of an edge, if any, from the table."""
        content = edge.contents[place]
        if content != 0:
            slot = self.contents.find_entry(content if content > 0 else -content, edge)
            self.contents.remove(slot)
            edge.contents[place] = 0

    def changed(self, block: i64) -> None:
        index = self.index
        content = index.identity[2 * block]
        slot = self.contents.find(content)
        if slot < 0:
            return
        edge = self.contents.edges[slot]
        if edge is None:
            return
        place = self.contents.places[slot] - edge.start
        oldest = index.representative(content, index.chain_hash[block], block)
        is_pending = index.owner[oldest] != 0
        edge.contents[place] = -content if is_pending else content
        if is_pending:
            edge.computed = min(edge.computed, place)
        while edge.computed < edge.filled and edge.contents[edge.computed] > 0:
            edge.computed += 1
        self.num_steps += 1

    def removed(self, content: i64) -> None:
        slot = self.contents.find(content)
        if slot < 0:
            return
        edge = self.contents.edges[slot]
        if edge is not None:
            place = self.contents.places[slot] - edge.start
            self.contents.remove(slot)
            edge.contents[place] = 0
            self._cut(edge, place)

    def _cut(self, edge: Edge, place: i64) -> None:
        """Note that an edge's blocks from `place` on are no longer found. O(1)."""
        if place < edge.filled:
            edge.filled = place
            edge.computed = min(edge.computed, place)
            edge.warmest.clear()
            self.num_steps += 1
            self._note(edge)

    def root_made(self, root: i64, keys: tuple[object, ...]) -> None:
        gate = self.top.gates.get(keys)
        if gate is None and len(keys) == 2 and type(keys[0]) is int:
            gate = self._gate_under(keys[0], keys[1])
        if gate is not None:
            self._open(gate, root)
            self._note(gate)

    def _gate_under(self, content: i64, spans: object) -> Edge | None:
        """Return the gate of the prompts that wait for the root of (content, spans)."""
        slot = self.contents.find(content)
        if slot < 0:
            return None
        edge = self.contents.edges[slot]
        if edge is None or not edge.is_full() or edge.last() != content:
            return None
        return edge.gates.get(spans)

    def _open(self, gate: Edge, root: i64) -> None:
        self._close(gate)
        up = gate.up
        gate.under = up.last() if up is not None else NO_CONTENT
        gate.root = root
        self.contents.insert(root, gate, gate.start - 1)
        self.num_steps += 1

    def _close(self, gate: Edge) -> None:
        """Note that a gate's root is forgotten, if it has one."""
        if gate.root != NO_CONTENT:
            self.contents.remove(self.contents.find_entry(gate.root, gate))
            gate.root = NO_CONTENT
            gate.warmest.clear()

    def root_lost(self, root: i64) -> None:
        slot = self.contents.find(root)
        edge = self.contents.edges[slot] if slot >= 0 else None
        if edge is not None:
            self._close(edge)
            self._note(edge)

    def cleared(self) -> None:
        for gate in self.top.gates.values():
            self._close(gate)
            self._note(gate)

    # The order.

    def _note(self, edge: Edge) -> None:
        """Remember that the order below an edge has changed. O(1)."""
        if not edge.is_changed:
            edge.is_changed = True
            self._changed[self._num_changed] = edge
            self._num_changed += 1

    def settle(self) -> None:
        """Bring the order up to date. O(edges that have changed since the last time * edges above * log(branches))."""
        for number in range(self._num_changed):
            edge = self._changed[number]
            self._changed[number] = None
            if edge is not None:
                edge.is_changed = False
                self._update(edge)
        self._num_changed = 0

    def _update(self, edge: Edge) -> None:
        """Pass a change of the cached blocks at or below an edge up, as far as it changes the best order keys."""
        up = edge.up
        while up is not None and edge.is_live():
            self.num_steps += 1
            before = up.best(self.block_cost)
            up.warmest.put(edge.warm, edge.best(self.block_cost))
            if up.best(self.block_cost) == before:
                return
            edge = up
            up = edge.up

    def _refresh(self, edge: Edge) -> None:
        """Update the order keys of an edge in all edges above."""
        up = edge.up
        while up is not None:
            up.lightest.put(edge.light, edge.lightest.first_key())
            if edge.is_live():
                up.warmest.put(edge.warm, edge.best(self.block_cost))
            edge = up
            up = edge.up

    def set_weight(self, ticket: Ticket, weight: i64) -> None:
        """Add `weight` to a ticket's missing tokens in the order. O(edges above * log(branches))."""
        self.settle()
        up = ticket.up
        if ticket.weight != weight and up is not None:
            ticket.weight = weight
            up.lightest.put(ticket.light, ticket.light_key())
            self._refresh(up)

    def first(self) -> Ticket | None:
        """Return the ticket with the lowest order key, or None. O(edges above it), after `settle`."""
        self.settle()
        edge = self.top
        if edge.lightest.count == 0:
            return None
        while edge.warmest.count > 0:
            light = edge.lightest.first_key() - (edge.start + edge.filled) * self.block_cost
            if edge.warmest.first_key() > light:
                break
            below = edge.warmest.at(0).node
            if not isinstance(below, Edge):
                break
            edge = below
        node = edge.lightest.at(0).node
        while isinstance(node, Edge):
            node = node.lightest.at(0).node
        return node if isinstance(node, Ticket) else None

    def ranked(self) -> Iterator[Ticket]:
        """Yield all tickets by order key, lowest first; the tree must not change meanwhile. O(log n) each, expected."""
        self.settle()
        ahead: list[tuple[int, int, _Run]] = []
        self._add_runs(ahead, self.top, False, 0)
        while ahead:
            _, _, run = heapq.heappop(ahead)
            node = run.entry().node
            for place in (2 * run.place + 1, 2 * run.place + 2):
                if place < run.heap.count:
                    self._add_run(ahead, _Run(run.heap, place, run.cost, run.edge))
            if isinstance(node, Ticket):
                yield node
            elif isinstance(node, Edge):
                edge = run.edge
                if edge is None or not edge.warmest.holds(node.warm):
                    self._add_runs(ahead, node, True, run.cost)
                elif run.heap is edge.warmest:
                    self._add_runs(ahead, node, False, 0)

    def _add_runs(self, ahead: list[tuple[int, int, "_Run"]], edge: Edge, is_cold: bool, cost: i64) -> None:
        """Add the nodes below an edge. If it is cold, hits end above it, and `cost` is subtracted for them."""
        if not is_cold:
            cost = (edge.start + edge.filled) * self.block_cost
        if edge.lightest.count > 0:
            self._add_run(ahead, _Run(edge.lightest, 0, cost, None if is_cold else edge))
        if not is_cold and edge.warmest.count > 0:
            self._add_run(ahead, _Run(edge.warmest, 0, 0, edge))

    def _add_run(self, ahead: list[tuple[int, int, "_Run"]], run: "_Run") -> None:
        self._num_runs += 1
        heapq.heappush(ahead, (int(run.entry().key - run.cost), int(self._num_runs), run))

    # The reach of a prompt.

    def reach(self, ticket: Ticket) -> i64:
        """Return how many leading blocks of a ticket's prompt are indexed. O(edges above)."""
        edge = ticket.up
        reached: i64 = 0 if edge is None else edge.start + edge.length
        while edge is not None:
            if not edge.is_live():
                reached = edge.start
            elif not edge.is_full():
                reached = edge.start + edge.filled
            edge = edge.up
        return reached

    def num_computed(self, ticket: Ticket) -> i64:
        """Return how many leading blocks of a ticket's prompt are computed. O(edges above)."""
        edge = ticket.up
        reached: i64 = 0 if edge is None else edge.start + edge.length
        while edge is not None:
            if not edge.is_live():
                reached = edge.start
            elif not edge.is_full() or edge.computed < edge.length:
                reached = edge.start + edge.computed
            edge = edge.up
        return reached

    def prompt_of(self, ticket: Ticket) -> Prompt:
        """Return a ticket's prompt, put together from its edges. O(tokens)."""
        num_words = self.index.rows.num_words
        edge = ticket.up
        last: i64 = 0 if edge is None else edge.start + edge.length
        words = zeros_i64(int(last * num_words) + len(ticket.tail))
        for word in range(i64(len(ticket.tail))):
            words[last * num_words + word] = ticket.tail[word]
        while edge is not None:
            for word in range(edge.length * num_words):
                words[edge.start * num_words + word] = edge.words[edge.first_word + word]
            edge = edge.up
        return Prompt(words, ticket.num_tokens, ticket.keys, ticket.spans)

    # Tickets.

    def branch(self, edge: Edge, words: vec[i64], first_word: i64) -> Edge | None:
        """Return the edge below `edge` whose first block has these words, or None. O(1) expected."""
        slot = self.branches.find(self._branch_hash(edge, words, first_word))
        while slot >= 0:
            below = self.branches.edges[slot]
            if below is not None and below.up is edge and self._equal(below, 0, words, first_word):
                return below
            slot = self.branches.find_next(slot, self.branches.keys[slot])
        return None

    def _branch_hash(self, edge: Edge, words: vec[i64], first_word: i64) -> i64:
        return hash_rows(words, first_word, self._keys, root_hash(edge.serial), self._hash, 0, 1) | 1

    def _equal(self, edge: Edge, place: i64, words: vec[i64], first_word: i64) -> bool:
        num_words = self.index.rows.num_words
        own = edge.first_word + place * num_words
        edge_words = edge.words
        difference: i64 = 0
        for word in range(num_words):
            difference |= edge_words[own + word] ^ words[first_word + word]
        return difference == 0

    def add(self, number: i64, prompt: Prompt, num_seqs: i64) -> Ticket:
        """Add a waiting prompt. O(its blocks). If it raises, no ticket was added."""
        num_words = self.index.rows.num_words
        last = (prompt.num_tokens - 1) // self.block_size
        ticket = Ticket(number, prompt, prompt.words[last * num_words :], num_seqs)
        more = 2 * i64(len(prompt.span_blocks)) + 3
        self.contents.reserve(self.num_places + last + self.num_edges + more)
        self.branches.reserve(self.num_edges + more)
        self._reserve_changes(self.num_edges + more)
        self.settle()
        # Before the tree changes, because it allocates.
        found = self.index.find_prompt(prompt, last)
        edge = self.top
        try:
            edge = self._gate(edge, prompt.keys, 0, prompt, found)
            position: i64 = 0
            while position < last:
                if position in prompt.spans:
                    edge = self._gate(edge, prompt.spans[int(position)], position, prompt, found)
                end = min(prompt.next_span_block(position), last)
                edge = self._descend(edge, prompt, position, end, found)
                position = edge.start + edge.length
            edge.make_room()
        except BaseException:
            self._prune(edge)
            raise
        ticket.up = edge
        edge.lightest.put(ticket.light, ticket.light_key())
        self._refresh(edge)
        return ticket

    def _reserve_changes(self, count: i64) -> None:
        room = i64(len(self._changed))
        if room < count:
            more: list[Edge | None] = [None] * int(max(count, 2 * room) - room)
            self._changed.extend(more)

    def _gate(self, up: Edge, keys: object, start: i64, prompt: Prompt, found: vec[i32]) -> Edge:
        """Return the gate below `up` for these extra keys or spans, made if needed."""
        gate = up.gates.get(keys)
        if gate is None:
            root = NO_CONTENT
            if up is self.top:
                root = self.index.known_root(prompt.keys)
            elif start <= i64(len(found)) and up.is_full():
                root = self.index.known_root((int(up.last()), keys))
            up.make_room()
            gate = self._new_edge(zeros_i64(0), start, 0, True)
            gate.keys = keys
            up.gates[keys] = gate
            gate.up = up
            self.num_edges += 1
            if root != NO_CONTENT:
                self._open(gate, root)
            up.lightest.put(gate.light, gate.lightest.first_key())
        return gate

    def _new_edge(self, words: vec[i64], start: i64, length: i64, is_gate: bool) -> Edge:
        self._last_serial += 1
        return Edge(self._last_serial, words, start, length, is_gate)

    def _descend(self, up: Edge, prompt: Prompt, position: i64, end: i64, found: vec[i32]) -> Edge:
        """Return the edge below `up` with the prompt's blocks from `position` on, as far as it has one, to `end`."""
        num_words = self.index.rows.num_words
        edge = self.branch(up, prompt.words, position * num_words)
        if edge is None:
            return self._append(up, prompt, position, end, found)
        reached = position + 1
        end = min(end, edge.start + edge.length)
        while reached < end and self._equal(edge, reached - position, prompt.words, reached * num_words):
            reached += 1
        return edge if reached == edge.start + edge.length else self._split(edge, reached - position)

    def _append(self, up: Edge, prompt: Prompt, position: i64, end: i64, found: vec[i32]) -> Edge:
        """Make an edge below `up` with a prompt's blocks from `position` to `end`; the blocks `found` are indexed."""
        num_words = self.index.rows.num_words
        words = prompt.words[position * num_words : end * num_words]
        up.make_room()
        edge = self._new_edge(words, position, end - position, False)
        edge.branch_hash = self._branch_hash(up, words, 0)
        edge.up = up
        self.num_places += edge.length
        self.num_edges += 1
        self.branches.insert(edge.branch_hash, edge, 0)
        if up.is_full() and position < i64(len(found)):
            edge.under = up.last()
            for place in range(position, min(end, i64(len(found)))):
                block = i64(found[place])
                self._fill(edge, self.index.content_of(block), self.index.owner[block] != 0)
        up.lightest.put(edge.light, edge.lightest.first_key())
        return edge

    def _split(self, edge: Edge, length: i64) -> Edge:
        """Cut an edge after its first `length` blocks; return a new edge that has these. O(length)."""
        up = edge.up
        if up is None:
            return edge
        upper = self._new_edge(edge.words, edge.start, length, False)
        upper.make_room()
        contents = edge.contents[length:]
        upper.contents = edge.contents[:length]
        upper.up = up
        upper.first_word = edge.first_word
        upper.under = edge.under
        upper.filled = min(edge.filled, length)
        upper.computed = min(edge.computed, length)
        is_warm = up.warmest.holds(edge.warm)
        self.branches.edges[self.branches.find_entry(edge.branch_hash, edge)] = upper
        upper.branch_hash = edge.branch_hash
        for place in range(length):
            content = upper.contents[place]
            if content != 0:
                self.contents.edges[self.contents.find_entry(content if content > 0 else -content, edge)] = upper
        up.lightest.take(edge.light)
        up.warmest.take(edge.warm)
        edge.contents = contents
        edge.start += length
        edge.length -= length
        edge.first_word += length * self.index.rows.num_words
        edge.filled = max(edge.filled - length, 0)
        edge.computed = max(edge.computed - length, 0) if upper.computed == length else i64(0)
        edge.under = upper.last() if upper.is_full() else NO_CONTENT
        edge.up = upper
        edge.branch_hash = self._branch_hash(upper, edge.words, edge.first_word)
        self.branches.insert(edge.branch_hash, edge, 0)
        self.num_edges += 1
        upper.lightest.put(edge.light, edge.lightest.first_key())
        if upper.is_full():
            upper.warmest.put(edge.warm, edge.best(self.block_cost))
        up.lightest.put(upper.light, upper.lightest.first_key())
        if is_warm:
            up.warmest.put(upper.warm, upper.best(self.block_cost))
        return upper

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket. O(edges above * log(branches)), and O(blocks that no other prompt has)."""
        self.settle()
        up = ticket.up
        if up is not None:
            up.lightest.take(ticket.light)
            ticket.detach()
            self._prune(up)

    def _prune(self, edge: Edge) -> None:
        """Remove an edge and those above it, as long as nothing is below them; update the order of the rest."""
        while edge.lightest.count == 0:
            up = edge.up
            if up is None:
                return
            for place in range(edge.length):
                self._forget(edge, place)
            self.num_places -= edge.length
            self.num_edges -= 1
            up.lightest.take(edge.light)
            up.warmest.take(edge.warm)
            if edge.is_gate:
                self._close(edge)
                del up.gates[edge.keys]
            else:
                self.branches.remove(self.branches.find_entry(edge.branch_hash, edge))
            edge.detach()
            edge = up
        self._refresh(edge)

    def check(self) -> None:
        """Raise `InvariantError` unless the tree agrees with the index. O(places + blocks of all tickets)."""
        self.settle()
        num_contents = self._check_below(self.top)
        if num_contents != self.contents.count:
            raise InvariantError(f"waiting: {num_contents} contents are in edges, the table has {self.contents.count}")

    def _check_below(self, edge: Edge) -> i64:
        """Check an edge and all below it; return how many contents they have in the table."""
        count: i64 = 1 if edge.is_gate and edge.root > 0 else 0
        for place in range(edge.length):
            content = edge.contents[place]
            if content != 0:
                count += 1
                slot = self.contents.find_entry(content if content > 0 else -content, edge)
                if slot < 0 or self.contents.places[slot] != edge.start + place:
                    raise InvariantError(f"waiting: content {content} of edge {edge.serial} is not in the table")
        if edge.warmest.count > 0 and not edge.is_full():
            raise InvariantError(f"waiting: edge {edge.serial} is not full and has cached edges below")
        for position in range(edge.lightest.count):
            node = edge.lightest.at(position).node
            if node.up is not edge:
                raise InvariantError(f"waiting: a node below edge {edge.serial} is elsewhere")
            if isinstance(node, Ticket):
                self._check_ticket(node)
                self._check_key(node.light.key, node.light_key(), edge)
            elif isinstance(node, Edge):
                count += self._check_below(node)
                self._check_key(node.light.key, node.lightest.first_key(), edge)
                if edge.warmest.holds(node.warm):
                    self._check_key(node.warm.key, node.best(self.block_cost), edge)
                elif node.is_live() and node.filled > 0:
                    raise InvariantError(f"waiting: edge {node.serial} is cached and not in the order")
        return count

    def _check_key(self, key: i64, wanted: i64, edge: Edge) -> None:
        if key != wanted:
            raise InvariantError(f"waiting: a key below edge {edge.serial} is {key}, it should be {wanted}")

    def _check_ticket(self, ticket: Ticket) -> None:
        index = self.index
        prompt = self.prompt_of(ticket)
        found = index.find_prompt(prompt, (prompt.num_tokens - 1) // self.block_size)
        reached = self.reach(ticket)
        computed: i64 = 0
        while computed < i64(len(found)) and index.owner[i64(found[computed])] == 0:
            computed += 1
        if reached != i64(len(found)) or computed != self.num_computed(ticket):
            raise InvariantError(
                f"waiting: ticket {ticket.number} reaches {reached} blocks, {self.num_computed(ticket)} of them "
                f"computed; a lookup finds {len(found)}, {computed} of them computed"
            )
