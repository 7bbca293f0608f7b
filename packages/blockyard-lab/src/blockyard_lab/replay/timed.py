"""Replays a trace by its timestamps: requests arrive, wait, run in batches, and are preempted if blocks run short."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.answers import SeqStatus
from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument, OutOfBlocks, OutOfRows, TraceError

from ..trace import Trace, TraceRequest
from .expansion import Expansion
from .result import REPORT_EVERY, MissCounter, SimulatedTime, Tally, explain_misfit
from .timeline import TimelineRecorder

#: Beyond these limits the simulated clock would lose precision or overflow.
MAX_SECONDS = 3600
MAX_SPEEDUP = 1e6
#: 272 years. Up to here the clock resolves microseconds.
MAX_ARRIVAL = 2**33


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Model of an engine's step times.

    A step takes seconds_per_step
    + seconds_per_prompt_token * computed prompt tokens
    + seconds_per_decode * decoding sequences
    + seconds_per_context_token * tokens that these attend to
    + seconds_per_attention * computed prompt tokens * tokens that each attends to
    + seconds_per_moved_block * blocks moved between the pool and the CPU pool.

    The defaults suit a model of 8 billion parameters on one large GPU, with blocks of 2 MiB (16 tokens) moved at 25 GB
    per second while nothing is computed. To fit your engine, measure two batch sizes and two prompt lengths.

    Args:
        seconds_per_step: fixed time of a step.
        seconds_per_prompt_token: time per computed prompt token.
        seconds_per_decode: time per decoding sequence.
        seconds_per_context_token: time per token attended to by a decode.
        seconds_per_attention: time per computed prompt token and token that it attends to.
        seconds_per_moved_block: time per moved block.
        max_num_batched_tokens: most tokens in a step; decodes come first, and prompts are computed in chunks.
        speedup: arrivals come this many times faster than in the trace.
    """

    seconds_per_step: float = 0.006
    seconds_per_prompt_token: float = 5e-5
    seconds_per_decode: float = 2e-5
    seconds_per_context_token: float = 2e-8
    seconds_per_attention: float = 0.0
    seconds_per_moved_block: float = 8e-5
    max_num_batched_tokens: int = 8192
    speedup: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "per_step",
            "per_prompt_token",
            "per_decode",
            "per_context_token",
            "per_attention",
            "per_moved_block",
        ):
            value = require_number(f"seconds_{name}", getattr(self, f"seconds_{name}"))
            if not 0 <= value <= MAX_SECONDS:
                raise InvalidArgument(f"seconds_{name} is {value}; it must be from 0 to {MAX_SECONDS}")
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        if not 1 / MAX_SPEEDUP <= require_number("speedup", self.speedup) <= MAX_SPEEDUP:
            raise InvalidArgument(f"speedup is {self.speedup}; it must be from {1 / MAX_SPEEDUP:g} to {MAX_SPEEDUP:g}")

    def step_seconds(
        self,
        num_prompt_tokens: int,
        num_decodes: int,
        num_context_tokens: int,
        num_moved_blocks: int = 0,
        num_attended: float = 0.0,
    ) -> float:
        """Return the duration of a step. `num_attended` sums, over prompt tokens, the tokens that each attends to."""
        return (
            self.seconds_per_step
            + self.seconds_per_prompt_token * num_prompt_tokens
            + self.seconds_per_decode * num_decodes
            + self.seconds_per_context_token * num_context_tokens
            + self.seconds_per_moved_block * num_moved_blocks
            + self.seconds_per_attention * num_attended
        )

    def prompt_seconds(self, num_cached: int, num_tokens: int) -> float:
        """Return the time to compute tokens `num_cached` to `num_tokens` of a prompt, without a step's fixed part."""
        attended = self.seconds_per_attention * (num_tokens + num_cached) / 2
        return (num_tokens - num_cached) * (self.seconds_per_prompt_token + attended)


#: Named devices. Their constants are computed from FLOPs and bandwidths at 40 to 50 % (memory: 80 %) of the peak, not
#: measured. "8b": Llama 8B in bf16 with an fp8 cache on one H100. "70b": Llama 70B in fp8 with an fp8 cache on four.
DEVICES = {
    "default": ServiceModel(),
    "8b": ServiceModel(7e-3, 32e-6, 20e-6, 24e-9, 1.05e-9),
    "70b": ServiceModel(9e-3, 44e-6, 20e-6, 15e-9, 1.46e-9),
}


