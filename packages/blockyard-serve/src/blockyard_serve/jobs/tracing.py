"""A span for each request, with child spans for queue, prefill and decode, made when the request ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blockyard.answers import MissCauses
from blockyard.errors import MissingExtra
from blockyard_engine import GenerationResult

from .job import Job

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

#: Miss causes; of causes with equal counts the first is reported. The tail is not a fault.
_CAUSES = ("evicted", "no_state", "other_keys", "never_seen", "recomputed", "tail")


class RequestTracer:
    """Sends spans of requests to an OpenTelemetry tracer. Attributes have vLLM's names if it has them.

    Raises `MissingExtra` if opentelemetry is not installed.

    Args:
        block_size: tokens in a block, for `kv_cache.blocks_hit` and `kv_cache.blocks_missed`.
        model_name: attribute of each span.
    """

    def __init__(self, tracer: Tracer, block_size: int, model_name: str) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError as error:
            raise MissingExtra("tracing needs opentelemetry: pip install 'blockyard[tracing]'") from error
        self._extract, self._trace = propagate.extract, trace
        self._tracer = tracer
        self._block_size = block_size
        self._model_name = model_name

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """Return the context of the client's span, from the header `traceparent`. O(headers)."""
        return self._extract(dict(headers))

    def end(self, job: Job, result: GenerationResult | None, now: float, error: str = "") -> None:
        """Record the spans of a job that ended at `now`, on the clock of its times. `error`: why it did not finish."""
        offset = time.time_ns() - int(now * 1e9)  # from the job's clock to the spans' clock

        def start(name: str, parent: Context | None, began: float, **attributes: Any) -> Span:
            return self._tracer.start_span(name, parent, start_time=offset + int(began * 1e9), attributes=attributes)

        def end(span: Span, at: float) -> None:
            span.end(offset + int(at * 1e9))

        root = start("llm_request", job.parent, job.arrived_at, **self._of_request(job, result, now))
        if error:
            root.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        inside = self._trace.set_span_in_context(root)
        for name, began, ended in phases(job, now):
            attributes = self._of_cache(result) if name == "prefill" and result is not None else {}
            end(start(name, inside, began, **attributes), ended)
        end(root, now)

    def _of_request(self, job: Job, result: GenerationResult | None, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.request.id": job.name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.max_tokens": job.sampling.max_tokens,
            "gen_ai.request.n": job.sampling.n,
            "gen_ai.usage.prompt_tokens": len(job.prompt.token_ids),
            "gen_ai.latency.e2e": now - job.arrived_at,
        }
        if job.started_at is not None:
            found["gen_ai.latency.time_in_queue"] = job.started_at - job.arrived_at
        if job.first_token_at is not None:
            found["gen_ai.latency.time_to_first_token"] = job.first_token_at - job.arrived_at
        if result is not None:
            found["gen_ai.usage.completion_tokens"] = sum(len(each.token_ids) for each in result.completions)
            found["blockyard.num_preemptions"] = result.num_preemptions
        return found

    def _of_cache(self, result: GenerationResult) -> dict[str, Any]:
        hit = -(-result.num_cached_tokens // self._block_size)
        full = result.num_prompt_tokens // self._block_size
        found: dict[str, Any] = {
            "kv_cache.blocks_hit": hit,
            "kv_cache.blocks_missed": max(full - hit, 0),
            "kv_cache.tier_hit": tier_of(result),
        }
        if result.misses is not None:
            numbers = missed_tokens(result.misses)
            found |= {f"kv_cache.missed_tokens.{cause}": number for cause, number in numbers.items() if number}
            found["kv_cache.miss_cause"] = max(numbers, key=numbers.__getitem__) if any(numbers.values()) else "none"
        return found


def phases(job: Job, now: float) -> list[tuple[str, float, float]]:
    """Return (name, began, ended) of each phase of a job; a phase that did not complete ends at `now`."""
    found = [("queue", job.arrived_at, now if job.started_at is None else job.started_at)]
    if job.started_at is not None:
        found.append(("prefill", job.started_at, now if job.first_token_at is None else job.first_token_at))
    if job.first_token_at is not None:
        found.append(("decode", job.first_token_at, max(job.last_token_at.values())))
    return found


def tier_of(result: GenerationResult) -> str:
    """Return which pool held the cached tokens of a prompt: "gpu", "cpu", "gpu+cpu" or "none"."""
    cpu = min(result.num_cpu_cached_tokens, result.num_cached_tokens)
    tiers = ["gpu"] * (result.num_cached_tokens > cpu) + ["cpu"] * (cpu > 0)
    return "+".join(tiers) or "none"


def missed_tokens(misses: MissCauses) -> dict[str, int]:
    """Return missed tokens by cause; the tail is left out if other tokens were missed too."""
    numbers = {cause: misses.missed[cause] for cause in _CAUSES}
    if any(number for cause, number in numbers.items() if cause != "tail"):
        del numbers["tail"]
    return numbers
