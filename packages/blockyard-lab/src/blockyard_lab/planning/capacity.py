"""Computes a capacity plan from a model, GPUs and optionally a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.arguments import require_int, require_number
from blockyard.cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from blockyard.config import MAX_SEQS
from blockyard.errors import InvalidArgument
from blockyard.sizing import (
    CacheBudgetAdvice,
    KVCacheSpec,
    advise_block_size,
    advise_cache_budget,
    num_cpu_blocks,
)

from ..policy_names import OPTIMUM, policy_of
from ..references import References
from ..survey import TraceSurvey
from .assumptions import Situation, assumptions_of
from .gpu_memory import GIB, Activations, GpuAssumptions, GpuBudget, LargestStep, cached_tokens, require_gib
from .hits import HitForecast, forecast_hits
from .plan import CapacityPlan, RequestsAt

#: vLLM's since 0.25.
DEFAULT_UTILIZATION = 0.92
DEFAULT_LENGTHS = (2_000, 8_000, 32_000)
#: Seconds from one output token to the next, if not measured.
DEFAULT_SECONDS_PER_TOKEN = 0.03
#: Sequences with reserved states if `max_num_seqs` is None, for a model that keeps states.
DEFAULT_STATES = 256
MAX_GPUS = 2**20
_MAX_LENGTHS = 1000


def plan_capacity(
    spec: KVCacheSpec,
    *,
    gpu_memory_gib: float,
    weights_gib: float,
    weights_on: Callable[[int], int] | None = None,
    num_gpus: int | None = None,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
    activation_gib: float | None = None,
    step: LargestStep | None = None,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    max_num_seqs: int | None = None,
    running: int | None = None,
    seconds_per_token: float = DEFAULT_SECONDS_PER_TOKEN,
    cpu_gib: float = 0.0,
    traffic: TraceSurvey | None = None,
    references: References | None = None,
    policy: str = "lru",
) -> CapacityPlan:
    """Plan the memory of engines that serve `spec`.

    O(references * log references) for LRU, else O(references * cost of the policy) for each of five sizes.

    Args:
        spec: the cache of one rank; a replica has `spec.tensor_parallel_size` GPUs.
        gpu_memory_gib: memory of one GPU.
        weights_gib: weights of the whole model.
        weights_on: returns the weights' bytes on each of n ranks, as `model_weights` counts; None divides equally.
        num_gpus: a multiple of the ranks; None for one replica.
        gpu_memory_utilization: fraction of a GPU's memory that may be used.
        activation_gib: measured memory of a step without weights and blocks, per GPU. None computes it from `step`;
            without one it is 2 GiB.
        step: the largest step, which samples for `max_num_seqs` sequences (if None: 1,024 on a GPU of 70 GiB or more,
            else 256).
        lengths: request lengths in tokens, prompt and output.
        max_num_seqs: most running requests; None if only memory limits them.
        running: expected running requests on a replica. None estimates them from the traffic: arrivals per second *
            mean output * seconds_per_token / replicas.
        seconds_per_token: time from one output token to the next.
        cpu_gib: host memory of a CPU tier for all GPUs.
        traffic: lengths and arrivals of a trace, of all replicas together.
        references: the trace's contents; hit rates are those of one cache that sees all of them.
        policy: eviction policy.

    Raises:
        InvalidArgument: for a value outside its limits.
    """
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgument(f"spec is {spec!r}; it must be a KVCacheSpec")
    if policy != OPTIMUM:
        policy_of(policy, "policy")
    num_replicas = _num_replicas(spec, num_gpus)
    if max_num_seqs is not None:
        limit: int | None = require_int("max_num_seqs", max_num_seqs, 1, MAX_SEQS)
    else:
        limit = DEFAULT_STATES if spec.state_bytes_per_sequence else None
    wanted = _lengths(lengths)
    at_work = _running(running, traffic, num_replicas, seconds_per_token, limit)
    require_gib("gpu_memory_gib", gpu_memory_gib, above_zero=True)
    activations = Activations.of(activation_gib, step, gpu_memory_gib, max_num_seqs)
    memory = GpuAssumptions(gpu_memory_gib, weights_gib, activations, gpu_memory_utilization, weights_on)
    situation = Situation(
        spec=spec,
        gpu=memory.budget(spec, (limit or 0) if spec.state_bytes_per_sequence else 0),
        activations=activations,
        weights_gib=weights_gib,
        num_replicas=num_replicas,
        max_num_seqs=limit,
        running_given=running is not None,
        running=at_work,
        seconds_per_token=seconds_per_token,
        mean_tokens=traffic.mean_sequence if traffic is not None else sum(wanted) / len(wanted),
        traffic=traffic,
        references=references,
        policy=policy,
        cpu_gib=require_gib("cpu_gib", cpu_gib),
    )
    labelled = [("", length) for length in wanted]
    if traffic is not None:
        labelled += [("trace mean", max(round(traffic.mean_sequence), 1)), ("trace p99", traffic.p99_sequence)]
    return _plan(situation, memory, labelled)


def _plan(given: Situation, memory: GpuAssumptions, lengths: list[tuple[str, int]]) -> CapacityPlan:
    """Compute the plan from checked arguments. `lengths` holds (label, tokens)."""
    spec, num_gpus, states = given.spec, given.num_replicas * given.spec.tensor_parallel_size, given.num_states
    num_blocks = given.gpu.num_blocks(spec, states)
    requests = tuple(_requests_at(given, label, length, num_blocks) for label, length in lengths)
    fits = any(row.concurrent > 0 for row in requests)
    shortest = min(row.num_tokens for row in requests)
    cpu_bytes = int(given.cpu_gib * GIB) // num_gpus
    cpu_blocks = min(num_cpu_blocks(cpu_bytes, spec=spec, max_num_seqs=states), MAX_BLOCKS)
    budgets = None
    if fits and given.running is not None:
        each = spec.peak_sequence_blocks(max(round(given.mean_tokens), 1))
        budgets = _Budgets(spec, given.gpu, states, num_blocks, given.running, each)
    return CapacityPlan(
        spec=spec,
        num_gpus=num_gpus,
        num_replicas=given.num_replicas,
        gpu=given.gpu,
        num_blocks=num_blocks,
        num_tokens=cached_tokens(spec, max(num_blocks - 1, 0)),
        fits=fits,
        smallest_tensor_parallel=0 if fits else memory.smallest_tensor_parallel(spec, shortest, states),
        num_cpu_blocks=cpu_blocks,
        requests=requests,
        running=given.running,
        cache_budget=None if budgets is None else budgets.left(),
        hits=None if budgets is None else budgets.hits(given.references, given.policy, cpu_blocks),
        block_size=advise_block_size(given.mean_tokens),
        assumptions=assumptions_of(given),
    )


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Computes how many blocks running requests leave for the cache, in pools of several sizes."""

    spec: KVCacheSpec
    gpu: GpuBudget
    states: int
    num_blocks: int
    running: int
    blocks_each: int

    def left(self, more_blocks: int = 0) -> CacheBudgetAdvice:
        """Return the budget of the pool without its null block, with `more_blocks` added."""
        return advise_cache_budget(max(self.num_blocks - 1, 0) + more_blocks, self.running, self.blocks_each)

    def hits(self, references: References | None, policy: str, cpu_blocks: int) -> HitForecast | None:
        """Return the trace's hit rates in the remaining blocks, or None if its contents are unknown."""
        if references is None:
            return None
        more = self.gpu.num_blocks(self.spec, self.states, GIB) - self.num_blocks
        expected = self.left().num_blocks
        return forecast_hits(
            self.spec,
            references,
            policy,
            expected=expected,
            whole_pool=self.num_blocks - 1,
            one_more_gib=self.left(more).num_blocks,
            tenth_more=self.left(-(-self.num_blocks // 10)).num_blocks,
            # The CPU pool has a null block too.
            with_cpu=expected + cpu_blocks - 1 if cpu_blocks > 1 else None,
        )


def _num_replicas(spec: KVCacheSpec, num_gpus: int | None) -> int:
    ranks = spec.tensor_parallel_size
    if num_gpus is None:
        return 1
    count = require_int("num_gpus", num_gpus, 1, MAX_GPUS)
    if count % ranks:
        raise InvalidArgument(f"num_gpus is {count}; it must be a multiple of tensor_parallel_size, {ranks}")
    return count // ranks


def _lengths(lengths: Sequence[int]) -> list[int]:
    if not isinstance(lengths, (list, tuple)) or not 1 <= len(lengths) <= _MAX_LENGTHS:
        raise InvalidArgument(f"lengths is {lengths!r}; it must be a list of 1 to {_MAX_LENGTHS} lengths in tokens")
    return [require_int("lengths", length, 1, MAX_MODEL_LEN) for length in lengths]


def _requests_at(given: Situation, label: str, length: int, num_blocks: int) -> RequestsAt:
    fitting = given.spec.max_concurrent_sequences(length, num_blocks=num_blocks)
    concurrent = fitting if given.max_num_seqs is None else min(fitting, given.max_num_seqs)
    each = given.spec.peak_sequence_blocks(length)
    size, padding = given.spec.peak_sequence_bytes(length), given.spec.padding_bytes(length)
    return RequestsAt(label, length, each, concurrent, concurrent * given.num_replicas, size, padding)


def _running(
    running: int | None,
    traffic: TraceSurvey | None,
    num_replicas: int,
    seconds_per_token: float,
    limit: int | None,
) -> int | None:
    """Return the running requests on a replica: as given, or the replica's part of the traffic, at most `limit`."""
    seconds = require_number("seconds_per_token", seconds_per_token)
    if not 0 < seconds <= 3600:
        raise InvalidArgument(f"seconds_per_token is {seconds}; it must be above 0 and at most 3600")
    if running is not None:
        return require_int("running", running, 0, MAX_SEQS if limit is None else limit)
    at_work = None if traffic is None else traffic.mean_running(seconds)
    if at_work is None:
        return None
    return min(max(-int(-at_work // num_replicas), 1), MAX_SEQS if limit is None else limit)
