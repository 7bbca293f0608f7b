"""Eviction policies that break their contract: the call that asked raises and changes nothing, and the pool goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, PolicyError
from blockyard.config import cache_config
from blockyard.core.policies import make_policy
from blockyard.core.policies.base import EvictionPolicy

from ..support.checked import Checked, prompt


class Faulty(EvictionPolicy):
    """First in, first out, until a fault is set: what `evict` returns instead, or the methods that raise."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, None] = {}
        self.answers: list[Any] = []
        self.raising: set[str] = set()
        self.num_asked = 0

    def _maybe_raise(self, method: str) -> None:
        if method in self.raising:
            raise KeyError(f"broken {method}")

    def insert(self, block: int, key: int, depth: int) -> None:
        self._maybe_raise("insert")
        self.idle[block] = None

    def hit(self, block: int, key: int) -> None:
        self._maybe_raise("hit")

    def remove(self, block: int) -> None:
        self._maybe_raise("remove")
        del self.idle[block]

    def evict(self) -> Any:
        self.num_asked += 1
        self._maybe_raise("evict")
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        block = next(iter(self.idle))
        del self.idle[block]
        return block

    def clear(self) -> None:
        self._maybe_raise("clear")
        self.idle = {}

    def grow(self, num_blocks: int) -> None:
        self._maybe_raise("grow")
        super().grow(num_blocks)


