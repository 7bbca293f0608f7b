"""GPU memory of an engine's largest step besides weights and blocks, estimated from a config.

An engine measures it by running the step without a cache; this predicts it. The constants were measured;
`docs/sizing.md` describes how, and compares the results with published figures that were not used for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int, require_str
from ..cache_options import MAX_MODEL_LEN
from ..config import MAX_SEQS
from ..errors import InvalidArgument
from .layers import MAX_DIMENSION
from .shape import ModelShape

_GIB = 2**30
#: Tenths of bytes that sampling takes per logit besides the logit, by sampler. A fused kernel keeps a float32 copy, the
#: probability and a random number; a sorting one also values, indices and a sort buffer.
_SAMPLER_TENTHS = {"fused": 129, "sorting": 363}
#: Live tensors of the hidden state's width while a layer's MLP runs, in quarters.
_HIDDEN_QUARTERS = 17
#: Live tensors of the MLP's width: gate and up together, and their product.
_MLP_TENSORS = 3
#: Bytes outside the tensors: code and workspaces of kernels, and with several GPUs NCCL's buffers, which are small on
#: PCIe and large with NVLink.
_ALONE_BYTES, _PCIE_BYTES, _LINKED_BYTES = int(0.25 * _GIB), int(0.35 * _GIB), int(2.1 * _GIB)
#: Further bytes in versions that count CUDA graphs (libraries, rotary tables, kernels' copies of weights), and file
#: pages on a GPU that shares the CPU's memory.
_RECENT_BYTES, _SHARED_BYTES = int(0.45 * _GIB), int(4.4 * _GIB)
#: vLLM's estimate of the bytes of a CUDA graph per layer.
_GRAPH_LAYER_BYTES = 2**18
#: Most sequences of a captured CUDA graph.
_MAX_CAPTURED = 512


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a step on one GPU, in bytes.

    Attributes:
        forward_bytes: tensors of one layer for all tokens of the step.
        sampling_bytes: hidden states, logits of all sequences, and the sampler's tensors.
        workspace_bytes: experts' workspace, kept throughout.
        context_bytes: memory of libraries.
        encoder_bytes: tensors of an image encoder for the most images of a step.
        graph_bytes: CUDA graphs.
    """

    forward_bytes: int
    sampling_bytes: int
    workspace_bytes: int
    context_bytes: int
    encoder_bytes: int = 0
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the peak. The encoder, the model and the sampler run one after another."""
        running = max(self.forward_bytes + self.workspace_bytes, self.sampling_bytes + self.workspace_bytes)
        return max(running, self.encoder_bytes) + self.context_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Widths of an image encoder.

    Attributes:
        hidden_size: width of its hidden state.
        mlp_size: width of its MLP.
        patches_per_token: patches that become one token of the text model.
        max_item_tokens: tokens of the largest image.
    """

    hidden_size: int
    mlp_size: int
    patches_per_token: int
    max_item_tokens: int

    def bytes_of(self, max_num_batched_tokens: int) -> int:
        """Return the bytes of one layer's tensors for as many images of the largest size as fit in a step. O(1).

        Ranks share the weights, but each gathers all queries, keys and values.
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
    """Return the memory of a step. O(1).

    Args:
        shape: widths of the model.
        max_num_batched_tokens: tokens of the step.
        max_num_seqs: sequences to sample for; 0 if the engine's profile run does not sample.
        tensor_parallel_size: ranks that share the MLP. Each gathers all logits.
        sampler: "fused" (vLLM 0.17 and later) or "sorting" (before).
        has_links: whether several GPUs are connected by NVLink instead of PCIe.
        has_shared_memory: whether the GPU shares the CPU's memory.
        num_graph_layers: layers captured in CUDA graphs; 0 if the engine has or counts none.
        encoder: image encoder, if it runs.

    Raises:
        InvalidArgument: a value is outside its limits.
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
    """Return the number of CUDA graphs that vLLM captures: piecewise ones and those for decode. O(1).

    Piecewise graphs are for steps of 1, 2, 4, 8, 16, ... tokens, up to twice `max_num_seqs` and at most 512. Decode
    graphs have at most `max_num_seqs` tokens.
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
    """Return elements per token, in quarters, of hidden states and a dense MLP. Experts are in the workspace."""
    mlp = 0 if shape.num_experts else -(-shape.mlp_size // ranks)
    return 4 * _MLP_TENSORS * mlp + _HIDDEN_QUARTERS * shape.hidden_size


def _workspace_elements(shape: ModelShape, ranks: int) -> int:
    """Return the elements per token of the experts' two shared buffers and their sum."""
    if not shape.num_experts or shape.has_packed_experts:
        return 0
    expert = -(-shape.expert_size // ranks)
    outer = max(2 * expert, shape.hidden_size)
    return shape.experts_per_token * (outer + expert) + shape.hidden_size
