"""The pool known by names: beside a slow one, against misuse, and with every policy."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from typing import Any

import pytest

import blockyard
from blockyard import ConcurrentCall, DoubleFree, ForeignBlock, InvalidArgument, OutOfBlocks, PolicyError
from blockyard.errors import LogicError
from blockyard.named import NamedPool
from blockyard.policies import EvictionPolicy
from blockyard_testing import source_only
from blockyard_testing.hostile_values import Number
from blockyard_testing.own_policies import MRU
from blockyard_testing.seeds import run_seed

from ..support.named_model import play
from ..support.snapshot import refused, snapshot

NUM_WORLDS = 20
CALLS_A_WORLD = 80


@pytest.mark.parametrize("number", range(NUM_WORLDS))
def test_a_random_program_sees_what_a_slow_pool_shows(number: int) -> None:
    play(blockyard, run_seed() + number, CALLS_A_WORLD)


@pytest.mark.skipif(not blockyard.compiled(), reason="compares two builds, and this one is interpreted itself")
def test_both_builds_tell_the_same_story() -> None:
    interpreted = source_only.load_interpreted()
    for number in range(5):
        seed = run_seed() + number
        assert play(blockyard, seed, CALLS_A_WORLD) == play(interpreted, seed, CALLS_A_WORLD)


def named(pool: NamedPool, *names: bytes) -> Any:
    lease = pool.get_new_blocks(len(names), holder="a")
    pool.name_blocks(lease, list(names))
    return lease


def test_all_bytes_of_a_name_count() -> None:
    """Names that differ in one bit, in their length, in zeros at the end or in the group alone are told apart."""
    pool = NamedPool(400, hash_seed=1)
    base = bytes(range(32))
    names = [base] + [base[:i] + bytes([base[i] ^ bit]) + base[i + 1 :] for i in range(32) for bit in (1, 0x80)]
    names += [base[:n] for n in range(1, 32)] + [bytes(n) for n in range(1, 33)] + [b"\xff" * n for n in range(1, 33)]
    names = list(dict.fromkeys(names))
    lease = named(pool, *names)
    assert pool.find(names).tolist() == list(lease)
    assert not pool.find(names, 1).any()
    assert [pool.find_one(name) for name in names] == list(lease)
    assert [pool.names_of(block) for block in lease] == [[(name, 0)] for name in names]
    pool.check()


def test_names_of_one_hash_are_told_apart() -> None:
    """With the index's hash made useless, names are still found by their bytes."""
    pool = NamedPool(60, hash_seed=1)
    index = pool._ledger.index  # type: ignore[attr-defined]
    for place in range(len(index._keys)):
        index._keys[place] = 0
    names = [number.to_bytes(32, "big") for number in range(50)]
    lease = named(pool, *names)
    assert pool.find(names).tolist() == list(lease)
    assert pool.find_one((50).to_bytes(32, "big")) == 0
    pool.check()


def test_groups_are_found_together() -> None:
    pool = NamedPool(20)
    lease = pool.get_new_blocks(5)
    pool.name_blocks(list(lease)[:3], [b"a", b"b", b"c"], 0)
    pool.name_blocks(list(lease)[3:], [b"a", b"b"], 7)
    assert pool.find_prefix([b"a", b"b", b"c"], [0, 7]).tolist() == [[1, 2], [4, 5]]
    assert pool.find_prefix([b"c", b"a"], [0, 7]).shape == (2, 0)
    assert pool.find_prefix([], [0]).shape == (1, 0)


def test_a_question_changes_neither_the_order_nor_the_holds() -> None:
    pool = NamedPool(6)
    pool.free_blocks(named(pool, b"a", b"b", b"c"))
    before = pool.free_block_ids().tolist()
    assert pool.find([b"a", b"b", b"c"]).tolist() == [1, 2, 3]
    assert pool.find_one(b"b") == 2
    pool.find_prefix([b"a"])
    assert pool.free_block_ids().tolist() == before == [4, 5, 3, 2, 1]


def test_ids_cannot_free_what_a_lease_holds() -> None:
    pool = NamedPool(6)
    lease = pool.get_new_blocks(2, holder="lease")
    ids = pool.new_ids(2)
    pool.hold_ids([1])
    pool.free_ids([1])
    for wrong in ([1], [*ids, 2], [ids[0], ids[0]]):
        with refused(pool, DoubleFree, match=r"block_ids\[\d\] is \d, which is not held"):
            pool.free_ids(wrong)
    pool.free_ids(ids)
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree):
        pool.free_blocks(lease)
    with pytest.raises(ForeignBlock):
        pool.free_blocks(NamedPool(4).get_new_blocks(1))
    pool.check()


