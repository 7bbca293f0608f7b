"""Memory of a step, computed by hand, and GPUs by name."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import (
    EncoderShape,
    ModelShape,
    encoder_shape,
    gpu_names,
    known_gpu,
    known_model,
    model_names,
    num_cuda_graphs,
    step_memory,
)

GIB = 2**30
DENSE = ModelShape(hidden_size=100, mlp_size=400, vocab_size=1000)
MIXTURE = ModelShape(
    hidden_size=100, mlp_size=400, vocab_size=1000, num_experts=8, experts_per_token=2, expert_size=80
)  # fmt: skip


def test_a_step_of_a_dense_model() -> None:
    memory = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=10)
    assert memory.forward_bytes == 1000 * 2 * (3 * 400 + 425)
    assert memory.sampling_bytes == 1000 * 100 * 2 + 149_000
    assert memory.workspace_bytes == 0
    assert memory.context_bytes == GIB // 4
    # The layers run first, and then the logits are sampled.
    assert memory.total_bytes == memory.forward_bytes + memory.context_bytes
    many = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=1000)
    assert many.total_bytes == many.sampling_bytes + many.context_bytes


def test_ranks_share_the_mlp_and_not_the_logits() -> None:
    alone = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=10)
    shared = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=10, tensor_parallel_size=4)
    assert shared.forward_bytes == 1000 * 2 * (3 * 100 + 425)
    assert shared.sampling_bytes == alone.sampling_bytes
    assert shared.context_bytes == int(2.1 * GIB)
    on_pcie = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=10, tensor_parallel_size=4, has_links=False)
    assert on_pcie.context_bytes == int(0.35 * GIB)


def test_cuda_graphs_are_those_that_logs_count() -> None:
    # "PIECEWISE=51 (largest=512), FULL=35 (largest=256)", "PIECEWISE=8 (largest=40), FULL=5 (largest=16)",
    # "PIECEWISE=13 (largest=80), FULL=8 (largest=40)"
    assert [num_cuda_graphs(seqs) for seqs in (256, 20, 40, 1024, 0)] == [51 + 35, 8 + 5, 13 + 8, 51 + 51, 0]
    memory = step_memory(DENSE, max_num_batched_tokens=1000, max_num_seqs=20, num_graph_layers=60)
    assert memory.graph_bytes == 13 * 60 * 2**18


def test_an_encoder_of_images_runs_before_the_model() -> None:
    encoder = EncoderShape(hidden_size=10, mlp_size=40, patches_per_token=4, max_item_tokens=100)
    memory = step_memory(DENSE, max_num_batched_tokens=250, max_num_seqs=1, encoder=encoder)
    assert memory.encoder_bytes == 2 * 100 * 4 * 2 * (2 * 40 + 10)  # two images
    assert memory.total_bytes == max(memory.forward_bytes, memory.encoder_bytes) + memory.context_bytes
    assert encoder_shape(known_model("qwen3.6-27b").config) == EncoderShape(1152, 4304, 4, 16384)
    assert encoder_shape(known_model("llama-3-8b").config) is None


def test_a_sampler_that_sorts_takes_more() -> None:
    fused = step_memory(DENSE, max_num_batched_tokens=1, max_num_seqs=100)
    sorting = step_memory(DENSE, max_num_batched_tokens=1, max_num_seqs=100, sampler="sorting")
    assert sorting.sampling_bytes - fused.sampling_bytes == 100_000 * 234 // 10
    assert step_memory(DENSE, max_num_batched_tokens=1, max_num_seqs=0, sampler="sorting").sampling_bytes == 200


def test_experts_keep_a_workspace() -> None:
    memory = step_memory(MIXTURE, max_num_batched_tokens=1000, max_num_seqs=1)
    assert memory.workspace_bytes == 1000 * 2 * (2 * (160 + 80) + 100)  # two experts, gate and up, product; and the sum
    halved = step_memory(MIXTURE, max_num_batched_tokens=1000, max_num_seqs=1, tensor_parallel_size=2)
    assert halved.workspace_bytes == 1000 * 2 * (2 * (100 + 40) + 100)  # now the hidden state is the wider


def test_wider_types_take_more_memory() -> None:
    wide = ModelShape(hidden_size=100, mlp_size=400, vocab_size=1000, dtype="float32")
    memory = step_memory(wide, max_num_batched_tokens=10, max_num_seqs=10)
    assert memory.forward_bytes == 10 * 4 * (3 * 400 + 425)
    assert memory.sampling_bytes == 10 * 100 * 4 + 169_000


def test_shapes_of_known_models() -> None:
    for name in model_names():
        ModelShape.from_config(known_model(name).config)
    shape = ModelShape.from_config(known_model("qwen3-30b-a3b").config)
    assert (shape.num_experts, shape.experts_per_token, shape.expert_size) == (128, 8, 768)
    assert ModelShape.from_config(known_model("gpt-oss-20b").config).has_packed_experts
    gemma = ModelShape.from_config(known_model("gemma-3-4b").config)
    assert (gemma.vocab_size, gemma.dtype) == (262_208, "bfloat16")
    config = {"hidden_size": 8, "vocab_size": 9, "torch_dtype": "float8_e4m3fn"}
    assert ModelShape.from_config(config) == ModelShape(8, 32, 9)  # four times as wide; activations have 16 bits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": 3}, "shape is 3; it must be a ModelShape"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be from 1"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1; it must be from 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"sampler": "none"}, "sampler is 'none'; it must be one of fused, sorting"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        step_memory(**{"shape": DENSE, "max_num_batched_tokens": 1, "max_num_seqs": 1, **given})


def test_bad_shapes_are_named() -> None:
    for name in ("hidden_size", "mlp_size", "vocab_size"):
        with pytest.raises(InvalidArgument, match=f"{name} is 0; it must be from 1"):
            ModelShape(**{"hidden_size": 1, "mlp_size": 1, "vocab_size": 1, name: 0})
    with pytest.raises(InvalidArgument, match="experts_per_token is 2; it must be from 0 to 1"):
        ModelShape(1, 1, 1, num_experts=1, experts_per_token=2)
    with pytest.raises(InvalidArgument, match="hidden_size is missing"):
        ModelShape.from_config({"vocab_size": 9})


def test_gpus_are_found_by_name() -> None:
    assert known_gpu("H100").memory_gib == 79.19
    assert known_gpu("RTX 4090") == known_gpu("rtx-4090")
    for name in gpu_names():
        gpu = known_gpu(name)
        assert gpu.source.startswith("https://")
        assert 10 < gpu.memory_gib < 200
    with pytest.raises(InvalidArgument, match="gpu is 'h10000'; it must be one of h100"):
        known_gpu("h10000")
    assert known_gpu("H200").memory_gib == 139.80
    with pytest.raises(InvalidArgument) as told:
        known_gpu("h10000")
    assert all(name in str(told.value) for name in gpu_names()), "the likely ones first, and no name is left out"
    with pytest.raises(InvalidArgument, match=r"one of a10, .*; for others, give the memory"):
        known_gpu("?")