class Broken:
    """A scene: a cache with a `Faulty` policy in the middle of its work, and a call that has to evict two blocks."""

    def __init__(self, **settings: Any) -> None:
        self.policies: list[Faulty] = []

        def make(num_blocks: int) -> Faulty:
            self.policies.append(Faulty(num_blocks))
            return self.policies[-1]

        config = {"max_num_seqs": 8, "max_model_len": 64, "watermark": 0.0, "track_misses": True, **settings}
        self.cache = KVCacheManager(cache_config(12, 4, eviction_policy=make, **config))
        self.lease = self.pool.get_new_blocks(1, holder="somebody beside the sequences")
        self.call: Callable[[], object] = self._prepare()

    @property
    def policy(self) -> Faulty:
        return self.policies[-1]

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    def _prepare(self) -> Callable[[], object]:
        raise NotImplementedError

    def prefilled(self, tokens: list[int]) -> int:
        seq = self.cache.allocate(tokens)
        missing = self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq)
        assert self.cache.reserve([seq], missing).all_fit
        self.cache.commit([seq], missing)
        return seq

    def fill(self) -> None:
        """Cache prompts until no free block is empty."""
        number = 50
        while np.count_nonzero(self.pool.cached_mask()) < self.pool.num_blocks - 1 - self.num_uncached_used():
            empty = self.pool.num_free_blocks - sum(
                bool(self.pool.cached_mask()[b]) for b in self.pool.free_block_ids()
            )
            self.cache.free(self.prefilled(prompt(number, 4 * max(empty // len(self.cache.config.layer_groups), 1))))
            number += 1

    def num_uncached_used(self) -> int:
        return int(np.count_nonzero((self.pool.ref_counts() > 0) & ~self.pool.cached_mask()))

    def facts(self) -> dict[str, Any]:
        """All that a caller can see, but the order of the free queue, in which hits come last."""
        cache = self.cache
        found: dict[str, Any] = {
            "running": cache.running(),
            "stats": cache.stats(),
            "misses": cache.miss_totals(),
            "version": cache._parts.sequences.version,
            "table": [cache.group_table(g).tolist() for g in range(len(cache.config.layer_groups))],
        }
        for seq in cache.running():
            state = (cache.num_tokens(seq), cache.num_computed_tokens(seq), cache.is_swapped_out(seq))
            found[f"sequence {seq}"] = (*state, cache.token_ids(seq).tolist())
        for name, pool in (("pool", cache.pool), ("cpu", cache.cpu_pool), ("pages", cache._parts.token_blocks)):
            if pool is not None:
                ledger = getattr(pool, "_ledger", pool)
                cached = [ledger.index.is_cached(block) for block in range(len(ledger.ref_cnt))]
                found[name] = (list(ledger.ref_cnt), cached, sorted(ledger.queue.block_ids()))
            if isinstance(pool, BlockPool):
                found[f"{name} leases"] = [list(lease) for lease in pool.leases()]
        return found


class Allocate(Broken):
    """Two blocks are hit, and two are needed besides."""

    def _prepare(self) -> Callable[[], object]:
        self.prefilled(prompt(1, 9))
        self.cache.free(self.prefilled(prompt(2, 8)))
        self.fill()
        return lambda: self.cache.allocate([*prompt(2, 8), *prompt(3, 8)])


class AllocateBatch(Broken):
    """The first prompt would evict one block alone; it is the second that needs more."""

    def _prepare(self) -> Callable[[], object]:
        self.prefilled(prompt(1, 9))
        self.cache.free(self.prefilled(prompt(2, 8)))
        self.fill()
        return lambda: self.cache.allocate_batch([prompt(3, 4), [*prompt(2, 8), 7, 7], prompt(4, 4)])


class Reserve(Broken):
    """Two sequences decode into a new block each."""

    def _prepare(self) -> Callable[[], object]:
        seqs = [self.prefilled(prompt(1, 8)), self.prefilled(prompt(2, 8))]
        self.cache.append(seqs, [5, 6])
        self.fill()
        return lambda: self.cache.reserve(seqs, 1)


class SwapIn(Broken):
    """A sequence of three blocks comes back; the pool has none of them any more."""

    def __init__(self) -> None:
        super().__init__(num_cpu_blocks=12, keep_evicted=False)

    def _prepare(self) -> Callable[[], object]:
        seq = self.prefilled(prompt(1, 11))
        self.cache.swap_out([seq])
        self.cache.free(self.prefilled(prompt(5, 40)))
        return lambda: self.cache.swap_in([seq])


class NewBlocks(Broken):
    """A lease beside sequences."""

    def _prepare(self) -> Callable[[], object]:
        self.prefilled(prompt(1, 9))
        self.fill()
        return lambda: self.pool.get_new_blocks(2, holder="a lease")


class Extend(Broken):
    """A lease that grows."""

    def _prepare(self) -> Callable[[], object]:
        self.prefilled(prompt(1, 9))
        self.fill()
        return lambda: self.pool.extend(self.lease, 2)


GROUPS = {"groups": (LayerGroup(4), LayerGroup(4, 6))}


class AllocateInGroups(Allocate):
    """With a sliding window beside the full layers."""

    def __init__(self) -> None:
        super().__init__(**GROUPS)

    def _prepare(self) -> Callable[[], object]:
        self.cache.free(self.prefilled(prompt(2, 8)))
        self.fill()
        return lambda: self.cache.allocate([*prompt(2, 8), *prompt(3, 8)])


class AllocateBatchInGroups(AllocateInGroups):
    """Several prompts with a sliding window and a CPU pool that keeps what is evicted."""

    def __init__(self) -> None:
        Broken.__init__(self, **GROUPS, num_cpu_blocks=8)

    def _prepare(self) -> Callable[[], object]:
        super()._prepare()
        return lambda: self.cache.allocate_batch([prompt(3, 4), [*prompt(2, 8), 7, 7], prompt(4, 4)])


class ReserveInGroups(Broken):
    """Both groups need a block."""

    def __init__(self) -> None:
        super().__init__(**GROUPS)

    def _prepare(self) -> Callable[[], object]:
        seqs = [self.prefilled(prompt(1, 8))]
        self.cache.append(seqs, [5])
        self.fill()
        return lambda: self.cache.reserve(seqs, 1)


SCENES: list[type[Broken]] = [
    Allocate,
    AllocateBatch,
    Reserve,
    SwapIn,
    NewBlocks,
    Extend,
    AllocateInGroups,
    AllocateBatchInGroups,
    ReserveInGroups,
]
every_scene = pytest.mark.parametrize("make", SCENES)


def refused(scene: Broken, *parts: str) -> None:
    """The call raises a `PolicyError` that names the policy and says why; all is as before; the next one works."""
    before = scene.facts()
    with pytest.raises(PolicyError) as caught:
        scene.call()
    for part in ("Faulty", *parts):
        assert part in str(caught.value)
    scene.cache.check()
    assert scene.facts() == before
    goes_on(scene)


def goes_on(scene: Broken) -> None:
    """With a sound policy the same call works, and so does giving everything back."""
    scene.cache.set_eviction_policy("lru")
    scene.cache.check()
    scene.call()
    scene.cache.check()
    release_all(scene)


def release_all(scene: Broken) -> None:
    """Nothing leaked."""
    scene.cache.free(list(scene.cache.running()))
    for lease in scene.pool.leases():
        scene.pool.free_blocks(lease)
    scene.cache.check()
    assert scene.cache.num_used_blocks == 0


@every_scene
def test_a_scene_without_a_fault_asks_the_policy_at_least_twice(make: type[Broken]) -> None:
    scene = make()
    assert scene.policy.idle
    before = scene.policy.num_asked
    scene.call()
    scene.cache.check()
    assert scene.policy.num_asked >= before + 2


# ---------------------------------------------------------------- wrong answers

WRONG: dict[str, tuple[Callable[[Broken], object], str]] = {
    "a used block": (lambda s: s.lease.block_ids[0].item(), "which is not idle"),
    "the null block": (lambda s: 0, "block 0, which is not idle"),
    "one past the end": (lambda s: s.pool.num_blocks, "block 12, which is not idle"),
    "a huge number": (lambda s: 2**40, "which is not idle"),
    "more than 64 bits": (lambda s: 2**70, "evict"),
    "a negative number": (lambda s: -1, "block -1, which is not idle"),
    "the least number": (lambda s: -(2**63), "which is not idle"),
    "a name": (lambda s: "7", "TypeError"),
    "nothing": (lambda s: None, "TypeError"),
    "a fraction": (lambda s: 1.5, "TypeError"),
}


@pytest.mark.parametrize(("answer", "reason"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("num_right", [0, 1])
@every_scene
def test_a_wrong_answer(make: type[Broken], answer: Callable[[Broken], object], reason: str, num_right: int) -> None:
    """The first answer is wrong, or the second after a right one."""
    scene = make()
    right = list(scene.policy.idle)[-1:] * num_right
    scene.policy.answers = [*right, answer(scene)]
    refused(scene, reason)


@every_scene
def test_the_same_block_twice(make: type[Broken]) -> None:
    scene = make()
    block = list(scene.policy.idle)[-1]
    scene.policy.answers = [block, block]
    refused(scene, f"block {block} twice")


def test_a_free_block_that_caches_nothing() -> None:
    """Such blocks are taken without asking, so the policy may not name one."""
    pool = BlockPool(6, 4)
    policy = Faulty(6)
    pool.set_eviction_policy(lambda num_blocks: policy)
    lease = pool.get_new_blocks(3)
    pool.cache_full_blocks(lease, list(range(12)))
    pool.free_blocks(lease)
    policy.answers = [5]
    with pytest.raises(PolicyError, match="Faulty: evict returned block 5, which is not idle"):
        pool.get_new_blocks(3)
    pool.check()
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (5, 3)
    pool.set_eviction_policy("lru")
    assert len(pool.get_new_blocks(5)) == 5
    pool.check()


# ---------------------------------------------------------------- raising


@every_scene
def test_evict_raises(make: type[Broken]) -> None:
    scene = make()
    scene.policy.raising = {"evict"}
    refused(scene, "evict raised KeyError", "broken evict")


@every_scene
def test_evict_raises_the_second_time(make: type[Broken]) -> None:
    scene = make()
    scene.policy.answers = [list(scene.policy.idle)[-1], KeyError("broken at last")]
    refused(scene, "evict raised KeyError", "broken at last")


@pytest.mark.parametrize("method", ["insert", "remove", "hit"])
@every_scene
def test_a_failure_while_it_is_told_something(make: type[Broken], method: str) -> None:
    """Giving back and hitting cannot fail for the policy's sake: the next eviction says what happened."""
    scene = make()
    scene.policy.raising = {method}
    block = next(iter(scene.policy.idle))
    scene.cache._parts.kv_pool.note_hit(block)
    scene.cache._parts.kv_pool.share_one(block)
    scene.cache._parts.kv_pool.release_one(block)
    scene.cache.check()
    refused(scene, f"{method} raised KeyError", f"broken {method}")


@every_scene
def test_a_failure_at_clear(make: type[Broken]) -> None:
    """After a reset all blocks are empty, so nobody asks the policy until some are cached again."""
    scene = make()
    scene.policy.raising = {"clear"}
    scene.cache.reset_prefix_cache()
    scene.cache.check()
    with pytest.raises(PolicyError, match="Faulty: clear raised KeyError: 'broken clear'"):
        serve_until_blocks_are_evicted(scene)
    scene.cache.check()
    scene.cache.set_eviction_policy("lru")
    release_all(scene)
    scene.cache.allocate(prompt(80, 16))
    scene.cache.check()


def serve_until_blocks_are_evicted(scene: Broken) -> None:
    for number in range(60, 80):
        scene.cache.free(scene.prefilled(prompt(number, 8)))


def test_a_failure_at_grow() -> None:
    scene = Allocate()
    scene.policy.raising = {"grow"}
    scene.cache.resize(14)
    scene.cache.check()
    scene.fill()
    refused(scene, "grow raised KeyError")


def test_what_needs_no_eviction_goes_on_with_a_broken_policy() -> None:
    pool = BlockPool(6, 4)
    policy = Faulty(6)
    pool.set_eviction_policy(lambda num_blocks: policy)
    lease = pool.get_new_blocks(2)
    pool.cache_full_blocks(lease, list(range(8)))
    policy.raising = {"insert"}
    pool.free_blocks(lease)
    assert len(pool.get_new_blocks(3)) == 3
    with pytest.raises(PolicyError, match="insert raised KeyError"):
        pool.get_new_blocks(1)
    pool.check()
    assert len(pool.get_cached_blocks(list(range(8)))) == 2


# ---------------------------------------------------------------- making one


class Unmade(EvictionPolicy):
    """It cannot even be made."""

    def __init__(self, num_blocks: int) -> None:
        raise RuntimeError(f"no room for {num_blocks}")


def test_a_policy_that_cannot_be_made() -> None:
    with pytest.raises(PolicyError, match="Unmade: making it raised RuntimeError: no room for 12"):
        KVCacheManager(CacheConfig(12, 4, eviction_policy=Unmade))
    scene = Allocate()
    before = scene.facts()
    with pytest.raises(PolicyError, match="Unmade: making it raised RuntimeError: no room for 12"):
        scene.cache.set_eviction_policy(Unmade)
    assert scene.facts() == before
    scene.cache.check()
    scene.call()


@pytest.mark.parametrize(
    "bad", ["LRU", "", None, 7, EvictionPolicy(4), lambda num_blocks: None, lambda num_blocks: "lru"]
)
def test_what_is_no_policy(bad: object) -> None:
    scene = Allocate()
    before = scene.facts()
    with pytest.raises(InvalidArgument, match="eviction_policy") as caught:
        scene.cache.set_eviction_policy(bad)
    assert "EvictionPolicy" in str(caught.value)
    assert scene.facts() == before
    asked = scene.policy.num_asked
    scene.call()
    assert scene.policy.num_asked > asked


def test_a_policy_without_methods_says_so_at_the_first_eviction() -> None:
    cache = Checked(4, eviction_policy=EvictionPolicy)
    cache.free(cache.prefilled(prompt(1, 12)))
    with pytest.raises(PolicyError, match="EvictionPolicy: insert raised NotImplementedError"):
        cache.allocate(prompt(2, 8))


def test_names_make_the_policies_they_name() -> None:
    assert type(make_policy("arc", 5)).__name__ == "ARC"
    assert make_policy(Faulty, 5).num_blocks == 5
