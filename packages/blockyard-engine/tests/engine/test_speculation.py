"""Drafts change only the number of steps."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard_engine import Engine, PromptLookup, SamplingParams, StepReport
from blockyard_engine.decoding.speculation import Drafter
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of


@pytest.fixture(scope="module")
def looping() -> Any:
    """A model that mostly follows the last token and so repeats itself: drafts are often right."""
    model = tiny_model("llama-gqa")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.005)
    return model


@pytest.mark.parametrize("shape", ["llama-gqa", "qwen3", "mistral-window", "gemma3"])
@pytest.mark.parametrize("options", [PromptLookup(), PromptLookup(num_tokens=9, max_ngram=1)], ids=["4,3", "9,1"])
def test_greedy_tokens_equal_those_of_generate(shape: str, options: PromptLookup) -> None:
    model = tiny_model(shape)
    prompts = mixed_prompts((9, 17, 4, 30, 48), shared=8)
    engine = Engine(model, num_blocks=120, max_num_batched_tokens=48, max_num_seqs=4, speculation=options)
    results = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert tokens_of(results) == reference_tokens(model, prompts, 40)
    assert 0 < engine.num_accepted_tokens < engine.num_drafted_tokens
    assert engine.cache.num_used_blocks == 0


def test_right_drafts_save_steps_and_are_counted(looping: Any) -> None:
    prompts = mixed_prompts((9, 17, 4, 30))
    for speculation in (None, PromptLookup(num_tokens=5)):
        reports: list[StepReport] = []
        engine = Engine(looping, num_blocks=120, speculation=speculation)
        results = engine.generate(prompts, SamplingParams(max_tokens=40), on_step=reports.append)
        assert tokens_of(results) == reference_tokens(looping, prompts, 40)
        assert sum(report.num_drafted for report in reports) == engine.num_drafted_tokens
        assert sum(report.num_accepted for report in reports) == engine.num_accepted_tokens
        # Each prompt fits a step, so every row of a step gives a token, and the accepted ones besides.
        assert sum(report.num_seqs for report in reports) == 4 * 40 - engine.num_accepted_tokens
        assert sum(len(report.new_tokens) for report in reports) == 4 * 40
        assert (engine.num_accepted_tokens > 30) is (speculation is not None)


def test_speculation_changes_no_sampled_token(looping: Any) -> None:
    prompts = mixed_prompts((9, 17, 4, 30))
    params = SamplingParams(max_tokens=30, n=2, temperature=0.3, repetition_penalty=1.05, logprobs=1, seed=8)
    plain = Engine(looping, num_blocks=200).generate(prompts, params)
    engine = Engine(looping, num_blocks=200, speculation=PromptLookup())
    guessed = engine.generate(prompts, params)
    for one, other in zip(plain, guessed, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        logprobs = [lp.logprob for c in one.completions for lp in c.logprobs or []]
        assert [lp.logprob for c in other.completions for lp in c.logprobs or []] == pytest.approx(logprobs, abs=1e-4)
    assert engine.num_accepted_tokens > 0


def test_drafts_never_pass_the_end_nor_the_budget(looping: Any) -> None:
    begun = mixed_prompts((9, 17, 4))
    prompts = [
        prompt + answer for prompt, answer in zip(begun, reference_tokens(looping, begun, 30), strict=True)
    ]  # each goes round in a circle already, so that its answer is drafted from it
    free = reference_tokens(looping, prompts, 40)
    stop = free[0][5]
    engine = Engine(
        looping,
        num_blocks=42,
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        speculation=PromptLookup(num_tokens=60, max_ngram=2),
    )
    largest = 0

    def watch(report: StepReport) -> None:
        nonlocal largest
        largest = max(largest, report.num_tokens)
        engine.cache.check()

    results = engine.generate(prompts, SamplingParams(max_tokens=40, stop_token_ids=(stop,)), on_step=watch)
    ends = [tokens.index(stop) + 1 if stop in tokens else 40 for tokens in free]
    assert tokens_of(results) == [tokens[:end] for tokens, end in zip(free, ends, strict=True)]
    assert engine.num_accepted_tokens > 0
    assert largest <= 7


def test_no_sequence_is_preempted_for_drafts(looping: Any) -> None:
    begun = mixed_prompts((9, 9))
    answers = reference_tokens(looping, begun, 30)
    prompts = [prompt + answer for prompt, answer in zip(begun, answers, strict=True)]
    # Without drafts the two take at most 12 blocks each, until the second ends and the first has all for itself. The
    # first one's guesses reach further: there are no blocks for them while the second still runs.
    engine = Engine(looping, num_blocks=25, block_size=4, max_num_seqs=2, speculation=PromptLookup(num_tokens=60))
    params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=8)]
    results = engine.generate(prompts, params)
    expected = reference_tokens(looping, prompts, 40)
    assert tokens_of(results) == [expected[0], expected[1][:8]]
    assert engine.num_accepted_tokens > 0
    assert engine.num_preemptions == 0


def test_a_draft_follows_the_latest_longest_match() -> None:
    drafter = Drafter(PromptLookup(num_tokens=3, max_ngram=2))
    tokens = [1, 2, 3, 9, 2, 4, 1, 2]
    assert drafter.propose(tokens, 10) == [3, 9, 2]  # (1, 2) before (2,), which 4 followed last
    tokens.append(7)
    assert drafter.propose(tokens, 10) == []
    tokens.append(2)
    assert drafter.propose(tokens, 10) == [7, 2]
    assert drafter.propose(tokens, 1) == [7]
    assert drafter.propose(tokens, 0) == []
    assert Drafter(PromptLookup()).propose([5], 4) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_tokens": 65}, "from 1 to 64"),
        ({"max_ngram": 17}, "max_ngram is 17"),
    ],
)
def test_bad_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PromptLookup(**options)
