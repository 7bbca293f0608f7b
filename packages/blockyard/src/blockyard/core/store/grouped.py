"""The store of a cache with several layer groups, a sliding window or a CPU pool.

Sequences hold token blocks as in a plain cache, but these have no keys and values: each is mapped to the blocks that
do, as a page table maps virtual memory. Prefix hits, forks and cuts are decided on token blocks, as in a plain cache.
"""

from dataclasses import replace

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...cache_options import MAX_BLOCKS
from ...config import CacheConfig
from ...errors import InvariantError
from ...ids import NULL_BLOCK
from ..arrays import view_i64, zeros_i64
from ..blocks.block import KVCacheBlock
from ..blocks.ledger import BlockLedger, LedgerRoom
from ..index.prompt import Hit
from ..sequences.block_table import BlockTable
from ..sequences.table import SequenceTable
from ..watch.misses import MissLog
from .base import Store
from .content_ledger import FIRST_PART, ContentLedger, CpuTier, StoredMisses
from .group_table import GroupTable
from .transfers import Transfers


def num_token_blocks(config: CacheConfig) -> int:
    """Return the token blocks of a grouped store: for all that sequences can hold, and for cached content.

    A token block of a sequence needs a block of a group without a window; with only windows, it needs none. Duplicates,
    idle token blocks and copies on write need at most as many again, twice.
    """
    per_block = max(group.block_size for group in config.layer_groups) // config.hash_block_size
    stored = (config.num_blocks + config.cpu.num_blocks) * per_block
    held = config.max_num_seqs * config.max_blocks_per_seq
    if any(group.sliding_window == 0 for group in config.layer_groups):
        held = min(held, 2 * stored)
    if config.has_states:
        # Checkpoints need blocks that were used longer ago (`NeededTokens`).
        held += 2 * stored
    return min(1 + held + stored, MAX_BLOCKS)


