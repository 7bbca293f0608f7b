"""Drawn tokens: reproducible in any batch, from the right distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.engine import Engine, SamplingParams

from .tiny_models import VOCAB_SIZE, mixed_prompts, tiny_model, tokens_of


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama-gqa")


DRAWS = [
    SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_tokens=12, temperature=0.7, top_k=5, seed=2),
    SamplingParams(max_tokens=12, temperature=1.5, top_p=0.8, seed=3),
    SamplingParams(max_tokens=12, temperature=2.0, top_k=40, top_p=0.9, seed=4),
    SamplingParams(max_tokens=12),
]


def test_a_seed_gives_the_same_tokens_in_every_batch(llama: Any) -> None:
    prompts = mixed_prompts((9, 17, 4, 30, 12), shared=8)
    alone = [
        Engine(llama, num_blocks=40).generate([prompt], params)[0].token_ids
        for prompt, params in zip(prompts, DRAWS, strict=True)
    ]
    together = Engine(llama, num_blocks=80, max_num_batched_tokens=16)
    assert tokens_of(together.generate(prompts, DRAWS)) == alone
    turned = together.generate(prompts[::-1], DRAWS[::-1])
    assert tokens_of(turned)[::-1] == alone
    tight = Engine(llama, num_blocks=11, block_size=8, max_num_seqs=5, max_num_batched_tokens=8)
    preempted = tight.generate(prompts, DRAWS)
    assert tokens_of(preempted) == alone
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


BAD_SAMPLING = [
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


@pytest.mark.parametrize(("options", "message"), BAD_SAMPLING)
def test_bad_sampling_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**options)
