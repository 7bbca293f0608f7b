"""The thread that owns the engine: it runs commands between steps, steps, and delivers tokens.

A model's exception does not say which request caused it. So after a failed step each of its requests is run alone,
and those that fail alone are aborted. The others compute their next token and keep it: nothing is lost or repeated.
If none fails alone (for example, memory was short), all continue. Each trial yields a token, so even a batch that
fails every time ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from blockyard.errors import RankError
from blockyard.metrics import TenantTokens, tenant_of
from blockyard_engine import Engine, GenerationResult, StepReport

from ..errors import ApiError, as_api_error, failed, overloaded, unavailable
from .engine_reading import EngineReading
from .job import Event, Job
from .queue_slots import QueueSlots
from .request_metrics import RequestMetrics
from .status_line import StatusLine
from .tracing import RequestTracer

AnswerT = TypeVar("AnswerT")
#: Longest wait for a command while the order of admission holds all requests back.
_LONGEST_PAUSE_SECONDS = 1.0
_log = logging.getLogger("blockyard_serve")


class EngineThread:
    """Runs an engine for many clients. Every method may be called from any thread.

    Args:
        engine: the engine; from now on only this thread may use it.
        capacity: completions that may wait and run together.
        model_name: label of the metrics.
        retry_after_seconds: `Retry-After` of refused requests.
        clock: returns seconds, on the same clock as `Job.arrived_at`.
        status_seconds: seconds of work between two status lines in the log; 0 for none.
        tenant_metrics: number of tenants that the metrics show by name; 0 for none.
        tracer: receives the spans of requests; None for no tracing.

    Attributes:
        reading: the engine between two steps, as last read.
        num_steps: steps so far.
        on_result: called in the thread with each job that finished and its result, if set.
    """

    def __init__(
        self,
        engine: Engine,
        capacity: int,
        model_name: str,
        retry_after_seconds: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        status_seconds: float = 10.0,
        tenant_metrics: int = 0,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.capacity = capacity
        self.tracer = tracer
        self._clock = clock
        self.labels = {"engine": "0", "model_name": model_name}
        self.request_metrics = RequestMetrics(self.labels, engine.max_model_len)
        self.tenants = TenantTokens(tenant_metrics, self.labels) if tenant_metrics else None
        self.reading = EngineReading.of(engine, 0)
        self._engine = engine
        self._status = StatusLine(engine, status_seconds, clock())
        self._retry_after = retry_after_seconds
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._events: list[tuple[Job, Event]] = []
        self._lock = threading.Lock()
        self._slots = QueueSlots(capacity, engine.limits.roster)
        self._refusal: str | None = None
        self._is_stopping = False
        self._final_error: ApiError | None = None
        self._num_failed_steps = 0
        self.num_steps = 0
        self.on_result: Callable[[Job, GenerationResult], None] | None = None
        self._thread = threading.Thread(target=self._run, name="blockyard-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def refusal(self) -> str | None:
        """The reason why no job is accepted; None while the thread serves."""
        if self._refusal is None and not self._thread.is_alive():
            return "the engine is not running"
        return self._refusal

    def check_ranks(self) -> str | None:
        """Return `refusal` after checking that every rank responds; may block for seconds."""
        if self.refusal is None and (problem := self._engine.ping_ranks()) is not None:
            return f"the engine has failed: {problem}"
        return self.refusal

    def require_capacity(self, num_completions: int = 1, tenant: int = -1) -> None:
        """Raise `ApiError` (429, 503) if the queue has no slots for a request. Called before its body is read. O(1).

        Args:
            num_completions: number of slots; 0 only checks that the engine serves.
            tenant: number of the tenant; -1 if it is not known yet.
        """
        refusal = self.refusal
        if refusal is not None:
            self.request_metrics.count_refusal("not_serving")
            raise unavailable(refusal, self._retry_after)
        if (full := self._slots.refusal(num_completions, tenant)) is not None:
            self.request_metrics.count_refusal("queue_full")
            raise overloaded(full, self._retry_after)

    def submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one client, all or none. Raises `ApiError` (429, 503) if they do not fit. O(jobs)."""
        num_completions = sum(job.num_completions for job in jobs)
        with self._lock:  # also taken when the thread ends, so that no command stays unanswered
            self.require_capacity(num_completions, jobs[0].tenant)
            self._slots.take(num_completions, jobs[0].tenant)
            for job in jobs:
                self._commands.put(partial(self._admit, job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel jobs whose client has left. Their blocks are free before the next step."""
        for job in jobs:
            if not job.is_over:
                self._commands.put(partial(self._cancel, job))

    def call(self, function: Callable[[Engine], AnswerT]) -> Future[AnswerT]:
        """Call `function` with the engine in its thread between two steps; return a future of the result."""
        answer: Future[AnswerT] = Future()

        def command() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(self._engine))
                except BaseException as error:
                    answer.set_exception(error)

        with self._lock:
            if self._final_error is None:
                self._commands.put(command)
            else:
                answer.set_exception(self._stopped())
        return answer

    @property
    def is_busy(self) -> bool:
        """True if any job waits or runs."""
        return self._slots.num_taken > 0

    def read(self) -> Future[EngineReading]:
        """Update `reading` between two steps; return a future of it. O(num_blocks + requests)."""
        return self.call(self._read)

    def job_names(self) -> dict[int, tuple[str, int]]:
        """Return name and number of completions of each job by request id. Only in the thread. O(jobs)."""
        return {request_id: (job.name, job.num_completions) for request_id, job in self._jobs.items()}

    def refuse(self, why: str) -> None:
        """Refuse new jobs for the reason `why`; queued and running jobs continue."""
        self._refusal = why

    def end_all(self, error: ApiError) -> None:
        """End every job with `error`."""
        self._commands.put(partial(self._end_all, error))

    def stop(self, timeout: float) -> bool:
        """Stop the thread and end its jobs; return False if its current step took longer than `timeout`."""

        def stop() -> None:
            self._is_stopping = True

        self.refuse("the server has stopped")
        self.end_all(self._stopped())
        self._commands.put(stop)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        def lose(why: str) -> None:
            if self._final_error is None:
                raise RankError(why)

        self._engine.on_rank_failure(lambda why: self._commands.put(partial(lose, why)))
        try:
            while not self._is_stopping:
                self._run_commands()
                if self._engine.has_unfinished and not self._is_stopping:
                    self._step()
                self._deliver_events()
        except BaseException as error:
            _log.exception("the engine thread ended")
            self._refusal = (
                f"the engine has failed: {error}" if isinstance(error, RankError) else "the engine has failed"
            )
            self._shut_down(failed())
        else:
            self._shut_down(self._stopped())

    def _shut_down(self, final_error: ApiError) -> None:
        """End all jobs, and run pending commands so that none is left unanswered."""
        with self._lock:
            self._final_error = final_error
        for job in list(self._jobs.values()):
            self._end(job, final_error)
        while not self._commands.empty():
            self._commands.get()()
        self._deliver_events()
        self._read(self._engine)

    def _stopped(self) -> ApiError:
        return unavailable(self._refusal or "the server has stopped", self._retry_after)

    def _run_commands(self) -> None:
        """Run pending commands; block for one if there is nothing to compute, or nothing that may start now."""
        pause = min(self._engine.idle_seconds, _LONGEST_PAUSE_SECONDS) if self._engine.has_unfinished else None
        if pause is None or pause > 0:
            since = self._clock()
            command = None
            with suppress(queue.Empty):
                command = self._commands.get(timeout=pause)
            self._status.skip(self._clock() - since)
            if command is not None:
                command()
        while not self._is_stopping:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _read(self, engine: Engine) -> EngineReading:
        now = self._clock()
        waits = [now - job.arrived_at for job in self._jobs.values() if job.started_at is None]
        self.reading = EngineReading.of(engine, self._num_failed_steps, max(waits, default=0.0))
        return self.reading

    def _admit(self, job: Job) -> None:
        if self._final_error is not None:
            self._end(job, self._final_error)
            return
        try:
            job.request_id = self._engine.add_request(
                job.prompt,
                job.sampling,
                priority=job.priority,
                extra_keys=job.extra_keys,
                session=job.session,
                answer_prefix=job.answer_prefix,
            )
        except Exception as error:
            self._end(job, as_api_error(error))
        else:
            self._jobs[job.request_id] = job

    def _cancel(self, job: Job) -> None:
        if job.is_over:
            return
        result = None if job.request_id is None else self._engine.abort_request(job.request_id)
        self.request_metrics.cancelled.inc()
        self._trace(job, result, "the client left or the deadline passed")
        self._close(job)

    def _end_all(self, error: ApiError) -> None:
        self._engine.abort_all()
        for job in list(self._jobs.values()):
            self._end(job, error)

    def _step(self) -> None:
        began = self._clock()
        self.num_steps += 1
        try:
            report = self._engine.step(keep_on_error=True)
        except RankError:
            raise  # not a request's fault, and no further step is possible
        except Exception as error:
            self._note_started(began)
            self._recover(error)
        else:
            self._note_started(began)
            self._hand_out(report)
            self._engine.pause_for_tiers(report)

    def _note_started(self, began: float) -> None:
        for request_id in self._engine.last_step_ids:
            job = self._jobs.get(request_id)
            if job is not None and job.started_at is None:
                job.started_at = began

    def _recover(self, error: Exception) -> None:
        _log.error("a step failed: %s; trying each of its requests alone", error, exc_info=error)
        self._num_failed_steps += 1
        has_progress = False
        for trial in try_alone(self._engine):
            for report in trial.reports:
                self._hand_out(report)
            if trial.error is not None:
                job = self._jobs[trial.request_id]
                _log.error("request %s failed alone: %s", job.name, trial.error)
                self._end(job, failed())
            has_progress |= trial.made_progress
        if not has_progress:
            raise error  # no request caused it: the same step would fail forever

    def _hand_out(self, report: StepReport) -> None:
        now = self._clock()
        self._status.note(report, now)
        self.request_metrics.count_step(report.num_tokens)
        # With speculation a completion may get several tokens in one step.
        counts = Counter((token.request_id, token.index) for token in report.new_tokens)
        for (request_id, index), number in counts.items():
            self.request_metrics.count_tokens(self._jobs[request_id], index, number, now)
        self._events += [(self._jobs[token.request_id], token) for token in report.new_tokens]
        for result in report.finished:
            self._finish(result, now)

    def _finish(self, result: GenerationResult, now: float) -> None:
        job = self._jobs[result.request_id]
        self.request_metrics.count_end(job, result, now)
        if self.tenants is not None:
            names = self._engine.limits.roster.names
            tenant = tenant_of(job.extra_keys) if len(names) == 1 else names[job.tenant]
            self.tenants.count(tenant, result.num_prompt_tokens, result.num_cached_tokens, result.misses)
        self._trace(job, result)
        if self.on_result is not None:
            self.on_result(job, result)
        self._end(job, result)

    def _trace(self, job: Job, result: GenerationResult | None, error: str = "") -> None:
        if self.tracer is not None:
            try:
                self.tracer.end(job, result, self._clock(), error)
            except Exception:  # of a user's tracer: the response matters more than its span
                _log.exception("recording the spans of request %s failed", job.name)

    def _end(self, job: Job, event: GenerationResult | ApiError) -> None:
        if isinstance(event, ApiError):
            self.request_metrics.count_failure()
            self._trace(job, None, event.message)
        self._events.append((job, event))
        self._close(job)

    def _close(self, job: Job) -> None:
        job.is_over = True
        if job.request_id is not None:
            self._jobs.pop(job.request_id, None)
        with self._lock:
            self._slots.take(-job.num_completions, job.tenant)

    def _deliver_events(self) -> None:
        """Pass the step's events to the clients' event loop in one call."""
        events, self._events = self._events, []
        if not events:
            return

        def deliver() -> None:
            for job, event in events:
                job.mailbox.put(job.position, event)

        try:
            events[0][0].mailbox.loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed: no client reads
            _log.warning("%d events had no reader", len(events))


@dataclass(slots=True)
class TrialResult:
    """Result of running one request alone: the reports of its steps, and the error that ended it, if any."""

    request_id: int
    reports: list[StepReport] = field(default_factory=list)
    error: Exception | None = None

    @property
    def made_progress(self) -> bool:
        """True if the request was aborted or computed something."""
        return self.error is not None or any(report.num_tokens for report in self.reports)


def try_alone(engine: Engine) -> Iterator[TrialResult]:
    """Run each request of the engine's last, failed step alone; abort those that fail.

    The step must have been run with `keep_on_error`. Takes one step per request, more if a prompt is computed in
    chunks.
    """
    for request_id in engine.last_step_ids:
        engine.preempt_all()  # with an empty pool each request fits
        yield _try(engine, request_id)
    engine.preempt_all()


def _try(engine: Engine, request_id: int) -> TrialResult:
    outcome = TrialResult(request_id)
    try:
        while True:
            report = engine.step(only=(request_id,), keep_on_error=True)
            outcome.reports.append(report)
            if report.new_tokens or report.finished or report.num_tokens == 0:
                return outcome
    except Exception as error:
        outcome.error = error
        engine.abort_request(request_id)
        return outcome
