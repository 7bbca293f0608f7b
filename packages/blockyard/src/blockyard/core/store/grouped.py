"""Layer groups over one pool: where token blocks are stored, group by group, in the pool or on the CPU.

In a cache with several groups, a sliding window or a CPU pool, sequences hold token blocks as in a plain one, but these
have no keys and values: here each is mapped to the blocks that do, as a page table maps virtual memory. Prefix hits,
forks and cuts are decided on token blocks, as in a plain cache.
"""

from dataclasses import replace

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...cache_options import MAX_BLOCKS
from ...config import CacheConfig
from ...errors import InvariantError, SequenceNotReady
from ...ids import NULL_BLOCK
from ...windows import num_computed_past
from ..arrays import view_i64, zeros_i64
from ..blocks.block import KVCacheBlock
from ..blocks.ledger import BlockLedger, LedgerRoom
from ..index.prompt import Hit, Prompt
from ..sequences.block_table import BlockTable
from ..sequences.table import SequenceTable
from ..watch.misses import MissLog
from .base import Store
from .content_ledger import ContentLedger, CpuTier, StoredMisses
from .group_table import GroupTable
from .state_group import FIRST_PART, NEVER, StateGroup
from .transfers import Transfers


def num_token_blocks(config: CacheConfig) -> int:
    """Token blocks of a grouped store: for all that running sequences can hold, and to remember what is cached.

    A token block that a sequence holds is backed by a block of a group without a window; with windows alone, by
    nothing. Duplicates, idle token blocks and copies on write take no more than as much again, twice.
    """
    per_block = max(group.block_size for group in config.layer_groups) // config.hash_block_size
    stored = (config.num_blocks + config.cpu.num_blocks) * per_block
    held = config.max_num_seqs * config.max_blocks_per_seq
    if any(group.sliding_window == 0 for group in config.layer_groups):
        held = min(held, 2 * stored)
    if config.has_states:
        # What states need is older than what was used last (`NeededTokens`).
        held += 2 * stored
    return min(1 + held + stored, MAX_BLOCKS)


