"""What the calls ask of a store: where the keys and values of token blocks are, and what holding them takes.

`PlainStore` is that of a cache with one layer group, no window and no CPU pool; `grouped` has the other.
"""

from librt.vecs import vec
from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..blocks.block import KVCacheBlock
from ..blocks.ledger import BlockLedger, LedgerRoom
from ..index.prompt import Hit, Prompt
from ..sequences.block_table import BlockTable
from ..sequences.joins import Joins
from ..sequences.table import SequenceTable
from ..watch.misses import MissLog
from .content_ledger import ContentLedger
from .transfers import Transfers


def needs_copy(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> bool:
    """Return whether writing into the block at a place needs a copy: others hold it too.

    What the row published it is about to compute itself, for all who hold it.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return False
    return ledger.ref_cnt[table.block_at(row, place)] > 1


def make_own(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> i64:
    """Let no other row read what this row writes into the block at a place. Returns the block it was, 0 if it stays.

    A block that others hold is replaced by a new one; one that is cached, of a row that was cut, leaves the index.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return NULL_BLOCK
    old = table.block_at(row, place)
    new = ledger.writable(old)
    if new == old:
        return NULL_BLOCK
    table.set_block(row, place, new)
    ledger.give_back_one(row, old)
    return old


class Store:
    """Token blocks, which prompts are hashed and compared in, and the blocks that hold their keys and values.

    A `PlainStore` holds keys and values in the token blocks themselves; a `GroupedStore` holds them in other blocks,
    for each layer group, in the pool or on the CPU. A cache has one of the two, chosen when it is made (`parts`), and
    the calls drive it through this interface: once a sequence or once a batch, never once a token.

    Most of what a grouped store does for its own blocks a plain one has done already; those bodies are here, and empty.

    token_blocks: the blocks that the rows of `sequences` hold. kv_pool: the blocks that have keys and values.
    tables: the block table of each layer group.
    """

    def __init__(
        self, token_blocks: BlockLedger, kv_pool: BlockLedger, sequences: SequenceTable, tables: list[BlockTable]
    ) -> None:
        self.token_blocks = token_blocks
        self.kv_pool = kv_pool
        self.cpu_pool: BlockLedger | None = None
        self.sequences = sequences
        self.tables = tables
        self.block_size: i64 = token_blocks.block_size
        #: A hit ends at a multiple of this many tokens, those inside a block aside.
        self.alignment: i64 = token_blocks.block_size
        #: Whether a token block can be shared as soon as it is indexed, even before it is computed (`joins`).
        self.shares_at_once = False
        #: Whether a hit ends at a state, which the plan loads, and never inside a block.
        self.has_states = False
        self.num_copied_blocks: i64 = 0

    def num_token_blocks(self, num_tokens: i64) -> i64:
        """Token blocks that `num_tokens` tokens take."""
        return (num_tokens + self.block_size - 1) // self.block_size

    #: Why `truncate` refuses a cut.
    cut_limit = "blocks behind its sliding window were released"

    # Admission: what a prompt needs.

    def limit(self, hit: Hit) -> None:
        """Cut a hit to what can be taken: set `num_usable` and what else the store knows of it."""
        raise NotImplementedError("a store must have limit()")

    def fit(self, hit: Hit, num_tokens: i64, num_free: i64) -> None:
        """Give a hit up that takes more than `num_free` blocks with the prompt, where that is no reason to refuse."""

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """Free blocks that admitting a prompt with this hit takes, idle ones that it hits included."""
        raise NotImplementedError("a store must have num_needed()")

    def num_needed_behind_others(self, hit: Hit, num_tokens: i64) -> i64:
        """The same for a later prompt of a batch: the prompts before it may evict what it hits."""
        return self.num_needed(hit, num_tokens)

    def num_least(self, num_tokens: i64) -> i64:
        """Blocks without which a prompt of `num_tokens` tokens cannot run, even alone."""
        raise NotImplementedError("a store must have num_least()")

    def num_partial(self, num_tokens: i64) -> i64:
        """Last blocks that a sequence of `num_tokens` tokens leaves partly filled: what a fork copies on write."""
        raise NotImplementedError("a store must have num_partial()")

    def num_short(self, num_token_blocks: i64) -> i64:
        """Token blocks by which the free ones fall short, where they are not the blocks counted already."""
        return 0

    def taken_by(self, hit: Hit) -> list[int]:
        """The blocks that taking a hit holds: ids of the KV pool, minus the id for a CPU block."""
        raise NotImplementedError("a store must have taken_by()")

    def content_ledgers(self) -> list[ContentLedger]:
        """The pools below token blocks: of the GPU, then of the CPU if there is one."""
        return []

    # Admission: taking a prompt in.

    def hold_hits(self, row: i64, hit: Hit) -> None:
        """Hold all that a hit takes besides token blocks, before any new block is taken."""

    def unhold_hits(self, row: i64) -> None:
        """Undo the latest `hold_hits`, after which nothing was taken."""

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        """Let the eviction policy name the victims for the rest of a prompt. Raises `PolicyError`."""
        raise NotImplementedError("a store must have evict_ahead()")

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """New blocks for a prompt, besides token blocks."""

    def admitted(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """A prompt was taken in. Where this fails, the prompt is let go again."""

    def blocks_of(self, token_block: i64) -> list[int]:
        """A block of the KV pool for each group that holds what `token_block` says; none if one group has none."""
        raise NotImplementedError("a store must have blocks_of()")

    def cached_for(self, token_block: i64) -> list[int]:
        """The same, of those groups that have one."""
        raise NotImplementedError("a store must have cached_for()")

    # The step.

    def require_swapped_in(self, rows: vec[i64], action: str) -> None:
        """Raise `SequenceNotReady` for a sequence whose blocks are in the CPU pool."""

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks of the KV pool that writing tokens `start` to `end` takes, a copy on write included."""
        raise NotImplementedError("a store must have num_missing()")

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """End what rows are to compute, from the positions `first` on, where the store must see it end."""

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        """Return the most blocks that rows take which write `num_tokens` tokens together. O(groups)."""
        return num_tokens // self.block_size + 2 * num_rows

    def num_to_save(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks that may be taken besides for what is saved of these tokens."""
        return 0

    def num_to_drop(self, row: i64) -> i64:
        """Return the blocks that a row holds for saves of an earlier step, and lets go of when it is served again."""
        return 0

    def save(self, transfers: Transfers) -> None:
        """All sequences of a step have what they need: take blocks for what is saved of it."""

    def num_copies(self, row: i64, start: i64) -> i64:
        """How many of them are copies on write."""
        raise NotImplementedError("a store must have num_copies()")

    def grow(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Give the row what writing tokens `start` to `end` takes. False when too few blocks are free; nothing changed.

        The block at token `start` becomes its own; all behind it are new.
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
        if self.token_blocks.observer is not None:
            # An observer makes objects, and may find no memory: each block is the row's before the next is taken.
            while missing > 0:
                sequences.push_block(row, self.token_blocks.acquire_one())
                missing -= 1
        elif missing > 0:
            self.token_blocks.acquire(sequences.blocks, row * sequences.width + num_blocks, missing)
            sequences.num_blocks[row] = num_blocks + missing
        return True

    def _make_own_token_block(self, row: i64, start: i64, published: i64, transfers: Transfers) -> None:
        """Let the row write into its block at token `start`, which it has not published."""
        sequences = self.sequences
        place = start // self.block_size
        old = make_own(self.token_blocks, sequences, row, place, published)
        if old != NULL_BLOCK:
            new = sequences.block_at(row, place)
            self.token_blocks.index.rows.copy(old, new)
            if start % self.block_size != 0:
                self.token_block_copied(old, new, transfers)

    def grow_groups(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """The same for the blocks of layer groups, besides token blocks."""
        return True

    def token_block_copied(self, source: i64, target: i64, transfers: Transfers) -> None:
        """A token block with tokens in it was copied on write."""

    def note_ready(self, row: i64) -> None:
        """The sequence has what it asked for: note how far it can write without a second look (`ready`)."""

    def finish(self, transfers: Transfers) -> None:
        """Complete a plan: release the blocks that it held until now."""
        if transfers.held_sources.count > 0:
            self.kv_pool.release_in_order(transfers.held_sources.items, 0, transfers.held_sources.count)

    def publish(self, row: i64, first: i64, last: i64) -> None:
        """Token blocks `first` to `last` of the row are computed and indexed now."""

    def publish_last(self, rows: vec[i64], places: vec[i64], count: i64) -> None:
        """The same of the last published token block of the row at each of the first `count` places of a batch."""

    def settle(self, rows: vec[i64]) -> None:
        """A commit of these sequences is complete."""

    def slide(self, rows: vec[i64]) -> None:
        """Release what lies behind the sliding windows of these sequences."""

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` hold the blocks of `row` too, besides token blocks."""

    def num_loads(self, row: i64) -> i64:
        """Blocks that the sequence's next step brings back from the CPU."""
        return 0

    def shortest_cut(self, row: i64) -> i64:
        """The least number of computed tokens that `truncate` may leave: all windows before it are still held."""
        return 0

    def truncate(self, row: i64, num_tokens: i64) -> None:
        """Release the blocks behind the first `num_tokens` tokens, besides token blocks."""

    def close(self, row: i64) -> None:
        """Release everything a sequence holds, besides token blocks."""

    def reset(self) -> None:
        """Forget all cached content."""
        self.token_blocks.reset()

    # The size, and what others see.

    def pending_blocks(self, row: i64) -> list[int]:
        """Return the blocks of the KV pool that a row holds besides its tables."""
        return []

    def make_room(self, num_blocks: int) -> LedgerRoom | None:
        """Arrays for the token blocks of a KV pool of `num_blocks` blocks, where they are other blocks than its own."""
        return None

    def move_into(self, room: LedgerRoom | None) -> None:
        """Put these arrays in place."""

    def watch_misses(self, misses: MissLog) -> None:
        """Let the log of misses be told of every eviction."""
        self.token_blocks.watch(misses)

    def describe(self, block: KVCacheBlock) -> None:
        """Add what the store knows of a cached block's content."""

    def cpu_blocks_of(self, row: i64) -> list[int]:
        """The CPU blocks that a sequence holds."""
        return []


class PlainStore(Store):
    """What is hashed is what is stored, so a block is shared as soon as it is indexed and the rows are the table."""

    def __init__(self, token_blocks: BlockLedger, sequences: SequenceTable, joins: Joins) -> None:
        super().__init__(token_blocks, token_blocks, sequences, [sequences])
        self.joins = joins
        self.shares_at_once = token_blocks.enable_prefix_caching

    def limit(self, hit: Hit) -> None:
        """Computed blocks, then those that one sequence has yet to compute."""
        self.joins.limit(hit, self.token_blocks.ref_cnt)
        hit.num_known = hit.num_usable

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """New blocks and idle hits. O(hit)."""
        idle = self.token_blocks.count_idle(hit.blocks, hit.num_usable)
        return self.num_token_blocks(num_tokens) - hit.num_usable + idle

    def num_least(self, num_tokens: i64) -> i64:
        """All blocks of the prompt."""
        return self.num_token_blocks(num_tokens)

    def num_partial(self, num_tokens: i64) -> i64:
        """1 unless the last block is full."""
        return 1 if num_tokens % self.block_size != 0 else 0

    def taken_by(self, hit: Hit) -> list[int]:
        """The usable blocks."""
        return [int(hit.blocks[position]) for position in range(hit.num_usable)]

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        """As many victims as the row lacks blocks."""
        self.kv_pool.evict_ahead(self.num_token_blocks(num_tokens) - self.sequences.num_blocks[row])

    def blocks_of(self, token_block: i64) -> list[int]:
        """The block itself."""
        return [int(token_block)]

    def cached_for(self, token_block: i64) -> list[int]:
        """The block itself."""
        return [int(token_block)]

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks behind the last one, and a copy of a shared one."""
        missing = max(self.num_token_blocks(end) - self.sequences.num_blocks[row], 0)
        return missing + self.num_copies(row, start)

    def num_copies(self, row: i64, start: i64) -> i64:
        """1 if the block at token `start` is held by others too and this sequence has not published it."""
        sequences = self.sequences
        place = start // self.block_size
        return 1 if needs_copy(self.token_blocks, sequences, row, place, sequences.num_published[row]) else 0

    def token_block_copied(self, source: i64, target: i64, transfers: Transfers) -> None:
        """Its keys and values are copied with it."""
        transfers.copy(source, target, 0)
        self.num_copied_blocks += 1

    def note_ready(self, row: i64) -> None:
        """As far as its blocks reach, unless others wait for what it computes."""
        sequences = self.sequences
        if sequences.num_waiters[row] == 0:
            sequences.ready[row] = sequences.num_blocks[row] * self.block_size
            sequences.note_tail(row)
