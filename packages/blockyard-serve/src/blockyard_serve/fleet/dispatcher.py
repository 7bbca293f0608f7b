"""Sends jobs to replicas. If a replica is lost, its jobs continue on another one; their clients notice a pause.

The ingress stores the tokens that a client has received. For one completion without logprobs it sends prompt and
tokens to the next replica, which continues the answer (`Engine.add_request`). Several completions, or logprobs, are
computed again from the start with the same seed, and tokens that the client has are skipped. Either way no token
is sent twice, and the answer is that of an undisturbed run, provided that the model's numbers are equal (float32).

If some replicas prefill for others, a long prompt goes to one of them first, for its first token. The request then
continues on another replica in the same way, and loads its blocks from the tiers that both share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from blockyard.routing import Choice
from blockyard.tenants import Roster, tenant_groups
from blockyard_engine import GenerationResult, NewToken

from ..errors import ApiError, overloaded, unavailable
from ..jobs.job import Event, Job
from ..jobs.queue_slots import QueueSlots
from ..jobs.request_metrics import RequestMetrics
from .fleet_metrics import FleetMetrics
from .replica_request import ReplicaRequest
from .shared import SharedFleet

_log = logging.getLogger("blockyard_serve")

#: Seconds for a stream to notice that its reader has stopped; it cannot be closed before.
END_SECONDS = 1.0

#: An async iterator of lists of events, with a `cancel`; Ray's `DeploymentResponseGenerator` is one.
Send = Callable[[ReplicaRequest], Any]


class ReplicaLost(Exception):
    """A replica failed before its answer was complete."""


class ReplicaFull(Exception):
    """A replica has no queue slots for this tenant now (429); another one may."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """How a fleet routes requests and resumes those of lost replicas.

    Attributes:
        cost: name of the router's cost.
        heartbeat_timeout: seconds without a message after which a replica is not trusted.
        resumes: how often a request may continue on another replica; 0 for never.
        progress_timeout: seconds without a message after which a replica counts as lost; it sends one every second.
        prefill_tokens: a prompt is first sent to a prefill replica if at least this many of its tokens are cached on no
            decoding replica.
    """

    cost: str = "robust"
    heartbeat_timeout: float = 3.0
    resumes: int = 3
    progress_timeout: float = 5.0
    prefill_tokens: int = 512


@dataclass(slots=True)
class Progress:
    """Progress of a job over all attempts.

    Attributes:
        tokens: tokens that the client has, by completion.
        avoid: replicas that were lost.
        full: replicas that refused it with 429.
    """

    tokens: list[list[int]]
    avoid: list[str] = field(default_factory=list)
    full: set[str] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the client has."""
        return sum(map(len, self.tokens))


@dataclass(slots=True)
class Attempt:
    """One attempt to run a job on a replica. A late callback of the router only affects its own attempt.

    Attributes:
        replica: the replica; "" until one is chosen.
        number: the router's number of the attempt.
        claimed: tokens that the router expects the replica to have; -1 if unknown.
        last_event_at: time of the last message, in seconds of `time.monotonic`.
    """

    replica: str = ""
    number: str = ""
    claimed: int = 0
    last_event_at: float = field(default_factory=time.monotonic)

    def record_choice(self, number: str, choice: Choice) -> None:
        """Store the router's choice. Called in its thread."""
        self.replica, self.number, self.claimed = choice.replica or "", number, choice.num_tokens
        self.last_event_at = time.monotonic()

    def reassign(self, replica: str) -> None:
        """Store that another replica than the chosen one took the request; its hits are unknown."""
        if replica != self.replica:
            self.replica, self.claimed = replica, -1


