"""Replays a trace through the real manager, one request after another or by timestamps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.arguments import require_bool, require_int
from blockyard.cache_options import MAX_BLOCKS
from blockyard.config import MAX_BLOCK_SIZE, MAX_SEQS, cache_config
from blockyard.errors import InvalidArgument

from ..policy_names import PolicyName, exit_as_error, label_of, policy_of
from ..trace import Trace
from .expansion import Expansion
from .result import REPORT_EVERY, MissCounter, ReplayResult, SimulatedTime, Tally, explain_misfit
from .timed import ServiceModel, TimedRun
from .timeline import TimelineRecorder


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay.

    Args:
        num_blocks: blocks of the pool, including the null block.
        block_size: tokens per block.
        policy: a name as `parse_policies` returns it, or a callable that makes a policy from a number of blocks.
        max_model_len: longest request in tokens, prompt and output; longer ones are refused.
        max_num_seqs: concurrent requests in a timed replay.
        watermark: fraction of the blocks to keep free at admission.
        find_causes: find the cause of every miss.
        strict: raise `TraceError` at the first request that never fits, instead of counting it.
        service: step times for a replay by timestamps; None replays one request after another.
        num_cpu_blocks: blocks of a CPU pool that takes evicted blocks, including its null block; 0 for none.
        keep_timeline: record counts over time; needs `service`.
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
            raise InvalidArgument("keep_timeline is True and service is None; a timeline needs service=ServiceModel()")
        if self.service is not None and not isinstance(self.service, ServiceModel):
            raise InvalidArgument(f"service is {self.service!r}; it must be a ServiceModel or None")
        policy_of(self.policy)

    def make_cache(self) -> KVCacheManager:
        return KVCacheManager(
            cache_config(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs if self.service is not None else 1,
                max_model_len=self.max_model_len,
                watermark=self.watermark,
                # Policies that sample depend on hashes: the same trace must give the same numbers again.
                hash_seed=0,
                num_cpu_blocks=self.num_cpu_blocks,
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
    """Send every request of a trace through a new manager, and run its `check()` at the end. O(tokens of the trace).

    Args:
        trace: any trace.
        options: how to replay it.
        on_request: called now and then with the number of finished requests.
        clock: returns seconds, such as time.perf_counter; without one the result has no duration.

    Raises:
        TraceError: if `options.strict` and a request never fits, or if the trace cannot be read.
        PolicyError: if the eviction policy fails.
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
    causes = MissCounter(trace.hash_block_size, options.block_size) if options.find_causes else None
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
    causes: MissCounter | None,
    options: ReplayOptions,
    on_request: Callable[[int], None] | None,
) -> None:
    expansion = Expansion(trace)
    tally.peak_running = 1
    for number, request in enumerate(trace, 1):
        problem = explain_misfit(cache.config, request)
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
    """Compute the prompt and all of its output.

    The last token is computed too, as in vLLM's published figures for such a replay.
    """
    seq = cache.allocate(prompt)
    plan = cache.reserve(seq)
    tally.move(plan)
    cache.commit(seq, plan.num_scheduled, output[:1])
    tally.move(cache.reserve(seq, len(output)))
    cache.commit(seq, len(output), output[1:].reshape(1, -1))
    cache.free(seq)
