"""`can_allocate` and what `allocate` checks: whether prompts fit. Nothing here changes the cache."""

from typing import Final

from mypy_extensions import i64

from ...answers import Admission
from ...errors import NeverFits, OutOfBlocks
from ..arrays import view_i64
from ..index.prompt import Hit, Prompt
from ..parts import Parts

NEVER: Final = Admission.NEVER
LATER: Final = Admission.LATER
OK: Final = Admission.OK


class AdmissionControl:
    """Looks prompts up and compares the blocks and request slots that they need with the free ones."""

    def __init__(self, parts: Parts) -> None:
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.leases = parts.leases
        self.sequences = parts.sequences
        self.store = parts.store
        self.block_size: i64 = parts.block_size
        self.max_model_len: i64 = parts.config.max_model_len
        self.watermark: i64 = parts.config.watermark_blocks
        self.tenants = parts.tenants
        #: Lookups of prompts so far: one an admission, as a test asserts.
        self.num_lookups: i64 = 0

    def look_up(self, prompt: Prompt) -> Hit:
        """Return the longest hit of a prompt, never its last token. O(blocks found)."""
        self.num_lookups += 1
        index = self.token_blocks.index
        root = index.known_root(prompt.keys)
        found = index.find_under(root, prompt, (prompt.num_tokens - 1) // self.block_size)
        hit = Hit(root, found, prompt.external_state_tokens)
        self.store.limit(hit)
        self.store.fit(hit, prompt.num_tokens, self.kv_pool.room(self.slot_of(prompt), self.watermark))
        return hit

    def slot_of(self, prompt: Prompt) -> i64:
        """Return the number of a prompt's tenant; 0 if the pool has no tenants.

        The lookup is interpreted code, which Ctrl-C can interrupt. So the prompt keeps the result, and nothing is
        looked up during a change.
        """
        if self.tenants is None:
            return 0
        if prompt.tenant < 0:
            prompt.tenant = self.tenants.slot_of(prompt.keys)
        return prompt.tenant

    def look_up_all(self, prompts: list[Prompt], num_seqs: i64 = 1) -> list[Hit]:
        """Return the hits of all prompts of a batch, each for `num_seqs` sequences.

        If they do not all fit with the states that they hit, the last ones give up theirs.
        """
        hits = [self.look_up(prompt) for prompt in prompts]
        if self.store.has_states and i64(len(prompts)) * num_seqs > 1:
            num_missing = self._num_missing(prompts, hits, num_seqs)
            place = i64(len(prompts))
            while place > 0 and num_missing > 0:
                place -= 1
                needed = self._num_needed(prompts[place], hits[place], place > 0)
                self._give_up_state(prompts[place], hits[place])
                num_missing -= needed - self._num_needed(prompts[place], hits[place], place > 0)
        return hits

    def look_up_again(self, prompt: Prompt, first: Hit) -> Hit:
        """Look up a prompt of a batch after those before it were admitted.

        The hit has a state only if `first`, the hit with which the batch fits, has one.
        """
        hit = self.look_up(prompt)
        if self.store.has_states and not first.state:
            self._give_up_state(prompt, hit)
        return hit

    def _give_up_state(self, prompt: Prompt, hit: Hit) -> None:
        self.store.fit(hit, prompt.num_tokens, -1)

    def answer(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> Admission:
        """Return whether all of `prompts`, each for `num_seqs` sequences, can be admitted together."""
        rows = num_seqs * i64(len(prompts))
        for prompt in prompts:
            if prompt.num_tokens > self.max_model_len:
                return NEVER
        slot = self.slot_of(prompts[0])
        least = self._num_least(prompts, num_seqs)
        if rows > self.sequences.max_num_seqs or least > min(self._num_most(), self._num_share(slot)):
            return NEVER
        if rows > self.sequences.num_open_rows() or self._num_missing(prompts, hits, num_seqs) > 0:
            # What sequences and leases hold may be freed; blocks beyond the end of a shrinking pool do not come back.
            return LATER if least <= self._num_lasting() else NEVER
        return OK

    def require(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> None:
        """Raise `NeverFits`, `OutOfRows` or `OutOfBlocks` unless `answer` is OK."""
        rows = num_seqs * i64(len(prompts))
        for prompt in prompts:
            if prompt.num_tokens > self.max_model_len:
                raise NeverFits(f"token_ids has {prompt.num_tokens} tokens; max_model_len is {self.max_model_len}")
        slot = self.slot_of(prompts[0])
        least = self._num_least(prompts, num_seqs)
        self._require_most(least, self._num_most())
        self._require_share(least, slot)
        if rows > self.sequences.max_num_seqs:
            raise NeverFits(f"{rows} sequences are asked for; max_num_seqs is {self.sequences.max_num_seqs}")
        missing = self._num_missing(prompts, hits, num_seqs)
        if missing > 0 or rows > self.sequences.num_open_rows():
            self._require_most(least, self._num_lasting())
        self.sequences.require_rows(rows)
        if missing > 0:
            free = self.kv_pool.num_free_blocks
            if self.tenants is not None:
                self._refuse_share(slot, missing)
            needed = int(missing + free - self.watermark)
            leased = self._num_leased()
            held = f"; leases hold {leased} blocks" if leased > 0 else ""
            raise OutOfBlocks(
                f"token_ids needs {needed} free blocks, idle ones that it hits included; {free} are free, "
                f"of which the watermark keeps {self.watermark}{held}",
                needed,
                free,
            )

    def _num_least(self, prompts: list[Prompt], num_seqs: i64) -> i64:
        """Return the blocks that all of `prompts` need in an empty cache. With fewer, waiting cannot help."""
        least: i64 = 0
        for prompt in prompts:
            least += self.store.num_least(prompt.num_tokens) + self._num_copies(prompt, num_seqs)
        if least > self._num_most() and len(prompts) > 1 and self.store.shares_at_once:
            return self.num_distinct(prompts, num_seqs)
        return least

    def _num_most(self) -> i64:
        return self.kv_pool.num_usable_blocks - self.watermark

    def _num_lasting(self) -> i64:
        """Return the blocks of the pool that remain when a shrinking pool has reached its new size."""
        return i64(self.kv_pool.num_blocks) - 1 - self.watermark

    def _num_share(self, slot: i64) -> i64:
        """Return the most blocks that a tenant can hold in an empty pool."""
        if self.tenants is None:
            return self._num_most()
        return self.tenants.most(slot, i64(self.kv_pool.num_blocks) - 1, self.watermark)

    def _require_share(self, least: i64, slot: i64) -> None:
        most = self._num_share(slot)
        if self.tenants is not None and least > most:
            raise NeverFits(
                f"token_ids needs {least} blocks; the share of tenant {self.tenants.names[int(slot)]!r} is at most "
                f"{most}"
            )

    def _refuse_share(self, slot: i64, missing: i64) -> None:
        """Raise `OutOfBlocks` if the tenant's limit, not the pool, is what is too small."""
        free = self.kv_pool.queue.num_free
        room = self.kv_pool.room(slot, self.watermark)
        if self.tenants is not None and room < free - self.watermark:
            needed = int(missing + room)
            raise OutOfBlocks(
                f"token_ids needs {needed} free blocks, idle ones that it hits included; "
                f"{self.tenants.limits(slot, free)}, and {self.watermark} for the watermark",
                needed,
                max(int(room), 0),
            )

    def _num_leased(self) -> i64:
        """Return how many blocks leases hold. O(leased blocks)."""
        leased: set[int] = set()
        for lease in self.leases.leases():
            leased.update(lease.held_ids())
        return len(leased)

    def _require_most(self, least: i64, most: i64) -> None:
        if least > most:
            raise NeverFits(
                f"token_ids needs {least} blocks; the pool has "
                f"{most + self.watermark}, of which the watermark keeps {self.watermark} free"
            )

    def _num_missing(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> i64:
        """Return how many free blocks above the watermark are missing for all prompts; at most 0 if they fit."""
        free = self.kv_pool.room(self.slot_of(prompts[0]), self.watermark)
        needed: i64 = 0
        token_blocks: i64 = 0
        for index, prompt in enumerate(prompts):
            needed += self._num_needed(prompt, hits[index], index > 0) + self._num_copies(prompt, num_seqs)
            token_blocks += self.store.num_token_blocks(prompt.num_tokens)
        if needed > free and len(prompts) > 1 and self.share_surely():
            needed = self._num_needed_together(prompts, hits, num_seqs)
        if not self.store.groups:
            return max(needed - free, 0)
        # Swapping merges equal blocks and not their token blocks, so token blocks can run out first.
        return max(needed - free, token_blocks - self.token_blocks.queue.num_free)

    def share_surely(self) -> bool:
        """Return whether prompts that are admitted one after another always share a common beginning."""
        return self.store.shares_at_once and self.token_blocks.index.num_pending == 0

    def _num_needed(self, prompt: Prompt, hit: Hit, is_later: bool) -> i64:
        if is_later:
            return self.store.num_needed_behind_others(hit, prompt.num_tokens)
        return self.store.num_needed(hit, prompt.num_tokens)

    def _num_copies(self, prompt: Prompt, num_seqs: i64) -> i64:
        """Return the blocks that forks copy: a partly filled one for each sequence but the first."""
        return (num_seqs - 1) * self.store.num_partial(prompt.num_tokens) if num_seqs > 1 else i64(0)

    def _num_needed_together(self, prompts: list[Prompt], hits: list[Hit], num_seqs: i64) -> i64:
        """Return the blocks that prompts need if common beginnings are counted once."""
        blocks: set[int] = set()
        for hit in hits:
            blocks.update(self.store.taken_by(hit))
        # Every hit is a node of the trie; of these, only idle blocks leave the free ones.
        held = [block for block in blocks if self.kv_pool.ref_cnt[i64(block)] > 0]
        return self.num_distinct(prompts, num_seqs) - len(held)

    def num_distinct(self, prompts: list[Prompt], num_seqs: i64) -> i64:
        """Return the blocks of all prompts, each shared one counted once."""
        trie: dict[object, int] = {}
        distinct: i64 = 0
        for prompt in prompts:
            shareable = (prompt.num_tokens - 1) // self.block_size
            distinct += self.store.num_token_blocks(prompt.num_tokens) - shareable
            distinct += self._num_copies(prompt, num_seqs) + self._add_to_trie(prompt, shareable, trie)
        return distinct

    def _add_to_trie(self, prompt: Prompt, last: i64, trie: dict[object, int]) -> i64:
        """Insert the first `last` blocks of a prompt into `trie`, (node, block) → node. Return the new nodes."""
        words = self.token_blocks.index.rows.num_words
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
