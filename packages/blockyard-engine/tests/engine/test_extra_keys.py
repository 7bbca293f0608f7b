"""Requests share blocks only under equal extra keys; their tokens do not depend on them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import CacheSalt, InvalidArgument, LoRA, Span
from blockyard_engine import Engine, PromptLookup, SamplingParams
from blockyard_testing.tiny_models import mixed_prompts

PROMPT = mixed_prompts((33,))[0]
SAMPLING = SamplingParams(max_tokens=6)
KEYS: list[tuple[Any, ...]] = [
    (),
    (CacheSalt("a"),),
    (CacheSalt("b"),),
    (LoRA("a"),),
    (CacheSalt("a"), LoRA("a")),
    (Span("a", 0, 33),),
]


def run(engine: Engine, *keys: tuple[Any, ...]) -> list[tuple[int, list[int]]]:
    """Return cached tokens and tokens of a request under each of the keys, all at once."""
    ids = [engine.add_request(PROMPT, SAMPLING, extra_keys=each) for each in keys]
    found = {}
    while engine.has_unfinished:
        for result in engine.step().finished:
            found[result.request_id] = (result.num_cached_tokens, result.token_ids)
        engine.cache.check()
    return [found[number] for number in ids]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16},
    {"num_cpu_blocks": 64},
    {"num_cpu_blocks": 64, "preemption": "swap", "num_blocks": 20},
    {"num_blocks": 20},
    {"speculation": PromptLookup()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_only_equal_keys_share(llama: Any, options: dict[str, Any]) -> None:
    engine = Engine(llama, **{"num_blocks": 100, "block_size": 8, **options})
    wanted = engine.generate([PROMPT], SAMPLING)[0].token_ids
    engine.cache.reset_prefix_cache()
    assert [run(engine, keys) for keys in KEYS] == [[(0, wanted)]] * len(KEYS)
    again = [run(engine, keys)[0] for keys in KEYS[-2:]]  # the latest, which a small pool still has
    assert again == [(32, wanted)] * 2
    assert engine.cache.num_used_blocks == 0


@pytest.mark.parametrize("options", [{}, {"num_cpu_blocks": 64}], ids=["joins", "waits"])
def test_prompts_in_progress_are_shared_only_under_equal_keys(llama: Any, options: dict[str, Any]) -> None:
    """Within one step, a prompt joins or waits for another's blocks only if their keys are equal."""
    engine = Engine(llama, num_blocks=100, block_size=8, **options)
    found = run(engine, *KEYS, *KEYS)
    assert [cached for cached, _ in found] == [0] * len(KEYS) + [32] * len(KEYS)
    assert len({tuple(tokens) for _, tokens in found}) == 1


def test_a_prompt_waits_for_no_prompt_under_other_keys(llama: Any) -> None:
    """If blocks are shared only once computed, equal prompts wait for each other, but not under other keys."""
    engine = Engine(llama, num_blocks=100, block_size=8, num_cpu_blocks=64)
    for keys in (*KEYS, *KEYS):
        engine.add_request(PROMPT, SAMPLING, extra_keys=keys)
    report = engine.step()
    assert (report.num_seqs, report.num_waiting) == (len(KEYS), len(KEYS))
    engine.abort_all()
    assert engine.cache.num_used_blocks == 0


def test_a_preempted_request_keeps_its_keys(llama: Any) -> None:
    """Blocks computed under a salt are hit again under that salt, and by no one else."""
    engine = Engine(llama, num_blocks=14, block_size=8, max_num_seqs=4)
    sampling = SamplingParams(max_tokens=40)
    for keys in KEYS[:3]:
        engine.add_request(PROMPT, sampling, extra_keys=keys)
    results = []
    while engine.has_unfinished:
        results += engine.step().finished
        engine.cache.check()
    assert engine.num_preemptions > 0
    assert [result.num_cached_tokens for result in results] == [0, 0, 0]
    assert len({tuple(result.token_ids) for result in results}) == 1


def test_generate_takes_keys_for_all_of_its_prompts(llama: Any) -> None:
    engine = Engine(llama, num_blocks=100, block_size=8)
    engine.generate([PROMPT], SAMPLING, extra_keys=[CacheSalt("a")])
    assert engine.generate([PROMPT], SAMPLING)[0].num_cached_tokens == 0
    assert engine.generate([PROMPT, PROMPT], SAMPLING, extra_keys=[CacheSalt("a")])[1].num_cached_tokens == 32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("salt", "extra_keys is 'salt'; it must be a tuple"),
        (("salt",), "extra_keys holds 'salt'"),
        ((CacheSalt("a"), CacheSalt("b")), "at most one of a kind"),
        ((Span("a", 30, 5),), "ends at position 35; the prompt has 33 tokens"),
    ],
)
def test_bad_keys_are_named_and_nothing_is_queued(llama: Any, keys: Any, message: str) -> None:
    engine = Engine(llama, num_blocks=100)
    with pytest.raises(InvalidArgument, match=message):
        engine.add_request(PROMPT, extra_keys=keys)
    assert not engine.has_unfinished
