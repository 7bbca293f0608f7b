"""Hybrid models, with states beside attention: the tokens are those of `generate`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument, NeverFits
from blockyard.storage import StateSlots
from blockyard_engine import Engine, ModelError, PromptLookup, SamplingParams
from blockyard_engine import probe as probe_module
from blockyard_engine.decoding.sampler import SamplingContext, StepSampler
from blockyard_engine.model import quiet_transformers
from blockyard_engine.states import learning
from blockyard_testing.hybrid_models import HYBRIDS, hybrid_model, poisoned
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

from ..support.small_answers import GREEDY, NUM_TOKENS, answer, few_prompts, require_preempted_alike

#: The names under which the models differ most: a delta rule, Mamba-2 beside attention in each layer, a shared block.
FEW = ("qwen3_next", "falcon_h1", "zamba2")
EACH = [name if name in FEW else pytest.param(name, marks=pytest.mark.drawn) for name in HYBRIDS]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with quiet_transformers():
        yield


def load_engine(model: Any, **options: Any) -> Engine:
    given = {"num_blocks": 800, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options}
    return poisoned(Engine(model, **given))


# ---------------------------------------------------------------- every architecture


@pytest.mark.parametrize("name", EACH)
def test_tokens_equal_generate_in_chunks_and_after_hits(name: str) -> None:
    model = hybrid_model(name)
    prompts = few_prompts()
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    for sizes in ({}, {"max_num_batched_tokens": 512}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}):
        engine = load_engine(model, **sizes)
        assert answer(engine, prompts) == expected  # cold, and hits of what the first one keeps where others part
        assert answer(engine, prompts) == expected  # each hits its own last position
        hits = [result.num_cached_tokens for result in engine.generate(prompts, GREEDY)]
        assert hits == [72, 60, 64, 36]


@pytest.mark.parametrize("name", EACH)
def test_prompts_hit_at_every_kind_of_checkpoint(name: str) -> None:
    model = hybrid_model(name)
    first, other = mixed_prompts((300, 20))
    engine = load_engine(model, max_num_batched_tokens=100)
    seen = []
    turns = [first[:290], first[:289] + other, first[:270] + other, first[:270] + other[:9] + first[:5]]
    turns.append([*first[:290], *reference_tokens(model, [first[:290]], NUM_TOKENS)[0], 5, 6])
    for prompt in turns:
        (result,) = engine.generate([prompt], GREEDY)
        assert result.token_ids == reference_tokens(model, [prompt], NUM_TOKENS)[0]
        seen.append(result.num_cached_tokens)
    # Nothing; the end of a prompt; half of it or more (256); where another parted from it; the end of an answer.
    assert seen == [0, 288, 256, 268, 296]


# ---------------------------------------------------------------- preemption, forks, beams


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("name", FEW)
def test_preempted_sequences_get_the_same_tokens(name: str, way: str) -> None:
    model = hybrid_model(name)
    options = {"num_cpu_blocks": 60} if way == "swap" else {}
    require_preempted_alike(model, load_engine(model, num_blocks=38, preemption=way, **options))


@pytest.mark.parametrize("name", FEW)
def test_forks_continue_from_one_state(name: str) -> None:
    model = hybrid_model(name)
    engine = load_engine(model, max_num_seqs=8)
    prompts = mixed_prompts((21, 34), shared=9)
    drawn = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=4, ignore_eos=True)
    greedy = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    results = engine.generate([prompts[0], *prompts], [drawn, greedy, drawn])
    assert [each.token_ids for each in results[1].completions] == reference_tokens(model, prompts[:1], 12) * 2
    for prompt, result in zip(prompts, results[::2], strict=True):
        texts = [each.token_ids for each in result.completions]
        assert len({tuple(text) for text in texts}) > 1
        assert [drawn_alone(model, prompt, drawn, index) for index in range(3)] == texts
    engine.cache.check()


def drawn_alone(model: Any, prompt: list[int], sampling: SamplingParams, index: int) -> list[int]:
    """Return a completion's draws from the model's own forward, without a cache."""
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(StepSampler(logits).choose(0, SamplingContext(sampling, index, len(prompt)), tokens).token_id)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", FEW)
def test_beams_equal_those_of_generate(name: str) -> None:
    model = hybrid_model(name)
    engine = load_engine(model, max_num_seqs=9)
    prompts = mixed_prompts((37, 21))
    beams = engine.beam_search_batch(prompts, num_beams=3, max_tokens=9)
    for prompt, found in zip(prompts, beams, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            max_new_tokens=9,
        )
        assert [beam.token_ids for beam in found] == output[:, len(prompt) :].tolist()
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0


def test_states_move_between_slots_and_blocks_under_random_traffic() -> None:
    """Slots change owners at every step, and no sequence gets another's state."""
    model = hybrid_model("falcon_h1")
    prompts = mixed_prompts((9, 30, 17, 41, 22, 28, 35, 11, 26), shared=8)
    lengths = (3, 20, 7, 11, 16, 2, 9, 24, 5)
    engine = load_engine(model, num_blocks=90, max_num_seqs=3)
    numbers = {}
    for prompt, length in zip(prompts, lengths, strict=True):
        request = engine.add_request(prompt, SamplingParams(max_tokens=length, ignore_eos=True), priority=-len(numbers))
        numbers[request] = reference_tokens(model, [prompt], length)[0]
        engine.step()
    results = {}
    for _ in range(400):
        if not engine.has_unfinished:
            break
        for result in engine.step().finished:
            results[result.request_id] = result.token_ids
        engine.cache.check()
    assert results == {number: numbers[number] for number in results}
    assert len(results) >= 3


