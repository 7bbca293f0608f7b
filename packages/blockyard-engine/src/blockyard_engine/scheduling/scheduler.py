"""The scheduler: budget, admission and preemption of each step. Nothing here touches tensors."""

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

from ..engine_options import Preemption
from ..moves import MoveQueue
from ..request import Branch, Request
from .admission_control import AdmissionControl, RuledQueue
from .fair_shares import AdmissionQueue, FairShares
from .limits import CacheLimits
from .preemption import Preemptor
from .prefixes import CpuHits, PrefixesInProgress
from .step import ScheduledStep, StepRow

if TYPE_CHECKING:
    from blockyard_tiers import Offload

#: Waiting branches for which tiers are looked up ahead of their turn.
_MAX_PREFETCHED = 64
#: Steps of waiting that one level of priority is worth.
STEPS_PER_PRIORITY = 256
#: Waiting prompts that an admitted one is compared with.
_MAX_COMPARED_PROMPTS = 16


class Scheduler:
    """Continuous batching (Orca: Yu et al., OSDI 2022) by priority, then arrival.

    A step computes at most `max_num_batched_tokens` tokens. Decodes come first, one token each; the rest of the budget
    goes to running prompts in order, cut into chunks (chunked prefill: Agrawal et al., OSDI 2024), then to new requests
    as the cache admits them, then to drafts. A sequence whose prefix another one is still computing skips the step, or
    is not admitted yet (`prefixes`). With tiers, other requests overtake a prompt whose blocks are loading, until they
    have arrived or would have been computed.

    If a running sequence gets no block, drafts are dropped first; then a sequence that is served later is preempted
    (`preemption`) and waits in its old position.

    Without tenants, nothing starves. `CacheLimits` refuses requests that would not fit an empty cache, no request is
    admitted before the next in order unless that one waits for a prefix in progress or a tier, and none is preempted
    for one that is served later. One level of priority equals `STEPS_PER_PRIORITY` steps of waiting, so a stream of
    urgent requests delays a patient one by at most that. The order of two requests never changes. With an
    `AdmissionControl` others do overtake, and its lane bounds the wait.

    If tenants share the pool, that order holds within each tenant. The next request to start is one of the tenant with
    the least overuse (`fair_shares`). The tenant with the most overuse makes room for requests of others, but keeps its
    guarantee. A request within its tenant's guarantee starts at once: if all rows are taken, a tenant above its
    guarantee loses one.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        max_num_batched_tokens: int,
        preemption: Preemption = Preemption.RECOMPUTE,
        admission: AdmissionControl | None = None,
    ) -> None:
        self.waiting: list[Branch] = []
        self.running: list[Branch] = []
        self.num_preemptions = 0
        self.moves = MoveQueue()
        self.offload: Offload | None = None
        #: Branches that wait for a tier since the last step.
        self.num_loading = 0
        self.cpu_hits = CpuHits(cache)
        self.limits = CacheLimits(cache.config, max_num_batched_tokens)
        self._cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self._preemptor = Preemptor(cache, preemption, self.moves)
        self.admission = self._preemptor.admission = admission
        self._shares = FairShares(cache, self.limits) if cache.config.tenants else None
        self._num_steps = 0
        self._deferred: set[int] = set()
        self._filling: Branch | None = None

    def set_offload(self, offload: Offload | None) -> None:
        """Set the connection to the tiers; None for none."""
        self.offload = self._preemptor.offload = offload

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `NeverFits` if it could never be served."""
        name, num_tokens = f"request {request.request_id}", len(request.prompt_token_ids)
        request.tenant = self.limits.roster.number_of(plain_keys(request.extra_keys))
        self.limits.require_fits(name, num_tokens, request.sampling.max_tokens, request.sampling.n, request.tenant)
        request.due = self._num_steps + request.priority * STEPS_PER_PRIORITY
        if self.admission is not None:
            request.arrived = self.admission.clock()
            self.admission.is_holding = False
        self._queue(request.branches[0])

    def adopt(self, request: Request, seq: int) -> None:
        """Run a request whose prompt and first token were computed elsewhere, with its sequence."""
        request.due = self._num_steps + request.priority * STEPS_PER_PRIORITY
        request.tenant = self.limits.roster.number_of(plain_keys(request.extra_keys))
        request.branches[0].seq = seq
        bisect.insort(self.running, request.branches[0], key=_order_key)

    @property
    def idle_seconds(self) -> float:
        """Seconds for which nothing can start unless something is called; 0 while something runs or may start."""
        if self.admission is None or self.running or not (self.admission.is_holding and self.waiting):
            return 0.0
        return self.admission.seconds_until_change()

    def requests(self) -> dict[int, Request]:
        """Return all waiting and running requests by id."""
        return {branch.request.request_id: branch.request for branch in self._all()}

    def running_ids(self) -> set[int]:
        """Return the ids of requests with a running branch."""
        return {branch.request.request_id for branch in self.running}

    def deferred_ids(self) -> set[int]:
        """Return the ids of waiting requests that the last step deferred for a prefix in progress. O(branches)."""
        return self._deferred & {branch.request.request_id for branch in self.waiting} - self.running_ids()

    def abort(self, request_id: int) -> Request | None:
        """Drop a request, waiting or running; return None if there is none. O(branches and blocks)."""
        dropped = [branch for branch in self._all() if branch.request.request_id == request_id]
        self.retire(dropped)
        return dropped[0].request if dropped else None

    def abort_all(self) -> None:
        """Drop every request. Blocks that a failed step had reserved are freed and cannot be hit."""
        self.retire(list(self._all()))

    def retire(self, branches: list[Branch]) -> None:
        """Free the blocks of branches and remove these; cached blocks stay cached until they are evicted."""
        for branch in branches:
            self._preemptor.release(branch)
            if self.admission is not None:
                self.admission.remove(branch)
            (self.running if branch in self.running else self.waiting).remove(branch)

    def preempt_running(self) -> None:
        """Free the blocks of all running branches and queue these again. This does not count as preemption."""
        for branch in list(self.running):
            self._preemptor.release(branch)
            self._queue(branch)
        self.running.clear()

    def forget_swapped(self) -> None:
        """Free waiting branches' blocks in the CPU pool and cancel their loads; they are computed again."""
        for branch in self.waiting:
            self._preemptor.release(branch)

    # The step.

    def schedule(self, only: Collection[int] | None = None) -> ScheduledStep:
        """Decide the next step and reserve its slots. An empty step means that there is nothing to compute.

        `only` has the ids of the requests that may take part; None for all.
        """
        step = ScheduledStep()
        self._num_steps += 1
        self._deferred.clear()
        self.num_loading = 0
        if self.offload is not None:
            self.offload.poll()
        self._reserve(step, only)
        # A branch that was just preempted would take its blocks straight back. Others may start within a guarantee.
        if (not step.preempted or self._shares is not None) and self._admit(step, only):
            self._reserve(step, only)
        return step

    def commit(self, step: ScheduledStep, new_tokens: list[list[int]]) -> None:
        """Commit a computed step.

        `new_tokens` has the tokens that follow each row, accepted drafts first; the last one of a list is known but not
        computed. A list is empty if nothing follows or the branch has ended.
        """
        counts = [row.count + max(len(new) - 1, 0) for row, new in zip(step.rows, new_tokens, strict=True)]
        if self.offload is not None:
            saved = _saved_states(step.plan)
            slots = () if step.plan is None else step.plan.rows.tolist()
            for index, (row, before, count) in enumerate(
                zip(step.rows, step.num_computed.tolist(), counts, strict=True)
            ):
                states = saved.get(slots[index], ()) if saved else ()
                self.offload.save(row.branch, row.branch.seq, row.branch.token_ids, before + count, states)
        hits = step.num_computed.tolist()
        self._cache.commit([row.branch.seq for row in step.rows], counts, _padded(new_tokens))
        for row, num_hit in zip(step.rows, hits, strict=True):
            self._count(row.branch, num_hit)

    def fork(self, request: Request, first_tokens: list[int]) -> None:
        """Fork a computed prompt into a sequence for each completion, and append each one's first token."""
        first = request.branches[0]
        others = request.branches[1:]
        children = self._cache.fork(first.seq, len(others), holders=[_holder(branch) for branch in others])
        for branch, seq in zip(others, children, strict=True):
            branch.seq = seq
            bisect.insort(self.running, branch, key=_order_key)
        if self.offload is not None:
            self.offload.fork(first, others)
        self._cache.append([branch.seq for branch in request.branches], first_tokens)
        request.is_forked = True

    def _reserve(self, step: ScheduledStep, only: Collection[int] | None) -> None:
        """Reserve slots for as many running sequences as fit; preempt if blocks are short."""
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
                may_draft = False  # do not preempt for drafts
            elif needy and not self._halve_chunk(rows, chunks):
                self._make_room(step, rows, needy)

    def _halve_chunk(self, rows: list[StepRow], chunks: dict[Branch, int]) -> bool:
        """Halve the chunk of the only running sequence if it lacks blocks; return whether it could be halved.

        A layer group with a window holds both window and chunk, so a short chunk may fit where a long one does not.
        """
        if len(self.running) > 1 or rows[0].count == 1:
            return False
        chunks[rows[0].branch] = rows[0].count // 2
        return True

    def _divide_budget(
        self, stalled: set[Branch], only: Collection[int] | None, may_draft: bool, chunks: dict[Branch, int]
    ) -> list[StepRow]:
        """Return the tokens of each running sequence: decodes first, then prompts, each in order; then drafts.

        If tenants share the pool, prompts of the tenant with the least overuse come first. chunks: upper limits of
        branches' chunks.
        """
        left = [
            # Ask the cache: a sequence that joined a prefix can be set back when the one that computes it is freed.
            (branch, len(branch.token_ids) - self._cache.num_computed_tokens(branch.seq))
            for branch in self.running
            if branch not in stalled and _takes_part(branch, only)
        ]
        shares = self._shares
        if shares is not None:
            shares.read()

        def order(pair: tuple[Branch, int]) -> tuple[bool | float, ...]:
            # A prompt with one token left after its hit is not a decode: it may wait for another's prefix, and must
            # come after that one to be served in the same step.
            is_prompt = pair[1] > 1 or pair[0].request.num_cached_tokens is None
            return (is_prompt, *(shares.overuse(pair[0].request.tenant) if is_prompt and shares is not None else ()))

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
        """Preempt one branch for the first of those that got no blocks."""
        shares = self._shares
        if shares is None:
            self._preempt(step, self._preemptor.choose_victim(self.running, min(needy, key=_order_key)))
            return
        shares.read()
        first = min(needy, key=lambda branch: (shares.overuse(branch.request.tenant), branch.order_key))
        count = next(row.num_tokens for row in rows if row.branch is first)
        lender = self._preemptor.choose_lender(self.running, first, shares, self._num_missing(first, count))
        self._preempt(step, lender or self._preemptor.choose_victim(self.running, first))

    def _num_missing(self, branch: Branch, count: int) -> int:
        """Return how many more blocks a running branch needs for its next `count` tokens, at least one. O(blocks)."""
        end = self._cache.num_computed_tokens(branch.seq) + count
        missing = [
            -(-end // group.block_size) - len(self._cache.block_ids(branch.seq, number))
            for number, group in enumerate(self._cache.config.layer_groups)
        ]
        return max(1, sum(max(number, 0) for number in missing))

    def _preempt(self, step: ScheduledStep, victim: Branch) -> None:
        if len(self.running) > 1:
            self._preemptor.preempt(victim)
        else:  # alone and still short of blocks: only swapped-out sequences can be in the way
            self._preemptor.release(victim)
            self.forget_swapped()
        self._requeue(step, victim)

    def _requeue(self, step: ScheduledStep, victim: Branch) -> None:
        self.running.remove(victim)
        self._queue(victim)
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(victim)

    def _admit(self, step: ScheduledStep, only: Collection[int] | None) -> bool:
        """Start waiting branches, in order, while budget, rows and blocks allow; return whether anything changed."""
        if not self.waiting:
            return False
        budget, before = self.max_num_batched_tokens - step.num_known, (len(self.running), len(step.preempted))
        prefixes = PrefixesInProgress(self._cache, [branch for branch in self.running if _takes_part(branch, only)])
        waiting = [b for b in self.waiting if _takes_part(b, only) and b not in step.preempted]
        seen: set[Branch] = set()
        if self._shares is not None:
            self._shares.read()
        ruled = self.admission if only is None else None
        queue: AdmissionQueue | RuledQueue
        if ruled is None:
            queue = AdmissionQueue(waiting, self._shares, only_guaranteed=bool(step.preempted))
        else:
            queue = ruled.candidates(waiting)
        for branch in queue if budget > 0 or ruled is None else ():
            seen.add(branch)
            if budget > 0 and prefixes.should_wait(branch):
                self._deferred.add(branch.request.request_id)
                continue
            shares = self._shares
            is_sure = shares is not None and shares.num_needed(branch) <= shares.shortfall(branch.request.tenant)
            if self._is_loading(branch, only is None, is_sure):
                continue
            if (budget <= 0 and not is_sure) or not (self._start(branch) or (is_sure and self._take_row(step, branch))):
                queue.refuse(branch)
                continue
            self.waiting.remove(branch)
            if self.admission is not None:
                self.admission.start(branch)
            bisect.insort(self.running, branch, key=_order_key)
            self._fill(branch)
            prefixes.note(branch)
            budget -= len(branch.token_ids) - self._cache.num_computed_tokens(branch.seq)
            if self._shares is not None:
                self._shares.read()
            if ruled is not None and budget <= 0:
                break
        if ruled is not None and self.offload is not None:
            waiting = ruled.first(_MAX_PREFETCHED)
        for other in waiting[:_MAX_PREFETCHED] if len(seen) < len(waiting) else ():
            if other not in seen:
                self._is_loading(other, only is None)
        return (len(self.running), len(step.preempted)) != before

    def _take_row(self, step: ScheduledStep, branch: Branch) -> bool:
        """Start a branch within its tenant's guarantee, by freeing rows of tenants above theirs.

        Return whether it started.
        """
        num_seqs = 1 if branch.request.is_forked else branch.request.sampling.n
        while self._num_rows_taken() + num_seqs > self._cache.config.max_num_seqs:
            assert self._shares is not None
            lender = self._preemptor.choose_lender(self.running, branch, self._shares, 0)
            if lender is None:
                return False
            self._preemptor.release(lender)  # swapped out, it would keep its row
            self._requeue(step, lender)
        return self._start(branch)

    def _num_rows_taken(self) -> int:
        """Return how many rows of the cache are in use, including those reserved for forks. O(running)."""
        kept = sum(branch.request.sampling.n - 1 for branch in self.running if not branch.request.is_forked)
        return self._cache.num_seqs + kept

    def _is_loading(self, branch: Branch, may_load: bool, is_sure: bool = False) -> bool:
        """Return whether blocks of a waiting branch are being loaded from a tier; start loads that pay.

        `may_load` is False if only some requests take part in the step: then no load starts. `is_sure`: the branch
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
        """Mark the blocks that a tier supplied for a branch that has just started as computed."""
        if self.offload is not None:
            num_hit = self._cache.num_computed_tokens(branch.seq)
            self._filling = branch
            num_tokens = self.offload.fill(branch, branch.seq)
            self._filling = None
            if num_tokens and branch.request.num_cached_tokens is None:
                branch.request.num_tier_cached_tokens = num_tokens
                self._count(branch, num_hit + num_tokens)

    def note_fill(self, plan: StepPlan) -> None:
        """Queue the moves of a plan that was made to fill a branch's blocks from a tier."""
        self.moves.note(plan)
        if self._filling is not None:
            self.cpu_hits.note(plan, [self._filling])

    def _start(self, branch: Branch) -> bool:
        """Give a waiting branch a row and blocks; return False if there are too few."""
        is_alone = not self.running
        if branch.is_swapped:
            if self._preemptor.swap_in(branch, is_alone):
                return True
            if not is_alone:
                return False
            self._preemptor.release(branch)
        while isinstance(answer := self._try_allocate(branch), Admission):
            # With none running, swapped-out sequences may still hold rows and blocks.
            swapped = [other for other in self.waiting if other.is_swapped] if is_alone else []
            if not swapped:
                return False
            self._preemptor.release(swapped[-1])
        branch.seq = answer
        branch.num_cpu_tokens = 0
        return True

    def _try_allocate(self, branch: Branch) -> int | Admission:
        """Look up and admit a branch in one call; return its sequence, or why it is not admitted."""
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
        """Return other waiting prompts, for a model with states: it checkpoints where one branches off."""
        if not self._cache.config.has_states:
            return None
        extra_keys = branch.request.extra_keys
        others = (other for other in self.waiting if other is not branch and other.request.extra_keys == extra_keys)
        return StateHints(waiting_prompts=[other.token_ids for other in islice(others, _MAX_COMPARED_PROMPTS)])

    def _count(self, branch: Branch, num_hit: int) -> None:
        """Record the hit of a request when it is first computed; the cache counts it at that time too.

        Not earlier: a request may be preempted before its first step, and hit less when it is admitted again.
        """
        request = branch.request
        if request.num_cached_tokens is None:
            # With answer_prefix, the hit may be longer than the prompt.
            request.num_cached_tokens = min(num_hit, len(request.prompt_token_ids))
            request.num_cpu_cached_tokens = self.cpu_hits.count(branch)
            if self._cache.config.observe.track_misses:
                request.misses = self._cache.miss_causes(branch.seq)

    def _queue(self, branch: Branch) -> None:
        bisect.insort(self.waiting, branch, key=_order_key)

    def _all(self) -> Iterator[Branch]:
        yield from self.running
        yield from self.waiting


def _order_key(branch: Branch) -> tuple[int, int, int]:
    return branch.order_key


def _takes_part(branch: Branch, only: Collection[int] | None) -> bool:
    return only is None or branch.request.request_id in only


def _holder(branch: Branch) -> str:
    name = f"request {branch.request.request_id}"
    return name if branch.index == 0 else f"{name}, completion {branch.index}"


def _having(rows: list[StepRow], plan: StepPlan, status: SeqStatus) -> list[Branch]:
    return [row.branch for row, found in zip(rows, plan.status.tolist(), strict=True) if found == status.value]


def _saved_states(plan: StepPlan | None) -> dict[int, list[int]]:
    """Return the checkpoint positions of a step, by slot."""
    saved: dict[int, list[int]] = {}
    if plan is not None and len(plan.states.saves):
        for slot, position in zip(plan.states.saves.tolist(), plan.states.save_positions.tolist(), strict=True):
            saved.setdefault(slot, []).append(position)
    return saved


def _padded(new_tokens: list[list[int]]) -> NDArray[np.int64]:
    """Return lists of tokens in the form that `commit` takes: (B, longest), padded with -1."""
    width = max(1, max(len(new) for new in new_tokens))
    table = np.full((len(new_tokens), width), -1, np.int64)
    for row, new in zip(table, new_tokens, strict=True):
        row[: len(new)] = new
    return table
