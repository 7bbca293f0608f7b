"""Our policies as vLLM's `CachePolicy`, on a small tier that makes the same calls as vLLM's.

`tests/interop` has vLLM's own manager. Its abstract class is here as signatures.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard_testing.seeds import run_seed
from blockyard_vllm.chunk_order import ChunkOrder

from ..support.small_tier import Access, Chunk, Context, SmallTier, name_of, prompts_of

BASE, DOOR = "vllm.v1.kv_offload.cpu.policies.base", "blockyard_vllm.cpu_policy"
POLICIES = [
    "lru",
    "fifo",
    "lfu",
    "density",
    "s3fifo",
    "arc",
]

#: vLLM 0.33's `CachePolicy`; 0.32 has no `on_request_access`, and its `insert` no context.
SIGNATURES = {
    "__init__": "self, cache_capacity",
    "get": "self, key",
    "insert": "self, key, chunk, req_context",
    "remove": "self, key",
    "touch": "self, keys, req_context",
    "on_store_miss": "self, keys, req_context",
    "on_request_access": "self, keys, req_context",
    "on_request_finished": "self, key_groups, insertion_only_keys, reused_keys, req_context",
    "evict": "self, n, protected",
    "clear": "self",
    "mark_evictable": "self, key",
    "mark_non_evictable": "self, key",
}


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the module given to vLLM, with an empty class in place of vLLM's."""
    base = ModuleType(BASE)
    base.CachePolicy = type("CachePolicy", (), {})  # type: ignore[attr-defined]
    parts = BASE.split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    monkeypatch.setitem(sys.modules, BASE, base)
    sys.modules.pop(DOOR, None)
    yield importlib.import_module(DOOR)
    sys.modules.pop(DOOR, None)


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_accept_vllms_arguments(name: str) -> None:
    """A name that 0.32 does not give must have a default; otherwise the names are the same."""
    parameters = list(inspect.signature(getattr(ChunkOrder, name)).parameters.values())
    optional = {"insert": {"req_context"}, "__init__": {"policy"}}.get(name, set())
    given = [parameter.name for parameter in parameters if parameter.name != "policy"]
    assert ", ".join(given) == SIGNATURES[name]
    assert {p.name for p in parameters if p.default is not inspect.Parameter.empty} == optional


@pytest.mark.parametrize("name", [*POLICIES, "LRU", "ARC"])
def test_module_has_a_class_for_every_policy(door: ModuleType, name: str) -> None:
    made = getattr(door, name)
    assert issubclass(made, sys.modules[BASE].CachePolicy)
    assert made is getattr(door, name)
    assert isinstance(made(cache_capacity=7), ChunkOrder)
    assert made(cache_capacity=7).cache_capacity == 7


@pytest.mark.parametrize("name", ["dice", "dice:lru", "lru:", "_lru", "", "Lru"])
def test_module_has_no_class_for_unknown_names(door: ModuleType, name: str) -> None:
    with pytest.raises(AttributeError, match=r"eviction_policy is .*LRU and ARC are Blockyard's too"):
        getattr(door, name)


