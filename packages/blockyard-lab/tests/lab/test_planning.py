"""Capacity plans compared with numbers worked out by hand; models by name; lengths of traces; refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard.sizing import KVCacheSpec, known_model, model_config, model_names
from blockyard_lab import Skips, TraceError, TraceRequest, read_references
from blockyard_lab.planning import CapacityPlan, plan_capacity
from blockyard_lab.planning.gpu_memory import cached_tokens
from blockyard_lab.survey import TraceSurvey, survey
from blockyard_lab.traces import open_trace

#: A token takes 4 layers * 2 * 4 heads * 64 * 2 bytes = 4 KiB, a block of 16 tokens 64 KiB: 16,384 of them a GiB.
SMALL = KVCacheSpec.uniform(4, 4, 64)
BLOCKS_A_GIB = 16_384


class Requests:
    """A trace of (arrival, prompt tokens, output tokens, ids or None), in blocks of 16."""

    name, hash_block_size = "requests", 16

    def __init__(self, *requests: tuple[float, int, int, list[int] | None]) -> None:
        self.requests, self.skips = requests, Skips()

    def __iter__(self) -> Iterator[TraceRequest]:
        for arrival, prompt, output, ids in self.requests:
            yield TraceRequest(arrival, prompt, output, None if ids is None else np.array(ids, np.int64))


def plan(spec: KVCacheSpec = SMALL, **options: Any) -> CapacityPlan:
    """Plan for one GPU of 10 GiB, all usable: weights take 6 and activations 2."""
    given = {"gpu_memory_gib": 10, "weights_gib": 6, "activation_gib": 2, "gpu_memory_utilization": 1.0, **options}
    return plan_capacity(spec, **given)


def plan_of(name: str, **options: Any) -> CapacityPlan:
    ranks = options.pop("tensor_parallel_size", 1)
    config = known_model(name).config
    return plan(KVCacheSpec.from_config(config, dtype="bfloat16", tensor_parallel_size=ranks), **options)


def says(found: CapacityPlan, *pieces: str) -> bool:
    return all(any(piece in sentence for sentence in found.assumptions) for piece in pieces)


# ---------------------------------------------------------------- blocks and requests


def test_blocks_are_what_weights_and_activations_leave() -> None:
    found = plan(lengths=[16, 1000])
    assert found.gpu.cache_bytes == 2 * 2**30
    assert found.num_blocks == 2 * BLOCKS_A_GIB
    assert found.num_tokens == (2 * BLOCKS_A_GIB - 1) * 16  # without the null block
    # 1000 tokens take 63 blocks: 32,767 / 63 = 520.1.
    assert [(row.num_blocks, row.concurrent) for row in found.requests] == [(1, 32_767), (63, 520)]
    assert found.fits
    assert (found.running, found.cache_budget, found.hits) == (None, None, None)
    # The square root of the mean length, 508, is 22.5: between 16 and 32, nearer to 16 by ratio (22.63 is the border).
    assert found.block_size.block_size == 16


def test_utilization_is_of_the_whole_gpu() -> None:
    # 10 * 0.9 - 6 - 2 = 1 GiB.
    assert plan(gpu_memory_utilization=0.9).num_blocks == BLOCKS_A_GIB


def test_llama_on_eighty_gib_matches_the_calculation() -> None:
    # 80 * 0.9 - 16,060,522,496 / 2**30 - 2 = 55.0424 GiB of 2 MiB each: 28,181 blocks; 28,180 / 500 = 56.
    weights = known_model("llama-3.1-8b").num_parameters * 2 / 2**30
    found = plan_of("llama-3.1-8b", gpu_memory_gib=80, gpu_memory_utilization=0.9, weights_gib=weights, lengths=[8000])
    assert found.num_blocks == ((72 * 2**30) - 16_060_522_496 - 2 * 2**30) // 2**21 == 28_181
    assert found.requests[0].concurrent == 56


def test_ranks_share_weights_and_heads_and_replicas_add_up() -> None:
    found = plan_of("llama-3.1-8b", tensor_parallel_size=4, num_gpus=8, lengths=[1600])
    # 10 - 6 / 4 - 2 = 6.5 GiB a GPU; a block is 2 MiB / 4 there: 13,312. A request takes 100: 133 of them, twice.
    assert (found.num_gpus, found.num_replicas, found.num_blocks) == (8, 2, 13_312)
    assert (found.requests[0].concurrent, found.requests[0].concurrent_in_all) == (133, 266)
    assert says(found, "8 KV heads are divided among 4 ranks, 2 on each", "The 2 replicas", "1.50 GiB on each")


def test_fewer_heads_than_ranks_are_replicated() -> None:
    found = plan_of("qwen2.5-7b", tensor_parallel_size=8)
    assert says(found, "4 KV heads are fewer than 8 ranks: each keeps one, so 2 ranks keep the same head")
    # 28 layers * 2 * 128 * 2 bytes * 16 tokens, as on 4 ranks.
    assert found.spec.bytes_per_block == plan_of("qwen2.5-7b", tensor_parallel_size=4).spec.bytes_per_block == 229_376


def test_latent_attention_is_whole_on_every_rank() -> None:
    assert says(plan_of("deepseek-v3", tensor_parallel_size=8), "whole on each of the 8 ranks")


def test_windows_are_counted_as_the_allocator_counts() -> None:
    found = plan_of("gpt-oss-20b", lengths=[131_072])
    # 2 GiB of 384 KiB: 5,461 blocks. 8,201 are needed, so it takes two ranks: blocks of half the bytes, and 5 GiB.
    assert (found.num_blocks, found.requests[0].num_blocks, found.requests[0].concurrent) == (5_461, 8_201, 0)
    assert (found.fits, found.smallest_tensor_parallel) == (False, 2)
    # A token takes a 16th of a block in each of two groups.
    assert found.num_tokens == 5_460 * 8
    assert says(found, "a window (of 128 tokens)", "2 layer groups", "lower bound")


def test_memory_for_states_is_reserved_for_every_request() -> None:
    found = plan_of("jamba-v0.1", max_num_seqs=64, lengths=[16])
    state = 28 * 573_440
    assert found.gpu.state_bytes == 64 * state
    assert found.num_blocks == (2 * 2**30 - 64 * state) // 262_144
    assert found.requests[0].concurrent == 64  # as many as have a state
    assert plan_of("jamba-v0.1").gpu.state_bytes <= 256 * state
    assert says(found, "At most 64 requests", "a state of 15.31 MiB", "upper bound")


def test_cached_tokens_respect_every_groups_block_size() -> None:
    assert cached_tokens(SMALL, 10) == 160
    # Gemma 3 1B: 7 groups, each with a 16th of a block for a token: 70 blocks are 160 tokens.
    assert cached_tokens(KVCacheSpec.from_config(known_model("gemma-3-1b").config), 70) == 160


# ---------------------------------------------------------------- what does not fit


def test_smallest_tensor_parallel_that_fits_is_found() -> None:
    # 10 - 30 / n - 2 is above nothing from n = 4 on.
    found = plan_of("llama-3.1-8b", weights_gib=30)
    assert not found.fits
    assert found.gpu.cache_bytes == -22 * 2**30
    assert (found.num_blocks, found.num_tokens, found.smallest_tensor_parallel) == (0, 0, 4)
    assert plan_of("llama-3.1-8b", weights_gib=30, tensor_parallel_size=4).fits
    assert plan_of("llama-3.1-8b", weights_gib=30, tensor_parallel_size=2).smallest_tensor_parallel == 4


def test_more_ranks_do_not_help_against_activations() -> None:
    assert plan(activation_gib=10).smallest_tensor_parallel == 0


# ---------------------------------------------------------------- with a trace


#: Prompts A B, C D, A B, C D, each of 32 tokens: LRU hits 4 of 8 references in 4 blocks or more, and
#: none in 2.
CYCLE = Requests(*((float(i), 32, 8, [2 * (i % 2) + 1, 2 * (i % 2) + 2]) for i in range(4)))


def with_trace(trace: Any, spec: KVCacheSpec = SMALL, **options: Any) -> CapacityPlan:
    return plan(spec, traffic=survey(trace), references=read_references(trace), **options)


def of_blocks(num_blocks: int, **options: Any) -> dict[str, Any]:
    """A GPU with room for this many blocks."""
    return {
        "gpu_memory_gib": num_blocks / BLOCKS_A_GIB,
        "weights_gib": 0,
        "activation_gib": 0,
        "lengths": [16],
        **options,
    }


def test_hit_rates_are_those_of_the_blocks_that_requests_leave() -> None:
    found = with_trace(CYCLE, **of_blocks(10, running=2))
    # 40 tokens take 3 blocks; 1.2 * 2 * 3 rounds up to 8; 10 - 1 - 8 = 1 is left, 4 in the whole pool would do.
    assert found.cache_budget is not None
    assert (found.cache_budget.reserved_blocks, found.cache_budget.num_blocks) == (8, 1)
    hits = found.hits
    assert hits is not None
    assert (hits.expected.num_blocks, hits.expected.hit_rate) == (1, 0.0)
    assert (hits.whole_pool.num_blocks, hits.whole_pool.hit_rate) == (9, 0.5)
    assert (hits.one_more_gib.num_blocks, hits.one_more_gib.hit_rate) == (1 + BLOCKS_A_GIB, 0.5)
    assert (hits.tenth_more.num_blocks, hits.tenth_more.hit_rate) == (2, 0.0)
    assert (hits.unlimited, hits.with_cpu) == (0.5, None)
    assert [row.label for row in found.requests] == ["", "trace mean", "trace p99"]
    assert says(found, "2 requests run at once on a replica, as given", "8 blocks of 16 prompt tokens")


def test_a_cpu_tier_adds_its_blocks() -> None:
    # 4 blocks of 64 KiB, one of them the null block: 1 + 3 = 4 hold the cycle.
    found = with_trace(CYCLE, **of_blocks(10, running=2, cpu_gib=4 / BLOCKS_A_GIB))
    assert found.num_cpu_blocks == 4
    assert found.hits is not None
    assert found.hits.with_cpu is not None
    assert (found.hits.with_cpu.num_blocks, found.hits.with_cpu.hit_rate) == (4, 0.5)
    assert says(found, "an upper bound")


def test_the_cpu_tier_is_for_all_gpus_together() -> None:
    assert plan(num_gpus=4, cpu_gib=1).num_cpu_blocks == BLOCKS_A_GIB // 4


def test_too_many_running_requests_leave_nothing() -> None:
    found = with_trace(CYCLE, **of_blocks(10, running=3))
    # 1.2 * 3 * 3 rounds up to 11, of 9.
    assert found.cache_budget is not None
    assert (found.cache_budget.missing_blocks, found.cache_budget.num_blocks) == (2, 0)
    assert found.hits is not None
    assert found.hits.expected.hit_rate == 0.0


def test_running_requests_follow_from_arrivals() -> None:
    # An arrival a second and 8 tokens an output: at half a second each 4 are at work, at 0.6 s 4.8.
    assert with_trace(CYCLE, seconds_per_token=0.5).running == 4
    found = with_trace(CYCLE, seconds_per_token=0.6)
    assert found.running == 5
    assert says(found, "1.00 arrivals per second and 8 tokens per output, at 0.6 s each")
    assert with_trace(CYCLE, seconds_per_token=0.6, max_num_seqs=3).running == 3


def test_simultaneous_arrivals_give_no_running_requests() -> None:
    found = with_trace(Requests((0.0, 32, 8, [1, 2]), (0.0, 32, 8, [1, 2])))
    assert (found.running, found.cache_budget, found.hits) == (None, None, None)


def test_capacities_are_converted_by_tokens() -> None:
    # Blocks of 4 tokens: the trace's four blocks of 16 take 16 of them. Three hit the first half of each prompt.
    spec = KVCacheSpec.uniform(4, 4, 64, block_size=4)
    for num_blocks, rate in ((16, 0.25), (17, 0.5)):
        found = with_trace(CYCLE, spec, **of_blocks(num_blocks / 4, running=0, lengths=[1]))
        assert found.num_blocks == num_blocks
        assert found.hits is not None
        assert found.hits.whole_pool.hit_rate == found.hits.expected.hit_rate == rate
        assert says(found, "blocks have 4 tokens and the trace's 16", "at least as many tokens hit as shown")
    large = with_trace(CYCLE, KVCacheSpec.uniform(4, 4, 64, block_size=32))
    assert says(large, "blocks have 32 tokens and the trace's 16", "fewer tokens hit than shown")
    assert not says(with_trace(CYCLE), "converted by tokens")


def test_other_policies_run_the_trace_too() -> None:
    # Three blocks: LRU keeps A, C and D, then A, B and C: 2 hits of 8. The optimum keeps A, C and D for good: 3.
    rates = {}
    for policy in ("lru", "arc", "optimum"):
        found = with_trace(CYCLE, **of_blocks(4, running=0, policy=policy))
        assert found.hits is not None
        assert says(found, f"evicts by {policy}")
        rates[policy] = found.hits.expected.hit_rate
    assert (rates["lru"], rates["optimum"]) == (2 / 8, 3 / 8)
    assert 0.0 <= rates["arc"] <= rates["optimum"]


def test_sampled_hit_rates_have_errors() -> None:
    trace = open_trace("chat:requests=400,seed=1")
    whole, sample = read_references(trace), read_references(trace, halvings=2)
    rates = [
        plan(traffic=survey(trace), references=references, **of_blocks(4000, running=1)).hits
        for references in (whole, sample)
    ]
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0].expected.error == 0.0 < rates[1].expected.error
    assert abs(rates[0].expected.hit_rate - rates[1].expected.hit_rate) < 0.1
    assert says(plan(traffic=survey(trace), references=sample), "one block in 4")


# ---------------------------------------------------------------- lengths of a trace


def test_trace_adds_its_mean_and_p99_lengths() -> None:
    trace = Requests(*((float(i), 9 + i, 0, [1]) for i in range(100)))
    # Lengths 10 to 109, an output of 0 counted as one token; the 99th percentile, rounded up, is the 100th of them.
    found = survey(trace)
    assert found == TraceSurvey("requests", 100, 5850, 0, 100, 109, 109, 99.0, True)
    assert (found.mean_sequence, found.mean_output) == (59.5, 1.0)
    found = survey(Requests((3.0, 9, 1, None)))
    assert found == TraceSurvey("requests", 1, 9, 1, 1, 10, 10, 0.0, False)
    assert (found.mean_sequence, found.mean_output) == (10.0, 1.0)
    assert survey(Requests((0.0, 9, 1, [1]), (1.0, 9, 1, None))).has_contents is False
    with pytest.raises(TraceError, match="requests has no requests"):
        survey(Requests())


# ---------------------------------------------------------------- models by name


def test_every_known_model_can_be_counted() -> None:
    for name in model_names():
        config = known_model(name).config
        assert KVCacheSpec.from_config(config, dtype="bfloat16").bytes_per_block > 0
        assert model_config(name) == config


def test_parameters_are_those_of_the_shapes() -> None:
    """Llama: embeddings and head, in each layer attention, three matrices of the MLP and two norms, and a last norm."""
    for name, vocabulary, mlp, heads_in_all in (
        ("llama-3.1-8b", 128_256, 14_336, 2),
        ("llama-3.1-70b", 128_256, 28_672, 2),
        ("llama-3.1-405b", 128_256, 53_248, 2),
        ("mistral-7b-v0.1", 32_000, 14_336, 2),
        ("smollm2-135m", 49_152, 1_536, 1),  # its head is its embeddings
    ):
        model = known_model(name)
        hidden, heads = model.config["hidden_size"], model.config["num_attention_heads"]
        key_value = hidden // heads * model.config["num_key_value_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * mlp + 2 * hidden
        total = heads_in_all * vocabulary * hidden + model.config["num_hidden_layers"] * layer + hidden
        assert model.num_parameters == total


def test_a_known_model_is_a_copy() -> None:
    known_model("LLAMA-3.1-8B").config["hidden_size"] = 0
    assert known_model("llama-3.1-8b").config["hidden_size"] == 4096


def test_unknown_model_error_suggests_similar_names() -> None:
    with pytest.raises(InvalidArgument, match=r"model is 'llama3.1-8b'; .*similar names: llama-3.1-8b"):
        known_model("llama3.1-8b")
    with pytest.raises(InvalidArgument, match=r"known names: bamba-9b, "):
        known_model("?")
    with pytest.raises(InvalidArgument, match="name is 3; it must be a string"):
        known_model(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_gib": 0}, "gpu_memory_gib is 0; it must be above 0"),
        ({"gpu_memory_gib": math.nan}, "gpu_memory_gib is nan; it must be finite"),
        ({"gpu_memory_gib": 1e9}, "gpu_memory_gib is 1000000000.0; it must be above 0 and at most 1048576"),
        ({"gpu_memory_gib": "80"}, "gpu_memory_gib is '80'; it must be a number"),
        ({"weights_gib": -1}, "weights_gib is -1; it must be at least 0"),
        ({"activation_gib": math.inf}, "activation_gib is inf"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0.0; it must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1"),
        ({"num_gpus": 0}, "num_gpus is 0; it must be from 1"),
        ({"num_gpus": 1.5}, "num_gpus is 1.5; it must be an integer"),
        ({"lengths": []}, "lengths is \\[\\]"),
        ({"lengths": "8"}, "lengths is '8'; it must be a list"),
        ({"lengths": [0]}, "lengths is 0; it must be from 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"running": -1}, "running is -1"),
        ({"running": 5, "max_num_seqs": 4}, "running is 5; it must be from 0 to 4"),
        ({"seconds_per_token": 0}, "seconds_per_token is 0.0; it must be above 0"),
        ({"seconds_per_token": math.nan}, "seconds_per_token is nan"),
        ({"cpu_gib": -1}, "cpu_gib is -1"),
        ({"policy": "best"}, "'best'; it must be one of"),
    ],
)
def test_invalid_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan(**options)


def test_gpus_must_be_whole_replicas() -> None:
    with pytest.raises(InvalidArgument, match="num_gpus is 6; it must be a multiple of tensor_parallel_size, 4"):
        plan_of("llama-3.1-8b", tensor_parallel_size=4, num_gpus=6)
    with pytest.raises(InvalidArgument, match="spec is 3; it must be a KVCacheSpec"):
        plan_capacity(3, gpu_memory_gib=1, weights_gib=1)  # type: ignore[arg-type]
