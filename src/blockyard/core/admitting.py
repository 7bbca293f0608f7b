"""Admission: whether a prompt, a group of sequences or a batch of prompts fits, and taking them in."""

from typing import Final

from mypy_extensions import i64

from ..answers import Admission
from ..config import CacheConfig
from ..errors import NeverFits, OutOfBlocks
from .arrays import view_i64
from .block_ledger import BlockLedger
from .children import common_tokens
from .gate import Interruption
from .hit import Hit
from .hit_holder import HitHolder
from .joining import Joining
from .mapping import Mapping
from .misses import MissLog
from .prompt import Prompt
from .reserving import NO_TOKEN
from .sequences import SequenceTable

NEVER: Final = Admission.NEVER
LATER: Final = Admission.LATER
OK: Final = Admission.OK


class Admitting:
    """Looks a prompt up, counts what it takes, and gives it a row, all checks before the first change.

    pages: the pool whose blocks the prompt is made of; with a mapping, its pages have no keys and values and what
    counts is whether the mapping has blocks.
    """

    def __init__(
        self,
        config: CacheConfig,
        pages: BlockLedger,
        sequences: SequenceTable,
        joining: Joining,
        mapping: Mapping | None,
        interruption: Interruption,
    ) -> None:
        self.interruption = interruption
        self.pages = pages
        self.pool = pages if mapping is None else mapping.pool
        self.sequences = sequences
        self.joining = joining
        self.mapping = mapping
        self.block_size: i64 = config.hash_block_size
        self.max_model_len: i64 = config.max_model_len
        self.watermark: i64 = config.watermark_blocks
        self.num_prompt_tokens: i64 = 0
        self.num_hit_tokens: i64 = 0
        self.num_resumed_tokens: i64 = 0
        self.num_resumed_hit_tokens: i64 = 0
        self.misses: MissLog | None = None
        #: Lookups of prompts so far: one an admission, as a test asserts.
        self.num_lookups: i64 = 0

    # Questions.

    def look_up(self, prompt: Prompt) -> Hit:
        """The longest hit of a prompt; at least its last token is left to compute. O(blocks found)."""
        self.num_lookups += 1
        found = self.pages.find(prompt, (prompt.num_tokens - 1) // self.block_size)
        hit = Hit(self.pages.index.found[:found], found)
        if self.mapping is not None:
            self.mapping.limit(hit)
        else:
            self.joining.limit(hit, self.pages.ref_cnt)
        return hit

    def look_up_all(self, prompts: list[Prompt]) -> list[Hit]:
        """The same for each prompt of a batch."""
        return [self.look_up(prompt) for prompt in prompts]

    def answer(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> Admission:
        """Whether all of `prompts`, each for `num_seqs` sequences, would be admitted together."""
        rows = num_seqs * i64(len(prompts))
        for prompt in prompts:
            if prompt.num_tokens > self.max_model_len:
                return NEVER
        least = self._num_least(prompts, num_seqs)
        if rows > self.sequences.max_num_seqs or least > self._num_most():
            return NEVER
        if rows > self.sequences.num_open_rows() or self._num_missing(prompts, hits, num_seqs) > 0:
            return LATER if least <= self._num_lasting() else NEVER
        return OK

    def require(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> None:
        """Raise what `answer` would say: `NeverFits`, `OutOfRows` or `OutOfBlocks`."""
        rows = num_seqs * i64(len(prompts))
        for prompt in prompts:
            if prompt.num_tokens > self.max_model_len:
                raise NeverFits(f"token_ids has {prompt.num_tokens} tokens; max_model_len is {self.max_model_len}")
        least = self._num_least(prompts, num_seqs)
        self._require_most(least, self._num_most())
        if rows > self.sequences.max_num_seqs:
            raise NeverFits(f"{rows} sequences are asked for; max_num_seqs is {self.sequences.max_num_seqs}")
        missing = self._num_missing(prompts, hits, num_seqs)
        if missing > 0 or rows > self.sequences.num_open_rows():
            self._require_most(least, self._num_lasting())
        self.sequences.require_rows(rows)
        if missing > 0:
            free = self.pool.num_free_blocks
            needed = int(missing + free - self.watermark)
            raise OutOfBlocks(
                f"token_ids needs {needed} free blocks, idle ones that it hits included; {free} are free, "
                f"of which the watermark keeps {self.watermark}",
                needed,
                free,
            )

    def _num_least(self, prompts: list[Prompt], num_seqs: i64) -> i64:
        """Blocks that an empty cache would need to take all of `prompts` together: with fewer, waiting is in vain."""
        least: i64 = 0
        for prompt in prompts:
            least += self._num_copies(prompt, num_seqs)
            if self.mapping is None:
                least += self._num_blocks(prompt.num_tokens)
            else:
                least += self.mapping.num_least(prompt.num_tokens)
        if least > self._num_most() and len(prompts) > 1 and self.mapping is None and self.pages.enable_prefix_caching:
            return self._num_distinct(prompts, num_seqs)
        return least

    def _num_most(self) -> i64:
        return self.pool.num_usable_blocks - self.watermark

    def _num_lasting(self) -> i64:
        """What waiting can bring: blocks beyond the end of a shrinking pool will not be given out again."""
        return i64(self.pool.num_blocks) - 1 - self.watermark

    def _require_most(self, least: i64, most: i64) -> None:
        if least > most:
            raise NeverFits(
                f"token_ids needs {least} blocks; the pool has "
                f"{most + self.watermark}, of which the watermark keeps {self.watermark} free"
            )

    def _num_blocks(self, num_tokens: i64) -> i64:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _num_missing(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> i64:
        """Blocks by which the free ones, less the watermark, fall short of all prompts."""
        free = self.pool.queue.num_free - self.watermark
        needed: i64 = 0
        pages: i64 = 0
        for index, prompt in enumerate(prompts):
            needed += self._num_needed(prompt, hits[index], num_seqs, index > 0)
            pages += self._num_blocks(prompt.num_tokens)
        if needed > free and len(prompts) > 1 and self._share_at_once():
            needed = self._num_needed_together(prompts, hits, num_seqs)
        if self.mapping is not None:
            # Swapping merges equal blocks and not their pages, so pages can run out first.
            return max(needed - free, pages - self.pages.queue.num_free)
        return needed - free

    def _share_at_once(self) -> bool:
        """Whether prompts admitted one after another are sure to share what they begin with in common."""
        return self.mapping is None and self.pages.enable_prefix_caching and self.pages.index.num_pending == 0

    def _num_needed(self, prompt: Prompt, hit: Hit, num_seqs: i64, is_later: bool) -> i64:
        """Free blocks that a prompt takes: new ones, idle hits, and a copy on write for each further sequence.

        is_later: others of a batch come first. With layer groups they may evict a part of this prompt's hit, and then
        the rest of it is of no use, though others hold it.
        """
        needed = self._num_needed_after(prompt, hit)
        if is_later and self.mapping is not None and not self.mapping.is_lasting(hit):
            needed = self.mapping.num_least(prompt.num_tokens)
        return needed + self._num_copies(prompt, num_seqs)

    def _num_needed_after(self, prompt: Prompt, hit: Hit) -> i64:
        """Free blocks that a prompt with this hit takes."""
        if self.mapping is not None:
            return self.mapping.num_needed(hit, prompt.num_tokens)
        idle = self.pages.count_idle(hit.blocks, hit.num_usable)
        return self._num_blocks(prompt.num_tokens) - hit.num_usable + idle

    def _num_copies(self, prompt: Prompt, num_seqs: i64) -> i64:
        if self.mapping is not None:
            return (num_seqs - 1) * self.mapping.num_partial(prompt.num_tokens)
        return num_seqs - 1 if prompt.num_tokens % self.block_size != 0 else 0

    def _num_needed_together(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> i64:
        """The same for prompts that share their beginnings with one another: each distinct block is counted once."""
        blocks: set[int] = set()
        for hit in hits:
            blocks.update([int(hit.blocks[position]) for position in range(hit.num_usable)])
        # Every hit is a node of the trie; of these, only idle blocks leave the free ones.
        held = [block for block in blocks if self.pages.ref_cnt[i64(block)] > 0]
        return self._num_distinct(prompts, num_seqs) - len(held)

    def _num_distinct(self, prompts: list[Prompt], num_seqs: i64) -> i64:
        """Blocks of prompts admitted one after another, each shared one counted once."""
        trie: dict[object, int] = {}
        distinct: i64 = 0
        for prompt in prompts:
            shareable = (prompt.num_tokens - 1) // self.block_size
            distinct += self._num_blocks(prompt.num_tokens) - shareable + self._num_copies(prompt, num_seqs)
            distinct += self._add_to_trie(prompt, shareable, trie)
        return distinct

    def _add_to_trie(self, prompt: Prompt, last: i64, trie: dict[object, int]) -> i64:
        """Walk blocks 0 to `last` of a prompt down `trie`: (node, block) → node. Returns how many nodes are new."""
        words = self.pages.index.num_words
        rows = view_i64(prompt.words)
        node = trie.setdefault((prompt.keys, "root"), len(trie))
        new: i64 = 0
        for position in range(last):
            # Bytes, because Python hashes them with a secret; hashes of integers can be made to collide.
            row = rows[int(position * words) : int((position + 1) * words)].tobytes()
            step = (node, row, prompt.spans.get(int(position)))
            if step not in trie:
                trie[step] = len(trie)
                new += 1
            node = trie[step]
        return new

    # Taking in.

    def prepare(self, prompt: Prompt) -> None:
        """What needs memory comes before the first change."""
        self.pages.index.root(prompt.keys)
        self.pages.index.make_room(prompt.num_tokens // self.block_size + 1)

    def admit(self, prompt: Prompt, hit: Hit, holder: str, num_seqs: i64, resumed: bool, alone: bool) -> i64:
        """Give a prompt that fits its row and blocks. O(tokens).

        Raises `PolicyError`, or what interrupted a policy's callback, and takes nothing then.

        alone: whether no other prompt counts on the free blocks that this one leaves.
        """
        self._find_beginning(prompt, hit, alone)
        causes = self._explain(prompt, hit, resumed)
        row = self._open_row(prompt, holder, hit)
        try:
            self._fill_row(row, prompt, hit)
        except BaseException:
            self._undo(row, hit)
            raise
        self.sequences.promise(row, num_seqs - 1)
        self._publish(row, prompt, hit.num_usable)
        self._keep_causes(row, prompt, causes)
        return row

    def record(self, row: i64, prompt: Prompt, resumed: bool) -> None:
        """Count a prompt that was admitted, once nothing can fail any more."""
        self._count(prompt, self.sequences.num_computed[row], resumed)
        if self.sequences.causes[row] and self.misses is not None:
            self.misses.count(self.sequences.causes[row], resumed)

    def secure_batch(self, prompts: list[Prompt], hits: list[Hit]) -> None:
        """Let an eviction policy name the victims of a whole batch before the first change, because it might fail.

        What the prompts hit is held meanwhile. Raises `PolicyError`.
        """
        if self.pool.chooser is None or len(prompts) == 1:
            return
        holder = HitHolder(self.pool, self.mapping)
        needed: i64 = 0
        for index, prompt in enumerate(prompts):
            needed += self._num_needed_after(prompt, hits[index]) - holder.hold(hits[index])
        if self._share_at_once():
            needed = min(needed, self._num_distinct(prompts, 1) - holder.num_distinct())
        try:
            self.interruption.raise_now()
            self.pool.secure(min(needed, self.pool.queue.num_free))
        except BaseException:
            holder.undo()
            raise
        holder.let_go()
        self.interruption.raise_now()

    def _open_row(self, prompt: Prompt, holder: str, hit: Hit) -> i64:
        sequences = self.sequences
        sequences.version += 1
        row = sequences.open(holder)
        sequences.num_tokens[row] = prompt.num_tokens
        sequences.num_computed[row] = hit.num_usable * self.block_size
        sequences.num_published[row] = hit.num_usable
        sequences.pending_token[row] = NO_TOKEN
        sequences.generation[row] = self.pages.index.num_generations
        sequences.spans[row] = prompt.spans
        self.joining.join(row, hit)
        return row

    def _fill_row(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Hits first, so that no new block is taken from among them; then new blocks."""
        sequences = self.sequences
        hits = hit.blocks
        found = hit.num_usable
        first = row * sequences.width
        for position in range(found):
            sequences.blocks[first + position] = hits[position]
        sequences.num_blocks[row] = found
        self.pages.note_hits(hits, 0, found)
        self.pages.share(hits, 0, found)
        if hit.sources:
            self._hold_beginning(row, hit)
        if self.mapping is not None:
            self.mapping.hold_hits(row, hit)
        self.interruption.raise_now()
        if self.mapping is not None:
            self.mapping.secure(row, prompt.num_tokens)
        num_blocks = self._num_blocks(prompt.num_tokens)
        self.pages.secure(num_blocks - found)
        self.pages.acquire(sequences.blocks, first + found, num_blocks - found)
        sequences.num_blocks[row] = num_blocks
        if self.mapping is not None:
            self.mapping.take_prompt(row, prompt.num_tokens)

    def _undo(self, row: i64, hit: Hit) -> None:
        """The policy failed: nothing but hits was taken, and each is put back where it was, the last one first."""
        sequences = self.sequences
        self.joining.settle(row)
        if self.mapping is not None:
            self.mapping.unhold_hits(row)
        for block in reversed(sequences.copy_from[row]):
            self.pool.unshare_one(block)
        self.pages.unshare(sequences.blocks, row * sequences.width, hit.num_usable)
        sequences.close(row)

    def _publish(self, row: i64, prompt: Prompt, found: i64) -> None:
        """Index the full blocks of a prompt as owned by `row`, before they are computed (see `joining`).

        Pages are indexed when they are computed: there is nothing to join before the blocks below them are.
        """
        sequences = self.sequences
        start = row * sequences.width
        stored = found
        if self.pages.enable_prefix_caching:
            sequences.root[row] = self.pages.index.root(prompt.keys)
            if self.mapping is None:
                stored = max(found, prompt.num_tokens // self.block_size)
                self.pages.index_prompt(prompt, found, stored, sequences.blocks, start, row + 1)
                sequences.num_published[row] = stored
        self.pages.index.store_rows(prompt.words, stored, sequences.num_blocks[row], sequences.blocks, start)

    def _count(self, prompt: Prompt, num_hit: i64, resumed: bool) -> None:
        if resumed:
            self.num_resumed_tokens += prompt.num_tokens
            self.num_resumed_hit_tokens += num_hit
        else:
            self.num_prompt_tokens += prompt.num_tokens
            self.num_hit_tokens += num_hit

    # Hits that end inside a block.

    def _find_beginning(self, prompt: Prompt, hit: Hit, alone: bool) -> None:
        """Let a hit go on inside the next block, where a computed block begins alike, one for each layer group.

        The last token of the prompt is left to compute.
        """
        index = self.pages.index
        found = hit.num_usable
        children = index.children
        limit = min(self.block_size, prompt.num_tokens - 1 - found * self.block_size)
        if children is None or limit <= 0 or int(found) in prompt.spans:
            return
        if found > 0 and index.owner[i64(hit.blocks[found - 1])] != 0:
            return
        parent = index.content_of(i64(hit.blocks[found - 1])) if found > 0 else index.known_root(prompt.keys)
        position = found * index.num_words
        for candidate in children.candidates(parent, prompt.words[position]):
            block = i64(candidate)
            row = index.first_word + block * index.num_words
            alike = common_tokens(prompt.words, position, index.words, row, limit)
            if index.parent_of(block) == parent and index.owner[block] == 0 and alike > hit.num_alike:
                sources = self._blocks_of(block)
                if sources:
                    hit.sources = sources
                    hit.num_alike = alike
        if not self._can_hold(prompt, hit, alone):
            hit.sources = []
            hit.num_alike = 0

    def _blocks_of(self, page: i64) -> list[int]:
        """The blocks that hold a page's content, one for each layer group; none if one is missing."""
        if self.mapping is None:
            return [int(page)]
        return self.mapping.blocks_of(self.pages.index.content_of(page))

    def _can_hold(self, prompt: Prompt, hit: Hit, alone: bool) -> bool:
        """Whether idle sources can be held besides all that the prompt needs; a hit is no reason to refuse it."""
        idle = len([block for block in hit.sources if self.pool.ref_cnt[i64(block)] == 0])
        spare = self.pool.queue.num_free - self._num_needed_after(prompt, hit) if alone else i64(0)
        return idle == 0 or idle <= spare

    def _hold_beginning(self, row: i64, hit: Hit) -> None:
        for block in hit.sources:
            self.pool.share_one(block)
        self.sequences.copy_from[row] = hit.sources
        self.sequences.num_computed[row] += hit.num_alike
        self.sequences.raise_alert(row)

    # Causes of misses.

    def _explain(self, prompt: Prompt, hit: Hit, resumed: bool) -> list[int]:
        if self.misses is None or not self.pages.enable_prefix_caching:
            return []
        root = self.pages.index.root(prompt.keys)
        num_tokens = hit.num_usable * self.block_size + hit.num_alike
        known = hit.blocks[: hit.num_usable] if self.mapping is None else hit.blocks
        alignment = self.block_size if self.mapping is None else self.mapping.alignment
        hittable = (prompt.num_tokens - 1) // alignment * (alignment // self.block_size)
        return self.misses.explain(prompt, hittable, known, num_tokens, root, resumed)

    def _keep_causes(self, row: i64, prompt: Prompt, causes: list[int]) -> None:
        """The prompt is taken in, and its first block is known from here on."""
        self.sequences.causes[row] = causes
        if self.misses is not None and causes:
            root = self.pages.index.root(prompt.keys)
            self.misses.note_first(prompt.words, prompt.num_tokens, root, self.block_size)