@pytest.mark.parametrize("capacity", [-1, -100, 2**27, 2**31, 2**64, True, 1.5, "8", None])
def test_invalid_capacity_is_refused(capacity: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^cache_capacity is {capacity!r}; it must be an integer from 0 to 134"):
        ChunkOrder(capacity)


def test_chunk_outside_the_tier_is_refused() -> None:
    order, context = ChunkOrder(2), Context({})
    order.insert(b"one0000", Chunk(1), context)
    for key, number, reason in (
        (b"two0000", 2, "tier has 2"),
        (b"two0000", -1, "tier has 2"),
        (b"two0000", 1, "already"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            order.insert(key, Chunk(number), context)
    with pytest.raises(InvalidArgument, match="already"):
        order.insert(b"one0000", Chunk(0), context)
    assert order.get(b"two0000") is None
    order.check()


def one_step(tier: SmallTier, running: list[Access], prompts: list[list[bytes]], draw: random.Random) -> None:
    """Do one thing that vLLM may do next."""
    action = draw.random()
    if action < 0.25 and prompts:
        running.append(tier.begin(prompts.pop(), draw.choice((16, 16, None))))
        access = running[-1]
        num_ready = tier.num_ready(access.keys)
        if num_ready:
            tier.load(access, access.keys[draw.randrange(num_ready) : num_ready])
    elif action < 0.55 and running:
        access = draw.choice(running)
        start = draw.randrange(len(access.keys))
        tier.store(access, access.keys[start : start + draw.randint(1, 6)])
    elif action < 0.8 and tier.transfers:
        tier.end_transfer(draw.randrange(len(tier.transfers)), succeeds=draw.random() < 0.9)
    elif action < 0.85:
        tier.policy.touch(draw.sample(list(tier.chunks), min(len(tier.chunks), 3)), Context({}))
    elif running:
        tier.finish(running.pop(draw.randrange(len(running))))


@pytest.mark.parametrize("tells_of_access", [True, False], ids=["0.33", "0.32"])
@pytest.mark.parametrize("name", POLICIES)
def test_random_traffic_keeps_all_invariants(name: str, tells_of_access: bool) -> None:
    """`evict` evicts exactly what it reports or changes nothing; at the end everything can be evicted."""
    for seed in range(run_seed(), run_seed() + 8):
        draw = random.Random(seed)
        num_chunks = draw.choice((0, 1, 5, 12, 40))
        tier = SmallTier(ChunkOrder(num_chunks, name), num_chunks, tells_of_access)
        prompts, running = prompts_of(draw, 60, draw.choice((1, 1, 2))), []
        for step in range(400):
            one_step(tier, running, prompts, draw)
            tier.policy.check()
            if step == 250 and seed % 4 == 0:
                tier.clear(num_chunks)
                running = []
        while tier.transfers:
            tier.end_transfer(0)
        for access in running:
            tier.finish(access)
        tier.policy.check()
        assert tier.policy.evict(len(tier.chunks) + 1, set()) is None
        assert dict(tier.policy.evict(len(tier.chunks), set())) == tier.chunks
        tier.policy.check()


def serve(tier: SmallTier, keys: list[bytes]) -> int:
    """Serve one request alone; return its hits."""
    access = tier.begin(keys)
    num_hits = tier.num_ready(keys)
    if num_hits:
        tier.load(access, keys[:num_hits])
        tier.end_transfer(0)
    if num_hits < len(keys) and tier.store(access, keys[num_hits:]) and tier.transfers:
        tier.end_transfer(0)
    tier.finish(access)
    return num_hits


def least_recently_used(prompts: list[list[bytes]], num_chunks: int) -> list[int]:
    """The same policy as a dict in order of use; the end of a prompt comes before its beginning."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for keys in prompts:
        num_hits = next((place for place, key in enumerate(keys) if key not in cached), len(keys))
        hits.append(num_hits)
        missing = [key for key in keys[num_hits:] if key not in cached]
        can_go = [key for key in cached if key not in keys]
        lacking = len(cached) + len(missing) - num_chunks
        if lacking <= len(can_go):
            for key in can_go[: max(lacking, 0)]:
                del cached[key]
            cached.update(dict.fromkeys(missing))
        for key in reversed(keys):
            if key in cached:
                cached.move_to_end(key)
    return hits


@pytest.mark.parametrize("num_chunks", [12, 30, 60])
def test_lru_is_least_recently_used(num_chunks: int) -> None:
    for seed in range(run_seed(), run_seed() + 10):
        prompts = prompts_of(random.Random(seed), 200, 1)
        tier = SmallTier(ChunkOrder(num_chunks, "lru"), num_chunks)
        assert [serve(tier, keys) for keys in prompts] == least_recently_used(prompts, num_chunks)
        assert tier.num_evicted > 100


def test_policy_sees_requests_as_in_a_pool() -> None:
    """The policy is told of hits first, and of idle blocks once transfers end: the last first, with depths."""
    told: list[tuple[Any, ...]] = []

    class Listener:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *given: told.append((name, *given))

    order = ChunkOrder(8, "lru")
    order.policy = Listener()  # type: ignore[assignment]
    tier = SmallTier(order, 8)
    keys = [name_of(number) for number in (11, 12, 13)]
    access = tier.begin(keys)
    tier.store(access, keys[:2])
    tier.store(access, keys[2:])
    tier.end_transfer(0)
    tier.finish(access)
    numbers = [int.from_bytes(key, "big") % (2**61 - 1) for key in keys]
    blocks = [tier.chunks[key].chunk_id + 1 for key in keys]
    assert told == []
    tier.end_transfer(0)
    assert told == [("insert", blocks[place], numbers[place], place) for place in (2, 1, 0)]
    told.clear()
    again = tier.begin(keys)
    tier.load(again, keys[1:])
    tier.end_transfer(0)
    assert told == [
        ("hit", blocks[1], numbers[1]),
        ("remove", blocks[1]),
        ("hit", blocks[2], numbers[2]),
        ("remove", blocks[2]),
    ]
    told.clear()
    tier.finish(again)
    assert told == [("insert", blocks[place], numbers[place], place) for place in (2, 1)]


def test_chunks_in_use_are_evicted_last_oldest_request_first() -> None:
    tier = SmallTier(ChunkOrder(6, "lru"), 6)
    first, second, done = ([name_of(10 * n + place) for place in range(2)] for n in (1, 2, 3))
    for keys in (first, second):
        tier.store(tier.begin(keys), keys)
        tier.end_transfer(0)
    serve(tier, done)
    gone = [key for _ in range(6) for key, _ in tier.policy.evict(1, set())]
    assert gone == [done[1], done[0], first[1], first[0], second[1], second[0]]