#: A dict at the end of arguments has those that are given by name.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "find_one": [(b"",), (b"x" * 33,), ("a",), (None,), (bytearray(b"a"),), (b"a", -1), (b"a", True), (b"a", 2**31)],
    "find": [(b"ab",), ([b"a", "b"],), (5,), ([b"a", b""],), ([b"a"], "0")],
    "find_prefix": [([b"a"], []), ([b"a"], 0), ([b"a"], [0, -1])],
    "get_new_blocks": [(-1,), (1.5,), (1, {"holder": 5})],
    "get_cached_blocks": [(["a"],), ([b"a"], 0, {"holder": 3})],
    "hold": [([0],), ([-1],), ([20],), ([5],), ("1",), ([1.5],), ([2**63],), ([1], {"holder": 3})],
    "hold_ids": [([0],), ([20],), (None,)],
    "new_ids": [(-1,), ("1",)],
    "free_ids": [([0],), ([True],), ([20],)],
    "name_blocks": [([1], []), ([1], [b"a", b"b"]), ([20], [b"a"]), ([0], [b"a"]), ([1], ["a"]), ([1], [b"a"], -1)],
    "name_one": [(0, b"a"), (20, b"a"), (1, b""), (1, "a"), (1, b"a", -1), ("1", b"a")],
    "move_names": [(5, 1), (1, 5), (1, 1), (0, 1), (3, 1), ("1", 2)],
    "uncache": [([0],), ([20],), (3,)],
    "names_of": [(-1,), (20,), (None,)],
    "free_block_after": [(1,), (20,), (-1,)],
    "free_block_before": [(1,), ("0",)],
    "set_eviction_policy": [("best",), (5,)],
    "free_blocks": [(5,), (None,)],
}


@pytest.mark.parametrize(("call", "arguments"), [(call, a) for call, rows in CALLS.items() for a in rows])
def test_bad_arguments_change_nothing(call: str, arguments: tuple[Any, ...]) -> None:
    pool = NamedPool(20, hash_seed=1)
    named(pool, b"a", b"b")
    pool.get_new_blocks(1)
    with refused(pool, InvalidArgument):
        *positional, last = arguments
        if isinstance(last, dict):
            getattr(pool, call)(*positional, **last)
        else:
            getattr(pool, call)(*arguments)


@pytest.mark.parametrize("num_blocks", [0, 2**27 + 1, "5"])
def test_bad_sizes_are_refused(num_blocks: Any) -> None:
    with pytest.raises(InvalidArgument):
        NamedPool(num_blocks)


