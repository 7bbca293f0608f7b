"""Our tiers behind LMCache's adapter, below its own storage manager on a CPU: `make interop-lmcache`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import shake_128
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.v1", reason="LMCache is not installed here: make interop-lmcache")
pytest.importorskip("xxhash")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

from blockyard import InvalidArgument
from blockyard_testing.patience import wait_until
from blockyard_testing.seeds import draws, run_seed

LAYOUT = MemoryLayoutDesc([torch.Size([2, 3, 8, 40])], [torch.bfloat16])
L1_BYTES = 48 * 4096


@contextmanager
def lmcache(folder: Path, **more: Any) -> Iterator[StorageManager]:
    """LMCache's storage manager as its server makes it, with our tier from config strings alone."""
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    params = {"place": f"file:{folder},bytes=2MiB", **more}
    names = {"module_path": "blockyard_tiers.lmcache_l2", "class_name": "BlockyardL2"}
    given = json.dumps({"type": "plugin", **names, "adapter_params": params})
    adapters = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", given]))
    memory = L1MemoryManagerConfig(L1_BYTES, False, shm_name="")
    manager = StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapters))
    try:
        yield manager
    finally:
        manager.close()


def keys_of(hashes: Sequence[int], model: str = "a/model", salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(number.to_bytes(16, "big"), model, 0x01000100, 0, salt) for number in hashes]


def content_of(key: ObjectKey, size: int) -> bytes:
    return shake_128(repr(key).encode()).digest(size)


def got(
    manager: StorageManager, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT, policy: str = "prefix"
) -> Any:
    """Return LMCache's hits by place and the number from L2, after checking the bytes of each."""
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)], fetching_policy=policy)  # type: ignore[arg-type]
    handle = manager.submit_prefetch_task(spec)
    assert manager.wait_prefetch_status(handle, 60.0)
    found = manager.query_prefetch_status(handle)
    assert found is not None
    places = [place for place in range(len(keys)) if found.hit_cells[0].test(place)]
    hits = [keys[place] for place in places]
    if hits:
        with manager.read_prefetched_results(hits) as objects:
            assert objects is not None
            for key, each in zip(hits, objects, strict=True):
                assert bytes(each.byte_array) == content_of(key, each.get_size()), key
        manager.finish_read_prefetched(hits)
    return places, found.l2_hit_count


def put(manager: StorageManager, keys: list[ObjectKey]) -> None:
    objects = manager.reserve_write(keys, LAYOUT)
    for key, each in objects.items():
        memoryview(each.byte_array).cast("B")[:] = content_of(key, each.get_size())
    manager.finish_write(list(objects))


def tier_of(manager: StorageManager) -> Any:
    ((_, adapter),) = manager.l2_adapters()
    return adapter


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "objects").rglob("*") if path.is_file()]


def test_lmcache_loads_the_bytes_it_stored(tmp_path: Path) -> None:
    """Conversations with little memory over three restarts, between which objects are damaged."""
    draw = random.Random(run_seed())
    talks = [[draw.randrange(2**60) for _ in range(draw.randrange(2, 6))] for _ in range(10)]
    from_l2 = damaged = 0
    for _ in range(3):
        with lmcache(tmp_path) as manager:
            for _ in range(draws(150, 25)):
                talk = draw.choice(talks)
                talk[draw.randrange(3, 9) :] = [draw.randrange(2**60) for _ in range(draw.randrange(3))]
                keys = keys_of(talk)
                places, count = got(manager, keys, policy=draw.choice(["prefix", "full"]))
                from_l2 += count
                put(manager, [key for place, key in enumerate(keys) if place not in places])
            stats = tier_of(manager).report_status()
            assert stats["is_healthy"]
            assert tier_of(manager).get_usage().total_bytes_used == stats["object_bytes"] <= 2 * 2**20
            assert manager.memcheck()
        for path in files_in(tmp_path):
            if draw.random() < 0.2:
                data = bytearray(path.read_bytes())
                data[draw.randrange(4096, len(data))] ^= 1 << draw.randrange(8)
                path.write_bytes(data)
                damaged += 1
    assert from_l2
    assert damaged


def test_nothing_of_another_model_salt_layout_or_fingerprint_is_loaded(tmp_path: Path) -> None:
    hashes = list(range(1, 6))
    with lmcache(tmp_path) as manager:
        put(manager, keys_of(hashes))
        wait_until(lambda: len(files_in(tmp_path)) == len(hashes))
    for more in ({}, {"fingerprint": "new weights"}):
        with lmcache(tmp_path, **more) as manager:
            other = MemoryLayoutDesc([torch.Size([2, 3, 40, 8])], [torch.bfloat16])
            others = [keys_of(hashes, "another/model"), keys_of(hashes, salt="tenant")]
            for keys, layout in [(others[0], LAYOUT), (others[1], LAYOUT), (keys_of(hashes), other)]:
                assert got(manager, keys, layout) == ([], 0)
            assert got(manager, keys_of([1, 2, 99, 4]), policy="full")[0] == ([] if more else [0, 1, 3])


def test_bad_parameters_are_refused(tmp_path: Path) -> None:
    for params, said in (({"place": ""}, "place is ''"), ({"place": f"file:{tmp_path}", "size": 1}, "has 'size'")):
        with pytest.raises(InvalidArgument, match=said), lmcache(tmp_path, **params):
            pass
