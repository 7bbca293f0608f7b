"""A book keeps what is known of prompts, which states stand where, and which goes next."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import grown_i64, zeros_i64
from ..layers.sessions import Sessions
from ..parts.keys import Ghosts
from .ages import NUM_AGES, StateAges
from .heaps import BUSY, NOT_OVER, StateHeaps
from .orders import RELEARNED_EVERY, StateOrder
from .state import NO_SESSION, SHARED, TOLD, State
from .tree import MOST_KEYS, NO_STATE, ROOT, StateTree

#: How many states that went are remembered for each that is kept, and how many anyway, before the oldest quarter goes.
GHOSTS_A_STATE: Final = 4
FEWEST_GHOSTS: Final = 2000


class Shelf:
    """A shelf has the blocks of what is kept."""

    def forget(self, node: i64) -> None:
        """A node is forgotten."""
        raise NotImplementedError("a Shelf must have forget()")


class Visit:
    """A visit is one request: the nodes that it passes, and what it found.

    keys, nodes: of its blocks in order, `num_nodes` of them. begun: when. known, hit: tokens, as it found them.
    state: the number of the state that it hit, 0 for none. chain: hits that led here.
    """

    def __init__(self, keys: vec[i64], num_blocks: i64, begun: i64) -> None:
        self.keys = keys
        self.nodes = zeros_i64(int(num_blocks))
        self.num_nodes = num_blocks
        self.begun = begun
        self.known: i64 = 0
        self.hit: i64 = 0
        self.state: i64 = NO_STATE
        self.chain: i64 = 0

    def copied(self) -> "Visit":
        """Return the same for a fork, which goes on by itself."""
        other = Visit(self.keys[:], i64(len(self.nodes)), self.begun)
        other.nodes = self.nodes[:]
        other.num_nodes = self.num_nodes
        other.known, other.hit, other.chain = self.known, self.hit, self.chain
        return other


class StateBook:
    """Keeps keys and values under states only: what stands behind the last state of every prompt can never be hit.

    Sizes are in tokens of keys and values. Requests are counted, and time is their number.

    block_size: tokens of a node. num_remembered: nodes that are remembered besides those under states. `num_held` is
    what all states and what stands under them take.
    """

    def __init__(self, order: StateOrder, block_size: i64, num_remembered: int) -> None:
        self.order = order
        self.tree = StateTree(num_remembered)
        self.block_size = block_size
        self.now: i64 = 0
        self.num_held: i64 = 0
        self.num_kept: i64 = 0
        self._stamp: i64 = 0
        #: By number; 0 is none.
        self._states: list[State] = [State(0, ROOT, 0, 0)]
        self._free: list[int] = []
        #: All that are kept or remembered, in no order.
        self._known: list[State] = []
        self._ages = StateAges(self._states, int(order.num_cells))
        self._heaps = StateHeaps(self._states, order)
        #: Of each session that alone has used states, the number of the first of them.
        self._of_session = Ghosts(MOST_KEYS)
        #: The blocks of what is kept, where a pool has it.
        self.shelf: Shelf | None = None

    # A request begins.

    def visit(self, keys: vec[i64], num_blocks: i64, last: i64, reached: i64 = -1) -> Visit:
        """Return a request for the content with these keys: what it hits is found, learned from, and remembered.

        keys: of its blocks, `num_blocks` of them. last: the longest hit that it can use, in tokens. reached: what a
        pool says that it hits; -1 where what is kept is what is hit. O(blocks), and O(log states) for each state that
        reaches the next age, at most `NUM_AGES` times a use.
        """
        self.now += 1
        if self.order.learns:
            self._grow_older()
        visit = Visit(keys, num_blocks, self.now)
        num_known = self.tree.walk(keys, num_blocks, visit.nodes)
        visit.known = min(num_known * self.block_size, last)
        self._look_up(visit, visit.known // self.block_size, reached)
        self._remember(visit, num_known)
        return visit

    def _grow_older(self) -> None:
        """File those states anew that reach another age with this request."""
        for age in range(1, NUM_AGES):
            number = self._ages.first_of(age, self.now)
            while number != NO_STATE:
                state = self._states[number]
                number = state.age_after
                self._file(state)

    def _file(self, state: State) -> None:
        """Put a state where its age, its class and its gain now belong. O(log states)."""
        order = self.order
        cell: i64 = 0
        if order.learns:
            cell = order.cell(state, self.now)
            if state.cell != cell or state.counted_since != state.since:
                self._ages.put(state, cell)
        if state.is_kept:
            group = BUSY if state.is_busy else i64(0)
            if order.learns or not state.is_over:
                group += NOT_OVER
            self._heaps.put(state, group, cell, order.gain(state, self._states[state.above].position))

    def _look_up(self, visit: Visit, place: i64, reached: i64) -> None:
        """The deepest state on the way is hit; one that went and would have been teaches its class."""
        is_deepest = True
        visit.hit = max(reached, 0)
        while place > 0 and place * self.block_size >= reached:
            number = self.tree.state[visit.nodes[place - 1]]
            if number != NO_STATE:
                state = self._states[number]
                if state.is_kept and (reached < 0 or place * self.block_size == reached):
                    visit.state = number
                    visit.hit = state.position
                    self._note_hit(visit, state)
                    return
                if is_deepest and self.order.learns and not state.is_kept:
                    self._note_hit(visit, state)
                is_deepest = False
            place -= 1

    def _note_hit(self, visit: Visit, state: State) -> None:
        self.order.note(state, True, self.now)
        state.num_hits += 1
        self._use(state)
        visit.chain = max(visit.chain, state.chain + 1)

    def _use(self, state: State) -> None:
        self._stamp += 1
        state.since = self.now
        state.stamp = self._stamp
        self._file(state)

    def _remember(self, visit: Visit, num_known: i64) -> None:
        parent = visit.nodes[num_known - 1] if num_known > 0 else ROOT
        for place in range(num_known, visit.num_nodes):
            parent = self.tree.add(visit.keys[place], parent)
            visit.nodes[place] = parent
        self.tree.touch(visit.nodes, visit.num_nodes)
        tries = i64(len(self.tree))
        while len(self.tree) > self.tree.num_remembered and tries > 0:
            tries -= 1
            gone = self.tree.forget_one()
            if self.shelf is not None and self.tree.forgotten != ROOT:
                self.shelf.forget(self.tree.forgotten)
            if gone != NO_STATE:
                self._forget(self._states[gone])

    def extend(self, visit: Visit, key: i64) -> None:
        """The request has one more block: of its output. O(1) expected and amortised."""
        place = visit.num_nodes
        if place > 0 and not self._is_there(visit, place - 1):
            return
        if place == len(visit.nodes):
            nodes = grown_i64(visit.nodes, 2 * len(visit.nodes) + 1)
            visit.keys = grown_i64(visit.keys, len(nodes))
            visit.nodes = nodes
        visit.keys[place] = key
        visit.nodes[place] = self.tree.add(key, visit.nodes[place - 1] if place > 0 else ROOT)
        visit.num_nodes += 1

    def node_at(self, visit: Visit, place: i64) -> i64:
        """Return the node of a block of a request; 0 where it is not remembered."""
        if place >= visit.num_nodes or not self._is_there(visit, place):
            return ROOT
        return visit.nodes[place]

    def _is_there(self, visit: Visit, place: i64) -> bool:
        """Return whether a block of a request that runs for long is remembered still."""
        return self.tree.key[visit.nodes[place]] == visit.keys[place]

    # What it leaves.

    def keep(self, visit: Visit, position: i64, kind: i64) -> i64:
        """A state is taken at `position`. Returns its number; 0 where there is one. O(depth + log states)."""
        node = self.node_at(visit, position // self.block_size - 1)
        if node == ROOT:
            return NO_STATE
        number = self.tree.state[node]
        if number == NO_STATE:
            state = self._new(node, position, kind)
            state.chain = visit.chain
        else:
            state = self._states[number]
            if state.is_kept:
                return NO_STATE
            if kind == TOLD:
                state.kind = TOLD
            if state.since < visit.begun:
                # What was gone and is computed again begins a new age.
                self.order.note(state, False, self.now)
        self._use(state)
        self._place(state)
        return state.number

    def would_score(self, visit: Visit, position: i64, kind: i64) -> float:
        """Return what a state at `position` would be worth if it were kept now. O(depth)."""
        tree = self.tree
        place = min(position // self.block_size, visit.num_nodes)
        state = State(NO_STATE, ROOT, position, kind)
        state.chain = visit.chain
        state.since = self.now
        state.alone = position - place * self.block_size
        node = self.node_at(visit, place - 1) if place > 0 else ROOT
        if node != ROOT and state.alone == 0 and tree.state[node] != NO_STATE:
            before = self._states[tree.state[node]]
            state.kind = TOLD if kind == TOLD else before.kind
            state.num_hits, state.chain = before.num_hits, before.chain
        is_alone = True
        while node != ROOT and (tree.state[node] == NO_STATE or not self._states[tree.state[node]].is_kept):
            is_alone = is_alone and tree.num_states[node] == 0
            state.alone += self.block_size if is_alone else 0
            node = tree.parent[node]
        return self.order.score(state, self._states[tree.state[node]].position if node != ROOT else 0, self.now)

    def _new(self, node: i64, position: i64, kind: i64) -> State:
        number = i64(self._free.pop()) if self._free else i64(len(self._states))
        state = State(number, node, position, kind)
        if number == len(self._states):
            self._states.append(state)
        else:
            self._states[number] = state
        state.place = i64(len(self._known))
        self._known.append(state)
        self.tree.state[node] = number
        return state

    def _place(self, state: State) -> None:
        """Put a state in the tree, between those above it and those below it."""
        tree = self.tree
        other = tree.lone(state.node)
        has_below = tree.num_states[state.node] > 0
        state.alone = tree.place(state.number, state.node) * self.block_size
        state.is_kept = True
        self.num_kept += 1
        self.num_held += self.order.state_tokens + state.alone
        self._recount(other)
        if self.order.learns:
            state.above = self._next_above(state.node)
            if has_below:
                self._move_below(state.node, state.number)
        self._file(state)

    def _next_above(self, node: i64) -> i64:
        """Return the next state that is kept above a node. O(depth)."""
        tree = self.tree
        node = tree.parent[node]
        while node != ROOT:
            number = tree.state[node]
            if number != NO_STATE and self._states[number].is_kept:
                return number
            node = tree.parent[node]
        return NO_STATE

    def _move_below(self, top: i64, above: i64) -> None:
        """Let the states right below a node have `above` as the next one up. O(nodes between, log states for each)."""
        node = self.tree.next_needed(top, top, True)
        while node != ROOT:
            number = self.tree.state[node]
            is_state = number != NO_STATE and self._states[number].is_kept
            if is_state:
                self._states[number].above = above
                self._file(self._states[number])
            node = self.tree.next_needed(node, top, not is_state)

    def _recount(self, number: i64) -> None:
        if number != NO_STATE:
            state = self._states[number]
            state.alone = self.tree.num_alone(state.node) * self.block_size
            if self.order.learns:
                self._file(state)

    # What goes.

    def lowest(self) -> i64:
        """Return the state that goes first; one that is busy after all others. 0 where none is kept. O(1).

        An order that does not learn has those first whose session is over. Of equals it is the longest prefix, and of
        equal ones of these the one that was used longest ago.
        """
        return self._heaps.lowest()

    def floor(self) -> float:
        """Return what the state that goes first is worth; below 0 where none is kept. O(1)."""
        number = self._heaps.lowest()
        return self._heaps.score(self._states[number]) if number != NO_STATE else -1.0

    def set_busy(self, number: i64, is_busy: bool) -> None:
        """Say whether the blocks of a state are held. O(log states)."""
        state = self._states[number]
        if state.is_busy != is_busy:
            state.is_busy = is_busy
            if state.is_kept:
                self._file(state)

    def set_kind(self, number: i64, kind: i64) -> None:
        """Say why the position of a state was chosen. O(log states)."""
        state = self._states[number]
        state.kind = kind
        if self.tree.state[state.node] == number:
            self._file(state)

    def drop(self, number: i64) -> None:
        """A state goes. What its hits fall back on is its heir.

        O(depth + log states), and that of `_move_below`.
        """
        state = self._states[number]
        self._heaps.take(state)
        self.tree.remove(number, state.node)
        state.is_kept = False
        self.num_kept -= 1
        self.num_held -= self.order.state_tokens + state.alone
        self._recount(self.tree.lone(state.node))
        if not self.order.learns:
            self._forget(state)
            return
        self._move_below(state.node, state.above)
        if state.above != NO_STATE:
            self._inherit(self._states[state.above], state)

    def _inherit(self, heir: State, state: State) -> None:
        """Let the one above it take over what was expected of a state: its hits fall back there."""
        if not state.is_over and self.order.weight(state.cell) > self.order.weight(heir.cell):
            self.order.note(heir, False, self.now)
            heir.kind = state.kind
            heir.num_hits = state.num_hits
            heir.chain = state.chain
            heir.since = state.since
            self._file(heir)

    def _forget(self, state: State) -> None:
        """Nothing of it is known any more."""
        self.order.note(state, False, self.now)
        self._ages.take(state)
        self._set_session(state, NO_SESSION)
        self.tree.state[state.node] = NO_STATE
        last = self._known.pop()
        if last is not state:
            last.place = state.place
            self._known[state.place] = last
        self._free.append(int(state.number))

    def use_again(self, visit: Visit) -> None:
        """Say that what a request hit was of use up to its end."""
        state = self._states[visit.state]
        if state.is_kept and visit.begun == self.now:
            self._use(state)

    def leave(self, visit: Visit, kept: list[int], session: i64 = SHARED, is_over: bool = False) -> None:
        """A request ends that took these states, the longest prefix first: all were of use up to now.

        session, is_over: whose it is, if it has one (`NO_SESSION` for what was taken back), and what is said of it.
        """
        for number in kept:
            state = self._states[number]
            if self._has(visit, state):
                self._use(state)
                self._mark(state, session, is_over)
        state = self._states[visit.state]
        if self._has(visit, state):
            self._mark(state, session, is_over)
        self.use_again(visit)
        self.settle()

    def _has(self, visit: Visit, state: State) -> bool:
        """Return whether a state is kept, and on the way of a request."""
        place = state.position // self.block_size - 1
        return state.is_kept and place < visit.num_nodes and visit.nodes[place] == state.node

    # Sessions.

    def _mark(self, state: State, session: i64, is_over: bool) -> None:
        """A session has used a state, which is its own as long as no other has."""
        if session == NO_SESSION:
            return
        if state.session != NO_SESSION and state.session != session:
            session = SHARED
        self._set_session(state, session)
        self._set_over(state, is_over and session != SHARED)

    def _set_session(self, state: State, session: i64) -> None:
        """Put a state in the list of the session that alone has used it. O(1) expected and amortised."""
        before, after = state.session_before, state.session_after
        if state.session == session:
            return
        if state.session > NO_SESSION:
            if after != NO_STATE:
                self._states[after].session_before = before
            if before != NO_STATE:
                self._states[before].session_after = after
            elif after != NO_STATE:
                self._of_session.remember(state.session, after)
            else:
                self._of_session.take(state.session)
        if session > NO_SESSION:
            first = self._of_session.number(session)
            first = first if first > 0 else NO_STATE
            self._of_session.remember(session, state.number)
            state.session_before, state.session_after = NO_STATE, first
            if first != NO_STATE:
                self._states[first].session_before = state.number
        state.session = session

    def say(self, session: i64, is_over: bool) -> None:
        """A session is over, or is not after all: that is known of the states that it alone used. O(those states)."""
        number = self._of_session.number(session)
        while number > NO_STATE:
            self._set_over(self._states[number], is_over)
            number = self._states[number].session_after

    def check_sessions(self, sessions: Sessions) -> None:
        """Compare what is said of sessions with what is known of their states. O(states). Raises `InvariantError`."""
        for state in self._known:
            slot = sessions.slot_of(state.session)
            if state.is_over != (slot >= 0 and sessions.is_over(slot)):
                raise InvariantError(f"states: state {state.number} is said to be over, or not, unlike its session")

    def _set_over(self, state: State, is_over: bool) -> None:
        if state.is_over == is_over:
            return
        if self.order.learns:
            # A new age of another class.
            self.order.note(state, False, self.now)
            state.since = self.now
        state.is_over = is_over
        self._file(state)

    def drop_all(self) -> None:
        """Let all go that are kept."""
        for state in self._known[:]:
            if state.is_kept:
                self.drop(state.number)

    def state(self, number: i64) -> State:
        """Return the state of a number."""
        return self._states[number]

    def is_kept(self, number: i64) -> bool:
        """Return whether the state of this number is there."""
        return self._states[number].is_kept

    def settle(self) -> None:
        """The request is over: relearn when it is time, and bound what is remembered. O(1) amortised."""
        if self.now % RELEARNED_EVERY == 1:
            self.order.learn(self._ages, self.now)
        if len(self._known) > (1 + GHOSTS_A_STATE) * self.num_kept + FEWEST_GHOSTS:
            ages = sorted([int(state.since) for state in self._known])
            old = ages[len(ages) // 4]
            for state in [state for state in self._known if not state.is_kept and state.since <= old]:
                self._forget(state)

    def check(self) -> None:
        """Count all sums from scratch. O(nodes + states * depth). Raises `InvariantError`."""
        self.tree.check()
        self._ages.check(self._known if self.order.learns else [])
        self._heaps.check([state for state in self._known if state.is_kept])
        held: i64 = 0
        for state in self._known:
            if self.tree.state[state.node] != state.number:
                raise InvariantError(f"states: state {state.number} is not at its node")
            if state.is_kept:
                held += self.order.state_tokens
                if self.tree.num_alone(state.node) * self.block_size != state.alone:
                    raise InvariantError(f"states: {state.alone} tokens are said to be state {state.number}'s alone")
                if self.order.learns and self._next_above(state.node) != state.above:
                    raise InvariantError(f"states: state {state.above} is said to be above state {state.number}")
                self._check_place(state)
        for node in range(1, i64(len(self.tree.key))):
            held += self.block_size if self.tree.num_states[node] > 0 else 0
        if held != self.num_held:
            raise InvariantError(f"states: {held} tokens are held, the count says {self.num_held}")

    def _check_place(self, state: State) -> None:
        """A kept state is in the heap where it belongs, with its gain."""
        cell = self.order.cell(state, self.now)
        gain = self.order.gain(state, self._states[state.above].position)
        group = (BUSY if state.is_busy else i64(0)) + (NOT_OVER if self.order.learns or not state.is_over else i64(0))
        if state.heap != group * self.order.num_cells + cell + 1 or state.gain != gain:
            raise InvariantError(f"states: state {state.number} is not filed as what it is")
