"""Our tiers behind SGLang's adapter, with its host pools, factory and controller: `make interop-sglang`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from ..support.small_sglang import HAS_SGLANG

if not HAS_SGLANG:
    pytest.skip("SGLang is not installed here: make interop-sglang", allow_module_level=True)
pytest.importorskip("xxhash")

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from blockyard import InvalidArgument
from blockyard_testing.seeds import run_seed

PAGE, PAGES = 4, 48


def pool_of(layout: str) -> Any:
    """SGLang's pool in host memory, of bfloat16."""
    sides = [[torch.zeros(64, 2, 8, dtype=torch.bfloat16) for _ in range(3)] for _ in "kv"]
    pointers = [torch.tensor([each.data_ptr() for each in side], dtype=torch.uint64) for side in sides]
    buffers = KVBuffers(
        k=tuple(sides[0]),
        v=tuple(sides[1]),
        k_data_ptrs=pointers[0],
        v_data_ptrs=pointers[1],
        layout=next(iter(KVBufferLayout)),
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=2,
        head_dim=8,
        v_head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    more = {"device_capacity_tokens": PAGE * PAGES // 2, "start_layer": 0, "end_layer": 3}
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, pin_memory=False, **more)


class Side:
    """One server's third level: what SGLang's controller has when it carries pages."""

    def __init__(self, folder: Path, layout: str, rank: int = 0, **more: Any) -> None:
        extra = {
            "backend_name": "blockyard",
            "module_path": "blockyard_sglang.storage",
            "class_name": "BlockyardStorage",
            "place": f"file:{folder},bytes=64MiB",
            **more,
        }
        config = HiCacheStorageConfig(
            rank, 2, 0, 1, 0, 1, False, False, layout == "page_first", "a/model", extra_config=extra
        )
        self.pool = pool_of(layout)
        self.storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        self.parts = SimpleNamespace(storage_host_pool=self.pool, storage_backend=self.storage, page_size=PAGE)

    def fill(self, pages: list[int], keys: list[str]) -> Any:
        """Write the contents that belong to the keys; return the indices of the pages' tokens."""
        for page, key in zip(pages, keys, strict=True):
            draw = torch.Generator().manual_seed(int(key[:12], 16))
            flat = self.pool.get_dummy_flat_data_page()
            self.pool.set_from_flat_data_page(page * PAGE, torch.randn(flat.shape, generator=draw).to(flat.dtype))
        return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])

    def data(self, page: int) -> Any:
        return self.pool.get_data_page(page * PAGE).clone()

    def store(self, pages: list[int], keys: list[str]) -> bool:
        return bool(HiCacheController._generic_page_set(self.parts, keys, self.fill(pages, keys)))

    def load(self, pages: list[int], keys: list[str]) -> int:
        """Let SGLang's controller load pages; return the number that it reports."""
        indices = torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])
        operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        return int(HiCacheController._generic_page_get(self.parts, operation, keys, indices))


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made: list[Side] = []
    yield made
    for side in made:
        side.storage.close()


def keys_of(draw: random.Random, pages: int) -> list[str]:
    return list(get_storage_hash_str(draw.choices(range(30_000), k=pages * PAGE), None, page_size=PAGE))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_another_server_finds_the_pages_and_their_bytes(tmp_path: Path, layout: str, sides: list[Side]) -> None:
    keys = keys_of(random.Random(run_seed()), 20)
    sides += [Side(tmp_path, layout), Side(tmp_path, layout)]
    first, second = sides
    assert first.store(list(range(20)), keys)
    assert second.storage.batch_exists(keys) == 20
    assert second.storage.batch_exists([*keys[:7], "0" * 64, *keys[7:]]) == 7
    second.load(list(range(19, -1, -1)), keys)
    for page in range(20):
        assert torch.equal(second.data(19 - page), first.data(page))


def test_other_ranks_layouts_and_weights_find_nothing(tmp_path: Path, sides: list[Side]) -> None:
    keys = keys_of(random.Random(run_seed()), 4)
    sides.append(Side(tmp_path, "layer_first"))
    assert sides[0].store([0, 1, 2, 3], keys)
    for layout, rank, more in (("page_first", 0, {}), ("layer_first", 1, {}), ("layer_first", 0, {"fingerprint": "b"})):
        sides.append(Side(tmp_path, layout, rank, **more))
        assert not sides[-1].storage.exists(keys[0])
    other = sides[-1]
    assert other.store([0], keys[:1])
    sides[0].storage.clear()
    assert sides[0].storage.batch_exists(keys) == 0
    assert other.storage.exists(keys[0])


def test_damaged_pages_are_misses_and_pages_before_them_are_loaded(tmp_path: Path, sides: list[Side]) -> None:
    draw = random.Random(run_seed())
    keys = keys_of(draw, 12)
    sides += [Side(tmp_path, "layer_first"), Side(tmp_path, "layer_first")]
    first, second = sides
    assert first.store(list(range(12)), keys)
    adapter = first.storage._adapter
    bad = draw.sample(range(12), 3)
    for page in bad:
        path = next(tmp_path.glob(f"objects/*/{adapter.name(keys[page].encode()).hex()}"))
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    before = [second.data(page) for page in range(12)]
    found = second.storage.batch_get(keys, [second.pool.get_dummy_flat_data_page() for _ in keys])
    assert [page for page, data in enumerate(found) if data is None] == sorted(bad)
    second.load(list(range(12)), keys)
    for page in range(12):
        wanted = first.data(page) if page < min(bad) else before[page]
        assert torch.equal(second.data(page), wanted)


def test_refused_options_are_named_with_the_reason(tmp_path: Path, sides: list[Side]) -> None:
    with pytest.raises(InvalidArgument, match="place is None"):
        Side(tmp_path, "layer_first", place=None)
    with pytest.raises(InvalidArgument, match="interface_v1"):
        Side(tmp_path, "layer_first", interface_v1=1)
    with pytest.raises(InvalidArgument, match="wait_seconds is 0"):
        Side(tmp_path, "layer_first", wait_seconds=0)
    sides.append(Side(tmp_path, "layer_first"))
    with pytest.raises(InvalidArgument, match="one pool"):
        sides[0].storage.register_mem_host_pool_v2(sides[0].pool, "mamba")
