"""`python -m benchmarks.fleet [--replicas N] [--blocks N]`: what choices, polls and events cost, and holdings take.

Then another fleet is started over the same replicas, while they compute and evict: how many choices are blind, which is
to say that they know less than all that a replica has said, and until when.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events import KVEventPublisher
from blockyard.routing import COSTS, Fleet, Router, RouteRequest, make_cost

Prompt = NDArray[np.int32]
BLOCK_SIZE = 16
ROUNDS = 300
#: Prompts in each replica's cache, and requests in flight on each.
PROMPTS, IN_FLIGHT = 4, 8
#: Seconds that a fleet which is started late is watched, and from when on none of its choices is to be blind.
WATCHED, KNOWN_AFTER = 5.0, 0.5


def times(call: Callable[[int], object]) -> str:
    """Median and 95th percentile of many calls, each with its number."""
    seconds = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        call(number)
        seconds.append(1e6 * (time.perf_counter() - begin))
    return f"{statistics.median(seconds):8.1f} us, 95 % below {statistics.quantiles(seconds, n=20)[-1]:8.1f} us"


@dataclass
class Replica:
    """A cache, and the publisher of its events."""

    cache: KVCacheManager
    publisher: KVEventPublisher

    def compute(self, tokens: Prompt) -> None:
        """Have a prompt, and free it: it evicts others where the pool is full."""
        seq = self.cache.allocate(tokens)
        missing = len(tokens) - self.cache.num_computed_tokens(seq)
        self.cache.reserve([seq], missing)
        self.cache.commit([seq], missing, [1])
        self.cache.free(seq)
        self.publisher.publish()


def filled_fleet(num_replicas: int, prompts: list[Prompt]) -> tuple[Fleet, list[Replica]]:
    """A fleet over real publishers, each with the prompts of its number: prompts begin alike for four replicas."""
    fleet, replicas = Fleet(heartbeat_timeout=3600.0), []
    num_blocks = (PROMPTS + 1) * len(prompts[0]) // BLOCK_SIZE
    for number in range(num_replicas):
        cache = KVCacheManager(CacheConfig(num_blocks, BLOCK_SIZE, observe=ObserveConfig(enable_kv_cache_events=True)))
        publisher = KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=5.0)
        replicas.append(Replica(cache, publisher))
        for place in range(PROMPTS):
            replicas[-1].compute(prompts[(number + place) % len(prompts)])
        fleet.follow(f"replica-{number}", publisher.endpoint, publisher.replay_endpoint)
    began, spent = time.monotonic(), time.process_time()
    while not all(fleet.is_trusted(name) for name in fleet.router.replicas) and time.monotonic() < began + 120:
        fleet.poll()
    spent = time.process_time() - spent
    print(
        f"{num_replicas} replicas are known after   {time.monotonic() - began:8.3f} s, {spent:.3f} s of CPU with theirs"
    )
    return fleet, replicas


def measure_events(fleet: Fleet, replicas: list[Replica], num_blocks: int) -> None:
    """Print what a block costs that is stored in the place of an evicted one: the CPU of the fleet's thread alone."""
    draw, costs = np.random.default_rng(2), []
    for _ in range(10):
        for number in range(20):
            tokens = draw.integers(0, 100_000, BLOCK_SIZE * num_blocks, dtype=np.int32)
            replicas[number % len(replicas)].compute(tokens)
        time.sleep(0.1)  # they have arrived
        spent, num_messages = time.thread_time(), 0
        while num_messages < 20:
            num_messages += fleet.poll()
        costs.append((time.thread_time() - spent) / (20 * num_blocks))
    print(f"a block in and one out     {1e9 * statistics.median(costs):8.1f} ns of the fleet's CPU")


def measure_late_start(replicas: list[Replica], prompts: list[Prompt]) -> None:
    """Print how many choices of a fleet that has just been started are blind, while all replicas compute."""
    draw, choices, blind, last_blind = np.random.default_rng(3), [0, 0], [0, 0], 0.0
    began = time.monotonic()
    with Fleet(heartbeat_timeout=3600.0) as fleet:
        for number, each in enumerate(replicas):
            fleet.follow(f"replica-{number}", each.publisher.endpoint, each.publisher.replay_endpoint)
        while (at := time.monotonic() - began) < WATCHED:
            replicas[sum(choices) % len(replicas)].compute(draw.integers(0, 100_000, BLOCK_SIZE * 8, dtype=np.int32))
            choice = fleet.choose("asked", prompts[sum(choices) % len(prompts)], max_tokens=100)
            is_late = at >= KNOWN_AFTER
            choices[is_late] += 1
            if not all(each.is_believed for each in choice.why):
                blind[is_late] += 1
                last_blind = at
    print(
        f"a fleet started late       {blind[0]} of {choices[0]} choices blind in its first {KNOWN_AFTER} s, the last "
        f"after {last_blind:.3f} s; {blind[1]} of {choices[1]} later"
    )


def measure(num_replicas: int, num_blocks: int) -> None:
    """Print the figures of a fleet of real publishers."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 100_000, BLOCK_SIZE * num_blocks, dtype=np.int32) for _ in range(16)]
    fleet, replicas = filled_fleet(num_replicas, prompts)
    try:
        fleet._old_at = np.inf  # nothing is: no choice reads
        for number in range(IN_FLIGHT * num_replicas):
            fleet.choose(f"flying-{number}", prompts[number % 16], max_tokens=200)
        mirror = fleet.mirror
        print(f"{num_replicas} replicas, {num_blocks} blocks a prompt, {mirror.num_holdings():,} holdings")
        print(f"memory of a holding        {mirror.num_bytes() / mirror.num_holdings():8.1f} bytes")
        print("match alone               ", times(lambda number: mirror.match(prompts[number % 16])))
        print("a choice                  ", times(lambda number: fleet.choose("asked", prompts[number % 16])))
        print("a poll without news       ", times(lambda number: fleet.poll()))
        measure_events(fleet, replicas, num_blocks)
        fleet.close()
        measure_late_start(replicas, prompts)
    finally:
        fleet.close()
        for each in replicas:
            each.publisher.close()


def measure_costs(num_replicas: int, num_blocks: int) -> None:
    """Print what each cost takes, its router's book and its memory of prompts included, without a match."""
    links = [[(prompt, place) for place in range(num_blocks // 8)] for prompt in range(16)]
    print(f"\nwithout a match, {num_replicas} replicas")
    for name in COSTS:
        router = Router(make_cost(name, 1))
        for number in range(num_replicas):
            router.add(f"replica-{number}")
        hits, believed = np.zeros(num_replicas, np.int64), np.ones(num_replicas, np.bool_)

        def choose(number: int, router: Router = router, hits: object = hits, believed: object = believed) -> None:
            asked = RouteRequest(
                f"r{number}", 16 * num_blocks, 200, f"s{number % 99}", links[number % 16], 128, float(number)
            )
            router.choose(asked, hits, hits, believed)  # type: ignore[arg-type]

        print(f"{name:26} {times(choose)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description="What a choice of a fleet costs.")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=320)
    options = parser.parse_args()
    measure(options.replicas, options.blocks)
    measure_costs(options.replicas, options.blocks)


if __name__ == "__main__":
    main()
