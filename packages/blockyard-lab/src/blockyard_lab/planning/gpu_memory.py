"""Memory of a GPU: checked amounts, the memory of the largest step, and the memory left for blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from blockyard.arguments import require_int, require_number
from blockyard.cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from blockyard.errors import InvalidArgument
from blockyard.sizing import (
    EncoderShape,
    Gpu,
    KVCacheSpec,
    ModelShape,
    StepMemory,
    num_gpu_blocks,
    step_memory,
)

GIB = 2**30
MAX_GIB = 2**20


def require_gib(name: str, value: object, above_zero: bool = False) -> float:
    """Return `value`, GiB. Raises `InvalidArgument` unless it is from 0 (`above_zero`: above 0) to 2**20."""
    number = require_number(name, value)
    if number < 0 or number > MAX_GIB or (above_zero and int(number * GIB) == 0):
        low = "above 0" if above_zero else "at least 0"
        raise InvalidArgument(f"{name} is {value!r}; it must be {low} and at most {MAX_GIB}, in GiB")
    return number


#: GiB per GPU if neither a measurement nor the step is known.
DEFAULT_ACTIVATION_GIB = 2.0
#: vLLM's defaults for the tokens and sequences of a step, on a GPU of 70 GiB or more and on a smaller one.
_LARGE_GPU_GIB = 70
_LARGE_STEP, _SMALL_STEP = (8192, 1024), (2048, 256)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that an engine computes.

    Args:
        shape: the model's widths.
        max_num_batched_tokens: tokens; None for vLLM's default: 8,192 on a GPU of 70 GiB or more, else 2,048.
        sampler: as in `step_memory`.
        gpu: type of GPU, if known; some have smaller steps (A100) or other links.
        num_graph_layers: layers captured by CUDA graphs; 0 if the engine reserves nothing for them (vLLM before 0.20,
            or `--enforce-eager`).
        encoder: the image encoder, if the engine runs it.
    """

    shape: ModelShape
    max_num_batched_tokens: int | None = None
    sampler: str = "fused"
    gpu: Gpu | None = None
    num_graph_layers: int = 0
    encoder: EncoderShape | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """Memory of a step without weights and blocks: measured, or computed from the step.

    Attributes:
        given_gib: measured GiB per GPU, or None.
        step: the largest step; None if unknown.
        tokens: tokens of the step.
        seqs: sequences of the step.
    """

    given_gib: float | None
    step: LargestStep | None
    tokens: int
    seqs: int

    @classmethod
    def of(
        cls, given_gib: float | None, step: LargestStep | None, gpu_memory_gib: float, max_num_seqs: int | None
    ) -> Activations:
        """Check the arguments and fill in defaults.

        Args:
            given_gib: measured GiB per GPU, or None.
            step: the largest step, or None.
            gpu_memory_gib: memory of a GPU.
            max_num_seqs: most running requests, or None.

        Raises:
            InvalidArgument: for a value outside its limits.
        """
        if given_gib is not None:
            require_gib("activation_gib", given_gib)
        if step is not None and not isinstance(step, LargestStep):
            raise InvalidArgument(f"step is {step!r}; it must be a LargestStep")
        is_small = step is not None and step.gpu is not None and step.gpu.has_small_step
        tokens, seqs = _LARGE_STEP if gpu_memory_gib >= _LARGE_GPU_GIB and not is_small else _SMALL_STEP
        if step is not None and step.max_num_batched_tokens is not None:
            tokens = require_int("max_num_batched_tokens", step.max_num_batched_tokens, 1, MAX_MODEL_LEN)
        wanted = seqs if max_num_seqs is None else max_num_seqs
        found = cls(given_gib, step, tokens, min(wanted, tokens))
        found.bytes_on(1)
        return found

    def bytes_on(self, ranks: int) -> int:
        """Return the bytes on each GPU if `ranks` GPUs share the model."""
        memory = self._memory(ranks)
        if memory is not None:
            return memory.total_bytes
        return int((DEFAULT_ACTIVATION_GIB if self.given_gib is None else self.given_gib) * GIB)

    def sentence(self, ranks: int) -> str:
        """Return a sentence that gives the amount and its source."""
        memory, gib = self._memory(ranks), self.bytes_on(ranks) / GIB
        if memory is None or self.step is None:
            source = "as given" if self.given_gib is not None else "a guess, since the model's widths are not known"
            return f"Activations and the engine's buffers take {gib:g} GiB on each GPU, {source}."
        experts = f", experts' workspace {memory.workspace_bytes / GIB:.2f}" * (memory.workspace_bytes > 0)
        encoder = f", or the image encoder {memory.encoder_bytes / GIB:.2f}" * (memory.encoder_bytes > 0)
        graphs = f", CUDA graphs {memory.graph_bytes / GIB:.2f}" if memory.graph_bytes else ""
        without = "" if memory.graph_bytes else " CUDA graphs are not in it."
        return (
            f"Activations take {gib:.2f} GiB on each GPU, in a step of {self.tokens:,} tokens that samples for "
            f"{self.seqs:,} sequences ({self.step.sampler} sampler): the layers {memory.forward_bytes / GIB:.2f} GiB, "
            f"or sampling {memory.sampling_bytes / GIB:.2f}{encoder}{experts}, libraries "
            f"{memory.context_bytes / GIB:.2f}{graphs}. The engine's own profile is the measurement.{without}"
        )

    def _memory(self, ranks: int) -> StepMemory | None:
        if self.given_gib is not None or self.step is None:
            return None
        return step_memory(
            self.step.shape,
            max_num_batched_tokens=self.tokens,
            max_num_seqs=self.seqs,
            tensor_parallel_size=ranks,
            sampler=self.step.sampler,
            has_links=self.step.gpu is None or self.step.gpu.has_links,
            has_shared_memory=self.step.gpu is not None and self.step.gpu.has_shared_memory,
            num_graph_layers=self.step.num_graph_layers,
            encoder=self.step.encoder,
        )


_MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Bytes of one GPU.

    Attributes:
        total_bytes: its memory.
        utilization: fraction of it that may be used.
        weight_bytes: this rank's weights.
        activation_bytes: everything else that a step needs.
        state_bytes: states of running sequences, outside the blocks.
    """

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    state_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Memory that may be used."""
        return int(self.total_bytes * self.utilization)

    @property
    def cache_bytes(self) -> int:
        """Memory left for blocks; negative if memory is missing."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes - self.state_bytes

    def num_blocks(self, spec: KVCacheSpec, max_num_seqs: int, extra_bytes: int = 0) -> int:
        """Return the blocks on this GPU, with `extra_bytes` more memory. Includes the null block. O(layers)."""
        if extra_bytes:
            return min(max(self.cache_bytes + extra_bytes, 0) // spec.bytes_per_block, MAX_BLOCKS)
        peak = self.weight_bytes + self.activation_bytes
        found = num_gpu_blocks(self.total_bytes, peak, self.utilization, spec=spec, max_num_seqs=max_num_seqs)
        return min(found, MAX_BLOCKS)


@dataclass(frozen=True, slots=True)
class GpuAssumptions:
    """Assumptions about a GPU and the model's weights.

    Args:
        gpu_memory_gib: memory of the GPU.
        weights_gib: weights of the whole model.
        activations: memory of a step.
        utilization: fraction of the memory that may be used, above 0 and at most 1.
        weights_on: returns the weights' bytes on each of n ranks; None divides `weights_gib` equally.
    """

    gpu_memory_gib: float
    weights_gib: float
    activations: Activations
    utilization: float
    weights_on: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        require_gib("gpu_memory_gib", self.gpu_memory_gib, above_zero=True)
        require_gib("weights_gib", self.weights_gib)
        share = require_number("gpu_memory_utilization", self.utilization)
        if not 0 < share <= 1:
            raise InvalidArgument(f"gpu_memory_utilization is {share}; it must be above 0 and at most 1")

    def budget(self, spec: KVCacheSpec, max_num_seqs: int) -> GpuBudget:
        """Return the memory of one rank of `spec`. O(layers)."""
        ranks = spec.tensor_parallel_size
        weight_bytes = -(-int(self.weights_gib * GIB) // ranks) if self.weights_on is None else self.weights_on(ranks)
        return GpuBudget(
            total_bytes=int(self.gpu_memory_gib * GIB),
            utilization=self.utilization,
            weight_bytes=weight_bytes,
            activation_bytes=self.activations.bytes_on(ranks),
            state_bytes=max_num_seqs * spec.state_bytes_per_sequence,
        )

    def smallest_tensor_parallel(self, spec: KVCacheSpec, num_tokens: int, max_num_seqs: int) -> int:
        """Return the smallest power of two of ranks that holds a request of `num_tokens`; 0 above 1024. O(layers)."""
        ranks = 1
        while ranks <= _MAX_RANKS:
            with suppress(InvalidArgument):  # not every number of ranks can divide the model
                split = dataclasses.replace(spec, tensor_parallel_size=ranks)
                num_blocks = self.budget(split, max_num_seqs).num_blocks(split, max_num_seqs)
                if split.max_concurrent_sequences(num_tokens, num_blocks=num_blocks) > 0:
                    return ranks
            ranks *= 2
        return 0


def cached_tokens(spec: KVCacheSpec, num_blocks: int) -> int:
    """Return the tokens whose keys and values, in every layer, `num_blocks` blocks can hold. O(groups).

    Sliding windows are ignored: each token takes its part of a block in every group, so the result is a lower bound.
    """
    sizes = [group.block_size for group in spec.groups]
    product = 1
    for size in sizes:
        product *= size
    # num_blocks / sum(1 / size), in integers.
    return min(num_blocks * product // sum(product // size for size in sizes), MAX_MODEL_LEN * MAX_BLOCKS)
