"""mini-sglang's cache manager on a pool: random traffic through its interface, and what it refuses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from blockyard import InvalidArgument, OutOfBlocks
from blockyard.errors import MissingExtra
from blockyard_testing.seeds import run_seed
from engines import mini_sglang
from engines.mini_sglang import CacheManager

from ..support.mini_engine import SmallManagers, SmallReq, drive


def prompts_of(draw: random.Random, count: int) -> list[list[int]]:
    heads = [[draw.randrange(50) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    return [draw.choice(heads) + [draw.randrange(50) for _ in range(draw.randint(1, 9))] for _ in range(count)]


def answers(num_pages: int, page_size: int, seed: int) -> dict[int, list[int]]:
    draw = random.Random(seed)
    cache = CacheManager(num_pages, page_size, torch.zeros((6, 64), dtype=torch.int32))
    managers = SmallManagers(cache, 6)
    for uid, prompt in enumerate(prompts_of(draw, 12)):
        managers.add(uid, torch.tensor(prompt, dtype=torch.int32), draw.randint(1, 8))
    done = drive(managers, cache, draw.choice((5, 16, 64)))
    cache.check_integrity()
    assert cache.pool.num_used_blocks == 0
    assert cache.available_size == num_pages * page_size
    assert len(managers.rows) == 6
    return done


@pytest.mark.parametrize("number", range(30))
def test_random_traffic_reads_what_was_written(number: int) -> None:
    seed = run_seed() + number
    page_size = (1, 2, 4)[number % 3]
    assert answers(64 // page_size, page_size, seed) == answers(2000, page_size, seed)


def pending(length: int, max_tokens: int = 2) -> SimpleNamespace:
    tokens = torch.arange(length, dtype=torch.int32)
    return SimpleNamespace(uid=7, input_ids=tokens, max_tokens=max_tokens, handle=None)


def test_all_but_the_last_token_can_be_found_and_a_handle_is_one_requests() -> None:
    cache = CacheManager(8, 4, torch.zeros((2, 64), dtype=torch.int32))
    asked = pending(12)
    asked.handle = cache.match_req(asked).cuda_handle
    cache.lock(asked.handle)
    req = SmallReq(asked, 0, 0, 12)
    cache.allocate_paged([req])
    req.complete_one()
    cache.cache_req(req, finished=False)
    handle = cache.match_req(asked).cuda_handle
    assert handle.cached_len == 8
    assert handle.get_matched_indices().tolist() == list(range(8))
    with pytest.raises(InvalidArgument, match="locked already"):
        cache.lock(asked.handle)
    cache.cache_req(req, finished=True)
    with pytest.raises(InvalidArgument, match="req 7 holds nothing"):
        cache.cache_req(req, finished=True)
    cache.check_integrity()


def test_what_does_not_fit_changes_nothing() -> None:
    cache = CacheManager(2, 4, torch.zeros((2, 64), dtype=torch.int32))
    asked = pending(12)
    asked.handle = cache.match_req(asked).cuda_handle
    cache.lock(asked.handle)
    with pytest.raises(OutOfBlocks, match="3 pages are needed for 1 requests; 2 are free"):
        cache.allocate_paged([SmallReq(asked, 0, 0, 12)])
    assert cache.available_size == 8
    cache.unlock(asked.handle)
    cache.unlock(asked.handle)


@pytest.mark.parametrize("handle", [None, 3])
def test_a_request_without_a_handle_is_named_and_changes_nothing(handle: object) -> None:
    cache = CacheManager(8, 4, torch.zeros((2, 64), dtype=torch.int32))
    asked = pending(12)
    asked.handle = cache.match_req(asked).cuda_handle
    cache.lock(asked.handle)
    whole, bare = SmallReq(asked, 0, 0, 12), SmallReq(asked, 1, 0, 12)
    bare.cache_handle = handle
    calls = (
        lambda: cache.allocate_paged([whole, bare]),
        lambda: cache.cache_req(bare, finished=False),
        lambda: cache.cache_req(bare, finished=True),
    )
    for call in calls:
        with pytest.raises(InvalidArgument, match=f"cache_handle of req 7 is {handle}; it must be a CacheHandle"):
            call()
    for call in (lambda: cache.lock(handle), lambda: cache.unlock(handle)):
        with pytest.raises(InvalidArgument, match=f"^handle is {handle}; it must be a CacheHandle"):
            call()
    assert cache.available_size == 32
    cache.unlock(asked.handle)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("row", "length", "error"),
    [
        (2, 8, "table_idx of req 7 is 2; page_table has 2 rows"),
        (-1, 8, "table_idx of req 7 is -1"),
        (1, 9, "device_len of req 7 is 9, which is 3 pages of 4 tokens; a row of page_table has 10 slots"),
    ],
)
def test_what_the_page_table_has_no_room_for_takes_no_page(row: int, length: int, error: str) -> None:
    """A row that was not written would be read the next time: the request had its pages, and none was missing."""
    cache = CacheManager(8, 4, torch.full((2, 10), -1, dtype=torch.int32))
    handles = [cache.match_req(pending(length)).cuda_handle for _ in range(2)]
    for handle in handles:
        cache.lock(handle)
    good, bad = pending(8), pending(length)
    good.handle, bad.handle = handles
    with pytest.raises(InvalidArgument, match=error):
        cache.allocate_paged([SmallReq(good, 0, 0, 8), SmallReq(bad, row, 0, length)])
    assert cache.available_size == 32
    assert (cache.page_table == -1).all()


def test_a_request_without_tokens_is_named() -> None:
    cache = CacheManager(8, 4, torch.zeros((2, 64), dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="input_ids of req 7 is empty; it must have at least 1 token"):
        cache.match_req(pending(0))


def test_it_is_installed_before_the_first_request() -> None:
    old = SimpleNamespace(num_pages=20, page_size=4, page_table=torch.zeros((2, 64), dtype=torch.int32))
    managers = SimpleNamespace(runnable=False, cache_manager=old)
    idle = SimpleNamespace(runnable=False)
    scheduler = SimpleNamespace(cache_manager=old, prefill_manager=managers, decode_manager=idle)
    installed = mini_sglang.install(scheduler, eviction_policy="fifo")
    assert scheduler.cache_manager is managers.cache_manager is installed
    assert installed.available_size == 80
    managers.runnable = True
    with pytest.raises(InvalidArgument, match="has requests"):
        mini_sglang.install(scheduler)


class OldManager:
    """A cache manager of mini-sglang that frees what a request has computed by another call."""

    num_pages, page_size, page_table = 20, 4, torch.zeros((2, 64), dtype=torch.int32)

    def cache_req(self, req: Any) -> None:
        """Cache it, and keep it locked."""


def test_mini_sglang_with_other_methods_is_refused() -> None:
    idle = SimpleNamespace(runnable=False)
    scheduler = SimpleNamespace(cache_manager=OldManager(), prefill_manager=idle, decode_manager=idle)
    with pytest.raises(MissingExtra, match=r"needs mini-sglang of 2026: pip install .*: cache_req\(self, req\)$"):
        mini_sglang.install(scheduler)
    assert isinstance(scheduler.cache_manager, OldManager)


def test_what_is_no_scheduler_is_named() -> None:
    with pytest.raises(InvalidArgument, match="scheduler is a int; it must be mini-sglang's"):
        mini_sglang.install(3)
