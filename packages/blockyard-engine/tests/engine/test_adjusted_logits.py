"""Penalties, biases and min_tokens, compared with a loop over the model's own logits."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard_engine import Engine, FinishReason, PromptLookup, SamplingParams
from blockyard_engine.decoding.sampler import SamplingContext, StepSampler, adjust_logits
from blockyard_testing.seeds import run_seed
from blockyard_testing.tiny_models import (
    NUM_TOKENS,
    VOCAB_SIZE,
    byte_tokenizer,
    mixed_prompts,
    tiny_model,
)


def by_hand(model: Any, prompt: list[int], sampling: SamplingParams, stops: frozenset[int]) -> list[int]:
    """Return the greedy tokens, each from a forward pass over everything before it and plain arithmetic."""
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        for token, bias in dict(sampling.logit_bias).items():
            logits[token] += bias
        for token in range(len(logits)):
            if len(answer) < sampling.min_tokens and token in stops:
                logits[token] = -1e30
            if sampling.repetition_penalty != 1 and token in [*prompt, *answer]:
                logits[token] *= sampling.repetition_penalty ** (1 if logits[token] < 0 else -1)
            logits[token] -= sampling.frequency_penalty * answer.count(token)
            logits[token] -= sampling.presence_penalty * (token in answer)
        answer.append(max(range(len(logits)), key=logits.__getitem__))
        if answer[-1] in stops and len(answer) > sampling.min_tokens:
            break
    return answer


ASKED = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    {"logit_bias": {3: 100.0, 7: -100.0}},
    {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 2), -100.0), "frequency_penalty": 2.0},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"min_tokens": 12, "stop_token_ids": tuple(range(1, VOCAB_SIZE, 2)), "logit_bias": {5: 100.0}},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked))
@pytest.mark.parametrize("speculation", [None, PromptLookup()], ids=["plain", "drafts"])
def test_greedy_tokens_equal_a_plain_loop(llama: Any, asked: dict[str, Any], speculation: PromptLookup | None) -> None:
    prompts = mixed_prompts((9, 17, 12), shared=8)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **asked)
    wanted = [by_hand(llama, prompt, sampling, frozenset(sampling.stop_token_ids)) for prompt in prompts]
    engine = Engine(llama, num_blocks=20, block_size=8, max_num_batched_tokens=16, speculation=speculation)
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == wanted
    plain = [by_hand(llama, prompt, SamplingParams(max_tokens=12, ignore_eos=True), frozenset()) for prompt in prompts]
    assert wanted != plain, "the field changed nothing, so that this tests nothing"


def test_log_probabilities_are_the_models_own(llama: Any) -> None:
    """The adjusted logits are a copy: neighbouring rows and reported values do not change."""
    prompt = mixed_prompts((12,))[0]
    plain, biased = (
        SamplingParams(max_tokens=1, logprobs=3, logit_bias=bias, presence_penalty=1.0) for bias in ({}, {4: 100.0})
    )
    first, second = Engine(llama, num_blocks=40).generate([prompt, prompt], [plain, biased])
    assert second.token_ids == [4]
    reported, again = (result.completions[0].logprobs[0] for result in (first, second))
    assert [token for token, _ in reported.top] == [token for token, _ in again.top]
    assert [value for _, value in reported.top] == pytest.approx([value for _, value in again.top])
    assert again.logprob < again.top[-1][1]


def test_a_draw_follows_a_bias(llama: Any) -> None:
    prompt = mixed_prompts((12,))[0]
    params = [
        SamplingParams(max_tokens=3, temperature=1.5, seed=seed, logit_bias={5: 100.0, 6: 100.0}) for seed in range(60)
    ]
    drawn = [result.token_ids for result in Engine(llama, num_blocks=200).generate([prompt] * 60, params)]
    assert {token for tokens in drawn for token in tokens} == {5, 6}


@pytest.mark.parametrize("number", range(40))
def test_any_adjustment_leaves_a_token_to_choose(number: int) -> None:
    """Half precision, extreme logits, everything banned, every field at its limit: a valid token is chosen."""
    rng = random.Random(f"{run_seed()} {number}")
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    scale = rng.choice([1.0, 100.0, float(torch.finfo(dtype).max)])
    logits = torch.tensor([[rng.uniform(-1, 1) * scale for _ in range(16)]], dtype=dtype)
    params = SamplingParams(
        max_tokens=8,
        min_tokens=rng.choice([0, 8]),
        temperature=rng.choice([0.0, 1e-300, 1.0, 1e300]),
        top_k=rng.choice([0, 1, 5]),
        top_p=rng.choice([1e-9, 0.5, 1.0]),
        min_p=rng.choice([0.0, 1.0]),
        repetition_penalty=rng.choice([1.0, 1e-300, 1e300]),
        presence_penalty=rng.choice([-2, 0, 2]),
        frequency_penalty=rng.choice([-2, 0, 2]),
        logit_bias={token: rng.choice([-100, 100]) for token in rng.sample(range(16), rng.choice([0, 3, 16]))},
        stop_token_ids=tuple(rng.sample(range(40), rng.choice([1, 20]))),
    )
    stops = frozenset(range(16)) if rng.random() < 0.2 else frozenset(params.stop_token_ids)
    tokens = [rng.randrange(16) for _ in range(rng.randrange(3, 8))]
    choice = StepSampler(logits).choose(0, SamplingContext(params, 0, 3, stops), tokens)
    assert 0 <= choice.token_id < 16
    if params.min_tokens and len(stops & set(range(16))) < 16:
        assert choice.token_id not in stops
    values = adjust_logits(logits[0], params, frozenset(), tokens[:3], tokens[3:])
    assert bool(torch.isfinite(values).all())


def test_no_completion_is_shorter_than_its_least_length(llama: Any) -> None:
    """End-of-sequence tokens, stop tokens and stop strings take effect only after `min_tokens`."""
    engine = Engine(tiny_model("llama-gqa", vocab_size=NUM_TOKENS), byte_tokenizer(), num_blocks=100)
    sampling = SamplingParams(max_tokens=40, temperature=2.0, seed=3, stop=tuple("abcdefghij0123"), n=4)
    plain = engine.generate(["Blocks"], sampling)[0].completions
    assert min(len(each.token_ids) for each in plain) < 15
    least = SamplingParams(
        max_tokens=40, min_tokens=15, temperature=2.0, seed=3, stop=sampling.stop, stop_token_ids=(7, 8, 9), n=4
    )
    for each in engine.generate(["Blocks"], least)[0].completions:
        assert len(each.token_ids) > 15 or each.finish_reason is FinishReason.LENGTH
        assert not {7, 8, 9} & set(each.token_ids[:15])
        behind = engine.tokenizer.decode(each.token_ids[:15], skip_special_tokens=True)
        assert each.text.startswith(behind.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_min_tokens_may_equal_max_tokens(llama: Any) -> None:
    stops = tuple(range(VOCAB_SIZE - 1))
    sampling = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=stops)
    (result,) = Engine(llama, num_blocks=20).generate([[1, 2, 3]], sampling)
    assert result.token_ids == [VOCAB_SIZE - 1] * 9
    assert result.finish_reason is FinishReason.LENGTH


BAD = [
    ({"presence_penalty": 2.1}, r"presence_penalty is 2\.1; it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be from -2 to 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty is nan; it must be finite"),
    ({"presence_penalty": True}, "presence_penalty is True; it must be a number"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"min_tokens": 129}, "min_tokens is 129; it must be at most max_tokens, 128"),
    ({"logit_bias": {1: 101}}, "logit_bias of token 1 is 101; it must be from -100 to 100"),
    ({"logit_bias": {-1: 1}}, "logit_bias is -1"),
    ({"logit_bias": {"1": 1}}, "logit_bias is '1'; it must be an integer"),
    ({"logit_bias": {1: "much"}}, "logit_bias of token 1 is 'much'; it must be a number"),
    ({"logit_bias": 5}, "logit_bias is 5; it must be a dict"),
    ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\]; it must be a dict"),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias has 1025 tokens; the limit is 1024"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_values_outside_their_limits_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**options)


def test_a_bias_outside_the_vocabulary_is_refused(llama: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=f"logit_bias has token {VOCAB_SIZE}; the model's last token is {VOCAB_SIZE - 1}"
    ):
        Engine(llama, num_blocks=20).generate([[1, 2]], SamplingParams(logit_bias={VOCAB_SIZE: 1}))


def test_parameters_can_be_hashed_and_copied() -> None:
    params = SamplingParams(logit_bias={9: 1, 2: -1.5})
    assert params.logit_bias == ((2, -1.5), (9, 1.0))
    assert SamplingParams(logit_bias=params.logit_bias) == params
    assert len({params, SamplingParams(logit_bias={2: -1.5, 9: 1})}) == 1
