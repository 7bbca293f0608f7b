"""Layer groups over one pool: where the pages of a sequence are stored, group by group, in the pool or on the CPU.

A manager with several groups, a sliding window or a CPU pool has a page table, as virtual memory has: its
sequences hold *pages*, which know tokens and have no keys and values; here each page is mapped to the blocks that
do. Prefix hits, forks and cuts are decided on pages, as in a manager without groups, whose pages are its blocks.
"""

from dataclasses import replace

from mypy_extensions import i64

from ..config import MAX_BLOCKS, CacheConfig
from .arrays import zeros_i64
from .block_ledger import BlockLedger, LedgerRoom
from .block_table import BlockTable
from .content_pool import ContentPool
from .cpu_tier import CpuTier
from .group_table import GroupTable
from .hit import Hit
from .sequences import SequenceTable
from .transfers import Transfers


def num_pages(config: CacheConfig) -> int:
    """Pages of the page table: enough for all that running sequences can hold, and to remember what is cached.

    A page that a sequence holds is backed by a block of a group without a window; with windows alone, by nothing.
    Duplicates, idle pages and copies on write take no more than as much again, twice.
    """
    per_block = max(group.block_size for group in config.layer_groups) // config.hash_block_size
    stored = (config.num_blocks + config.num_cpu_blocks) * per_block
    held = config.max_num_seqs * config.max_blocks_per_seq
    if any(group.sliding_window == 0 for group in config.layer_groups):
        held = min(held, 2 * stored)
    return min(1 + held + stored, MAX_BLOCKS)


