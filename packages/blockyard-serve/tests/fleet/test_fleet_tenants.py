"""Tenants of a fleet: routing of requests, a guarantee during a flood, hand-overs, and answers to clients."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")

from blockyard import CacheConfig, CacheSalt, InvalidArgument
from blockyard.routing import Router, Shares, make_cost
from blockyard.routing.costs import COSTS
from blockyard.routing.load import ALL
from blockyard.tenants import Tenant, TenantGroup
from blockyard_engine import GenerationResult, SamplingParams
from blockyard_engine.scheduling.limits import CacheLimits
from blockyard_serve import ApiError, ServerOptions
from blockyard_serve.fleet.app import FleetBackend, IngressApp
from blockyard_serve.fleet.dispatcher import Dispatcher, RoutingPolicy
from blockyard_serve.fleet.replica import Replica
from blockyard_serve.fleet.shared import shared_fleet
from blockyard_serve.http.server import AppServer
from blockyard_serve.jobs.job import Job
from blockyard_serve.jobs.request_metrics import RequestMetrics
from blockyard_testing.fleet_asks import ask, choose
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.servers import MODEL, Running, tiny_engine
from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer

from .test_dispatcher import KINDS, PROMPT, Link, World, job_of, left_idle, require_equal, run
from .test_handing_over import HandingWorld

TENANTS = (Tenant("acme", min_blocks=40), Tenant("small", max_held=12), TenantGroup("both", (Tenant("x"), Tenant("y"))))
ACME = (CacheSalt("acme"),)


def limits_of(num_blocks: int, tenants: tuple[Tenant | TenantGroup, ...]) -> CacheLimits:
    return CacheLimits(CacheConfig(num_blocks, max_model_len=10_000, watermark=0.0, tenants=tenants), 64)


def test_request_waits_for_guarantee_quota_and_limit() -> None:
    shares = Shares(limits_of(101, TENANTS), 100)
    acme, small = (shares.tenant_of((CacheSalt(name),)) for name in ("acme", "small"))
    assert [shares.roster.names[number] for number in (acme, small)] == ["acme", "small"]
    assert shares.tenant_of((CacheSalt("acme\x1fa client's"),)) == acme
    assert shares.tenant_of(()) == shares.tenant_of((CacheSalt("nobody's"),)) == 0
    for needed, own, held, expected in [
        (5, 0, 95, 0),  # there is room
        (5, 35, 100, 0),  # within the floor, however full it is
        (6, 35, 100, 1),  # 55 are its share
        (20, 35, 80, 0),
        (21, 35, 80, 2),
        (100, 1, 0, 2),
    ]:
        assert shares.wait(acme, needed, own, held) == expected
    assert [shares.wait(small, needed, 8, 8) for needed in (4, 5)] == [0, 2]
    assert (shares.num_blocks(0), shares.num_blocks(1), shares.num_blocks(17)) == (0, 1, 2)


@pytest.mark.parametrize("name", COSTS)
def test_a_request_goes_where_its_tenant_waits_least(name: str) -> None:
    """Compared with a plain count of booked requests in random worlds, at each step."""
    draw = random.Random(f"{run_seed()} {name}")
    shares = Shares(limits_of(101, TENANTS), 100)
    made, running = Router(make_cost(name, 1), shares), dict[str, tuple[int, str, int]]()
    replicas = ["a", "b", "c"]
    for replica in replicas:
        made.add(replica)
    number = num_moved = 0
    while number < draws(200, 80) or num_moved == 0:
        number += 1
        while running and draw.random() < 0.4:
            key = draw.choice(list(running))
            if draw.random() < 0.3:
                made.reassign(key, draw.choice(replicas))
                tenant, _, blocks = running[key]
                running[key] = tenant, made.load.assignments[key].replica, blocks
            else:
                made.finish(key)
                del running[key]
        tenant, tokens = draw.randrange(len(shares.roster.names)), draw.randrange(1, 600)
        needed = shares.num_blocks(tokens)
        waits = {
            replica: shares.wait(
                tenant,
                needed,
                sum(blocks for whose, where, blocks in running.values() if (whose, where) == (tenant, replica)),
                sum(blocks for _, where, blocks in running.values() if where == replica),
            )
            for replica in replicas
        }
        among = draw.sample(replicas, draw.randint(1, 3))
        asked = ask(f"r{number}", tokens, links=[], tenant=tenant)
        choice = choose(made, asked, allowed=among)
        assert choice.replica is not None
        assert waits[choice.replica] == min(waits[each] for each in among)
        num_moved += waits[choice.replica] < max(waits[each] for each in among)
        running[asked.name] = tenant, choice.replica, needed
        made.check()
        assert made.load.blocks[choice.replica, ALL] == sum(
            blocks for _, where, blocks in running.values() if where == choice.replica
        )
    for replica in replicas:
        made.drop(replica)
    assert not made.load.blocks


class TenantWorld(World):
    """Two replicas whose pools tenants share, before them a dispatcher that knows it, and how many steps answers took.

    steps: of a request by name, from when it was sent to its end, each a step of its replica's engine.
    """

    def __init__(self, num_blocks: int = 100, capacity: int = 64, tenants: Any = TENANTS) -> None:
        super().__init__()
        for replica in self.replicas.values():
            assert replica.thread.stop(PATIENCE_SECONDS)
        options: dict[str, Any] = {"cache_options": {"tenants": tenants, "watermark": 0.0}}
        self.replicas = {name: Replica(tiny_engine(num_blocks, **options), capacity, "tiny") for name in ("a", "b")}
        self.link = StepLink(self.replicas, self.fleet)
        self.model = asyncio.run(self.replicas["a"].model())
        self.fleet.share(Shares(self.model.limits, num_blocks - 1))
        self.steps: dict[str, int] = {}
        for replica in self.replicas.values():
            replica.thread.on_result = self._note

    def _note(self, job: Job, result: GenerationResult) -> None:
        (replica,) = (each for each in self.replicas.values() if each.thread._thread is threading.current_thread())
        self.steps[job.name] = replica.thread.num_steps - self.link.sent_at[job.name]

    def dispatcher(self, capacity: int = 200, **policy: Any) -> Dispatcher:
        requests, roster = RequestMetrics({"engine": "fleet", "model_name": "tiny"}, 512), self.model.limits.roster
        return Dispatcher(self.link, self.fleet, self.figures, requests, capacity, RoutingPolicy(**policy), 7, roster)

    def tenant(self, name: str) -> int:
        return self.model.limits.roster.names.index(name)


class StepLink(Link):
    """Notes the steps of the replica's engine when a request goes there."""

    sent_at: dict[str, int]

    def __call__(self, ask: Any) -> Any:
        stream = super().__call__(ask)
        self.sent_at = {**getattr(self, "sent_at", {}), ask.name: self.replicas[self.chosen[-1]].thread.num_steps}
        return stream


