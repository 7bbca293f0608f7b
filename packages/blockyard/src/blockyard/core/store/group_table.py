"""The block table of one layer group: hits, growth, the sliding window, swap."""

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
    """The blocks of each sequence for the layers of one group, a row for each sequence.

    A block spans `span` token blocks, and is cached under the content of the last one. With a sliding window, places
    before the window hold the null block, and blocks are taken as tokens come, not for a whole prompt at once.

    Attributes:
        number: index of the group.
        window: its sliding window in tokens; 0 for none.
        cpu_blocks: by row and place, the CPU block of a sequence that is swapped out, and whose row is empty; of
            another one, the CPU block that its next step loads.
        num_loads: by row, how many blocks its next step loads.
    """

    def __init__(self, number: int, config: CacheConfig, pool: ContentLedger, cpu: ContentLedger | None) -> None:
        group = config.layer_groups[number]
        width = -(-config.max_model_len // group.block_size)
        super().__init__(config.max_num_seqs, width, group.block_size)
        self.number: i64 = number
        self.window: i64 = group.sliding_window
        self.span: i64 = group.block_size // config.hash_block_size
        self.pool = pool
        self.cpu = cpu
        self.cpu_blocks = zeros_i32(config.max_num_seqs * width if cpu is not None else 0)
        self.num_loads = zeros_i64(config.max_num_seqs)
        #: Blocks that `publish` caches, and their contents.
        self._new = zeros_i64(max(config.max_num_seqs, width))
        self._contents = zeros_i64(max(config.max_num_seqs, width))
        self._num_new: i64 = 0

    def first_needed(self, num_computed: i64) -> i64:
        """Return the first place that tokens from `num_computed` on attend to."""
        return first_needed_block(num_computed, self.window, self.block_size)

    def num_places(self, num_tokens: i64) -> i64:
        """Return the places of `num_tokens` tokens, with those before the window."""
        return (num_tokens + self.block_size - 1) // self.block_size

    def num_full(self, num_tokens: i64) -> i64:
        """Return the places that `num_tokens` tokens fill."""
        return num_tokens // self.block_size

    # Hits. `token_blocks` are those that a prompt begins with; `places` gets the block found at each place.

    def _content(self, index: PrefixIndex, token_blocks: vec[i32], first: i64, place: i64) -> i64:
        """Return the content at a place, that of its last token block. first: index of the first token block."""
        return index.content_of(i64(token_blocks[first + (place + 1) * self.span - 1]))

    def _locate(self, index: PrefixIndex, token_blocks: vec[i32], place: i64) -> i64:
        """Return a block with the content at a place: its id, minus the id of a CPU block, or 0."""
        content = self._content(index, token_blocks, 0, place)
        block = self.pool.find_content(content, self.number)
        if block == NULL_BLOCK and self.cpu is not None:
            block = -self.cpu.find_content(content, self.number)
        return block

    def reach(self, index: PrefixIndex, token_blocks: vec[i32], places: vec[i64], limit: i64) -> i64:
        """Return how many of the first `limit` tokens this group can take from the cache. O(places)."""
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
        """Return the tokens of `last` places, or of those up to one that is missing in the window before their end."""
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
        """Return the free blocks that admission takes: idle hits, loads, and new blocks.

        A window slides over the blocks of a hit, so with one it is at most `num_least`: a prompt that fits an empty
        cache fits one that is full of idle blocks.
        """
        last = hit // self.block_size
        needed = self.num_idle(places, hit)
        if self.window > 0:
            ahead = self.num_places(min(num_tokens, hit + self.window - 1 + self.block_size))
            return min(needed + ahead - last, self.num_least(num_tokens))
        return needed + self.num_places(num_tokens) - last

    def num_idle(self, places: vec[i64], hit: i64) -> i64:
        """Return how many blocks of a hit are idle, or have to be loaded. O(places)."""
        idle: i64 = 0
        for place in range(self.first_needed(hit), hit // self.block_size):
            block = places[place]
            if block < 0 or self.pool.ref_cnt[block] == 0:
                idle += 1
        return idle

    def num_least(self, num_tokens: i64) -> i64:
        """Return the blocks without which a prompt cannot run, even alone."""
        return num_least_blocks(num_tokens, self.window, self.block_size)

    def hold_hits(self, row: i64, places: vec[i64], hit: i64) -> None:
        """Put the blocks found for the first `hit` tokens into an empty row. CPU blocks are held for the load."""
        last = hit // self.block_size
        first = min(self.first_needed(hit), last)
        self.num_null[row] = first
        self.num_blocks[row] = last
        if self.cpu is None:
            start = row * self.width
            blocks = self.blocks
            for place in range(first, last):
                block = places[place]
                blocks[start + place] = i32(block)
            self.num_rewrites[row] += 1
            self.pool.share_hits(blocks, start + first, last - first)
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

    def unhold_hits(self, row: i64) -> None:
        """Undo the latest `hold_hits`, after which nothing was taken. The last block comes first."""
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
        """Return the blocks that `take_prompt` takes from the pool."""
        new = self.num_places(num_tokens) - self.num_blocks[row] if self.window == 0 else 0
        return self.num_loads[row] + max(new, 0)

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """Take new blocks for loads and, without a window, for the whole prompt."""
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
        """Let the plan load hits from the CPU pool, and cache them in the pool."""
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
        """Return the blocks that writing tokens `start` to `end` takes, with one for a copy on write."""
        missing = max(self.num_places(end) - self.num_blocks[row], 0)
        return missing + (1 if self.copies(row, num_published, start) else 0)

    def copies(self, row: i64, num_published: i64, start: i64) -> bool:
        """Return whether writing token `start` needs a copy of its block."""
        return needs_copy(self.pool, self, row, start // self.block_size, num_published // self.span)

    def grow(self, row: i64, num_published: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Make the block of token `start` the row's own, and take those up to `end`. Returns whether one is copied."""
        place = start // self.block_size
        old = make_own(self.pool, self, row, place, num_published // self.span)
        self._extend(row, self.num_places(end))
        if old == NULL_BLOCK or start % self.block_size == 0:
            return False
        transfers.copy(old, self.block_at(row, place), self.number)
        return True

    def publish(self, row: i64, index: PrefixIndex, token_table: BlockTable, first: i64, last: i64) -> None:
        """Cache the blocks that token blocks `first` to `last` of a row complete, which are computed and indexed."""
        self._num_new = 0
        for place in range(first // self.span, last // self.span):
            self._note_new(row, place, index, token_table)
        if self._num_new > 0:
            self.pool.cache_run(self._new, self._contents, self._num_new, self.number)

    def publish_last(
        self, rows: vec[i64], places: vec[i64], count: i64, index: PrefixIndex, sequences: SequenceTable
    ) -> None:
        """Cache the block that the newly published token block of each row may complete.

        Args:
            rows: rows of a batch.
            places: indices of the rows that count.
            count: how many of `places` count.
            index: index of token blocks.
            sequences: table of token blocks.
        """
        self._num_new = 0
        for number in range(count):
            row = rows[places[number]]
            published = sequences.num_published[row]
            if published % self.span == 0:
                self._note_new(row, published // self.span - 1, index, sequences)
        if self._num_new > 0:
            self.pool.cache_run(self._new, self._contents, self._num_new, self.number)

    def _note_new(self, row: i64, place: i64, index: PrefixIndex, token_table: BlockTable) -> None:
        """Add the block at a place to those to cache, unless it is cached, or its token block is not."""
        block = self.block_at(row, place)
        if block == NULL_BLOCK or self.pool.is_cached(block):
            return
        content = self._content(index, token_table.blocks, row * token_table.width, place)
        if content != NO_CONTENT:
            self._new[self._num_new] = block
            self._contents[self._num_new] = content
            self._num_new += 1

    def publish_place(self, row: i64, index: PrefixIndex, token_table: BlockTable, place: i64, block: i64) -> None:
        """Cache `block` under the content at a place, if that is still indexed."""
        content = self._content(index, token_table.blocks, row * token_table.width, place)
        if content != NO_CONTENT:
            self.pool.cache_content(block, content, self.number)

    def slides_at(self, row: i64) -> i64:
        """Return the computed tokens at which the next block of a row leaves the window. O(1)."""
        return num_computed_past(self.num_null[row] + 1, self.window, self.block_size)

    def slide(self, row: i64, num_computed: i64) -> None:
        """Release the blocks before the window, the oldest first; the null block replaces them.

        A load of such a block is dropped: a hit that ends inside a block reaches further than its loads were made for.
        """
        first = min(self.first_needed(num_computed), self.num_blocks[row])
        for place in range(self.num_null[row], first):
            self.pool.release_row_block(row, self.block_at(row, place))
            if self._drop_cpu_block(row, place):
                self.num_loads[row] -= 1
        if first > self.num_null[row]:
            self.clear_front(row, first)

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64, num_tokens: i64) -> None:
        """Let `child`, an empty row, hold the blocks of the first `num_tokens` tokens of `row`."""
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
        """Release the blocks after the first `num_tokens` tokens."""
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
                self.pool.release_row_blocks_flat(row, self.blocks, row * self.width + first, count)
            if keep < self.num_blocks[row]:
                self.cut_row(row, keep)
            return
        place = self.num_blocks[row] - 1
        while place >= keep:
            block = self.block_at(row, place)
            if block != NULL_BLOCK:
                self.pool.release_row_block(row, block)
            self._drop_cpu_block(row, place)
            place -= 1
        if keep < self.num_blocks[row]:
            self.cut_row(row, keep)

    def _drop_cpu_block(self, row: i64, place: i64) -> bool:
        """Release the CPU block at a position, if any. Return whether there was one."""
        if self.cpu is None or self.cpu_block_at(row, place) == NULL_BLOCK:
            return False
        self.cpu.release_one(self.cpu_block_at(row, place))
        self._set_cpu_block(row, place, NULL_BLOCK)
        return True

    # The CPU pool.

    def cpu_block_at(self, row: i64, place: i64) -> i64:
        """Return the CPU block at a position; 0 for none."""
        return i64(self.cpu_blocks[row * self.width + place])

    def _set_cpu_block(self, row: i64, place: i64, block: i64) -> None:
        self.cpu_blocks[row * self.width + place] = i32(block)

    def move_out(self, row: i64, place: i64, cpu_block: i64) -> None:
        """Release the block at a place, and put `cpu_block` there; 0 if it is not worth a copy."""
        self.pool.release_row_block(row, self.block_at(row, place))
        self.set_block(row, place, NULL_BLOCK)
        self._set_cpu_block(row, place, cpu_block)

    def move_in(self, row: i64, place: i64, block: i64) -> None:
        """Put `block`, which is held already, in place of the CPU block."""
        self.set_block(row, place, block)
        self._set_cpu_block(row, place, NULL_BLOCK)
