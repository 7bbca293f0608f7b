"""What the largest step of an engine takes on a GPU beside weights and blocks: from a config and the tokens of a step.

An engine measures it, by running that step without a cache; this says it in advance. Constants are measured, and
`docs/sizing.md` says on what, beside published figures that had no part in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int, require_str
from ..config import MAX_MODEL_LEN, MAX_SEQS
from ..errors import InvalidArgument
from .layers import MAX_DIMENSION
from .shape import ModelShape

_GIB = 2**30
#: Tenths of bytes that sampling takes for a logit beside the logit itself, by sampler. A fused kernel keeps it in
#: float32, with its probability and a draw; one that sorts keeps values and indices too, and room to sort in.
_SAMPLER_TENTHS = {"fused": 129, "sorting": 363}
#: Quarters of tensors as wide as the hidden state that a layer has at once, while its MLP runs.
_HIDDEN_QUARTERS = 17
#: Tensors as wide as the MLP: gate and up together, and their product.
_MLP_TENSORS = 3
#: Bytes outside the tensors, on a GPU alone and on one of several: kernels' code and workspaces, buffers of NCCL.
_CONTEXT_BYTES = (int(0.25 * _GIB), int(2.1 * _GIB))


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one GPU.

    forward_bytes: a layer's tensors, for all tokens of the step. sampling_bytes: logits of all sequences and what a
    sampler makes of them, while the hidden states are kept. workspace_bytes: of a mixture's experts, kept throughout.
    context_bytes: outside the tensors: what libraries take.
    """

    forward_bytes: int
    sampling_bytes: int
    workspace_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the most at once: the model runs, then its logits are sampled."""
        return max(self.forward_bytes, self.sampling_bytes) + self.workspace_bytes + self.context_bytes


def step_memory(
    shape: ModelShape,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    sampler: str = "fused",
) -> StepMemory:
    """Return what a step of `max_num_batched_tokens` tokens takes that samples for `max_num_seqs` sequences.

    max_num_seqs: 0 for an engine whose profile samples for none. tensor_parallel_size: ranks that share the MLP; logits
    are gathered whole on each. sampler: "fused" (vLLM 0.17 and later) or "sorting" (before it).

    O(1). Raises `InvalidArgument` for a value outside its limits.
    """
    if not isinstance(shape, ModelShape):
        raise InvalidArgument(f"shape is {shape!r}; it must be a ModelShape")
    tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, 1, MAX_MODEL_LEN)
    seqs = require_int("max_num_seqs", max_num_seqs, 0, MAX_SEQS)
    ranks = require_int("tensor_parallel_size", tensor_parallel_size, 1, MAX_DIMENSION)
    size = shape.element_bytes
    logits = seqs * shape.vocab_size
    return StepMemory(
        forward_bytes=tokens * size * _forward_quarters(shape, ranks) // 4,
        sampling_bytes=tokens * shape.hidden_size * size + logits * (10 * size + _sampler_tenths(sampler)) // 10,
        workspace_bytes=tokens * size * _workspace_elements(shape, ranks),
        context_bytes=_CONTEXT_BYTES[ranks > 1],
    )


def _sampler_tenths(sampler: object) -> int:
    name = require_str("sampler", sampler)
    if name not in _SAMPLER_TENTHS:
        raise InvalidArgument(f"sampler is {name!r}; it must be one of {', '.join(_SAMPLER_TENTHS)}")
    return _SAMPLER_TENTHS[name]


def _forward_quarters(shape: ModelShape, ranks: int) -> int:
    """Of a token, in quarters of elements: its hidden states, and a dense MLP; a mixture's are its workspace."""
    mlp = 0 if shape.num_experts else -(-shape.mlp_size // ranks)
    return 4 * _MLP_TENSORS * mlp + _HIDDEN_QUARTERS * shape.hidden_size


def _workspace_elements(shape: ModelShape, ranks: int) -> int:
    """Of a token: what its experts make of it, in two buffers that they share, and their sum."""
    if not shape.num_experts or shape.has_packed_experts:
        return 0
    expert = -(-shape.expert_size // ranks)
    outer = max(2 * expert, shape.hidden_size)
    return shape.experts_per_token * (outer + expert) + shape.hidden_size