def test_a_step_that_breaks_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid_model("qwen3_next")
    engine = load_engine(model)
    prompts = few_prompts()
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    number = [0]
    save = StateSlots.save

    def breaks(slots: StateSlots, *moves: Any) -> None:
        number[0] += 1
        if number[0] % 4 == 0:
            raise RuntimeError("out of memory")
        save(slots, *moves)

    monkeypatch.setattr(StateSlots, "save", breaks)
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    results = {}
    for _ in range(500):
        if not engine.has_unfinished:
            break
        try:
            results |= {result.request_id: result.token_ids for result in engine.step(keep_on_error=True).finished}
        except RuntimeError:
            engine.cache.check()
    assert [results[request] for request in requests] == expected


# ---------------------------------------------------------------- what vllm#45238 asks


def test_waiting_prompts_hit_their_shared_prefix_from_the_second_on() -> None:
    model = hybrid_model("lfm2")
    prompts = [prompt[:330] for prompt in mixed_prompts((330,) * 4, shared=270)]
    engine = load_engine(model, max_num_batched_tokens=512, cache_options={"track_misses": True})
    results = engine.generate(prompts, GREEDY)
    assert [result.num_cached_tokens for result in results] == [0, 268, 268, 268]
    assert tokens_of(results) == reference_tokens(model, prompts, NUM_TOKENS)
    assert engine.cache.miss_totals().num_no_state == 0


def test_successive_prompts_hit_half_and_then_all() -> None:
    model = hybrid_model("lfm2")
    prompts = [prompt[:330] for prompt in mixed_prompts((330,) * 3, shared=310)]
    engine = load_engine(model, max_num_batched_tokens=512, cache_options={"track_misses": True})
    hits = [engine.generate([prompt], GREEDY)[0].num_cached_tokens for prompt in prompts]
    assert hits == [0, 256, 308]
    assert engine.cache.miss_totals().num_no_state == 308 - 256


def test_checkpoint_positions_can_be_chosen() -> None:
    engine = load_engine(hybrid_model("lfm2"), cache_options={"state_checkpoints": ("every:8",)})
    (prompt,) = mixed_prompts((40,))
    engine.generate([prompt], GREEDY)
    assert engine.generate([[*prompt[:27], 5, 6, 7]], GREEDY)[0].num_cached_tokens == 24


# ---------------------------------------------------------------- memory


def test_the_memory_sum_includes_states() -> None:
    model = hybrid_model("qwen3_next")
    engine = Engine(model, num_blocks=100, block_size=4, max_num_seqs=3)
    states = engine.shape.states
    assert states is not None
    # Three layers: 48 channels of 4 tokens, and 4 heads of 8 times 8, in float32.
    assert states.num_bytes == 3 * 4 * (64 * 4 + 4 * 8 * 8)
    assert engine.memory.state_bytes == 3 * engine.cache.config.state_blocks * engine.kv_cache.bytes_per_block
    assert "states" in str(engine.memory)


