"""Who computes which tokens in the next step: budget, admission, preemption. No tensor comes near it."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager, StateHints, StepPlan
from blockyard.answers import Admission, SeqStatus
from blockyard.keys import plain_keys

from ..moves import MoveQueue
from ..options import Preemption
from ..request import Branch, Request
from .limits import CacheLimits
from .preemption import Preemptor
from .prefixes import CpuHits, PrefixesInProgress
from .step import ScheduledStep, StepRow
from .turns import Line, Turns

if TYPE_CHECKING:
    from blockyard_tiers import Offload

#: Waiting branches that tiers are asked about ahead of their turn.
_MOST_PREFETCHED = 64
#: Steps of waiting that one level of priority is worth.
STEPS_PER_PRIORITY = 256
#: Waiting prompts that an admitted one is compared with.
_MOST_PROMPTS = 16


class Scheduler:
    """By priority, then first come, first served, with continuous batching (Orca: Yu et al., OSDI 2022).

    A step computes at most `max_num_batched_tokens` tokens. Sequences that decode come first, a token each; what is
    left of the budget goes to prompts in order, cut into chunks where it ends (chunked prefill: Agrawal et al., OSDI
    2024), then to new requests, as the cache admits them, and what is left to drafts. A sequence whose
    prefix another one is still computing skips the step, or is not admitted yet (`prefixes`).

    When a running sequence gets no block, drafts are dropped first; then one that goes after it is preempted
    (`preemption`) and waits in its old place.

    With tiers, a prompt whose blocks are on their way from one is passed by others until they are there, or would have
    been computed.

    Where tenants share the pool, that order is one tenant's: the next to start is of the tenant furthest below its
    share (`turns`), and who makes room for another's is of the one furthest above, which keeps its floor. A tenant's
    request within its floor starts at once: where all rows are taken, one of those who are above theirs gives its own.

    Nothing starves, of one tenant. `CacheLimits` refuses what would not fit an empty cache; none is admitted past the
    one that is next, unless that one waits for a prefix that a running one computes or a tier brings; and none is
    preempted for one that goes after it. A priority counts as `STEPS_PER_PRIORITY` steps of waiting for each level, so
    that a stream of urgent requests holds a patient one up for so long and no longer. The order of two requests never
    changes.
    """

    def __init__(
        self, cache: KVCacheManager, max_num_batched_tokens: int, preemption: Preemption = Preemption.RECOMPUTE
    ) -> None:
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        self.num_preemptions = 0
        self.moves = MoveQueue()
        self.offload: Offload | None = None
        #: Branches that the last step left waiting for a tier.
        self.num_loading = 0
        self.cpu_hits = CpuHits(cache)
        self.limits = CacheLimits(cache.config, max_num_batched_tokens)
        self._cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self._preemptor = Preemptor(cache, preemption, self.moves)
        self._turns = Turns(cache, self.limits) if cache.config.tenants else None
        self._num_steps = 0
        self._deferred: set[int] = set()
        self._filling: Branch | None = None

    def use(self, offload: Offload | None) -> None:
        """Give it the tiers, which store what is computed and bring what requests begin with; None for none."""
        self.offload = self._preemptor.offload = offload

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `NeverFits` at once if it could never be carried to its end."""
        name, num_tokens = f"request {request.request_id}", len(request.prompt_token_ids)
        request.tenant = self.limits.roster.number_of(plain_keys(request.extra_keys))
        self.limits.require_fits(name, num_tokens, request.sampling.max_tokens, request.sampling.n, request.tenant)
        request.due = self._num_steps + request.priority * STEPS_PER_PRIORITY
        self._queue(request.branches[0])

    def adopt(self, request: Request, seq: int) -> None:
        """Run a request whose prompt was computed elsewhere and whose first token is chosen; seq: its sequence."""
        request.due = self._num_steps + request.priority * STEPS_PER_PRIORITY
        request.tenant = self.limits.roster.number_of(plain_keys(request.extra_keys))
        request.branches[0].seq = seq
        bisect.insort(self.running, request.branches[0], key=_rank)

    def requests(self) -> dict[int, Request]:
        """Returns all waiting and running requests by their ids."""
        return {branch.request.request_id: branch.request for branch in self._all()}

    def running_ids(self) -> set[int]:
        """Return the requests of which something runs."""
        return {branch.request.request_id for branch in self.running}

    def deferred_ids(self) -> set[int]:
        """The requests that the last step left waiting for a prefix in progress, and that still wait. O(branches)."""
        return self._deferred & {branch.request.request_id for branch in self.waiting} - self.running_ids()

    def abort(self, request_id: int) -> Request | None:
        """Drop a request, wherever its branches are; None if there is no such request. O(branches and blocks)."""
        dropped = [branch for branch in self._all() if branch.request.request_id == request_id]
        self.retire(dropped)
        return dropped[0].request if dropped else None

    def abort_all(self) -> None:
        """Drop every request. What a broken step had reserved is freed, and none of it can be hit."""
        self.retire(list(self._all()))

    def retire(self, branches: list[Branch]) -> None:
        """End branches and free their blocks; what is cached stays so until it is evicted."""
        for branch in branches:
            self._preemptor.forget(branch)
            (self.running if branch in self.running else self.waiting).remove(branch)

    def preempt_running(self) -> None:
        """Free the blocks of all that runs and queue it again, with its tokens. It does not count as preemption."""
        for branch in list(self.running):
            self._preemptor.forget(branch)
            self._queue(branch)
        self.running.clear()

    def forget_swapped(self) -> None:
        """Free what waits in the CPU pool, and what tiers load for others: all that waits is computed again."""
        for branch in self.waiting:
            self._preemptor.forget(branch)

    # The step.

    def schedule(self, only: Collection[int] | None = None) -> ScheduledStep:
        """Decide the next step and reserve its slots. No row in it means that nothing is left to do.

        only: the ids of the requests that may take part; all if None.
        """
        step = ScheduledStep()
        self._num_steps += 1
        self._deferred.clear()
        self.num_loading = 0
        if self.offload is not None:
            self.offload.poll()
        self._reserve(step, only)
        # Who was preempted a moment ago would come straight back and take the blocks that were made free; others may
        # start within a floor.
        if (not step.preempted or self._turns is not None) and self._admit(step, only):
            self._reserve(step, only)
        return step

    def commit(self, step: ScheduledStep, new_tokens: list[list[int]]) -> None:
        """The step is computed: new_tokens has what follows each row, the accepted draft first.

        The last token of a list is known and not computed. An empty list: nothing follows, or a branch that ended.
        """
        counts = [row.count + max(len(new) - 1, 0) for row, new in zip(step.rows, new_tokens, strict=True)]
        if self.offload is not None:
            saved = _saved_states(step.plan)
            slots = () if step.plan is None else step.plan.rows.tolist()
            for place, (row, before, count) in enumerate(
                zip(step.rows, step.num_computed.tolist(), counts, strict=True)
            ):
                states = saved.get(slots[place], ()) if saved else ()
                self.offload.save(row.branch, row.branch.seq, row.branch.token_ids, before + count, states)
        hits = step.num_computed.tolist()
        self._cache.commit([row.branch.seq for row in step.rows], counts, _padded(new_tokens))
        for row, num_hit in zip(step.rows, hits, strict=True):
            self._count(row.branch, num_hit)

    def fork(self, request: Request, first_tokens: list[int]) -> None:
        """The prompt is computed: a sequence for each further completion, and a first token for each."""
        first = request.branches[0]
        others = request.branches[1:]
        children = self._cache.fork(first.seq, len(others), holders=[_holder(branch) for branch in others])
        for branch, seq in zip(others, children, strict=True):
            branch.seq = seq
            bisect.insort(self.running, branch, key=_rank)
        if self.offload is not None:
            self.offload.fork(first, others)
        self._cache.append([branch.seq for branch in request.branches], first_tokens)
        request.is_forked = True

    def _reserve(self, step: ScheduledStep, only: Collection[int] | None) -> None:
        """Reserve slots for as many running sequences as fit, preempting where blocks are short."""
        stalled: set[Branch] = set()
        chunks: dict[Branch, int] = {}
        may_draft = True
        while True:
            rows = self._divide_budget(stalled, only, may_draft, chunks)
            if not rows:
                step.clear()
                return
            plan = self._cache.reserve([row.branch.seq for row in rows], [row.num_tokens for row in rows])
            self.moves.note(plan)
            self.cpu_hits.note(plan, [row.branch for row in rows])
            if plan.all_fit:
                step.fill([row.cut(count) for row, count in zip(rows, plan.num_scheduled.tolist(), strict=True)], plan)
                return
            stalled.update(_having(rows, plan, SeqStatus.WAITS_FOR_PREFIX))
            needy = _having(rows, plan, SeqStatus.NO_BLOCKS)
            if needy and may_draft and any(row.draft for row in rows):
                may_draft = False  # no sequence is preempted for a guess
            elif needy and not self._halve_chunk(rows, chunks):
                self._make_room(step, rows, needy)

    def _halve_chunk(self, rows: list[StepRow], chunks: dict[Branch, int]) -> bool:
        """Give a sequence that runs alone and is short of blocks half of its chunk; says whether there was a half.

        A layer group with a window holds its window and the chunk: a long chunk may not fit where a short one does.
        """
        if len(self.running) > 1 or rows[0].count == 1:
            return False
        chunks[rows[0].branch] = rows[0].count // 2
        return True

    def _divide_budget(
        self, stalled: set[Branch], only: Collection[int] | None, may_draft: bool, chunks: dict[Branch, int]
    ) -> list[StepRow]:
        """Return tokens for each running sequence: decodes first, then prompts, each in order; then drafts.

        Where tenants share the pool, prompts of who has least of its share go first.
        chunks: the most tokens that a branch gets, where that is less than the budget.
        """
        left = [
            # What is left to compute is the cache's to say: a freed neighbour can set a joined prefix back.
            (branch, len(branch.token_ids) - self._cache.num_computed_tokens(branch.seq))
            for branch in self.running
            if branch not in stalled and _takes_part(branch, only)
        ]
        turns = self._turns
        if turns is not None:
            turns.read()

        def order(pair: tuple[Branch, int]) -> tuple[bool | float, ...]:
            # A prompt that has one token left behind its hit is no decode: it may wait for a neighbour's prefix, and
            # must stand behind that neighbour to be served in the same step.
            is_prompt = pair[1] > 1 or pair[0].request.num_cached_tokens is None
            return (is_prompt, *(turns.excess(pair[0].request.tenant) if is_prompt and turns is not None else ()))

        left.sort(key=order)
        counts, budget = [], self.max_num_batched_tokens
        for branch, num_left in left:
            counts.append(min(num_left, budget, chunks.get(branch, num_left)))
            budget -= counts[-1]
        rows = []
        for (branch, num_left), count in zip(left, counts, strict=True):
            if count > 0:
                draft = branch.draft()[:budget] if may_draft and num_left == 1 and branch.num_generated else []
                budget -= len(draft)
                rows.append(StepRow(branch, count, draft, count == num_left))
        return rows

    def _make_room(self, step: ScheduledStep, rows: list[StepRow], needy: list[Branch]) -> None:
        """Preempt one for the first of those that got no blocks."""
        turns = self._turns
        if turns is None:
            self._preempt(step, self._preemptor.choose_victim(self.running, min(needy, key=_rank)))
            return
        turns.read()
        first = min(needy, key=lambda branch: (turns.excess(branch.request.tenant), branch.rank))
        count = next(row.num_tokens for row in rows if row.branch is first)
        lender = self._preemptor.choose_lender(self.running, first, turns, self._num_missing(first, count))
        self._preempt(step, lender or self._preemptor.choose_victim(self.running, first))

    def _num_missing(self, branch: Branch, count: int) -> int:
        """Return the blocks that a running branch needs for its next `count` tokens, at least one. O(blocks)."""
        end = self._cache.num_computed_tokens(branch.seq) + count
        missing = [
            -(-end // group.block_size) - len(self._cache.block_ids(branch.seq, number))
            for number, group in enumerate(self._cache.config.layer_groups)
        ]
        return max(1, sum(max(number, 0) for number in missing))

    def _preempt(self, step: ScheduledStep, victim: Branch) -> None:
        if len(self.running) > 1:
            self._preemptor.put_aside(victim)
        else:  # alone, and short all the same: only what lies in the CPU pool can be in its way
            self._preemptor.forget(victim)
            self.forget_swapped()
        self._set_aside(step, victim)

    def _set_aside(self, step: ScheduledStep, victim: Branch) -> None:
        """Queue a branch again whose blocks were taken."""
        self.running.remove(victim)
        self._queue(victim)
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(victim)

    def _admit(self, step: ScheduledStep, only: Collection[int] | None) -> bool:
        """Start waiting branches, in order, while budget, rows and blocks allow; says whether any was started."""
        if not self.waiting:
            return False
        budget, before = self.max_num_batched_tokens - step.num_known, (len(self.running), len(step.preempted))
        prefixes = PrefixesInProgress(self._cache, [branch for branch in self.running if _takes_part(branch, only)])
        waiting = [b for b in self.waiting if _takes_part(b, only) and b not in step.preempted]
        seen: set[Branch] = set()
        if self._turns is not None:
            self._turns.read()
        line = Line(waiting, self._turns, only_floors=bool(step.preempted))
        for branch in line:
            seen.add(branch)
            if budget > 0 and prefixes.should_wait(branch):
                self._deferred.add(branch.request.request_id)
                continue
            is_sure = self._is_in_floor(branch)
            if self._is_loading(branch, only is None, is_sure):
                continue
            if (budget <= 0 and not is_sure) or not (self._start(branch) or (is_sure and self._take_row(step, branch))):
                line.refuse(branch)
                continue
            self.waiting.remove(branch)
            bisect.insort(self.running, branch, key=_rank)
            self._fill(branch)
            prefixes.note(branch)
            budget -= len(branch.token_ids) - self._cache.num_computed_tokens(branch.seq)
            if self._turns is not None:
                self._turns.read()
        for other in waiting[:_MOST_PREFETCHED] if len(seen) < len(waiting) else ():
            if other not in seen:
                self._is_loading(other, only is None)
        return (len(self.running), len(step.preempted)) != before

    def _is_in_floor(self, branch: Branch) -> bool:
        """Return whether a waiting branch stays within its tenant's floor. O(tenants)."""
        return self._turns is not None and self._turns.num_needed(branch) <= self._turns.lacks(branch.request.tenant)

    def _take_row(self, step: ScheduledStep, branch: Branch) -> bool:
        """Start a branch that stays within its tenant's floor where rows are short: those who are above theirs give
        their own. Says whether it has started."""
        num_seqs = 1 if branch.request.is_forked else branch.request.sampling.n
        while self._num_rows_taken() + num_seqs > self._cache.config.max_num_seqs:
            assert self._turns is not None
            lender = self._preemptor.choose_lender(self.running, branch, self._turns, 0)
            if lender is None:
                return False
            self._preemptor.forget(lender)  # swapped out it would keep its row
            self._set_aside(step, lender)
        return self._start(branch)

    def _num_rows_taken(self) -> int:
        """Count the rows of the cache in use, those that are kept for forks included. O(running)."""
        kept = sum(branch.request.sampling.n - 1 for branch in self.running if not branch.request.is_forked)
        return self._cache.num_seqs + kept

    def _is_loading(self, branch: Branch, may_load: bool, is_sure: bool = False) -> bool:
        """Return whether blocks of a waiting branch are on their way from a tier, which is asked for them.

        may_load: False to wait for none, because only some requests take part in the step. is_sure: whether the branch
        starts as soon as it is not loading.
        """
        if self.offload is None or branch.is_swapped:
            return False
        is_loading = self.offload.prepare(
            branch, branch.token_ids, branch.request.extra_keys, may_load=may_load, will_start=is_sure
        )
        self.num_loading += is_loading
        return is_loading

    def _fill(self, branch: Branch) -> None:
        """Count what a tier has brought for a branch that was just started as computed."""
        if self.offload is not None:
            num_hit = self._cache.num_computed_tokens(branch.seq)
            self._filling = branch
            num_tokens = self.offload.fill(branch, branch.seq)
            self._filling = None
            if num_tokens and branch.request.num_cached_tokens is None:
                branch.request.num_tier_cached_tokens = num_tokens
                self._count(branch, num_hit + num_tokens)

    def note_fill(self, plan: StepPlan) -> None:
        """Note what a plan moves that was made to fill the blocks of a branch from a tier."""
        self.moves.note(plan)
        if self._filling is not None:
            self.cpu_hits.note(plan, [self._filling])

    def _start(self, branch: Branch) -> bool:
        """Give a waiting branch its row and blocks, if there are any."""
        is_alone = not self.running
        if branch.is_swapped:
            if self._preemptor.bring_back(branch, is_alone):
                return True
            if not is_alone:
                return False
            self._preemptor.forget(branch)
        while isinstance(answer := self._try_allocate(branch), Admission):
            # With none running, rows and pages may still be with those in the CPU pool.
            swapped = [other for other in self.waiting if other.is_swapped] if is_alone else []
            if not swapped:
                return False
            self._preemptor.forget(swapped[-1])
        branch.seq = answer
        branch.num_cpu_tokens = 0
        return True

    def _try_allocate(self, branch: Branch) -> int | Admission:
        """Return the branch's sequence, looked up and admitted in one call, or why it is not admitted."""
        num_seqs = 1 if branch.request.is_forked else branch.request.sampling.n
        resumed = branch.request.num_cached_tokens is not None
        request = branch.request
        return self._cache.try_allocate(
            branch.token_ids,
            holder=_holder(branch),
            extra_keys=request.extra_keys,
            num_seqs=num_seqs,
            resumed=resumed,
            session=request.session,
            states=self._state_hints(branch),
        )

    def _state_hints(self, branch: Branch) -> StateHints | None:
        """Return the prompts that wait behind a branch: a state is checkpointed where it diverges from them."""
        if not self._cache.config.has_states:
            return None
        extra_keys = branch.request.extra_keys
        others = (other for other in self.waiting if other is not branch and other.request.extra_keys == extra_keys)
        return StateHints(waiting_prompts=[other.token_ids for other in islice(others, _MOST_PROMPTS)])

    def _count(self, branch: Branch, num_hit: int) -> None:
        """Note what a request found in the cache when the first of its tokens are there; the cache counts it then too.

        No earlier: a request may be preempted before its first step, and find less when it is admitted again.
        """
        request = branch.request
        if request.num_cached_tokens is None:
            # Of an answer that was begun elsewhere, more than the prompt may hit.
            request.num_cached_tokens = min(num_hit, len(request.prompt_token_ids))
            request.num_cpu_cached_tokens = self.cpu_hits.count(branch)
            if self._cache.config.observe.track_misses:
                request.misses = self._cache.miss_causes(branch.seq)

    def _queue(self, branch: Branch) -> None:
        bisect.insort(self.waiting, branch, key=_rank)

    def _all(self) -> Iterator[Branch]:
        yield from self.running
        yield from self.waiting


def _rank(branch: Branch) -> tuple[int, int, int]:
    return branch.rank


def _takes_part(branch: Branch, only: Collection[int] | None) -> bool:
    return only is None or branch.request.request_id in only


def _holder(branch: Branch) -> str:
    name = f"request {branch.request.request_id}"
    return name if branch.index == 0 else f"{name}, completion {branch.index}"


def _having(rows: list[StepRow], plan: StepPlan, status: SeqStatus) -> list[Branch]:
    return [row.branch for row, found in zip(rows, plan.status.tolist(), strict=True) if found == status.value]


def _saved_states(plan: StepPlan | None) -> dict[int, list[int]]:
    """Return after how many tokens a step saves states, by slot."""
    saved: dict[int, list[int]] = {}
    if plan is not None and len(plan.states.saves):
        for slot, boundary in zip(plan.states.saves.tolist(), plan.states.save_boundaries.tolist(), strict=True):
            saved.setdefault(slot, []).append(boundary)
    return saved


def _padded(new_tokens: list[list[int]]) -> NDArray[np.int64]:
    """Return lists of tokens as `commit` takes them, (B, longest), -1 for none."""
    width = max(1, max(len(new) for new in new_tokens))
    table = np.full((len(new_tokens), width), -1, np.int64)
    for row, new in zip(table, new_tokens, strict=True):
        row[: len(new)] = new
    return table
