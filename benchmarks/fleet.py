"""`python -m benchmarks.fleet [--replicas N] [--blocks N]`: what a choice costs, a poll, and a holding's memory."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from blockyard import CacheConfig, KVCacheManager
from blockyard.events import KVEventPublisher
from blockyard.fleet import Ask, Fleet, Router, make_cost
from blockyard.fleet.costs import COSTS

BLOCK_SIZE = 16
ROUNDS = 300
#: Prompts in each replica's cache, and requests in flight on each.
PROMPTS, IN_FLIGHT = 4, 8


def times(call: Callable[[int], object]) -> str:
    """Median and 95th percentile of many calls, each with its number."""
    seconds = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        call(number)
        seconds.append(1e6 * (time.perf_counter() - begin))
    return f"{statistics.median(seconds):8.1f} us, 95 % below {statistics.quantiles(seconds, n=20)[-1]:8.1f} us"


def filled_fleet(num_replicas: int, prompts: list[np.ndarray]) -> tuple[Fleet, list[KVEventPublisher]]:  # type: ignore[type-arg]
    """A fleet over real publishers, each with the prompts of its number: prompts begin alike for four replicas."""
    fleet, publishers = Fleet(silence=3600.0), []
    num_blocks = (PROMPTS + 1) * len(prompts[0]) // BLOCK_SIZE
    for number in range(num_replicas):
        cache = KVCacheManager(CacheConfig(num_blocks, BLOCK_SIZE, enable_kv_cache_events=True))
        publishers.append(KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=5.0))
        for place in range(PROMPTS):
            tokens = prompts[(number + place) % len(prompts)]
            seq = cache.allocate(tokens)
            missing = len(tokens) - cache.num_computed_tokens(seq)
            cache.reserve([seq], missing)
            cache.commit([seq], missing, [1])
            cache.free(seq)
            publishers[-1].publish()
        fleet.follow(f"replica-{number}", publishers[-1].endpoint, publishers[-1].replay_endpoint)
    deadline = time.monotonic() + 120
    while not all(fleet.is_believed(name) for name in fleet.router.replicas) and time.monotonic() < deadline:
        fleet.poll()
    return fleet, publishers


def measure(num_replicas: int, num_blocks: int) -> None:
    """Print the figures of a fleet of real publishers."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 100_000, BLOCK_SIZE * num_blocks, dtype=np.int32) for _ in range(16)]
    fleet, publishers = filled_fleet(num_replicas, prompts)
    try:
        for number in range(IN_FLIGHT * num_replicas):
            fleet.choose(f"flying-{number}", prompts[number % 16], max_tokens=200)
        mirror = fleet.mirror
        print(f"{num_replicas} replicas, {num_blocks} blocks a prompt, {mirror.num_holdings():,} holdings")
        print(f"memory of a holding        {mirror.num_bytes() / mirror.num_holdings():8.1f} bytes")
        print("match alone               ", times(lambda number: mirror.match(prompts[number % 16])))
        polled = fleet._polled_at
        fleet._polled_at = np.inf  # nothing is old
        print("a choice                  ", times(lambda number: fleet.choose("asked", prompts[number % 16])))
        fleet._polled_at = polled
        print("a poll without news       ", times(lambda number: fleet.poll()))
    finally:
        fleet.close()
        for publisher in publishers:
            publisher.close()


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
            asked = Ask(f"r{number}", 16 * num_blocks, 200, f"s{number % 99}", links[number % 16], 128, float(number))
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
