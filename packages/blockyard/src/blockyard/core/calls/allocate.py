"""`allocate`: looks a prompt up, admits it, and gives it a request slot and blocks."""

from typing import Final

from mypy_extensions import i64

from ...answers import Admission
from ..index.prompt import Hit, Prompt
from ..parts import Parts
from ..sequences.table import NO_TOKEN, UNDONE
from .admission import LATER, OK, AdmissionControl
from .counting import PromptCounts
from .free import FreeCalls
from .hints import HintCalls
from .hits import HeldHits, PartialHits, WholeHits

#: What stands for an `Admission` where a handle is expected; handles are positive.
REFUSED_FOR_NOW: Final[i64] = 0
REFUSED_FOREVER: Final[i64] = -1


class AllocateCalls:
    """Admits prompts. Everything that can fail is done first: arguments, lookup, admission, memory, eviction policy."""

    def __init__(self, parts: Parts, free_calls: FreeCalls, hints: HintCalls, counts: PromptCounts) -> None:
        self.parts = parts
        self.counts = counts
        self.hints = hints
        self.interruption = parts.gate.interruption
        self.admission = AdmissionControl(parts)
        self.partial_hits = PartialHits(parts) if parts.config.partial_hits else WholeHits()
        self.free_calls = free_calls
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.joins = parts.joins
        self.store = parts.store
        self.states = parts.states
        self.misses = parts.misses
        self.block_size: i64 = parts.block_size

    # Questions.

    def can_allocate(self, prompt: Prompt, num_seqs: i64) -> Admission:
        """Return whether a prompt would be admitted for `num_seqs` sequences."""
        hit = self.admission.look_up_for(prompt, num_seqs)
        return self.admission.answer(self.admission.demand(prompt, hit, num_seqs))

    def can_allocate_batch(self, prompts: list[Prompt]) -> Admission:
        """Return whether these prompts would be admitted together."""
        if len(prompts) == 1:
            return self.can_allocate(prompts[0], 1)
        hits = self.admission.look_up_all(prompts)
        return self.admission.answer(self.admission.demand_together(prompts, hits))

    def num_cached_tokens(self, prompt: Prompt, num_seqs: i64) -> i64:
        """Return how many leading tokens of a prompt, allocated for `num_seqs` sequences, would hit."""
        hit = self.find_hit(prompt, num_seqs)
        return hit.num_usable * self.block_size + hit.num_alike

    def find_hit(self, prompt: Prompt, num_seqs: i64) -> Hit:
        """Return the hit of a prompt for `num_seqs` sequences, tokens inside a block included."""
        hit = self.admission.look_up_for(prompt, num_seqs)
        self.partial_hits.find(prompt, hit, True)
        return hit

    # Admission.

    def allocate(self, prompt: Prompt, name: str, count: i64, again: bool, key: str | None, raises: bool) -> i64:
        """Admit a prompt.

        Args:
            prompt: the prompt.
            name: its holder.
            count: sequences that it will be forked into.
            again: True if it ran before and was preempted.
            key: name of its session, or None.
            raises: True to raise an error if it does not fit.

        Returns:
            The handle of its sequence, or `REFUSED_FOR_NOW` or `REFUSED_FOREVER`.
        """
        hit = self.admission.look_up_for(prompt, count)
        demand = self.admission.demand(prompt, hit, count)
        if raises:
            self.admission.require(demand)
        else:
            answer = self.admission.answer(demand)
            if answer is not OK:
                return REFUSED_FOR_NOW if answer is LATER else REFUSED_FOREVER
            self.sequences.require_rows(count)
        if key is None:
            return self._admit(prompt, hit, name, count, again)
        is_known = self.hints.prepare(key)
        try:
            handle = self._admit(prompt, hit, name, count, again)
        except BaseException:
            self.hints.cancel(key)
            raise
        if is_known:
            self.hints.bind(self.sequences.live_row(handle), key)
        return handle

    def allocate_batch(self, prompts: list[Prompt], names: list[str]) -> list[int]:
        """Return the handles of the sequences of several prompts, all or none."""
        if len(prompts) == 1:
            return [int(self.allocate(prompts[0], names[0], 1, False, None, True))]
        hits = self.admission.look_up_all(prompts)
        self.admission.require(self.admission.demand_together(prompts, hits))
        return self._admit_batch(prompts, hits, names)

    def _admit(self, prompt: Prompt, hit: Hit, holder: str, num_seqs: i64, resumed: bool) -> i64:
        """Allocate a prompt that fits. Return the handle of its sequence."""
        self._prepare(prompt, hit)
        version, counters = self.sequences.version, self.kv_pool.counters()
        try:
            row = self._take_in(prompt, hit, holder, num_seqs, resumed, True)
        except BaseException:
            self.sequences.version = version
            self.kv_pool.restore_counters(counters)
            raise
        self.sequences.set_uncounted(row, -prompt.num_tokens if resumed else prompt.num_tokens)
        return self.sequences.handle[row]

    def _admit_batch(self, prompts: list[Prompt], hits: list[Hit], holders: list[str]) -> list[int]:
        """Allocate prompts that fit, all or none. Each is looked up again, because it may begin like an earlier one."""
        for index, prompt in enumerate(prompts):
            self._prepare(prompt, hits[index])
        handles = [0] * len(prompts)
        rows = [0] * len(prompts)
        num_admitted = 0
        version, counters = self.sequences.version, self.kv_pool.counters()
        try:
            self._evict_ahead(prompts, hits)
            for index, prompt in enumerate(prompts):
                hit = self.admission.look_up_again(prompt, hits[index])
                rows[index] = int(self._take_in(prompt, hit, holders[index], 1, False, False))
                num_admitted = index + 1
        except BaseException:
            for row in reversed(rows[:num_admitted]):
                self._expel(i64(row))
            self.sequences.version = version
            self.kv_pool.restore_counters(counters)
            raise
        for index, prompt in enumerate(prompts):
            self.sequences.set_uncounted(i64(rows[index]), prompt.num_tokens)
            handles[index] = int(self.sequences.handle[i64(rows[index])])
        return handles

    def _take_in(self, prompt: Prompt, hit: Hit, holder: str, num_seqs: i64, resumed: bool, alone: bool) -> i64:
        self.kv_pool.act("allocate", holder)
        row = self._admit_one(prompt, hit, holder, num_seqs, resumed, alone)
        try:
            if self.states is not None:
                self.states.admit(row, prompt, hit)
        except BaseException:
            self._expel(row)
            raise
        return row

    def _expel(self, row: i64) -> None:
        """End a sequence of a call that fails afterwards."""
        self.sequences.session[row] = UNDONE
        self.free_calls.end(row)

    def _prepare(self, prompt: Prompt, hit: Hit) -> None:
        """Allocate memory before the first change."""
        hit.root = self.token_blocks.index.ensure_root(prompt.keys, hit.root)
        self.token_blocks.index.make_room(prompt.num_tokens // self.block_size + 1)

    def _evict_ahead(self, prompts: list[Prompt], hits: list[Hit]) -> None:
        """Choose the blocks to evict for a whole batch before the first change, because an eviction policy may fail.

        The hits are held meanwhile, so that they are not chosen. Raises `PolicyError`.
        """
        if not self.kv_pool.stack.has_policy:
            return
        self.parts.budget.act_for(self.admission.tenant_of(prompts[0]))
        held = HeldHits(self.store)
        needed: i64 = 0
        for index, prompt in enumerate(prompts):
            needed += self.store.num_needed(hits[index], prompt.num_tokens) - held.hold(hits[index])
        if self.admission.share_surely():
            needed = min(needed, self.admission.num_distinct(prompts) - held.num_distinct())
        try:
            self.interruption.raise_now()
            self.kv_pool.evict_ahead(min(needed, self.kv_pool.queue.num_free))
        except BaseException:
            held.undo()
            raise
        held.release()
        self.interruption.raise_now()

    def _admit_one(self, prompt: Prompt, hit: Hit, holder: str, num_seqs: i64, resumed: bool, alone: bool) -> i64:
        """Give a prompt that fits its request slot and blocks. O(tokens).

        Raises `PolicyError`, or the interruption of a policy's callback; then nothing has changed.

        Args:
            prompt: the prompt.
            hit: its hit.
            holder: its holder.
            num_seqs: sequences that it will be forked into.
            resumed: True if it ran before and was preempted.
            alone: True if no other prompt of a batch needs the remaining free blocks.
        """
        self.partial_hits.find(prompt, hit, alone)
        causes = self._explain(prompt, hit, resumed)
        row = self._open_row(prompt, holder, hit)
        try:
            self._fill_row(row, prompt, hit)
        except BaseException:
            self._undo(row, hit)
            raise
        self.sequences.promise(row, num_seqs - 1)
        self._publish(row, prompt, hit)
        self._keep_causes(row, prompt, hit, causes)
        return row

    def _open_row(self, prompt: Prompt, holder: str, hit: Hit) -> i64:
        sequences = self.sequences
        sequences.version += 1
        row = sequences.open(holder)
        sequences.num_tokens[row] = prompt.num_tokens
        sequences.num_computed[row] = hit.num_usable * self.block_size
        sequences.num_published[row] = hit.num_usable
        sequences.pending_token[row] = NO_TOKEN
        sequences.generation[row] = self.token_blocks.index.num_generations
        sequences.spans[row] = prompt.spans
        self.parts.budget.assign_row(row, prompt.tenant)
        self.parts.budget.act_for(prompt.tenant)
        self.joins.join(row, hit)
        return row

    def _fill_row(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Hold the blocks of the hit and allocate the rest. The hit comes first, so that none of it is evicted."""
        sequences = self.sequences
        found = hit.num_usable
        first = row * sequences.width
        sequences.put_blocks(row, hit.blocks, found)
        self.token_blocks.note_hits(hit.blocks, 0, found)
        self.token_blocks.share(hit.blocks, 0, found)
        self.partial_hits.hold(row, hit)
        self.store.hold_hits(row, hit)
        self.interruption.raise_now()
        self.store.evict_ahead(row, prompt.num_tokens)
        num_blocks = self.store.num_token_blocks(prompt.num_tokens)
        self.token_blocks.acquire(sequences.blocks, first + found, num_blocks - found)
        sequences.num_blocks[row] = num_blocks
        self.store.take_prompt(row, prompt.num_tokens)

    def _undo(self, row: i64, hit: Hit) -> None:
        """Release the hit after the policy has failed. Each block returns to its old position in the queue."""
        sequences = self.sequences
        self.joins.settle(row)
        self.store.unhold_hits(row)
        for block in reversed(sequences.copy_from[row]):
            self.kv_pool.unshare_one(block)
        self.token_blocks.unshare(sequences.blocks, row * sequences.width, hit.num_usable)
        sequences.close(row)

    def _publish(self, row: i64, prompt: Prompt, hit: Hit) -> None:
        """Index the full blocks of a prompt before they are computed, for in-flight prefix sharing (`joins`).

        With layer groups, token blocks are indexed only when they are computed.
        """
        sequences = self.sequences
        start = row * sequences.width
        found = hit.num_usable
        stored = found
        if self.token_blocks.enable_prefix_caching:
            sequences.root[row] = hit.root
        if self.store.shares_at_once:
            stored = max(found, prompt.num_tokens // self.block_size)
            self.token_blocks.index_prompt(prompt, found, stored, sequences.blocks, start, row + 1, hit.root)
            sequences.num_published[row] = stored
        self.token_blocks.index.rows.store(prompt.words, stored, sequences.num_blocks[row], sequences.blocks, start)

    # Causes of misses.

    def _explain(self, prompt: Prompt, hit: Hit, resumed: bool) -> list[int]:
        num_tokens = hit.num_usable * self.block_size + hit.num_alike
        alignment = self.store.alignment
        hittable = (prompt.num_tokens - 1) // alignment * (alignment // self.block_size)
        return self.misses.explain(prompt, hit, hittable, num_tokens, resumed)

    def _keep_causes(self, row: i64, prompt: Prompt, hit: Hit, causes: list[int]) -> None:
        self.misses.store_causes(row, causes)
        try:
            self.misses.note_first(prompt.words, prompt.num_tokens, hit.root, self.block_size)
        except MemoryError:  # a later miss is explained worse
            return
