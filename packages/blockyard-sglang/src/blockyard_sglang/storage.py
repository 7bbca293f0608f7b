"""Blockyard's tiers as SGLang's third cache level, by configuration alone.

    sglang serve MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "blockyard", "class_name": "BlockyardStorage",
            "module_path": "blockyard_sglang.storage", "place": "file:/var/kv,bytes=50GiB"}'

Each page is an object: SGLang gets exactly the stored bytes, or a miss. For `HiCacheStorage` of SGLang 0.5.23, its
calls for whole pages (not `interface_v1`), and models whose cache is one pool. If weights change under the same name,
call `clear`, as SGLang does when it clears the storage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from blockyard import InvalidArgument
from blockyard.engine_versions import SGLANG
from blockyard.signatures import engine_imports
from blockyard_tiers import TierAdapter

with engine_imports(SGLANG, __name__):
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class BlockyardStorage(HiCacheStorage):
    """A tier with SGLang's interface. Only SGLang's storage and prefetch threads block here, never a step.

    Args:
        storage_config: SGLang's configuration. Its extra_config has `place` (the backend, as in `serve --tier` but
            without write=), `fingerprint` (of the weights, if they can change under the same model name) and
            `wait_seconds` (after which a batch is a miss; default 5).

    Raises:
        InvalidArgument: for an invalid value.
    """

    def __init__(self, storage_config: Any, _options: Any = None) -> None:
        given = storage_config.extra_config or {}
        place = given.get("place")
        self._fingerprint = given.get("fingerprint", "")
        self._seconds = given.get("wait_seconds", 5.0)
        if not isinstance(place, str):
            raise InvalidArgument(f"place is {place!r}; it must name a backend, like file:/var/kv,bytes=50GiB")
        if isinstance(self._seconds, bool) or not isinstance(self._seconds, (int, float)) or self._seconds <= 0:
            raise InvalidArgument(f"wait_seconds is {self._seconds!r}; it must be a number of seconds above 0")
        if given.get("interface_v1"):
            raise InvalidArgument("interface_v1 is set; this storage accepts whole pages only: omit it")
        self._place, self._config = place, storage_config
        self._adapter: TierAdapter | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier, once SGLang's host pool and so the objects' layout is known."""
        super().register_mem_pool_host(mem_pool_host)
        config, page = self._config, mem_pool_host.get_dummy_flat_data_page()
        same_for_all = config.is_mla_model  # every TP rank holds the same pages
        fields = (config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size)
        self.close()
        self._adapter = TierAdapter(
            self._place,
            engine="sglang",
            model=config.model_name,
            fingerprint=self._fingerprint,
            tensor_parallel=None if same_for_all else [config.tp_rank, config.tp_size],
            parallel=[*fields, getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
            pool=type(mem_pool_host).__name__,
            page_layout=mem_pool_host.layout,
            page_size=mem_pool_host.page_size,
            dtype=str(page.dtype),
            elements=page.numel(),
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raise `InvalidArgument`: models with a second pool, of states or windows, are not supported."""
        raise InvalidArgument(
            f"host_pool_name is {host_pool_name!r} ({type(host_pool).__name__}); blockyard_sglang.storage supports "
            "only models whose cache is one pool"
        )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored, after waiting for the backend's answer."""
        coded, end = [key.encode() for key in keys], time.monotonic() + self._seconds
        while not (found := self._opened().longest_prefix(coded)).is_final and time.monotonic() < end:
            time.sleep(0.0002)
        return found.num_found

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages into the given tensors; return each tensor, or None for a miss."""
        if target_locations is None or len(target_locations) != len(keys) or any(t is None for t in target_locations):
            raise InvalidArgument(f"target_locations must hold a tensor for each of the {len(keys)} keys")
        good = self._carry(True, keys, target_locations)
        return [tensor if is_good else None for tensor, is_good in zip(target_locations, good, strict=True)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store copies of these pages, all or none, and return whether they were stored."""
        if values is None or len(values) != len(keys):
            raise InvalidArgument(f"values must hold a tensor for each of the {len(keys)} keys")
        return all(self._carry(False, keys, [value.contiguous().clone() for value in values]))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def clear(self) -> bool:
        """Delete all pages of this model and rank, but not others in the same backend. Returns True."""
        self._opened().drop_all()
        return True

    def close(self) -> None:
        """Stop the tier's threads."""
        if self._adapter is not None:
            self._adapter.close()

    def _opened(self) -> TierAdapter:
        if self._adapter is None:
            raise InvalidArgument("no host pool is registered; call register_mem_pool_host first")
        return self._adapter

    def _carry(self, is_load: bool, keys: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        if not keys:
            return []
        adapter = self._opened()
        buffers = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors]
        result = adapter.wait(adapter.submit(is_load, [key.encode() for key in keys], buffers), self._seconds)
        return [False] * len(keys) if result is None else result.good