def test_guarantee_holds_during_a_flood() -> None:
    """The flood fills both queues and never ends; each answer within the guarantee takes one step per token."""
    world = TenantWorld()
    draw = random.Random(run_seed())

    async def flood(dispatcher: Dispatcher, number: int) -> None:
        while True:
            prompt = [draw.randrange(NUM_TOKENS) for _ in range(draw.randint(1, 200))]
            keys = draw.choice([(), (CacheSalt("x"),), (CacheSalt(f"made up {draw.random()}"),)])
            tenant = world.tenant("x") if keys == (CacheSalt("x"),) else 0
            wanted = SamplingParams(max_tokens=300, ignore_eos=True)
            await run(dispatcher, job_of(wanted, prompt, extra_keys=keys, tenant=tenant, name=f"flood {number}"))

    async def play() -> None:
        dispatcher = world.dispatcher(progress_timeout=PATIENCE_SECONDS)
        floods = [asyncio.ensure_future(flood(dispatcher, number)) for number in range(40)]
        await asyncio.sleep(0.5)
        wanted = SamplingParams(max_tokens=20, ignore_eos=True)
        for turn in range(draws(6, 3)):
            # Of 5 blocks each: 8 fill one floor, 16 both.
            prompts = [[draw.randrange(NUM_TOKENS) for _ in range(60)] for _ in range(14)]
            jobs = [
                job_of(wanted, prompt, extra_keys=ACME, tenant=world.tenant("acme"), name=f"{turn} {number}")
                for number, prompt in enumerate(prompts)
            ]
            for job, (tokens, end) in zip(
                jobs, await asyncio.gather(*(run(dispatcher, job) for job in jobs)), strict=True
            ):
                require_equal(world, job, tokens, end)
                assert isinstance(end, GenerationResult)
                assert end.num_preemptions == 0
        assert not any(each.done() for each in floods)
        for each in floods:
            each.cancel()
        dispatcher.end_all(ApiError(503, "over"))

    asyncio.run(play())
    own = {name: steps for name, steps in world.steps.items() if not name.startswith("flood")}
    assert max(own.values()) <= 40, own
    world.close()