class Mapping:
    """The tables of all groups, driven together; each call is all or nothing because `num_...` is asked first."""

    def __init__(self, config: CacheConfig, pages: BlockLedger, sequences: SequenceTable, hash_seed: int) -> None:
        self.config = config
        self.pages = pages
        self.sequences = sequences
        self.page_size: i64 = config.hash_block_size
        self.alignment: i64 = config.hit_alignment
        first = config.layer_groups[0].block_size
        self.pool = ContentPool(config.num_blocks, hash_seed, first)
        self.cpu: ContentPool | None = None
        self.tier: CpuTier | None = None
        if config.num_cpu_blocks > 0:
            cpu = ContentPool(config.num_cpu_blocks, hash_seed, first)
            self.cpu = cpu
            if config.keep_evicted:
                self.tier = CpuTier(self.pool, cpu)
                self.pool.watch(self.tier)
        self.groups = [
            GroupTable(
                number, group, config.hash_block_size, config.max_num_seqs, config.max_model_len, self.pool, self.cpu
            )
            for number, group in enumerate(config.layer_groups)
        ]
        self.num_copied_blocks: i64 = 0

    def tables(self) -> list[BlockTable]:
        """The table of each group."""
        return list(self.groups)

    # Admission.

    def limit(self, hit: Hit) -> None:
        """Cut a hit to what every group can take from the cache, and note where: the longest common hit.

        O(found * groups): a window that fails lowers the limit to the place that is missing, so each place is looked
        at once, or once more for each other group with a window.
        """
        limit = hit.num_found * self.page_size
        for group in self.groups:
            hit.places.append(zeros_i64(int(limit // group.block_size)))
        reached: i64 = -1
        while limit > 0 and reached != limit:
            reached = limit
            for number, group in enumerate(self.groups):
                limit = min(limit, group.reach(self.pages.index, hit.blocks, hit.places[number], limit))
                limit -= limit % self.alignment
        hit.num_usable = limit // self.page_size

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """Free blocks that admitting a prompt with this hit asks for."""
        needed: i64 = 0
        for number, group in enumerate(self.groups):
            needed += group.num_needed(hit.places[number], hit.num_usable * self.page_size, num_tokens)
        return needed

    def is_lasting(self, hit: Hit) -> bool:
        """Whether all that a hit takes is held, so that no other admission can evict it."""
        for number, group in enumerate(self.groups):
            if group.num_idle(hit.places[number], hit.num_usable * self.page_size) > 0:
                return False
        return True

    def num_partial(self, num_tokens: i64) -> i64:
        """Last blocks that a sequence of `num_tokens` tokens leaves partly filled: what a fork copies on write."""
        partial: i64 = 0
        for group in self.groups:
            if num_tokens % group.block_size != 0:
                partial += 1
        return partial

    def num_least(self, num_tokens: i64) -> i64:
        """Blocks without which a prompt of `num_tokens` tokens cannot run, even alone."""
        least: i64 = 0
        for group in self.groups:
            least += group.num_least(num_tokens)
        return least

    def hold_hits(self, row: i64, hit: Hit) -> None:
        """Hold all that a hit takes, before any new block is taken."""
        for number, group in enumerate(self.groups):
            group.hold_hits(row, hit.places[number], hit.num_usable * self.page_size)

    def unhold_hits(self, row: i64) -> None:
        """Undo the latest `hold_hits`, after which nothing was taken."""
        for group in reversed(self.groups):
            group.unhold_hits(row)

    def secure(self, row: i64, num_tokens: i64) -> None:
        """Let the pool's policy name its victims for `take_prompt`. Raises `PolicyError`."""
        needed: i64 = 0
        for group in self.groups:
            needed += group.num_to_take(row, num_tokens)
        self.pool.secure(needed)

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """New blocks for what has to be loaded and for the prompt."""
        for group in self.groups:
            group.take_prompt(row, num_tokens)

    def held_for(self, content: i64) -> list[int]:
        """The blocks of the pool that hold `content`, of those groups that have one."""
        blocks = [int(self.pool.find_content(content, group.number)) for group in self.groups]
        return [block for block in blocks if block != 0]

    def make_room(self, num_blocks: int) -> LedgerRoom | None:
        """Arrays for the pages of a pool of `num_blocks` blocks, not put in place; None where there are enough."""
        return self.pages.make_room(num_pages(replace(self.config, num_blocks=num_blocks)), num_blocks)

    def move_into(self, room: LedgerRoom | None) -> None:
        """Remember as many pages as there is room for."""
        if room is not None:
            self.pages.resize(room.num_blocks, room)

    def blocks_of(self, content: i64) -> list[int]:
        """A block of the pool that holds `content`, for each group; none if one group has none."""
        blocks: list[int] = []
        for group in self.groups:
            block = self.pool.find_content(content, group.number)
            if block == 0:
                return []
            blocks.append(int(block))
        return blocks

    # The step.

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks that writing tokens `start` to `end` takes from the pool."""
        published = self.sequences.num_published[row]
        missing: i64 = 0
        for group in self.groups:
            missing += group.num_missing(row, published, start, end)
        return missing

    def grow(self, row: i64, start: i64, end: i64, transfers: Transfers) -> None:
        """Blocks for tokens `start` to `end`, copies on write, and what was hit in the CPU pool."""
        published = self.sequences.num_published[row]
        for group in self.groups:
            if group.num_loads[row] > 0:
                group.load(row, self.pages.index, self.sequences.row_blocks(row), transfers)
            if group.grow(row, published, start, end, transfers):
                self.num_copied_blocks += 1

    def finish(self, transfers: Transfers) -> None:
        """Complete a plan: evicted blocks that are saved, and the CPU blocks it held until now."""
        if self.tier is not None:
            self.tier.tell(transfers)
        if self.cpu is not None:
            for block in transfers.held:
                self.cpu.release_one(block)

    def publish(self, row: i64, first_page: i64, last_page: i64) -> None:
        """Pages `first_page` to `last_page` of the row are computed and indexed now."""
        pages = self.sequences.row_blocks(row)
        for group in self.groups:
            group.publish(row, self.pages.index, pages, first_page, last_page)

    def slide(self, row: i64) -> None:
        """Give back what lies behind the windows."""
        for group in self.groups:
            if group.window > 0:
                group.slide(row, self.sequences.num_computed[row])

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` hold the blocks of `row` too."""
        for group in self.groups:
            group.fork(row, child, self.sequences.num_tokens[row])

    def num_loads(self, row: i64) -> i64:
        """Blocks that the sequence's next step brings back from the CPU."""
        loads: i64 = 0
        for group in self.groups:
            loads += group.num_loads[row]
        return loads

    def shortest_cut(self, row: i64) -> i64:
        """The least number of computed tokens that `truncate` may leave: all windows before it are still held."""
        shortest: i64 = 0
        for group in self.groups:
            if group.num_null[row] > 0:
                shortest = max(shortest, group.num_null[row] * group.block_size + group.window - 1)
        return shortest

    def truncate(self, row: i64, num_tokens: i64) -> None:
        """Give back the blocks behind the first `num_tokens` tokens."""
        for group in self.groups:
            group.truncate(row, num_tokens)

    def close(self, row: i64) -> None:
        """Give back everything a sequence holds."""
        for group in self.groups:
            group.close(row)

    def reset(self) -> None:
        """Forget all cached content, here and on the CPU."""
        self.pool.reset()
        if self.cpu is not None:
            self.cpu.reset()
