"""Requests over two real engines in this process; links break during answers, and each token arrives once."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")

from blockyard_engine import Engine, GenerationResult, NewToken, SamplingParams
from blockyard_engine.prompt_encoding import EncodedPrompt
from blockyard_serve import ApiError
from blockyard_serve.errors import unavailable
from blockyard_serve.fleet.dispatcher import Dispatcher, RoutingPolicy
from blockyard_serve.fleet.fleet_metrics import FleetMetrics
from blockyard_serve.fleet.replica import Replica
from blockyard_serve.fleet.replica_request import ReplicaRequest
from blockyard_serve.fleet.shared import SharedFleet
from blockyard_serve.jobs.job import Event, Job, Mailbox
from blockyard_serve.jobs.request_metrics import RequestMetrics
from blockyard_testing.exact_draws import exact, same_tokens
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.servers import tiny_engine
from blockyard_testing.tiny_models import NUM_TOKENS, mixed_prompts, tiny_model

PROMPT = mixed_prompts((60,))[0]
KINDS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=5, frequency_penalty=0.4),
    "three of them": SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=6, n=3),
    "with logprobs": SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=7, logprobs=2),
}


class Cut(Exception):
    """Stands for the error that Ray raises when an actor dies."""


class Link:
    """Asks the replicas of a fleet in this process, as Ray's handle would, with faults on the way.

    faults: by the number of the attempt, after how many messages it breaks, and how: "cut", "stall", "end" or "refuse".
    """

    def __init__(self, replicas: dict[str, Replica], fleet: SharedFleet) -> None:
        self.replicas = replicas
        self.fleet = fleet
        self.faults: dict[int, tuple[int, str]] = {}
        self.asks: list[ReplicaRequest] = []
        self.chosen: list[str] = []
        self._numbers = count()

    def __call__(self, ask: ReplicaRequest) -> Stream:
        number = next(self._numbers)
        self.asks.append(ask)
        names = [name for name in self.replicas if name not in ask.avoid] or list(self.replicas)
        choice = self.fleet.choose(str(number), ask.token_ids, names, max_tokens=ask.max_tokens)
        assert ask.on_choice is not None
        assert choice.replica is not None
        ask.on_choice(str(number), choice)
        self.chosen.append(choice.replica)
        fault = self.faults.pop(0, None)
        self.faults = {attempt - 1: what for attempt, what in self.faults.items()}
        there = pickle.loads(pickle.dumps(ask))
        return Stream(self.replicas[choice.replica].generate(there), fault, lambda: self.fleet.finish(str(number)))


class Stream:
    """A stream of messages that breaks at a given place."""

    def __init__(
        self, messages: AsyncIterator[list[Event]], fault: tuple[int, str] | None, done: Callable[[], None]
    ) -> None:
        self._messages = self._broken(messages, fault, done)

    async def _broken(
        self, messages: AsyncIterator[list[Event]], fault: tuple[int, str] | None, done: Callable[[], None]
    ) -> AsyncIterator[list[Event]]:
        number = 0
        try:
            async for made in messages:
                events = pickle.loads(pickle.dumps(made))  # they come from another process
                if fault is not None and number >= fault[0] and events:
                    if fault[1] == "cut":
                        raise Cut("the actor died")
                    if fault[1] == "end":
                        return
                    if fault[1] == "refuse":
                        yield [unavailable("the engine has failed", 1)]
                        return
                    await asyncio.sleep(3600)
                number += bool(events)
                yield events
        finally:
            done()
            await messages.aclose()  # type: ignore[attr-defined]

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Event]:
        return await anext(self._messages)

    def cancel(self) -> None:
        """As Ray's: the generator ends at its next step."""
        closing = asyncio.ensure_future(self._messages.aclose())  # type: ignore[attr-defined]
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())