def test_full_replica_is_skipped() -> None:
    """A replica whose places for the tenant are taken is skipped; if all are, the client gets 429."""
    world = TenantWorld(300, capacity=6, tenants=(Tenant("x", 3), Tenant("y")))

    async def play() -> None:
        dispatcher, wanted = world.dispatcher(), SamplingParams(max_tokens=300, ignore_eos=True)
        told = {"extra_keys": (CacheSalt("x"),), "tenant": world.tenant("x")}
        # 3 of 6 places are kept, one for each: "x" may have 4 at each replica.
        jobs = [job_of(wanted, [number] * 40, **told, name=f"{number}") for number in range(8)]
        runs = [asyncio.ensure_future(run(dispatcher, job)) for job in jobs]
        await asyncio.sleep(0.2)
        before, (_, end) = len(world.link.asks), await run(dispatcher, job_of(wanted, [9] * 40, **told, name="late"))
        assert isinstance(end, ApiError)
        assert (end.status, end.retry_after) == (429, 1)
        assert "tenant 'x' has 4 of 6 queue slots and needs 1 more; 2 are reserved" in end.message
        assert sorted(world.link.chosen[before:]) == ["a", "b"]
        other = await run(dispatcher, job_of(KINDS["greedy"], extra_keys=(CacheSalt("y"),), tenant=2, name="y"))
        assert isinstance(other[1], GenerationResult)
        for job, each in zip(jobs, runs, strict=True):
            require_equal(world, job, *await each)

    with left_idle(world):
        asyncio.run(play())
    assert world.figures.num_lost.total() == 0
    world.close()


def test_ingress_reserves_queue_slots_by_tenant() -> None:
    world = TenantWorld()

    async def play() -> None:
        dispatcher, told = world.dispatcher(capacity=20), {"tenant": world.tenant("x"), "extra_keys": (CacheSalt("x"),)}
        wanted = SamplingParams(max_tokens=300, ignore_eos=True)
        taken = [job_of(wanted, [number] * 9, **told, name=f"{number}") for number in range(13)]
        dispatcher.submit(taken)
        with pytest.raises(ApiError, match="tenant 'x' has 13 of 20 queue slots") as refused:
            dispatcher.submit([job_of(wanted, [99] * 9, **told, name="late")])
        assert (refused.value.status, refused.value.retry_after) == (429, 7)
        own = {"tenant": world.tenant("acme"), "extra_keys": ACME}
        assert isinstance((await run(dispatcher, job_of(KINDS["greedy"], **own, name="own")))[1], GenerationResult)
        dispatcher.cancel(taken)
        await asyncio.sleep(0.1)
        dispatcher.require_capacity(len(taken), world.tenant("x"))

    with left_idle(world):
        asyncio.run(play())
    world.close()


def test_handed_over_prompt_belongs_to_its_tenant_on_both_replicas(tmp_path: Path) -> None:
    world = HandingWorld(tmp_path / "kept", cache_options={"tenants": TENANTS})

    def held(replica: str) -> dict[str, tuple[int, int]]:
        uses = world.replicas[replica].thread.call(lambda engine: engine.cache.stats().tenants).result(PATIENCE_SECONDS)
        return {use.name: (use.num_held, use.num_idle) for use in uses if use.num_held or use.num_idle}

    async def play() -> dict[str, tuple[int, int]]:
        dispatcher = world.dispatcher(prefill_tokens=32, progress_timeout=PATIENCE_SECONDS)
        job = job_of(SamplingParams(max_tokens=400, ignore_eos=True), extra_keys=ACME, name="mine")
        dispatcher.submit([job])
        while len(world.link.chosen) < 2:
            await job.mailbox.take()
        for _ in range(3):
            await job.mailbox.take()
        seen = held(world.link.chosen[1])
        dispatcher.cancel([job])
        await asyncio.sleep(0.1)
        return seen

    with left_idle(world):
        seen = asyncio.run(play())
    assert world.figures.num_handed_over == 1
    assert seen.keys() == {"acme"}
    assert seen["acme"][0] >= len(PROMPT) // 16
    assert held("p").keys() == held(world.link.chosen[1]).keys() == {"acme"}
    world.close()


class Handle:
    """What Ray Serve's handle of replicas does for an ingress, over replicas in this process."""

    def __init__(self, link: Link, name: str) -> None:
        self.deployment_id, self._link = name, link

    def options(self, **more: Any) -> Handle:
        assert more == {"stream": True, "method_name": "generate"}
        return self

    def remote(self, asked: Any) -> Any:
        return self._link(asked)

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        self._asked: Callable[[], Any] = lambda: [
            getattr(each, method)(*arguments) for each in self._link.replicas.values()
        ]
        return self

    async def results_async(self, timeout_s: float) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*self._asked()))


@contextmanager
def running_front(world: TenantWorld, **options: Any) -> Iterator[Running]:
    """The front door of a fleet, on a port of its own, for as long as the block lasts."""
    world.link.fleet = front_fleet = shared_fleet(f"tests#front {id(world)}", "robust", 3.0)
    front_fleet.sync(dict.fromkeys(world.replicas))
    handle = Handle(world.link, f"tests#front {id(world)}")
    asked = ServerOptions(model_name=MODEL, port=0, has_check=True, **options)
    front, listening, where = (
        IngressApp(FleetBackend(handle, world.model, byte_tokenizer(), 2), asked),
        threading.Event(),
        [],
    )

    def note(address: str) -> None:
        where.append(address)
        listening.set()

    server = AppServer(front.app, asked, note)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert listening.wait(PATIENCE_SECONDS)
        yield Running(server, where[0])  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        world.close()


