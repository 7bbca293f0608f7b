"""The one thread that owns the engine: it takes jobs and cancellations between steps, steps, and hands out tokens.

Of a failed step each request is tried alone, and the one that fails alone is aborted: a model gives no name with its
error. Alone, the guilty request fails again, and the innocent ones compute their next token and keep it, so that
nothing of them is lost or repeated. If none fails alone (memory was short, say), all go on; each trial gives a token,
so even a batch that always fails comes to its end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from blockyard.errors import RankError
from blockyard.metrics import TenantTokens, tenant_of
from blockyard_engine import Engine, GenerationResult, NewToken, StepReport

from ..errors import ApiError, as_api_error, failed, overloaded, unavailable
from .engine_reading import EngineReading
from .job import Event, Job
from .places import Places
from .request_figures import RequestFigures
from .status_line import StatusLine
from .tracing import RequestTracer

AnswerT = TypeVar("AnswerT")
_log = logging.getLogger("blockyard_serve")


class EngineThread:
    """Runs an engine for many clients. Every method may be called from any thread.

    engine: the thread's own from now on. capacity: completions that may wait and run together.
    model_name: a label of the metrics. retry_after_seconds: what refused clients are told. clock: seconds, the same
    that jobs arrive by. status_seconds: of work between two lines of the log that say how it goes; 0 for none.
    tenant_metrics: tenants that the metrics show by name, 0 for none. tracer: gets spans of requests, if not None.

    reading: the engine between two steps, when it was last asked for.
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
        #: Of every metric, by name.
        self.labels = {"engine": "0", "model_name": model_name}
        self.request_figures = RequestFigures(self.labels, engine.max_model_len)
        self.tenants = TenantTokens(tenant_metrics, self.labels) if tenant_metrics else None
        self.reading = EngineReading.of(engine, 0)
        self._engine = engine
        self._status = StatusLine(engine, status_seconds, clock())
        self._retry_after = retry_after_seconds
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._letters: list[tuple[Job, Event]] = []
        self._lock = threading.Lock()
        self._places = Places(capacity, engine.limits.roster)
        self._refusal: str | None = None
        self._is_stopping = False
        self._last_word: ApiError | None = None
        self._num_failed_steps = 0
        #: Steps so far.
        self.num_steps = 0
        #: Told of each job that came to its end, in the thread; None for no call.
        self.on_result: Callable[[Job, GenerationResult], None] | None = None
        self._thread = threading.Thread(target=self._run, name="blockyard-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def refusal(self) -> str | None:
        """Return why no job is taken at all; None while the thread serves."""
        if self._refusal is None and not self._thread.is_alive():
            return "the engine does not run"
        return self._refusal

    def ask_ranks(self) -> str | None:
        """`refusal`, after a rank that has just ended too, or does not answer: it may wait for seconds."""
        if self.refusal is None and (silence := self._engine.ping_ranks()) is not None:
            return f"the engine has failed: {silence}"
        return self.refusal

    def require_place(self, num_completions: int = 1, tenant: int = -1) -> None:
        """Raise `ApiError` (429, 503) if that many would not be taken now: asked before a body is read. O(1).

        With 0 it asks whether the server serves at all. tenant: who asks, by number; -1 where that is not known yet.
        """
        refusal = self.refusal
        if refusal is not None:
            self.request_figures.count_refusal("not_serving")
            raise unavailable(refusal, self._retry_after)
        if (full := self._places.refusal(num_completions, tenant)) is not None:
            self.request_figures.count_refusal("queue_full")
            raise overloaded(full, self._retry_after)

    def submit(self, jobs: list[Job]) -> None:
        """Take the jobs of one client, all or none. Raises `ApiError` (429, 503) if there is no place. O(jobs)."""
        num_completions = sum(job.num_completions for job in jobs)
        with self._lock:  # a thread that fails takes it too, so that no order is left behind without an answer
            self.require_place(num_completions, jobs[0].tenant)
            self._places.take(num_completions, jobs[0].tenant)
            for job in jobs:
                self._orders.put(partial(self._admit, job))

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs whose client is gone, if they still wait or run: their blocks are free before the next step."""
        for job in jobs:
            if not job.is_over:
                self._orders.put(partial(self._withdraw, job))

    def ask(self, question: Callable[[Engine], AnswerT]) -> Future[AnswerT]:
        """Call `question` with the engine between two steps, in its thread; the future has its answer or error."""
        answer: Future[AnswerT] = Future()

        def order() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self._engine))
                except BaseException as error:
                    answer.set_exception(error)

        with self._lock:
            if self._last_word is None:
                self._orders.put(order)
            else:
                answer.set_exception(self._stopped())
        return answer

    @property
    def is_busy(self) -> bool:
        """Return whether a job waits or runs."""
        return self._places.num_taken > 0

    def read(self) -> Future[EngineReading]:
        """Read the engine between two steps; `reading` has it then too. O(num_blocks + requests)."""
        return self.ask(self._read)

    def job_names(self) -> dict[int, tuple[str, int]]:
        """Return name and completions of each job that waits or runs, by request id; only in the thread. O(jobs)."""
        return {request_id: (job.name, job.num_completions) for request_id, job in self._jobs.items()}

    def refuse(self, why: str) -> None:
        """Take no more jobs; those that wait or run go on."""
        self._refusal = why

    def end_all(self, error: ApiError) -> None:
        """End every job with an error."""
        self._orders.put(partial(self._end_all, error))

    def stop(self, timeout: float) -> bool:
        """End the thread, and what still runs with it; False if it did not end in time (a step takes longer)."""
        self.refuse("the server has stopped")
        self.end_all(self._stopped())
        self._orders.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        self._engine.on_rank_failure(lambda why: self._orders.put(partial(self._lose, why)))
        try:
            while not self._is_stopping:
                self._take_orders()
                if self._engine.has_unfinished and not self._is_stopping:
                    self._step()
                self._post_letters()
        except BaseException as error:
            _log.exception("the engine thread ended")
            self._refusal = (
                f"the engine has failed: {error}" if isinstance(error, RankError) else "the engine has failed"
            )
            self._close_down(failed())
        else:
            self._close_down(self._stopped())

    def _close_down(self, last_word: ApiError) -> None:
        """Nothing is computed any more: a request that waits, or comes in this moment, gets the last word."""
        with self._lock:
            self._last_word = last_word
        for job in list(self._jobs.values()):
            self._end(job, last_word)
        while not self._orders.empty():
            self._orders.get()()
        self._post_letters()
        self._read(self._engine)

    def _stopped(self) -> ApiError:
        return unavailable(self._refusal or "the server has stopped", self._retry_after)

    def _take_orders(self) -> None:
        """Carry out what was ordered; waits for an order where there is no request to go on with."""
        if not self._engine.has_unfinished:
            since = self._clock()
            order = self._orders.get()
            self._status.skip(self._clock() - since)
            order()
        while not self._is_stopping:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _read(self, engine: Engine) -> EngineReading:
        self.reading = EngineReading.of(engine, self._num_failed_steps)
        return self.reading

    def _lose(self, why: str) -> None:
        """A rank has ended while nothing was computed."""
        if self._last_word is None:
            raise RankError(why)

    def _stop(self) -> None:
        self._is_stopping = True

    def _admit(self, job: Job) -> None:
        if self._last_word is not None:
            self._end(job, self._last_word)
            return
        try:
            job.request_id = self._engine.add_request(
                job.prompt,
                job.sampling,
                priority=job.priority,
                extra_keys=job.extra_keys,
                session=job.session,
                answer_prefix=job.given,
            )
        except Exception as error:
            self._end(job, as_api_error(error))
        else:
            self._jobs[job.request_id] = job

    def _withdraw(self, job: Job) -> None:
        if job.is_over:
            return
        result = None if job.request_id is None else self._engine.abort_request(job.request_id)
        self.request_figures.cancelled.inc()
        self._trace(job, result, "the client left, or its time was over")
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
            raise  # no request is to blame, and no step can follow
        except Exception as error:
            self._note_started(began)
            self._recover(error)
        else:
            self._note_started(began)
            self._hand_out(report)
            self._engine.pause_for_tiers(report)

    def _note_started(self, began: float) -> None:
        """Note that the requests of the latest step wait no longer."""
        for request_id in self._engine.last_step_ids:
            job = self._jobs.get(request_id)
            if job is not None and job.started_at is None:
                job.started_at = began

    def _recover(self, error: Exception) -> None:
        """After a failed step: a request that fails alone gets the error, the others continue where they were."""
        _log.error("a step failed: %s; its requests are tried alone", error, exc_info=error)
        self._num_failed_steps += 1
        helped = False
        for outcome in try_alone(self._engine):
            self._conclude_trial(outcome)
            helped |= outcome.is_of_use
        if not helped:
            raise error  # it is not a request's: the same step would fail forever

    def _conclude_trial(self, outcome: StepOutcome) -> None:
        for report in outcome.reports:
            self._hand_out(report)
        if outcome.error is not None:
            job = self._jobs[outcome.request_id]
            _log.error("request %s failed alone: %s", job.name, outcome.error)
            self._end(job, failed())

    def _hand_out(self, report: StepReport) -> None:
        now = self._clock()
        self._status.note(report, now)
        self.request_figures.count_step(report.num_tokens)
        # Speculation gives a completion several tokens in one step.
        for (request_id, index), number in Counter(map(_completion_of, report.new_tokens)).items():
            self.request_figures.count_tokens(self._jobs[request_id], index, number, now)
        self._letters += [(self._jobs[token.request_id], token) for token in report.new_tokens]
        for result in report.finished:
            self._finish(result, now)

    def _finish(self, result: GenerationResult, now: float) -> None:
        job = self._jobs[result.request_id]
        self.request_figures.count_end(job, result, now)
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
            except Exception:  # a program's own tracer: its answer is worth more than its span
                _log.exception("the spans of request %s are lost", job.name)

    def _end(self, job: Job, event: GenerationResult | ApiError) -> None:
        if isinstance(event, ApiError):
            self.request_figures.count_failure()
            self._trace(job, None, event.message)
        self._letters.append((job, event))
        self._close(job)

    def _close(self, job: Job) -> None:
        job.is_over = True
        if job.request_id is not None:
            self._jobs.pop(job.request_id, None)
        with self._lock:
            self._places.take(-job.num_completions, job.tenant)

    def _post_letters(self) -> None:
        """Carry a step's events over to the clients' loop, in one call."""
        letters, self._letters = self._letters, []
        if not letters:
            return
        try:
            letters[0][0].mailbox.loop.call_soon_threadsafe(_deliver, letters)
        except RuntimeError:  # the loop is closed: no client reads any more
            _log.warning("%d events had no reader left", len(letters))


def _completion_of(token: NewToken) -> tuple[int, int]:
    return token.request_id, token.index


def _deliver(letters: list[tuple[Job, Event]]) -> None:
    for job, event in letters:
        job.mailbox.put(job.position, event)


@dataclass(slots=True)
class StepOutcome:
    """What became of one request's trial: the steps it made, and the error that ended it, if one did."""

    request_id: int
    reports: list[StepReport] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_of_use(self) -> bool:
        """Return whether the request is aborted, or further than before."""
        return self.error is not None or any(report.num_tokens for report in self.reports)


def try_alone(engine: Engine) -> Iterator[StepOutcome]:
    """Try each request of the engine's last, failed step alone; one that fails is aborted.

    The step must have been made with `keep_on_error`. O(requests) steps, and more where a prompt is computed in chunks.
    """
    for request_id in engine.last_step_ids:
        engine.preempt_all()  # every trial begins with an empty pool, so that it fits for certain
        yield _try(engine, request_id)
    engine.preempt_all()


def _try(engine: Engine, request_id: int) -> StepOutcome:
    outcome = StepOutcome(request_id)
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