class World:
    """Two replicas behind a dispatcher, and the answers of an undisturbed engine."""

    def __init__(self) -> None:
        self.replicas = {name: Replica(tiny_engine(), 64, "tiny") for name in ("a", "b")}
        self.reference: Engine = tiny_engine()
        self.fleet = SharedFleet("robust", 3.0)
        self.fleet.sync(dict.fromkeys(self.replicas))
        self.link = Link(self.replicas, self.fleet)
        self.figures = FleetMetrics()

    def dispatcher(self, capacity: int = 16, **policy: Any) -> Dispatcher:
        requests = RequestMetrics({"engine": "fleet", "model_name": "tiny"}, 512)
        return Dispatcher(self.link, self.fleet, self.figures, requests, capacity, RoutingPolicy(**policy))

    def close(self) -> None:
        for replica in self.replicas.values():
            assert replica.thread.stop(PATIENCE_SECONDS)

    def require_idle(self) -> None:
        """Check that no request is booked, and that both caches are intact and hold nothing."""
        self.fleet.check()
        assert not any(each.requests for each in self.fleet.status())
        deadline = time.monotonic() + PATIENCE_SECONDS
        for replica in self.replicas.values():
            while replica.thread.call(lambda engine: engine.has_unfinished).result(PATIENCE_SECONDS):
                assert time.monotonic() < deadline
            assert replica.thread.call(lambda engine: engine.cache.num_used_blocks).result(PATIENCE_SECONDS) == 0
            replica.thread.call(lambda engine: engine.cache.check()).result(PATIENCE_SECONDS)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def job_of(sampling: SamplingParams, prompt: list[int] = PROMPT, **more: Any) -> Job:
    encoded = EncodedPrompt(prompt, NUM_TOKENS)
    return Job(encoded, sampling, 0, 0, Mailbox(), time.perf_counter(), **more)


async def run(dispatcher: Dispatcher, job: Job) -> tuple[list[NewToken], GenerationResult | ApiError]:
    """Return the tokens in order of arrival, and the job's end."""
    dispatcher.submit([job])
    tokens: list[NewToken] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for _, event in await job.mailbox.take():
                if not isinstance(event, NewToken):
                    return tokens, event
                tokens.append(event)


def require_equal(world: World, job: Job, tokens: list[NewToken], end: GenerationResult | ApiError) -> None:
    """Check that the answer is the undisturbed engine's, except for ties by rounding, and was streamed completely."""
    expected = world.reference.generate([job.prompt.token_ids], job.sampling)[0]
    assert isinstance(end, GenerationResult), end
    assert len(end.completions) == len(expected.completions)
    for completion, whole in zip(expected.completions, end.completions, strict=True):
        own = [token for token in tokens if token.index == completion.index]
        assert [token.token_id for token in own] == whole.token_ids
        assert "".join(token.text for token in own) == whole.text
        assert own[-1].finish_reason == whole.finish_reason
        if whole.token_ids != completion.token_ids:
            require_tie(job, completion.index, whole.token_ids, completion.token_ids)
            continue
        assert (whole.text, whole.finish_reason) == (completion.text, completion.finish_reason)
        if completion.logprobs is not None:
            told = [token.logprob.logprob for token in own if token.logprob is not None]
            assert told == pytest.approx([each.logprob for each in completion.logprobs], abs=1e-3)


def require_tie(job: Job, index: int, left: list[int], right: list[int]) -> None:
    """Check that each token of both answers is the choice from exact logits, up to rounding."""
    model = exact(tiny_model("llama-gqa", vocab_size=NUM_TOKENS))
    assert same_tokens(model, job.prompt.token_ids, job.sampling, index, left, right), (left, right)


@contextmanager
def left_idle(world: World) -> Iterator[None]:
    yield
    world.require_idle()


@pytest.mark.parametrize("fault", ["cut", "stall", "end", "refuse"])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_continues_after_the_clients_tokens(world: World, kind: str, fault: str) -> None:
    async def play() -> None:
        progress_timeout = 2.0 if fault == "stall" else PATIENCE_SECONDS  # a slow machine is no fault
        dispatcher, job = world.dispatcher(progress_timeout=progress_timeout), job_of(KINDS[kind])
        world.link.faults = {0: (2, fault), 1: (1, "cut")}
        require_equal(world, job, *await run(dispatcher, job))
        await asyncio.sleep(0)

    with left_idle(world):
        asyncio.run(play())
    assert len(world.link.asks) == 3
    assert world.link.chosen[0] != world.link.chosen[1]  # the lost one is avoided
    assert world.figures.num_resumed == 2
    goes_on = kind in ("greedy", "sampled")
    assert (len(world.link.asks[1].answer_prefix) > 0) == goes_on


def test_request_without_tokens_starts_again(world: World) -> None:
    async def play() -> None:
        dispatcher, job = world.dispatcher(), job_of(KINDS["sampled"])
        world.link.faults = {0: (0, "cut")}
        require_equal(world, job, *await run(dispatcher, job))

    with left_idle(world):
        asyncio.run(play())
    assert world.figures.num_tokens_resumed == 0


