"""Jobs go to replicas here; one whose replica is lost goes on at another, and its client sees a pause.

The ingress keeps what a client got of each answer. Of one completion without logprobs it sends prompt and tokens so far
to the next replica, which continues the answer (`Engine.add_request(answer_prefix=...)`). Several completions, or
logprobs, are computed again from the beginning under the same seed, and what the client has is left out. Either way no
token comes twice, and none that an undisturbed run would not have had, as far as the model's numbers are the same
(float32).

Where replicas compute prompts for the others, a long prompt goes to one of them first, for its first token; then the
request goes on elsewhere, in the same way, and what was computed comes by the tiers that both have.
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
from ..jobs.places import Places
from ..jobs.request_figures import RequestFigures
from .asks import ReplicaAsk
from .figures import FleetFigures
from .shared import SharedFleet

_log = logging.getLogger("blockyard_serve")

#: Seconds for a stream to take note that it is not read any more: until then it cannot be closed.
END_SECONDS = 1.0

#: An async iterator of lists of events, with a `cancel`; Ray's `DeploymentResponseGenerator` is one.
Send = Callable[[ReplicaAsk], Any]


class Lost(Exception):
    """A replica has not brought an answer to its end."""


class Full(Exception):
    """A replica takes no more of this tenant now (429): another one may. error: what it said."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Endurance:
    """Says what the loss of a replica may cost. resumes: how often a request may go on elsewhere; 0 for never.

    stall: seconds after which a replica without a word counts as lost; it says something each second. prefill_tokens:
    from how many tokens that no other replica has a prompt is computed by one of those that do that for the others.
    """

    resumes: int = 3
    stall: float = 5.0
    prefill_tokens: int = 512


@dataclass(slots=True)
class Progress:
    """Knows how far a job has come. tokens: what was passed on, by completion. avoid: replicas that it has lost.

    full: those that had no place for it.
    """

    tokens: list[list[int]]
    avoid: list[str] = field(default_factory=list)
    full: set[str] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were passed on."""
        return sum(map(len, self.tokens))


@dataclass(slots=True)
class Attempt:
    """Knows where a job is, this time: its replica, the number by which it is booked, the hits that were claimed.

    heard_at: seconds of `time.monotonic`. A word of the router that comes late is one about its own attempt.
    """

    replica: str = ""
    number: str = ""
    claimed: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    def chosen(self, number: str, choice: Choice) -> None:
        """Take note of the router's choice; called in its thread."""
        self.replica, self.number, self.claimed = choice.replica or "", number, choice.num_tokens
        self.heard_at = time.monotonic()

    def moved(self, replica: str) -> None:
        """Take note that another replica than the chosen one took it; nothing is claimed of that one."""
        if replica != self.replica:
            self.replica, self.claimed = replica, -1


