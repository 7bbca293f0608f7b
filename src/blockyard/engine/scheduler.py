"""Who computes which tokens in the next step: budget, admission, preemption. No tensor comes near it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..answers import Admission, SeqStatus
from ..core.manager import KVCacheManager
from ..core.plan import StepPlan
from ..errors import NeverFits
from .request import Request


@dataclass(slots=True)
class ScheduledStep:
    """The batch of one step. Rows of `requests` and `plan` belong together, and every row has its slots.

    num_computed, num_scheduled: (B,) tokens before the step, tokens in it. samples: (B,) whether the row's last
    known token is in the step, so that its logits choose the next one. copies: pairs (old, new) of blocks to copy
    before the step writes, in this order. preempted: requests that were set back to make room.
    """

    requests: list[Request] = field(default_factory=list)
    plan: StepPlan | None = None
    num_computed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    num_scheduled: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    samples: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    copies: list[NDArray[np.int32]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def fill(self, requests: list[Request], plan: StepPlan) -> None:
        """Make this the batch; a plan's arrays are the cache's, so what outlives the next call is copied."""
        num_tokens = np.array([len(request.token_ids) for request in requests], np.int64)
        self.requests, self.plan = requests, plan
        self.num_computed = plan.num_computed.astype(np.int64)
        self.num_scheduled = plan.num_scheduled.astype(np.int64)
        self.samples = self.num_computed + self.num_scheduled == num_tokens

    def clear(self) -> None:
        """Make this a step without a batch; what was copied or preempted on the way stays."""
        self.requests, self.plan = [], None
        self.num_computed = self.num_scheduled = np.empty(0, np.int64)
        self.samples = np.empty(0, np.bool_)


class Scheduler:
    """First come, first served, with continuous batching (Orca: Yu et al., OSDI 2022).

    A step computes at most `max_num_batched_tokens` tokens. Sequences that decode come first, a token each; what is
    left of the budget goes to prompts in order of arrival, cut into chunks where it ends (chunked prefill: Agrawal
    et al., OSDI 2024), and then to new requests, as the cache admits them. A sequence whose prefix another one is
    still computing skips the step.

    When a running sequence gets no block, the youngest one is preempted: its blocks are freed, and it goes back to
    the head of the queue with all its tokens, to be computed again (as in vLLM: Kwon et al., SOSP 2023). Most of its
    blocks are usually still cached then.

    Nothing starves: `add` refuses what would not fit an empty cache, and the oldest sequence is never preempted
    for a younger one.
    """

    def __init__(self, cache: KVCacheManager, max_num_batched_tokens: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._cache = cache
        self._budget = max_num_batched_tokens

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def require_fits(self, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `NeverFits`, with the numbers, for a request that an empty cache could not carry to its end. O(1)."""
        config = self._cache.config
        asked = f"{name} has {num_prompt_tokens} tokens and may generate {max_tokens}"
        num_tokens = num_prompt_tokens + max_tokens
        if num_tokens > config.max_model_len:
            raise NeverFits(f"{asked}: {num_tokens} together; max_model_len is {config.max_model_len}")
        num_blocks = -(-(num_tokens - 1) // config.block_size)  # the last token's keys and values are never computed
        usable = config.num_blocks - 1 - config.watermark_blocks
        if num_blocks > usable:
            raise NeverFits(
                f"{asked}: {num_blocks} blocks of {config.block_size}; the cache can give one sequence {usable} "
                f"(num_blocks is {config.num_blocks}, less the null block and a watermark of {config.watermark_blocks})"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `NeverFits` at once if it could never be carried to its end."""
        prompt = request.prompt_token_ids
        self.require_fits(f"request {request.request_id}", len(prompt), request.sampling.max_tokens)
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep:
        """Decide the next step and reserve its slots. No request in it means that nothing is left to do."""
        step = ScheduledStep()
        self._reserve(step)
        # Who was preempted a moment ago would come straight back and take the blocks that were made free.
        if not step.preempted and self._admit(int(step.num_scheduled.sum())):
            self._reserve(step)
        self._count_cached(step)
        return step

    def commit(self, step: ScheduledStep, next_tokens: NDArray[np.int64]) -> None:
        """The step is computed: next_tokens (B,) is what follows each sequence, -1 for nothing."""
        seqs = [request.seq for request in step.requests]
        self._cache.commit(seqs, step.num_scheduled, next_tokens)

    def retire(self, requests: list[Request]) -> None:
        """End running requests and free their blocks; what is cached stays so until it is evicted."""
        if requests:
            self._cache.free([request.seq for request in requests])
        for request in requests:
            request.seq = None
            self.running.remove(request)

    def abort(self, request_id: int) -> bool:
        """Drop a request, waiting or running; False if there is no such request."""
        for request in self.running:
            if request.request_id == request_id:
                self.retire([request])
                return True
        kept = [request for request in self.waiting if request.request_id != request_id]
        found = len(kept) < len(self.waiting)
        self.waiting = deque(kept)
        return found

    def abort_all(self) -> None:
        """Drop every request. What a broken step had reserved is given back, and none of it can be hit."""
        self.retire(list(self.running))
        self.waiting.clear()

    def _reserve(self, step: ScheduledStep) -> None:
        """Reserve slots for as many running sequences as fit, preempting where blocks are short."""
        stalled: set[int] = set()
        while True:
            batch = self._divide_budget(stalled)
            if not batch:
                step.clear()
                return
            requests, counts = [request for request, _ in batch], [count for _, count in batch]
            plan = self._cache.reserve([request.seq for request in requests], counts)
            if len(plan.copies):
                step.copies.append(plan.copies.copy())
            if plan.all_fit:
                step.fill(requests, plan)
                return
            self._make_room(step, plan, requests, stalled)

    def _make_room(self, step: ScheduledStep, plan: StepPlan, requests: list[Request], stalled: set[int]) -> None:
        """Leave out who waits for a prefix, so that its share of the budget goes on; preempt if blocks are short."""
        for request, status in zip(requests, plan.status.tolist(), strict=True):
            if status == SeqStatus.WAITS_FOR_PREFIX.value:
                stalled.add(request.request_id)
        if (plan.status == SeqStatus.NO_BLOCKS.value).any():
            self._preempt(step)

    def _divide_budget(self, stalled: set[int]) -> list[tuple[Request, int]]:
        """Tokens for each running sequence: decodes first, then prompts, each in order of arrival."""
        # What is left to compute is the cache's to say: a freed neighbour can set a joined prefix back.
        left = [
            (request, len(request.token_ids) - self._cache.num_computed_tokens(request.seq))
            for request in self.running
            if request.request_id not in stalled
        ]
        # A prompt that has one token left behind its hit is no decode: it may wait for a neighbour's prefix, and must
        # stand behind that neighbour to be served in the same step.
        left.sort(key=lambda pair: pair[1] > 1 or pair[0].num_cached_tokens is None)
        batch, budget = [], self._budget
        for request, num_left in left:
            count = min(num_left, budget)
            if count == 0:
                break
            batch.append((request, count))
            budget -= count
        return batch

    def _preempt(self, step: ScheduledStep) -> None:
        victim = self.running[-1]
        self.retire([victim])
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        step.preempted.append(victim)

    def _admit(self, num_scheduled: int) -> bool:
        """Start waiting requests while budget, rows and blocks allow; says whether any was started."""
        budget, num_before = self._budget - num_scheduled, len(self.running)
        while self.waiting and budget > 0 and len(self.running) < self._cache.config.max_num_seqs:
            request = self.waiting[0]
            if self._cache.can_allocate(request.token_ids) is Admission.LATER:
                break
            request.seq = self._cache.allocate(
                request.token_ids, holder=f"request {request.request_id}", resumed=request.num_preemptions > 0
            )
            self.running.append(self.waiting.popleft())
            budget -= len(request.token_ids) - self._cache.num_computed_tokens(request.seq)
        return len(self.running) > num_before

    def _count_cached(self, step: ScheduledStep) -> None:
        """A request's hit is what it need not compute when it first computes something, and not what it hoped for."""
        for request, num_computed in zip(step.requests, step.num_computed.tolist(), strict=True):
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_computed
