"""Beam search has the hypotheses and scores of transformers, and frees every block."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument, NeverFits
from blockyard_engine import Completion, Engine, FinishReason
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model

PENALTIES = (1.0, 0.0, -1.0, 2.0)
STOPPING: tuple[bool | str, ...] = (False, True, "never")


def beams_of_generate(model: Any, prompt: list[int], num_beams: int, **options: Any) -> tuple[list[list[int]], Any]:
    """Return the hypotheses of `generate`, cut after their end tokens, and their scores."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    ends = model.config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    found = []
    for row in output.sequences[:, len(prompt) :].tolist():
        stops = [place for place, token in enumerate(row) if token in ends]
        found.append(row[: stops[0] + 1] if stops else row)
    return found, output.sequences_scores


def require_same(beams: list[Completion], expected: list[list[int]], scores: Any) -> None:
    assert [beam.token_ids for beam in beams] == expected
    assert [beam.score for beam in beams] == pytest.approx(scores.tolist(), rel=1e-5)
    assert [beam.index for beam in beams] == list(range(len(beams)))


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("num_ends", [0, 1, 2])
def test_hypotheses_and_scores_equal_those_of_generate(num_ends: int, early_stopping: bool | str) -> None:
    # Flatter logits than other tests have, so that beams overtake one another; end tokens are taken from their midst.
    free = tiny_model("llama-gqa", initializer_range=0.08)
    ends = [tokens[2] for tokens in reference_tokens(free, mixed_prompts((9, 4)), 3)][:num_ends] or None
    model = tiny_model("llama-gqa", eos_token_id=ends, pad_token_id=0, initializer_range=0.08)
    engine = Engine(model, num_blocks=120, block_size=4)
    reasons = set()
    # Half of all combinations: each pair of a prompt, a number of beams and a penalty is among them.
    places = itertools.product(range(3), range(2), range(len(PENALTIES)))
    prompts = mixed_prompts((9, 17, 4))
    for row, width, place in (each for each in places if sum(each) % 2 == 0):
        prompt, num_beams, penalty = prompts[row], (2, 5)[width], PENALTIES[place]
        options = {"length_penalty": penalty, "early_stopping": early_stopping}
        beams = engine.beam_search(prompt, num_beams, 10, **options)
        require_same(beams, *beams_of_generate(model, prompt, num_beams, max_new_tokens=10, **options))
        reasons |= {beam.finish_reason for beam in beams}
        engine.cache.check()
        assert engine.cache.num_used_blocks == 0
    assert (FinishReason.STOP in reasons) is (num_ends > 0)


@pytest.mark.parametrize("shape", ["qwen3", "gemma3", "mistral-window"])
def test_beams_of_other_model_shapes_equal_generate(shape: str) -> None:
    model = tiny_model(shape, initializer_range=0.1)
    engine = Engine(model, num_blocks=300, block_size=4, num_cpu_blocks=40)
    for prompt in mixed_prompts((9, 30)):
        beams = engine.beam_search(prompt, 4, 12)
        require_same(beams, *beams_of_generate(model, prompt, 4, max_new_tokens=12))
    assert engine.cache.num_used_blocks == 0


