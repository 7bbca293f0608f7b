"""A state group knows which states of a hybrid model are cached, what a hit loads, and what a step saves."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import MAX_GROUPS, CacheConfig
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..index.hashing import root_hash
from ..index.hit import Hit
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Prompt
from ..policies.states.book import StateBook
from ..policies.states.orders import make_order
from ..policies.states.places import Places
from ..pool.ledger import BlockLedger
from ..sequences.table import SequenceTable
from .content_ledger import ContentLedger
from .transfers import Transfers

#: What a content pool calls the first block of a state; the parts of one state follow.
FIRST_PART: Final[i64] = MAX_GROUPS
#: Behind every boundary.
NEVER: Final[i64] = 1099511627776
#: Hashes of prompts are remembered for so many pools of tokens.
REMEMBERED_POOLS: Final = 4


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
        self.book = StateBook(make_order("lru", 0), self.block_size, remembered // config.hash_block_size)
        self.num_saved: i64 = 0
        self.num_kept: i64 = 0
        rows = config.max_num_seqs
        #: 1 once a plan has filled the slot of a row.
        self._is_begun = zeros_i64(rows)
        #: Behind this boundary a row is in its output.
        self._last = zeros_i64(rows)
        #: The next boundary of a row, as seen from a position.
        self._next = zeros_i64(rows)
        self._seen_from = zeros_i64(rows)
        self._num_pending = zeros_i64(rows)
        self._wanted: list[list[int]] = [[]] * rows
        self._pending: list[list[Save]] = [[]] * rows
        #: The latest kept state of a row's output, which the next one takes the place of.
        self._rolling: list[list[int]] = [[]] * rows
        #: The contents whose states a row hit or kept: they were of use up to its end.
        self._used: list[list[int]] = [[]] * rows
        #: Slots to copy in the next plan, (from, to).
        self._copies: list[int] = []
        #: What the plan that is made now saves: (row, boundary).
        self._asked: list[int] = []

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
        index = self.token_blocks.index
        num_blocks = min(prompt.num_tokens // self.block_size, prompt.next_span_block(-1))
        index.hash_run(prompt.words, 0, num_blocks, root_hash(hit.root))
        visit = self.book.visit(index.hashes[:num_blocks], num_blocks, last)
        known = max(visit.known, hit.num_served * self.block_size)
        start = hit.num_usable * self.block_size
        self.places.find(start, known, last, 0, prompt.told, prompt.queued)
        self._wanted[row] = sorted(self.places.positions)

    def _open(self, row: i64, last: i64) -> None:
        self._is_begun[row] = 0
        self._last[row] = last
        self._seen_from[row] = NEVER
        self._wanted[row] = []
        self._pending[row] = []
        self._rolling[row] = []

    def fork(self, row: i64, child: i64) -> None:
        """Let the next plan copy the slot of `row`, if there is anything in it."""
        self._open(child, self._last[row])
        self._used[child] = []
        self._wanted[child] = self._wanted[row]
        self._is_begun[child] = self._is_begun[row]
        if self._is_begun[row] != 0:
            self._copies += (int(self._source(row)), int(child))

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
        self._touch(row)
        self._is_begun[row] = 0
        self._wanted[row] = []
        self._rolling[row] = []
        self._used[row] = []

    def _touch(self, row: i64) -> None:
        """Let the states that a row used go in the queue with its keys and values: it used them up to its end."""
        for content in self._used[row]:
            parts = self.parts_of(content) if self.pool.stack is None else []
            for block in parts:
                if self.pool.ref_cnt[i64(block)] == 0 and block < self.pool.num_blocks:
                    self.pool.queue.remove(block)
                    self.pool.queue.append(block)

    # The step.

    def next_boundary(self, row: i64, start: i64) -> i64:
        """Return the first boundary behind `start` at which this row's state is wanted. O(1) but for one step each."""
        if self._seen_from[row] <= start < self._next[row]:
            return self._next[row]
        found = NEVER
        for boundary in self._wanted[row]:
            if boundary > start:
                found = boundary
                break
        if self.places.takes_output_end and self.is_caching:
            position = max(start, self._last[row])
            found = min(found, position - position % self.alignment + self.alignment)
        self._seen_from[row] = start
        self._next[row] = found
        return found

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """End what each row is to compute, from `first` on, at its next boundary. O(batch)."""
        self._asked = []
        if not self.cuts:
            return
        for place in range(i64(len(rows))):
            row = rows[place]
            # What is longer than a sequence may be is refused as it is.
            if 1 < counts[place] <= self.max_model_len - first[row]:
                counts[place] = min(counts[place], self.next_boundary(row, first[row]) - first[row])

    def num_blocks_to_save(self, row: i64, start: i64, end: i64) -> i64:
        """Return the blocks that saving what these tokens pass takes."""
        return self.num_parts * i64(len(self._boundaries(row, start, end)))

    def _boundaries(self, row: i64, start: i64, end: i64) -> list[int]:
        boundaries: list[int] = []
        boundary = self.next_boundary(row, start)
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
                transfers.held_sources += source
                self.sequences.copy_from[row] = []
            else:
                transfers.state_clears.append(int(row))
            self._is_begun[row] = 1
        for boundary in self._boundaries(row, start, end):
            self._asked += (int(row), boundary)

    def save(self, transfers: Transfers) -> None:
        """Say what the plan copies, and what it saves as far as blocks are free: a save is no reason to refuse."""
        transfers.state_blocks = int(self.num_parts)
        transfers.state_copies += self._copies
        self._copies = []
        asked = self._asked
        self._asked = []
        for place in range(0, len(asked), 2):
            if not self._has_room():
                return
            row = i64(asked[place])
            blocks = zeros_i32(int(self.num_parts))
            self.pool.acquire(blocks, 0, self.num_parts)
            self._pending[row] = [*self._pending[row], Save(i64(asked[place + 1]), blocks)]
            self._num_pending[row] += 1
            self.num_saved += 1
            transfers.state_saves += asked[place : place + 2]
            transfers.state_saves += [int(block) for block in blocks]

    def _has_room(self) -> bool:
        """Return whether blocks for one more state can be taken; of a policy's only those that it has named."""
        if self.pool.stack is None:
            return self.pool.queue.num_free >= self.num_parts
        return self.pool.queue.num_empty_first(self.pool.index, self.num_parts) >= self.num_parts

    # What was saved.

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
        if save.boundary > self._last[row]:
            self._replace(row, content, save)
        self._let_go(row, save)

    def _replace(self, row: i64, content: i64, save: Save) -> None:
        """Forget the state before in the output: of an output the last one is kept."""
        old = self._rolling[row]
        for place in range(1, len(old)):
            block = i64(old[place])
            if self.pool.is_cached(block) and self.pool.content_of(block) == old[0]:
                self.pool.uncache(block)
        self._rolling[row] = [int(content), *[int(block) for block in save.blocks]]

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
