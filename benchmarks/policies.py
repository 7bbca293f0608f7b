"""What an eviction policy costs: `python -m benchmarks.policies`.

A pool whose blocks are all cached and idle takes prompts of 750 blocks, each block evicting another, and gives them
back. "lru" is the order of the free queue and asks no policy; "LRU, asked" is the same order as a policy. Random
prompts are never hit, so this is the price of telling and asking a policy, not what a hit rate is worth. Also how
many bytes a policy takes for a block. Hints are
measured beside a short sequence with and without a session, in turns, as times of the latter; and bytes a session.

    python -m benchmarks.policies --only hints     # hints alone
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable, Iterator
from statistics import median

import blockyard
from blockyard import BlockPool, CacheConfig, HintConfig, KVCacheManager
from blockyard.cli import build_name
from blockyard.core.policies.layers.hinted import Hinted
from blockyard.core.policies.layers.retention import Retention
from blockyard.core.policies.sessions import Sessions
from blockyard.core.policies.simple.lru import LRU
from blockyard.policies import POLICIES, EvictionPolicy

from .core import PROMPT_BLOCKS, filled_pool, prompts_for, size_name
from .measure import Figure, figure

ROUNDS = 5
MOST_PROMPTS = 133

Maker = Callable[[int], EvictionPolicy]

#: What is measured, besides "lru" without a policy.
MAKERS: dict[str, Maker] = {
    "LRU, asked": LRU,
    **{name: make for name, make in POLICIES.items() if name != "lru"},
    "hints around LRU": lambda num_blocks: Hinted(LRU(num_blocks), num_blocks, Sessions(num_blocks, 65_536), []),
    "retention around LRU": lambda num_blocks: Retention(LRU(num_blocks), num_blocks),
}


class LastIn(EvictionPolicy):
    """The shortest policy in plain Python: what a user's own costs at least."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, None] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.idle[block] = None

    def remove(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        return self.idle.popitem()[0]

    def clear(self) -> None:
        self.idle = {}


def turn_over(pool: BlockPool, prompts: list) -> tuple[float, float]:
    """Take and publish all prompts, then give them back; nanoseconds a block of each."""
    blocks = PROMPT_BLOCKS * len(prompts)
    evicted = pool.num_evicted_blocks
    leases = []
    start = time.perf_counter_ns()
    for prompt in prompts:
        leases.append(pool.get_new_blocks(PROMPT_BLOCKS))
        pool.cache_full_blocks(leases[-1], prompt)
    middle = time.perf_counter_ns()
    for lease in leases:
        pool.free_blocks(lease)
    end = time.perf_counter_ns()
    if pool.num_evicted_blocks - evicted < blocks - PROMPT_BLOCKS:
        raise AssertionError("blocks were taken that evicted no other")
    return (middle - start) / blocks, (end - middle) / blocks


def policy_figures(name: str, make: Maker | None, num_blocks: int) -> Iterator[Figure]:
    """Figures of one policy in one pool."""
    pool = filled_pool(num_blocks, prompts_for(num_blocks, 1))
    pool.set_eviction_policy("lru" if make is None else make)
    samples = [turn_over(pool, prompts_for(num_blocks, seed)[:MOST_PROMPTS]) for seed in range(2, ROUNDS + 3)][1:]
    pool.check()
    size = size_name(num_blocks)
    yield figure(f"{name}: allocate + publish, evicting another", size, [taken for taken, _ in samples], "ns")
    yield figure(f"{name}: free a block", size, [freed for _, freed in samples], "ns")


def bytes_a_block(make: Maker) -> float:
    """What a policy for a million blocks takes at once; counts and memories that fill later are not in it."""
    num_blocks = 1_000_000
    before = _resident_bytes()
    policy = make(num_blocks)
    taken = _resident_bytes() - before
    del policy
    return taken / num_blocks


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def print_bytes() -> None:
    """Bytes a block of each policy."""
    for name, make in POLICIES.items():
        print(f"{name:<24} {bytes_a_block(make):>8.0f} bytes a block", flush=True)


#: Sessions that are known while hints are timed, and those whose bytes are counted; each has two idle blocks.
HINTED_SESSIONS = 10_000
COUNTED_SESSIONS = 100_000
BLOCK = 16


class Chats:
    """A cache that `names` have run a short sequence in, each its own two blocks. All of them fit."""

    def __init__(self, policy: str, names: list[str], has_sessions: bool) -> None:
        num_blocks = 2 * len(names) + 100
        self.cache = KVCacheManager(
            CacheConfig(
                num_blocks, BLOCK, max_model_len=4 * BLOCK, hints=HintConfig(max_sessions=2**17), eviction_policy=policy
            )
        )
        self.names, self.has_sessions = names, has_sessions
        self.prompts = [list(range(100 * number, 100 * number + 2 * BLOCK)) for number in range(len(names))]
        self.turns()

    def turns(self) -> None:
        """Each goes on: allocate, reserve, commit, free."""
        cache = self.cache
        for name, prompt in zip(self.names, self.prompts, strict=True):
            seq = cache.allocate(prompt, session=name) if self.has_sessions else cache.allocate(prompt)
            cache.commit([seq], cache.reserve([seq]).num_scheduled)
            cache.free(seq)

    def say(self, **said: object) -> None:
        """The same hint for all."""
        for name in self.names:
            self.cache.hint(name, **said)  # type: ignore[arg-type]


def hint_times(policy: str) -> Iterator[str]:
    """Nanoseconds of CPU time of a turn and of a hint, in turns, each as times of a turn without a session."""
    names = [f"chat-{number}" for number in range(HINTED_SESSIONS)]
    without, chats = Chats(policy, names, False), Chats(policy, names, True)
    does: dict[str, Callable[[], None]] = {
        "a turn without a session": without.turns,
        "a turn of a session": chats.turns,
        "hint: over": lambda: chats.say(over=True),
        "hint: taken back": chats.say,
    }
    samples: dict[str, list[float]] = {name: [] for name in does}
    for _ in range(ROUNDS + 1):
        for name, do in does.items():
            start = time.process_time_ns()
            do()
            samples[name].append((time.process_time_ns() - start) / len(names))
    chats.cache.check()
    base = median(samples["a turn without a session"][1:])
    for name, found in samples.items():
        middle = median(found[1:])
        yield f"{policy:<16} {name:<36} {min(found[1:]):>8.0f} {middle:>8.0f} ns  {middle / base:.2f}"


def bytes_a_session() -> float:
    """What is resident for a session that is over, its name aside, when 100,000 are known and hold no block."""
    names = [f"chat-{number}" for number in range(COUNTED_SESSIONS)]
    cache = KVCacheManager(CacheConfig(100, BLOCK, max_model_len=4 * BLOCK, hints=HintConfig(max_sessions=2**17)))
    cache.free(cache.allocate([1], session="first"))
    before = _resident_bytes()
    for name in names:
        cache.free(cache.allocate([1], session=name))
        cache.hint(name, over=True)
    return (_resident_bytes() - before) / len(names)


def print_hints() -> None:
    """Hints around two policies, least and median."""
    for policy in ("lru", "density"):
        for line in hint_times(policy):
            print(line, flush=True)
    print(f"{'hints':<16} {bytes_a_session():>8.0f} bytes a session", flush=True)


def main() -> None:
    """Print a row for each policy, bytes a block, then hints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["hints"], default="")
    options = parser.parse_args()
    print(f"blockyard {blockyard.__version__}, {build_name()}")
    if not options.only:
        print_policies()
        print_bytes()
    print_hints()


def print_policies() -> None:
    """A row for each policy."""
    rows: dict[str, Maker | None] = {"lru": None, **MAKERS, "plain Python": LastIn}
    for num_blocks in (10_000, 100_000):
        for name, make in rows.items():
            for row in policy_figures(name, make, num_blocks):
                print(f"{row.name:<58} {row.size:>6} {row.value:>8.1f} {row.unit}  {row.spread}", flush=True)


if __name__ == "__main__":
    main()
