"""`ExactRouter` on Ray Serve's own request router, without a cluster: real publishers, and replicas that only answer
how long their queues are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("ray.serve", reason="needs the extra `fleet`: pip install 'blockyard[fleet]'")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from blockyard_serve.fleet.ray_serve import ExactRouter
from blockyard_testing.patience import PATIENCE_SECONDS

from .test_fleet import PROMPT, Engine

WHERE = DeploymentID(name="engines", app_name="tests")


class Replica:
    """What the router asks of Ray's wrapper."""

    max_ongoing_requests = 100

    def __init__(self, name: str, metadata: dict[str, Any] | None, queue_len: int = 0) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=WHERE)
        self.replica_metadata = metadata
        self.queue_len = queue_len

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine() for _ in range(2)]
    yield made
    for engine in made:
        engine.publisher.close()


def pending(name: str, asked: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest(args=[asked], kwargs={}, metadata=metadata)


def request(tokens: Any = PROMPT) -> Any:
    return SimpleNamespace(token_ids=tokens, max_tokens=20)


def routed(engines: list[Engine], name: str, act: Callable[[Any, list[Replica]], Awaitable[None]]) -> None:
    """Run `act` with a router over these engines, of a deployment of this name, on a loop of its own."""

    async def run() -> None:
        where = DeploymentID(name=name, app_name="tests")
        router = ExactRouter(where, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=False)
        router.initialize_state(heartbeat_timeout=60.0)
        replicas = [Replica(f"r{number}", {"kv": list(each.addresses)}) for number, each in enumerate(engines)]
        router.update_replicas(replicas)
        fleet = router._shared.fleet
        await arrives(lambda: all(fleet.is_trusted(each.replica_id.unique_id) for each in replicas))
        try:
            await act(router, replicas)
            fleet.check()
        finally:
            router.update_replicas([])
            await asyncio.sleep(0.05)
            assert router._timer is None, "without replicas it reads no more"
            fleet.close()

    asyncio.run(run())


async def arrives(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def test_a_request_is_sent_to_the_replica_with_its_tokens_and_released(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        fleet = router._shared.fleet
        engines[1].answer(PROMPT)
        await arrives(lambda: bool(fleet.mirror.match(PROMPT)))
        chosen = await router._choose_replica_for_request(pending("a", request()))
        assert chosen is replicas[1]
        assert fleet.router.load.assignments["a"].held == 350
        router.on_request_completed(replicas[0].replica_id, "a")
        assert "a" in fleet.router.load.assignments
        router.on_request_completed(replicas[1].replica_id, "a")
        assert not fleet.router.load.sums.any()

    routed(engines, "freed", act)


def test_request_of_a_full_replica_is_reassigned(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        fleet = router._shared.fleet
        engines[1].answer(PROMPT)
        await arrives(lambda: bool(fleet.mirror.match(PROMPT)))
        replicas[1].queue_len = 100
        chosen = await router._choose_replica_for_request(pending("a", request()))
        assert chosen is replicas[0]
        router.on_request_routed(pending("a", request()), replicas[0].replica_id, None)
        assert fleet.router.load.assignments["a"].replica == "r0"

    routed(engines, "full", act)


def test_request_avoids_replicas_and_gets_callbacks(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        told: list[Any] = []
        engines[1].answer(PROMPT)
        await arrives(lambda: bool(router._shared.fleet.mirror.match(PROMPT)))
        hooks = {"on_choice": lambda *what: told.append(what), "on_reassigned": told.append}
        asked = SimpleNamespace(token_ids=PROMPT, max_tokens=20, avoid=["r1"], **hooks)
        assert await router._choose_replica_for_request(pending("a", asked)) is replicas[0]
        router.on_request_routed(pending("a", asked), replicas[0].replica_id, None)
        (number, choice), taken_by = told
        assert (number, choice.replica, choice.num_tokens, taken_by) == ("a", "r0", 0, "r0")
        alone = SimpleNamespace(token_ids=PROMPT, max_tokens=20, avoid=["r0", "r1"])
        assert await router._choose_replica_for_request(pending("b", alone)) in replicas

    routed(engines, "avoided", act)


def test_a_request_that_is_cancelled_while_it_waits_is_freed(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        for replica in replicas:
            replica.queue_len = 100
        waits = asyncio.ensure_future(router._choose_replica_for_request(pending("a", request())))
        await arrives(lambda: "a" in router._shared.fleet.router.load.assignments)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await arrives(lambda: not router._shared.fleet.router.load.assignments)

    routed(engines, "cancelled", act)


def test_a_replica_that_died_is_dropped_with_its_load(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        fleet = router._shared.fleet
        engines[1].answer(PROMPT)
        await arrives(lambda: bool(fleet.mirror.match(PROMPT)))
        assert await router._choose_replica_for_request(pending("a", request())) is replicas[1]
        router.on_replica_actor_died(replicas[1].replica_id)
        router.on_replica_actor_died(replicas[1].replica_id)
        assert fleet.router.replicas == ["r0"]
        assert await router._choose_replica_for_request(pending("a2", request())) is replicas[0]

    routed(engines, "died", act)


@pytest.mark.parametrize("asked", [b"a pickled scope", request("text"), request([-1]), request(None)])
def test_call_without_tokens_is_routed_by_load(engines: list[Engine], asked: Any) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        took = [await router._choose_replica_for_request(pending(f"r{number}", asked)) for number in range(4)]
        assert sorted(took.count(replica) for replica in replicas) == [2, 2]

    routed(engines, f"no tokens {asked!r:.40}", act)


def test_failed_choice_falls_back_to_ray(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no")

        router._shared.choose = fail
        assert await router._choose_replica_for_request(pending("a", request())) in replicas

    routed(engines, "fails", act)


def test_two_routers_of_a_deployment_share_one_fleet(engines: list[Engine]) -> None:
    async def act(router: Any, replicas: list[Replica]) -> None:
        other = ExactRouter(DeploymentID(name="two", app_name="tests"), DeploymentHandleSource.REPLICA)
        other.initialize_state(heartbeat_timeout=60.0)
        assert other._shared is router._shared
        prompts = [np.arange(9000 * number, 9000 * number + 300, dtype=np.int32) for number in range(1, 5)]
        other.update_replicas(replicas)
        took = [
            await each._choose_replica_for_request(pending(f"r{number}", request(prompt)))
            for number, (each, prompt) in enumerate(zip([router, other] * 2, prompts, strict=True))
        ]
        assert sorted(took.count(replica) for replica in replicas) == [2, 2]
        other.update_replicas([])
        await asyncio.sleep(0.05)

    routed(engines, "two", act)
