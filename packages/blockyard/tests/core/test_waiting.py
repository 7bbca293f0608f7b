"""What waiting requests lack: always what the manager would compute, at a cost that does not grow with their number."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, InvalidArgument, InvariantError, KVCacheManager, LayerGroup, LoRA, Span
from blockyard.config import cache_config
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..support.waiting_world import run_states_world, run_world

NUM_WORLDS = draws(120, 16)
NUM_STATE_WORLDS = draws(60, 8)
NUM_WAITING = 4096


def manager(**fields: object) -> KVCacheManager:
    given = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64, "watermark": 0.0, **fields}
    return KVCacheManager(cache_config(**given))


def compute(cache: KVCacheManager, tokens: list[int], **fields: object) -> int:
    seq = cache.allocate(tokens, **fields)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    return seq


# ---------------------------------------------------------------- exactness


def test_missing_is_what_the_manager_would_compute() -> None:
    counts: Counter[str] = Counter()
    first = run_seed() % 10**6
    for seed in range(first, first + NUM_WORLDS):
        counts += run_world(seed, 120)
    seeds.lines.append(f"waiting: {NUM_WORLDS} worlds, {counts['num_answers']} answers, {counts['admitted']} admitted")
    assert min(counts[name] for name in ("num_answers", "num_joining", "num_hits", "admitted")) > 0


def test_missing_is_exact_with_states() -> None:
    counts: Counter[str] = Counter()
    first = run_seed() % 10**6
    for seed in range(first, first + NUM_STATE_WORLDS):
        counts += run_states_world(seed, 60)
    assert counts["num_hits"] > 0


def test_tokens_that_a_running_sequence_computes_are_joined() -> None:
    cache = manager()
    queue = cache.waiting()
    ticket = queue.add(range(12))
    seq = cache.allocate(range(10))
    assert (queue.missing(ticket), queue.joining(ticket)) == (4, 8)
    cache.commit([seq], cache.reserve([seq], 5).num_scheduled)
    assert (queue.missing(ticket), queue.joining(ticket)) == (4, 4)
    cache.commit([seq], cache.reserve([seq], 5).num_scheduled)
    assert (queue.missing(ticket), queue.joining(ticket)) == (4, 0)


def test_a_pending_block_replaces_a_computed_one() -> None:
    """Of two equal blocks the computed one is uncached; the other is still being computed."""
    pool = BlockPool(20, 4)
    first, second = pool.get_new_blocks(1), pool.get_new_blocks(1)
    queue = pool.waiting()
    ticket = queue.add(range(9))
    pool.cache_full_blocks(first, range(4))
    pool.cache_full_blocks(second, range(4))
    assert queue.missing(ticket) == 5
    pool.uncache(list(first))
    assert queue.missing(ticket) == 5
    pool.uncache(list(second))
    assert queue.missing(ticket) == 9
    pool.check()


def test_keys_and_spans_are_part_of_the_prompt() -> None:
    cache = manager()
    queue = cache.waiting()
    image = Span("image", 4, 4)
    prompt = list(range(13))
    plain, adapted, pictured = (queue.add(prompt, extra_keys=keys) for keys in ((), (LoRA("a"),), (image,)))
    compute(cache, prompt, extra_keys=(LoRA("a"),))
    assert [queue.missing(ticket) for ticket in (plain, adapted, pictured)] == [13, 1, 13]
    compute(cache, prompt, extra_keys=(image,))
    assert [queue.missing(ticket) for ticket in (plain, adapted, pictured)] == [9, 1, 1]
    again = queue.add(prompt, extra_keys=(image,))
    assert queue.missing(again) == 1
    cache.reset_prefix_cache()
    assert [queue.missing(ticket) for ticket in (plain, adapted, pictured, again)] == [13] * 4
    cache.check()


def test_a_pool_says_what_its_lookup_leaves() -> None:
    pool = BlockPool(40, 2)
    queue = pool.waiting()
    rng = random.Random(run_seed())
    prompts = {}
    leases = []
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.5:
            prompts[queue.add(tokens)] = tokens
        elif rng.random() < 0.5 and pool.num_free_blocks > 6:
            lease = pool.get_cached_blocks(tokens)
            hit = len(lease)
            pool.extend(lease, len(tokens) // 2 - hit)
            pool.cache_full_blocks(lease, tokens, num_cached_blocks=hit)
            leases.append(lease)
        elif leases:
            pool.free_blocks(leases.pop(rng.randrange(len(leases))))
        if len(prompts) > 10:
            ticket = rng.choice(list(prompts))
            queue.remove(ticket)
            del prompts[ticket]
        for ticket, tokens in prompts.items():
            found = min(len(pool.find_cached_blocks(tokens)), (len(tokens) - 1) // 2)
            assert queue.missing(ticket) == len(tokens) - 2 * found
        pool.check()


def test_check_sees_a_wrong_index() -> None:
    cache = manager()
    queue = cache.waiting()
    queue.add(range(9))
    compute(cache, list(range(9)))
    cache.check()
    tree = queue.requests.tree
    tree.removed(cache._parts.token_blocks.index.content_of(1))
    with pytest.raises(InvariantError, match="ticket 1 reaches 0 blocks"):
        cache.check()


# ---------------------------------------------------------------- the order


def test_fewest_missing_come_first() -> None:
    cache = manager()
    queue = cache.waiting()
    long, short, equal = queue.add(range(30)), queue.add(range(50, 59)), queue.add(range(70, 79))
    assert queue.first(9) == [short, equal, long]
    assert queue.first() == [short]
    assert queue.first(0) == []
    compute(cache, list(range(30)))
    assert queue.first(9) == [long, short, equal]


def test_the_oldest_is_the_earliest_arrival() -> None:
    queue = manager().waiting()
    assert queue.oldest() is None
    late, early, equal = (queue.add([1, 2], arrived=time) for time in (2.0, 1.0, 1.0))
    assert queue.oldest() == early
    queue.remove(early)
    assert queue.oldest() == equal
    queue.remove(equal)
    assert queue.oldest() == late
    assert queue.tickets() == [late]
    assert len(queue) == 1


def test_arrivals_of_requests_that_left_are_forgotten() -> None:
    queue = manager().waiting()
    first = queue.add([1], arrived=0.0)
    for number in range(500):
        queue.remove(queue.add([1], arrived=1.0 + number))
    assert len(queue.requests._arrivals) < 60
    assert queue.oldest() == first


def test_a_bound_is_looked_up_before_it_is_believed() -> None:
    """The window has lost what the tree still finds: another request lacks fewer tokens."""
    groups = (LayerGroup(4), LayerGroup(4, 8))
    cache = KVCacheManager(CacheConfig(40, groups=groups, max_num_seqs=4, max_model_len=40, watermark=0.0))
    queue = cache.waiting()
    seq = compute(cache, list(range(24)))
    cache.free([seq])
    hit, cold = queue.add(range(24)), queue.add(range(100, 110))
    assert queue.first() == [hit]
    lease = cache.pool.get_new_blocks(cache.num_free_blocks - 6)
    assert queue.first(2) == sorted((hit, cold), key=queue.missing)
    cache.pool.free_blocks(lease)


# ---------------------------------------------------------------- what it costs


@pytest.fixture(scope="module")
def crowd() -> tuple[KVCacheManager, list[int], list[int]]:
    """Many requests that wait for one prefix of 400 blocks and end apart."""
    cache = manager(num_blocks=2000, max_model_len=8192)
    queue = cache.waiting()
    shared = list(range(1600))
    tickets = [queue.add([*shared, *(10_000 + number for _ in range(8))]) for number in range(NUM_WAITING)]
    return cache, shared, tickets


def test_a_block_is_one_step_however_many_wait(crowd: tuple[KVCacheManager, list[int], list[int]]) -> None:
    cache, shared, tickets = crowd
    queue = cache.waiting()
    tree = queue.requests.tree
    before = tree.num_steps
    seq = compute(cache, shared)
    num_came = tree.num_steps - before
    assert num_came <= 4 * 400
    assert {queue.missing(ticket) for ticket in tickets[::50]} == {8}
    cache.free([seq])
    before = tree.num_steps
    lease = cache.pool.get_new_blocks(cache.num_free_blocks)
    assert tree.num_steps - before <= 4 * 400
    assert {queue.missing(ticket) for ticket in tickets[::50]} == {1608}
    cache.pool.free_blocks(lease)


def test_what_nobody_waits_for_is_no_step(crowd: tuple[KVCacheManager, list[int], list[int]]) -> None:
    cache, _, _ = crowd
    tree = cache.waiting().requests.tree
    before = tree.num_steps
    cache.free([compute(cache, list(range(5000, 6000)))])
    assert tree.num_steps == before


def test_prompts_share_the_memory_of_their_beginning(crowd: tuple[KVCacheManager, list[int], list[int]]) -> None:
    cache, _, _ = crowd
    tree = cache.waiting().requests.tree
    assert tree.num_places == 400 + NUM_WAITING
    assert tree.num_edges == 2 + NUM_WAITING


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [-1]}, r"token_ids\[0\] is -1"),
        ({"num_seqs": 0}, "num_seqs is 0; it must be from 1"),
        ({"session": ""}, "session has 0 characters"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; it must be from 0"),
        ({"arrived": float("nan")}, "arrived is nan"),
        ({"arrived": None}, "arrived is None; it must be a number"),
    ],
)
def test_a_bad_request_is_refused(given: dict[str, object], message: str) -> None:
    queue = manager().waiting()
    with pytest.raises(InvalidArgument, match=message):
        queue.add(**{"token_ids": [1, 2, 3], **given})  # type: ignore[arg-type]
    assert len(queue) == 0
    queue.check()


@pytest.mark.parametrize("call", ["missing", "joining", "remove"])
def test_an_unknown_ticket_is_refused(call: str) -> None:
    queue = manager().waiting()
    ticket = queue.add([1, 2, 3])
    queue.remove(ticket)
    for number in (ticket, ticket + 1):
        with pytest.raises(InvalidArgument, match=f"ticket is {number}; no request waits with it"):
            getattr(queue, call)(number)
    with pytest.raises(InvalidArgument, match="ticket is 0; it must be from 1"):
        getattr(queue, call)(0)


def test_a_cache_has_one_queue() -> None:
    cache = manager()
    assert cache.waiting() is cache.waiting()
    assert np.array_equal(cache.waiting().tickets(), [])
