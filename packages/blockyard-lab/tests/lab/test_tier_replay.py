"""The lab predicts what real tiers do: hits of the same requests, token for token and tier by tier."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager
from blockyard_lab.replay.expansion import Expansion
from blockyard_lab.replay.tiers import TierModel, TierReplay
from blockyard_lab.traces.opening import open_trace
from blockyard_testing.patience import wait_until
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiers_offload_world import SmallBlocks
from blockyard_tiers import FileTier, Offload, TierUse

SIZE, BLOCKS = 4, 40
#: Of a real tier. On a busy machine a job may take long, which is no reason to ask for no more.
MORE: dict[str, Any] = {"num_threads": 1, "slow_seconds": 60.0}


class RealTiers:
    """A manager with folders as tiers; it runs one request at a time, each once the tiers are idle."""

    def __init__(
        self, folder: Path, models: list[TierModel], blocks: int = BLOCKS, size: int = SIZE, longest: int = 128
    ) -> None:
        self.cache = KVCacheManager(
            CacheConfig(blocks, block_size=size, max_num_seqs=1, max_model_len=longest, watermark=0.0, hash_seed=0)
        )
        self.blocks = SmallBlocks(blocks, size, 1, 2 * blocks)
        self.uses = [
            TierUse(FileTier(folder / str(place), model.num_bytes, model.policy, **MORE), model.write)
            for place, model in enumerate(models)
        ]
        # The clock stands, so that no answer and no load of a busy machine is late.
        self.offload = Offload(self.cache, self.blocks, self.uses, {"weights": 0}, clock=lambda: 0.0)
        self.offload.note_computed(1, 60.0)

    def quiet(self) -> bool:
        self.offload.poll()
        return all(use.tier.stats().num_waiting == 0 for use in self.uses) and not self.offload.read().used_bytes

    def serve(self, tokens: list[int], output: list[int]) -> list[int]:
        key, cache, before = object(), self.cache, [use.num_hit_tokens for use in self.uses]
        wait_until(lambda: self.offload.poll() or not self.offload.prepare(key, tokens))
        seq = cache.allocate(np.array(tokens, np.int32))
        pooled = int(cache.num_computed_tokens(seq))
        self.offload.fill(key, seq)
        plan = cache.reserve(seq, len(tokens) - int(cache.num_computed_tokens(seq)))
        self.offload.save(key, seq, tokens, len(tokens))
        cache.commit(seq, plan.num_scheduled, np.array(output[:1], np.int32))
        plan = cache.reserve(seq, len(output))
        self.offload.save(key, seq, tokens + output, len(tokens + output))
        cache.commit(seq, plan.num_scheduled, np.array(output[1:], np.int32).reshape(1, -1))
        cache.free(seq)
        self.offload.poll()
        self.offload.forget(key)
        wait_until(self.quiet)
        return [pooled, *(use.num_hit_tokens - old for use, old in zip(self.uses, before, strict=True))]


def requests_of(draw: random.Random, count: int) -> list[list[int]]:
    """Turns of conversations, some of which begin alike."""
    heads = [[draw.randrange(5000) for _ in range(draw.randrange(4, 30))] for _ in range(5)]
    talks = [list(draw.choice(heads)) for _ in range(12)]
    found = []
    for _ in range(count):
        talk = draw.choice(talks)
        if len(talk) > 90:
            del talk[draw.randrange(5, 20) :]
        talk += [draw.randrange(5000) for _ in range(draw.randrange(1, 20))]
        found.append(list(talk))
    return found


@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_each_request_hits_what_real_tiers_bring(tmp_path: Path, write: str) -> None:
    draw = random.Random(run_seed())
    for turn in range(draws(4, 2)):
        size = SmallBlocks(BLOCKS, SIZE, 1, 1).object_bytes
        policies = draw.choices(["lru", "fifo", "s3fifo"], k=2)
        models = [
            TierModel(draw.randrange(20, 60) * size, write, policies[0]),
            TierModel(draw.randrange(60, 300) * size, draw.choice(["through", "selective"]), policies[1]),
        ]
        real = RealTiers(tmp_path / f"{turn}", models)
        lab = TierReplay(
            BLOCKS, models, bytes_per_token=size // SIZE, block_size=SIZE, max_model_len=128, buffer_blocks=2 * BLOCKS
        )
        seen = np.zeros(3, np.int64)
        for number, prompt in enumerate(requests_of(draw, 120)):
            output = [2**30 + number] * draw.randrange(1, 12)
            predicted, _ = lab.serve(np.array(prompt, np.int32), np.array(output, np.int32))
            assert real.serve(prompt, output) == predicted, (number, models)
            seen += predicted
        for use, tier in zip(real.uses, lab.tiers, strict=True):
            there, said = use.tier.stats(), tier.stats()
            assert (there.object_bytes, there.num_evicted) == (said.object_bytes, said.num_evicted)
        assert real.offload.close(10.0)


#: The first one makes traces that tiers bring tokens of; of any other they may bring none.
SEEDS = (1, run_seed() % 2**20)


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_a_held_out_trace_hits_by_tier_as_predicted(tmp_path: Path, kind: str) -> None:
    """With a new seed, the tokens from the pool and from each tier are exactly as predicted."""
    hit = {seed: hits_by_place(tmp_path / str(seed), f"{kind}:requests=15,seed={seed}") for seed in SEEDS}
    assert hit[SEEDS[0]][1:].sum() > 0


def hits_by_place(folder: Path, generator: str) -> npt.NDArray[np.int64]:
    """The tokens that the pool and each of two tiers bring, seen and predicted."""
    trace = open_trace(generator)
    requests = list(trace)
    blocks = 2 + max(request.num_prompt_tokens + request.num_output_tokens for request in requests) // 64
    longest = (blocks - 1) * 64
    size = SmallBlocks(2, 64, 1, 1).object_bytes
    models = [TierModel(blocks * size), TierModel(4 * blocks * size, "selective", "s3fifo")]
    real = RealTiers(folder, models, blocks, 64, longest)
    options = {"bytes_per_token": size // 64, "block_size": 64, "max_model_len": longest, "buffer_blocks": 2 * blocks}
    predicted = TierReplay(blocks, models, **options).run(trace)
    expansion = Expansion(trace)
    seen = np.zeros(3, np.int64)
    for request in requests:
        seen += real.serve(expansion.prompt(request).tolist(), expansion.output(request).tolist())
    assert seen.tolist() == [predicted.num_pool_tokens, *(tier.num_hit_tokens for tier in predicted.tiers)], generator
    assert real.offload.close(10.0)
    return seen


def test_times_and_writes_follow_from_the_tier_model() -> None:
    """Tokens load from a tier that is faster than computing, but not from a slow one; wear counts the trace's time."""
    trace = open_trace("chat:requests=300,seed=1")
    options = {"bytes_per_token": 1000, "seconds_per_token": 1e-4}
    without = TierReplay(2000, [], **options).run(trace)
    fast = TierReplay(2000, [TierModel(2**40, bytes_per_second=1e9)], **options).run(trace)
    slow = TierReplay(2000, [TierModel(2**40, bytes_per_second=1e6)], **options).run(trace)
    assert fast.num_pool_tokens + fast.tiers[0].num_hit_tokens > without.num_pool_tokens
    assert fast.mean_seconds < without.mean_seconds
    assert slow.missed["not_worth"] > 0
    assert fast.missed["not_worth"] == 0
    assert fast.tiers[0].num_evicted == 0
    assert fast.tiers[0].num_bytes == fast.tiers[0].written_bytes
    assert fast.tiers[0].written_bytes_a_day is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"num_bytes": 0}, "num_bytes is 0"), ({"num_bytes": 1, "bytes_per_second": 0.0}, "bytes_per_second is 0.0")],
)
def test_invalid_tier_models_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        TierModel(**fields)  # type: ignore[arg-type]