def test_an_engine_that_finds_its_size_takes_states() -> None:
    engine = Engine(hybrid_model("kimi_linear"), block_size=4, max_num_seqs=2)
    assert engine.cache.config.num_blocks > engine.cache.config.state_blocks
    small = Engine(hybrid_model("kimi_linear"), block_size=4, max_num_seqs=2, kv_cache_memory_bytes=2**20)
    assert small.cache.config.num_blocks * small.kv_cache.bytes_per_block <= 2**20


def test_half_precision_runs() -> None:
    model = hybrid_model("qwen3_next").to(torch.bfloat16)
    engine = load_engine(model)
    states = engine.shape.states
    assert states is not None
    assert {tensor.dtype for tensor in states.tensors} == {torch.bfloat16, torch.float32}
    first = answer(engine, few_prompts())
    assert all(len(tokens) == NUM_TOKENS for tokens in first)


# ---------------------------------------------------------------- the model is its owner's


def test_between_steps_the_model_computes_as_before() -> None:
    model = hybrid_model("falcon_h1")
    prompts = few_prompts()[:2]
    expected = reference_tokens(model, prompts, 4)
    one, other = load_engine(model), load_engine(model)
    numbers = [engine.add_request(prompts[0], GREEDY) for engine in (one, other)]
    while one.has_unfinished:
        one.step()
        other.step()
        ids = torch.tensor(prompts[1:])
        again = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        assert again[0, len(prompts[1]) :].tolist() == expected[1]
    assert numbers
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_step_inside_another_engines_step_keeps_its_own_attention() -> None:
    """An engine is called while another one's model is patched, as from a callback."""
    model = hybrid_model("falcon_h1")
    one, other = load_engine(model), load_engine(model)
    prompts = few_prompts()[:2]
    inner = []

    def on_step(_: Any) -> None:
        if not inner:
            inner.extend(answer(other, prompts[1:]))

    results = one.generate(prompts[:1], GREEDY, on_step=on_step)
    assert [*tokens_of(results), *inner] == reference_tokens(model, prompts, NUM_TOKENS)


# ---------------------------------------------------------------- what is refused


def test_unsupported_options_with_states_are_refused() -> None:
    model = hybrid_model("lfm2")
    for options, words in (
        ({"speculation": PromptLookup()}, "speculation is given for a model with states"),
        ({"num_blocks": 2}, r"state_bytes is \d+, \d blocks"),
        ({"kv_cache_memory_bytes": 1100, "num_blocks": None}, r"bytes is 1100; a block has \d+ bytes"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            Engine(model, **{"num_blocks": 100, "block_size": 4, **options})


def test_a_model_with_only_states_is_refused() -> None:
    with pytest.raises(ModelError, match="has only states and no layer with keys and values"):
        Engine(hybrid_model("lfm2", layer_types=["conv"] * 4), num_blocks=100)


def test_a_prompt_that_never_fits_is_refused() -> None:
    engine = load_engine(hybrid_model("lfm2"), num_blocks=20)
    with pytest.raises(NeverFits, match="the cache can give one sequence"):
        engine.add_request(mixed_prompts((90,))[0])


# ---------------------------------------------------------------- the trial


def fails(model: Any) -> None:
    probe_module._tried.clear()
    probe_module._tried_copies.clear()
    with pytest.raises(ModelError, match="computes other logits in the engine's steps"):
        Engine(model, num_blocks=100, block_size=4)
    probe_module._tried.clear()
    probe_module._tried_copies.clear()


@pytest.mark.parametrize("name", EACH)
def test_swapped_states_fail_the_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StateSlots.rows
    monkeypatch.setattr(StateSlots, "rows", lambda slots, which: rows(slots, which * 0))
    fails(hybrid_model(name))


@pytest.mark.parametrize("name", EACH)
def test_states_that_are_not_loaded_fail_the_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = StateSlots._parts
    monkeypatch.setattr(StateSlots, "_parts", lambda slots, slot: torch.zeros_like(parts(slots, slot)))
    fails(hybrid_model(name))


def test_a_module_that_forgets_its_state_in_chunks_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hybrid_model("jamba")
    shape = Engine(model, num_blocks=100, block_size=4).shape
    assert shape.states is not None
    assert not any(mixer.takes_chunks for mixer in shape.states.mixers)
    monkeypatch.setattr(learning._Watch, "_uses_state", lambda *_: True)
    fails(model)