def test_beams_share_common_blocks() -> None:
    engine = Engine(tiny_model("llama-gqa", initializer_range=0.08), num_blocks=120, block_size=4)
    (prompt,) = mixed_prompts((33,))
    engine.beam_search(prompt, 6, 12)
    stats = engine.cache.stats()
    # Six sequences of 44 tokens are 66 blocks; the eight full ones of the prompt are there once.
    assert 11 < stats.peak_used_blocks <= 8 + 6 * 3
    assert stats.num_copied_blocks > 0
    before = stats.num_hit_tokens
    engine.beam_search(prompt, 6, 12)
    assert engine.cache.stats().num_hit_tokens - before == 32


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [(400, {}), (60, {}), (400, {"max_num_batched_tokens": 16}), (80, {"num_cpu_blocks": 30})],
    ids=["roomy", "few blocks", "small steps", "cpu pool"],
)
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3"])
def test_searches_side_by_side_find_what_each_finds_alone(shape: str, num_blocks: int, options: dict[str, Any]) -> None:
    """Equal prompts, prompts with a common prefix, and others; the searches end at different steps."""
    free = tiny_model(shape, initializer_range=0.08)
    prompts = mixed_prompts((9, 17, 4, 22, 22, 13), shared=8)
    prompts.append(prompts[1])
    ends = [tokens[3] for tokens in reference_tokens(free, prompts[:2], 4)]
    model = tiny_model(shape, eos_token_id=ends, pad_token_id=0, initializer_range=0.08)
    engine = Engine(model, num_blocks=2 * num_blocks if shape == "gemma3" else num_blocks, block_size=4, **options)
    together = engine.beam_search_batch(prompts, 3, 9)
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    assert len(together) == len(prompts)
    for prompt, beams in zip(prompts, together, strict=True):
        require_same(beams, *beams_of_generate(model, prompt, 3, max_new_tokens=9))


def test_searches_in_a_batch_take_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=400, block_size=4)
    prompts = mixed_prompts((9, 17, 4, 22))
    steps = []
    run = engine._runner.run

    def counted(batch: Any, moves: Any) -> Any:
        steps.append(len(batch.token_ids))
        return run(batch, moves)

    monkeypatch.setattr(engine._runner, "run", counted)
    engine.beam_search_batch(prompts, 4, 6)
    assert steps == [52, 16, 16, 16, 16, 16]
    steps.clear()
    for prompt in prompts:
        engine.beam_search(prompt, 4, 6)
    assert len(steps) == 24
    assert engine.beam_search_batch([], 4, 6) == []


def test_one_beam_is_greedy() -> None:
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=60)
    (prompt,) = mixed_prompts((12,))
    (beam,) = engine.beam_search(prompt, 1, 15)
    assert beam.token_ids == engine.generate([prompt])[0].token_ids[:15]


def test_a_model_that_raises_leaves_the_cache_whole() -> None:
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=60)
    (prompt,) = mixed_prompts((12,))
    expected = engine.beam_search(prompt, 3, 6)
    for call in (1, 2, 4):
        calls = itertools.count(1)

        def hook(*_: Any, calls: Any = calls, call: int = call) -> None:
            if next(calls) == call:
                raise RuntimeError("the model broke")

        handle = model.model.layers[1].register_forward_pre_hook(hook)
        with pytest.raises(RuntimeError, match="the model broke"):
            engine.beam_search_batch([prompt, prompt[:5]], 3, 6)
        handle.remove()
        engine.cache.check()
        assert engine.cache.num_used_blocks == 0
        again = engine.beam_search(prompt, 3, 6)
        assert [beam.token_ids for beam in again] == [beam.token_ids for beam in expected]


def test_bad_searches_are_named() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=12, max_num_seqs=4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_beams": 0}, "num_beams is 0; it must be from 1 to 4"),
        ({"num_beams": 5}, "num_beams is 5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": "long"}, "length_penalty is 'long'"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; it must be True, False or 'never'"),
        ({"prompt": []}, "prompt has no tokens"),
    ]
    for changes, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            engine.beam_search(**{"prompt": [1, 2], "num_beams": 2, "max_tokens": 4, **changes})
    with pytest.raises(NeverFits, match="prompt: 4 beams of 62 tokens may need 16 blocks; 11 are usable"):
        engine.beam_search([1, 2], 4, 60)
    with pytest.raises(NeverFits, match="prompt: the beams may reach 513 tokens; max_model_len is 512"):
        engine.beam_search([1, 2], 1, 511)
    with pytest.raises(NeverFits, match="prompt 1: 3 beams of 82 tokens may need 14 blocks"):
        engine.beam_search_batch([[1, 2], list(range(42))], 3, 40)
    assert engine.cache.num_used_blocks == 0
    engine.add_request([1, 2])
    with pytest.raises(InvalidArgument, match="beam_search: 1 requests of add_request are unfinished"):
        engine.beam_search([1, 2], 2, 4)
