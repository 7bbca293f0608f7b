"""An engine with tiers: its tokens do not depend on them, and prompts of an earlier process hit."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import CacheSalt, InvalidArgument
from blockyard_engine import Engine, GenerationResult, SamplingParams
from blockyard_testing.exact_draws import same_answer
from blockyard_testing.hybrid_models import hybrid_model, poisoned
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import run_seed
from blockyard_testing.tiers_offload_world import FaultyTier
from blockyard_testing.tiers_servers import peer_place
from blockyard_testing.tiny_models import VOCAB_SIZE, tiny_model
from blockyard_tiers import FileTier, PeerTier, TierUse
from blockyard_tiers.tier import BAD_OBJECT

from .test_engine_world import random_options, random_request, tokens_of

PROMPT = np.random.default_rng(7).integers(1, VOCAB_SIZE, 61).tolist()
LONG = SamplingParams(max_tokens=12)


def answer(engine: Engine, prompt: list[int] = PROMPT, *keys: CacheSalt) -> GenerationResult:
    (result,) = engine.generate([prompt], LONG, extra_keys=keys)
    assert engine.offload is None or engine.offload.settle(PATIENCE_SECONDS)
    check(engine)
    return result


def check(engine: Engine) -> None:
    engine.cache.check()
    if engine.offload is not None:
        engine.offload.check()


def engine_on(model: Any, folder: Path, **options: Any) -> Engine:
    engine = Engine(model, **{"num_blocks": 60, "block_size": 4, **options}, tiers=[FileTier(folder, 2**30)])
    return engine if engine.shape.states is None else poisoned(engine)


def served(model: Any, folder: Path, prompt: list[int] = PROMPT, *keys: CacheSalt, **options: Any) -> GenerationResult:
    """Return the answer of an engine that then closes."""
    engine = engine_on(model, folder, **options)
    try:
        return answer(engine, prompt, *keys)
    finally:
        engine.close()


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3", "deepseek-v3"])
def test_a_prompt_hits_in_the_next_engine(shape: str, tmp_path: Path) -> None:
    model = tiny_model(shape)
    alone = answer(Engine(model, num_blocks=60, block_size=4))
    first, again = served(model, tmp_path), served(model, tmp_path)
    assert first.token_ids == again.token_ids == alone.token_ids
    assert (first.num_tier_cached_tokens, again.num_tier_cached_tokens, again.num_cached_tokens) == (0, 60, 60)


def test_a_prompt_hits_in_an_engine_whose_tier_is_a_peer(tmp_path: Path) -> None:
    model = tiny_model("llama-gqa")
    first = served(model, tmp_path)
    with peer_place(tmp_path) as place:
        engine = Engine(model, num_blocks=60, block_size=4, tiers=[PeerTier(place.url)])
        again = answer(engine)
        assert (again.token_ids, again.num_tier_cached_tokens) == (first.token_ids, 60)
        other = answer(engine, PROMPT[::-1])
        place.kill()
        engine.cache.reset_prefix_cache()
        assert answer(engine).token_ids == first.token_ids
        place.start()
        engine.close()
    back = served(model, tmp_path, PROMPT[::-1])
    assert (back.token_ids, back.num_tier_cached_tokens) == (other.token_ids, 60)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_a_hybrid_model_continues_from_a_checkpoint_of_an_earlier_engine(name: str, tmp_path: Path) -> None:
    model = hybrid_model(name)
    options = {"num_blocks": 600, "cache_options": {"state_checkpoints": ("every:16", "ends")}}
    alone = answer(poisoned(Engine(model, block_size=4, **options)))
    first, again = (served(model, tmp_path, **options) for _ in range(2))
    assert first.token_ids == again.token_ids == alone.token_ids
    assert (first.num_tier_cached_tokens, again.num_tier_cached_tokens, again.num_cached_tokens) == (0, 60, 60)
    turn = [*PROMPT, *first.token_ids, 5, 6, 7]
    expected = answer(poisoned(Engine(model, block_size=4, **options)), turn)
    later = served(model, tmp_path, turn, **options)
    assert (later.token_ids, later.num_tier_cached_tokens) == (expected.token_ids, 72)
    branch = [*PROMPT[:50], 8, 9, 7]
    expected = answer(poisoned(Engine(model, block_size=4, **options)), branch)
    parted = served(model, tmp_path, branch, **options)
    assert (parted.token_ids, parted.num_tier_cached_tokens) == (expected.token_ids, 48)


_KILLED = """
import sys
from pathlib import Path
import blockyard_testing.plugin
from tests.engine.test_tiers import LONG, PROMPT, engine_on
from blockyard_testing.hybrid_models import hybrid_model
engine = engine_on(hybrid_model("qwen3_next"), Path(sys.argv[1]), num_blocks=600)
for turn in range(10**6):
    engine.generate([[*PROMPT[: 20 + turn % 40], turn % 97, turn % 89, *PROMPT[:9]], PROMPT], LONG)
    print("answered", flush=True)