class GroupedStore(Store):
    """Layer groups over one pool, each with its own block table."""

    def __init__(
        self, config: CacheConfig, token_blocks: BlockLedger, sequences: SequenceTable, hash_seed: int
    ) -> None:
        first = config.layer_groups[0].block_size
        self.pool = ContentLedger(config.num_blocks, hash_seed, first)
        self.cpu: ContentLedger | None = None
        self.tier: CpuTier | None = None
        pools = [self.pool]
        if config.cpu.num_blocks > 0:
            cpu = ContentLedger(config.cpu.num_blocks, hash_seed, first)
            self.cpu = cpu
            pools.append(cpu)
            if config.cpu.keep_evicted:
                self.tier = CpuTier(self.pool, cpu)
                self.pool.watch(self.tier)
        groups = [GroupTable(number, config, self.pool, self.cpu) for number in range(len(config.layer_groups))]
        tables: list[BlockTable] = list(groups)
        super().__init__(token_blocks, self.pool, sequences, tables, groups, pools)
        self.config = config
        self.alignment = config.hit_alignment

    # Admission.

    def limit(self, hit: Hit) -> None:
        """Cut a hit to the longest one that every group can take from the cache, and note the blocks.

        O(found * groups): a window that fails lowers the limit to the missing place, so each place is looked at once,
        or once more for each other group with a window.
        """
        limit = i64(len(hit.blocks)) * self.block_size
        for group in self.groups:
            hit.places.append(zeros_i64(int(limit // group.block_size)))
        hit.num_served = self.reach(hit, limit) // self.block_size
        hit.num_usable = hit.num_served
        hit.num_known = len(hit.blocks)

    def reach(self, hit: Hit, limit: i64) -> i64:
        """Return how many of the first `limit` tokens all groups can take from the cache."""
        reached: i64 = -1
        while limit > 0 and reached != limit:
            reached = limit
            for number, group in enumerate(self.groups):
                limit = min(limit, group.reach(self.token_blocks.index, hit.blocks, hit.places[number], limit))
                limit -= limit % self.alignment
        return limit

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        needed: i64 = 0
        for number, group in enumerate(self.groups):
            needed += group.num_needed(hit.places[number], hit.num_usable * self.block_size, num_tokens)
        return needed

    def num_needed_behind_others(self, hit: Hit, num_tokens: i64) -> i64:
        """Return the blocks of the whole prompt if others may evict a part of the hit: the rest is of no use then."""
        for number, group in enumerate(self.groups):
            if group.num_idle(hit.places[number], hit.num_usable * self.block_size) > 0:
                return self.num_least(num_tokens)
        return self.num_needed(hit, num_tokens)

    def num_partial(self, num_tokens: i64) -> i64:
        partial: i64 = 0
        for group in self.groups:
            if num_tokens % group.block_size != 0:
                partial += 1
        return partial

    def num_least(self, num_tokens: i64) -> i64:
        least: i64 = 0
        for group in self.groups:
            least += group.num_least(num_tokens)
        return least

    def taken_by(self, hit: Hit) -> list[int]:
        blocks: list[int] = []
        for number, group in enumerate(self.groups):
            num_tokens = hit.num_usable * self.block_size
            places = hit.places[number]
            blocks += [
                int(places[place]) for place in range(group.first_needed(num_tokens), group.num_full(num_tokens))
            ]
        return blocks

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        needed: i64 = 0
        for group in self.groups:
            needed += group.num_to_take(row, num_tokens)
        self.pool.evict_ahead(needed)

    def blocks_of(self, token_block: i64) -> list[int]:
        blocks = self.cached_for(token_block)
        return blocks if len(blocks) == len(self.groups) else []

    def cached_for(self, token_block: i64) -> list[int]:
        content = self.token_blocks.index.content_of(token_block)
        blocks = [int(self.pool.find_content(content, group.number)) for group in self.groups]
        return [block for block in blocks if block != NULL_BLOCK]

    # The step.

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        published = self.sequences.num_published[row]
        missing: i64 = 0
        for group in self.groups:
            missing += group.num_missing(row, published, start, end)
        return missing

    def num_copies(self, row: i64, start: i64) -> i64:
        copies: i64 = 0
        for group in self.groups:
            copies += 1 if group.copies(row, self.sequences.num_published[row], start) else 0
        return copies

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        most: i64 = 0
        for group in self.groups:
            most += num_tokens // group.block_size + 2 * num_rows
        return most

    def note_ready(self, row: i64) -> None:
        """Let the row write as far as its token blocks reach, if all groups reach as far and nothing is to load."""
        ready = self.sequences.num_blocks[row] * self.block_size
        for group in self.groups:
            if group.num_loads[row] > 0 or group.num_blocks[row] * group.block_size < ready:
                return
        self.sequences.ready[row] = ready
        self.sequences.note_tail(row)
        self.groups[0].note_tail(row)

    def finish(self, transfers: Transfers) -> None:
        """Let the plan save evicted blocks to the CPU pool, and release the blocks that it held until now."""
        if self.tier is not None:
            self.tier.tell(transfers)
        if self.cpu is not None:
            for place in range(transfers.held.count):
                self.cpu.release_one(i64(transfers.held.items[place]))
        super().finish(transfers)

    def forget_hit(self, row: i64) -> None:
        """Release all blocks of a row but its token blocks: it computes its prompt from the beginning."""
        for group in self.groups:
            group.close(row)
        self._slides_at[row] = 0

    # The size, and what others see.

    def make_room(self, num_blocks: int) -> LedgerRoom | None:
        """Make arrays for the token blocks of a pool of `num_blocks` blocks, if these need any."""
        return self.token_blocks.make_room(num_token_blocks(replace(self.config, num_blocks=num_blocks)), num_blocks)

    def check_slides(self, row: i64) -> None:
        """Check that no block of a live row has left its window unnoticed. Raises `InvariantError`."""
        for group in self.groups:
            if group.window > 0 and self._slides_at[row] > group.slides_at(row):
                raise InvariantError(
                    f"I2: row {row} slides in group {group.number} at {group.slides_at(row)} computed tokens; it is "
                    f"looked at again at {self._slides_at[row]}"
                )

    def watch_misses(self, misses: MissLog) -> None:
        """Report evictions of the pool too: there the token block stays."""
        super().watch_misses(misses)
        self.pool.watch(StoredMisses(misses, self.pool))

    def describe(self, block: KVCacheBlock) -> None:
        """Add the group and the tokens of a cached block, as long as its token blocks are there. O(token blocks)."""
        number = i64(block.block_id)
        if not self.pool.is_cached(number):
            return
        if self.pool.group_of(number) >= FIRST_PART:
            block.token_ids = []
            block.num_tokens = 0
            block.group = len(self.groups)
            return
        group = self.groups[int(self.pool.group_of(number))]
        index = self.token_blocks.index
        contents = view_i64(index.identity)[::2]
        content = self.pool.content_of(number)
        size = int(self.block_size)
        tokens: list[int] = []
        for _ in range(group.span):
            found = np.flatnonzero(contents == int(content))
            if len(found) == 0:
                tokens = []
                break
            token_block = i64(found[0])
            found_tokens: list[int] = self.token_blocks.block_tokens(vec[i32]([i32(token_block)]), size).tolist()
            tokens = found_tokens + tokens
            content = index.parent_of(token_block)
        block.token_ids = tokens
        block.num_tokens = int(group.block_size)
        block.group = int(group.number)
