"""Hits that go on inside the next block: a computed block that begins alike is copied, and the rest computed."""

from mypy_extensions import i64

from ..index.continuations import common_tokens
from ..index.hit import Hit
from ..index.prompt import Prompt
from ..parts import Parts


class PartialHits:
    """Finds the source of such a copy, one block for each layer group, and holds it until the next step copies."""

    def __init__(self, parts: Parts) -> None:
        self.index = parts.token_blocks.index
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.store = parts.store
        self.block_size: i64 = parts.block_size

    def find(self, prompt: Prompt, hit: Hit, alone: bool) -> None:
        """Note in `hit` which blocks begin like the first block behind it, and for how many tokens.

        The last token of the prompt is left to compute. alone: whether no other prompt counts on the free blocks that
        this one leaves. O(candidates * tokens of a block), at most 32 candidates.
        """
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
        """Take `block` as the source if it begins with more of the prompt's tokens than the one found before."""
        index = self.index
        row = index.rows.start_of(block)
        alike = common_tokens(prompt.words, hit.num_usable * index.rows.num_words, index.rows.words, row, limit)
        if index.parent_of(block) == parent and index.owner[block] == 0 and alike > hit.num_alike:
            sources = self.store.blocks_of(block)
            if sources:
                hit.sources = sources
                hit.num_alike = alike

    def _can_hold(self, prompt: Prompt, hit: Hit, alone: bool) -> bool:
        """Whether idle sources can be held besides all that the prompt needs; a hit is no reason to refuse it."""
        idle = len([block for block in hit.sources if self.kv_pool.ref_cnt[i64(block)] == 0])
        spare = self.kv_pool.queue.num_free - self.store.num_needed(hit, prompt.num_tokens) if alone else i64(0)
        return idle == 0 or idle <= spare

    def hold(self, row: i64, hit: Hit) -> None:
        """Hold the sources for a sequence that was just opened, and count what they bring as computed."""
        if hit.sources:
            for block in hit.sources:
                self.kv_pool.share_one(block)
            self.sequences.copy_from[row] = hit.sources
            self.sequences.num_computed[row] += hit.num_alike
            self.sequences.raise_alert(row)