@pytest.mark.parametrize("options", [{"hash_seed": -1}, {"eviction_policy": "best"}, {"max_events": -1}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        NamedPool(5, **options)


def test_too_many_blocks_are_refused() -> None:
    pool = NamedPool(4)
    for call in (pool.get_new_blocks, pool.new_ids):
        with pytest.raises(OutOfBlocks, match="num_blocks is 4; only 3 of 3 blocks are free"):
            call(4)
    assert pool.num_used_blocks == 0


def test_a_pool_of_the_null_block_alone() -> None:
    pool = NamedPool(1)
    assert (pool.usage, pool.num_usable_blocks, pool.new_ids(0), pool.find_one(b"a")) == (0.0, 0, [], 0)
    with pytest.raises(OutOfBlocks):
        pool.new_ids(1)
    pool.check()


def test_an_argument_that_calls_the_pool_is_refused() -> None:
    pool = NamedPool(6)
    lease = pool.get_new_blocks(1, holder="a")
    refused: list[BaseException] = []

    def act() -> None:
        try:
            pool.new_ids(1)
        except ConcurrentCall as error:
            refused.append(error)

    assert len(pool.get_new_blocks(Number(act, 2))) == 2
    assert len(refused) == 1
    pool.get_new_blocks(Number(lambda: pool.free_blocks(lease), 1))
    assert lease not in pool.leases()
    pool.check()


@pytest.mark.parametrize("policy", ["fifo", "lfu", "s3fifo", "arc", "score", "density", MRU])
def test_policies_choose_among_names(policy: Any) -> None:
    """Every policy is told of exactly the idle named blocks, whatever happens to names; `check` asks it."""
    pool = NamedPool(12, hash_seed=1, eviction_policy=policy)
    for round_number in range(30):
        ids = pool.new_ids(4)
        pool.name_blocks(ids, [bytes([round_number, place]) for place in range(4)])
        pool.name_blocks(ids[:1], [b"alias"])
        pool.check()
        pool.free_ids(ids, last=round_number % 3 == 0)
        pool.uncache(ids[2:3])
        pool.hold_ids([ids[2], ids[3], ids[2]])
        pool.check()
        pool.free_ids([ids[2], ids[3], ids[2]])
        pool.name_blocks(ids[2:3], [bytes([round_number, 9])])
        pool.check()
        lease = pool.get_cached_blocks([bytes([round_number, 0]), bytes([round_number, 1])])
        pool.check()
        pool.free_blocks(lease, last=True)
        pool.check()
    assert len(pool.new_ids(11)) == 11
    pool.check()


class Broken(EvictionPolicy):
    """Names a block that is not there."""

    def __init__(self, num_blocks: int) -> None:
        pass

    def evict(self) -> int:
        return 999


def test_a_broken_policy_fails_the_call_alone() -> None:
    pool = NamedPool(4, eviction_policy=Broken)
    pool.free_blocks(named(pool, b"a", b"b", b"c"))
    before = pool.ref_counts().tolist(), pool.find([b"a", b"b", b"c"]).tolist()
    with pytest.raises(PolicyError):
        pool.get_new_blocks(1)
    with pytest.raises(PolicyError):
        pool.new_ids(2)
    assert (pool.ref_counts().tolist(), pool.find([b"a", b"b", b"c"]).tolist()) == before
    pool.set_eviction_policy("lru")
    pool.check()
    assert pool.new_ids(3) == [3, 2, 1]


def test_names_beside_the_first_take_room_once() -> None:
    """A long life of second names takes no more memory than its largest moment."""
    pool = NamedPool(4)
    ids = pool.new_ids(3)
    for number in range(2000):
        pool.name_blocks(ids, [number.to_bytes(4, "big")] * 3, 1)
        pool.name_blocks(ids, [number.to_bytes(4, "big")] * 3, 2)
        pool.uncache(ids)
    assert len(pool._ledger.owner_of) <= 32  # type: ignore[attr-defined]
    pool.check()


def test_events_that_nobody_takes_are_counted() -> None:
    pool = NamedPool(4, max_events=3)
    ids = pool.new_ids(2)
    pool.name_blocks(ids, [b"a", b"b"])
    pool.uncache(ids)
    assert [(event.kind, event.name) for event in pool.take_events()] == [
        ("stored", b"b"),
        ("removed", b"a"),
        ("removed", b"b"),
    ]
    assert (pool.num_lost_events, pool.take_events()) == (1, [])


class NoMemory:
    """Stands for the order of release where the system has no memory for it."""

    def of(self, ledger: object, blocks: object) -> object:
        raise MemoryError


@pytest.mark.parametrize("last", [False, True])
def test_a_free_that_finds_no_memory_frees_nothing(last: bool) -> None:
    # A compiled attribute takes no stand-in.
    pool = import_module(f"{source_only.load_interpreted().__name__}.named").NamedPool(6)
    ids = pool.new_ids(3)
    order, pool._release_order = pool._release_order, NoMemory()
    with pytest.raises(MemoryError):
        pool.free_ids(ids, last=last)
    pool.check()
    assert pool.num_used_blocks == 3
    pool._release_order = order
    pool.free_ids(ids, last=last)
    pool.check()
    assert pool.num_used_blocks == 0


def test_a_block_is_not_held_more_often_than_its_count_can_say() -> None:
    pool = NamedPool(4)
    (block,) = pool.new_ids(1)
    pool.name_one(block, b"a")
    most = 2**31 - 1
    # Two thousand million holds take minutes; the counts are set to what they would be.
    pool._ledger.ref_cnt[block] = pool._loose[block] = most - 1  # type: ignore[attr-defined]
    assert pool.ref_counts()[block] == pool.loose_counts()[block] == most - 1
    before = snapshot(pool)
    limit = rf"block_ids\[0\] is block {block}, .* held {most - 1} times.* {most} times"
    for hold in (lambda: pool.hold_ids([block, block]), lambda: pool.hold([block, block])):
        with pytest.raises(InvalidArgument, match=limit):
            hold()
        assert snapshot(pool) == before
        pool.check()
    pool.hold_ids([block])
    by_argument = {"block_ids": lambda: pool.hold_ids([block]), "names": lambda: pool.get_cached_blocks([b"a"])}
    for argument, hold_one in by_argument.items():
        with pytest.raises(InvalidArgument, match=rf"^{argument}\[0\] is block {block}, .* {most} times"):
            hold_one()
    assert pool.loose_counts()[block] == most
    assert pool.leases() == []
    pool.check()


def test_version_grows_when_what_is_found_changes() -> None:
    pool = NamedPool(4)
    versions = [pool.version]
    lease = named(pool, b"a")
    versions.append(pool.version)
    pool.free_blocks(lease)
    pool.new_ids(3)
    versions.append(pool.version)
    pool.reset_prefix_cache()
    versions.append(pool.version)
    assert versions == sorted(set(versions))


def test_it_is_neither_copied_nor_pickled_nor_subclassed() -> None:
    pool = NamedPool(4)
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises((LogicError, TypeError)):
            act(pool)
    with pytest.raises((LogicError, TypeError)):
        type("Mine", (NamedPool,), {})


def test_names_of_one_reading_serve_every_group() -> None:
    """A generator is empty when it is read again: the second group found nothing, and nothing was found at all."""
    pool = NamedPool(5)
    lease = pool.get_new_blocks(2)
    for group in (0, 1):
        pool.name_blocks(lease, [b"a", b"b"], group=group)
    found = pool.find_prefix((name for name in (b"a", b"b", b"c")), groups=[0, 1])
    assert found.tolist() == [list(lease), list(lease)]
