"""`python -m benchmarks.fleet_live`: routers beside one another on live replicas of Ray Serve, with a tiny model.

Needs the extra `fleet`; --dynamo names the site-packages of an environment that has ai-dynamo-runtime (`make interop`).
Each run has new replicas with empty caches. Conversations wait for their answers, as loads A and B of the lab.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blockyard.routing import COSTS
from blockyard_engine import GenerationResult, NewToken, SamplingParams
from blockyard_serve.fleet import cluster
from blockyard_serve.fleet.replica import ReplicaPlan
from blockyard_serve.fleet.replica_request import ReplicaRequest
from blockyard_testing.tiny_models import NUM_TOKENS, tiny_folder

AFFINITY = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
MAX_LEN, BLOCK_SIZE, ANSWER, TURNS, THINK = 2048, 16, 24, 6, 0.3
CAPACITY = 256


@dataclass(frozen=True)
class Shape:
    """Conversations under system prompts of 512 tokens, popular by Zipf's law, or in turns where that is 0."""

    num_chats: int
    num_systems: int
    zipf: float
    num_blocks: int


SHAPES = {"A": Shape(32, 7, 1.2, 900), "B": Shape(24, 3, 0.0, 700)}


@dataclass
class Asked:
    """One request that ended."""

    prompt: list[int]
    answer: list[int]
    num_cached: int
    began: float
    first: float


class TextAsk(ReplicaRequest):
    """As Ray's affinity wants it: with a text as prompt. The replica gets the plain one."""

    __slots__ = ()

    @property
    def prompt(self) -> str:  # type: ignore[override]
        return "".join(map(chr, self.token_ids.tolist()))


def arguments_of(num_blocks: int) -> dict[str, Any]:
    """Those of the engines."""
    return {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": 32, "max_num_batched_tokens": 512}


class Dynamo:
    """Dynamo's own SelectionService in this process, fed by the replicas' events; it says where a request goes."""

    def __init__(self, where: str) -> None:
        sys.path.append(where)
        from dynamo._core import SelectionService

        self._service = SelectionService()
        self._names: dict[int, str] = {}
        self._number = 0

    async def follow(self, handle: Any, num_replicas: int) -> None:
        """Have it follow all replicas."""
        told = await handle.broadcast("inspect", []).results_async(timeout_s=60)
        metadata = await handle.broadcast("record_replica_metadata").results_async(timeout_s=60)
        endpoints = {each["pid"]: each["kv"] for each in metadata}
        for number, (name, process, _, _) in enumerate(sorted(told)):
            self._names[number] = name
            endpoint, replay = endpoints[process]
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": "tiny",
                    "endpoint": f"http://127.0.0.1:{9000 + number}",
                    "block_size": BLOCK_SIZE,
                    "max_num_batched_tokens": 512,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: endpoint},
                    "replay_endpoint": replay,
                }
            )
        assert len(self._names) == num_replicas, self._names

    async def choose(self, ask: ReplicaRequest) -> str:
        """Keep a request from all replicas but one; returns the number of the reservation."""
        self._number += 1
        number = f"selection-{self._number}"
        chosen = await self._service.select_and_reserve(
            {
                "model_name": "tiny",
                "selection_id": number,
                "token_ids": ask.token_ids.tolist(),
                "expected_output_tokens": ANSWER,
            }
        )
        ask.avoid = [name for worker, name in self._names.items() if worker != chosen["worker_id"]]
        return number

    async def first_token(self, number: str) -> None:
        """Its prompt is computed."""
        await self._service.prefill_complete(number)

    async def done(self, number: str) -> None:
        """It has ended."""
        await self._service.free_reservation(number)

    def close(self) -> None:
        """End it."""
        self._service.shutdown()


@dataclass
class Run:
    """Conversations over one fleet."""

    handle: Any
    first_token: Callable[[str], None]
    dynamo: Dynamo | None
    ask_type: type[ReplicaRequest]
    ended: list[Asked] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)

    async def chat(self, system: list[int], seed: int) -> None:
        """Say one turn after another."""
        draw = random.Random(seed)
        await asyncio.sleep(2 * draw.random())
        text = list(system)
        for _ in range(TURNS):
            await asyncio.sleep(THINK * draw.random())
            text += [draw.randrange(256) for _ in range(draw.randint(100, 200))]
            text += await self.answer(list(text))

    async def answer(self, prompt: list[int]) -> list[int]:
        """Ask once."""
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        told: dict[str, str] = {}

        def chosen(number: str, choice: Any) -> None:
            told["number"], told["replica"] = number, choice.replica or ""

        ask = self.ask_type(np.array(prompt, np.int32), len(prompt), ANSWER, sampling, on_choice=chosen)
        began, first = time.perf_counter(), 0.0
        reservation = "" if self.dynamo is None else await self.dynamo.choose(ask)
        tokens: list[int] = []
        async for events in self.handle.remote(ask):
            for event in events:
                if isinstance(event, NewToken):
                    tokens.append(event.token_id)
                elif isinstance(event, GenerationResult):
                    self.ended.append(Asked(prompt, tokens, event.num_cached_tokens, began, first - began))
                else:
                    raise RuntimeError(event)
            if tokens and not first:
                first = time.perf_counter()
                if "number" in told:
                    self.first_token(told["number"])
                if self.dynamo is not None:
                    await self.dynamo.first_token(reservation)
        if self.dynamo is not None:
            await self.dynamo.done(reservation)
        return tokens


