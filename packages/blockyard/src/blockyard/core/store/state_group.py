"""A state group knows which states of a hybrid model are cached, what a hit loads, and what a step saves."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import MAX_GROUPS, CacheConfig
from ...errors import InvalidArgument
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..blocks.ledger import BlockLedger
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit, Prompt
from ..policies.states.book import StateBook, Visit
from ..policies.states.orders import make_order
from ..policies.states.places import Places
from ..policies.states.shelf import StateShelf
from ..policies.states.state import JUNCTION, NO_SESSION, OUTPUT_END, PROMPT_END, SHARED
from ..policies.states.tree import NO_STATE, ROOT
from ..sequences.table import UNDONE, SequenceTable
from .content_ledger import ContentLedger
from .group_table import GroupTable
from .needed_tokens import NeededTokens
from .saves import APART, DONE, NONE, OPEN, OVER, Saves
from .slot_copies import SlotCopies
from .transfers import Numbers, Transfers

#: What a content pool calls the first block of a state; the parts of one state follow.
FIRST_PART: Final[i64] = MAX_GROUPS
#: Behind every boundary.
NEVER: Final[i64] = 1099511627776
#: For how many pools of tokens hashes of prompts are remembered.
REMEMBERED_POOLS: Final = 4
#: A boundary and why it is wanted, in one number: the kind stands below.
KIND_SPAN: Final[i64] = 16
#: A request without a memory of its prompt.
NO_VISIT: Final = Visit(zeros_i64(0), 0, 0)


class StateGroup:
    """Each running sequence has a working state in a slot, the number of its row, which it alone writes.

    A kept state takes `num_parts` blocks of the pool, cached as (content, part): the content of the token block before
    its boundary. So what holds for a block holds for it. A state is complete while all of its parts are cached.

    A hit holds the blocks of its state in `SequenceTable.copy_from` until the first step loads them. A save holds its
    blocks in `saves` from the plan to the commit that reaches its boundary; they are cached then, and let go. Of an
    output the latest state is kept: the next save takes its blocks, and nothing finds it from that plan on.
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
        self.cuts = config.states.cut_chunks
        self.is_caching = config.enable_prefix_caching
        self.places = Places(config.states.checkpoints, self.alignment)
        remembered = REMEMBERED_POOLS * config.num_blocks * config.layer_groups[0].block_size
        order = make_order(config.states.order, self.num_parts * config.layer_groups[0].block_size)
        self.book = StateBook(order, self.block_size, remembered // config.hash_block_size)
        self.shelf = StateShelf(self.book, config.num_blocks)
        self.num_saved: i64 = 0
        self.num_kept: i64 = 0
        self.num_replaced: i64 = 0
        self.num_refused: i64 = 0
        rows = config.max_num_seqs
        #: What the lists of rows begin and end with; never added to.
        self._nothing: list[int] = []
        #: 1 once a plan has filled the slot of a row.
        self._is_begun = zeros_i64(rows)
        #: Behind this boundary a row is in its output.
        self._last = zeros_i64(rows)
        #: The next boundary of a row, as seen from a position.
        self._next = zeros_i64(rows)
        self._seen_from = zeros_i64(rows)
        #: Tokens of a row that come from outside, with their states: it is not cut before their end.
        self._brought = zeros_i64(rows)
        #: No state of a row stands anywhere before so many tokens are computed, though some are.
        self._lacking = zeros_i64(rows)
        #: Boundaries and kinds, ascending.
        self._wanted: list[list[int]] = [self._nothing] * rows
        self._visits: list[Visit] = [NO_VISIT] * rows
        #: The states that the book has of a row.
        self._kept: list[list[int]] = [self._nothing] * rows
        #: Boundaries that the order refuses a state at, which no plan told yet.
        self._refused: list[list[int]] = [self._nothing] * rows
        self._num_refused = zeros_i64(rows)
        #: All boundaries and kinds that were refused, of an output the latest one.
        self._unkept: list[list[int]] = [self._nothing] * rows
        #: What plans said to save, and is not known to be there.
        self.saves = Saves(rows, self.num_parts)
        #: The rows of a batch with saves, and the contents before the first of each.
        self._due = zeros_i64(rows)
        self._due_contents = zeros_i64(rows)
        #: The blocks of one state, for a moment.
        self._one_state = zeros_i32(int(self.num_parts))
        is_told = config.observe.track_misses or config.observe.enable_kv_cache_events
        pool.make_part_room(self.num_parts, config.max_num_seqs, not is_told)
        #: The record of the latest kept state of a row's output, which the next one takes the place of; 0 for none.
        self._rolling = zeros_i64(rows)
        self._tokens = NeededTokens(token_blocks, self.shelf)
        self._copies = SlotCopies(rows)
        #: What the plan that is made now saves: (row, boundary); and the rows whose slots it fills first.
        self._asked = Numbers()
        self._opening = Numbers()

    # Hits.

    def parts_of(self, content: i64) -> list[int]:
        """Return the blocks of the state behind a content; none unless all of them are cached. O(parts)."""
        found = self.pool.find_parts(content, FIRST_PART, self.num_parts)
        return [int(block) for block in found] if len(found) == self.num_parts else []

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
        parts = self._one_state
        count: i64 = 0
        for block in hit.state:
            parts[count] = i32(block)
            count += 1
        self.pool.share_hits(parts, 0, count)
        self.sequences.copy_from[row] = hit.state

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
        self.places.find(start, known, last, 0, prompt.checkpoints, prompt.branches)
        places = self.places
        wanted = [place * int(KIND_SPAN) + kind for place, kind in zip(places.positions, places.kinds, strict=True)]
        self._wanted[row] = sorted(wanted)
        if hit.state and visit.state == 0:
            # What is hit is worth what any state is, whether the book knew of it or not.
            self._register(row, self.book.keep(visit, start, JUNCTION), hit.state)
        if prompt.external_state_tokens > start:
            self.skip(row, prompt.external_state_tokens, 0)
            self._lacking[row] = prompt.external_state_tokens if hit.lacks_state else i64(0)

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
        self._brought[row] = 0
        self._lacking[row] = 0
        self._wanted[row] = self._nothing
        self._end_rolling(row)
        self._kept[row] = self._nothing
        self._refused[row] = self._nothing
        self._num_refused[row] = 0
        self._unkept[row] = self._nothing
        self._visits[row] = NO_VISIT

    def _end_rolling(self, row: i64) -> None:
        """Nothing is the latest state of a row's output any more."""
        if self._rolling[row] != NONE:
            self.saves.free(self._rolling[row])
            self._rolling[row] = NONE

    def fork(self, row: i64, child: i64) -> None:
        """Let the next plan copy the slot of `row`, if there is anything in it."""
        self._open(child, self._last[row])
        self._wanted[child] = self._wanted[row]
        if self._visits[row] is not NO_VISIT:
            self._visits[child] = self._visits[row].copied()
        self._is_begun[child] = self._is_begun[row]
        self._lacking[child] = self._lacking[row]
        if self._is_begun[row] != 0:
            self._copies.add(row, child)

    def skip(self, row: i64, num_tokens: i64, kept: i64) -> None:
        """Want no state of a row before `num_tokens` tokens but one at `kept` (0: none), and one there, if one can
        stand there. What is computed up to there is not cut. O(wanted)."""
        wanted = [each for each in self._wanted[row] if i64(each) // KIND_SPAN >= num_tokens]
        is_place = num_tokens % self.alignment == 0 and 0 < num_tokens <= self._last[row]
        if is_place and self.is_caching and not (wanted and i64(wanted[0]) // KIND_SPAN == num_tokens):
            wanted.insert(0, int(num_tokens * KIND_SPAN + JUNCTION))
        if kept > 0 and self.is_caching:
            wanted.insert(0, int(kept * KIND_SPAN + (PROMPT_END if kept == self._last[row] else JUNCTION)))
        self._wanted[row] = wanted
        self._brought[row] = num_tokens
        self._seen_from[row] = NEVER

    def source(self, row: i64) -> i64:
        """Return the slot that has the state of `row` now. O(1)."""
        return self._copies.source(row)

    def shortest_cut(self, row: i64) -> i64:
        """Return the fewest computed tokens that a cut may leave: a state cannot be cut."""
        return self.sequences.num_computed[row] if self._is_begun[row] != 0 or self.lacks(row) else i64(0)

    def close(self, row: i64) -> None:
        """Let go of what a row was still to save."""
        self._drop(row, -1)
        self._copies.drop(row)
        self._open(row, 0)

    # What stands where, for the order of states.

    def leave(self, row: i64, tables: list[GroupTable]) -> None:
        """A row is about to let go of its blocks: say where they stand, and that its states were of use up to now.

        O(blocks).
        """
        visit = self._visits[row]
        if visit is NO_VISIT:
            return
        self._extend(row, visit)
        self.shelf.put_tokens(visit, self.sequences.blocks, row * self.sequences.width, self.sequences.num_blocks[row])
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
        if visit is NO_VISIT:
            return
        blocks = table.blocks
        start = row * table.width
        span = table.span
        identity = self.pool.index.identity
        node_of = shelf.node_of
        nodes = visit.nodes
        keys = visit.keys
        tree_keys = self.book.tree.key
        for place in range(first, min(last, visit.num_nodes // span)):
            block = i64(blocks[start + place])
            node = nodes[(place + 1) * span - 1]
            is_new = block != NULL_BLOCK and node_of[block] != node and identity[2 * block] != NO_CONTENT
            if is_new and tree_keys[node] == keys[(place + 1) * span - 1]:
                shelf.put(block, node, table.number)

    def _leave(self, row: i64, visit: Visit) -> None:
        """The book has the last state of the output too; all that the row took or hit was of use up to now."""
        latest = self._rolling[row]
        position: i64 = 0
        if latest != NONE:
            position = self.saves.boundary[latest]
            parts = self.parts_of(self.saves.content[latest])
            if parts == self.saves.blocks_of(latest) and self._is_own(latest, i64(parts[0])):
                self._register(row, self.book.keep(visit, position, OUTPUT_END), parts)
            self._forget(row)
        self._remember_unkept(row, visit, position)
        computed = self.sequences.num_computed[row]
        if self.places.takes_output_end and computed - computed % self.alignment == self._last[row]:
            self._note_short_output(row)
        positions = [(int(self.book.state(number).position), number) for number in self._kept[row]]
        kept = [number for _, number in sorted(positions, reverse=True)]
        tag = self.sequences.session[row]
        sessions = self.pool.stack.sessions if self.pool.stack is not None else None
        if sessions is not None and sessions.slot_of(tag) >= 0:
            slot = sessions.slot_of(tag)
            self.book.leave(visit, kept, sessions.number(slot), sessions.is_over(slot))
        else:
            self.book.leave(visit, kept, NO_SESSION if tag == UNDONE else SHARED)

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
                self.book.set_kind(number, OUTPUT_END)

    def _register(self, row: i64, number: i64, parts: list[int]) -> None:
        """The book keeps a state: its blocks are known as such, and what stands before it is needed."""
        shelf = self.shelf
        if number == 0:
            return
        state = self.book.state(number)
        state.parts = parts
        self.book.set_busy(number, self.pool.ref_cnt[i64(parts[0])] > 0)
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

    # The step.

    def next_boundary(self, row: i64, start: i64) -> i64:
        """Return the first boundary behind `start` at which this row's state is wanted. O(1) but for one step each."""
        if self._seen_from[row] <= start < self._next[row]:
            return self._next[row]
        found = NEVER
        if start < self._last[row]:
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
        self._seen_from[row] = start if start >= self._lacking[row] else NEVER
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

    def _first_boundary(self, row: i64, start: i64) -> i64:
        """Return the first boundary of a step from `start` on; one that is brought may stand before it."""
        return self.next_boundary(row, start if start >= self._lacking[row] else 0)

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """End what each row is to compute, from `first` on, at its next boundary, and let rows take a second look that
        reach a boundary in this step, or have a save or a refusal left. O(batch), a compare for each other row.

        A row of an output whose next token reaches the boundary asks for its save here, if nothing else keeps it.

        Raises `InvalidArgument` for one that would go on from a state that is not there.
        """
        self._asked.clear()
        self._opening.clear()
        ready = self.sequences.ready
        seen_from = self._seen_from
        following = self._next
        num_saves = self.saves.num_of_row
        num_refused = self._num_refused
        for place in range(i64(len(rows))):
            row = rows[place]
            start = first[row]
            # Counts that are too large are refused as they are, whatever their sum.
            if seen_from[row] <= start and counts[place] < following[row] - start:
                if num_saves[row] > 0 or num_refused[row] > 0:
                    ready[row] = 0
                continue
            if start < self._lacking[row] and 0 < counts[place] < self._lacking[row] - start:
                self._refuse(row, place, start, counts[place])
            is_served = counts[place] == 1 and start < ready[row] and num_saves[row] == 0 and num_refused[row] == 0
            if is_served and self._replaces(row, start + 1) and self.next_boundary(row, start) == start + 1:
                # It has all that it needs: a second look would find that.
                self._asked.add(row)
                self._asked.add(start + 1)
                continue
            if self._cuts_at(row, start) and 1 < counts[place] <= self.max_model_len - start:
                counts[place] = min(counts[place], self.next_boundary(row, start) - start)
                if counts[place] < following[row] - start and num_saves[row] == 0 and num_refused[row] == 0:
                    continue
            ready[row] = 0

    def _refuse(self, row: i64, place: i64, start: i64, count: i64) -> None:
        raise InvalidArgument(
            f"num_new_tokens[{place}] is {count} for {self.sequences.name(row)}; it must be 0 or at least "
            f"{self._lacking[row] - start}: {start} tokens are computed, and the next state is brought behind "
            f"{self._lacking[row]}"
        )

    def lacks(self, row: i64) -> bool:
        """Return whether no state stands behind the computed tokens of a row, because one is brought later."""
        return self.sequences.num_computed[row] < self._lacking[row]

    def _cuts_at(self, row: i64, start: i64) -> bool:
        """Return whether a chunk that begins at `start` ends where a state is kept."""
        return self.cuts and start >= self._brought[row]

    def is_begun(self, row: i64) -> bool:
        """Return whether a plan has filled the slot of a row."""
        return self._is_begun[row] != 0

    def num_blocks_to_save(self, row: i64, start: i64, end: i64) -> i64:
        """Return the blocks that saving what these tokens pass takes."""
        boundary = self._first_boundary(row, start)
        count: i64 = -1 if boundary <= end and self._replaces(row, boundary) else 0
        while boundary <= end:
            count += 1
            if self._cuts_at(row, start):
                break
            boundary = self.next_boundary(row, boundary)
        return self.num_parts * count

    def _replaces(self, row: i64, boundary: i64) -> bool:
        """Return whether a save at `boundary` takes the place of the one before in the output, and of its blocks. O(1).

        Not where the step may end before the boundary: then the one before would be the last, and is gone.
        """
        old = self._rolling[row]
        if old == NONE or boundary > self.sequences.num_tokens[row]:
            return False
        head = i64(self.saves.blocks[old * self.num_parts])
        return self.pool.ref_cnt[head] == 0 and self._is_own(old, head)

    def _is_own(self, number: i64, block: i64) -> bool:
        """Return whether a block has a part of the latest state of an output still, and the book has not."""
        return self.shelf.part_of[block] == -number

    def num_to_drop(self, row: i64) -> i64:
        """Return the blocks of saves that `begin` lets go of: their step was not committed. O(saves)."""
        if self.saves.num_of_row[row] == 0 or self.sequences.num_ahead[row] > 0:
            return 0
        dropped: i64 = 0
        reach: i64 = -1 if self.lacks(row) else self.sequences.num_computed[row]
        number = self.saves.first[row]
        while number != NONE:
            dropped += 1 if self.saves.boundary[number] > reach else 0
            number = self.saves.following[number]
        return self.num_parts * dropped

    def begin(self, row: i64, start: i64, end: i64, transfers: Transfers) -> None:
        """Fill the slot of a row that has none yet, and note what its step saves."""
        self.settle(row)
        if self._is_begun[row] == 0:
            source = self.sequences.copy_from[row]
            if source:
                transfers.load_state(row, source)
            else:
                transfers.clear_state(row)
            self._opening.add(row)
        boundary = self._first_boundary(row, start)
        while boundary <= end:
            self._asked.add(row)
            self._asked.add(boundary)
            if self._cuts_at(row, start):
                break
            boundary = self.next_boundary(row, boundary)
        if self._num_refused[row] > 0:
            self._tell_refused(row, end, transfers)

    def _tell_refused(self, row: i64, end: i64, transfers: Transfers) -> None:
        later: list[int] = []
        for boundary in self._refused[row]:
            if boundary <= end:
                transfers.refuse_state(row, boundary)
                self.num_refused += 1
            else:
                later.append(boundary)
        self._refused[row] = later
        self._num_refused[row] = len(later)

    def save(self, transfers: Transfers) -> None:
        """Say what the plan copies, and what it saves as far as blocks are free: a save is no reason to refuse."""
        self._tokens.keep()
        transfers.state_blocks = int(self.num_parts)
        if self._copies.count > 0:
            transfers.copy_states(self._copies.in_order(self._is_begun))
        if self._asked.count > 0:
            self._save(transfers)
        if self._opening.count > 0:
            self._note_opened(transfers)
        if self._copies.count > 0:
            self._copies.clear()

    def _save(self, transfers: Transfers) -> None:
        """Take blocks for what rows asked for, in order, as far as there are any.

        Of an output it is those of the state before, which nothing finds from here on.
        """
        saves = self.saves
        asked = self._asked
        parts = self.num_parts
        transfers.make_state_room(asked.count // 2 * (parts + 2))
        for place in range(0, asked.count, 2):
            row = i64(asked.items[place])
            boundary = i64(asked.items[place + 1])
            number = self._rolling[row]
            replaces = self._replaces(row, boundary)
            if replaces and self.pool.hold_state(saves.blocks, number * parts, parts, -number):
                # The parts behind the first one stay cached.
                self._rolling[row] = NONE
                self.num_replaced += 1
                saves.list_again(row, number, boundary, OVER)
            else:
                if self.pool.charge_row(row) < parts:
                    continue
                if replaces and self._forget(row):
                    self.num_replaced += 1
                if not self._has_room():
                    continue
                number = saves.next_free()
                self.pool.acquire(saves.blocks, number * parts, parts)
                saves.add(row, boundary)
            self.num_saved += 1
            transfers.save_state(row, boundary, saves.blocks, number * parts, parts)
        asked.clear()

    def _note_opened(self, transfers: Transfers) -> None:
        """The plan is made, and fills these slots; where it could not be made, the next one does."""
        opening = self._opening
        for place in range(opening.count):
            transfers.hold_sources(self.sequences.copy_from[i64(opening.items[place])])
        for place in range(opening.count):
            row = i64(opening.items[place])
            self.sequences.copy_from[row] = self._nothing  # no object is made: from here on nothing fails
            self._is_begun[row] = 1
        opening.clear()

    def _has_room(self) -> bool:
        """Return whether blocks for one more state can be taken; of a policy's only those that it has named."""
        if self.pool.stack is None:
            return self.pool.queue.num_free >= self.num_parts
        return self.pool.queue.num_empty_first(self.pool.index, self.num_parts) >= self.num_parts

    # What was saved.

    def settle_all(self, rows: vec[i64]) -> None:
        """Settle each of these rows. O(batch) where anything is saved, and what the saves take."""
        if self.saves.total == 0:
            return
        saves = self.saves
        count: i64 = 0
        for place in range(i64(len(rows))):
            if saves.num_of_row[rows[place]] > 0:
                self._due[count] = rows[place]
                self._due_contents[count] = self._content_at(rows[place], saves.boundary[saves.first[rows[place]]])
                count += 1
        self.pool.load_contents(self._due_contents, count, FIRST_PART)
        for place in range(count):
            self.settle(self._due[place])

    def _content_at(self, row: i64, boundary: i64) -> i64:
        """Return the content before a boundary; none where it is not published, or gone."""
        place = boundary // self.block_size
        if place > self.sequences.num_published[row]:
            return NO_CONTENT
        return self.token_blocks.index.content_of(self.sequences.block_at(row, place - 1))

    def settle(self, row: i64) -> None:
        """Cache the saves whose boundaries are computed, and drop those that no open reservation reaches."""
        saves = self.saves
        if saves.num_of_row[row] == 0:
            return
        computed: i64 = -1 if self.lacks(row) else self.sequences.num_computed[row]
        ahead = self.sequences.num_ahead[row]
        if computed < 0 and ahead > 0:
            return
        number = saves.first[row]
        while number != NONE:
            if saves.status[number] >= OPEN and saves.boundary[number] <= computed:
                self._keep(row, number)
            number = saves.following[number]
        self._drop(row, computed + ahead)

    def _keep(self, row: i64, number: i64) -> None:
        """Cache one state, unless there is one."""
        saves = self.saves
        boundary = saves.boundary[number]
        content = self._content_at(row, boundary)
        if content == NO_CONTENT or not self._makes_way(content):
            self._give_up(row, number)
            return
        self.num_kept += 1
        saves.content[number] = content
        first = number * self.num_parts
        if boundary > self._last[row]:
            # Of an output the last one is kept, and those that others hit.
            self.num_replaced += 1 if self._forget(row) else 0
            self._rolling[row] = number
        if saves.status[number] == OVER:
            saves.status[number] = DONE
            self.pool.cache_first_part(i64(saves.blocks[first]), content, FIRST_PART)
            self.pool.give_back_state(row, saves.blocks, first, self.num_parts, -number)
            return
        self.pool.cache_parts(saves.blocks, first, self.num_parts, content, FIRST_PART)
        if boundary > self._last[row]:
            self.shelf.own_run(saves.blocks, first, self.num_parts, -number)
        else:
            kind = self._kind_of(row, boundary)
            self._extend(row, self._visits[row])
            self._register(row, self.book.keep(self._visits[row], boundary, kind), saves.blocks_of(number))
        self._let_go(row, number)

    def _makes_way(self, content: i64) -> bool:
        """Return whether a content has no state; uncache one that the order let go, idle still. O(parts)."""
        parts = self.pool.find_parts(content, FIRST_PART, self.num_parts)
        if len(parts) < self.num_parts:
            return True
        shelf, stack = self.shelf, self.pool.stack
        if stack is None:
            return False
        for part in range(self.num_parts):
            block = i64(parts[part])
            if shelf.part_of[block] != NO_STATE or self.pool.ref_cnt[block] > 0 or stack.is_retained(int(block)):
                return False
        self.pool.uncache_run(parts, 0, self.num_parts)
        return True

    def _kind_of(self, row: i64, boundary: i64) -> i64:
        for wanted in self._wanted[row]:
            if i64(wanted) // KIND_SPAN == boundary:
                return i64(wanted) % KIND_SPAN
        return JUNCTION

    def _forget(self, row: i64) -> bool:
        """Uncache what the book does not have of the latest state of an output; say whether there was any."""
        saves = self.saves
        number = self._rolling[row]
        first = number * self.num_parts
        count: i64 = 0
        for part in range(self.num_parts if number != NONE else 0):
            if self._is_own(number, i64(saves.blocks[first + part])):
                self._one_state[count] = saves.blocks[first + part]
                count += 1
        if count > 0:
            self.pool.uncache_run(self._one_state, 0, count)
        if number != NONE and saves.status[number] == APART:
            self._end_rolling(row)
        return count > 0

    def _give_up(self, row: i64, number: i64) -> None:
        """Let go of a save that is pending."""
        if self.saves.status[number] == OVER:
            first = number * self.num_parts
            self.shelf.own_run(self.saves.blocks, first, 1, 0)
            self.pool.uncache_run(self.saves.blocks, first + 1, self.num_parts - 1)
        self._let_go(row, number)

    def _let_go(self, row: i64, number: i64) -> None:
        self.saves.status[number] = DONE
        self.pool.give_back_in_order(row, self.saves.blocks, number * self.num_parts, self.num_parts)

    def _drop(self, row: i64, reach: i64) -> None:
        """Forget the saves that are done, and those behind `reach`."""
        saves = self.saves
        before = NONE
        number = saves.first[row]
        while number != NONE:
            after = saves.following[number]
            if saves.status[number] >= OPEN and saves.boundary[number] > reach:
                self._give_up(row, number)
            if saves.status[number] >= OPEN:
                before = number
            else:
                saves.unlink(row, number, before)
                if number != self._rolling[row]:
                    saves.free(number)
            number = after

    def drop_saves(self, row: i64) -> None:
        """Forget what the open steps of a row save. O(saves)."""
        self._drop(row, -1)

    def pending_blocks(self, row: i64) -> list[int]:
        """Return the blocks that a row holds for saves. O(blocks)."""
        return [block for number in self.saves.numbers_of(row) for block in self.saves.blocks_of(i64(number))]

    def check(self) -> None:
        """Each record of a save is where it belongs. O(records + rows). Raises `InvariantError`."""
        rolling = [int(self._rolling[row]) for row in range(i64(len(self._rolling))) if self._rolling[row] != NONE]
        self.saves.check(rolling)