def test_retries_are_bounded(world: World) -> None:
    async def play() -> GenerationResult | ApiError:
        world.link.faults = dict.fromkeys(range(9), (1, "cut"))
        return (await run(world.dispatcher(resumes=2), job_of(KINDS["greedy"])))[1]

    with left_idle(world):
        end = asyncio.run(play())
    assert isinstance(end, ApiError)
    assert end.status == 503
    assert "3 times" in end.message
    assert len(world.link.asks) == 3


@pytest.mark.parametrize("off", [{"resumes": False}, {}])
def test_request_that_may_not_resume_ends_with_an_error(world: World, off: dict[str, bool]) -> None:
    async def play() -> GenerationResult | ApiError:
        world.link.faults = {0: (1, "cut")}
        dispatcher = world.dispatcher(resumes=3 if off else 0)
        return (await run(dispatcher, job_of(KINDS["greedy"], **off)))[1]

    with left_idle(world):
        end = asyncio.run(play())
    assert isinstance(end, ApiError)
    assert "resuming is off" in end.message
    assert len(world.link.asks) == 1


def test_client_that_leaves_frees_blocks_and_slot(world: World) -> None:
    async def play() -> None:
        dispatcher = world.dispatcher()
        jobs = [job_of(SamplingParams(max_tokens=400, ignore_eos=True), PROMPT[:20]) for _ in range(16)]
        for job in jobs:
            dispatcher.submit([job])
        with pytest.raises(ApiError, match="the queue is full"):
            dispatcher.submit([job_of(KINDS["greedy"])])
        await jobs[0].mailbox.take()
        dispatcher.cancel(jobs)
        await asyncio.sleep(0.1)
        dispatcher.require_capacity(16)

    with left_idle(world):
        asyncio.run(play())


def test_refusal_of_the_engine_reaches_the_client(world: World) -> None:
    """The engine's refusal is not a lost replica: another one would refuse it too."""

    async def play() -> GenerationResult | ApiError:
        return (await run(world.dispatcher(), job_of(SamplingParams(max_tokens=10_000))))[1]

    end = asyncio.run(play())
    assert isinstance(end, ApiError)
    assert end.status == 400
    assert len(world.link.asks) == 1


def test_claims_are_compared_with_true_hits(world: World) -> None:
    """These replicas send no events, so nothing is claimed of them; the second request hits all the same."""

    async def play() -> None:
        dispatcher = world.dispatcher()
        for _ in range(4):
            await run(dispatcher, job_of(KINDS["greedy"]))

    asyncio.run(play())
    claims = list(world.figures.claims.values())
    assert sum(each.requests for each in claims) == 4
    assert sum(each.claimed for each in claims) == sum(each.over for each in claims) == 0
    assert sum(each.under for each in claims) == sum(each.true for each in claims) > 0


def test_choices_are_shown_with_their_reasons(world: World) -> None:
    async def play() -> None:
        await run(world.dispatcher(), job_of(KINDS["greedy"], name="mine"))

    asyncio.run(play())
    (_, choice), *rest = world.figures.choices
    assert rest == []
    assert choice.costs is not None
    choice.costs[0] = float("inf")
    (shown,) = world.figures.shown_choices()
    assert shown["request"] == "mine"
    assert [each["cost"] is None for each in shown["why"]] == [True, False]
    json.dumps(shown, allow_nan=False)


@pytest.mark.parametrize("seed", range(draws(6, 1)))
def test_random_faults_lose_and_repeat_no_token(world: World, seed: int) -> None:
    """Many requests at once over links that break at random; each answer is the undisturbed engine's."""
    rng = random.Random(run_seed() + seed)
    prompts = mixed_prompts((20, 50, 90, 130), shared=16, seed=seed)

    async def one(dispatcher: Dispatcher, kind: str, prompt: list[int]) -> None:
        job = job_of(KINDS[kind], prompt)
        require_equal(world, job, *await run(dispatcher, job))

    async def play() -> None:
        dispatcher = world.dispatcher(24, progress_timeout=0.5, resumes=20)
        world.link.faults = {
            number: (rng.randrange(4), rng.choice(["cut", "cut", "stall", "end", "refuse"]))
            for number in range(12)
            if rng.random() < 0.7
        }
        await asyncio.gather(*[one(dispatcher, rng.choice(list(KINDS)), rng.choice(prompts)) for _ in range(8)])

    with left_idle(world):
        asyncio.run(play())