class GroupedStore(Store):
    """The tables of all groups, driven together; each call is all or nothing because `num_...` is asked first."""

    def __init__(
        self, config: CacheConfig, token_blocks: BlockLedger, sequences: SequenceTable, hash_seed: int
    ) -> None:
        first = config.layer_groups[0].block_size
        self.pool = ContentLedger(config.num_blocks, hash_seed, first)
        self.cpu: ContentLedger | None = None
        self.tier: CpuTier | None = None
        if config.cpu.num_blocks > 0:
            cpu = ContentLedger(config.cpu.num_blocks, hash_seed, first)
            self.cpu = cpu
            if config.cpu.keep_evicted:
                self.tier = CpuTier(self.pool, cpu)
                self.pool.watch(self.tier)
        self.groups = [GroupTable(number, config, self.pool, self.cpu) for number in range(len(config.layer_groups))]
        tables: list[BlockTable] = list(self.groups)
        super().__init__(token_blocks, self.pool, sequences, tables)
        self.cpu_pool = self.cpu
        self.config = config
        self.alignment = config.hit_alignment
        self.has_windows = max([group.window for group in self.groups]) > 0
        #: By row, the computed tokens at which the next block falls behind a window, or fewer.
        self._slides_at = zeros_i64(config.max_num_seqs)
        self.states: StateGroup | None = None
        if config.has_states:
            self.states = StateGroup(config, self.pool, token_blocks, sequences)
            self.has_states = True
            self.cut_limit = "a state cannot be cut"

    # Admission.

    def limit(self, hit: Hit) -> None:
        """Cut a hit to what every group can take from the cache, and note where: the longest common hit.

        O(found * groups): a window that fails lowers the limit to the place that is missing, so each place is looked
        at once, or once more for each other group with a window.
        """
        limit = i64(len(hit.blocks)) * self.block_size
        for group in self.groups:
            hit.places.append(zeros_i64(int(limit // group.block_size)))
        served = self._reach(hit, limit)
        limit = served
        hit.num_served = served // self.block_size
        if self.states is not None:
            reached: i64 = -1
            while limit > 0 and reached != limit:
                reached = self.states.reach(self.token_blocks.index, hit, limit)
                limit = self._reach(hit, reached)
            if limit < hit.external_state_tokens:
                before = (hit.external_state_tokens - 1) // self.alignment * self.alignment
                reached = self._reach(hit, min(served, before))
                hit.lacks_state = reached > limit
                limit = reached
            if limit == 0 or hit.lacks_state:
                hit.state = []
        hit.num_usable = limit // self.block_size
        hit.num_known = len(hit.blocks)

    def _reach(self, hit: Hit, limit: i64) -> i64:
        """Return how many of the first `limit` tokens all groups with tables can take."""
        reached: i64 = -1
        while limit > 0 and reached != limit:
            reached = limit
            for number, group in enumerate(self.groups):
                limit = min(limit, group.reach(self.token_blocks.index, hit.blocks, hit.places[number], limit))
                limit -= limit % self.alignment
        return limit

    def fit(self, hit: Hit, num_tokens: i64, num_free: i64) -> None:
        """A state that does not fit beside the prompt is not loaded, and without it there is no hit."""
        if not hit.state:
            return
        most = i64(len(hit.state))
        for group in self.groups:
            most += group.num_places(num_tokens)
        if most > num_free and self.num_needed(hit, num_tokens) > num_free:
            hit.state = []
            hit.num_usable = 0

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """Free blocks that admitting a prompt with this hit asks for."""
        needed: i64 = 0 if self.states is None else self.states.num_idle(hit)
        for number, group in enumerate(self.groups):
            needed += group.num_needed(hit.places[number], hit.num_usable * self.block_size, num_tokens)
        return needed

    def num_needed_behind_others(self, hit: Hit, num_tokens: i64) -> i64:
        """Where others may evict a part of the hit, the rest of it is of no use, though others hold it."""
        if hit.state:
            # With all of its state, even if all others let go of it before.
            return max(self.num_least(num_tokens), self.num_needed(hit, num_tokens)) + i64(len(hit.state))
        for number, group in enumerate(self.groups):
            if group.num_idle(hit.places[number], hit.num_usable * self.block_size) > 0:
                return self.num_least(num_tokens)
        return self.num_needed(hit, num_tokens)

    def num_partial(self, num_tokens: i64) -> i64:
        """One in each group whose last block is not full."""
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

    def num_short(self, num_token_blocks: i64) -> i64:
        """Swapping merges equal blocks and not their token blocks, so token blocks can run out first."""
        return num_token_blocks - self.token_blocks.queue.num_free

    def taken_by(self, hit: Hit) -> list[int]:
        """What every group takes of it."""
        blocks: list[int] = []
        for number, group in enumerate(self.groups):
            num_tokens = hit.num_usable * self.block_size
            places = hit.places[number]
            blocks += [
                int(places[place]) for place in range(group.first_needed(num_tokens), group.num_full(num_tokens))
            ]
        return blocks + hit.state

    def content_ledgers(self) -> list[ContentLedger]:
        """The pool, and the CPU pool if there is one."""
        return [self.pool] if self.cpu is None else [self.pool, self.cpu]

    def hold_hits(self, row: i64, hit: Hit) -> None:
        """Hold them group after group."""
        self._slides_at[row] = 0
        for number, group in enumerate(self.groups):
            group.hold_hits(row, hit.places[number], hit.num_usable * self.block_size)
        if self.states is not None:
            self.states.hold(row, hit)

    def unhold_hits(self, row: i64) -> None:
        """The last group first."""
        if self.states is not None:
            self.states.unhold(row)
        for group in reversed(self.groups):
            group.unhold_hits(row)

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        """As many victims as all groups take together."""
        needed: i64 = 0
        for group in self.groups:
            needed += group.num_to_take(row, num_tokens)
        self.pool.evict_ahead(needed)

    def take_prompt(self, row: i64, num_tokens: i64) -> None:
        """New blocks for what has to be loaded and for the prompt."""
        for group in self.groups:
            group.take_prompt(row, num_tokens)

    def admitted(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """States are kept at some of its boundaries."""
        if self.states is not None:
            self.states.admit(row, prompt, hit)

    def blocks_of(self, token_block: i64) -> list[int]:
        """Return those that hold its content; none beside states, because inside a block there is no state."""
        blocks = self.cached_for(token_block) if self.states is None else []
        return blocks if len(blocks) == len(self.groups) else []

    def cached_for(self, token_block: i64) -> list[int]:
        """Return those that hold its content, and the state behind it."""
        content = self.token_blocks.index.content_of(token_block)
        blocks = [int(self.pool.find_content(content, group.number)) for group in self.groups]
        states = [] if self.states is None else self.states.parts_of(content)
        return [block for block in blocks if block != NULL_BLOCK] + states

    # The step.

    def require_swapped_in(self, rows: vec[i64], action: str) -> None:
        """By the rows' own mark."""
        if self.cpu is None:
            return
        for index in range(i64(len(rows))):
            if self.sequences.is_swapped[rows[index]] != 0:
                raise SequenceNotReady(f"{action}: {self.sequences.name(rows[index])} is swapped out; swap it in first")

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """What every group lacks."""
        published = self.sequences.num_published[row]
        missing: i64 = 0
        for group in self.groups:
            missing += group.num_missing(row, published, start, end)
        return missing

    def num_copies(self, row: i64, start: i64) -> i64:
        """At most one in every group."""
        copies: i64 = 0
        for group in self.groups:
            copies += 1 if group.copies(row, self.sequences.num_published[row], start) else 0
        return copies

    def grow_groups(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        """Loads of what was hit in the CPU pool, then copies on write and new blocks, group after group."""
        if self.num_missing(row, start, end) > self.pool.charge_row(row):
            return False
        published = self.sequences.num_published[row]
        for group in self.groups:
            if group.num_loads[row] > 0:
                group.load(row, self.token_blocks.index, self.sequences, transfers)
            if group.grow(row, published, start, end, transfers):
                self.num_copied_blocks += 1
        if self.states is not None:
            self.states.begin(row, start, end, transfers)
        return True

    def cut(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> None:
        """End it at the boundaries where states are kept."""
        if self.states is not None:
            self.states.cut(rows, first, counts)

    def note_ready(self, row: i64) -> None:
        """Let the row write as far as its token blocks reach, where those of all groups do and nothing is to load."""
        if self.states is not None and not self.states.is_begun(row):
            return
        ready = self.sequences.num_blocks[row] * self.block_size
        for group in self.groups:
            if group.num_loads[row] > 0 or group.num_blocks[row] * group.block_size < ready:
                return
        self.sequences.ready[row] = ready
        self.sequences.note_tail(row)
        self.groups[0].note_tail(row)

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        """Return the sum of what groups and states take."""
        most: i64 = 0 if self.states is None else self.states.num_parts * (num_tokens // self.alignment + num_rows)
        for group in self.groups:
            most += num_tokens // group.block_size + 2 * num_rows
        return most

    def num_to_save(self, row: i64, start: i64, end: i64) -> i64:
        """Return those that states take."""
        return 0 if self.states is None else self.states.num_blocks_to_save(row, start, end)

    def num_to_drop(self, row: i64) -> i64:
        """Return those of states."""
        return 0 if self.states is None else self.states.num_to_drop(row)

    def save(self, transfers: Transfers) -> None:
        """Take the blocks of states that the step passes."""
        if self.states is not None:
            self.states.save(transfers)

    def settle(self, rows: vec[i64]) -> None:
        """States that were saved are cached, or dropped."""
        if self.states is not None:
            self.states.settle_all(rows)

    def finish(self, transfers: Transfers) -> None:
        """The plan also tells of evicted blocks that are saved; the CPU blocks that it held are released."""
        if self.tier is not None:
            self.tier.tell(transfers)
        if self.cpu is not None:
            for place in range(transfers.held.count):
                self.cpu.release_one(i64(transfers.held.items[place]))
        if transfers.held_sources.count > 0:
            self.pool.release_in_order(transfers.held_sources.items, 0, transfers.held_sources.count)

    def publish(self, row: i64, first: i64, last: i64) -> None:
        """The blocks that these token blocks complete are cached as their content."""
        for group in self.groups:
            group.publish(row, self.token_blocks.index, self.sequences, first, last)

    def publish_last(self, rows: vec[i64], places: vec[i64], count: i64) -> None:
        """Group after group; where blocks that come are told of in their order, row after row."""
        if self.pool.index.log is None or len(self.groups) == 1:
            for group in self.groups:
                group.publish_last(rows, places, count, self.token_blocks.index, self.sequences)
            return
        for number in range(count):
            row = rows[places[number]]
            self.publish(row, self.sequences.num_published[row] - 1, self.sequences.num_published[row])

    def slide(self, rows: vec[i64]) -> None:
        """In the groups that have a window. O(batch), and what the rows take in which a block falls behind one."""
        if not self.has_windows:
            return
        num_computed = self.sequences.num_computed
        slides_at = self._slides_at
        for index in range(i64(len(rows))):
            row = rows[index]
            if num_computed[row] >= slides_at[row]:
                self._slide_row(row, num_computed[row])

    def _slide_row(self, row: i64, computed: i64) -> None:
        following = NEVER
        for group in self.groups:
            if group.window > 0:
                if self.states is not None:
                    last = min(group.first_needed(computed), group.num_blocks[row])
                    self.states.shelve(row, group, group.num_null[row], last)
                group.slide(row, computed)
                following = min(following, group.slides_at(row))
        self._slides_at[row] = following

    # Forks, cuts, the end.

    def fork(self, row: i64, child: i64) -> None:
        """Fork group after group."""
        self._slides_at[child] = 0
        for group in self.groups:
            group.fork(row, child, self.sequences.num_tokens[row])
        if self.states is not None:
            self.states.fork(row, child)

    def num_loads(self, row: i64) -> i64:
        """In all groups."""
        loads: i64 = 0
        for group in self.groups:
            loads += group.num_loads[row]
        return loads

    def shortest_cut(self, row: i64) -> i64:
        """No cut is behind the null blocks of a group, or before a state: it stands behind all that is computed."""
        shortest: i64 = 0 if self.states is None else self.states.shortest_cut(row)
        for group in self.groups:
            shortest = max(shortest, num_computed_past(group.num_null[row], group.window, group.block_size))
        return shortest

    def truncate(self, row: i64, num_tokens: i64) -> None:
        """Cut group after group."""
        for group in self.groups:
            group.truncate(row, num_tokens)

    def close(self, row: i64) -> None:
        """Group after group."""
        if self.states is not None:
            self.states.leave(row, self.groups)
        for group in self.groups:
            group.close(row)
        if self.states is not None:
            self.states.close(row)

    def forget_hit(self, row: i64) -> None:
        """Release all blocks of a row but its token blocks: it computes its prompt from the beginning."""
        for group in self.groups:
            group.close(row)
        self._slides_at[row] = 0

    def reset(self) -> None:
        """In the pool and on the CPU too."""
        self.token_blocks.reset()
        self.pool.reset()
        if self.cpu is not None:
            self.cpu.reset()

    # The size, and what others see.

    def make_room(self, num_blocks: int) -> LedgerRoom | None:
        """As many token blocks as a cache of that size is made with."""
        return self.token_blocks.make_room(num_token_blocks(replace(self.config, num_blocks=num_blocks)), num_blocks)

    def move_into(self, room: LedgerRoom | None) -> None:
        """Remember as many token blocks as there is room for."""
        if room is not None:
            self.token_blocks.resize(room.num_blocks, room)

    def check_slides(self, row: i64) -> None:
        """No block of a live row has fallen behind its window unnoticed. Raises `InvariantError`."""
        for group in self.groups:
            if group.window > 0 and self._slides_at[row] > group.slides_at(row):
                raise InvariantError(
                    f"I2: row {row} slides in group {group.number} at {group.slides_at(row)} computed tokens; it is "
                    f"looked at again at {self._slides_at[row]}"
                )

    def watch_misses(self, misses: MissLog) -> None:
        """What the pool evicts is missed too, though its token block stays."""
        self.token_blocks.watch(misses)
        self.pool.watch(StoredMisses(misses, self.pool))

    def describe(self, block: KVCacheBlock) -> None:
        """The group, and the tokens, which the token blocks know as long as they are there. O(token blocks)."""
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
        tokens: list[int] = []
        for _ in range(group.span):
            found = np.flatnonzero(contents == int(content))
            if len(found) == 0:
                tokens = []
                break
            token_block = i64(found[0])
            tokens = self._tokens_of(token_block) + tokens
            content = index.parent_of(token_block)
        block.token_ids = tokens
        block.num_tokens = int(group.block_size)
        block.group = int(group.number)

    def _tokens_of(self, token_block: i64) -> list[int]:
        size = int(self.block_size)
        tokens: list[int] = self.token_blocks.block_tokens(vec[i32]([i32(token_block)]), size).tolist()
        return tokens

    def pending_blocks(self, row: i64) -> list[int]:
        """Return those of states that are saved."""
        return [] if self.states is None else self.states.pending_blocks(row)

    def cpu_blocks_of(self, row: i64) -> list[int]:
        """In all groups: of a swapped-out sequence, and what the next step loads."""
        blocks: list[int] = []
        if self.cpu is not None:
            for group in self.groups:
                found = [int(group.cpu_block_at(row, place)) for place in range(group.num_blocks[row])]
                blocks += [block for block in found if block != NULL_BLOCK]
        return blocks
