"""What a plan takes for activations: what was measured, or what the model's widths and the engine's step come to."""

from __future__ import annotations

from dataclasses import dataclass

from ...arguments import require_int
from ...config import MAX_MODEL_LEN
from ...errors import InvalidArgument
from ...sizing import ModelShape, StepMemory, step_memory
from .limits import GIB, require_gib

#: GiB a GPU where nothing was measured and the step is not known.
DEFAULT_ACTIVATION_GIB = 2.0
#: Tokens and sequences of a step where nothing was said: vLLM's, on a GPU of 70 GiB or more, and on a smaller one.
_LARGE_GPU_GIB = 70
_LARGE_STEP, _SMALL_STEP = (8192, 1024), (2048, 256)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that an engine computes. shape: the model's widths. sampler: as `step_memory` takes it.

    max_num_batched_tokens: tokens; None for 8,192 on a GPU of 70 GiB or more, else 2,048, as vLLM serves.
    """

    shape: ModelShape
    max_num_batched_tokens: int | None = None
    sampler: str = "fused"


@dataclass(frozen=True, slots=True)
class Activations:
    """given_gib: on each GPU, None if not given. step: None if not known. tokens, seqs: of the step."""

    given_gib: float | None
    step: LargestStep | None
    tokens: int
    seqs: int

    @classmethod
    def of(
        cls, given_gib: float | None, step: LargestStep | None, gpu_memory_gib: float, max_num_seqs: int | None
    ) -> Activations:
        """Check what was given, and fill in what was not. Raises `InvalidArgument`."""
        if given_gib is not None:
            require_gib("activation_gib", given_gib)
        if step is not None and not isinstance(step, LargestStep):
            raise InvalidArgument(f"step is {step!r}; it must be a LargestStep")
        tokens, seqs = _LARGE_STEP if gpu_memory_gib >= _LARGE_GPU_GIB else _SMALL_STEP
        if step is not None and step.max_num_batched_tokens is not None:
            tokens = require_int("max_num_batched_tokens", step.max_num_batched_tokens, 1, MAX_MODEL_LEN)
        wanted = seqs if max_num_seqs is None else max_num_seqs
        found = cls(given_gib, step, tokens, min(wanted, tokens))
        found.bytes_on(1)
        return found

    def bytes_on(self, ranks: int) -> int:
        """Bytes on each of the GPUs that share the model."""
        memory = self._memory(ranks)
        if memory is not None:
            return memory.total_bytes
        return int((DEFAULT_ACTIVATION_GIB if self.given_gib is None else self.given_gib) * GIB)

    def sentence(self, ranks: int) -> str:
        """Where the number comes from."""
        memory, gib = self._memory(ranks), self.bytes_on(ranks) / GIB
        if memory is None or self.step is None:
            source = "as given" if self.given_gib is not None else "a guess, since the model's widths are not known"
            return f"Activations and the engine's buffers take {gib:g} GiB on each GPU, {source}."
        experts = f", experts' workspace {memory.workspace_bytes / GIB:.2f}" * (memory.workspace_bytes > 0)
        return (
            f"Activations take {gib:.2f} GiB on each GPU, in a step of {self.tokens:,} tokens that samples for "
            f"{self.seqs:,} sequences ({self.step.sampler} sampler): the layers {memory.forward_bytes / GIB:.2f} GiB, "
            f"or sampling {memory.sampling_bytes / GIB:.2f}{experts}, libraries {memory.context_bytes / GIB:.2f}. The "
            f"engine's own profile is the measurement. CUDA graphs are not in it."
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
        )
