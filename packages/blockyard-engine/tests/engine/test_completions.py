"""Several completions of a prompt: shared blocks, their number, and their ends."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard_engine import Engine, FinishReason, SamplingParams, StepReport, TokenLogprob
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens


def test_completions_share_the_blocks_of_the_prompt(llama: Any) -> None:
    (prompt,) = mixed_prompts((18,))
    engine = Engine(llama, num_blocks=60, block_size=4, max_num_seqs=8)
    engine.add_request(prompt, SamplingParams(max_tokens=6, n=5, temperature=1.0, ignore_eos=True))
    engine.step()
    engine.cache.check()
    assert engine.cache.num_used_blocks == 5  # 18 tokens; all five stand in the same blocks
    report = engine.step()
    assert (report.num_seqs, report.num_tokens, report.num_running) == (5, 5, 1)
    # Four full blocks of the prompt are shared; the fifth, half full, was copied by all but the last to write.
    assert engine.cache.num_used_blocks == 4 + 5
    assert engine.cache.stats().num_copied_blocks == 4
    assert engine.cache.stats().num_prompt_tokens == 18
    while engine.has_unfinished:
        engine.step()
    assert engine.cache.num_used_blocks == 0
    # 23 tokens, of which the last is never computed, are 6 blocks; without sharing it would be five times as many.
    assert engine.cache.stats().peak_used_blocks == 4 + 5 * 2


def test_each_completion_draws_by_itself_and_greedy_ones_are_equal(llama: Any) -> None:
    prompts = mixed_prompts((9, 14))
    engine = Engine(llama, num_blocks=80)
    greedy = engine.generate(prompts, SamplingParams(max_tokens=8, n=3))
    for result, expected in zip(greedy, reference_tokens(llama, prompts, 8), strict=True):
        assert [completion.token_ids for completion in result.completions] == [expected] * 3
        assert [completion.index for completion in result.completions] == [0, 1, 2]
        assert (result.token_ids, result.finish_reason) == (expected, FinishReason.LENGTH)
    drawn = engine.generate(prompts[:1], SamplingParams(max_tokens=8, n=6, temperature=1.0, seed=3))[0]
    tokens = [tuple(completion.token_ids) for completion in drawn.completions]
    assert len(set(tokens)) == 6
    fewer = engine.generate(prompts[:1], SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=3))[0]
    assert [tuple(completion.token_ids) for completion in fewer.completions] == tokens[:2]
    (alone,) = engine.generate(prompts[:1], SamplingParams(max_tokens=8, temperature=1.0, seed=3))
    assert tuple(alone.token_ids) == tokens[0]


def test_a_request_ends_when_all_its_completions_have(llama: Any) -> None:
    (prompt,) = mixed_prompts((9,))
    free = SamplingParams(max_tokens=20, n=4, temperature=1.0, seed=7)
    engine = Engine(llama, num_blocks=80)
    (result,) = engine.generate([prompt], free)
    first = result.completions[1].token_ids[0]  # ends the second completion at its first token
    later = result.completions[2].token_ids[5]
    stopping = SamplingParams(max_tokens=20, n=4, temperature=1.0, seed=7, stop_token_ids=(first, later))
    finished: list[int] = []
    reports: list[StepReport] = []

    def watch(report: StepReport) -> None:
        reports.append(report)
        finished.append(len(report.finished))
        engine.cache.check()

    (stopped,) = engine.generate([prompt], stopping, on_step=watch)
    for whole, cut in zip(result.completions, stopped.completions, strict=True):
        ends = [place for place, token in enumerate(whole.token_ids) if token in (first, later)]
        assert cut.token_ids == (whole.token_ids[: ends[0] + 1] if ends else whole.token_ids)
        assert cut.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert len(stopped.completions[1].token_ids) == 1
    assert sum(finished) == finished[-1] == 1
    streamed = [[t.token_id for r in reports for t in r.new_tokens if t.index == index] for index in range(4)]
    assert streamed == [completion.token_ids for completion in stopped.completions]
    assert engine.cache.num_used_blocks == 0


def test_log_probabilities_are_the_models_own(llama: Any) -> None:
    (prompt,) = mixed_prompts((9,))
    params = SamplingParams(max_tokens=5, n=2, temperature=1.5, top_k=5, repetition_penalty=1.3, logprobs=3)
    reports: list[StepReport] = []
    (result,) = Engine(llama, num_blocks=40).generate([prompt], params, on_step=reports.append)
    streamed = [[t.logprob for r in reports for t in r.new_tokens if t.index == index] for index in range(2)]
    for completion in result.completions:
        with torch.inference_mode():
            logits = llama(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert completion.logprobs == streamed[completion.index]
        assert completion.logprobs is not None
        for row, token_id, found in zip(expected, completion.token_ids, completion.logprobs, strict=True):
            assert isinstance(found, TokenLogprob)
            assert found.token_id == token_id
            assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in found.top] == best.indices.tolist()
            assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    (bare,) = Engine(llama, num_blocks=40).generate([prompt], SamplingParams(max_tokens=3, logprobs=0))
    assert [logprob.top for logprob in bare.completions[0].logprobs or []] == [()] * 3
    (without,) = Engine(llama, num_blocks=40).generate([prompt], SamplingParams(max_tokens=3))
    assert without.completions[0].logprobs is None


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers(llama: Any, penalty: float) -> None:
    prompts = mixed_prompts((20, 33, 4))
    results = Engine(llama, num_blocks=60).generate(prompts, SamplingParams(max_tokens=25, repetition_penalty=penalty))
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        output = llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=25,
            repetition_penalty=penalty,
        )
        assert result.token_ids == output[0, len(prompt) :].tolist()
        assert result.token_ids != reference_tokens(llama, [prompt], 25)[0]
