"""Holds the blocks that lookups find: for hits that end inside a block, and while a policy chooses evictions."""

from mypy_extensions import i64

from ..index.continuations import common_tokens
from ..index.prompt import Hit, Prompt
from ..parts import Parts
from ..store.base import Store


class WholeHits:
    """Hits of whole blocks only. Also the interface of `PartialHits`."""

    def find(self, prompt: Prompt, hit: Hit, alone: bool) -> None:
        """Set `hit.sources` to blocks that begin like the block after the hit, one for each layer group.

        The last token of the prompt is never hit. O(candidates * tokens of a block), at most 32 candidates.

        Args:
            prompt: the prompt.
            hit: its hit.
            alone: True if no other prompt of a batch needs the remaining free blocks.
        """

    def hold(self, row: i64, hit: Hit) -> None:
        """Hold the sources for a new sequence, and count the tokens to copy as computed."""


class PartialHits(WholeHits):
    """Hits that end inside a block. Its first tokens are copied from a block that begins with the same tokens.

    A source, one block for each layer group, is held until the next step copies it.
    """

    def __init__(self, parts: Parts) -> None:
        self.index = parts.token_blocks.index
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.store = parts.store
        self.block_size: i64 = parts.block_size

    def find(self, prompt: Prompt, hit: Hit, alone: bool) -> None:
        continuations = self.index.continuations
        found = hit.num_usable
        limit = min(self.block_size, prompt.num_tokens - 1 - found * self.block_size)
        if continuations is None or limit <= 0 or int(found) in prompt.spans:
            return
        if found > 0 and self.index.owner[i64(hit.blocks[found - 1])] != 0:
            return
        parent = self.index.content_of(i64(hit.blocks[found - 1])) if found > 0 else hit.root
        position = found * self.index.rows.num_words
        for candidate in continuations.candidates(parent, prompt.words[position]):
            self._compare(prompt, hit, parent, candidate, limit)
        if not self._can_hold(prompt, hit, alone):
            hit.sources = []
            hit.num_alike = 0

    def _compare(self, prompt: Prompt, hit: Hit, parent: i64, block: i64, limit: i64) -> None:
        """Use `block` as the source if it shares more tokens with the prompt than the best candidate so far."""
        index = self.index
        row = index.rows.start_of(block)
        alike = common_tokens(prompt.words, hit.num_usable * index.rows.num_words, index.rows.words, row, limit)
        if index.parent_of(block) == parent and index.owner[block] == 0 and alike > hit.num_alike:
            sources = self.store.blocks_of(block)
            if sources:
                hit.sources = sources
                hit.num_alike = alike

    def _can_hold(self, prompt: Prompt, hit: Hit, alone: bool) -> bool:
        """Return whether idle sources fit besides all that the prompt needs. They never cause a refusal."""
        idle = len([block for block in hit.sources if self.kv_pool.ref_cnt[i64(block)] == 0])
        if idle == 0 or not alone:
            return idle == 0
        return idle <= self.kv_pool.room(prompt.tenant) - self.store.num_needed(hit, prompt.num_tokens)

    def hold(self, row: i64, hit: Hit) -> None:
        if hit.sources:
            for block in hit.sources:
                self.kv_pool.share_one(block)
            self.sequences.copy_from[row] = hit.sources
            self.sequences.num_computed[row] += hit.num_alike
            self.sequences.raise_alert(row)


class HeldHits:
    """Blocks of hits that are held until `release` frees them or `undo` restores the queue."""

    def __init__(self, store: Store) -> None:
        self.pool = store.kv_pool
        self.cpu_pool = store.cpu_pool
        self.store = store
        #: Of the held blocks, those that were idle: they are not counted as allocated and freed.
        self.num_revived: i64 = 0
        self.num_revived_on_cpu: i64 = 0
        self._held: list[int] = []
        self._held_on_cpu: list[int] = []

    def hold(self, hit: Hit) -> i64:
        """Hold the usable blocks of a hit. Return how many of them were idle."""
        idle: i64 = 0
        for block in self.store.taken_by(hit):
            if block > 0:
                if self.pool.ref_cnt[i64(block)] == 0:
                    idle += 1
                    self.num_revived += 1
                self.pool.share_one(block)
                self._held.append(block)
            elif self.cpu_pool is not None:
                if self.cpu_pool.ref_cnt[i64(-block)] == 0:
                    self.num_revived_on_cpu += 1
                self.cpu_pool.share_one(-block)
                self._held_on_cpu.append(-block)
        return idle

    def num_distinct(self) -> int:
        """Return how many different blocks of the pool are held."""
        return len(set(self._held))

    def release(self) -> None:
        """Free all blocks, the last one first, and restore the counters."""
        for block in reversed(self._held):
            self.pool.release_one(block)
        if self.cpu_pool is not None:
            for block in reversed(self._held_on_cpu):
                self.cpu_pool.release_one(block)
            self.cpu_pool.num_allocated_blocks -= self.num_revived_on_cpu
            self.cpu_pool.num_freed_blocks -= self.num_revived_on_cpu
        self.pool.num_allocated_blocks -= self.num_revived
        self.pool.num_freed_blocks -= self.num_revived

    def undo(self) -> None:
        """Return every block to its old position in the queue. No other block may have been taken since."""
        for block in reversed(self._held):
            self.pool.unshare_one(block)
        if self.cpu_pool is not None:
            for block in reversed(self._held_on_cpu):
                self.cpu_pool.unshare_one(block)