@dataclass(slots=True)
class _Job:
    """A request in progress. `seq` is its handle in the cache, `num_chosen` its output tokens so far."""

    request: TraceRequest
    arrival: float
    prompt: NDArray[np.int32]
    output_token: int
    num_output: int
    num_chosen: int = 0
    seq: int = 0
    is_decoding: bool = False
    started: bool = False
    admitted: bool = False

    def tokens(self) -> NDArray[np.int32]:
        """Return all known tokens: the prompt, and the output from before a preemption."""
        return np.concatenate([self.prompt, np.full(self.num_chosen, self.output_token, np.int32)])


@dataclass(slots=True)
class _Batch:
    """The jobs of a step, and the tokens that each computes."""

    jobs: list[_Job] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_moved_blocks: int = 0


class TimedRun:
    """A replay by timestamps, first come, first served, with continuous batching.

    Running requests hold their blocks. If one gets no block, the youngest is preempted: it returns to the head of the
    queue and later recomputes the tokens that are no longer cached.
    """

    def __init__(
        self,
        trace: Trace,
        cache: KVCacheManager,
        tally: Tally,
        causes: MissCounter | None,
        service: ServiceModel,
        strict: bool,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        self._trace = trace
        self._cache = cache
        self._tally = tally
        self._causes = causes
        self._service = service
        self._strict = strict
        self._recorder = recorder
        self._now = 0.0
        self._last_arrival = 0.0
        self._num_steps = 0
        #: Preempted requests, and the next one to admit. Later arrivals stay in the trace, so that memory is bounded
        #: even if requests arrive faster than they are served.
        self._waiting: deque[_Job] = deque()
        self._arriving: Iterator[_Job] = iter(())
        self._following: _Job | None = None
        self._running: list[_Job] = []
        self._first_token: list[float] = []
        self._queueing: list[float] = []

    def run(self, on_request: Callable[[int], None] | None) -> SimulatedTime:
        """Run the trace to its end."""
        self._arriving = self._jobs(on_request)
        self._following = next(self._arriving, None)
        while self._following is not None or self._waiting or self._running:
            if self._following is not None and not self._waiting and not self._running:
                self._now = max(self._now, self._following.arrival)
            self._admit()
            self._step()
        return SimulatedTime(
            self._last_arrival,
            self._now,
            self._num_steps,
            _percentiles(self._first_token),
            _percentiles(self._queueing),
        )

    def _jobs(self, on_request: Callable[[int], None] | None) -> Iterator[_Job]:
        """Yield the requests that fit at all, as they arrive."""
        expansion = Expansion(self._trace)
        for number, request in enumerate(self._trace, 1):
            problem = explain_misfit(self._cache.config, request)
            if problem:
                self._tally.refuse(number, problem, self._strict)
            else:
                prompt, output = expansion.prompt(request), expansion.output(request)
                self._last_arrival = arrival = request.arrival / self._service.speedup
                if arrival > MAX_ARRIVAL:
                    raise TraceError(f"request {number} arrives after {arrival:g} s; the limit is {MAX_ARRIVAL} s")
                self._note("arrived", arrival)
                yield _Job(request, arrival, prompt, int(output[0]), len(output))
            if on_request is not None and number % REPORT_EVERY == 0:
                on_request(number)

    def _admit(self) -> None:
        """Start waiting requests while the manager accepts them and the step has room for their prompts."""
        left = self._service.max_num_batched_tokens - len(self._running)
        while left > 0 and (job := self._next_waiting()) is not None:
            try:
                job.seq = self._cache.allocate(job.tokens(), resumed=job.started)
            except (OutOfBlocks, OutOfRows):
                break
            self._running.append(self._waiting.popleft())
            self._note("resumed" if job.admitted else "started", self._now)
            job.admitted = True
            left -= self._num_left(job)
        self._tally.peak_running = max(self._tally.peak_running, len(self._running))

    def _find_causes(self, job: _Job) -> None:
        """Count hits and misses of a prompt that is about to be computed for the first time."""
        reachable, hittable = (0, 0) if self._causes is None else self._causes.add(job.request)
        if self._recorder is None:
            return
        num_hit = self._cache.num_computed_tokens(job.seq)
        self._note("prompt_tokens", self._now, len(job.prompt))
        self._note("hit_tokens", self._now, num_hit)
        if self._causes is not None:
            hittable = max(hittable, num_hit)
            self._note("evicted_tokens", self._now, hittable - num_hit)
            self._note("never_seen_tokens", self._now, reachable - hittable)
            self._note("tail_tokens", self._now, len(job.prompt) - reachable)

    def _note(self, name: str, time: float, amount: int = 1) -> None:
        if self._recorder is not None:
            self._recorder.note(name, time, amount)

    def _next_waiting(self) -> _Job | None:
        if not self._waiting and self._following is not None and self._following.arrival <= self._now:
            self._waiting.append(self._following)
            self._following = next(self._arriving, None)
        return self._waiting[0] if self._waiting else None

    def _num_left(self, job: _Job) -> int:
        return self._cache.num_tokens(job.seq) - self._cache.num_computed_tokens(job.seq)

    def _step(self) -> None:
        batch = self._reserve()
        num_decodes = sum(job.is_decoding for job in batch.jobs)
        context = sum(len(job.prompt) + job.num_chosen for job in batch.jobs if job.is_decoding)
        for job in batch.jobs:
            if not job.started:
                job.started = True
                self._queueing.append(self._now - job.arrival)
                self._find_causes(job)
        num_prompt_tokens = sum(batch.counts) - num_decodes
        moved = batch.num_moved_blocks
        attended = sum(
            count * (self._cache.num_computed_tokens(job.seq) + count / 2)
            for job, count in zip(batch.jobs, batch.counts, strict=True)
            if not job.is_decoding
        )
        if self._recorder is not None:
            self._recorder.note("moved_blocks", self._now, moved)
            self._recorder.hold(self._now, self._cache.num_used_blocks)
        self._now += self._service.step_seconds(num_prompt_tokens, num_decodes, context, moved, attended)
        self._num_steps += 1
        if batch.jobs:
            self._commit(batch)
        if self._recorder is not None:
            self._recorder.hold(self._now, self._cache.num_used_blocks)

    def _reserve(self) -> _Batch:
        """Reserve slots for as many running requests as fit, preempting the youngest if blocks run short."""
        stalled: set[int] = set()
        num_moved = 0
        while True:
            batch = self._divide_budget(stalled)
            batch.num_moved_blocks = num_moved
            if not batch.jobs:
                return batch
            plan = self._cache.reserve([job.seq for job in batch.jobs], batch.counts)
            num_moved = batch.num_moved_blocks = num_moved + self._tally.move(plan)
            if plan.all_fit:
                return batch
            status = plan.status.tolist()
            stalled |= {
                job.seq
                for job, fate in zip(batch.jobs, status, strict=True)
                if fate == SeqStatus.WAITS_FOR_PREFIX.value
            }
            if SeqStatus.NO_BLOCKS.value in status:
                victim = self._running.pop()
                self._cache.free(victim.seq)
                victim.is_decoding = False
                self._waiting.appendleft(victim)
                self._tally.num_preemptions += 1
                self._note("preempted", self._now)

    def _divide_budget(self, stalled: set[int]) -> _Batch:
        """Choose decodes first, one token each, then prompts in order of arrival."""
        batch, budget = _Batch(), self._service.max_num_batched_tokens
        for wants_decoding in (True, False):
            for job in self._running:
                if job.is_decoding is wants_decoding and budget > 0 and job.seq not in stalled:
                    count = 1 if wants_decoding else min(self._num_left(job), budget)
                    batch.jobs.append(job)
                    batch.counts.append(count)
                    budget -= count
        return batch

    def _commit(self, batch: _Batch) -> None:
        next_tokens: list[int] = []
        ended: list[_Job] = []
        for job, count in zip(batch.jobs, batch.counts, strict=True):
            next_tokens.append(self._choose(job, count, ended))
        self._cache.commit([job.seq for job in batch.jobs], batch.counts, next_tokens)
        if ended:
            self._cache.free([job.seq for job in ended])
            freed = {job.seq for job in ended}
            self._running = [job for job in self._running if job.seq not in freed]

    def _choose(self, job: _Job, count: int, ended: list[_Job]) -> int:
        """Return the next token; -1 while the prompt is incomplete, and for the last token, which is never computed."""
        if not job.is_decoding and count < self._num_left(job):
            return -1
        job.is_decoding = True
        job.num_chosen += 1
        if job.num_chosen == 1:
            self._first_token.append(self._now - job.arrival)
        if job.num_chosen < job.num_output:
            return job.output_token
        ended.append(job)
        self._note("finished", self._now)
        num_computed = len(job.prompt) + job.num_chosen - 1
        self._tally.finish(num_computed, job.request.num_output_tokens, self._cache.config.block_size)
        return -1


def _percentiles(seconds: list[float]) -> tuple[float, float, float]:
    if not seconds:
        return 0.0, 0.0, 0.0
    median, ninety, ninety_nine = np.percentile(seconds, [50, 90, 99]).tolist()
    return median, ninety, ninety_nine
