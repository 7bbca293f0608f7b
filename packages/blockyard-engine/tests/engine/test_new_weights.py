"""New weights while requests run: no key, value or state of the old ones is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.errors import StaleOffer
from blockyard_engine import Engine, PromptLookup, SamplingParams
from blockyard_engine.handoff import DecodeConnector
from blockyard_engine.parallel import Transfer
from blockyard_testing.hybrid_models import HYBRIDS, hybrid_model, poisoned
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model

from ..support.handoff_ends import Ends

MAX_TOKENS = 12
SWAPS = {"num_blocks": 16, "num_cpu_blocks": 60, "preemption": "swap", "max_num_seqs": 6}
#: Where old keys, values and states are when the weights change: the model, and options of the engine.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "pool": ("llama-gqa", {"num_blocks": 60}),
    "short pool": ("llama-gqa", {"num_blocks": 16}),
    "swap": ("llama-gqa", SWAPS),
    "swap and windows": ("gemma3", {**SWAPS, "num_blocks": 26}),
    "CPU pool": ("llama-gqa", {"num_blocks": 16, "num_cpu_blocks": 60}),
    "drafts": ("llama-gqa", {"num_blocks": 60, "speculation": PromptLookup(3)}),
    "states": ("qwen3_next", {"num_blocks": 900}),
    "swapped states": ("qwen3_next", {"num_blocks": 20, "num_cpu_blocks": 400, "preemption": "swap"}),
}


def model_of(name: str) -> Any:
    return hybrid_model(name) if name in HYBRIDS else tiny_model(name)


def change_weights(model: Any) -> None:
    """Replace the model's weights in place."""
    torch.manual_seed(12)
    other = type(model)(model.config).float().eval()
    model.load_state_dict(other.state_dict())


def check_answers(engine: Engine, prompts: list[list[int]], how: Any, is_full: Any = None) -> None:
    """Run prompts, change the weights meanwhile, and compare the rest of each answer with the new model's own."""
    model = engine._patched.model
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    numbers = [engine.add_request(prompt, sampling) for prompt in prompts]
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    while not all(len(answer) > 1 for answer in list(answers.values())[:2]) or not (is_full is None or is_full()):
        assert engine.has_unfinished, "old keys and values never stood where the case wants them"
        for token in engine.step().new_tokens:
            answers[token.request_id].append(token.token_id)
        engine.pause_for_tiers(engine.step(only=[]))
    before = {number: len(answer) for number, answer in answers.items()}
    change_weights(model)
    how(engine)
    engine.cache.check()
    while engine.has_unfinished:
        report = engine.step()
        for token in report.new_tokens:
            answers[token.request_id].append(token.token_id)
        engine.pause_for_tiers(report)
    for number, prompt in zip(numbers, prompts, strict=True):
        old, new = answers[number][: before[number]], answers[number][before[number] :]
        assert new == (reference_tokens(model, [prompt + old], len(new))[0] if new else [])
        assert len(old) + len(new) == MAX_TOKENS
    again = engine.generate(prompts, sampling)
    assert [result.token_ids for result in again] == reference_tokens(model, prompts, MAX_TOKENS)
    assert engine.cache.num_used_blocks == 0


def forget(engine: Engine) -> None:
    engine.forget_computed()


def reset_and_preempt(engine: Engine) -> None:
    engine.cache.reset_prefix_cache()
    engine.preempt_all()


