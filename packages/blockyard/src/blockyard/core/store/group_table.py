"""The block table of one layer group over a shared pool: hits, growth, the sliding window, swap."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import CacheConfig
from ...ids import NO_CONTENT, NULL_BLOCK
from ...windows import first_needed_block, num_computed_past, num_least_blocks
from ..arrays import zeros_i32, zeros_i64
from ..index.prefix_index import PrefixIndex
from ..sequences.block_table import BlockTable
from ..sequences.table import SequenceTable
from .content_ledger import ContentLedger
from .copy_on_write import make_own, needs_copy
from .transfers import Transfers

#: After all tokens of any sequence.
NEVER: Final[i64] = 1099511627776


class GroupTable(BlockTable):
    """Which block holds what for the layers of one group, a row for each sequence.

    A block of this group spans `span` token blocks and holds the content of the last one. In a group with a sliding
    window, places behind the window hold the null block, and blocks are taken as tokens come, not for a whole prompt at
    once.

    While a sequence is swapped out its row is empty here and `cpu_blocks` says where its blocks are.
    """

    def __init__(self, number: int, config: CacheConfig, pool: ContentLedger, cpu: ContentLedger | None) -> None:
        group = config.layer_groups[number]
        width = -(-config.max_model_len // group.block_size)
        super().__init__(config.max_num_seqs, width, group.block_size)
        self.number: i64 = number
        self.window: i64 = group.sliding_window
        #: Token blocks that a block of this group spans.
        self.span: i64 = group.block_size // config.hash_block_size
        self.pool = pool
        self.cpu = cpu
        #: Where a swapped-out sequence's blocks are; while it is not, the CPU blocks that its next step loads.
        self.cpu_blocks = zeros_i32(config.max_num_seqs * width if cpu is not None else 0)
        self.num_loads = zeros_i64(config.max_num_seqs)
        #: Blocks that are to be cached next, and their contents: of one row, or one of each row.
        self._new = zeros_i64(max(config.max_num_seqs, width))
        self._contents = zeros_i64(max(config.max_num_seqs, width))
        self._num_new: i64 = 0

    def first_needed(self, num_computed: i64) -> i64:
        """The first place that tokens from `num_computed` on attend to (`LayerGroup.first_needed_block`)."""
        return first_needed_block(num_computed, self.window, self.block_size)

    def num_places(self, num_tokens: i64) -> i64:
        """Places of a sequence of `num_tokens` tokens, those behind the window included."""
        return (num_tokens + self.block_size - 1) // self.block_size

    def num_full(self, num_tokens: i64) -> i64:
        """Places that the first `num_tokens` tokens fill."""
        return num_tokens // self.block_size

    # Hits. `token_blocks` are those that the prompt begins with; what is found for them is noted in `places`.

    def _content(self, index: PrefixIndex, token_blocks: vec[i32], first: i64, place: i64) -> i64:
        """Return what belongs at `place`: the content of its last token block. first: where token blocks begin."""
        return index.content_of(i64(token_blocks[first + (place + 1) * self.span - 1]))

    def _locate(self, index: PrefixIndex, token_blocks: vec[i32], place: i64) -> i64:
        """Find a block that holds what belongs at `place`; returns it, minus a CPU block, or 0."""
        content = self._content(index, token_blocks, 0, place)
        block = self.pool.find_content(content, self.number)
        if block == NULL_BLOCK and self.cpu is not None:
            block = -self.cpu.find_content(content, self.number)
        return block

    def reach(self, index: PrefixIndex, token_blocks: vec[i32], places: vec[i64], limit: i64) -> i64:
        """How many of the first `limit` tokens this group can take from the cache. O(places)."""
        last = limit // self.block_size
        if self.window > 0:
            return self._reach_window(index, token_blocks, places, last)
        if self.cpu is None:
            found = self.pool.find_run(index, token_blocks, self.span, self.number, places, 0, last, 1)
            return found * self.block_size
        place: i64 = 0
        while place < last:
            places[place] = self._locate(index, token_blocks, place)
            if places[place] == NULL_BLOCK:
                break
            place += 1
        return place * self.block_size

    def _reach_window(self, index: PrefixIndex, token_blocks: vec[i32], places: vec[i64], last: i64) -> i64:
        """`last` places, if those in the window before them are there; else up to the missing one."""
        place = last - 1
        first = self.first_needed(last * self.block_size)
        if self.cpu is None and first < last:
            found = self.pool.find_run(index, token_blocks, self.span, self.number, places, place, first - 1, -1)
            return (found if found >= first else last) * self.block_size
        while place >= first:
            places[place] = self._locate(index, token_blocks, place)
            if places[place] == NULL_BLOCK:
                return place * self.block_size
            place -= 1
        return last * self.block_size

    def num_needed(self, places: vec[i64], hit: i64, num_tokens: i64) -> i64:
        """Free blocks that admission asks for: idle hits, loads, and new blocks; with a window, at most `num_least`.

        The window slides on over what a hit takes, so a hit never asks for more than the same prompt without it:
        a prompt that fits an empty cache fits one that is full of idle blocks.
        """
        last = hit // self.block_size
        needed = self.num_idle(places, hit)
        if self.window > 0:
            ahead = self.num_places(min(num_tokens, hit + self.window - 1 + self.block_size))
            return min(needed + ahead - last, self.num_least(num_tokens))
        return needed + self.num_places(num_tokens) - last

    def num_idle(self, places: vec[i64], hit: i64) -> i64:
        """How many of the places that a hit takes are idle, or have to be loaded. O(places)."""
        idle: i64 = 0
        for place in range(self.first_needed(hit), hit // self.block_size):
            block = places[place]
            if block < 0 or self.pool.ref_cnt[block] == 0:
                idle += 1
        return idle

    def num_least(self, num_tokens: i64) -> i64:
        """Blocks without which a prompt of `num_tokens` tokens cannot run, even alone."""
        return num_least_blocks(num_tokens, self.window, self.block_size)

    def hold_hits(self, row: i64, places: vec[i64], hit: i64) -> None:
        """Put the blocks found for the first `hit` tokens into an empty row; CPU blocks are held to be loaded."""
        last = hit // self.block_size
        first = min(self.first_needed(hit), last)
        self.num_null[row] = first
        self.num_blocks[row] = last
        if self.cpu is None:
            self._hold_run(row, places, first, last)
            return
        for place in range(first, last):
            if places[place] > 0:
                self.pool.note_hit(places[place])
                self.pool.share_one(places[place])
                self.set_block(row, place, places[place])
            else:
                self.cpu.share_one(-places[place])
                self._set_cpu_block(row, place, -places[place])
                self.num_loads[row] += 1

    def _hold_run(self, row: i64, places: vec[i64], first: i64, last: i64) -> None:
        start = row * self.width
        blocks = self.blocks
        for place in range(first, last):
            block = places[place]
            blocks[start + place] = i32(block)
        self.num_rewrites[row] += 1
        self.pool.share_hits(blocks, start + first, last - first)

    def unhold_hits(self, row: i64) -> None:
        """Undo the latest `hold_hits`, after which nothing was taken: the last block first."""
        place = self.num_blocks[row] - 1
        while place >= self.num_null[row]:
            if self.block_at(row, place) != NULL_BLOCK:
                self.pool.unshare_one(self.block_at(row, place))
            elif self.cpu is not None and self.cpu_block_at(row, place) != NULL_BLOCK:
                self.cpu.unshare_one(self.cpu_block_at(row, place))
                self._set_cpu_block(row, place, NULL_BLOCK)
            place -= 1
        self.cut_row(row, 0)
        self.num_null[row] = 0
        self.num_loads[row] = 0

    def num_to_take(self, row: i64, num_tokens: i64) -> i64:
        """Blocks that `take_prompt` takes from the pool."""
        new = self.num_places(num_tokens) - self.num_blocks[row] if self.window == 0 else 0
        return self.num_loads[row] + max(new, 0)

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """New blocks for what has to be loaded and, without a window, for the whole prompt."""
        if self.num_loads[row] > 0:
            for place in range(self.num_null[row], self.num_blocks[row]):
                if self.block_at(row, place) == NULL_BLOCK:
                    self.set_block(row, place, self.pool.acquire_one())
        if self.window == 0:
            self._extend(row, self.num_places(num_tokens))

    def _extend(self, row: i64, last: i64) -> None:
        count = last - self.num_blocks[row]
        if count > 0:
            self.pool.acquire(self.blocks, row * self.width + self.num_blocks[row], count)
            self.num_blocks[row] = last

    def load(self, row: i64, index: PrefixIndex, token_table: BlockTable, transfers: Transfers) -> None:
        """Let the step that runs now bring back what was hit in the CPU pool; it is cached here from now on."""
        if self.num_loads[row] == 0 or self.cpu is None:
            return
        for place in range(self.num_null[row], self.num_blocks[row]):
            source = self.cpu_block_at(row, place)
            if source != NULL_BLOCK:
                target = self.block_at(row, place)
                transfers.swap_in(source, target, self.number)
                self.publish_place(row, index, token_table, place, target)
                self._set_cpu_block(row, place, NULL_BLOCK)
                transfers.hold(source)
        self.num_loads[row] = 0

    # Growth.

    def num_missing(self, row: i64, num_published: i64, start: i64, end: i64) -> i64:
        """Blocks that writing tokens `start` to `end` takes from the pool, a copy on write included."""
        missing = max(self.num_places(end) - self.num_blocks[row], 0)
        return missing + (1 if self.copies(row, num_published, start) else 0)

    def copies(self, row: i64, num_published: i64, start: i64) -> bool:
        """Whether writing token `start` needs a copy of the block that it falls into."""
        return needs_copy(self.pool, self, row, start // self.block_size, num_published // self.span)

    def grow(self, row: i64, num_published: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Make the place of token `start` the row's own and add what is missing up to `end`; whether a block was
        copied."""
        place = start // self.block_size
        old = make_own(self.pool, self, row, place, num_published // self.span)
        self._extend(row, self.num_places(end))
        if old == NULL_BLOCK or start % self.block_size == 0:
            return False
        transfers.copy(old, self.block_at(row, place), self.number)
        return True

    def publish(self, row: i64, index: PrefixIndex, token_table: BlockTable, first: i64, last: i64) -> None:
        """Token blocks `first` to `last` of the row are computed and indexed: so are the blocks that they complete."""
        self._num_new = 0
        for place in range(first // self.span, last // self.span):
            self._note_new(row, place, index, token_table)
        if self._num_new > 0:
            self.pool.cache_run(self._new, self._contents, self._num_new, self.number)

    def publish_last(
        self, rows: vec[i64], places: vec[i64], count: i64, index: PrefixIndex, sequences: SequenceTable
    ) -> None:
        """The last published token block of each of the rows at these places of a batch is new: so may be the block
        that it completes."""
        self._num_new = 0
        for number in range(count):
            row = rows[places[number]]
            published = sequences.num_published[row]
            if published % self.span == 0:
                self._note_new(row, published // self.span - 1, index, sequences)
        if self._num_new > 0:
            self.pool.cache_run(self._new, self._contents, self._num_new, self.number)

    def _note_new(self, row: i64, place: i64, index: PrefixIndex, token_table: BlockTable) -> None:
        """Note the block at a place, and what it holds, unless it is cached or its token block is not indexed."""
        block = self.block_at(row, place)
        if block == NULL_BLOCK or self.pool.is_cached(block):
            return
        content = self._content(index, token_table.blocks, row * token_table.width, place)
        if content != NO_CONTENT:
            self._new[self._num_new] = block
            self._contents[self._num_new] = content
            self._num_new += 1

    def publish_place(self, row: i64, index: PrefixIndex, token_table: BlockTable, place: i64, block: i64) -> None:
        """Cache `block` as the content of the last token block of `place`, if that is still indexed."""
        content = self._content(index, token_table.blocks, row * token_table.width, place)
        if content != NO_CONTENT:
            self.pool.cache_content(block, content, self.number)

    def slides_at(self, row: i64) -> i64:
        """Return the computed tokens at which the next block of a row falls behind the window. O(1)."""
        return num_computed_past(self.num_null[row] + 1, self.window, self.block_size)

    def slide(self, row: i64, num_computed: i64) -> None:
        """Release the blocks behind the window, the oldest first; the null block takes their place.

        What was still to be loaded into one is needed no more: a hit that ends inside a block reaches further than the
        loads were made for.
        """
        first = min(self.first_needed(num_computed), self.num_blocks[row])
        for place in range(self.num_null[row], first):
            self.pool.give_back_one(row, self.block_at(row, place))
            if self._drop_cpu_block(row, place):
                self.num_loads[row] -= 1
        if first > self.num_null[row]:
            self.clear_front(row, first)

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64, num_tokens: i64) -> None:
        """Let `child`, an empty row, hold the blocks of the first `num_tokens` tokens of `row` too."""
        shared = min(self.num_blocks[row], self.num_places(num_tokens))
        self.num_blocks[child] = shared
        self.num_null[child] = self.num_null[row]
        for place in range(self.num_null[row], shared):
            block = self.block_at(row, place)
            if block != NULL_BLOCK:
                self.pool.share_one(block)
                self.set_block(child, place, block)
            elif self.cpu is not None and self.cpu_block_at(row, place) != NULL_BLOCK:
                self.cpu.share_one(self.cpu_block_at(row, place))
                self._set_cpu_block(child, place, self.cpu_block_at(row, place))

    def truncate(self, row: i64, num_tokens: i64) -> None:
        """Release the blocks behind the first `num_tokens` tokens."""
        self._drop(row, self.num_places(num_tokens))

    def close(self, row: i64) -> None:
        """Release all blocks of a row, the last first."""
        self._drop(row, 0)
        self.num_null[row] = 0
        self.num_loads[row] = 0

    def _drop(self, row: i64, keep: i64) -> None:
        if self.cpu is None:
            first = max(keep, self.num_null[row])
            if first < self.num_blocks[row]:
                count = self.num_blocks[row] - first
                self.pool.give_back_flat(row, self.blocks, row * self.width + first, count)
            if keep < self.num_blocks[row]:
                self.cut_row(row, keep)
            return
        place = self.num_blocks[row] - 1
        while place >= keep:
            block = self.block_at(row, place)
            if block != NULL_BLOCK:
                self.pool.give_back_one(row, block)
            self._drop_cpu_block(row, place)
            place -= 1
        if keep < self.num_blocks[row]:
            self.cut_row(row, keep)

    def _drop_cpu_block(self, row: i64, place: i64) -> bool:
        """Release the CPU block at a place, if there is one; says whether there was."""
        if self.cpu is None or self.cpu_block_at(row, place) == NULL_BLOCK:
            return False
        self.cpu.release_one(self.cpu_block_at(row, place))
        self._set_cpu_block(row, place, NULL_BLOCK)
        return True

    # The CPU pool.

    def cpu_block_at(self, row: i64, place: i64) -> i64:
        """The CPU block that holds, or will bring back, what belongs at `place`; 0 for none."""
        return i64(self.cpu_blocks[row * self.width + place])

    def _set_cpu_block(self, row: i64, place: i64, block: i64) -> None:
        self.cpu_blocks[row * self.width + place] = i32(block)

    def move_out(self, row: i64, place: i64, cpu_block: i64) -> None:
        """The block at `place` goes back to the pool; `cpu_block` (0: nothing worth keeping) stands for it."""
        self.pool.give_back_one(row, self.block_at(row, place))
        self.set_block(row, place, NULL_BLOCK)
        self._set_cpu_block(row, place, cpu_block)

    def move_in(self, row: i64, place: i64, block: i64) -> None:
        """`block`, held already, takes the place of the CPU block."""
        self.set_block(row, place, block)
        self._set_cpu_block(row, place, NULL_BLOCK)
