"""A capacity plan: what a model, GPUs and perhaps a trace come to, in blocks, requests and hit rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockyard.arguments import require_int, require_number
from blockyard.cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from blockyard.config import MAX_SEQS
from blockyard.errors import InvalidArgument
from blockyard.sizing import (
    BlockSizeAdvice,
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
from .hits import HitForecast, forecast_hits
from .memory import GIB, Activations, GpuAssumptions, GpuBudget, LargestStep, cached_tokens, require_gib

#: vLLM's since 0.25.
DEFAULT_UTILIZATION = 0.92
DEFAULT_LENGTHS = (2_000, 8_000, 32_000)
#: Seconds from one token of an output to the next, where nothing was measured.
DEFAULT_SECONDS_PER_TOKEN = 0.03
#: Sequences whose states are set aside where nothing was said, for a model that keeps states.
DEFAULT_STATES = 256
MAX_GPUS = 2**20
_MAX_LENGTHS = 1000


@dataclass(frozen=True, slots=True)
class RequestsAt:
    """How many requests of one length, prompt and output together, fit at once.

    label: "" for a length that was asked for, else what it is of the trace. num_blocks: that each holds at its fullest.
    num_bytes: their bytes on each GPU, with its state. padding_bytes: of them, what nothing can fill, because tokens of
    the layer groups take different bytes.
    concurrent: on one replica. concurrent_in_all: on all replicas.
    """

    label: str
    num_tokens: int
    num_blocks: int
    concurrent: int
    concurrent_in_all: int
    num_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What `plan_capacity` found. Blocks and tokens are of one replica; a block has a part on each of its ranks.

    num_replicas: engines that serve side by side, each of `spec.tensor_parallel_size` GPUs and with a pool of its own.
    gpu: bytes of one GPU. num_blocks: the null block included. num_tokens: that the pool keeps. fits: whether a request
    of the shortest length does. smallest_tensor_parallel: the fewest GPUs, a power of two, that would hold one where
    it does not; 0 if 1024 would not. num_cpu_blocks: of the CPU tier. requests: by length. running: requests expected
    at work at once on a replica, None if not known. cache_budget: what they leave for cached prefixes. hits: None
    without a trace that says what prompts contain. assumptions: all of them, in sentences.
    """

    spec: KVCacheSpec
    num_gpus: int
    num_replicas: int
    gpu: GpuBudget
    num_blocks: int
    num_tokens: int
    fits: bool
    smallest_tensor_parallel: int
    num_cpu_blocks: int
    requests: tuple[RequestsAt, ...]
    running: int | None
    cache_budget: CacheBudgetAdvice | None
    hits: HitForecast | None
    block_size: BlockSizeAdvice
    assumptions: tuple[str, ...]


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

    spec: what one rank keeps; its `tensor_parallel_size` GPUs are a replica. gpu_memory_gib: of one GPU. weights_gib:
    of the whole model. weights_on: bytes of them on each of so many ranks, as `model_weights` counts; divided equally
    if None. num_gpus: a multiple of the ranks; one replica if None. gpu_memory_utilization: share of a GPU that may be
    used. activation_gib: all that a step takes beside weights and blocks, on each GPU, as measured; if None
    it follows from step, sampled for max_num_seqs sequences (for 1,024 on a GPU of 70 GiB or more, else 256, if None),
    and is 2 GiB without one.
    lengths: tokens of a request, prompt and output. max_num_seqs: requests that the engine runs at once at most; no
    limit but memory if None. running: requests expected at work on a replica; None for the traffic's arrivals a second
    times mean output times seconds_per_token, divided by the replicas. cpu_gib: host memory of a tier, for all GPUs.
    traffic: a trace, that of all replicas: lengths and arrivals. references: its contents; hit rates are those of one
    cache that sees all of them.
    policy: who is evicted.

    O(references * log references) for LRU, else O(references * cost of the policy) for each of five sizes.
    Raises `InvalidArgument` for a value outside its limits.
    """
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgument(f"spec is {spec!r}; it must be a KVCacheSpec")
    _check_policy(policy)
    num_replicas = _num_replicas(spec, num_gpus)
    limit = _limit(spec, max_num_seqs)
    wanted = _lengths(lengths)
    at_work = _running(running, traffic, num_replicas, seconds_per_token, limit)
    require_gib("gpu_memory_gib", gpu_memory_gib, above_zero=True)
    activations = Activations.of(activation_gib, step, gpu_memory_gib, max_num_seqs)
    memory = GpuAssumptions(gpu_memory_gib, weights_gib, activations, gpu_memory_utilization, weights_on)
    situation = Situation(
        spec=spec,
        gpu=memory.budget(spec, _num_states(spec, limit)),
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
    return _plan(situation, memory, [*(("", length) for length in wanted), *_trace_lengths(traffic)])


def _plan(given: Situation, memory: GpuAssumptions, lengths: list[tuple[str, int]]) -> CapacityPlan:
    """The plan, once every argument is checked. lengths: (label, tokens)."""
    spec, num_gpus, states = given.spec, given.num_replicas * given.spec.tensor_parallel_size, given.num_states
    num_blocks = given.gpu.num_blocks(spec, states)
    requests = tuple(_requests_at(given, label, length, num_blocks) for label, length in lengths)
    fits = any(row.concurrent > 0 for row in requests)
    shortest = min(row.num_tokens for row in requests)
    cpu_bytes = int(given.cpu_gib * GIB) // num_gpus
    cpu_blocks = min(num_cpu_blocks(cpu_bytes, spec=spec, max_num_seqs=states), MAX_BLOCKS)
    budgets = _budgets(given, num_blocks) if fits else None
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
    """What running requests leave of pools of several sizes."""

    spec: KVCacheSpec
    gpu: GpuBudget
    states: int
    num_blocks: int
    running: int
    blocks_each: int

    def left(self, more_blocks: int = 0) -> CacheBudgetAdvice:
        """Returns the advice for the pool without its null block, given this many extra blocks."""
        return advise_cache_budget(max(self.num_blocks - 1, 0) + more_blocks, self.running, self.blocks_each)

    def hits(self, references: References | None, policy: str, cpu_blocks: int) -> HitForecast | None:
        """Return what the trace hits in what is left; None without its contents."""
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


def _budgets(given: Situation, num_blocks: int) -> _Budgets | None:
    """None where it is not known how many requests are at work."""
    if given.running is None:
        return None
    each = given.spec.peak_sequence_blocks(max(round(given.mean_tokens), 1))
    return _Budgets(given.spec, given.gpu, given.num_states, num_blocks, given.running, each)


def _num_states(spec: KVCacheSpec, limit: int | None) -> int:
    """Count the sequences whose states are set aside."""
    return (limit or 0) if spec.state_bytes_per_sequence else 0


def _num_replicas(spec: KVCacheSpec, num_gpus: int | None) -> int:
    ranks = spec.tensor_parallel_size
    if num_gpus is None:
        return 1
    count = require_int("num_gpus", num_gpus, 1, MAX_GPUS)
    if count % ranks:
        raise InvalidArgument(f"num_gpus is {count}; it must be a multiple of tensor_parallel_size, {ranks}")
    return count // ranks


def _limit(spec: KVCacheSpec, max_num_seqs: int | None) -> int | None:
    if max_num_seqs is not None:
        return require_int("max_num_seqs", max_num_seqs, 1, MAX_SEQS)
    return DEFAULT_STATES if spec.state_bytes_per_sequence else None


def _check_policy(policy: str) -> None:
    if policy != OPTIMUM:
        policy_of(policy, "policy")


def _lengths(lengths: Sequence[int]) -> list[int]:
    if not isinstance(lengths, (list, tuple)) or not 1 <= len(lengths) <= _MAX_LENGTHS:
        raise InvalidArgument(f"lengths is {lengths!r}; it must be a list of 1 to {_MAX_LENGTHS} lengths in tokens")
    return [require_int("lengths", length, 1, MAX_MODEL_LEN) for length in lengths]


def _trace_lengths(traffic: TraceSurvey | None) -> list[tuple[str, int]]:
    if traffic is None:
        return []
    return [("trace mean", max(round(traffic.mean_sequence), 1)), ("trace p99", traffic.p99_sequence)]


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
    """Requests at work on a replica: as given, or its part of what the traffic's arrivals come to, at most `limit`."""
    seconds = require_number("seconds_per_token", seconds_per_token)
    if not 0 < seconds <= 3600:
        raise InvalidArgument(f"seconds_per_token is {seconds}; it must be above 0 and at most 3600")
    if running is not None:
        return require_int("running", running, 0, MAX_SEQS if limit is None else limit)
    at_work = None if traffic is None else traffic.mean_running(seconds)
    if at_work is None:
        return None
    return min(max(-int(-at_work // num_replicas), 1), MAX_SEQS if limit is None else limit)