class TraceHeaders:
    """Keeps the caller's span for the replica, which makes the spans."""

    def context_of(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that name it (W3C Trace Context)."""
        return {name: headers[name] for name in ("traceparent", "tracestate", "baggage") if name in headers}


class Dispatcher:
    """Runs jobs on the replicas of a fleet (a `JobRunner`). All but `ask_ranks` is called in the loop's thread.

    send: asks a replica that the router chooses. fleet: what the router knows. capacity: completions that may wait and
    run together. figures, requests: what is counted. roster: the tenants who share the pool of each replica.
    """

    tracer = TraceHeaders()

    def __init__(
        self,
        send: Send,
        fleet: SharedFleet,
        figures: FleetFigures,
        requests: RequestFigures,
        capacity: int,
        endurance: Endurance,
        retry_after_seconds: int = 1,
        roster: Roster | None = None,
    ) -> None:
        self.capacity = capacity
        self._send = send
        self._fleet = fleet
        self._figures = figures
        self._requests = requests
        self._endurance = endurance
        self._retry_after = retry_after_seconds
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._places = Places(capacity, roster or Roster(tenant_groups(())))
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Tells why no job is taken at all; None while it serves."""
        return self._refusal

    def start(self) -> None:
        """Begin to serve."""

    def ask_ranks(self) -> str | None:
        """Return `refusal`, or that there is no replica."""
        return self._refusal or (None if self._fleet.num_replicas else "no replica is ready")

    def require_place(self, num_completions: int = 1, tenant: int = -1) -> None:
        """Raise `ApiError` (429, 503) if that many would not be taken now. O(tenants).

        tenant: who asks, by number; -1 where that is not known yet.
        """
        if self._refusal is not None:
            self._requests.count_refusal("not_serving")
            raise unavailable(self._refusal, self._retry_after)
        if (full := self._places.refusal(num_completions, tenant)) is not None:
            self._requests.count_refusal("queue_full")
            raise overloaded(full, self._retry_after)

    def submit(self, jobs: list[Job]) -> None:
        """Take the jobs of one client, all or none. Raises `ApiError` (429, 503) if there is no place. O(jobs)."""
        num_completions = sum(job.num_completions for job in jobs)
        self.require_place(num_completions, jobs[0].tenant)
        self._places.take(num_completions, jobs[0].tenant)
        for job in jobs:
            self._tasks[job] = asyncio.ensure_future(self._carry(job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs whose client is gone, if they still wait or run; their replicas are told."""
        for job in jobs:
            task = self._tasks.get(job)
            if task is not None and not job.is_over:
                self._requests.cancelled.inc()
                task.cancel()

    def refuse(self, why: str) -> None:
        """Take no more jobs; those that wait or run go on."""
        self._refusal = why

    def end_all(self, error: ApiError) -> None:
        """End every job with an error."""
        for job, task in list(self._tasks.items()):
            self._end(job, error)
            task.cancel()

    def stop(self, timeout: float) -> bool:  # noqa: ARG002
        """End all."""
        self.refuse("the server has stopped")
        self.end_all(unavailable("the server has stopped", self._retry_after))
        return True

    # One job, from its first replica to its last.

    async def _carry(self, job: Job) -> None:
        progress = Progress([[] for _ in range(job.num_completions)])
        try:
            self._end(job, await self._last_event(job, progress))
        except Exception:  # a bug here must not leave a client without a word
            _log.exception("request %s could not be carried on", job.name)
            self._end(job, unavailable("the fleet failed on this request; its log says why", self._retry_after))
        finally:
            if self._tasks.pop(job, None) is not None:
                self._places.take(-job.num_completions, job.tenant)

    async def _last_event(self, job: Job, progress: Progress) -> GenerationResult | ApiError:
        """Return what ends a job; its tokens are passed on meanwhile."""
        num_losses = 0
        hands_over = self._is_handed_over(job)
        while True:
            attempt = Attempt()
            try:
                last = await self._try(job, progress, attempt, hands_over)
                if last is not None:
                    return last
                hands_over = False
            except Full as full:
                hands_over = False
                is_told_again = attempt.replica in progress.full
                progress.full.add(attempt.replica)
                if is_told_again or progress.full.issuperset(self._fleet.others()):
                    return full.error
            except Lost as loss:
                num_losses, hands_over = num_losses + 1, False
                self._figures.lost(attempt.replica)
                allowed = self._endurance.resumes if job.resumes else 0
                _log.warning("request %s lost its replica %s: %s", job.name, attempt.replica or "-", loss)
                if num_losses > allowed:
                    times = f"{num_losses} times" if allowed else "and the request is not to go on elsewhere"
                    return unavailable(f"the replica was lost, {times}: {loss}", self._retry_after)
                self._figures.resumed(progress.num_tokens)
                progress.avoid.append(attempt.replica)

    def _is_handed_over(self, job: Job) -> bool:
        """Say whether a replica computes the prompt for another one, which goes on. O(prompt + replicas)."""
        prefills, others = self._fleet.prefills, self._fleet.others()
        if not prefills or not others or not _goes_on(job) or job.sampling.max_tokens == 1:
            return False
        (hits,) = self._fleet.hits([job.prompt.token_ids], job.extra_keys)
        most = max((hits.get(name, 0) for name in others), default=0)
        return len(job.prompt.token_ids) - most >= self._endurance.prefill_tokens

    async def _try(
        self, job: Job, progress: Progress, attempt: Attempt, hands_over: bool
    ) -> GenerationResult | ApiError | None:
        """Have one replica answer; None where it has handed over. Raises `Lost` where it does not come to an end."""
        ask = _ask_of(job, progress, hands_over)
        ask.avoid = (*progress.avoid, *progress.full, *(self._fleet.others() if hands_over else self._fleet.prefills))
        ask.on_choice, ask.on_moved = partial(self._chosen, job, attempt), attempt.moved
        skip = [0] * job.num_completions if ask.given else [len(tokens) for tokens in progress.tokens]
        was_resumed = progress.num_tokens > 0
        stream = self._send(ask)
        is_first = True
        try:
            async with aclosing(self._heard(stream, attempt)) as heard:
                async for events in heard:
                    if is_first and events:
                        is_first = False
                        self._fleet.first_token(attempt.number)
                    last = self._pass_on(job, progress, events, skip)
                    if isinstance(last, ApiError) and last.status == 503:
                        raise Lost(last.message)  # it serves no more; others may
                    if isinstance(last, ApiError) and last.status == 429:
                        raise Full(last)
                    if last is not None:
                        if isinstance(last, GenerationResult) and not was_resumed:
                            self._figures.claim(attempt.replica, attempt.claimed, last)
                        stream = None
                        return last
            if hands_over and progress.num_tokens:
                self._figures.num_handed_over += 1
                return None
            raise Lost("its answer ended before its end")
        finally:
            if stream is not None:
                with suppress(Exception):
                    stream.cancel()  # a replica that was only slow has not to go on

    async def _heard(self, stream: Any, attempt: Attempt) -> AsyncGenerator[list[Event], None]:
        """Yield what a replica says. Raises `Lost` where it fails, or is silent for too long once it was chosen."""
        coming: asyncio.Future[list[Event]] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(stream))
                done, _ = await asyncio.wait([coming], timeout=self._endurance.stall / 4)
                if not done:
                    # Without a choice it waits for a replica to be there, as long as its client does.
                    if attempt.replica and time.monotonic() - attempt.heard_at > self._endurance.stall:
                        raise Lost(f"it has said nothing for {self._endurance.stall:g} s")
                    continue
                try:
                    events = coming.result()
                except StopAsyncIteration:
                    return
                except Exception as error:
                    said, _, _ = str(error).strip().partition("\n")
                    raise Lost(f"{type(error).__name__}: {said}") from None
                coming = None
                attempt.heard_at = time.monotonic()
                yield events
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(BaseException):
                    await asyncio.wait([coming], timeout=END_SECONDS)

    def _chosen(self, job: Job, attempt: Attempt, number: str, choice: Choice) -> None:
        """Take note of a choice; called in the router's thread."""
        attempt.chosen(number, choice)
        self._figures.choices.append((job.name, choice))

    def _pass_on(
        self, job: Job, progress: Progress, events: list[Event], skip: list[int]
    ) -> GenerationResult | ApiError | None:
        """Pass the tokens on that the client has not; return what ended the job, if that came."""
        now, counts = time.perf_counter(), [0] * job.num_completions
        last: GenerationResult | ApiError | None = None
        for event in events:
            if not isinstance(event, NewToken):
                last = event
            elif skip[event.index]:
                had = progress.tokens[event.index]
                if event.token_id != had[len(had) - skip[event.index]]:
                    return unavailable("the answer could not be gone on with elsewhere", self._retry_after)
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


def _goes_on(job: Job) -> bool:
    """Say whether another replica can go on behind what one has given."""
    return job.num_completions == 1 and job.sampling.logprobs is None


def _ask_of(job: Job, progress: Progress, hands_over: bool) -> ReplicaAsk:
    given = progress.tokens[0] if _goes_on(job) else []
    prompt = job.prompt.token_ids
    return ReplicaAsk(
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
