"""SGLang's prefix cache on a pool: random traffic through its interface, what it refuses, and what it was written for.

Where SGLang is not installed, small parts with its names stand in its place (`support/small_sglang.py`);
`make interop-sglang` runs the same tests with SGLang's own.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import blockyard_sglang as adapter
from blockyard import InvalidArgument, InvariantError, StaleBlocks
from blockyard.signatures import moved_methods
from blockyard_testing.places import source_of
from blockyard_testing.seeds import run_seed

from ..support.sglang_engine import Engine, key_of, new_allocator, new_request, new_rows  # first: it finds SGLang
from ..support.small_sglang import HAS_SGLANG, SETTINGS

from blockyard_sglang.cache import BlockPoolCache  # isort: skip
from blockyard_sglang.contract import CONTRACT, require_known_sglang  # isort: skip
from blockyard_sglang.order import weight_order  # isort: skip
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # isort: skip
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # isort: skip

ADAPTER = source_of("blockyard_sglang")
POLICIES = ("lru", "lfu", "fifo", "s3fifo", "arc", "score", "density")


def engine(num_pages: int = 20, page_size: int = 4, **params: Any) -> Engine:
    return Engine(BlockPoolCache, num_pages, page_size, **params)


def served(side: Engine, tokens: list[int], **keys: Any) -> Any:
    """Return a request that is computed completely and still running."""
    req = new_request("r", tokens, **keys)
    side.match(req)
    side.admit(req)
    assert side.compute(req, len(tokens) - req.computed)
    side.checkpoint(req)
    return req


def free_of_all(side: Engine) -> None:
    """Check that nothing is locked, and that every page is either cached or free."""
    side.cache.sanity_check()
    assert side.cache.pool.leases() == []
    evictable, locked, total, available = side.sizes()
    assert (evictable, locked) == (total, 0)
    assert total + available == side.num_pages * side.page_size


# ---------------------------------------------------------------- traffic


def traffic(side: Engine, seed: int, steps: int) -> int:
    """Random requests in all phases; `sanity_check` after each step. Returns how many tokens were hit."""
    draw = random.Random(seed)
    heads = [[draw.randrange(50) for _ in range(draw.randint(20, 60))] for _ in range(3)]
    waiting: list[Any] = []
    running: list[Any] = []
    hits = 0
    for step in range(steps):
        choice = draw.random()
        if choice < 0.3 and len(waiting) < 4:
            tokens = draw.choice(heads) + [draw.randrange(50) for _ in range(draw.randint(1, 30))]
            waiting.append(new_request(f"r{step}", tokens, draw.choice((None, None, "a")), draw.choice((None, "s"))))
        elif choice < 0.5 and waiting and len(running) < 6:
            req = waiting[0]
            hit = side.match(req)
            chunk = draw.randint(1, len(req.full_untruncated_fill_ids) - hit)
            if side.lacking(req, chunk) == 0:
                hits += hit
                side.admit(waiting.pop(0))
                assert side.compute(req, chunk)
                running.append(req)
            else:
                # What is to be admitted may be evicted for it, and is matched again then.
                side.evict(side.lacking(req, chunk))
        elif choice < 0.85 and running:
            advance(side, draw, running, waiting)
        elif choice < 0.95 and running:
            req = running.pop(draw.randrange(len(running)))
            side.release(req, keep=draw.random() < 0.7)
        elif choice < 0.99:
            side.evict(draw.randint(0, 3 * side.page_size))
        side.cache.sanity_check()
    for req in running:
        side.release(req, keep=True)
    return hits


def advance(side: Engine, draw: random.Random, running: list[Any], waiting: list[Any]) -> None:
    """Compute the next chunk of a prompt, or a token; retract the request if no page is left."""
    req = draw.choice(running)
    tokens = req.full_untruncated_fill_ids
    if req.computed == len(tokens):
        tokens.append(draw.randrange(50))
    elif draw.random() < 0.7:
        side.checkpoint(req)
    count = draw.randint(1, len(tokens) - req.computed)
    side.evict(side.lacking(req, count))
    if not side.compute(req, count):
        running.remove(req)
        side.release(req, keep=False)
        waiting.append(req)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", range(4))
def test_random_traffic_reads_what_was_written(policy: str, number: int) -> None:
    page_size = (1, 2, 4, 16)[number]
    side = engine(320 // page_size, page_size, eviction_policy=policy)
    assert traffic(side, run_seed() + number, 250) > 0
    free_of_all(side)
    side.evict(10**6)
    assert side.sizes() == (0, 0, 0, side.num_pages * page_size)


def test_equal_pages_of_two_requests_are_merged() -> None:
    side = engine()
    tokens = list(range(10))
    first, second = new_request("a", tokens), new_request("b", tokens)
    for req in (first, second):
        assert side.match(req) == 0
        side.admit(req)
        assert side.compute(req, 10)
    side.checkpoint(first)
    assert side.sizes() == (0, 8, 8, 80 - 6 * 4)
    side.checkpoint(second)
    assert side.sizes() == (0, 8, 8, 80 - 4 * 4)
    rows = side.rows.req_to_token
    assert rows[first.kv.req_pool_idx, :8].tolist() == rows[second.kv.req_pool_idx, :8].tolist()
    side.release(first, keep=False)
    assert side.sizes()[:3] == (0, 8, 8)
    side.release(second, keep=True)
    free_of_all(side)


def test_requests_with_different_extra_keys_or_salts_share_nothing() -> None:
    side = engine()
    tokens = list(range(9))
    kinds = [{}, {"extra_key": "a"}, {"salt": "a"}, {"extra_key": "a", "salt": "a"}, {"extra_key": ""}]
    for kind in kinds:
        req = new_request("r", tokens, **kind)
        assert side.match(req) == 0
        side.release(served(side, tokens, **kind), keep=True)
        assert side.match(req) == 8
    free_of_all(side)


def test_lookup_refreshes_only_under_lru() -> None:
    for policy, is_there in (("lru", 8), ("fifo", 0)):
        side = engine(8, 4, eviction_policy=policy)
        old, young = new_request("a", list(range(9))), new_request("b", list(range(20, 29)))
        for req in (old, young):
            side.match(req)
            side.admit(req)
            side.compute(req, 9)
            side.release(req, keep=True)
        side.match(old)
        side.evict(8)
        assert side.match(old) == is_there
        assert side.match(young) == 8 - is_there


def test_blocks_evicted_after_a_match_cannot_be_locked() -> None:
    side = engine(eviction_policy="fifo")
    side.release(served(side, list(range(9))), keep=True)
    req = new_request("b", list(range(9)))
    assert side.match(req) == 8
    side.evict(4)
    with pytest.raises(StaleBlocks):
        side.cache.lock(req.last_node)
    assert side.sizes()[1] == 0
    side.cache.sanity_check()


def test_locks_are_counted_and_released_once() -> None:
    side = engine()
    side.release(served(side, list(range(9))), keep=True)
    req = new_request("b", list(range(9)))
    side.match(req)
    cache, node = side.cache, req.last_node
    assert cache.inc_lock_ref(node).delta == -8
    assert cache.inc_lock_ref(node).delta == 0
    assert side.evict(100) == 0
    assert cache.dec_lock_ref(node).delta == 0
    assert cache.dec_lock_ref(node).delta == 8
    with pytest.raises(InvalidArgument, match="not locked"):
        cache.dec_lock_ref(node)
    root = cache.root_node_handle()
    lock = cache.lock(root)
    assert cache.path_device_indices(root).tolist() == []
    cache.unlock(lock)
    free_of_all(side)


def test_a_request_is_cached_while_its_node_is_locked_by_another() -> None:
    side = engine()
    side.release(served(side, list(range(9))), keep=True)
    req = new_request("b", list(range(20)))
    side.match(req)
    other = side.cache.lock(req.last_node)
    side.admit(req)
    side.compute(req, 12)
    side.checkpoint(req)
    side.cache.unlock(other)
    assert side.sizes()[:2] == (0, 20)
    ended = req.last_node
    side.release(req, keep=False)
    free_of_all(side)
    with pytest.raises(InvalidArgument, match="match the prefix again"):
        side.cache.lock(ended)


def test_reset_clears_the_cache_but_keeps_locks() -> None:
    side = engine()
    req = served(side, list(range(9)))
    side.cache.reset()
    assert side.sizes()[:3] == (0, 0, 0)
    assert side.match(new_request("b", list(range(9)))) == 0
    side.cache.unlock(req.lock)
    side.cache.sanity_check()


# ---------------------------------------------------------------- insert, evict


def test_insert_reports_hits_and_evict_frees_pages() -> None:
    side = engine(8, 4)
    slots = side.allocator.alloc(16)
    result = side.cache.insert(InsertParams(key=key_of(range(10)), value=slots[:10]))
    assert (result.prefix_len, side.sizes()[0]) == (0, 8)
    result = side.cache.insert(InsertParams(key=key_of(range(15)), value=slots[:15]))
    assert (result.prefix_len, side.sizes()[0]) == (8, 12)
    assert side.cache.path_device_indices(result.last_device_node).tolist() == slots[:12].tolist()
    assert side.cache.all_values_flatten().tolist() == slots[:12].tolist()
    assert side.cache.insert(InsertParams(key=key_of([1]), value=slots[:1])).prefix_len == 0
    assert side.cache.match_prefix(MatchPrefixParams(key=key_of([1]))).device_prefix_len == 0
    assert side.cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 8
    assert side.cache.evict(EvictParams(num_tokens=0)).num_tokens_evicted == 0
    assert side.allocator.available_size() == 16 + 8
    assert side.match(new_request("a", list(range(15)))) == 4


def test_pages_that_cannot_be_cached_change_nothing() -> None:
    side = engine(8, 4)
    req = served(side, list(range(9)))
    cached = side.cache.path_device_indices(req.last_node)
    before = side.sizes()
    for slots, error in (
        (cached, "held 1 times"),
        (torch.arange(1, 9), r"slots begin at \[1, 5\]"),
        (torch.arange(8), "block_ids.0. is 0"),
        (torch.arange(8) + 4 * 8, r"block_ids\[1\] is 9"),
        (torch.arange(4), "value has 4 slots; key has 8 tokens"),
    ):
        with pytest.raises(InvalidArgument, match=error):
            side.cache.insert(InsertParams(key=key_of(range(30, 38)), value=slots))
        assert side.sizes() == before
        side.cache.sanity_check()
    side.release(req, keep=False)
    before = side.sizes()
    with pytest.raises(InvalidArgument, match=r"block_ids\[0\] is \d+, which is cached"):
        side.cache.insert(InsertParams(key=key_of(range(30, 38)), value=cached))
    assert side.sizes() == before
    assert side.match(new_request("again", list(range(9)))) == 8
    free_of_all(side)


def test_handing_out_a_cached_page_again_is_refused_and_changes_nothing() -> None:
    """The request keeps its lock and its pages, and can go on when its row has a page of its own."""
    side = engine(8, 4)
    idle = served(side, list(range(100, 109)))
    wrong = side.cache.path_device_indices(idle.last_node)[:4]
    side.release(idle, keep=False)
    served(side, [*range(8), 50])
    req = served(side, list(range(4)))
    req.full_untruncated_fill_ids.extend(range(4, 12))
    assert side.compute(req, 8)
    row = side.rows.req_to_token[req.kv.req_pool_idx]
    own = row[8:12].clone()
    row[8:12] = wrong.to(row.dtype)
    before = (side.sizes(), row.tolist(), req.lock, len(req.lock.node), side.cache.pool.leases())
    for page, error in ((wrong, "which is cached"), (row[:4].clone(), "held 2 times")):
        row[8:12] = page.to(row.dtype)
        before = (side.sizes(), row.tolist(), req.lock, len(req.lock.node), side.cache.pool.leases())
        with pytest.raises(InvalidArgument, match=error):
            side.cache.checkpoint(req, up_to=12)
        assert before == (side.sizes(), row.tolist(), req.lock, len(req.lock.node), side.cache.pool.leases())
        side.cache.sanity_check()
    row[8:12] = own
    side.checkpoint(req)
    assert req.kv.cache_protected_len == 12


def test_a_page_that_is_cached_and_free_is_found() -> None:
    side = engine(8, 4)
    req = served(side, list(range(9)))
    side.allocator.free_segment(side.cache.path_device_indices(req.last_node), start_pos=0)
    with pytest.raises(InvariantError, match="both cached and free in the allocator"):
        side.cache.sanity_check()


def test_bigram_key_is_refused() -> None:
    side = engine()
    key = key_of(range(9))
    key.is_bigram = True
    with pytest.raises(InvalidArgument, match="of token pairs"):
        side.cache.match_prefix(MatchPrefixParams(key=key))


def test_a_list_of_looked_up_tokens_may_grow_afterwards() -> None:
    side = engine()
    tokens = array("q", range(9))
    key = key_of([])
    key.token_ids = tokens
    side.cache.match_prefix(MatchPrefixParams(key=key))
    tokens.append(1)


# ---------------------------------------------------------------- the order of waiting requests


def slow_order(paths: list[tuple[int, ...]]) -> list[int]:
    """Return the same order from a tree with one node per block."""

    def order(prefix: tuple[int, ...], members: list[int]) -> list[int]:
        deeper: dict[int, list[int]] = {}
        for index in members:
            if len(paths[index]) > len(prefix):
                deeper.setdefault(paths[index][len(prefix)], []).append(index)
        groups = sorted(deeper.items(), key=lambda item: -len(item[1]))
        below = [index for block, group in groups for index in order((*prefix, block), group)]
        return below + [index for index in members if len(paths[index]) == len(prefix)]

    return order((), list(range(len(paths))))


@pytest.mark.parametrize("number", range(40))
def test_waiting_requests_are_ordered_by_shared_prefixes(number: int) -> None:
    draw = random.Random(run_seed() + number)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw.randint(0, 25)):
        known = draw.choice(paths)
        paths.append(
            known[: draw.randint(0, len(known))] + tuple(draw.choices((1, 2, 300, 70000), k=draw.randint(0, 3)))
        )
    draw.shuffle(paths)
    assert weight_order([np.array(path, np.int32) for path in paths]) == slow_order(paths)


def test_the_scheduler_uses_the_order_of_shared_prefixes() -> None:
    side = engine()
    for tokens in (list(range(9)), list(range(30, 39)), list(range(5)) + list(range(50, 59))):
        side.release(served(side, tokens), keep=True)
    asked = [list(range(30, 39)), list(range(9)), [90], list(range(5)) + list(range(50, 59))]
    waiting = [new_request("w", tokens) for tokens in asked]
    for req in waiting:
        side.match(req)
    assert side.cache.dfs_weight_order([req.last_node for req in waiting]) == [1, 3, 0, 2]


# ---------------------------------------------------------------- what it refuses, and what it was written for


def params(**changed: Any) -> Any:
    return dataclasses.replace(CacheInitParams(False, new_rows(), new_allocator(8, 4), 4), **changed)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"disable": True}, "--disable-radix-cache"),
        ({"is_eagle": True}, "EAGLE"),
        ({"sliding_window_size": 128}, "sliding windows"),
        ({"enable_kv_cache_events": True}, "--kv-events-config"),
        ({"enable_session_radix_cache": True}, "--enable-session-radix-cache"),
        ({"eviction_policy_config": {"threshold": 1}}, "--radix-eviction-policy-config"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"page_size": 8}, "an allocator with pages of 4 tokens for a cache of 8"),
        ({"eviction_policy": "tlru"}, "--radix-eviction-policy is tlru"),
        ({"eviction_policy": "proud:lru"}, "--radix-eviction-policy is proud:lru"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(changed: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error):
        BlockPoolCache(params(**changed))


def context(**changed: Any) -> Any:
    model = SimpleNamespace(is_multimodal=changed.pop("is_multimodal", False))
    parts = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "enable_hierarchical_cache": False} | changed
    return SimpleNamespace(params=params(), model_config=model, **parts)


@pytest.mark.skipif(HAS_SGLANG, reason="SGLang has no settings before a server is configured")
@pytest.mark.parametrize(
    ("changed", "settings", "error"),
    [
        ({"is_hybrid_swa": True}, {}, "sliding windows"),
        ({"is_hybrid_ssm": True}, {}, "states"),
        ({"is_multimodal": True}, {}, "images or sounds"),
        ({"enable_hierarchical_cache": True}, {}, "--enable-hierarchical-cache"),
        ({}, {"enable_lmcache": True}, "--enable-lmcache"),
        ({}, {"enable_flexkv": True}, "--enable-flexkv"),
        ({}, {"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
        ({}, {"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ],
)
def test_unsupported_servers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], settings: dict[str, Any], error: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setitem(SETTINGS, name, value)
    with pytest.raises(InvalidArgument, match=error):
        adapter.make_cache(context(**changed))


def test_registration_is_idempotent_and_offers_policies() -> None:
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    for _ in range(2):
        adapter.register()
    assert get_radix_cache_factory("blockyard") is adapter.make_cache
    assert sorted(RADIX_EVICTION_POLICY_CHOICES) == sorted(set(RADIX_EVICTION_POLICY_CHOICES))
    assert {"density", "lru"} <= set(RADIX_EVICTION_POLICY_CHOICES)
    if not HAS_SGLANG:
        assert isinstance(adapter.make_cache(context()), BlockPoolCache)


def test_every_offered_policy_is_one_of_the_pools() -> None:
    for name in adapter.POLICIES:
        assert BlockPoolCache(params(eviction_policy=name)).eviction_policy == name


def test_installed_sglang_matches_the_contract() -> None:
    assert moved_methods(CONTRACT) == []
    require_known_sglang()


def test_moved_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arguments in CONTRACT.items():
        method = name.rpartition(":")[2]
        assert moved_methods(CONTRACT, (CONTRACT | {name: ""}).__getitem__) == [f"{method} is gone"]
        moved = moved_methods(CONTRACT, (CONTRACT | {name: f"{arguments}, more="}).__getitem__)
        assert moved == [f"{method}({arguments}, more=); the adapter knows ({arguments})"]
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    monkeypatch.setattr(BasePrefixCache, "evict", lambda self, params, more: None)
    with pytest.raises(RuntimeError, match=r"0\.5\.23.*BasePrefixCache\.evict\(self, params, more\)"):
        require_known_sglang()


def test_evicted_tokens_are_counted_in_sglangs_metrics() -> None:
    if HAS_SGLANG:
        pytest.skip("SGLang's metrics need a configured server")
    side = engine(enable_metrics=True)
    side.release(served(side, list(range(9))), keep=True)
    side.evict(8)
    assert side.cache.num_counted == 2 * 4


@pytest.mark.parametrize("path", sorted(ADAPTER.glob("*.py")), ids=lambda path: path.name)
def test_only_public_attributes_of_pools_are_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value).rpartition(".")[2]
            assert owner not in ("pool", "lease", "found", "held", "node"), ast.unparse(node)
