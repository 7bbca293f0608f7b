"""An answer that another engine began goes on as if it had not been cut: greedy and sampled, token for token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument
from blockyard.engine import Engine, FinishReason, PromptLookup, SamplingParams

from ..support.seeds import draws, run_seed
from ..support.tiny_models import mixed_prompts

PROMPT = [5, 6, 7, 8, 9, 10, 5, 6, 7]
WAYS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=11),
    "hot, penalties": SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    "min_tokens": SamplingParams(max_tokens=20, min_tokens=9, temperature=1.0, seed=7, stop_token_ids=tuple(range(20))),
}


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, **({"num_blocks": 60, "block_size": 4} | options))


def answered(engine: Engine, sampling: SamplingParams, given: Any = ()) -> tuple[list[int], list[int], Any]:
    """The tokens that steps reported, those of the result, and why it ended."""
    number = engine.add_request(PROMPT, sampling, given=given)
    told: list[int] = []
    while engine.has_unfinished:
        report = engine.step()
        told += [token.token_id for token in report.new_tokens if token.request_id == number]
        for result in report.finished:
            assert 0 <= result.num_cached_tokens <= result.num_prompt_tokens == len(PROMPT)
            completion = result.completions[0]
            engine.cache.check()
            assert engine.cache.num_used_blocks == 0
            return told, list(completion.token_ids), completion.finish_reason
    raise AssertionError("it never ended")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"speculation": PromptLookup()}, {"max_num_batched_tokens": 4, "max_num_seqs": 2}], ids=str
)
def test_an_answer_goes_on_as_if_it_had_not_been_cut(llama: Any, way: str, options: dict[str, Any]) -> None:
    whole, same, reason = answered(engine_of(llama, **options), WAYS[way])
    assert whole == same
    assert len(whole) > 2
    for cut in sorted({1, len(whole) // 2, len(whole) - 1}):
        told, tokens, ended = answered(engine_of(llama, **options), WAYS[way], whole[:cut])
        assert told == whole[cut:], "each token once"
        assert (tokens, ended) == (whole, reason)


def test_an_answer_goes_on_where_its_prompt_is_cached_already(llama: Any) -> None:
    engine = engine_of(llama)
    whole, _, _ = answered(engine, WAYS["sampled"])
    for given in (whole[:7], np.array(whole[:7])):
        assert answered(engine, WAYS["sampled"], given)[1] == whole


def test_begun_answers_among_others_in_a_small_pool(llama: Any) -> None:
    """Preempted, begun again, beside requests of the engine's own."""
    draw = random.Random(run_seed())
    prompts = mixed_prompts((9, 14, 5, 12, 8, 11), shared=4)
    for _ in range(draws(6, 2)):
        sampling = SamplingParams(
            max_tokens=16, ignore_eos=True, temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(99)
        )
        whole = [result.completions[0].token_ids for result in engine_of(llama).generate(prompts, sampling)]
        engine = engine_of(llama, num_blocks=17)
        cuts = [draw.randrange(16) for _ in prompts]
        ids = [
            engine.add_request(prompt, sampling, given=answer[:cut])
            for prompt, answer, cut in zip(prompts, whole, cuts, strict=True)
        ]
        found = {}
        while engine.has_unfinished:
            found |= {result.request_id: list(result.completions[0].token_ids) for result in engine.step().finished}
            engine.cache.check()
        assert [found[number] for number in ids] == [list(answer) for answer in whole]
        assert engine.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ("text", {}, "given is a str"),
        (7, {}, "given is a int"),
        ([-1], {}, "given"),
        ([10**6], {}, "given"),
        ([1.5], {}, "given"),
        ([[1]], {}, "given"),
        ([1, 2, 3], {"max_tokens": 3}, r"given has 3 tokens; it must have fewer than max_tokens 3"),
        ([1], {"n": 2}, "n is 2"),
        ([1], {"logprobs": 1}, "logprobs is 1"),
        ([1, 9, 2], {"stop_token_ids": (9,)}, "given has token 9 at 1, which ends the answer"),
    ],
)
def test_what_cannot_have_begun_an_answer_is_refused(
    llama: Any, given: Any, more: dict[str, Any], message: str
) -> None:
    engine = engine_of(llama)
    with pytest.raises(InvalidArgument, match=message):
        engine.add_request(PROMPT, SamplingParams(**({"max_tokens": 8} | more)), given=given)
    assert (engine.num_waiting, engine.num_running, engine.cache.num_used_blocks) == (0, 0, 0)
    assert not engine.has_unfinished
    assert answered(engine, SamplingParams(max_tokens=3, ignore_eos=True))[2] is FinishReason.LENGTH
