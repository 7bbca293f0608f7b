"""One of three engines computes prompts for the other two, which get them by a tier; each token comes once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")
pytest.importorskip("xxhash")

from blockyard_engine import GenerationResult, SamplingParams
from blockyard_serve.fleet.replica import Replica
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.servers import tiny_engine
from blockyard_testing.tiny_models import mixed_prompts
from blockyard_tiers import FileTier

from .test_dispatcher import KINDS, PROMPT, World, job_of, left_idle, require_equal, run

#: Tokens from which a prompt is long.
LONG = 32


class HandingWorld(World):
    """Three replicas over one folder, of which "p" computes prompts for the others."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__()
        for replica in self.replicas.values():
            assert replica.thread.stop(PATIENCE_SECONDS)
        self.replicas = {
            name: Replica(tiny_engine(tiers=[FileTier(folder, 2**30)], **options), 64, "tiny")
            for name in ("p", "a", "b")
        }
        self.fleet.sync(dict.fromkeys(self.replicas), ["p"])
        self.link.replicas = self.replicas

    def require_idle(self) -> None:
        super().require_idle()
        for replica in self.replicas.values():
            replica.thread.call(lambda engine: engine.offload.check()).result(PATIENCE_SECONDS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HandingWorld]:
    made = HandingWorld(tmp_path / "kept")
    yield made
    made.close()


def answer(world: HandingWorld, sampling: SamplingParams, prompt: list[int] = PROMPT, **more: Any) -> GenerationResult:
    """Run one request, compare it with the undisturbed engine's, and return its end."""

    async def play() -> GenerationResult:
        job = job_of(sampling, prompt, **more)
        tokens, end = await run(world.dispatcher(prefill_tokens=LONG, progress_timeout=2.0), job)
        require_equal(world, job, tokens, end)
        assert isinstance(end, GenerationResult)
        return end

    with left_idle(world):
        return asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompt_is_prefilled_and_handed_over(world: HandingWorld, kind: str) -> None:
    end = answer(world, KINDS[kind])
    if kind in ("greedy", "sampled"):
        first, second = world.link.chosen
        assert (first, world.figures.num_handed_over) == ("p", 1)
        assert second in ("a", "b")
        # More where "p" has gone on for some tokens before it was told to end.
        assert end.num_tier_cached_tokens >= len(PROMPT) // 16 * 16
        assert 1 <= len(world.link.asks[1].answer_prefix) < KINDS[kind].max_tokens
    else:  # several completions and logprobs cannot go on elsewhere
        assert world.link.chosen in (["a"], ["b"])
    assert world.figures.num_resumed == 0
    assert world.figures.num_lost.total() == 0


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, ignore_eos=True)])
def test_short_answers_are_complete(world: HandingWorld, sampling: SamplingParams) -> None:
    answer(world, sampling)
    assert (world.link.chosen[0] == "p") == (sampling.max_tokens > 1)


def test_an_answer_that_ends_with_its_first_token_is_whole(world: HandingWorld) -> None:
    (whole,) = world.reference.generate([PROMPT], KINDS["greedy"])
    answer(world, SamplingParams(max_tokens=9, stop_token_ids=[whole.token_ids[0]]))
    assert world.link.chosen == ["p"]


def test_a_short_prompt_is_not_handed_over(world: HandingWorld) -> None:
    answer(world, KINDS["greedy"], PROMPT[: LONG - 1])
    assert world.link.chosen in (["a"], ["b"])


@pytest.mark.parametrize("fault", ["cut", "stall", "end", "refuse"])
@pytest.mark.parametrize("messages", [0, 1])
def test_loss_of_the_prefilling_replica_counts_as_one(world: HandingWorld, fault: str, messages: int) -> None:
    world.link.faults = {0: (messages, fault)}
    answer(world, KINDS["sampled"])
    assert world.link.chosen[0] == "p"
    assert world.link.chosen[1] in ("a", "b")
    assert len(world.link.chosen) == 2


def test_prefilling_replica_answers_if_it_is_the_only_one(world: HandingWorld) -> None:
    world.link.faults = {1: (1, "cut"), 2: (1, "cut")}
    answer(world, KINDS["greedy"])
    assert world.link.chosen[0] == "p"
    assert sorted(world.link.chosen[1:3]) == ["a", "b"]


def test_without_a_prefilling_replica_others_compute(world: HandingWorld) -> None:
    world.fleet.sync(dict.fromkeys(("a", "b")))
    del world.replicas["p"]
    answer(world, KINDS["greedy"])
    assert world.figures.num_handed_over == 0


@pytest.mark.parametrize("seed", range(draws(4, 1)))
def test_random_faults_between_replicas_lose_no_token(world: HandingWorld, seed: int) -> None:
    rng = random.Random(run_seed() + seed)
    prompts = mixed_prompts((20, 50, 90, 130), shared=16, seed=seed)

    async def play() -> None:
        dispatcher = world.dispatcher(24, prefill_tokens=LONG, progress_timeout=0.5, resumes=20)
        world.link.faults = {
            number: (rng.randrange(3), rng.choice(["cut", "stall", "end", "refuse"]))
            for number in range(14)
            if rng.random() < 0.5
        }
        jobs = [job_of(KINDS[rng.choice(list(KINDS))], rng.choice(prompts)) for _ in range(8)]
        ends = await asyncio.gather(*[run(dispatcher, job) for job in jobs])
        for job, (tokens, end) in zip(jobs, ends, strict=True):
            require_equal(world, job, tokens, end)

    with left_idle(world):
        asyncio.run(play())
