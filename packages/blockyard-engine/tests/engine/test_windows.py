"""Models with sliding windows: their layers are separate groups, and blocks that leave the window are freed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import NeverFits
from blockyard_engine import Engine, FinishReason, SamplingParams, StepReport
from blockyard_testing.tiny_models import (
    WINDOWED,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

LENGTHS = (1, 2, 15, 16, 17, 33, 5, 48, 64, 3, 31, 40)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("shape", WINDOWED)
def test_tokens_equal_those_of_generate(shape: str, block_size: int, caching: bool) -> None:
    model = tiny_model(shape)
    prompts = mixed_prompts(LENGTHS, shared=20)
    engine = Engine(
        model,
        num_blocks=2400 // block_size,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=30,
        enable_prefix_caching=caching,
    )
    results = engine.generate(prompts, SamplingParams(max_tokens=24), on_step=lambda _: engine.cache.check())
    assert tokens_of(results) == reference_tokens(model, prompts, 24)
    assert (sum(result.num_cached_tokens for result in results) > 0) is caching
    assert engine.cache.num_used_blocks == 0


def test_layers_of_a_window_are_a_group_and_share_the_tensor() -> None:
    engine = Engine(tiny_model("gemma3"), num_blocks=60)
    assert engine.shape.windows == (13, 13, 0, 13, 0)
    windows = [group.sliding_window for group in engine.cache.config.layer_groups]
    assert windows == [0, 13, 13]
    assert engine.kv_cache.data.shape[0] == 2  # places for the layers of one group
    places = [(engine.kv_cache.places.group(layer), engine.kv_cache.places.place(layer)) for layer in range(5)]
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (0, 1)]


def test_blocks_that_leave_the_window_are_freed() -> None:
    (prompt,) = mixed_prompts((8,))
    engine = Engine(
        tiny_model("mistral-window"), num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
    )
    most = 0

    def watch(_: StepReport) -> None:
        nonlocal most
        most = max(most, engine.cache.num_used_blocks)

    (result,) = engine.generate([prompt], SamplingParams(max_tokens=120), on_step=watch)
    assert [result.token_ids] == reference_tokens(tiny_model("mistral-window"), [prompt], 120)
    assert most == 6  # what the next token attends to, 20 tokens, lies in five or six blocks; all 127 would take 32


@pytest.mark.parametrize("options", [{}, {"num_cpu_blocks": 200, "preemption": "swap"}], ids=["recompute", "swap"])
@pytest.mark.parametrize("shape", WINDOWED)
def test_few_blocks_change_no_token(shape: str, options: dict[str, Any]) -> None:
    model = tiny_model(shape)
    prompts = mixed_prompts((9, 14, 5, 20, 30, 3, 17), shared=4)
    # A seed under which no draw falls so close between two tokens that rounding decides.
    sampling = SamplingParams(max_tokens=30, n=2, temperature=1.0, seed=1)
    plenty = Engine(model, num_blocks=600, block_size=4).generate(prompts, sampling)
    num_blocks = {"mistral-window": 22, "gemma3": 46}.get(shape, 40)
    engine = Engine(model, num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, **options)
    squeezed = engine.generate(prompts, sampling, on_step=lambda _: engine.cache.check())
    for one, other in zip(plenty, squeezed, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
    assert engine.num_preemptions >= 10
    assert engine.cache.num_used_blocks == 0


def test_a_window_that_no_sequence_outgrows_needs_no_group() -> None:
    model = tiny_model("mistral-window")
    engine = Engine(model, num_blocks=20, max_model_len=21)
    assert engine.shape.windows == (0, 0, 0)
    assert [group.sliding_window for group in engine.cache.config.groups] == [0]
    prompts = mixed_prompts((9, 12))
    results = engine.generate(prompts, SamplingParams(max_tokens=8))
    assert tokens_of(results) == reference_tokens(model, prompts, 8)
    assert results[0].finish_reason is FinishReason.LENGTH


def test_never_fits_includes_the_windows() -> None:
    engine = Engine(tiny_model("mistral-window"), num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
    # The window and a step reach into at most 7 blocks, however long the sequence: there are 11.
    assert engine.max_new_tokens(8) == 504
    small = Engine(tiny_model("mistral-window"), num_blocks=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    message = (
        r"6 blocks of 4, computed token by token \(max_num_batched_tokens is 16\); the cache can give one sequence 5"
    )
    with pytest.raises(NeverFits, match=message):
        small.add_request(mixed_prompts((8,))[0], SamplingParams(max_tokens=100))


def test_a_chunk_that_does_not_fit_is_halved() -> None:
    """A window of 21 and a chunk of 16 need at most 10 blocks, a chunk of 8 needs 8, of 4 needs 7, one token 6."""
    model = tiny_model("mistral-window")
    (prompt,) = mixed_prompts((60,))
    num_steps = []
    for num_blocks in (11, 9, 8, 7):
        engine = Engine(model, num_blocks=num_blocks, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
        reports: list[StepReport] = []
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=2), on_step=reports.append)
        assert [result.token_ids] == reference_tokens(model, [prompt], 2)
        assert sum(report.num_tokens for report in reports) == 61
        assert engine.num_preemptions == engine.cache.num_used_blocks == 0
        num_steps.append(len(reports))
    assert num_steps[0] == 5  # 16, 16, 16, 12, and the answer's first token
    assert num_steps == sorted(set(num_steps))  # the fewer blocks, the shorter the chunks
