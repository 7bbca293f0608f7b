"""Figures of the engine after a step, and of the requests as they end: what metrics.py puts into Prometheus' words."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..answers import CacheStats
from ..engine import Engine, GenerationResult
from .jobs import Job

#: By which dashboards choose among servers.
MODEL_LABEL = "model_name"
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's state between two steps, made in its thread and read in any other.

    usage: share of the pool that is held. num_failed_steps: steps in which something raised.
    """

    stats: CacheStats
    usage: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_failed_steps: int

    @classmethod
    def of(cls, engine: Engine, num_failed_steps: int) -> EngineFigures:
        """Read the engine. O(running sequences)."""
        return cls(
            stats=engine.cache.stats(),
            usage=engine.cache.usage,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_preemptions=engine.num_preemptions,
            num_failed_steps=num_failed_steps,
        )


class RequestFigures:
    """Counters and latencies of requests, in a registry of their own. The engine thread counts, any thread reads.

    Names that begin with `vllm:` are those that vLLM's dashboards graph; what vLLM does not count is `blockyard:`.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._model_name = model_name
        counter, histogram = self._counter, self._histogram
        self._ended = counter("vllm:request_success", "Completions that came to their end.", "finished_reason")
        self._refused = counter("blockyard:requests_refused", "Requests that were not taken.", "reason")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that came to their end.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Those of them that the cache had.")
        self.generated_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self.next_token = histogram(
            "vllm:inter_token_latency_seconds", "Between a request's tokens.", _NEXT_TOKEN_SECONDS
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_SECONDS)
        self.cancelled = counter("blockyard:requests_cancelled", "Requests whose client went away or took too long.")
        self.failed = counter("blockyard:requests_failed", "Requests that ended with an error behind the queue.")

    def count_token(self, job: Job, now: float) -> None:
        """A token of a job. O(1)."""
        self.generated_tokens.inc()
        if job.last_token_at is None:
            self.first_token.observe(now - job.arrived_at)
        else:
            self.next_token.observe(now - job.last_token_at)
        job.last_token_at = now

    def count_end(self, job: Job, result: GenerationResult, now: float) -> None:
        """A job that came to its end. O(completions)."""
        self.whole.observe(now - job.arrived_at)
        self.prompt_tokens.inc(result.num_prompt_tokens)
        self.cached_tokens.inc(result.num_cached_tokens)
        for completion in result.completions:
            self._ended.labels(self._model_name, str(completion.finish_reason)).inc()

    def count_refusal(self, reason: str) -> None:
        """A request that was not taken: "queue_full" or "not_serving". O(1)."""
        self._refused.labels(self._model_name, reason).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, [MODEL_LABEL, *labels], registry=self.registry)
        return made if labels else made.labels(self._model_name)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, [MODEL_LABEL], registry=self.registry, buckets=bounds).labels(self._model_name)