@pytest.mark.parametrize("how", [forget, reset_and_preempt])
@pytest.mark.parametrize("place", PLACES)
def test_no_key_value_or_state_of_old_weights_is_read(place: str, how: Any) -> None:
    name, options = PLACES[place]
    engine = Engine(model_of(name), **{"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, **options})
    if engine.shape.states is not None:
        poisoned(engine)

    def is_swapped() -> bool:
        return any(engine.cache.is_swapped_out(seq) for seq in engine.cache.running())

    is_full = is_swapped if options.get("preemption") == "swap" else None
    check_answers(engine, mixed_prompts((13, 15, 14, 16), shared=9), how, is_full)


@pytest.mark.parametrize("write", ["through", "back"])
def test_tiers_supply_nothing_of_old_weights(tmp_path: Path, write: Any) -> None:
    from blockyard_tiers import FileTier, TierUse

    def stored() -> int:
        return sum(1 for path in tmp_path.rglob("*") if path.is_file())

    model = tiny_model("llama-gqa")
    tier = TierUse(FileTier(tmp_path, 2**30), write=write)
    engine = Engine(model, num_blocks=16, block_size=4, max_num_batched_tokens=16, tiers=[tier])
    prompts = mixed_prompts((13, 15, 14, 16), shared=9)
    check_answers(engine, prompts, forget, stored)
    assert engine.offload is not None
    assert engine.offload.settle(PATIENCE_SECONDS)
    engine.close()
    # What is stored is named by the weights that computed it: each model finds its own.
    for made in (model, tiny_model("llama-gqa")):
        engine = Engine(made, num_blocks=60, block_size=4, tiers=[FileTier(tmp_path, 2**30)])
        results = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        assert [result.token_ids for result in results] == reference_tokens(made, prompts, MAX_TOKENS)
        engine.close()


def test_objects_are_named_by_the_weights_at_the_first_request(tmp_path: Path) -> None:
    from blockyard_tiers import FileTier

    (prompt,) = mixed_prompts((40,))
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=60, block_size=4, tiers=[FileTier(tmp_path, 2**30)])
    change_weights(model)
    engine.forget_computed()
    engine.generate([prompt], greedy)
    assert engine.offload is not None
    assert engine.offload.settle(PATIENCE_SECONDS)
    engine.close()
    old = tiny_model("llama-gqa")
    engine = Engine(old, num_blocks=60, block_size=4, tiers=[FileTier(tmp_path, 2**30)])
    (result,) = engine.generate([prompt], greedy)
    assert (result.num_tier_cached_tokens, result.token_ids) == (0, reference_tokens(old, [prompt], 4)[0])
    engine.close()


def test_answers_to_one_prompt_continue_with_new_weights() -> None:
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=60, block_size=4)
    (prompt,) = mixed_prompts((14,))
    engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, n=3, ignore_eos=True))
    for _ in range(4):
        engine.step()
    change_weights(model)
    engine.forget_computed()
    results = []
    while engine.has_unfinished:
        results += engine.step().finished
    (result,) = results
    for completion in result.completions:
        old, new = completion.token_ids[:4], completion.token_ids[4:]
        assert new == reference_tokens(model, [prompt + old], MAX_TOKENS - 4)[0]
    beams = engine.beam_search(prompt, 2, 5)
    expected = Engine(model, num_blocks=60, block_size=4).beam_search(prompt, 2, 5)
    assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in expected]
    assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in expected], abs=1e-4)
    assert engine.cache.num_used_blocks == 0


def test_hand_overs_on_their_way_are_refused_after_new_weights() -> None:
    ends = Ends()
    prompts = mixed_prompts((17, 18, 19, 20))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    prefill, decode = ends.prefill, ends.decode
    ends.compute(prompts, sampling)
    offers = ends.receiver.offers(PATIENCE_SECONDS)
    _, token = ends.take(offers[0], sampling)
    transfer = decode.accept(offers[1], sampling, 0)
    assert isinstance(transfer, Transfer)

    change_weights(decode.engine._patched.model)
    decode.engine.forget_computed()
    with pytest.raises(StaleOffer):
        decode.finish(transfer, 0)
    rest = run(decode)
    model = decode.engine._patched.model
    assert rest == reference_tokens(model, [[*prompts[0], token.token_id]], 5)[0]

    change_weights(prefill.engine._patched.model)
    prefill.engine.forget_computed()
    for offer in offers[1:]:
        with pytest.raises(StaleOffer):
            prefill.sender.require_held(offer.id, 0)
    prefill.sender.expire(1000)
    ends.require_empty()


def run(connector: DecodeConnector) -> list[int]:
    """Run to the end and return the new tokens."""
    found = []
    while connector.engine.has_unfinished:
        found += [token.token_id for token in connector.step(0).new_tokens]
    return found


def test_engines_of_several_ranks_refuse_new_weights() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=20, block_size=4, tensor_parallel=ThreadPeers(2))
    try:
        with pytest.raises(InvalidArgument, match="2 ranks"):
            engine.forget_computed()
    finally:
        engine.close()