class TraceHeaders:
    """Extracts trace headers. The replica makes the spans."""

    def context_of(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of W3C Trace Context."""
        return {name: headers[name] for name in ("traceparent", "tracestate", "baggage") if name in headers}


class Dispatcher:
    """Runs jobs on the replicas of a fleet (a `JobRunner`). Only `check_ranks` may be called outside the event loop.

    Args:
        send: sends a request to the replica that the router chooses.
        fleet: the router's state.
        metrics: counts hits and lost replicas.
        capacity: completions that may wait and run together.
        policy: how requests are routed and resumed.
        retry_after_seconds: `Retry-After` of refused requests.
        roster: tenants that share the pool of each replica.
    """

    tracer = TraceHeaders()

    def __init__(
        self,
        send: Send,
        fleet: SharedFleet,
        metrics: FleetMetrics,
        requests: RequestMetrics,
        capacity: int,
        policy: RoutingPolicy,
        retry_after_seconds: int = 1,
        roster: Roster | None = None,
    ) -> None:
        self.capacity = capacity
        self._send = send
        self._fleet = fleet
        self._metrics = metrics
        self._requests = requests
        self._policy = policy
        self._retry_after = retry_after_seconds
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._slots = QueueSlots(capacity, roster or Roster(tenant_groups(())))
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        return self._refusal

    def start(self) -> None: ...

    def check_ranks(self) -> str | None:
        """Return `refusal`, or an error if no replica is ready."""
        return self._refusal or (None if self._fleet.num_replicas else "no replica is ready")

    def require_capacity(self, num_completions: int = 1, tenant: int = -1) -> None:
        if self._refusal is not None:
            self._requests.count_refusal("not_serving")
            raise unavailable(self._refusal, self._retry_after)
        if (full := self._slots.refusal(num_completions, tenant)) is not None:
            self._requests.count_refusal("queue_full")
            raise overloaded(full, self._retry_after)

    def submit(self, jobs: list[Job]) -> None:
        num_completions = sum(job.num_completions for job in jobs)
        self.require_capacity(num_completions, jobs[0].tenant)
        self._slots.take(num_completions, jobs[0].tenant)
        for job in jobs:
            self._tasks[job] = asyncio.ensure_future(self._run(job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            task = self._tasks.get(job)
            if task is not None and not job.is_over:
                self._requests.cancelled.inc()
                task.cancel()

    def refuse(self, why: str) -> None:
        self._refusal = why

    def end_all(self, error: ApiError) -> None:
        for job, task in list(self._tasks.items()):
            self._end(job, error)
            task.cancel()

    def stop(self, timeout: float) -> bool:  # noqa: ARG002
        self.refuse("the server has stopped")
        self.end_all(unavailable("the server has stopped", self._retry_after))
        return True

    async def _run(self, job: Job) -> None:
        progress = Progress([[] for _ in range(job.num_completions)])
        try:
            self._end(job, await self._last_event(job, progress))
        except Exception:  # a bug here must not leave a client waiting
            _log.exception("request %s failed in the dispatcher", job.name)
            self._end(job, unavailable("the fleet failed on this request; its log says why", self._retry_after))
        finally:
            if self._tasks.pop(job, None) is not None:
                self._slots.take(-job.num_completions, job.tenant)

    async def _last_event(self, job: Job, progress: Progress) -> GenerationResult | ApiError:
        """Run a job until it ends, on several replicas if needed; return its result or error."""
        num_losses = 0
        hands_over = self._should_hand_over(job)
        while True:
            attempt = Attempt()
            try:
                last = await self._try(job, progress, attempt, hands_over)
                if last is not None:
                    return last
                hands_over = False
            except ReplicaFull as full:
                hands_over = False
                is_repeated = attempt.replica in progress.full
                progress.full.add(attempt.replica)
                if is_repeated or progress.full.issuperset(self._fleet.others()):
                    return full.error
            except ReplicaLost as loss:
                num_losses, hands_over = num_losses + 1, False
                self._metrics.count_loss(attempt.replica)
                allowed = self._policy.resumes if job.resumes else 0
                _log.warning("request %s lost its replica %s: %s", job.name, attempt.replica or "-", loss)
                if num_losses > allowed:
                    why = f"{num_losses} times" if allowed else "and resuming is off"
                    return unavailable(f"the replica was lost, {why}: {loss}", self._retry_after)
                self._metrics.count_resume(progress.num_tokens)
                progress.avoid.append(attempt.replica)

    def _should_hand_over(self, job: Job) -> bool:
        """Return whether a prefilling replica computes the prompt first. O(prompt + replicas)."""
        prefills, others = self._fleet.prefills, self._fleet.others()
        if not prefills or not others or not _can_continue(job) or job.sampling.max_tokens == 1:
            return False
        (hits,) = self._fleet.hits([job.prompt.token_ids], job.extra_keys)
        most = max((hits.get(name, 0) for name in others), default=0)
        return len(job.prompt.token_ids) - most >= self._policy.prefill_tokens

    async def _try(
        self, job: Job, progress: Progress, attempt: Attempt, hands_over: bool
    ) -> GenerationResult | ApiError | None:
        """Run a job on one replica. Return its result or error; None if it has handed over."""
        request = _request_of(job, progress, hands_over)
        request.avoid = (
            *progress.avoid,
            *progress.full,
            *(self._fleet.others() if hands_over else self._fleet.prefills),
        )
        request.on_choice, request.on_reassigned = partial(self._record_choice, job, attempt), attempt.reassign
        skip = [0] * job.num_completions if request.answer_prefix else [len(tokens) for tokens in progress.tokens]
        was_resumed = progress.num_tokens > 0
        stream = self._send(request)
        is_first = True
        try:
            async with aclosing(self._events(stream, attempt)) as messages:
                async for events in messages:
                    if is_first and events:
                        is_first = False
                        self._fleet.record_first_token(attempt.number)
                    last = self._pass_on(job, progress, events, skip)
                    if isinstance(last, ApiError) and last.status == 503:
                        raise ReplicaLost(last.message)  # it is stopping; others may serve
                    if isinstance(last, ApiError) and last.status == 429:
                        raise ReplicaFull(last)
                    if last is not None:
                        if isinstance(last, GenerationResult) and not was_resumed:
                            self._metrics.count_claim(attempt.replica, attempt.claimed, last)
                        stream = None
                        return last
            if hands_over and progress.num_tokens:
                self._metrics.num_handed_over += 1
                return None
            raise ReplicaLost("its stream ended before the answer was complete")
        finally:
            if stream is not None:
                with suppress(Exception):
                    stream.cancel()  # a replica that was only slow must stop

    async def _events(self, stream: Any, attempt: Attempt) -> AsyncGenerator[list[Event], None]:
        """Yield a replica's messages. Raise `ReplicaLost` if it fails or exceeds the progress timeout."""
        coming: asyncio.Future[list[Event]] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(stream))
                done, _ = await asyncio.wait([coming], timeout=self._policy.progress_timeout / 4)
                if not done:
                    # Without a choice, it waits for a replica as long as its client waits.
                    if attempt.replica and time.monotonic() - attempt.last_event_at > self._policy.progress_timeout:
                        raise ReplicaLost(f"it sent no message for {self._policy.progress_timeout:g} s")
                    continue
                try:
                    events = coming.result()
                except StopAsyncIteration:
                    return
                except Exception as error:
                    message, _, _ = str(error).strip().partition("\n")
                    raise ReplicaLost(f"{type(error).__name__}: {message}") from None
                coming = None
                attempt.last_event_at = time.monotonic()
                yield events
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(BaseException):
                    await asyncio.wait([coming], timeout=END_SECONDS)

    def _record_choice(self, job: Job, attempt: Attempt, number: str, choice: Choice) -> None:
        attempt.record_choice(number, choice)
        self._metrics.choices.append((job.name, choice))

    def _pass_on(
        self, job: Job, progress: Progress, events: list[Event], skip: list[int]
    ) -> GenerationResult | ApiError | None:
        """Send new tokens to the client; return the result or error, if it has arrived."""
        now, counts = time.perf_counter(), [0] * job.num_completions
        last: GenerationResult | ApiError | None = None
        for event in events:
            if not isinstance(event, NewToken):
                last = event
            elif skip[event.index]:
                sent = progress.tokens[event.index]
                if event.token_id != sent[len(sent) - skip[event.index]]:
                    return unavailable(
                        "another replica computed a different answer, so this one cannot be resumed", self._retry_after
                    )
                skip[event.index] -= 1
            else:
                progress.tokens[event.index].append(event.token_id)
                counts[event.index] += 1
                job.mailbox.put(job.position, event)
        for index, number in enumerate(counts):
            if number:
                self._requests.count_tokens(job, index, number, now)
        return last

    def _end(self, job: Job, event: GenerationResult | ApiError) -> None:
        if job.is_over:
            return
        job.is_over = True
        if isinstance(event, ApiError):
            self._requests.count_failure()
        else:
            self._requests.count_end(job, event, time.perf_counter())
        job.mailbox.put(job.position, event)


def _can_continue(job: Job) -> bool:
    """Return whether another replica can continue the answer, instead of computing it again."""
    return job.num_completions == 1 and job.sampling.logprobs is None


def _request_of(job: Job, progress: Progress, hands_over: bool) -> ReplicaRequest:
    given = progress.tokens[0] if _can_continue(job) else []
    prompt = job.prompt.token_ids
    return ReplicaRequest(
        token_ids=np.array([*prompt, *given], np.int32),
        num_prompt=len(prompt),
        max_tokens=1 if hands_over else (job.sampling.max_tokens - len(given)) * job.num_completions,
        sampling=job.sampling,
        priority=job.priority,
        extra_keys=job.extra_keys,
        session=job.session,
        name=job.name,
        trace=job.parent if isinstance(job.parent, dict) else {},
        hands_over=hands_over,
    )