def answer(running: Running, tenant: str | None = None, key: str | None = None, **fields: Any) -> Any:
    """Status, headers, and the answer or its error."""
    headers = {} if tenant is None else {"X-Tenant": tenant}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "prompt": "A prompt of fifty characters, which are fifty tokens", "max_tokens": 1, **fields}
    status, got, text = running.call("POST", "/v1/completions", json.dumps(body).encode(), headers)
    found = json.loads(text)
    return status, got, found.get("error", found)


def shares_of_page(running: Running) -> dict[str, dict[str, float]]:
    """Return each tenant's blocks from /metrics."""
    found: dict[str, dict[str, float]] = {}
    for line in running.call("GET", "/metrics")[2].decode().splitlines():
        if line.startswith("blockyard:share_blocks"):
            name, _, value = line.rpartition(" ")
            found.setdefault(name.partition("{")[0][len("blockyard:share_blocks") :].strip("_"), {})[
                name.split('tenant="')[1].partition('"')[0]
            ] = float(value)
    return found


def test_ingress_identifies_tenants_like_a_server() -> None:
    keys = {"acme": "key of acme", "small": "key of small"}
    world = TenantWorld()
    with running_front(world, api_key="the server's", tenant_keys=keys) as running:
        for tenant, key, status, code in [
            (None, "key of acme", 200, None),
            ("acme", "key of acme", 200, None),
            ("acme", "the server's", 200, None),
            ("small", "key of acme", 403, "tenant_not_allowed"),
            ("acme", "key of nobody", 401, "invalid_api_key"),
            ("acme", None, 401, "invalid_api_key"),
            ("nobody", "the server's", 400, "unknown_tenant"),
            ("x" * 10_000, "the server's", 400, "unknown_tenant"),
            ("\t\x7f\xff", "the server's", 400, "unknown_tenant"),
            ("acme\x1fb", "the server's", 400, "unknown_tenant"),
        ]:
            found, _, told = answer(running, tenant, key)
            assert (found, told.get("code")) == (status, code), (tenant, key, told)
            assert len(str(told)) < 900
        for path, key, status in [
            ("/fleet", "key of acme", 401),
            ("/check", "key of acme", 401),
            ("/fleet", "the server's", 200),
        ]:
            assert running.call("GET", path, headers={"Authorization": f"Bearer {key}"})[0] == status
        # What can never be held is refused before it is sent anywhere.
        num_asks = len(world.link.asks)
        status, _, error = answer(running, None, "key of small", prompt="a" * 250)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].endswith("tenant 'small' can hold 12 blocks)")
        assert len(world.link.asks) == num_asks
        assert {each.extra_keys for each in world.link.asks} == {ACME}
        wait_until(lambda: shares_of_page(running)["idle"]["acme"] > 0)
        page = shares_of_page(running)
        assert page.keys() == {"", "held", "idle", "retained", "floor"}
        assert page["floor"]["acme"] == 80  # of two replicas
        assert page[""] == {"acme": 2 * 54, "*": 2 * 14, "small": 2 * 14, "x": 2 * 7, "y": 2 * 7}
        state = json.loads(running.call("GET", "/fleet", headers={"Authorization": "Bearer the server's"})[2])
        (acme,) = (each for each in state["tenants"] if each["name"] == "acme")
        assert acme == {
            "name": "acme",
            "held": 0,
            "idle": page["idle"]["acme"],
            "retained": 0,
            "floor": 80,
            "share": 108,
        }


def test_unknown_names_use_no_memory() -> None:
    world = TenantWorld()
    with running_front(world) as running:
        for number in range(draws(400, 60)):
            assert answer(running, f"made up {number}")[0] == 400
            assert answer(running, cache_salt=f"made up {number}")[0] == 200
        page = running.call("GET", "/metrics")[2]
        assert b"made up" not in page
        assert shares_of_page(running)["held"].keys() == {"*", "acme", "small", "x", "y"}


def test_without_tenants_the_header_is_ignored() -> None:
    world = TenantWorld(tenants=())
    with running_front(world) as running:
        assert answer(running, "acme")[0] == 200
        assert "share_blocks" not in running.call("GET", "/metrics")[2].decode()
        assert json.loads(running.call("GET", "/fleet")[2])["tenants"] == []


def test_tenant_keys_need_known_tenants() -> None:
    world = TenantWorld()
    message = "tenant is 'nobody'; none of the 5 tenants has that name"
    with pytest.raises(InvalidArgument, match=message), running_front(world, tenant_keys={"nobody": "key"}):
        pass
    world.close()
