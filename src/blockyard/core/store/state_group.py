"""A state group knows which states of a hybrid model are cached, what a hit loads, and what a step saves."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import MAX_GROUPS, CacheConfig
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit, Prompt
from ..policies.states.book import StateBook, Visit
from ..policies.states.orders import make_order
from ..policies.states.places import Places
from ..policies.states.shelf import LATEST, StateShelf
from ..policies.states.state import JUNCTION, OUTPUT_END, PROMPT_END
from ..policies.states.tree import ROOT
from ..pool.ledger import BlockLedger
from ..sequences.table import SequenceTable
from .content_ledger import ContentLedger
from .group_table import GroupTable
from .transfers import Transfers

#: What a content pool calls the first block of a state; the parts of one state follow.
FIRST_PART: Final[i64] = MAX_GROUPS
#: Behind every boundary.
NEVER: Final[i64] = 1099511627776
#: Hashes of prompts are remembered for so many pools of tokens.
REMEMBERED_POOLS: Final = 4
#: A boundary and why it is wanted, in one number: the kind stands below.
KIND_SPAN: Final[i64] = 16
#: A request without a memory of its prompt.
NO_VISIT: Final = Visit(zeros_i64(0), 0, 0)


class Save:
    """Blocks are held for a state that a plan says to save, and that is not known to be there."""

    def __init__(self, boundary: i64, blocks: vec[i32]) -> None:
        self.boundary = boundary
        self.blocks = blocks


class StateGroup:
    """Each running sequence has a working state in a slot, the number of its row, which it alone writes.

    A kept state takes `num_parts` blocks of the pool, cached as (content, part): the content of the token block before
    its boundary. So what holds for a block holds for it. A state is complete while all of its parts are cached.

    A hit holds the blocks of its state in `SequenceTable.copy_from` until the first step loads them. A save holds its
    blocks here from the plan to the commit that reaches its boundary; they are cached then, and let go.
    """

    def __init__(
        self, config: CacheConfig, pool: ContentLedger, token_blocks: BlockLedger, sequences: SequenceTable
    ) -> None:
        self.pool = pool
        self.token_blocks = token_blocks
        self.sequences = sequences
        self.block_size: i64 = config.hash_block_size
        self.alignment: i64 = config.hit_alignment
        self.num_parts: i64 = config.state_blocks
        self.max_model_len: i64 = config.max_model_len
        self.cuts = config.cut_chunks
        self.is_caching = config.enable_prefix_caching
        self.places = Places(config.state_places, self.alignment)
        remembered = REMEMBERED_POOLS * config.num_blocks * config.layer_groups[0].block_size
        name = config.state_order if config.state_order != "blocks" else "lru"
        order = make_order(name, self.num_parts * config.layer_groups[0].block_size)
        self.book = StateBook(order, self.block_size, remembered // config.hash_block_size)
        #: Where states are judged as such, and not block by block as the eviction policy says.
        self.shelf = StateShelf(self.book, config.num_blocks) if config.state_order != "blocks" else None
        self.num_saved: i64 = 0
        self.num_kept: i64 = 0
        self.num_replaced: i64 = 0
        self.num_refused: i64 = 0
        rows = config.max_num_seqs
        #: 1 once a plan has filled the slot of a row.
        self._is_begun = zeros_i64(rows)
        #: Behind this boundary a row is in its output.
        self._last = zeros_i64(rows)
        #: The next boundary of a row, as seen from a position.
        self._next = zeros_i64(rows)
        self._seen_from = zeros_i64(rows)
        self._num_pending = zeros_i64(rows)
        #: Boundaries and kinds, ascending.
        self._wanted: list[list[int]] = [[]] * rows
        self._visits: list[Visit] = [NO_VISIT] * rows
        #: The states that the book has of a row.
        self._kept: list[list[int]] = [[]] * rows
        #: Boundaries that the order refuses a state at, which no plan told yet.
        self._refused: list[list[int]] = [[]] * rows
        self._num_refused = zeros_i64(rows)
        #: All boundaries and kinds that were refused, of an output the latest one.
        self._unkept: list[list[int]] = [[]] * rows
        self._pending: list[list[Save]] = [[]] * rows
        #: The latest kept state of a row's output, which the next one takes the place of.
        self._rolling: list[list[int]] = [[]] * rows
        #: The contents whose states a row hit or kept: they were of use up to its end.
        self._used: list[list[int]] = [[]] * rows
        #: When so many token blocks were taken, those that states need are to be moved in their queue.
        self._refresh_at: i64 = 0
        #: Slots to copy in the next plan, (from, to).
        self._copies: list[int] = []
        #: What the plan that is made now saves: (row, boundary); and the rows whose slots it fills first.
        self._asked: list[int] = []
        self._opening: list[int] = []
        self._no_sources: list[int] = []

    # Hits.

    def parts_of(self, content: i64) -> list[int]:
        """Return the blocks of the state behind a content; none unless all of them are cached. O(parts)."""
        found: list[int] = []
        for part in range(self.num_parts):
            block = self.pool.find_content(content, FIRST_PART + part)
            if block == NULL_BLOCK:
                return []
            found.append(int(block))
        return found

    def reach(self, index: PrefixIndex, hit: Hit, limit: i64) -> i64:
        """Return the longest boundary up to `limit` tokens with a state, and note its blocks. O(blocks + parts)."""
        boundary = limit - limit % self.alignment
        while boundary > 0:
            content = index.content_of(i64(hit.blocks[boundary // self.block_size - 1]))
            hit.state = self.parts_of(content)
            if hit.state:
                return boundary
            boundary -= self.alignment
        return 0

    def num_idle(self, hit: Hit) -> i64:
        """Return how many blocks of a hit's state are idle."""
        idle: i64 = 0
        for block in hit.state:
            idle += 1 if self.pool.ref_cnt[i64(block)] == 0 else 0
        return idle

    def hold(self, row: i64, hit: Hit) -> None:
        """Hold the state that a hit ends at, until the first step has loaded it."""
        for block in hit.state:
            self.pool.note_hit(block)
            self.pool.share_one(block)
        self.sequences.copy_from[row] = hit.state
        if hit.state:
            content = self.token_blocks.index.content_of(i64(hit.blocks[hit.num_usable - 1]))
            self._used[row] = [int(content)]

    def unhold(self, row: i64) -> None:
        """Undo the latest `hold`."""
        for block in reversed(self.sequences.copy_from[row]):
            self.pool.unshare_one(block)
        self.sequences.copy_from[row] = []

    # A sequence's life.

    def admit(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Choose the boundaries of a prompt that was taken in, and remember it. O(blocks)."""
        last = (prompt.num_tokens - 1) // self.alignment * self.alignment
        self._open(row, last)
        if not self.is_caching:
            return
        start = hit.num_usable * self.block_size
        visit = self._visit(prompt, hit, last, start)
        self._visits[row] = visit
        known = max(visit.known, hit.num_served * self.block_size)
        self.places.find(start, known, last, 0, prompt.told, prompt.queued)
        places = self.places
        wanted = [place * int(KIND_SPAN) + kind for place, kind in zip(places.positions, places.kinds, strict=True)]
        self._wanted[row] = sorted(wanted)
        if self.shelf is not None and hit.state and visit.state == 0:
            # What is hit is worth what any state is, whether the book knew of it or not.
            self._register(row, self.book.keep(visit, start, JUNCTION), hit.state)

    def _visit(self, prompt: Prompt, hit: Hit, last: i64, reached: i64) -> Visit:
        """Tell the book of a prompt: what it hits has hashes already, what follows up to the next span gets some."""
        index = self.token_blocks.index
        found = hit.num_usable
        num_blocks = max(found, min(prompt.num_tokens // self.block_size, prompt.next_span_block(found - 1)))
        chain = root_hash(hit.root) if found == 0 else index.chain_hash[i64(hit.blocks[found - 1])]
        index.hash_run(prompt.words, found, num_blocks, chain)
        keys = index.hashes[:num_blocks]
        for place in range(found):
            keys[place] = index.chain_hash[i64(hit.blocks[place])]
        return self.book.visit(keys, num_blocks, last, reached)

    def _open(self, row: i64, last: i64) -> None:
        self._is_begun[row] = 0
        self._last[row] = last
        self._seen_from[row] = NEVER
        self._wanted[row] = []
        self._pending[row] = []
        self._rolling[row] = []
        self._kept[row] = []
        self._refused[row] = []
        self._num_refused[row] = 0
        self._unkept[row] = []
        self._visits[row] = NO_VISIT

    def fork(self, row: i64, child: i64) -> None:
        """Let the next plan copy the slot of `row`, if there is anything in it."""
        self._open(child, self._last[row])
        self._used[child] = []
        self._wanted[child] = self._wanted[row]
        if self._visits[row] is not NO_VISIT:
            self._visits[child] = self._visits[row].copied()
        self._is_begun[child] = self._is_begun[row]
        if self._is_begun[row] != 0:
            self._copies += (int(self._source(row)), int(child))

    def skip(self, row: i64, num_tokens: i64) -> None:
        """Want no state of a row before `num_tokens` tokens, and one there, if one can stand there. O(wanted)."""
        wanted = [each for each in self._wanted[row] if i64(each) // KIND_SPAN >= num_tokens]
        is_place = num_tokens % self.alignment == 0 and 0 < num_tokens <= self._last[row]
        if is_place and self.is_caching and not (wanted and i64(wanted[0]) // KIND_SPAN == num_tokens):
            wanted.insert(0, int(num_tokens * KIND_SPAN + JUNCTION))
        self._wanted[row] = wanted
        self._seen_from[row] = NEVER

    def _source(self, row: i64) -> i64:
        """Return the slot that has the state of `row` now."""
        for place in range(0, len(self._copies), 2):
            if self._copies[place + 1] == row:
                return self._copies[place]
        return row

    def shortest_cut(self, row: i64) -> i64:
        """Return the fewest computed tokens that a cut may leave: a state cannot be cut."""
        return self.sequences.num_computed[row] if self._is_begun[row] != 0 else i64(0)

    def close(self, row: i64) -> None:
        """Let go of what a row was still to save."""
        self._drop(row, -1)
        copies = self._copies
        if copies:
            self._copies = []
            for place in range(0, len(copies), 2):
                if copies[place + 1] != row:
                    self._copies += copies[place : place + 2]
        if self.shelf is None:
            try:
                self._touch(row)
            except MemoryError:  # these states go sooner
                self._used[row] = self._no_sources
        self._open(row, 0)
        self._used[row] = []

    def _touch(self, row: i64) -> None:
        """Let the states that a row used go in the queue with its keys and values: it used them up to its end."""
        for content in self._used[row]:
            parts = self.parts_of(content) if self.pool.stack is None else []
            for block in parts:
                if self.pool.ref_cnt[i64(block)] == 0 and block < self.pool.num_blocks:
                    self.pool.queue.remove(block)
                    self.pool.queue.append(block)

    # What stands where, for the order of states.

    def leave(self, row: i64, tables: list[GroupTable]) -> None:
        """A row is about to let go of its blocks: say where they stand, and that its states were of use up to now.

        O(blocks).
        """
        visit = self._visits[row]
        if self.shelf is None or visit is NO_VISIT:
            return
        self._extend(row, visit)
        for place in range(min(visit.num_nodes, self.sequences.num_blocks[row])):
            node = self.book.node_at(visit, place)
            if node != ROOT:
                self.shelf.put_token(node, self.sequences.block_at(row, place))
        for table in tables:
            self.shelve(row, table, table.num_null[row], table.num_blocks[row])
        self._leave(row, visit)

    def _extend(self, row: i64, visit: Visit) -> None:
        """The book knows of what was published of an output, and behind spans."""
        index = self.token_blocks.index
        place = visit.num_nodes
        while place < self.sequences.num_published[row]:
            token_block = self.sequences.block_at(row, place)
            if not index.is_cached(token_block):
                return
            self.book.extend(visit, index.chain_hash[token_block])
            place += 1
            if visit.num_nodes < place:
                return

    def shelve(self, row: i64, table: GroupTable, first: i64, last: i64) -> None:
        """Blocks of a layer group at places `first` to `last` are let go: they stand where the row's tokens do."""
        visit = self._visits[row]
        shelf = self.shelf
        if shelf is None or visit is NO_VISIT:
            return
        for place in range(first, min(last, visit.num_nodes // table.span)):
            block = table.block_at(row, place)
            if block != NULL_BLOCK and self.pool.is_cached(block):
                node = self.book.node_at(visit, (place + 1) * table.span - 1)
                if node != ROOT and shelf.node_of[block] != node:
                    shelf.put(block, node, table.number)

    def _leave(self, row: i64, visit: Visit) -> None:
        """The book has the last state of the output too; all that the row took or hit was of use up to now."""
        latest = self._rolling[row]
        self._rolling[row] = []
        if latest:
            parts = self.parts_of(latest[0])
            if parts == latest[2:] and self._is_latest(parts):
                self._register(row, self.book.keep(visit, latest[1], OUTPUT_END), parts)
            self._forget_latest(latest)
        self._remember_unkept(row, visit, i64(latest[1]) if latest else 0)
        computed = self.sequences.num_computed[row]
        if self.places.takes_output_end and computed - computed % self.alignment == self._last[row]:
            self._note_short_output(row)
        positions = [(int(self.book.state(number).position), number) for number in self._kept[row]]
        positions.sort(reverse=True)
        self.book.leave(visit, [number for _, number in positions])

    def _remember_unkept(self, row: i64, visit: Visit, latest: i64) -> None:
        """Tell the book of refused states as of ones that went at once: it learns what they would have hit."""
        for unkept in self._unkept[row]:
            boundary = i64(unkept) // KIND_SPAN
            if boundary <= self.sequences.num_computed[row] and (boundary <= self._last[row] or boundary > latest):
                number = self.book.keep(visit, boundary, i64(unkept) % KIND_SPAN)
                if number != 0:
                    self.book.drop(number)

    def _note_short_output(self, row: i64) -> None:
        """An output that ends in the block behind the prompt's last boundary has its end there too."""
        for number in self._kept[row]:
            state = self.book.state(number)
            if state.position == self._last[row] and state.kind == PROMPT_END and state.num_hits == 0:
                state.kind = OUTPUT_END

    def _register(self, row: i64, number: i64, parts: list[int]) -> None:
        """The book keeps a state: its blocks are known as such, and what stands before it is needed."""
        shelf = self.shelf
        if number == 0 or shelf is None:
            return
        state = self.book.state(number)
        state.parts = parts
        state.is_busy = self.pool.ref_cnt[i64(parts[0])] > 0
        shelf.own(parts, number)
        self._kept[row] = [*self._kept[row], int(number)]
        node = state.node
        count = state.alone // self.block_size
        while node != ROOT and count > 0:
            for block in shelf.at(node):
                self._judge_again(i64(block))
            count -= 1
            node = self.book.tree.parent[node]
        for block in parts:
            self._judge_again(i64(block))

    def _judge_again(self, block: i64) -> None:
        """An idle block is needed now: the layers hear of it anew."""
        stack = self.pool.stack
        if stack is not None and self.pool.ref_cnt[block] == 0 and block < self.pool.num_blocks:
            stack.judge_again(block, self.pool.index.chain_hash[block])

    def _is_latest(self, parts: list[int]) -> bool:
        shelf = self.shelf
        return shelf is not None and bool(parts) and shelf.part_of[i64(parts[0])] == LATEST

    def _forget_latest(self, latest: list[int]) -> None:
        """Let go of the latest state of an output, as far as it is there and the book does not keep it."""
        for place in range(2, len(latest)):
            block = i64(latest[place])
            if self.shelf is not None and self.shelf.part_of[block] == LATEST:
                self.pool.uncache(block)

    def keep_tokens(self) -> None:
        """Move token blocks that states need to the end of their queue, before they are forgotten. O(1) amortised."""
        ledger = self.token_blocks
        shelf = self.shelf
        if shelf is None or ledger.num_allocated_blocks < self._refresh_at:
            return
        tree = self.book.tree
        num_moved: i64 = 0
        node = i64(len(tree.key)) - 1
        while node > ROOT:
            block = shelf.token_at(node)
            if tree.num_states[node] > 0 and block != NULL_BLOCK and self._is_idle_token(block, tree.key[node]):
                ledger.queue.remove(block)
                ledger.queue.append(block)
                num_moved += 1
            node -= 1
        self._refresh_at = ledger.num_allocated_blocks + max((ledger.queue.num_free - num_moved) // 2, 1)

    def _is_idle_token(self, block: i64, key: i64) -> bool:
        index = self.token_blocks.index
        return self.token_blocks.ref_cnt[block] == 0 and index.is_cached(block) and index.chain_hash[block] == key

    # The step.

    def next_boundary(self, row: i64, start: i64) -> i64:
        """Return the first boundary behind `start` at which this row's state is wanted. O(1) but for one step each."""
        if self._seen_from[row] <= start < self._next[row]:
            return self._next[row]
        found = NEVER
        for wanted in self._wanted[row]:
            boundary = i64(wanted) // KIND_SPAN
            if boundary > start and self._takes(row, boundary, i64(wanted) % KIND_SPAN):
                found = boundary
                break
        if self.places.takes_output_end and self.is_caching:
            position = max(start, self._last[row])
            position += self.alignment - position % self.alignment
            if position < found and self._takes(row, position, OUTPUT_END):
                found = position
        self._seen_from[row] = start
        self._next[row] = found
        return found

    def _takes(self, row: i64, boundary: i64, kind: i64) -> bool:
        """Return whether the order keeps a state here, and does not let it go at once for the next one.

        Free blocks are room for it if a request like this one has room beside it.
        """
        if self._refused[row] and int(boundary) in self._refused[row]:
            return False
        stack = self.pool.stack
        if not self.book.order.learns or stack is None or self._visits[row] is NO_VISIT:
            return True
        if self.pool.queue.num_free - stack.num_withheld() >= self.num_parts + self.sequences.num_blocks[row]:
            return True
        if self.book.would_score(self._visits[row], boundary, kind) >= self.book.floor():
            return True
        self._refused[row] = [*self._refused[row], int(boundary)]
        self._num_refused[row] += 1
        unkept = self._unkept[row]
        if boundary > self._last[row] and unkept and i64(unkept[-1]) // KIND_SPAN > self._last[row]:
            unkept = unkept[:-1]
        self._unkept[row] = [*unkept, int(boundary * KIND_SPAN + kind)]
        return False

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """End what each row is to compute, from `first` on, at its next boundary. O(batch)."""
        self._asked = []
        self._opening = []
        if not self.cuts:
            return
        for place in range(i64(len(rows))):
            row = rows[place]
            # What is longer than a sequence may be is refused as it is.
            if 1 < counts[place] <= self.max_model_len - first[row]:
                counts[place] = min(counts[place], self.next_boundary(row, first[row]) - first[row])

    def look_again(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """Let rows take a second look that pass a boundary in this step, or have a save or a refusal left. O(batch)."""
        ready = self.sequences.ready
        seen_from = self._seen_from
        following = self._next
        num_pending = self._num_pending
        num_refused = self._num_refused
        for place in range(i64(len(rows))):
            row = rows[place]
            start = first[row]
            # Counts that are too large are refused as they are, whatever their sum.
            is_quiet = seen_from[row] <= start and counts[place] < following[row] - start
            if not is_quiet or num_pending[row] > 0 or num_refused[row] > 0:
                ready[row] = 0

    def is_begun(self, row: i64) -> bool:
        """Return whether a plan has filled the slot of a row."""
        return self._is_begun[row] != 0

    def num_blocks_to_save(self, row: i64, start: i64, end: i64) -> i64:
        """Return the blocks that saving what these tokens pass takes."""
        return self.num_parts * i64(len(self._boundaries(row, start, end)))

    def num_to_drop(self, row: i64) -> i64:
        """Return the blocks of saves that `begin` lets go of: their step was not committed. O(saves)."""
        if self._num_pending[row] == 0 or self.sequences.num_ahead[row] > 0:
            return 0
        dropped = [save for save in self._pending[row] if save.boundary > self.sequences.num_computed[row]]
        return self.num_parts * i64(len(dropped))

    def _boundaries(self, row: i64, start: i64, end: i64) -> list[int]:
        boundaries: list[int] = []
        boundary = self.next_boundary(row, start)
        if self.cuts:
            return [int(boundary)] if boundary <= end else boundaries
        while boundary <= end:
            boundaries.append(int(boundary))
            boundary = self.next_boundary(row, boundary)
        return boundaries

    def begin(self, row: i64, start: i64, end: i64, transfers: Transfers) -> None:
        """Fill the slot of a row that has none yet, and note what its step saves."""
        self.settle(row)
        if self._is_begun[row] == 0:
            source = self.sequences.copy_from[row]
            if source:
                transfers.state_loads.append(int(row))
                transfers.state_loads += source
            else:
                transfers.state_clears.append(int(row))
            self._opening.append(int(row))
        for boundary in self._boundaries(row, start, end):
            self._asked += (int(row), boundary)
        if self._refused[row]:
            self._tell_refused(row, end, transfers)

    def _tell_refused(self, row: i64, end: i64, transfers: Transfers) -> None:
        later: list[int] = []
        for boundary in self._refused[row]:
            if boundary <= end:
                transfers.state_refused += (int(row), boundary)
                self.num_refused += 1
            else:
                later.append(boundary)
        self._refused[row] = later
        self._num_refused[row] = len(later)

    def save(self, transfers: Transfers) -> None:
        """Say what the plan copies, and what it saves as far as blocks are free: a save is no reason to refuse."""
        self.keep_tokens()
        transfers.state_blocks = int(self.num_parts)
        transfers.state_copies += self._copies
        self._copies = []
        asked = self._asked
        self._asked = []
        for place in range(0, len(asked), 2):
            if not self._has_room():
                break
            row = i64(asked[place])
            if self.pool.charge_row(row) < self.num_parts:
                continue
            blocks = zeros_i32(int(self.num_parts))
            pending = [*self._pending[row], Save(i64(asked[place + 1]), blocks)]
            self.pool.acquire(blocks, 0, self.num_parts)
            self._pending[row] = pending
            self._num_pending[row] += 1
            self.num_saved += 1
            transfers.state_saves += asked[place : place + 2]
            transfers.state_saves += [int(block) for block in blocks]
        self._note_opened(transfers)

    def _note_opened(self, transfers: Transfers) -> None:
        """The plan is made, and fills these slots; where it could not be made, the next one does."""
        for row in self._opening:
            transfers.held_sources += self.sequences.copy_from[row]
        for row in self._opening:
            self.sequences.copy_from[row] = self._no_sources  # no object is made: from here on nothing fails
            self._is_begun[i64(row)] = 1

    def _has_room(self) -> bool:
        """Return whether blocks for one more state can be taken; of a policy's only those that it has named."""
        if self.pool.stack is None:
            return self.pool.queue.num_free >= self.num_parts
        return self.pool.queue.num_empty_first(self.pool.index, self.num_parts) >= self.num_parts

    # What was saved.

    def settle_all(self, rows: vec[i64]) -> None:
        """Settle each of these rows. O(batch), and what their saves take."""
        num_pending = self._num_pending
        for place in range(i64(len(rows))):
            if num_pending[rows[place]] > 0:
                self.settle(rows[place])

    def settle(self, row: i64) -> None:
        """Cache the saves whose boundaries are computed, and drop those that no open reservation reaches."""
        if self._num_pending[row] == 0:
            return
        computed = self.sequences.num_computed[row]
        for save in self._pending[row]:
            if save.boundary <= computed:
                self._keep(row, save)
        self._drop(row, computed + self.sequences.num_ahead[row])

    def _keep(self, row: i64, save: Save) -> None:
        """Cache one state, unless there is one."""
        place = save.boundary // self.block_size
        content = NO_CONTENT
        if place <= self.sequences.num_published[row]:
            content = self.token_blocks.index.content_of(self.sequences.block_at(row, place - 1))
        if content == NO_CONTENT or self.parts_of(content):
            self._let_go(row, save)
            return
        for part in range(self.num_parts):
            self.pool.cache_content(i64(save.blocks[part]), content, FIRST_PART + part)
        self.num_kept += 1
        self._used[row] = [*self._used[row], int(content)]
        parts = [int(block) for block in save.blocks]
        if save.boundary > self._last[row]:
            self._replace(row, content, save.boundary, parts)
        elif self.shelf is not None:
            kind = self._kind_of(row, save.boundary)
            self._extend(row, self._visits[row])
            self._register(row, self.book.keep(self._visits[row], save.boundary, kind), parts)
        self._let_go(row, save)

    def _kind_of(self, row: i64, boundary: i64) -> i64:
        for wanted in self._wanted[row]:
            if i64(wanted) // KIND_SPAN == boundary:
                return i64(wanted) % KIND_SPAN
        return JUNCTION

    def _replace(self, row: i64, content: i64, boundary: i64, parts: list[int]) -> None:
        """Forget the state before in the output, unless others hit it: of an output the last one is kept."""
        old = self._rolling[row]
        is_replaced = False
        for place in range(2, len(old)):
            block = i64(old[place])
            is_there = self.pool.is_cached(block) and self.pool.content_of(block) == old[0]
            if is_there and (self.shelf is None or self.shelf.part_of[block] == LATEST):
                self.pool.uncache(block)
                is_replaced = True
        self.num_replaced += 1 if is_replaced else 0
        self._rolling[row] = [int(content), int(boundary), *parts]
        if self.shelf is not None:
            self.shelf.own(parts, LATEST)

    def _let_go(self, row: i64, save: Save) -> None:
        save.boundary = 0
        for block in save.blocks:
            self.pool.give_back_one(row, i64(block), NULL_BLOCK)

    def _drop(self, row: i64, reach: i64) -> None:
        """Forget the saves that are done, and those behind `reach`."""
        left: list[Save] = []
        for save in self._pending[row]:
            if save.boundary > reach:
                self._let_go(row, save)
            elif save.boundary > 0:
                left.append(save)
        self._pending[row] = left
        self._num_pending[row] = len(left)

    def pending_blocks(self, row: i64) -> list[int]:
        """Return the blocks that a row holds for saves. O(blocks)."""
        return [int(block) for save in self._pending[row] for block in save.blocks]
