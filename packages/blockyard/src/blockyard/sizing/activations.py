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
#: Bytes outside the tensors: kernels' code and workspaces; on one of several GPUs also buffers of NCCL, which are small
#: on PCIe and large where GPUs have links of their own.
_ALONE_BYTES, _PCIE_BYTES, _LINKED_BYTES = int(0.25 * _GIB), int(0.35 * _GIB), int(2.1 * _GIB)
#: Bytes more in versions that count CUDA graphs (libraries, rotary tables, kernels' copies of weights); and on a GPU
#: whose memory is the CPU's too, pages of files.
_RECENT_BYTES, _SHARED_BYTES = int(0.45 * _GIB), int(4.4 * _GIB)
#: Bytes that vLLM estimates for a CUDA graph, for each layer of the model.
_GRAPH_LAYER_BYTES = 2**18
#: The most sequences that a CUDA graph is captured for.
_MAX_CAPTURED = 512


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one GPU.

    forward_bytes: a layer's tensors, for all tokens of the step. sampling_bytes: logits of all sequences and what a
    sampler makes of them, while the hidden states are kept. workspace_bytes: of a mixture's experts, kept throughout.
    context_bytes: outside the tensors: what libraries take. encoder_bytes: tensors of an image encoder, for the most
    images of a step. graph_bytes: CUDA graphs.
    """

    forward_bytes: int
    sampling_bytes: int
    workspace_bytes: int
    context_bytes: int
    encoder_bytes: int = 0
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the most at once: the encoder runs, then the model, then its logits are sampled."""
        running = max(self.forward_bytes + self.workspace_bytes, self.sampling_bytes + self.workspace_bytes)
        return max(running, self.encoder_bytes) + self.context_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Widths of an image encoder.

    patches_per_token: patches that become one token of the text model. max_item_tokens: tokens of the largest image.
    """

    hidden_size: int
    mlp_size: int
    patches_per_token: int
    max_item_tokens: int

    def bytes_of(self, max_num_batched_tokens: int) -> int:
        """Count the bytes of the tensors of one layer, for as many images of the largest size as a step takes.

        Ranks share the weights, and gather queries, keys and values whole. O(1).
        """
        items = max(1, max_num_batched_tokens // self.max_item_tokens)
        patches = items * self.max_item_tokens * self.patches_per_token
        return patches * 2 * (2 * self.mlp_size + self.hidden_size)


def step_memory(
    shape: ModelShape,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    sampler: str = "fused",
    has_links: bool = True,
    has_shared_memory: bool = False,
    num_graph_layers: int = 0,
    encoder: EncoderShape | None = None,
) -> StepMemory:
    """Return what a step of `max_num_batched_tokens` tokens takes that samples for `max_num_seqs` sequences.

    max_num_seqs: 0 for an engine whose profile samples for none. tensor_parallel_size: ranks that share the MLP; logits
    are gathered whole on each. sampler: "fused" (vLLM 0.17 and later) or "sorting" (before it). has_links: whether the
    GPUs of several ranks have links of their own (NVLink) or PCIe. has_shared_memory: whether a GPU's memory is the
    CPU's too. num_graph_layers: layers of the model that CUDA graphs are captured of; 0 for an engine without, or one
    that does not count them. encoder: of images, if it runs.

    O(1). Raises `InvalidArgument` for a value outside its limits.
    """
    if not isinstance(shape, ModelShape):
        raise InvalidArgument(f"shape is {shape!r}; it must be a ModelShape")
    tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, 1, MAX_MODEL_LEN)
    seqs = require_int("max_num_seqs", max_num_seqs, 0, MAX_SEQS)
    ranks = require_int("tensor_parallel_size", tensor_parallel_size, 1, MAX_DIMENSION)
    size = shape.element_bytes
    logits = seqs * shape.vocab_size
    context = _ALONE_BYTES if ranks == 1 else _LINKED_BYTES if has_links else _PCIE_BYTES
    return StepMemory(
        forward_bytes=tokens * size * _forward_quarters(shape, ranks) // 4,
        sampling_bytes=tokens * shape.hidden_size * size + logits * (10 * size + _sampler_tenths(sampler)) // 10,
        workspace_bytes=tokens * size * _workspace_elements(shape, ranks),
        context_bytes=context + _RECENT_BYTES * (num_graph_layers > 0) + _SHARED_BYTES * has_shared_memory,
        encoder_bytes=0 if encoder is None else encoder.bytes_of(tokens),
        graph_bytes=num_cuda_graphs(seqs) * num_graph_layers * _GRAPH_LAYER_BYTES,
    )


def num_cuda_graphs(max_num_seqs: int) -> int:
    """Count the CUDA graphs that vLLM captures: in pieces for steps of 1, 2, 4, 8, 16 ... tokens, whole for decoding.

    The largest has twice `max_num_seqs` tokens, at most 512; steps of decoding have at most `max_num_seqs`. O(1).
    """
    largest = min(2 * max_num_seqs, _MAX_CAPTURED)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, _MAX_CAPTURED + 1, 16)]
    return len([size for size in sizes if size <= largest]) + len([size for size in sizes if size <= max_num_seqs])


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
