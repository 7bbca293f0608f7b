"""Admission: whether a prompt, for one or more sequences, or a batch of prompts fits."""

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


class Demand:
    """The rows and blocks that a prompt, or a batch of prompts, needs.

    Attributes:
        tenant: the tenant that the blocks are charged to.
        num_seqs: rows.
        longest: tokens of the longest prompt.
        least: blocks needed in an empty cache; if the pool has fewer, waiting is useless.
        missing: blocks needed beyond the free ones and the watermark; 0 or less if they suffice.
    """

    def __init__(self, tenant: i64, num_seqs: i64, longest: i64, least: i64, missing: i64) -> None:
        self.tenant = tenant
        self.num_seqs = num_seqs
        self.longest = longest
        self.least = least
        self.missing = missing


class AdmissionControl:
    """Looks prompts up, and compares their demand with the free blocks and rows. It never changes the cache."""

    def __init__(self, parts: Parts) -> None:
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.leases = parts.leases
        self.sequences = parts.sequences
        self.store = parts.store
        self.block_size: i64 = parts.block_size
        self.max_model_len: i64 = parts.config.max_model_len
        self.watermark: i64 = parts.config.watermark_blocks
        self.budget = parts.budget
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
        self.store.fit(hit, prompt.num_tokens, self.kv_pool.room(self.tenant_of(prompt), self.watermark))
        return hit

    def tenant_of(self, prompt: Prompt) -> i64:
        """Return the number of a prompt's tenant, stored in the prompt because Ctrl-C may interrupt the lookup."""
        if prompt.tenant < 0:
            prompt.tenant = self.budget.tenant_of(prompt.keys)
        return prompt.tenant

    def look_up_for(self, prompt: Prompt, num_seqs: i64) -> Hit:
        """Return the hit of a prompt for `num_seqs` sequences; without its state if they do not fit otherwise."""
        hit = self.look_up(prompt)
        if self.store.has_states and num_seqs > 1 and self.demand(prompt, hit, num_seqs).missing > 0:
            self._give_up_state(prompt, hit)
        return hit

    def look_up_all(self, prompts: list[Prompt]) -> list[Hit]:
        """Return the hit of each prompt of a batch.

        If they do not fit together, the last ones are hits without a state.
        """
        hits = [self.look_up(prompt) for prompt in prompts]
        if self.store.has_states:
            missing = self.demand_together(prompts, hits).missing
            place = i64(len(prompts))
            while place > 0 and missing > 0:
                place -= 1
                needed = self._num_needed(prompts[place], hits[place], place > 0)
                self._give_up_state(prompts[place], hits[place])
                missing -= needed - self._num_needed(prompts[place], hits[place], place > 0)
        return hits

    def look_up_again(self, prompt: Prompt, first: Hit) -> Hit:
        """Return the present hit of a prompt of a batch, without a state if its hit `first` had none.

        `first` are the hits with which the whole batch fits.
        """
        hit = self.look_up(prompt)
        if self.store.has_states and not first.state:
            self._give_up_state(prompt, hit)
        return hit

    def _give_up_state(self, prompt: Prompt, hit: Hit) -> None:
        self.store.fit(hit, prompt.num_tokens, -1)

    def demand(self, prompt: Prompt, hit: Hit, num_seqs: i64) -> Demand:
        """Return the demand of a prompt for `num_seqs` sequences."""
        num_tokens = prompt.num_tokens
        # Copies on write: one of each partly filled block for each further sequence.
        copies = (num_seqs - 1) * self.store.num_partial(num_tokens) if num_seqs > 1 else i64(0)
        tenant = self.tenant_of(prompt)
        missing = self.store.num_needed(hit, num_tokens) + copies - self.kv_pool.room(tenant, self.watermark)
        missing = max(missing, self._num_token_blocks_missing(self.store.num_token_blocks(num_tokens)))
        return Demand(tenant, num_seqs, num_tokens, self.store.num_least(num_tokens) + copies, missing)

    def demand_together(self, prompts: list[Prompt], hits: list[Hit]) -> Demand:
        """Return the joint demand of a batch of prompts."""
        tenant = self.tenant_of(prompts[0])
        room = self.kv_pool.room(tenant, self.watermark)
        longest: i64 = 0
        least: i64 = 0
        needed: i64 = 0
        token_blocks: i64 = 0
        for index, prompt in enumerate(prompts):
            longest = max(longest, prompt.num_tokens)
            least += self.store.num_least(prompt.num_tokens)
            needed += self._num_needed(prompt, hits[index], index > 0)
            token_blocks += self.store.num_token_blocks(prompt.num_tokens)
        if least > self._num_most() and self.store.shares_at_once:
            least = self.num_distinct(prompts)
        if needed > room and self.share_surely():
            needed = self._num_needed_together(prompts, hits)
        missing = max(needed - room, self._num_token_blocks_missing(token_blocks))
        return Demand(tenant, i64(len(prompts)), longest, least, missing)

    def _num_token_blocks_missing(self, needed: i64) -> i64:
        """Return how many token blocks are missing besides blocks of the pool; 0 without layer groups.

        Swapping merges equal blocks but not their token blocks, so token blocks can run out first.
        """
        return needed - self.token_blocks.queue.num_free if self.store.groups else i64(0)

    def answer(self, demand: Demand) -> Admission:
        """Return whether this demand would be admitted."""
        if demand.longest > self.max_model_len or demand.num_seqs > self.sequences.max_num_seqs:
            return NEVER
        if demand.least > min(self._num_most(), self._num_share(demand.tenant)):
            return NEVER
        if demand.num_seqs > self.sequences.num_open_rows() or demand.missing > 0:
            # What sequences and leases hold may be freed; blocks beyond the end of a shrinking pool do not come back.
            return LATER if demand.least <= self._num_lasting() else NEVER
        return OK

    def require(self, demand: Demand) -> None:
        """Raise `NeverFits`, `OutOfRows` or `OutOfBlocks` unless `answer` would return OK."""
        if demand.longest > self.max_model_len:
            raise NeverFits(f"token_ids has {demand.longest} tokens; max_model_len is {self.max_model_len}")
        self._require_most(demand.least, self._num_most())
        self._require_share(demand.least, demand.tenant)
        if demand.num_seqs > self.sequences.max_num_seqs:
            raise NeverFits(f"{demand.num_seqs} sequences are requested; max_num_seqs is {self.sequences.max_num_seqs}")
        if demand.missing > 0 or demand.num_seqs > self.sequences.num_open_rows():
            self._require_most(demand.least, self._num_lasting())
        self.sequences.require_rows(demand.num_seqs)
        if demand.missing > 0:
            free = self.kv_pool.num_free_blocks
            self._require_room(demand.tenant, demand.missing)
            needed = int(demand.missing + free - self.watermark)
            leased = self._num_leased()
            held = f"; leases hold {leased} blocks" if leased > 0 else ""
            raise OutOfBlocks(
                f"token_ids needs {needed} free blocks, idle ones that it hits included; {free} are free, "
                f"of which the watermark keeps {self.watermark}{held}",
                needed,
                free,
            )

    def _num_most(self) -> i64:
        return self.kv_pool.num_usable_blocks - self.watermark

    def _num_lasting(self) -> i64:
        """Return the number of usable blocks above the watermark once a shrinking pool has reached its new size."""
        return i64(self.kv_pool.num_blocks) - 1 - self.watermark

    def _num_share(self, tenant: i64) -> i64:
        """Return how many blocks a tenant can hold if all other blocks are free."""
        return self.budget.max_blocks(tenant, i64(self.kv_pool.num_blocks) - 1, self.watermark)

    def _require_share(self, least: i64, tenant: i64) -> None:
        most = self._num_share(tenant)
        if least > most:
            raise NeverFits(
                f"token_ids needs {least} blocks; tenant {self.budget.names[int(tenant)]!r} may hold at most {most}"
            )

    def _require_room(self, tenant: i64, missing: i64) -> None:
        """Raise `OutOfBlocks` if the tenant may take fewer blocks than are free beyond the watermark."""
        free = self.kv_pool.queue.num_free
        room = self.kv_pool.room(tenant, self.watermark)
        if room < free - self.watermark:
            needed = int(missing + room)
            raise OutOfBlocks(
                f"token_ids needs {needed} free blocks, idle ones that it hits included; "
                f"{self.budget.limits(tenant, free)}, and {self.watermark} for the watermark",
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

    def share_surely(self) -> bool:
        """Return whether prompts that are admitted one after another always share their common beginning."""
        return self.store.shares_at_once and self.token_blocks.index.num_pending == 0

    def _num_needed(self, prompt: Prompt, hit: Hit, is_later: bool) -> i64:
        if is_later:
            return self.store.num_needed_behind_others(hit, prompt.num_tokens)
        return self.store.num_needed(hit, prompt.num_tokens)

    def _num_needed_together(self, prompts: list[Prompt], hits: list[Hit]) -> i64:
        """Return the distinct blocks that a batch needs if its prompts share their beginnings."""
        blocks: set[int] = set()
        for hit in hits:
            blocks.update(self.store.taken_by(hit))
        # Every hit is a node of the trie; of these, only idle blocks leave the free ones.
        held = [block for block in blocks if self.kv_pool.ref_cnt[i64(block)] > 0]
        return self.num_distinct(prompts) - len(held)

    def num_distinct(self, prompts: list[Prompt]) -> i64:
        """Return the distinct blocks of prompts that are admitted one after another."""
        trie: dict[object, int] = {}
        distinct: i64 = 0
        for prompt in prompts:
            shareable = (prompt.num_tokens - 1) // self.block_size
            distinct += self.store.num_token_blocks(prompt.num_tokens) - shareable
            distinct += self._add_to_trie(prompt, shareable, trie)
        return distinct

    def _add_to_trie(self, prompt: Prompt, last: i64, trie: dict[object, int]) -> i64:
        """Insert the first `last` blocks of a prompt into `trie`, a map from (node, block) to node.

        Return the new nodes.
        """
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
