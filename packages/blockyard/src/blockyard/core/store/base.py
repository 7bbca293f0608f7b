"""The interface of a store: where keys and values are, and which blocks holding them takes."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import SequenceNotReady
from ...ids import NULL_BLOCK
from ...windows import num_computed_past
from ..arrays import zeros_i64
from ..blocks.ledger import BlockLedger
from ..index.prompt import Hit
from ..sequences.block_table import BlockTable
from ..sequences.table import SequenceTable
from ..watch.misses import MissLog
from .content_ledger import ContentLedger
from .copy_on_write import make_own, needs_copy
from .group_table import NEVER, GroupTable
from .transfers import Transfers


class Store:
    """Maps the token blocks of sequences to the blocks that hold their keys and values, in steps of whole batches.

    Prompts are hashed and compared in token blocks. In a `PlainStore` these hold the keys and values themselves, and
    `groups` is empty. In a `GroupedStore` each layer group has its own blocks, in the pool or on the CPU; a
    `HybridStore` has states too. Each call is all or nothing, because the `num_...` methods are called first.

    Attributes:
        token_blocks: the blocks that the rows of `sequences` hold.
        kv_pool: the blocks that have keys and values.
        groups: the block tables of layer groups whose blocks are not the token blocks.
        tables: the block table of each layer group.
        pools: the pools below the token blocks: of the GPU, then of the CPU if there is one.
        alignment: a hit ends at a multiple of this many tokens, except inside a block.
        shares_at_once: whether a token block is shared as soon as it is indexed, before it is computed (`joins`).
        has_states: whether a hit ends at a state, and never inside a block.
        cut_limit: why `truncate` refuses a cut.
    """

    def __init__(
        self,
        token_blocks: BlockLedger,
        kv_pool: BlockLedger,
        sequences: SequenceTable,
        tables: list[BlockTable],
        groups: list[GroupTable],
        pools: list[ContentLedger],
    ) -> None:
        self.token_blocks = token_blocks
        self.kv_pool = kv_pool
        self.sequences = sequences
        self.tables = tables
        self.groups = groups
        self.pools = pools
        self.cpu_pool: ContentLedger | None = pools[1] if len(pools) > 1 else None
        self.block_size: i64 = token_blocks.block_size
        self.alignment: i64 = token_blocks.block_size
        self.shares_at_once = False
        self.has_states = False
        self.cut_limit = "blocks behind its sliding window were released"
        self.num_copied_blocks: i64 = 0
        self._has_windows = len([group for group in groups if group.window > 0]) > 0
        #: By row, a number of computed tokens at or before which no block leaves a window.
        self._slides_at = zeros_i64(int(sequences.max_num_seqs))

    def num_token_blocks(self, num_tokens: i64) -> i64:
        """Return the token blocks that `num_tokens` tokens take."""
        return (num_tokens + self.block_size - 1) // self.block_size

    # Admission: what a prompt needs.

    def limit(self, hit: Hit) -> None:
        """Cut a hit to what can be taken: set `num_usable` and what else the store knows of it."""
        raise NotImplementedError("a store must have limit()")

    def fit(self, hit: Hit, num_tokens: i64, num_free: i64) -> None:
        """Give up a hit whose state does not fit beside the prompt: without it the prompt may fit."""
        if not hit.state:
            return
        most = i64(len(hit.state))
        for group in self.groups:
            most += group.num_places(num_tokens)
        if most > num_free and self.num_needed(hit, num_tokens) > num_free:
            hit.state = []
            hit.num_usable = 0

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """Return the free blocks that admitting a prompt takes, with the idle ones that it hits."""
        raise NotImplementedError("a store must have num_needed()")

    def num_needed_behind_others(self, hit: Hit, num_tokens: i64) -> i64:
        """Return the same for a later prompt of a batch: prompts before it may evict its hit."""
        return self.num_needed(hit, num_tokens)

    def num_least(self, num_tokens: i64) -> i64:
        """Return the blocks without which a prompt cannot run, even alone."""
        raise NotImplementedError("a store must have num_least()")

    def num_partial(self, num_tokens: i64) -> i64:
        """Return how many last blocks `num_tokens` tokens leave partly filled: each fork copies these on write."""
        raise NotImplementedError("a store must have num_partial()")

    def taken_by(self, hit: Hit) -> list[int]:
        """Return the blocks that taking a hit holds: ids of the KV pool, minus the id for a CPU block."""
        raise NotImplementedError("a store must have taken_by()")

    # Admission: taking a prompt in.

    def hold_hits(self, row: i64, hit: Hit) -> None:
        """Hold all that a hit takes beside token blocks, before any new block is taken."""
        self._slides_at[row] = 0
        for number, group in enumerate(self.groups):
            group.hold_hits(row, hit.places[number], hit.num_usable * self.block_size)

    def unhold_hits(self, row: i64) -> None:
        """Undo the latest `hold_hits`, after which nothing was taken."""
        for group in reversed(self.groups):
            group.unhold_hits(row)

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        """Let the eviction policy name the victims for the rest of a prompt. Raises `PolicyError`."""
        raise NotImplementedError("a store must have evict_ahead()")

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """Take new blocks for a prompt, beside token blocks."""
        for group in self.groups:
            group.take_prompt(row, num_tokens)

    def blocks_of(self, token_block: i64) -> list[int]:
        """Return the blocks of all groups that hold the content of a token block; none if one group has none."""
        raise NotImplementedError("a store must have blocks_of()")

    def cached_for(self, token_block: i64) -> list[int]:
        """Return all blocks that hold the content of a token block, or the state after it."""
        raise NotImplementedError("a store must have cached_for()")

    # The step.

    def require_swapped_in(self, rows: vec[i64], action: str) -> None:
        """Raise `SequenceNotReady` for a sequence whose blocks are in the CPU pool."""
        if self.cpu_pool is None:
            return
        for index in range(i64(len(rows))):
            if self.sequences.is_swapped[rows[index]] != 0:
                raise SequenceNotReady(f"{action}: {self.sequences.name(rows[index])} is swapped out; swap it in first")

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Return the blocks that writing tokens `start` to `end` takes, with those for copies on write."""
        raise NotImplementedError("a store must have num_missing()")

    def num_copies(self, row: i64, start: i64) -> i64:
        """Return how many of these are for copies on write."""
        raise NotImplementedError("a store must have num_copies()")

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        """Return the most blocks that rows take which write `num_tokens` tokens together. O(groups)."""
        raise NotImplementedError("a store must have num_most()")

    def grow(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Give a row the blocks that writing tokens `start` to `end` takes. False if there are too few free ones.

        The block at token `start` becomes its own; all later ones are new. If it returns False, nothing has changed.
        """
        sequences = self.sequences
        place = start // self.block_size
        published = sequences.num_published[row]
        num_blocks = sequences.num_blocks[row]
        missing = max(self.num_token_blocks(end) - num_blocks, 0)
        is_there = published <= place < num_blocks
        copies: i64 = 1 if is_there and needs_copy(self.token_blocks, sequences, row, place, published) else 0
        if missing + copies > self.token_blocks.charge_row(row) or not self.grow_groups(row, start, end, transfers):
            return False
        if is_there:
            self._make_own_token_block(row, start, published, transfers)
        if self.token_blocks.is_watched:
            # An observer makes objects, and may find no memory: each block is the row's before the next is taken.
            while missing > 0:
                sequences.push_block(row, self.token_blocks.acquire_one())
                missing -= 1
        elif missing > 0:
            self.token_blocks.acquire(sequences.blocks, row * sequences.width + num_blocks, missing)
            sequences.num_blocks[row] = num_blocks + missing
        return True

    def _make_own_token_block(self, row: i64, start: i64, published: i64, transfers: Transfers) -> None:
        sequences = self.sequences
        place = start // self.block_size
        old = make_own(self.token_blocks, sequences, row, place, published)
        if old != NULL_BLOCK:
            new = sequences.block_at(row, place)
            self.token_blocks.index.rows.copy(old, new)
            if start % self.block_size != 0 and not self.groups:
                # It has tokens, and their keys and values.
                transfers.copy(old, new, 0)
                self.num_copied_blocks += 1

    def grow_groups(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Do `grow` for the blocks of layer groups, beside token blocks, and load hits from the CPU."""
        if self.groups and self.num_missing(row, start, end) > self.kv_pool.charge_row(row):
            return False
        published = self.sequences.num_published[row]
        for group in self.groups:
            if group.num_loads[row] > 0:
                group.load(row, self.token_blocks.index, self.sequences, transfers)
            if group.grow(row, published, start, end, transfers):
                self.num_copied_blocks += 1
        return True

    def note_ready(self, row: i64) -> None:
        """Note how far a row, which has its blocks, can write without a recheck (`ready`)."""
        raise NotImplementedError("a store must have note_ready()")

    def finish(self, transfers: Transfers) -> None:
        """Complete a plan: release the blocks that it held until now."""
        if transfers.held_sources.count > 0:
            self.kv_pool.release_in_order(transfers.held_sources.items, 0, transfers.held_sources.count)

    def publish(self, row: i64, first: i64, last: i64) -> None:
        """Cache the blocks that token blocks `first` to `last` of a row, which are computed now, complete."""
        for group in self.groups:
            group.publish(row, self.token_blocks.index, self.sequences, first, last)

    def publish_last(self, rows: vec[i64], places: vec[i64], count: i64) -> None:
        """Do `publish` for the last published token block of each row at the first `count` places of a batch."""
        if self.kv_pool.index.log is None or len(self.groups) == 1:
            for group in self.groups:
                group.publish_last(rows, places, count, self.token_blocks.index, self.sequences)
            return
        # Events come in the order of rows.
        for number in range(count):
            row = rows[places[number]]
            self.publish(row, self.sequences.num_published[row] - 1, self.sequences.num_published[row])

    def slide(self, rows: vec[i64]) -> None:
        """Release the blocks before the sliding windows of a batch. O(batch), and what such rows take."""
        if not self._has_windows:
            return
        num_computed = self.sequences.num_computed
        slides_at = self._slides_at
        for index in range(i64(len(rows))):
            row = rows[index]
            if num_computed[row] >= slides_at[row]:
                self.slide_row(row, num_computed[row])

    def slide_row(self, row: i64, computed: i64) -> None:
        """Release the blocks before the sliding windows of a row."""
        following = NEVER
        for group in self.groups:
            if group.window > 0:
                group.slide(row, computed)
                following = min(following, group.slides_at(row))
        self._slides_at[row] = following

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` hold the blocks of `row` too, beside token blocks."""
        self._slides_at[child] = 0
        for group in self.groups:
            group.fork(row, child, self.sequences.num_tokens[row])

    def num_loads(self, row: i64) -> i64:
        """Return the blocks that the row's next step loads from the CPU."""
        loads: i64 = 0
        for group in self.groups:
            loads += group.num_loads[row]
        return loads

    def shortest_cut(self, row: i64) -> i64:
        """Return the fewest computed tokens that `truncate` may leave: blocks before windows are released."""
        shortest: i64 = 0
        for group in self.groups:
            shortest = max(shortest, num_computed_past(group.num_null[row], group.window, group.block_size))
        return shortest

    def truncate(self, row: i64, num_tokens: i64) -> None:
        """Release the blocks after the first `num_tokens` tokens, beside token blocks."""
        for group in self.groups:
            group.truncate(row, num_tokens)

    def close(self, row: i64) -> None:
        """Release all blocks of a row but its token blocks."""
        for group in self.groups:
            group.close(row)

    def reset(self) -> None:
        """Forget all cached content."""
        self.token_blocks.reset()
        for pool in self.pools:
            pool.reset()

    # What others see.

    def watch_misses(self, misses: MissLog) -> None:
        """Report every eviction to the log of misses."""
        self.token_blocks.watch(misses)

    def cpu_blocks_of(self, row: i64) -> list[int]:
        """Return the CPU blocks that a row holds: swapped out, or loaded by its next step."""
        blocks: list[int] = []
        if self.cpu_pool is not None:
            for group in self.groups:
                found = [int(group.cpu_block_at(row, place)) for place in range(group.num_blocks[row])]
                blocks += [block for block in found if block != NULL_BLOCK]
        return blocks