"""


@pytest.mark.drawn
def test_a_process_killed_in_mid_save_leaves_states_that_are_right_or_missed(tmp_path: Path) -> None:
    draw = random.Random(run_seed())
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            for _ in range(draw.randint(1, 6)):
                assert process.stdout.readline() == b"answered\n"
            time.sleep(draw.random() / 20)
            process.kill()
    model = hybrid_model("qwen3_next")
    engine, alone = engine_on(model, tmp_path, num_blocks=600), poisoned(Engine(model, num_blocks=600, block_size=4))
    turns = [[*PROMPT[: 20 + turn % 40], turn % 97, turn % 89, *PROMPT[:9]] for turn in range(6)]
    for prompt in [PROMPT, *turns]:
        assert answer(engine, prompt).token_ids == answer(alone, prompt).token_ids
    assert engine.offload is not None
    assert engine.offload.read().tiers[0].num_hit_tokens > 0
    assert not any(cause in BAD_OBJECT for cause in engine.offload.read().tiers[0].stats.load_misses)
    engine.close()


def test_keys_and_values_without_a_state_are_no_hit(tmp_path: Path) -> None:
    model = hybrid_model("lfm2")
    options = {"num_blocks": 600, "cache_options": {"state_checkpoints": ()}}
    first = served(model, tmp_path, **options)
    engine = engine_on(model, tmp_path, **options)
    again = answer(engine)
    assert (again.token_ids, again.num_tier_cached_tokens) == (first.token_ids, 0)
    assert engine.offload is not None
    assert engine.offload.read().missed_tokens["no_state"] == 60
    engine.close()


def test_buffers_that_hold_no_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="half of them must hold a state of"):
        engine_on(hybrid_model("lfm2"), tmp_path, tier_buffer_bytes=4000)


def test_generated_tokens_hit_too(llama: Any, tmp_path: Path) -> None:
    first = served(llama, tmp_path)
    turn = [*PROMPT, *first.token_ids, 5, 6, 7]
    assert served(llama, tmp_path, turn).num_tier_cached_tokens == 72  # all but the last of them is computed


def test_other_weights_hit_nothing(llama: Any, tmp_path: Path) -> None:
    import torch

    first, other = served(llama, tmp_path), tiny_model("llama-gqa")
    assert served(other, tmp_path).num_tier_cached_tokens == 60  # the same weights, made again
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    assert served(other, tmp_path).num_tier_cached_tokens == 0
    assert served(llama, tmp_path).token_ids == first.token_ids


def test_other_weights_in_one_engine_hit_nothing_after_a_reset(tmp_path: Path) -> None:
    import torch

    model = tiny_model("llama-gqa")
    engine = engine_on(model, tmp_path)
    answer(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.01)
    engine.cache.reset_prefix_cache()
    changed = answer(engine)
    assert changed.num_tier_cached_tokens == 0
    assert changed.token_ids == answer(Engine(model, num_blocks=60, block_size=4)).token_ids
    engine.close()


def test_other_salts_and_dtypes_hit_nothing(llama: Any, tmp_path: Path) -> None:
    import torch

    served(llama, tmp_path, PROMPT, CacheSalt("a"))
    assert served(llama, tmp_path).num_tier_cached_tokens == 0
    assert served(llama, tmp_path, PROMPT, CacheSalt("a")).num_tier_cached_tokens == 60
    half = tiny_model("llama-gqa").to(torch.bfloat16)
    assert served(half, tmp_path).num_tier_cached_tokens == 0
    assert served(half, tmp_path).num_tier_cached_tokens == 60


def test_a_request_that_leaves_in_mid_load_leaks_nothing(llama: Any) -> None:
    tier = FaultyTier(random.Random(0), faults=0.0)
    first = Engine(llama, num_blocks=60, block_size=4, tiers=[tier])
    first.generate([PROMPT], LONG)
    while tier.transfers:
        tier.work()
    engine = Engine(llama, num_blocks=60, block_size=4, tiers=[tier])
    left, stays = engine.add_request(PROMPT, LONG), engine.add_request(list(PROMPT), LONG)
    report = engine.step()
    assert (report.num_tokens, engine.num_loading, len(tier.transfers)) == (0, 2, 1)
    check(engine)
    engine.abort_request(left)  # the other one waits for the same load
    check(engine)
    while engine.has_unfinished:
        tier.work()
        for result in engine.step().finished:
            assert (result.request_id, result.num_tier_cached_tokens) == (stays, 60)
        check(engine)
    abandoned = engine.add_request([*PROMPT[:20], 9, *PROMPT[20:]], LONG)
    engine.step()
    engine.abort_request(abandoned)
    check(engine)


def test_a_prompt_whose_tier_hangs_is_computed_after_others(llama: Any) -> None:
    """The clock is a counter: a load is abandoned once computing would have taken as long."""
    tier = FaultyTier(random.Random(0), faults=0.0)
    first = Engine(llama, num_blocks=60, block_size=4, tiers=[tier])
    (expected,) = first.generate([PROMPT], LONG)
    while tier.transfers:
        tier.work()
    ticks = iter(range(10**6))
    engine = Engine(llama, num_blocks=60, block_size=4, tiers=[tier], clock=lambda: float(next(ticks)))
    hangs = engine.add_request(PROMPT, LONG)
    passes = engine.add_request(PROMPT[::-1], SamplingParams(max_tokens=1))
    ended = {}
    while engine.has_unfinished:
        for result in engine.step().finished:
            ended[result.request_id] = result
        check(engine)
    assert list(ended) == [passes, hangs]
    assert ended[hangs].token_ids == expected.token_ids
    assert engine.offload is not None
    assert engine.offload.missed_tokens["late"] == 60
    tier.work()
    tier.work()
    engine.offload.poll()
    check(engine)


@pytest.mark.parametrize("round_", [0, *(pytest.param(n, marks=pytest.mark.drawn) for n in (1, 2))])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3", "hybrid"])
def test_random_traffic_over_faulty_tiers_gets_the_right_tokens(shape: str, round_: int) -> None:
    """Three engines, one after another, on tiers that refuse, fail, hang and lose objects, with all features."""
    seed = 300 + round_  # fixed, as in the world without tiers
    rng = np.random.default_rng(seed)
    model = hybrid_model("qwen3_next") if shape == "hybrid" else tiny_model(shape)
    requests, expected, tiers = traffic(model, rng, seed)
    num_hits = 0
    for life in range(3):
        options = {**random_options(rng), "enable_prefix_caching": True}
        uses = [TierUse(tiers[0]), TierUse(tiers[1], ("through", "selective", "never")[life])]
        if shape == "hybrid":
            options |= {"num_blocks": 300, "speculation": None}
        engine = Engine(model, **options, tiers=uses, tier_buffer_bytes=int(rng.integers(10, 80)) * 4000)
        num_hits += run_life(engine, model, tiers, requests, expected, rng)
        for tier in tiers:
            tier.end_process()
    assert num_hits > 0, f"seed {seed}"


def traffic(
    model: Any, rng: np.random.Generator, seed: int
) -> tuple[list[tuple[list[int], SamplingParams]], list[list[list[int]]], list[FaultyTier]]:
    """Return random requests, their tokens on an engine without tiers, and two faulty tiers."""
    beginnings = [rng.integers(1, VOCAB_SIZE, 24).tolist() for _ in range(3)]
    requests = [random_request(rng, beginnings) for _ in range(25)]
    plenty = Engine(model, num_blocks=3000, block_size=4, enable_prefix_caching=False)
    prompts, sampling = [prompt for prompt, _ in requests], [params for _, params in requests]
    expected = [tokens_of(result) for result in plenty.generate(prompts, sampling)]
    tiers = [FaultyTier(random.Random(seed), faults=0.03), FaultyTier(random.Random(seed + 1), "second")]
    return requests, expected, tiers


def run_life(
    engine: Engine,
    model: Any,
    tiers: list[FaultyTier],
    requests: list[tuple[list[int], SamplingParams]],
    expected: list[list[list[int]]],
    rng: np.random.Generator,
) -> int:
    """Serve all requests, dropping some; return the tokens loaded from tiers."""
    places: dict[int, int] = {}
    ended: dict[int, GenerationResult | None] = {}
    for _ in range(3000):
        if len(places) < len(requests) and rng.random() < 0.5:
            place = len(places)
            places[engine.add_request(*requests[place], priority=int(rng.integers(-1, 2)))] = place
        waiting = [number for number in places if number not in ended]
        if waiting and rng.random() < 0.03:
            dropped = int(rng.choice(waiting))
            ended[dropped] = None
            engine.abort_request(dropped)
        if rng.random() < 0.02:
            engine.preempt_all()
        for tier in tiers:
            tier.work()
            if rng.random() < 0.01:
                tier.evict()
        some = rng.choice(waiting, 2).tolist() if waiting and rng.random() < 0.1 else None
        for result in engine.step(only=some).finished:
            ended[result.request_id] = result
        check(engine)
        if len(ended) == len(requests):
            break
    assert not engine.has_unfinished
    for number, result in ended.items():
        assert result is None or same_answer(
            model, *requests[places[number]], tokens_of(result), expected[places[number]]
        )
    assert engine.cache.num_used_blocks == 0
    assert engine.offload is not None
    return sum(use.num_hit_tokens for use in engine.offload.uses)


def test_an_engine_without_a_prefix_cache_is_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="enable_prefix_caching is False; tiers need it"):
        engine_on(llama, tmp_path, enable_prefix_caching=False)


def test_a_snapshot_carries_over_what_only_the_pool_held(llama: Any, tmp_path: Path) -> None:
    """With write-back and no eviction, the folder is empty before the snapshot."""
    engine = Engine(llama, num_blocks=60, block_size=4, tiers=[TierUse(FileTier(tmp_path / "tier", 2**30), "back")])
    first = answer(engine)
    assert engine.offload is not None
    assert engine.offload.read().tiers[0].stats.num_stored == 0
    assert engine.offload.snapshot(tmp_path / "warm", PATIENCE_SECONDS).error == ""
    engine.close()
    engine = engine_on(llama, tmp_path / "tier")
    assert engine.offload is not None
    assert engine.offload.restore(tmp_path / "warm", PATIENCE_SECONDS) == 72
    check(engine)
    again = answer(engine)
    assert again.token_ids == first.token_ids
    assert (again.num_cached_tokens, again.num_tier_cached_tokens) == (60, 0)
    engine.close()
