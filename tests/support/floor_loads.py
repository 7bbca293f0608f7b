"""Requests, one after another, through a manager with a strict guard and beside it through one under LRU.

    python -m tests.support.floor_loads 2000 [FIRST_SEED [KIND,KIND ...]]

Prompts of a few tokens end at block boundaries, so that equal contents are common. Sequences are forked, generate
tokens and are cut by `truncate`. With a CPU pool, which keeps nothing that is evicted, they may be swapped out and in.
Between requests the pool may be resized: of a smaller pool both lose what stood in the blocks that are gone.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

from blockyard import CacheConfig, KVCacheManager
from blockyard.core.policies.base import EvictionPolicy
from blockyard.policies import FIFO, LFU, Guarded

from .own_policies import MRU, Dice

#: What may happen in the requests of a load.
KINDS = (("plain",), ("generated",), ("cut",), ("cut", "generated"), ("forked",))
#: The same in a cache with a CPU pool.
MAPPED_KINDS = (("mapped",), ("mapped", "generated"), ("mapped", "forked"))
#: Those for which no floor is promised (docs/guard.md).
UNPROMISED_KINDS = (("resized",), ("mapped", "swapped"))
BLOCKS_OF_A_PROMPT = 12


@dataclass
class Request:
    """A prompt, and what happens after it is computed."""

    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    is_forked: bool = False
    by_the_fork: list[int] = field(default_factory=list)
    #: The share of the tokens that a cut leaves; 0 for no cut. And what is generated behind the cut.
    cut: float = 0.0
    behind_the_cut: list[int] = field(default_factory=list)
    is_swapped: bool = False
    #: Blocks of the pool from here on; 0 for as many as before.
    num_blocks: int = 0


class FloorLoad:
    """Conversations that go on or begin anew, in blocks of 1, 2, 4 or 16 tokens, drawn from a seed."""

    def __init__(self, seed: int, kinds: tuple[str, ...]) -> None:
        self.draw = random.Random(seed)
        self.kinds = kinds
        self.block_size = self.draw.choice([1, 2, 4, 16])
        self.num_blocks = self.draw.choice([12, 20, 40, 80])
        self.longest = min(self.num_blocks - 2, BLOCKS_OF_A_PROMPT)
        self.num_words = self.draw.choice([2, 3, 5, 1000])
        self.talks = [self._begun() for _ in range(self.draw.choice([5, 12, 40]))]
        self.requests = [self._request() for _ in range(self.draw.choice([150, 400]))]
        self.inside: type[EvictionPolicy] = self.draw.choice([MRU, Dice, LFU, FIFO])

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(self.num_words) for _ in range(count)]

    def _begun(self) -> list[int]:
        return self._tokens(self.block_size * self.draw.randint(1, 4))

    def _request(self) -> Request:
        talk, kind = self.draw.choice(self.talks), self.draw.random()
        if len(talk) < self.block_size * (self.longest - 4) and kind < 0.5:
            talk += self._tokens(self.draw.choice([self.block_size, 1, 2 * self.block_size]))
        elif kind < 0.6:
            talk[:] = self._begun()
        request = Request([*talk, *self._tokens(1)])
        if "cut" in self.kinds and self.draw.random() < 0.4:
            request.cut = self.draw.random()
            request.behind_the_cut = self._tokens(self.draw.choice([0, 0, 1, self.block_size]))
        if "generated" in self.kinds and self.draw.random() < 0.5:
            request.generated = self._tokens(self.draw.randint(1, 2 * min(self.block_size, 4)))
        if "forked" in self.kinds and self.draw.random() < 0.3:
            request.is_forked = True
            request.by_the_fork = self._tokens(self.draw.randint(0, 3))
        request.is_swapped = "swapped" in self.kinds and self.draw.random() < 0.3
        if "resized" in self.kinds and self.draw.random() < 0.03:
            request.num_blocks = self.draw.randint(self.longest + 2, 2 * self.num_blocks)
        return request


def served(cache: KVCacheManager, request: Request, block_size: int) -> int:
    """Serve one request and free it; the blocks that it hit."""
    if request.num_blocks:
        cache.resize(request.num_blocks)
    seq = cache.allocate(request.prompt)
    hits = cache.num_computed_tokens(seq) // block_size
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    seqs = [seq, *(int(fork) for fork in cache.fork(seq))] if request.is_forked else [seq]
    for one in seqs:
        _generate(cache, one, request.generated if one == seq else request.by_the_fork)
    if request.is_swapped:
        cache.swap_out([seq])
        cache.swap_in([seq])
    if request.cut > 0:
        cache.truncate(seq, max(1, int(cache.num_tokens(seq) * request.cut)))
        _generate(cache, seq, request.behind_the_cut)
    cache.free(seqs)
    return hits


def _generate(cache: KVCacheManager, seq: int, tokens: list[int]) -> None:
    for token in tokens:
        cache.append(seq, token)
        cache.commit([seq], cache.reserve([seq]).num_scheduled)


def below_the_floor(seed: int, kinds: tuple[str, ...]) -> float:
    """By how many hits the guarded manager was below its floor under LRU, at the worst moment; at most 0.0 if never."""
    return furthest_below(seed, kinds)[0]


def furthest_below(seed: int, kinds: tuple[str, ...]) -> tuple[float, float]:
    """As `below_the_floor`, and the same of the floor under the guard's shadow, exposed contents counted as lost."""
    load = FloorLoad(seed, kinds)
    room = load.block_size * load.longest * 2
    config: dict[str, Any] = {"num_blocks": load.num_blocks, "block_size": load.block_size, "max_model_len": room}
    config["max_num_seqs"] = 4
    if "mapped" in kinds:
        config.update(num_cpu_blocks=load.num_blocks, keep_evicted=False)
    made: list[Guarded] = []

    def guard(num_blocks: int) -> Guarded:
        made.append(Guarded(load.inside(num_blocks), True))
        return made[-1]

    guarded = KVCacheManager(CacheConfig(watermark=0.0, **config, eviction_policy=guard))
    plain = KVCacheManager(CacheConfig(watermark=0.0, **config))
    worst, worst_of_shadow, hits, plain_hits, budget = 0.0, 0.0, 0, 0, 0.0
    for request in load.requests:
        hits += served(guarded, request, load.block_size)
        plain_hits += served(plain, request, load.block_size)
        budget += 0.002 * ((len(request.prompt) - 1) // load.block_size)
        worst = max(worst, plain_hits - hits - budget)
        worst_of_shadow = max(worst_of_shadow, made[-1].num_shadow_hits + made[-1].num_exposed - hits - budget)
    guarded.check()
    return worst, worst_of_shadow


def main() -> None:
    """Run this many loads, their kinds in turns; print of each kind how many were below the floor, the lowest first."""
    first, count = int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1])
    kinds = tuple(tuple(each.split(",")) for each in sys.argv[3:]) or KINDS + MAPPED_KINDS + UNPROMISED_KINDS
    for place, kind in enumerate(kinds):
        found = [(below_the_floor(seed, kind), seed) for seed in range(first + place, first + count, len(kinds))]
        below = sorted(((round(worst, 3), seed) for worst, seed in found if worst > 1e-9), reverse=True)
        print(f"{','.join(kind):16} {len(found):6,} loads, {len(below)} below the floor {below[:8]}", flush=True)


if __name__ == "__main__":
    main()
