"""An answer that another engine began continues as if uninterrupted, greedy and sampled, token for token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument
from blockyard_engine import (
    Completion,
    Engine,
    FinishReason,
    NewToken,
    PromptLookup,
    SamplingParams,
)
from blockyard_testing.exact_draws import ROUNDING, distances, exact
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer, mixed_prompts, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 5, 6, 7]
WAYS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=11),
    "hot, penalties": SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    "min_tokens": SamplingParams(max_tokens=20, min_tokens=9, temperature=1.0, seed=7, stop_token_ids=tuple(range(20))),
}


def load_engine(model: Any, **options: Any) -> Engine:
    return Engine(model, **({"num_blocks": 60, "block_size": 4} | options))


def answered(
    engine: Engine, sampling: SamplingParams, answer_prefix: Any = (), prompt: list[int] = PROMPT
) -> tuple[list[NewToken], Completion]:
    """Return the tokens that steps reported, and the request's result."""
    number = engine.add_request(prompt, sampling, answer_prefix=answer_prefix)
    told: list[NewToken] = []
    while engine.has_unfinished:
        report = engine.step()
        told += [replace(token, request_id=0) for token in report.new_tokens if token.request_id == number]
        for result in report.finished:
            assert 0 <= result.num_cached_tokens <= result.num_prompt_tokens == len(prompt)
            engine.cache.check()
            assert engine.cache.num_used_blocks == 0
            return told, result.completions[0]
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    "options", [{}, {"speculation": PromptLookup()}, {"max_num_batched_tokens": 4, "max_num_seqs": 2}], ids=str
)
def test_a_resumed_answer_equals_an_uninterrupted_one(llama: Any, options: dict[str, Any]) -> None:
    for way in WAYS.values():
        whole = answered(load_engine(llama, **options), way)
        assert [token.token_id for token in whole[0]] == whole[1].token_ids
        assert len(whole[0]) > 2
        for cut in sorted({1, len(whole[0]) // 2, len(whole[0]) - 1}):
            told, completion = answered(load_engine(llama, **options), way, whole[1].token_ids[:cut])
            assert (whole[0][:cut] + told, completion) == whole, "each token once"


def any_sampling(draw: random.Random) -> SamplingParams:
    """Return random sampling parameters, without several completions and log probabilities."""
    fields = {
        "min_tokens": draw.randrange(1, 12),
        "top_k": draw.randrange(1, 30),
        "top_p": draw.uniform(0.5, 1.0),
        "min_p": draw.uniform(0.001, 0.1),
        "repetition_penalty": draw.uniform(0.8, 1.5),
        "presence_penalty": draw.uniform(-2.0, 2.0),
        "frequency_penalty": draw.uniform(-2.0, 2.0),
        "logit_bias": {draw.randrange(NUM_TOKENS): draw.uniform(-9.0, 9.0) for _ in range(20)},
        "stop": tuple(draw.sample(["a", "x", "ab", "�a", "��"], 2)),
        "stop_token_ids": tuple(draw.sample(range(256), 8)),
        "ignore_eos": True,
    }
    chosen = {name: value for name, value in fields.items() if draw.random() < 0.4}
    temperature = draw.choice([0.0, 0.6, 1.0, 1.5])
    return SamplingParams(
        max_tokens=12 + draw.randrange(12), temperature=temperature, seed=draw.randrange(2**31), **chosen
    )


def test_any_sampling_resumes_after_each_of_its_tokens() -> None:
    """Compares the text of each piece too. Tokens may differ only where rounding decides a draw."""
    draw = random.Random(run_seed())
    options = draw.choice([{}, {"speculation": PromptLookup()}, {"max_num_batched_tokens": 64}])
    model = tiny_model("llama-gqa", vocab_size=NUM_TOKENS)
    engine, exact_model = Engine(model, byte_tokenizer(), num_blocks=100, **options), exact(model)
    for _ in range(draws(30, 3)):
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 200))]
        sampling = any_sampling(draw)
        ends = frozenset() if sampling.ignore_eos else engine.shape.eos_token_ids
        whole = answered(engine, sampling, prompt=prompt)
        for cut in range(1, len(whole[0])):
            told, completion = answered(engine, sampling, whole[1].token_ids[:cut], prompt)
            if (whole[0][:cut] + told, completion) != whole:
                assert completion.token_ids != whole[1].token_ids, (prompt, sampling, cut)
                far = distances(
                    exact_model,
                    prompt,
                    completion.token_ids,
                    sampling,
                    stop_token_ids=ends.union(sampling.stop_token_ids),
                )
                assert max(far) < ROUNDING, (prompt, sampling, cut)


