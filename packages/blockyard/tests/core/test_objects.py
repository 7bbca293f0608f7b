"""The core's objects as Python objects: copies are refused, attributes are read-only, weak references work."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard import BlockLease, BlockPool, InvalidArgument, KVCacheManager
from blockyard.config import cache_config

from ..support.own_calls import Site

Objects = dict[str, Callable[[Site], Any]]

OBJECTS: Objects = {
    "a KVCacheManager": lambda site: site.cache,
    "a BlockPool": lambda site: site.alone,
    "the pool of a manager": lambda site: site.pool,
    "the CPU pool of a manager": lambda site: site.cache.cpu_pool,
    "a BlockLease": lambda site: site.lease,
    "a StepPlan": lambda site: site.cache.reserve([], 0),
    "a SwapPlan": lambda site: site.cache.swap_out([]),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copied": copy.copy,
    "copied deep": copy.deepcopy,
    "copied deep in a list": lambda thing: copy.deepcopy([thing]),
    "pickled": pickle.dumps,
    "pickled by protocol 2": lambda thing: pickle.dumps(thing, 2),
    "pickled by protocol 0": lambda thing: pickle.dumps(thing, 0),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_copy_is_refused_in_a_sentence(name: str, way: str) -> None:
    """It used to be an unclear TypeError, or a copy that owned the same blocks."""
    site = Site("cpu")
    thing = OBJECTS[name](site)
    with pytest.raises(TypeError, match=r"^a \w+ cannot be (copied|pickled), because .*; .*"):
        COPIES[way](thing)
    site.check()


@pytest.mark.parametrize("name", ["a KVCacheManager", "a BlockPool", "the pool of a manager"])
def test_weak_references_work(name: str) -> None:
    site = Site("cpu")
    reference = weakref.ref(OBJECTS[name](site))
    assert reference() is OBJECTS[name](site)
    del site
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("name", ["serial", "holder", "block_ids"])
def test_a_lease_is_read_only(name: str) -> None:
    pool = BlockPool(10)
    lease = pool.get_new_blocks(3, holder="me")
    with pytest.raises(AttributeError):
        setattr(lease, name, getattr(lease, name))
    with pytest.raises(AttributeError):
        delattr(lease, name)
    assert (lease.holder, list(lease), pool.leases()) == ("me", [1, 2, 3], [lease])


def test_the_ids_of_a_lease_cannot_be_written() -> None:
    lease = BlockPool(10).get_new_blocks(3)
    with pytest.raises(ValueError, match="read-only"):
        lease.block_ids[0] = 7
    with pytest.raises(ValueError, match="WRITEABLE"):
        lease.block_ids.flags.writeable = True
    with pytest.raises(TypeError):
        lease[0] = 7  # type: ignore[index]


def test_a_lease_has_no_public_list_of_blocks() -> None:
    """A list that somebody changed used to be what `free_blocks` freed."""
    public = {name for name in dir(BlockLease) if not name.startswith("_")}
    assert public == {"serial", "holder", "block_ids", "num_cached_blocks", "first_block", "held_ids"}


@pytest.mark.parametrize("kind", [BlockPool, type(Site("plain").pool)])
def test_a_pool_has_no_public_verbs_of_its_ledger(kind: type) -> None:
    """`acquire`, `share` and the like change counts without a check."""
    verbs = {"acquire", "release_one", "share", "share_one", "unshare", "secure", "watch", "queue"}
    verbs |= {"ref_cnt", "index", "stack", "choose_by", "index_prompt", "note_hits", "make_room", "act"}
    assert verbs & set(dir(kind)) == set()


# ---------------------------------------------------------------- arguments of other types


def test_the_config_takes_numpys_integers_for_plain_ones() -> None:
    """It used to take them and fail in the manager."""
    names = ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "num_cpu_blocks", "history_size")
    names += ("retention_blocks", "residency_sample", "hash_seed")
    for integer in (np.int64, np.int32, np.uint16):
        config = cache_config(**{name: integer(5) for name in names})
        assert {type(config.option(name)) for name in names} == {int}
        assert config == cache_config(**dict.fromkeys(names, 5))
        cache = KVCacheManager(config)
        assert cache.pool.num_blocks == 5
        cache.check()


@pytest.mark.parametrize("bad", [np.array([1, 2]), np.array(["a"]), np.array([]), np.zeros((2, 2)), np.array(1)])
def test_arrays_are_no_extra_keys_and_no_holders(bad: Any) -> None:
    """An array has no truth, which used to be a ValueError of numpy's."""
    cache = Site("plain").cache
    with pytest.raises(InvalidArgument, match="extra_keys"):
        cache.allocate([1, 2], extra_keys=bad)
    with pytest.raises(InvalidArgument, match="extra_keys"):
        cache.allocate_batch([[1, 2]], extra_keys=bad)
    with pytest.raises(InvalidArgument, match="extra_keys"):
        cache.hold_cached([1, 2], extra_keys=bad)
    with pytest.raises(InvalidArgument, match="holders"):
        cache.allocate_batch([[1, 2], [3]], holders=bad)
    with pytest.raises(InvalidArgument, match="holder"):
        cache.allocate([1, 2], holder=bad)
    cache.check()


@pytest.mark.parametrize("bad", [(True, 2), [True, 2], (2, True), (np.True_, 2), ((1, True),), [[True, 2]]])
def test_a_bool_among_integers_is_refused_in_tuples_as_in_lists(bad: Any) -> None:
    site = Site("plain")
    calls = (
        lambda: site.cache.allocate(bad),
        lambda: site.cache.reserve([site.decoding, site.done], bad),
        lambda: site.cache.commit([site.decoding, site.done], bad),
        lambda: site.cache.commit([site.decoding, site.done], 0, bad),
        lambda: site.cache.append([site.decoding, site.done], bad),
        lambda: site.cache.regroup([site.decoding, site.done], bad),
        lambda: site.cache.free(bad),
        lambda: site.cache.hold_cached(bad),
    )
    for call in calls:
        with pytest.raises(InvalidArgument):
            call()
    site.check()


def test_a_managers_pool_is_the_same_object_each_time() -> None:
    site = Site("cpu")
    assert site.cache.pool is site.cache.pool
    assert site.cache.cpu_pool is site.cache.cpu_pool