def bound(ended: list[Asked]) -> int:
    """Tokens that one endless cache would compute, if it saw the requests in the order of their starts."""
    seen: set[int] = set()
    computed = 0
    for each in sorted(ended, key=lambda one: one.began):
        full, key, hit = each.prompt + each.answer[:-1], 0, 0
        is_hit = True
        for start in range(0, len(full) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            key = hash((key, tuple(full[start : start + BLOCK_SIZE])))
            is_hit = is_hit and key in seen and start + BLOCK_SIZE < len(each.prompt)
            hit = start + BLOCK_SIZE if is_hit else hit
            seen.add(key)
        computed += len(each.prompt) - hit
    return computed


def cost_of(router: str) -> str:
    """Which of our costs a router is; where another one chooses, it has no say."""
    return router if router in COSTS else "robust"


def router_options(router: str) -> dict[str, Any]:
    """What Ray Serve is told of a router."""
    from ray.serve.config import RequestRouterConfig

    if router == "power of two":
        return {"request_router_config": RequestRouterConfig()}
    if router == "affinity":
        return {"request_router_config": RequestRouterConfig(request_router_class=AFFINITY)}
    config = RequestRouterConfig(
        request_router_class="blockyard_serve.fleet.ray_serve.ExactRouter",
        request_router_kwargs={"cost": cost_of(router)},
    )
    return {"request_router_config": config}


async def play(handle: Any, router: str, shape: Shape, seed: int, num_replicas: int, dynamo: str | None) -> Run:
    """Run the conversations of a seed."""
    from blockyard_serve.fleet.shared import shared_fleet

    draw = random.Random(seed)
    systems = [[draw.randrange(256) for _ in range(512)] for _ in range(shape.num_systems)]
    weights = [1 / (place + 1) ** shape.zipf for place in range(shape.num_systems)]
    drawn = draw.choices(range(shape.num_systems), weights, k=shape.num_chats)
    picked = drawn if shape.zipf else [chat % shape.num_systems for chat in range(shape.num_chats)]
    service = Dynamo(dynamo) if router == "Dynamo" and dynamo else None
    run = Run(
        handle.options(stream=True, method_name="generate"),
        shared_fleet(str(handle.deployment_id), cost_of(router)).record_first_token,
        None,
        TextAsk if router == "affinity" else ReplicaRequest,
    )
    await run.answer([1] * 40)  # the handle's router is made at the first call
    if service is not None:
        await service.follow(handle, num_replicas)
        run.dynamo = service
    await asyncio.sleep(2)  # all are believed
    run.ended.clear()
    chats: list[Awaitable[None]] = [run.chat(systems[which], 1000 * seed + chat) for chat, which in enumerate(picked)]
    await asyncio.gather(*chats)
    if service is not None:
        service.close()
    return run


def measure(router: str, load: str, seed: int, num_replicas: int, dynamo: str | None, folder: Path) -> None:
    """Start replicas, run a load, print a line."""
    from ray import serve

    shape = SHAPES[load]
    plan = ReplicaPlan(
        str(folder), "tiny", "float32", "cpu", 1, CAPACITY, True, partial(arguments_of, shape.num_blocks)
    )
    size = cluster.FleetSize(num_replicas, num_replicas)
    application = cluster.engines(plan, size, "robust", 3.0, 60.0, 0, **router_options(router))
    name = f"{router}-{load}-{seed}".replace(" ", "-")
    handle = serve.run(application, name=name, route_prefix=None)
    run = asyncio.run(play(handle, router, shape, seed, num_replicas, dynamo))
    serve.delete(name)
    prompts = sum(len(each.prompt) for each in run.ended)
    computed = prompts - sum(each.num_cached for each in run.ended)
    firsts = [1000 * each.first for each in run.ended]
    print(
        f"{load} seed {seed} {router:14} {len(run.ended)} requests, computed {computed:,} of {prompts:,}, "
        f"{computed / bound(run.ended):.2f} of the bound, hits {1 - computed / prompts:.1%}, first token p50 "
        f"{statistics.median(firsts):.0f} ms, p99 {np.percentile(firsts, 99):.0f} ms",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet_live", description=__doc__)
    parser.add_argument("--routers", default="robust,power of two,affinity,Dynamo,round-robin", metavar="LIST")
    parser.add_argument("--loads", default="A,B", metavar="LIST")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--dynamo", metavar="DIR", help="site-packages with ai-dynamo-runtime; without, it is left out")
    options = parser.parse_args()
    routers = [name for name in options.routers.split(",") if name != "Dynamo" or options.dynamo]
    assert NUM_TOKENS >= 256
    with tempfile.TemporaryDirectory() as work, cluster.local_ray(0) as is_ready:
        from ray import serve

        folder = tiny_folder(Path(work), MAX_LEN)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        is_ready()
        for load in options.loads.split(","):
            for seed in range(options.runs):
                for router in routers:
                    measure(router, load, seed, options.replicas, options.dynamo, folder)


if __name__ == "__main__":
    main()
