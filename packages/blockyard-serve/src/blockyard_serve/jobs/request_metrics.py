"""Counters and histograms of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from blockyard.answers import HintOutcome
from blockyard_engine import FinishReason, GenerationResult

from .job import Job

MadeT = TypeVar("MadeT", bound=MetricWrapperBase)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COMPLETIONS = (1, 2, 5, 10, 20, 50)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)


#: Finish reason of a request that failed, besides those of `FinishReason`.
_ERROR = "error"
#: Reasons for refusing a request.
REFUSALS = ("queue_full", "not_serving")


class RequestMetrics(Collector):
    """Counters and histograms of requests. The engine thread counts; any thread may collect.

    Args:
        labels: labels of every metric.
        max_model_len: tokens of the longest sequence, the upper end of the buckets.
    """

    def __init__(self, labels: dict[str, str], max_model_len: int) -> None:
        self._labels = labels
        self._made: list[MetricWrapperBase] = []
        self._make_counters()
        self._make_times()
        self._make_sizes(token_bounds(max_model_len))

    def _make_counters(self) -> None:
        def counter(name: str, text: str) -> Counter:
            return self._keep(Counter(name, text, list(self._labels), registry=None)).labels(*self._labels.values())

        self._ended = self._split_counter("vllm:request_success", "Completions that ended.", "finished_reason")
        for reason in (*FinishReason, _ERROR):  # exported at 0, so that an error rate of 0 is known
            self._ended.labels(*self._labels.values(), str(reason))
        self._refused = self._split_counter("blockyard:requests_refused", "Requests that were refused.", "reason")
        for reason in REFUSALS:  # likewise, so that an alert sees the first refusal
            self._refused.labels(*self._labels.values(), reason)
        self.cancelled = counter("blockyard:requests_cancelled", "Requests whose client left or that took too long.")
        self.failed = counter("blockyard:requests_failed", "Queued requests that ended with an error.")
        self._hints = self._split_counter("blockyard:hints", "Hints about sessions, by outcome.", "outcome")
        for outcome in HintOutcome:
            self._hints.labels(*self._labels.values(), outcome.value)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens that came from the cache.")
        self._generated_tokens = counter("vllm:generation_tokens", "Tokens generated.")

    def _make_times(self) -> None:
        first, following, whole = _FIRST_TOKEN_SECONDS, _NEXT_TOKEN_SECONDS, _REQUEST_SECONDS
        seconds = self._seconds
        self._first_token = seconds("time_to_first_token", "From arrival to the first token.", first)
        self._next_token = seconds("inter_token_latency", "Time between two tokens of a completion.", following)
        self._mean_token = seconds(
            "request_time_per_output_token", "Mean time between tokens of a completion.", following
        )
        self._whole = seconds("e2e_request_latency", "From arrival to the last token.", whole)
        self._queue = seconds("request_queue_time", "From arrival to its first step.", whole)
        self._prefill = seconds("request_prefill_time", "From its first step to the first token.", whole)
        self._decode = seconds("request_decode_time", "From the first token to the last.", whole)
        self._inference = seconds("request_inference_time", "From its first step to the last token.", whole)

    def _make_sizes(self, tokens: tuple[float, ...]) -> None:
        size = self._histogram
        self._step_tokens = size("vllm:iteration_tokens_total", "Tokens that a step computed.", _STEP_TOKENS)
        self._prompt = size("vllm:request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._computed = size(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that had to be computed.", tokens
        )
        self._generated = size("vllm:request_generation_tokens", "Tokens of a completion.", tokens)
        self._longest = size("vllm:request_max_num_generation_tokens", "Tokens of the longest completion.", tokens)
        self._allowed = size("vllm:request_params_max_tokens", "Limit of new tokens.", tokens)
        self._n = size("vllm:request_params_n", "Completions of a request.", _COMPLETIONS)
        self._preempted = size("vllm:request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, without the creation times that prometheus_client adds."""
        for made in self._made:
            for family in made.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family

    def count_step(self, num_tokens: int) -> None:
        """Count a step that computed `num_tokens` tokens. O(1)."""
        if num_tokens:
            self._step_tokens.observe(num_tokens)

    def count_tokens(self, job: Job, index: int, number: int, now: float) -> None:
        """Count `number` tokens that a step generated for completion `index` of a job. O(number).

        Tokens of one step share the time since the previous token, so that the intervals of a completion add up to the
        time from its first token to its last.
        """
        self._generated_tokens.inc(number)
        if job.first_token_at is None:
            job.first_token_at = now
            self._first_token.observe(now - job.arrived_at)
        before = job.last_token_at.get(index)
        num_intervals = number if before is not None else number - 1
        for _ in range(num_intervals):
            self._next_token.observe((now - (now if before is None else before)) / num_intervals)
        job.last_token_at[index] = now

    def count_end(self, job: Job, result: GenerationResult, now: float) -> None:
        """Count a job that finished. O(completions)."""
        self._prompt_tokens.inc(result.num_prompt_tokens)
        self._cached_tokens.inc(result.num_cached_tokens)
        self._prompt.observe(result.num_prompt_tokens)
        self._computed.observe(result.num_prompt_tokens - result.num_cached_tokens)
        self._longest.observe(max(len(completion.token_ids) for completion in result.completions))
        self._allowed.observe(job.sampling.max_tokens)
        self._n.observe(job.num_completions)
        self._preempted.observe(result.num_preemptions)
        for completion in result.completions:
            self._generated.observe(len(completion.token_ids))
            self._ended.labels(*self._labels.values(), str(completion.finish_reason)).inc()
        self._count_times(job, result, now)

    def count_failure(self) -> None:
        """Count a request that was queued and ended with an error. O(1)."""
        self.failed.inc()
        self._ended.labels(*self._labels.values(), _ERROR).inc()

    def count_refusal(self, reason: str) -> None:
        """Count a request that was refused; `reason` is one of `REFUSALS`. O(1)."""
        self._refused.labels(*self._labels.values(), reason).inc()

    def count_hint(self, outcome: str) -> None:
        """Count a hint about a session by its outcome. O(1)."""
        self._hints.labels(*self._labels.values(), outcome).inc()

    def _count_times(self, job: Job, result: GenerationResult, now: float) -> None:
        self._whole.observe(now - job.arrived_at)
        if job.started_at is None or job.first_token_at is None:
            return
        last = max(job.last_token_at.values())
        self._queue.observe(job.started_at - job.arrived_at)
        self._prefill.observe(job.first_token_at - job.started_at)
        self._decode.observe(last - job.first_token_at)
        self._inference.observe(last - job.started_at)
        for completion in result.completions:
            number = len(completion.token_ids)
            if number > 1:
                self._mean_token.observe((job.last_token_at[completion.index] - job.first_token_at) / (number - 1))

    def _split_counter(self, name: str, text: str, label: str) -> Counter:
        return self._keep(Counter(name, text, [*self._labels, label], registry=None))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = self._keep(Histogram(name, text, list(self._labels), registry=None, buckets=bounds))
        return made.labels(*self._labels.values())

    def _seconds(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", text, bounds)

    def _keep(self, made: MadeT) -> MadeT:
        self._made.append(made)
        return made


def token_bounds(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to the first bound that is at least `most`. O(log most)."""
    bounds = [1]
    while bounds[-1] < most:
        bounds.append(bounds[-1] * 5 // 2 if str(bounds[-1])[0] == "2" else bounds[-1] * 2)
    return tuple(float(bound) for bound in bounds)
