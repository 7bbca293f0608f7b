"""A simulated engine over the real manager: admission, steps of prompts and decodes, preemption.

The manager has one "token" per block of the load, so that its pool, index, admission and eviction are real, and a long
context costs few operations. A step computes at most `max_num_batched_tokens`, decodes first; waiting requests are
admitted while the step has tokens left. A sequence without a block for its answer has the youngest one preempted. The
block that an answer is filling is not counted: at most one per sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard import Admission, KVCacheManager
from blockyard.admission import AdmissionRule, WaitingQueue
from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument

from ..policy_names import PolicyName, policy_of
from ..replay.timed import ServiceModel

#: Names of orders of admission; see `parse_admission`.
ORDERS = ("arrival", "fewest", "room")
DEFAULT_K = 4.0
MAX_K = 1e6
#: Seconds by which sums of times may be wrong.
ROUNDING = 1e-6
#: Most decode steps that are simulated at once.
_MOST_STEPS = 256


def parse_admission(text: str) -> tuple[str, float]:
    """Return order and k of a name such as "arrival", "fewest" or "room:2"; without a number, k is 4.

    Raises:
        InvalidArgument: for an unknown order or an invalid k.
    """
    name, colon, number = text.partition(":")
    try:
        k = float(number) if colon else DEFAULT_K
    except ValueError:
        k = math.nan
    if name not in ORDERS or not 1 <= k <= MAX_K or (colon and name == "arrival"):
        raise InvalidArgument(
            f"admission is {text!r}; it must be arrival, fewest[:k] or room[:k], k from 1 to {MAX_K:g}"
        )
    return name, k


@dataclass(slots=True, eq=False)
class Request:
    """A turn in the engine.

    Attributes:
        slot: which of the sessions at once it belongs to.
        session: name of its session for the order of admission.
        arrived: when it arrived.
        num_prompt: tokens to compute before its next output token; grows by its own output when it is preempted.
        num_output: output tokens still to come after those.
        blocks: (full blocks,) int32 tokens of the manager, one per full block of the prompt.
        answer: tokens for the blocks that the answer fills, and one more.
        is_last: whether its session ends with it.
        ahead: seconds of the work ahead of it when it arrived, and its own, as if nothing were cached.
        admitted: when it was first admitted; None while it waits.
        ticket: of its last wait.
        seq: handle in the cache while it runs, -1 after a preemption.
        num_computed: prompt tokens computed.
        num_filled: blocks computed.
        num_made: output tokens since the last admission.
    """

    slot: int
    session: str
    arrived: float
    num_prompt: int
    num_output: int
    blocks: NDArray[np.int32]
    answer: list[int]
    is_last: bool = False
    ahead: float = 0.0
    admitted: float | None = None
    ticket: int = 0
    seq: int = 0
    num_computed: int = 0
    num_filled: int = 0
    num_made: int = 0

    def tokens(self) -> NDArray[np.int32]:
        """Return the prompt for the manager: its full blocks and one token that never hits."""
        return np.append(self.blocks, np.int32(self.answer[0]))


@dataclass(slots=True)
class Counters:
    """Sums since the engine began.

    Attributes:
        num_prompt_tokens: tokens of all prompts, at their first admission.
        num_computed_tokens: prompt tokens computed, again after preemptions too.
        num_preemptions: preemptions.
        num_admissions: first admissions.
        num_beyond_lane: admissions after the lane's bound.
        most_beyond_lane: most seconds of such an admission after its bound.
        num_beyond_work: admissions after more than k times the work ahead, without the time for blocks to be freed.
        most_beyond_work: most seconds of such an admission beyond that.
    """

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_admissions: int = 0
    num_beyond_lane: int = 0
    most_beyond_lane: float = 0.0
    num_beyond_work: int = 0
    most_beyond_work: float = 0.0


@dataclass(slots=True)
class SimulatedEngine:
    """The engine. `num_blocks` includes the null block; times are simulated seconds.

    Attributes:
        now: the present.
        waiting: waiting requests by ticket.
        running: running requests in the order of admission.
    """

    device: ServiceModel
    num_blocks: int
    block_size: int
    admission: str
    policy: PolicyName
    max_num_seqs: int
    watermark: float
    now: float = 0.0
    waiting: dict[int, Request] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    cache: KVCacheManager = field(init=False)
    queue: WaitingQueue = field(init=False)
    rule: AdmissionRule = field(init=False)
    _k: float = field(init=False)
    #: When admission is tried again although nothing arrived or ended.
    _retry_at: float = 0.0
    #: Seconds of prompts in this step, and the blocks that it fills.
    _prompt_seconds: float = 0.0
    _filled: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=1,
                max_num_seqs=self.max_num_seqs,
                max_model_len=self.num_blocks,
                watermark=self.watermark,
                hash_seed=0,
                eviction_policy=policy_of(self.policy),
            )
        )
        order, self._k = parse_admission(self.admission)
        self.queue = self.cache.waiting()
        self.rule = AdmissionRule(self.queue, order, seconds=self._seconds_of_blocks, k=self._k)

    def _seconds_of_blocks(self, num_missing: int, num_blocks: int) -> float:
        return self.device.prompt_seconds((num_blocks - num_missing) * self.block_size, num_blocks * self.block_size)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        device, waiting = self.device, self.waiting.values()
        request.ahead = sum(device.prompt_seconds(0, other.num_prompt) for other in (*waiting, request))
        request.ahead += sum(device.prompt_seconds(other.num_computed, other.num_prompt) for other in self.running)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.ticket = self.queue.add(
            request.tokens(),
            session=request.session,
            max_new_tokens=len(request.answer),
            arrived=request.arrived,
        )
        self.waiting[request.ticket] = request
        self._retry_at = self.now

    def next_wake(self) -> float:
        """Return when an idle engine must be stepped again although nothing arrives; inf if nothing waits."""
        return self._retry_at if self.waiting else math.inf

    def step(self, until: float) -> list[Request] | None:
        """Run a step, or several without prompts that end by `until`. Return finished requests; None if nothing ran."""
        self._prompt_seconds, self._filled = 0.0, []
        decodes = [request for request in self.running if request.num_computed == request.num_prompt]
        budget = self.device.max_num_batched_tokens - len(decodes)
        for request in self.running:
            if request.num_computed < request.num_prompt and budget > 0:
                budget -= self._compute(request, budget)
        if budget > 0 and self._retry_at <= self.now:
            self._admit(budget)
        if not self.running:
            return None
        context = sum(request.num_prompt + request.num_made for request in decodes)
        seconds = self.device.step_seconds(0, len(decodes), context)
        num_steps = 1
        if decodes and not self._prompt_seconds:
            fewest = min(request.num_output - request.num_made for request in decodes)
            due = min(until, self._retry_at if self.waiting else math.inf) - self.now
            num_steps = max(
                1, min(fewest, _MOST_STEPS, math.ceil(min(due / seconds, _MOST_STEPS)) if seconds else fewest)
            )
        self.now += self._prompt_seconds + num_steps * seconds
        for seq, count in self._filled:
            self.cache.commit([seq], [count])
        return self._decode(decodes, num_steps)

    def _admit(self, budget: int) -> None:
        self._retry_at = self.now
        while self.waiting and budget > 0:
            ticket = self.rule.next(self.now)
            seq = Admission.LATER if ticket is None else self.cache.try_allocate(self.waiting[ticket].tokens())
            if ticket is None or isinstance(seq, Admission):
                self._retry_at = max(self.rule.wake_at(self.now), math.nextafter(self.now, math.inf))
                return
            request = self.waiting.pop(ticket)
            self._record_wait(request, self.rule.lane_bound(ticket, self.now))
            self.queue.admitted(ticket, self.now)
            request.seq, request.num_filled = seq, self.cache.num_computed_tokens(seq)
            request.num_computed = request.num_filled * self.block_size
            self.running.append(request)
            budget -= self._compute(request, budget)

    def _record_wait(self, request: Request, lane_bound: float) -> None:
        if request.admitted is not None:
            return
        counters, waited = self.counters, self.now - request.arrived
        request.admitted = self.now
        counters.num_admissions += 1
        counters.num_prompt_tokens += request.num_prompt
        if waited > lane_bound + ROUNDING:
            counters.num_beyond_lane += 1
            counters.most_beyond_lane = max(counters.most_beyond_lane, waited - lane_bound)
        if waited > self._k * request.ahead + ROUNDING:
            counters.num_beyond_work += 1
            counters.most_beyond_work = max(counters.most_beyond_work, waited - self._k * request.ahead)

    def _compute(self, request: Request, budget: int) -> int:
        """Compute part of a prompt; return its number of tokens. 0 if it waits for a prefix that another computes."""
        num_seen = self.cache.num_computed_tokens(request.seq)
        if num_seen < request.num_filled:  # the sequence that was computing a shared prefix has ended early
            request.num_computed, request.num_filled = num_seen * self.block_size, num_seen
        start = request.num_computed
        end = min(start + budget, request.num_prompt)
        num_blocks = (
            len(request.blocks) if end == request.num_prompt else min(end // self.block_size, len(request.blocks))
        )
        if num_blocks > request.num_filled:
            wanted = num_blocks - request.num_filled
            count = int(self.cache.reserve([request.seq], [wanted]).num_scheduled[0])
            if count == 0:
                self.cache.commit([request.seq], [0])
                return 0
            self._filled.append((request.seq, count))
            request.num_filled += count
            if count < wanted:
                end = request.num_filled * self.block_size
        self._prompt_seconds += self.device.prompt_seconds(start, end)
        request.num_computed = end
        self.counters.num_computed_tokens += end - start
        return end - start

    def _decode(self, decodes: list[Request], num_steps: int) -> list[Request]:
        """Give each decoding request its tokens, preempting the youngest if blocks run short; return the finished."""
        ended: list[Request] = []
        for request in decodes:
            if request.seq < 0 or not self._grow(request, request.num_made + num_steps):
                continue
            request.num_made += num_steps
            if request.num_made >= request.num_output:
                ended.append(request)
        for request in ended:
            self._stop(request, request.is_last)
        return ended

    def _grow(self, request: Request, num_made: int) -> bool:
        """Fill the blocks of an answer of `num_made` tokens; return False if the request was preempted for it."""
        while request.num_filled < (request.num_prompt + num_made) // self.block_size:
            place = request.num_filled + 1 - len(request.blocks)
            if self.cache.reserve([request.seq], [1]).num_scheduled[0]:
                self.cache.commit([request.seq], [1], [request.answer[min(place, len(request.answer) - 1)]])
                request.num_filled += 1
                continue
            self.cache.commit([request.seq], [0])
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.counters.num_preemptions += 1
        self._stop(request, False)
        # A block that was filled for tokens of this step is not kept: the request does not get those tokens.
        num_new = max((request.num_prompt + request.num_made) // self.block_size - len(request.blocks), 0)
        request.blocks = np.append(request.blocks, np.array(request.answer[:num_new], np.int32))
        request.answer = request.answer[num_new:]
        request.num_prompt += request.num_made
        request.num_output -= request.num_made
        request.num_made = request.num_computed = 0
        request.seq = -1
        self._wait(request)

    def _stop(self, request: Request, is_over: bool) -> None:
        self.queue.finished(request.ticket, self.now, blocks=request.seq, is_over=is_over)
        self.cache.free([request.seq])
        self.running.remove(request)
        self._retry_at = self.now
