"""Random traffic over all features at once: every request gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import NeverFits
from blockyard_engine import Engine, GenerationResult, PromptLookup, SamplingParams
from blockyard_engine.engine_options import ADMISSION_ORDERS
from blockyard_testing.exact_draws import same_answer, same_tokens
from blockyard_testing.hybrid_models import HYBRIDS, hybrid_model
from blockyard_testing.tiny_models import VOCAB_SIZE, tiny_model

NUM_REQUESTS = 40


def random_request(rng: np.random.Generator, beginnings: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """Return a random request, whose prompt often shares a prefix with others, extends one or equals one."""
    prompt = list(beginnings[rng.integers(len(beginnings))][: rng.integers(0, 24)])
    if rng.random() < 0.2:
        prompt = list(beginnings[0])
    else:
        prompt += rng.integers(1, VOCAB_SIZE, rng.integers(1, 14)).tolist()
    temperature = float(rng.choice([0.0, 0.7, 1.5]))
    return prompt, SamplingParams(
        max_tokens=int(rng.integers(1, 24)),
        temperature=temperature,
        top_k=int(rng.choice([0, 20])),
        min_p=float(rng.choice([0.0, 0.05])),
        repetition_penalty=float(rng.choice([1.0, 1.1])),
        seed=int(rng.integers(1000)),
        n=int(rng.choice([1, 1, 2, 4])),
        stop_token_ids=tuple(rng.integers(0, VOCAB_SIZE, 2).tolist()),
    )


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_blocks": int(rng.integers(50, 80)),
        "block_size": 4,
        "max_num_seqs": int(rng.integers(4, 9)),
        "max_num_batched_tokens": int(rng.integers(9, 30)),
        "enable_prefix_caching": bool(rng.random() < 0.8),
        "num_cpu_blocks": int(rng.choice([0, 10, 80])),
    }
    if options["num_cpu_blocks"] and rng.random() < 0.7:
        options["preemption"] = "swap"
    options["admission"] = ADMISSION_ORDERS[options["max_num_seqs"] % 3]
    if rng.random() < 0.5:
        options["speculation"] = PromptLookup(num_tokens=3)
    return options


def tokens_of(result: GenerationResult) -> list[list[int]]:
    return [completion.token_ids for completion in result.completions]


@pytest.mark.parametrize("round_", [0, *(pytest.param(n, marks=pytest.mark.drawn) for n in (1, 2))])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3", "falcon_h1"])
def test_random_traffic_gets_the_right_tokens_and_leaves_nothing(shape: str, round_: int) -> None:
    seed = 100 + round_
    rng = np.random.default_rng(seed)
    model = hybrid_model(shape) if shape in HYBRIDS else tiny_model(shape)
    beginnings = [rng.integers(1, VOCAB_SIZE, 24).tolist() for _ in range(3)]
    requests = [random_request(rng, beginnings) for _ in range(NUM_REQUESTS)]
    plenty = Engine(model, num_blocks=3000, block_size=4, enable_prefix_caching=False)
    expected = [
        tokens_of(result) for result in plenty.generate([prompt for prompt, _ in requests], [p for _, p in requests])
    ]
    options = random_options(rng)
    if shape == "llama-gqa":
        options["num_blocks"] //= 3
    elif shape in HYBRIDS:
        options |= {"num_blocks": options["num_blocks"] // 2, "speculation": None}
    engine = Engine(model, **options)
    places: dict[int, int] = {}
    results: dict[int, list[list[int]]] = {}
    for _ in range(3000):
        if len(places) < NUM_REQUESTS and rng.random() < 0.5:
            place = len(places)
            try:
                number = engine.add_request(*requests[place], priority=int(rng.integers(-1, 2)))
            except NeverFits:
                number = -1 - place
                expected[place] = []
            places[number] = place
        waiting = [number for number in places if number > 0 and places[number] not in results]
        if waiting and rng.random() < 0.03:
            dropped = int(rng.choice(waiting))
            results[places[dropped]] = []
            engine.abort_request(dropped)
            expected[places[dropped]] = []
        if rng.random() < 0.02:
            engine.preempt_all()
        some = rng.choice(waiting, 2) if waiting and rng.random() < 0.1 else None
        for result in engine.step(only=None if some is None else some.tolist()).finished:
            results[places[result.request_id]] = tokens_of(result)
        engine.cache.check()
        if len(places) == NUM_REQUESTS and not engine.has_unfinished:
            break
    assert not engine.has_unfinished, f"seed {seed}"
    for place, request in enumerate(requests):
        assert same_answer(model, *request, results.get(place, []), expected[place]), f"seed {seed}, {options}"
    assert engine.cache.num_used_blocks == 0
    assert engine.cache.running() == {}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_token_that_rounding_does_not_explain_is_no_tie(temperature: float) -> None:
    model = tiny_model("llama-gqa")
    prompt, params = list(range(1, 20)), SamplingParams(max_tokens=8, temperature=temperature, top_k=20, seed=7)
    ((right,),) = (
        tokens_of(result) for result in Engine(model, num_blocks=40, block_size=4).generate([prompt], params)
    )
    assert same_tokens(model, prompt, params, 0, right, right)
    assert not same_tokens(model, prompt, params, 0, right, right[:-1])
    others = [[*right[:5], token] for token in range(VOCAB_SIZE) if token != right[5]]
    assert not any(same_tokens(model, prompt, params, 0, right, other) for other in others)
