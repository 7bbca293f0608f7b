"""The registry of checkpoints: which exist, which requests used them, and which one is dropped next."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import grown_i64
from ..parts.keys import Ghosts
from ..sessions import Sessions
from .ages import NUM_AGES, AgeCounts
from .block_map import BlockMap
from .checkpoint import NO_SESSION, REQUESTED, SHARED, Checkpoint
from .heaps import HELD, NOT_OVER, CheckpointHeaps
from .orders import RELEARNED_EVERY, CheckpointOrder
from .prefix_tree import MOST_KEYS, NO_CHECKPOINT, ROOT, PrefixTree
from .request_record import RequestRecord

#: Records of dropped checkpoints that are kept: so many for each cached one, and so many more.
DROPPED_PER_CACHED: Final = 4
MIN_DROPPED: Final = 2000


class CheckpointRegistry:
    """Tracks past prompts and their checkpoints, and ranks the checkpoints for eviction.

    Keys and values are worth keeping only under a checkpoint: no prompt can hit those after its last one. So sizes are
    counted in tokens of keys and values, those of checkpoints too. Time is the number of requests so far.

    Args:
        order: scores checkpoints.
        block_size: tokens of a node of the tree.
        max_idle_nodes: nodes that are remembered beside those under checkpoints.
        num_blocks: blocks of the pool that the checkpoints lie in; 0 without a pool.
    """

    def __init__(self, order: CheckpointOrder, block_size: i64, max_idle_nodes: int, num_blocks: int = 0) -> None:
        self.order = order
        self.tree = PrefixTree(max_idle_nodes)
        self.block_map = BlockMap(self.tree, num_blocks)
        self.block_size = block_size
        self.now: i64 = 0
        #: Tokens that all cached checkpoints take, with the keys and values under them.
        self.num_held: i64 = 0
        self.num_cached: i64 = 0
        self._num_uses: i64 = 0
        #: By number; number 0 stands for none.
        self._checkpoints: list[Checkpoint] = [Checkpoint(NO_CHECKPOINT, ROOT, 0, 0)]
        self._free: list[int] = []
        #: All records, cached or not, in no order.
        self._known: list[Checkpoint] = []
        self._ages = AgeCounts(self._checkpoints, int(order.num_cells))
        self._heaps = CheckpointHeaps(self._checkpoints, order)
        #: By session, the number of the first of the checkpoints that only it has used.
        self._of_session = Ghosts(MOST_KEYS)

    # Requests.

    def begin_request(self, keys: vec[i64], num_blocks: i64, last: i64, reached: i64 = -1) -> RequestRecord:
        """Return the record of a new request, whose hit counts as a use of the checkpoint.

        O(blocks), and O(log checkpoints) for each checkpoint that reaches the next age.

        Args:
            keys: chain hashes of its blocks.
            num_blocks: how many of `keys` count.
            last: the longest hit that it can use, in tokens.
            reached: the tokens that it hits; -1 if the cached checkpoints decide.
        """
        self.now += 1
        if self.order.learns:
            for age in range(1, NUM_AGES):
                number = self._ages.first_of(age, self.now)
                while number != NO_CHECKPOINT:
                    checkpoint = self._checkpoints[number]
                    number = checkpoint.age_after
                    self._file(checkpoint)
        request = RequestRecord(keys, num_blocks, self.now)
        num_known = self.tree.walk(keys, num_blocks, request.nodes)
        request.known = min(num_known * self.block_size, last)
        self._find_hit(request, reached)
        self._remember(request, num_known)
        return request

    def _file(self, checkpoint: Checkpoint) -> None:
        """Move a checkpoint to the cell and the heap that it belongs to now. O(log checkpoints)."""
        order = self.order
        cell: i64 = 0
        if order.learns:
            cell = order.cell(checkpoint, self.now)
            if checkpoint.cell != cell or checkpoint.counted_last_used != checkpoint.last_used:
                self._ages.put(checkpoint, cell)
        if checkpoint.is_cached:
            gain = order.gain(checkpoint, self._checkpoints[checkpoint.above].position)
            self._heaps.put(checkpoint, self._group(checkpoint), cell, gain)

    def _group(self, checkpoint: Checkpoint) -> i64:
        """Return its group of heaps. An order that learns weighs ended sessions itself."""
        group = HELD if checkpoint.is_held else i64(0)
        return group + (NOT_OVER if self.order.learns or not checkpoint.is_over else i64(0))

    def _find_hit(self, request: RequestRecord, reached: i64) -> None:
        """Find the deepest cached checkpoint on the path. A deeper dropped one counts as a hit of its class."""
        is_deepest = True
        request.hit = max(reached, 0)
        place = request.known // self.block_size
        while place > 0 and place * self.block_size >= reached:
            number = self.tree.checkpoint[request.nodes[place - 1]]
            if number != NO_CHECKPOINT:
                checkpoint = self._checkpoints[number]
                if checkpoint.is_cached and (reached < 0 or place * self.block_size == reached):
                    request.checkpoint = number
                    request.hit = checkpoint.position
                    self._note_hit(request, checkpoint)
                    return
                if is_deepest and self.order.learns and not checkpoint.is_cached:
                    self._note_hit(request, checkpoint)
                is_deepest = False
            place -= 1

    def _note_hit(self, request: RequestRecord, checkpoint: Checkpoint) -> None:
        self.order.note(checkpoint, True, self.now)
        checkpoint.num_hits += 1
        self._use(checkpoint)
        request.chain = max(request.chain, checkpoint.chain + 1)

    def _use(self, checkpoint: Checkpoint) -> None:
        self._num_uses += 1
        checkpoint.last_used = self.now
        checkpoint.use_order = self._num_uses
        self._file(checkpoint)

    def _remember(self, request: RequestRecord, num_known: i64) -> None:
        parent = request.nodes[num_known - 1] if num_known > 0 else ROOT
        for place in range(num_known, request.num_nodes):
            parent = self.tree.add(request.keys[place], parent)
            request.nodes[place] = parent
        self.tree.touch(request.nodes, request.num_nodes)
        tries = i64(len(self.tree))
        while len(self.tree) > self.tree.max_idle_nodes and tries > 0:
            tries -= 1
            number = self.tree.forget_one()
            if self.tree.forgotten != ROOT:
                self.block_map.forget_node(self.tree.forgotten)
            if number != NO_CHECKPOINT:
                self._forget(self._checkpoints[number])

    def extend(self, request: RequestRecord, key: i64) -> None:
        """Add one more block to a request: of its output, or after a span. O(1) expected and amortised."""
        place = request.num_nodes
        if place > 0 and not self._is_remembered(request, place - 1):
            return
        if place == len(request.nodes):
            nodes = grown_i64(request.nodes, 2 * len(request.nodes) + 1)
            request.keys = grown_i64(request.keys, len(nodes))
            request.nodes = nodes
        request.keys[place] = key
        request.nodes[place] = self.tree.add(key, request.nodes[place - 1] if place > 0 else ROOT)
        request.num_nodes += 1

    def _node_before(self, request: RequestRecord, position: i64) -> i64:
        """Return the node of the block that ends at a position; `ROOT` if there is none, or it was forgotten."""
        place = position // self.block_size - 1
        if place < 0 or place >= request.num_nodes or not self._is_remembered(request, place):
            return ROOT
        return request.nodes[place]

    def _is_remembered(self, request: RequestRecord, place: i64) -> bool:
        """Return whether the tree still has a block of a request, which may outlive the tree's memory."""
        return self.tree.key[request.nodes[place]] == request.keys[place]

    def end_request(
        self, request: RequestRecord, numbers: list[int], session: i64 = SHARED, is_over: bool = False
    ) -> None:
        """End a request. The checkpoints that it took or hit count as used now.

        Args:
            request: its record.
            numbers: the checkpoints that it took, the longest prefix first.
            session: its session, `SHARED` if it has none, `NO_SESSION` if it was undone.
            is_over: whether the session has ended.
        """
        for number in numbers:
            checkpoint = self._checkpoints[number]
            if self._is_on_path(request, checkpoint):
                self._use(checkpoint)
                self._mark(checkpoint, session, is_over)
        checkpoint = self._checkpoints[request.checkpoint]
        if self._is_on_path(request, checkpoint):
            self._mark(checkpoint, session, is_over)
        if checkpoint.is_cached and request.started == self.now:
            self._use(checkpoint)
        if self.now % RELEARNED_EVERY == 1:
            self.order.learn(self._ages, self.now)
        if len(self._known) > (1 + DROPPED_PER_CACHED) * self.num_cached + MIN_DROPPED:
            uses = sorted([int(checkpoint.last_used) for checkpoint in self._known])
            old = uses[len(uses) // 4]
            for checkpoint in [each for each in self._known if not each.is_cached and each.last_used <= old]:
                self._forget(checkpoint)

    def _is_on_path(self, request: RequestRecord, checkpoint: Checkpoint) -> bool:
        place = checkpoint.position // self.block_size - 1
        return checkpoint.is_cached and place < request.num_nodes and request.nodes[place] == checkpoint.node

    # Checkpoints.

    def add(self, request: RequestRecord, position: i64, kind: i64) -> i64:
        """Add a checkpoint of a request. O(depth + log checkpoints).

        Returns its number; 0 if there is one at this content already, or the tree has forgotten the content.
        """
        node = self._node_before(request, position)
        if node == ROOT:
            return NO_CHECKPOINT
        number = self.tree.checkpoint[node]
        if number == NO_CHECKPOINT:
            checkpoint = self._make(node, position, kind)
            checkpoint.chain = request.chain
        else:
            checkpoint = self._checkpoints[number]
            if checkpoint.is_cached:
                return NO_CHECKPOINT
            if kind == REQUESTED:
                checkpoint.kind = REQUESTED
            if checkpoint.last_used < request.started:
                # A dropped one that is computed again begins a new age.
                self.order.note(checkpoint, False, self.now)
        self._use(checkpoint)
        self._insert(checkpoint)
        return checkpoint.number

    def would_score(self, request: RequestRecord, position: i64, kind: i64) -> float:
        """Return the score that a checkpoint of a request would have if it were added now. O(depth)."""
        tree = self.tree
        place = min(position // self.block_size, request.num_nodes)
        checkpoint = Checkpoint(NO_CHECKPOINT, ROOT, position, kind)
        checkpoint.chain = request.chain
        checkpoint.last_used = self.now
        checkpoint.own_tokens = position - place * self.block_size
        node = self._node_before(request, place * self.block_size)
        if node != ROOT and checkpoint.own_tokens == 0 and tree.checkpoint[node] != NO_CHECKPOINT:
            before = self._checkpoints[tree.checkpoint[node]]
            checkpoint.kind = REQUESTED if kind == REQUESTED else before.kind
            checkpoint.num_hits, checkpoint.chain = before.num_hits, before.chain
        is_own = True
        while node != ROOT and not self._checkpoints[tree.checkpoint[node]].is_cached:
            is_own = is_own and tree.num_checkpoints[node] == 0
            checkpoint.own_tokens += self.block_size if is_own else 0
            node = tree.parent[node]
        return self.order.score(checkpoint, self._checkpoints[tree.checkpoint[node]].position, self.now)

    def _make(self, node: i64, position: i64, kind: i64) -> Checkpoint:
        number = i64(self._free.pop()) if self._free else i64(len(self._checkpoints))
        checkpoint = Checkpoint(number, node, position, kind)
        if number == len(self._checkpoints):
            self._checkpoints.append(checkpoint)
        else:
            self._checkpoints[number] = checkpoint
        checkpoint.index = i64(len(self._known))
        self._known.append(checkpoint)
        self.tree.checkpoint[node] = number
        return checkpoint

    def _insert(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint into the tree, between those above it and those below it."""
        tree = self.tree
        sole = tree.sole_checkpoint(checkpoint.node)
        has_below = tree.num_checkpoints[checkpoint.node] > 0
        checkpoint.own_tokens = tree.insert(checkpoint.number, checkpoint.node) * self.block_size
        checkpoint.is_cached = True
        self.num_cached += 1
        self.num_held += self.order.state_tokens + checkpoint.own_tokens
        self._recount(sole)
        if self.order.learns:
            checkpoint.above = self._next_above(checkpoint.node)
            if has_below:
                self._set_above(checkpoint.node, checkpoint.number)
        self._file(checkpoint)

    def _next_above(self, node: i64) -> i64:
        """Return the next cached checkpoint above a node; 0 for none. O(depth)."""
        tree = self.tree
        while node != ROOT:
            node = tree.parent[node]
            if self._checkpoints[tree.checkpoint[node]].is_cached:
                return tree.checkpoint[node]
        return NO_CHECKPOINT

    def _set_above(self, top: i64, above: i64) -> None:
        """Set the checkpoint above those right below a node. O(nodes between, log checkpoints for each)."""
        node = self.tree.next_needed(top, top, True)
        while node != ROOT:
            checkpoint = self._checkpoints[self.tree.checkpoint[node]]
            if checkpoint.is_cached:
                checkpoint.above = above
                self._file(checkpoint)
            node = self.tree.next_needed(node, top, not checkpoint.is_cached)

    def _recount(self, number: i64) -> None:
        if number != NO_CHECKPOINT:
            checkpoint = self._checkpoints[number]
            checkpoint.own_tokens = self.tree.num_sole_nodes(checkpoint.node) * self.block_size
            if self.order.learns:
                self._file(checkpoint)

    def next_to_drop(self) -> i64:
        """Return the checkpoint to drop next; 0 if none is cached. O(1).

        Held ones come last. An order that does not learn has those first whose session is over. Of equals the longest
        prefix is first, of equal ones of these the one used longest ago.
        """
        return self._heaps.lowest()

    def lowest_score(self) -> float:
        """Return the score of the checkpoint to drop next; below 0 if none is cached. O(1)."""
        number = self._heaps.lowest()
        return self._heaps.score(self._checkpoints[number]) if number != NO_CHECKPOINT else -1.0

    def set_held(self, number: i64, is_held: bool) -> None:
        """Set whether sequences hold the blocks of a checkpoint. O(log checkpoints)."""
        checkpoint = self._checkpoints[number]
        if checkpoint.is_held != is_held:
            checkpoint.is_held = is_held
            if checkpoint.is_cached:
                self._file(checkpoint)

    def set_kind(self, number: i64, kind: i64) -> None:
        """Set why the position of a checkpoint was chosen. O(log checkpoints)."""
        checkpoint = self._checkpoints[number]
        checkpoint.kind = kind
        if self.tree.checkpoint[checkpoint.node] == number:
            self._file(checkpoint)

    def drop(self, number: i64) -> None:
        """Drop a checkpoint; the next one up inherits its hits. O(depth + log), and that of `_set_above`."""
        checkpoint = self._checkpoints[number]
        self._heaps.take(checkpoint)
        self.tree.remove(number, checkpoint.node)
        checkpoint.is_cached = False
        self.num_cached -= 1
        self.num_held -= self.order.state_tokens + checkpoint.own_tokens
        self._recount(self.tree.sole_checkpoint(checkpoint.node))
        if not self.order.learns:
            self._forget(checkpoint)
            return
        self._set_above(checkpoint.node, checkpoint.above)
        if checkpoint.above != NO_CHECKPOINT:
            self._inherit(self._checkpoints[checkpoint.above], checkpoint)

    def _inherit(self, heir: Checkpoint, checkpoint: Checkpoint) -> None:
        if not checkpoint.is_over and self.order.weight(checkpoint.cell) > self.order.weight(heir.cell):
            self.order.note(heir, False, self.now)
            heir.kind = checkpoint.kind
            heir.num_hits = checkpoint.num_hits
            heir.chain = checkpoint.chain
            heir.last_used = checkpoint.last_used
            self._file(heir)

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Delete the record of a dropped checkpoint."""
        self.order.note(checkpoint, False, self.now)
        self._ages.take(checkpoint)
        self._set_session(checkpoint, NO_SESSION)
        self.tree.checkpoint[checkpoint.node] = NO_CHECKPOINT
        last = self._known.pop()
        if last is not checkpoint:
            last.index = checkpoint.index
            self._known[checkpoint.index] = last
        self._free.append(int(checkpoint.number))

    def drop_all(self) -> None:
        """Drop all cached checkpoints."""
        for checkpoint in self._known[:]:
            if checkpoint.is_cached:
                self.drop(checkpoint.number)

    def get(self, number: i64) -> Checkpoint:
        """Return the checkpoint of a number."""
        return self._checkpoints[number]

    # Sessions.

    def _mark(self, checkpoint: Checkpoint, session: i64, is_over: bool) -> None:
        """Note that a session used a checkpoint, which is its own until another one uses it."""
        if session == NO_SESSION:
            return
        if checkpoint.session != NO_SESSION and checkpoint.session != session:
            session = SHARED
        self._set_session(checkpoint, session)
        self._set_over(checkpoint, is_over and session != SHARED)

    def _set_session(self, checkpoint: Checkpoint, session: i64) -> None:
        """Move a checkpoint to the list of a session. O(1) expected and amortised."""
        before, after = checkpoint.session_before, checkpoint.session_after
        if checkpoint.session == session:
            return
        if checkpoint.session > NO_SESSION:
            if after != NO_CHECKPOINT:
                self._checkpoints[after].session_before = before
            if before != NO_CHECKPOINT:
                self._checkpoints[before].session_after = after
            elif after != NO_CHECKPOINT:
                self._of_session.remember(checkpoint.session, after)
            else:
                self._of_session.take(checkpoint.session)
        if session > NO_SESSION:
            first = self._of_session.number(session)
            first = first if first > 0 else NO_CHECKPOINT
            self._of_session.remember(session, checkpoint.number)
            checkpoint.session_before, checkpoint.session_after = NO_CHECKPOINT, first
            if first != NO_CHECKPOINT:
                self._checkpoints[first].session_before = checkpoint.number
        checkpoint.session = session

    def set_session_over(self, session: i64, is_over: bool) -> None:
        """Set whether a session has ended, for the checkpoints that only it used. O(those checkpoints)."""
        number = self._of_session.number(session)
        while number > NO_CHECKPOINT:
            self._set_over(self._checkpoints[number], is_over)
            number = self._checkpoints[number].session_after

    def _set_over(self, checkpoint: Checkpoint, is_over: bool) -> None:
        if checkpoint.is_over == is_over:
            return
        if self.order.learns:
            # It begins a new age in another class.
            self.order.note(checkpoint, False, self.now)
            checkpoint.last_used = self.now
        checkpoint.is_over = is_over
        self._file(checkpoint)

    # Checks.

    def check_sessions(self, sessions: Sessions) -> None:
        """Compare the ends of sessions with those of their checkpoints. O(checkpoints). Raises `InvariantError`."""
        for checkpoint in self._known:
            slot = sessions.slot_of(checkpoint.session)
            if checkpoint.is_over != (slot >= 0 and sessions.is_over(slot)):
                raise InvariantError(
                    f"states: is_over of checkpoint {checkpoint.number} is {checkpoint.is_over}, unlike its session's"
                )

    def check(self) -> None:
        """Count all sums from scratch. O(nodes + checkpoints * depth). Raises `InvariantError`."""
        self.tree.check()
        self._ages.check(self._known if self.order.learns else [])
        self._heaps.check([checkpoint for checkpoint in self._known if checkpoint.is_cached])
        held: i64 = 0
        for checkpoint in self._known:
            if self.tree.checkpoint[checkpoint.node] != checkpoint.number:
                raise InvariantError(f"states: checkpoint {checkpoint.number} is not at its node")
            if checkpoint.is_cached:
                held += self.order.state_tokens
                self._check_cached(checkpoint)
        for node in range(1, i64(len(self.tree.key))):
            held += self.block_size if self.tree.num_checkpoints[node] > 0 else 0
        if held != self.num_held:
            raise InvariantError(f"states: {held} tokens are held, the count is {self.num_held}")

    def _check_cached(self, checkpoint: Checkpoint) -> None:
        number = checkpoint.number
        if self.tree.num_sole_nodes(checkpoint.node) * self.block_size != checkpoint.own_tokens:
            raise InvariantError(
                f"states: checkpoint {number} has {checkpoint.own_tokens} own_tokens, and needs others"
            )
        if self.order.learns and self._next_above(checkpoint.node) != checkpoint.above:
            raise InvariantError(f"states: checkpoint {checkpoint.above} is not the next above checkpoint {number}")
        heap = self._group(checkpoint) * self.order.num_cells + self.order.cell(checkpoint, self.now)
        gain = self.order.gain(checkpoint, self._checkpoints[checkpoint.above].position)
        if checkpoint.heap != heap + 1 or checkpoint.gain != gain:
            raise InvariantError(f"states: checkpoint {number} is in heap {checkpoint.heap - 1}; it belongs to {heap}")
