"""A trace through the real manager, one request after another, as fast as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import CPUPoolConfig, KVCacheManager
from blockyard.arguments import require_bool, require_int
from blockyard.cache_options import MAX_BLOCKS
from blockyard.config import MAX_BLOCK_SIZE, MAX_SEQS, CacheConfig
from blockyard.errors import InvalidArgument

from ..policy_names import PolicyName, exit_as_error, label_of, policy_of
from ..trace import Trace
from .expansion import Expansion
from .result import REPORT_EVERY, Causes, ReplayResult, SimulatedTime, Tally, never_fits
from .timed import ServiceModel, TimedRun
from .timeline import TimelineRecorder


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    num_blocks: of the pool, the null block included. block_size: tokens. policy: a name as `parse_policies` gives it,
    or what makes one from a number of blocks.
    max_model_len: tokens of the longest request, prompt and output; a longer one is refused.
    max_num_seqs: requests at once, when replayed by timestamps. watermark: share of blocks kept free at admission.
    num_cpu_blocks: of a CPU pool that keeps what the pool evicts, its null block included; 0 for none.
    find_causes: whether to find the cause of every miss. strict: raise `TraceError`
    at the first request that the pool can never hold, instead of counting it. service: replay by timestamps under this
    model, or None: one after another, each to its end. keep_timeline: whether to note what happens when; it needs
    `service`.
    """

    num_blocks: int
    block_size: int = 16
    policy: PolicyName = "lru"
    max_model_len: int = 131072
    max_num_seqs: int = 256
    watermark: float = 0.0
    find_causes: bool = True
    strict: bool = False
    service: ServiceModel | None = None
    num_cpu_blocks: int = 0
    keep_timeline: bool = False

    def __post_init__(self) -> None:
        require_int("num_blocks", self.num_blocks, 2, MAX_BLOCKS)
        require_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        require_int("max_num_seqs", self.max_num_seqs, 1, MAX_SEQS)
        require_bool("find_causes", self.find_causes)
        require_bool("strict", self.strict)
        require_bool("keep_timeline", self.keep_timeline)
        if self.keep_timeline and self.service is None:
            raise InvalidArgument("keep_timeline is True and service is None; only a replay by timestamps has times")
        if self.service is not None and not isinstance(self.service, ServiceModel):
            raise InvalidArgument(f"service is {self.service!r}; it must be a ServiceModel or None")
        policy_of(self.policy)

    def make_cache(self) -> KVCacheManager:
        """Return the manager that the requests go through."""
        return KVCacheManager(
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs if self.service is not None else 1,
                max_model_len=self.max_model_len,
                watermark=self.watermark,
                # Policies that sample see hashes: the same trace is to give the same numbers again.
                hash_seed=0,
                cpu=CPUPoolConfig(num_blocks=self.num_cpu_blocks),
                eviction_policy=policy_of(self.policy),
            )
        )


def replay(
    trace: Trace,
    options: ReplayOptions,
    *,
    on_request: Callable[[int], None] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> ReplayResult:
    """Send every request of a trace through a manager of its own; `check()` verifies it at the end.

    on_request: called with the number of requests done, now and then. clock: seconds, such as time.perf_counter; the
    library reads none of itself. O(tokens of the trace). Raises `TraceError` with `strict` for a request that never
    fits, and what the trace's reader raises.
    """
    with exit_as_error(label_of(options.policy)):
        return _replayed(trace, options, on_request, clock)


def _replayed(
    trace: Trace,
    options: ReplayOptions,
    on_request: Callable[[int], None] | None,
    clock: Callable[[], float],
) -> ReplayResult:
    cache, started = options.make_cache(), clock()
    tally = Tally()
    causes = Causes(trace.hash_block_size, options.block_size) if options.find_causes else None
    simulated: SimulatedTime | None = None
    recorder = TimelineRecorder() if options.keep_timeline else None
    if options.service is None:
        _one_after_another(trace, cache, tally, causes, options, on_request)
    else:
        simulated = TimedRun(trace, cache, tally, causes, options.service, options.strict, recorder).run(on_request)
    seconds = clock() - started
    cache.check()
    timeline = recorder.result() if recorder is not None else None
    return tally.result(label_of(options.policy), cache, causes, seconds, simulated, timeline)


def _one_after_another(
    trace: Trace,
    cache: KVCacheManager,
    tally: Tally,
    causes: Causes | None,
    options: ReplayOptions,
    on_request: Callable[[int], None] | None,
) -> None:
    """A request is allocated, computed and freed before the next one comes."""
    expansion = Expansion(trace)
    tally.peak_running = 1
    for number, request in enumerate(trace, 1):
        problem = never_fits(cache.config, request)
        if problem:
            tally.refuse(number, problem, options.strict)
        else:
            prompt, output = expansion.prompt(request), expansion.output(request)
            _serve(cache, tally, prompt, output)
            if causes is not None:
                causes.add(request)
            tally.finish(len(prompt) + len(output), request.num_output_tokens, options.block_size)
        if on_request is not None and number % REPORT_EVERY == 0:
            on_request(number)


def _serve(cache: KVCacheManager, tally: Tally, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
    """Compute the prompt, then all of its output; the last token too, as in vLLM's own figures for this replay."""
    seq = cache.allocate(prompt)
    plan = cache.reserve(seq)
    tally.move(plan)
    cache.commit(seq, plan.num_scheduled, output[:1])
    tally.move(cache.reserve(seq, len(output)))
    cache.commit(seq, len(output), output[1:].reshape(1, -1))
    cache.free(seq)
