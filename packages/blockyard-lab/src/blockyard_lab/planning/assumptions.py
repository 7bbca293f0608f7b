"""Lists the assumptions of a capacity plan as sentences with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.sizing import KVCacheSpec

from ..references import References
from ..survey import TraceSurvey
from .gpu_memory import GIB, Activations, GpuBudget

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Situation:
    """Checked arguments of a plan; names as in `plan_capacity`. `running_given`: whether `running` was an argument."""

    spec: KVCacheSpec
    gpu: GpuBudget
    activations: Activations
    weights_gib: float
    num_replicas: int
    max_num_seqs: int | None
    running_given: bool
    running: int | None
    seconds_per_token: float
    mean_tokens: float
    traffic: TraceSurvey | None
    references: References | None
    policy: str
    cpu_gib: float

    @property
    def num_states(self) -> int:
        """Number of sequences with reserved states."""
        return (self.max_num_seqs or 0) if self.spec.state_bytes_per_sequence else 0


def assumptions_of(given: Situation) -> tuple[str, ...]:
    """Return every assumption of the plan. O(layers)."""
    sentences = [*_memory(given), *_layers(given.spec), *_requests(given)]
    if given.references is not None:
        sentences += _hits(given, given.references)
    elif given.traffic is not None and not given.traffic.has_contents:
        sentences.append("The trace does not say what its prompts contain, so it gives no hit rates.")
    return tuple(sentences)


def _memory(given: Situation) -> list[str]:
    gpu, ranks = given.gpu, given.spec.tensor_parallel_size
    each = f", on {ranks} GPUs: {gpu.weight_bytes / GIB:.2f} GiB on each" if ranks > 1 else ""
    sentences = [
        f"A GPU has {gpu.total_bytes / GIB:g} GiB, of which {100 * gpu.utilization:g} % are used: "
        f"{gpu.usable_bytes / GIB:.2f} GiB. CUDA reports less than the data sheet.",
        f"The weights take {given.weights_gib:.2f} GiB{each}.",
        given.activations.sentence(ranks),
    ]
    if given.cpu_gib:
        sentences.append(f"The CPU tier has {given.cpu_gib:g} GiB for all GPUs together, in equal parts.")
    return sentences


def _layers(spec: KVCacheSpec) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in spec.num_layers_by_kind.items())
    sentences = [
        f"A block takes {spec.bytes_per_block / _MIB:.3f} MiB on each GPU, in {spec.dtype}; layers by kind: {kinds}. "
        f"One block of the pool is the null block."
    ]
    return sentences + _ranks(spec) + _windows(spec) + _states(spec)


def _ranks(spec: KVCacheSpec) -> list[str]:
    ranks = spec.tensor_parallel_size
    if ranks == 1:
        return []
    if any(layer.is_latent for layer in spec.layers):
        return [
            f"Latent attention keeps one vector per token, whole on each of the {ranks} ranks: more ranks do not make "
            f"it smaller."
        ]
    heads = sorted({layer.num_kv_heads for layer in spec.layers})
    return [
        f"{count} KV heads are divided among {ranks} ranks, {count // ranks} on each."
        if count >= ranks
        else f"{count} KV heads are fewer than {ranks} ranks: each keeps one, so {ranks // count} ranks keep the same "
        f"head and more of them save no memory of the cache."
        for count in heads
    ]


def _windows(spec: KVCacheSpec) -> list[str]:
    windows = sorted({group.sliding_window for group in spec.groups if group.sliding_window})
    if not windows:
        return []
    names = ", ".join(str(window) for window in windows)
    return [
        f"Layers with a window (of {names} tokens) free blocks that have left it. Requests are counted while they "
        f"decode; during a step, a chunk of a prompt also holds its own blocks in these layers.",
        f"The engine has {len(spec.groups)} layer group{'s' * (len(spec.groups) > 1)}; an engine without layer groups "
        f"keeps every token in every layer.",
        "Cached tokens are counted with all layers, windows or not, so the tokens of the pool are a lower bound.",
    ]


def _states(spec: KVCacheSpec) -> list[str]:
    if spec.state_bytes_per_sequence == 0:
        return []
    return [
        f"Each running request also keeps a state of {spec.state_bytes_per_sequence / _MIB:.2f} MiB on each GPU, "
        f"outside the blocks; memory for it is reserved for every request that may run.",
        "A cached prefix hits only with the state at its end, which is not simulated: hit rates are upper bounds.",
    ]


def _requests(given: Situation) -> list[str]:
    sentences = ["Running requests share no blocks and are counted at their full length, prompt and output."]
    if given.max_num_seqs is not None:
        sentences.append(f"At most {given.max_num_seqs} requests run at once on a replica (max_num_seqs).")
    if given.num_replicas > 1:
        sentences.append(f"The {given.num_replicas} replicas each have their own pool and share nothing.")
    if given.running is not None:
        sentences.append(_running(given, given.running))
    return sentences


def _running(given: Situation, running: int) -> str:
    hold = f"each holding the blocks of {given.mean_tokens:,.0f} tokens, plus a fifth for growth"
    if given.running_given or given.traffic is None:
        return f"{running} requests run at once on a replica, as given, {hold}."
    rate = (given.traffic.num_requests - 1) / given.traffic.duration
    each = " on each replica" if given.num_replicas > 1 else ""
    return (
        f"{running} requests run at once{each}, {hold}: the trace has {rate:.2f} arrivals per second and "
        f"{given.traffic.mean_output:.0f} tokens per output, at {given.seconds_per_token:g} s each. This leaves out "
        f"queues and the time of prompts; give the number if you know it."
    )


def _hits(given: Situation, references: References) -> list[str]:
    size = references.tokens_a_block
    sentences = [
        f"Hit rates are fractions of the trace's {references.num_references:,} blocks of {size} prompt tokens. Its "
        f"requests run one after another through a cache that starts empty and evicts by {given.policy}.",
        "Expected is the hit rate in the pool without the blocks of running requests; whole pool is an upper bound, "
        "since blocks of running requests are hit too.",
    ]
    if references.halvings:
        sentences.append(f"The trace is sampled, one block in {2**references.halvings}; errors are standard errors.")
    return sentences + _block_sizes(given.spec, size) + _further_hits(given)


def _block_sizes(spec: KVCacheSpec, of_trace: int) -> list[str]:
    sizes = sorted({group.block_size for group in spec.groups})
    if sizes == [of_trace]:
        return []
    names = ", ".join(str(size) for size in sizes)
    # Only whole blocks hit: a prefix is cut to the larger of the two.
    effect = "fewer tokens hit than shown" if sizes[-1] > of_trace else "at least as many tokens hit as shown"
    return [
        f"The engine's blocks have {names} tokens and the trace's {of_trace}; capacities are converted by tokens. "
        f"Only whole blocks hit, so {effect}."
    ]


def _further_hits(given: Situation) -> list[str]:
    sentences = []
    if given.num_replicas > 1:
        sentences.append(
            f"The trace is the traffic of all {given.num_replicas} replicas, which share the running requests equally. "
            f"Hit rates are those of one replica's cache that sees every request: a router that sends equal prefixes "
            f"to the same replica does better, any other does worse."
        )
    if given.cpu_gib:
        sentences.append(
            "With the CPU tier: an upper bound, as if pool and tier were one cache that keeps nothing twice, and moves "
            "took no time."
        )
    return sentences
