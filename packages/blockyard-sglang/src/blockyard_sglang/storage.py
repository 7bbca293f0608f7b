"""Blockyard's tiers are SGLang's third level of cache by its configuration alone:

    sglang serve MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "blockyard", "class_name": "BlockyardStorage",
            "module_path": "blockyard_sglang.storage", "place": "file:/var/kv,bytes=50GiB"}'

A page is an object: what SGLang gets is what it stored, or a miss. Written for the `HiCacheStorage` of SGLang 0.5.23,
its calls of whole pages (not `interface_v1`), models whose cache is one pool. After new weights under an old name call
`clear`, which SGLang's clearing of the storage does.
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
    """This is a tier behind SGLang's adapter; its threads for storing and for prefetching wait here, no step does.

    extra_config: place, as after `serve --tier` without write=. fingerprint: of the weights, where the model's name
    does not tell them. wait_seconds: after which a batch is a miss (5). Raises `InvalidArgument` for other values.
    """

    def __init__(self, storage_config: Any, _options: Any = None) -> None:
        given = storage_config.extra_config or {}
        place = given.get("place")
        self._fingerprint = given.get("fingerprint", "")
        self._seconds = given.get("wait_seconds", 5.0)
        if not isinstance(place, str):
            raise InvalidArgument(f"place is {place!r}; it must name a tier, like file:/var/kv,bytes=50GiB")
        if isinstance(self._seconds, bool) or not isinstance(self._seconds, (int, float)) or self._seconds <= 0:
            raise InvalidArgument(f"wait_seconds is {self._seconds!r}; it must be a number of seconds above 0")
        if given.get("interface_v1"):
            raise InvalidArgument("interface_v1 is set; this storage takes whole pages, not pointers to them")
        self._place, self._config = place, storage_config
        self._adapter: TierAdapter | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang tells of its pool in host memory, which the layout of all objects names. Opens the tier."""
        super().register_mem_pool_host(mem_pool_host)
        config, page = self._config, mem_pool_host.get_dummy_flat_data_page()
        same_for_all = config.is_mla_model  # of such models each rank of TP holds the same
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
        """SGLang tells of a second pool, of states or windows. Raises `InvalidArgument`: such models are refused."""
        raise InvalidArgument(
            f"pool {host_pool_name} of {type(host_pool).__name__}: blockyard_sglang.storage takes models "
            "whose cache is one pool"
        )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many pages are there, from the first on; waits until the tier has asked its place."""
        coded, end = [key.encode() for key in keys], time.monotonic() + self._seconds
        while not (found := self._opened().longest_prefix(coded)).is_final and time.monotonic() < end:
            time.sleep(0.0002)
        return found.num_found

    def exists(self, key: str) -> bool:
        """Returns whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Returns for each page the tensor that was given for it, or None for a miss."""
        if target_locations is None or len(target_locations) != len(keys) or any(t is None for t in target_locations):
            raise InvalidArgument(f"target_locations must have a tensor for each of {len(keys)} keys")
        good = self._carry(True, keys, target_locations)
        return [tensor if is_good else None for tensor, is_good in zip(target_locations, good, strict=True)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one page; returns the tensor that was given, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Returns whether these pages were stored, all or none of them. They are copied: SGLang may reuse them."""
        if values is None or len(values) != len(keys):
            raise InvalidArgument(f"values must have a tensor for each of {len(keys)} keys")
        return all(self._carry(False, keys, [value.contiguous().clone() for value in values]))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page; returns whether it was."""
        return self.batch_set([key], [value])

    def clear(self) -> bool:
        """Remove all pages of this model and rank, not those of others in the place; returns True."""
        self._opened().drop_all()
        return True

    def close(self) -> None:
        """End the tier's threads."""
        if self._adapter is not None:
            self._adapter.close()

    def _opened(self) -> TierAdapter:
        if self._adapter is None:
            raise InvalidArgument("no pool is registered yet: register_mem_pool_host comes first")
        return self._adapter

    def _carry(self, is_load: bool, keys: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        if not keys:
            return []
        adapter = self._opened()
        buffers = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors]
        result = adapter.wait(adapter.submit(is_load, [key.encode() for key in keys], buffers), self._seconds)
        return [False] * len(keys) if result is None else result.good