def test_the_test_detects_tokens_that_rounding_cannot_explain() -> None:
    """Checks the judge: other tokens, and those of another seed, are far from the choice by exact logits."""
    model = tiny_model("llama-gqa", vocab_size=NUM_TOKENS)
    exact_model = exact(model)
    for sampling in (WAYS["greedy"], WAYS["sampled"], WAYS["hot, penalties"]):
        engine = Engine(model, num_blocks=100)
        tokens = answered(engine, sampling)[1].token_ids
        assert max(distances(exact_model, PROMPT, tokens, sampling)) < ROUNDING
        other = [*tokens[:5], (tokens[5] + 1) % 256, *tokens[6:]]
        assert max(distances(exact_model, PROMPT, other, sampling)) > ROUNDING
        if sampling.temperature:
            assert max(distances(exact_model, PROMPT, tokens, replace(sampling, seed=5))) > ROUNDING


def test_a_resumed_answer_hits_its_cached_prompt(llama: Any) -> None:
    engine = load_engine(llama)
    _, whole = answered(engine, WAYS["sampled"])
    for answer_prefix in (whole.token_ids[:7], np.array(whole.token_ids[:7])):
        assert answered(engine, WAYS["sampled"], answer_prefix)[1] == whole


def test_resumed_answers_are_equal_in_a_small_pool(llama: Any) -> None:
    """Preempted, resumed twice, beside other requests of the engine."""
    draw = random.Random(run_seed())
    prompts = mixed_prompts((9, 14, 5, 12, 8, 11), shared=4)
    for _ in range(draws(6, 2)):
        sampling = SamplingParams(
            max_tokens=16, ignore_eos=True, temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(99)
        )
        whole = [result.completions[0].token_ids for result in load_engine(llama).generate(prompts, sampling)]
        engine = load_engine(llama, num_blocks=17)
        cuts = [draw.randrange(16) for _ in prompts]
        ids = [
            engine.add_request(prompt, sampling, answer_prefix=answer[:cut])
            for prompt, answer, cut in zip(prompts, whole, cuts, strict=True)
        ]
        found = {}
        while engine.has_unfinished:
            found |= {result.request_id: list(result.completions[0].token_ids) for result in engine.step().finished}
            engine.cache.check()
        assert [found[number] for number in ids] == [list(answer) for answer in whole]
        assert engine.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("answer_prefix", "more", "message"),
    [
        ("text", {}, "answer_prefix is a str"),
        (7, {}, "answer_prefix is a int"),
        ([-1], {}, "answer_prefix"),
        ([10**6], {}, "answer_prefix"),
        ([1.5], {}, "answer_prefix"),
        ([[1]], {}, "answer_prefix"),
        ([1, 2, 3], {"max_tokens": 3}, r"answer_prefix has 3 tokens; it must have fewer than max_tokens, 3"),
        ([1], {"n": 2}, "n is 2"),
        ([1], {"logprobs": 1}, "logprobs is 1"),
        ([1, 9, 2], {"stop_token_ids": (9,)}, "answer_prefix has token 9 at position 1, which ends the answer"),
    ],
)
def test_invalid_answer_prefixes_are_refused(
    llama: Any, answer_prefix: Any, more: dict[str, Any], message: str
) -> None:
    engine = load_engine(llama)
    with pytest.raises(InvalidArgument, match=message):
        engine.add_request(PROMPT, SamplingParams(**({"max_tokens": 8} | more)), answer_prefix=answer_prefix)
    assert (engine.num_waiting, engine.num_running, engine.cache.num_used_blocks) == (0, 0, 0)
    assert not engine.has_unfinished
    assert answered(engine, SamplingParams(max_tokens=3, ignore_eos=True))[1].finish_reason is FinishReason.LENGTH
