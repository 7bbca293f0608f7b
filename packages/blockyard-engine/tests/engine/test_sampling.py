"""Drawn tokens: reproducible in any batch, from the right distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from blockyard import InvalidArgument
from blockyard_engine import Engine, SamplingParams
from blockyard_testing.tiny_models import VOCAB_SIZE, mixed_prompts

DRAWS = [
    SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=5, seed=2),
    SamplingParams(max_tokens=12, temperature=1.5, top_p=0.8, seed=3),
    SamplingParams(max_tokens=12, temperature=2.0, top_k=40, top_p=0.9, seed=4),
    SamplingParams(max_tokens=12, temperature=1.2, min_p=0.1, repetition_penalty=1.2, seed=5),
    SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=6),
    SamplingParams(max_tokens=12),
]


def test_a_seed_gives_the_same_tokens_in_every_batch(llama: Any) -> None:
    prompts = mixed_prompts((9, 17, 4, 30, 12, 10, 20), shared=8)

    def drawn(results: list[Any]) -> list[list[list[int]]]:
        return [[completion.token_ids for completion in result.completions] for result in results]

    alone = [
        drawn(Engine(llama, num_blocks=40).generate([prompt], params))[0]
        for prompt, params in zip(prompts, DRAWS, strict=True)
    ]
    together = Engine(llama, num_blocks=80, max_num_batched_tokens=16)
    assert drawn(together.generate(prompts, DRAWS)) == alone
    turned = together.generate(prompts[::-1], DRAWS[::-1])
    assert drawn(turned)[::-1] == alone
    tight = Engine(llama, num_blocks=11, block_size=8, max_num_seqs=5, max_num_batched_tokens=8)
    preempted = tight.generate(prompts, DRAWS)
    assert drawn(preempted) == alone
    assert sum(result.num_preemptions for result in preempted) > 0


def test_other_seeds_draw_other_tokens_from_the_right_distribution(llama: Any) -> None:
    prompt = mixed_prompts((12,))[0]
    with torch.inference_mode():
        logits = llama(torch.tensor([prompt])).logits[0, -1].double()
    wanted = (logits / 1.3).softmax(-1)
    kept = wanted >= wanted.topk(6).values[-1]
    wanted = torch.where(kept, wanted, 0) / wanted[kept].sum()
    params = [SamplingParams(max_tokens=1, temperature=1.3, top_k=6, seed=seed) for seed in range(2000)]
    engine = Engine(llama, num_blocks=256, max_num_seqs=200)
    drawn = np.array([result.token_ids[0] for result in engine.generate([prompt] * 2000, params)])
    seen = np.bincount(drawn, minlength=VOCAB_SIZE) / 2000
    assert set(np.flatnonzero(seen)) <= set(kept.nonzero()[:, 0].tolist())
    # Five standard deviations of a share of 2,000 draws are at most 0.056; the seeds are fixed, so this never flickers.
    assert np.abs(seen - wanted.numpy()).max() < 0.056


def test_top_p_keeps_the_smallest_set_that_reaches_it(llama: Any) -> None:
    prompt = mixed_prompts((12,))[0]
    with torch.inference_mode():
        probabilities = llama(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    ranked = probabilities.argsort(descending=True).tolist()
    mass, allowed = 0.0, set()
    for token in ranked:
        allowed.add(token)
        mass += float(probabilities[token])
        if mass >= 0.75:
            break
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_p=0.75, seed=seed) for seed in range(500)]
    engine = Engine(llama, num_blocks=256, max_num_seqs=100)
    drawn = {result.token_ids[0] for result in engine.generate([prompt] * 500, params)}
    assert drawn <= allowed
    assert ranked[0] in drawn
    assert len(drawn) > 1
    (narrow,) = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=1.0, top_p=1e-9))
    assert narrow.token_ids == [ranked[0]]


def test_min_p_keeps_tokens_above_a_fraction_of_the_likeliest(llama: Any) -> None:
    prompt = mixed_prompts((12,))[0]
    with torch.inference_mode():
        logits = llama(torch.tensor([prompt])).logits
    warper = transformers.MinPLogitsWarper(min_p=0.2)
    kept = warper(torch.tensor([prompt]), logits[:, -1] / 1.5)[0].isfinite().nonzero()[:, 0].tolist()
    params = [SamplingParams(max_tokens=1, temperature=1.5, min_p=0.2, seed=seed) for seed in range(600)]
    engine = Engine(llama, num_blocks=256, max_num_seqs=100)
    drawn = {result.token_ids[0] for result in engine.generate([prompt] * 600, params)}
    assert drawn == set(kept)
    assert 1 < len(kept) < 20
    (narrow,) = engine.generate([prompt], SamplingParams(max_tokens=1, temperature=1.5, min_p=1.0))
    assert narrow.token_ids == [int(logits[0, -1].argmax())]


BAD_SAMPLING = [
    ({"n": 0}, "n is 0; it must be from 1 to 64"),
    ({"n": 65}, "n is 65; it must be from 1 to 64"),
    ({"n": 2.0}, r"n is 2\.0; it must be an integer"),
    ({"min_p": -0.1}, r"min_p is -0\.1; it must be from 0 to 1"),
    ({"min_p": 1.5}, r"min_p is 1\.5; it must be from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
    ({"repetition_penalty": -1.0}, r"repetition_penalty is -1\.0; it must be 0 or more"),
    ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logprobs": True}, "logprobs is True; it must be an integer"),
    ({"stop": ""}, "stop has ''; each entry must be a string of at least 1 character"),
    ({"stop": ("a", "")}, "stop has ''"),
    ({"stop": ("a", 3)}, "stop has 3"),
    ({"stop": 3}, "stop is 3; it must be a string or a tuple of strings"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be from 1"),
    ({"temperature": -0.1}, r"temperature is -0\.1; it must be 0 or more"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"top_p": 0.0}, "top_p is 0; it must be above 0"),
    ({"top_p": 1.01}, r"top_p is 1\.01; it must be from 0 to 1"),
    ({"top_k": -1}, "top_k is -1"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": None}, "seed is None; it must be an integer"),
    ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
    ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
    ({"stop_token_ids": (1, -2)}, "stop_token_ids is -2"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_overflowing_penalty_acts_like_a_large_one(llama: Any, temperature: float) -> None:
    """With infinite logits, every draw would return the last token of the vocabulary."""
    engine = Engine(llama, num_blocks=60, block_size=4)
    for penalty in (1e-30, 1e-39, 1e-45, 5e-324):
        sampling = SamplingParams(max_tokens=4, temperature=temperature, repetition_penalty=penalty, seed=1)
        assert set(engine.generate([[3, 4]], sampling)[0].token_ids) <= {3, 4}


@pytest.mark.parametrize(("options", "message"), BAD_SAMPLING)
def test_bad_sampling_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**options)
