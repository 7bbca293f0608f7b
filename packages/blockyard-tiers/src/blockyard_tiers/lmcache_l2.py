"""A tier of Blockyard as LMCache's second level.

It is enabled by LMCache's configuration:

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "blockyard_tiers.lmcache_l2",
        "class_name": "BlockyardL2", "adapter_params": {"place": "file:/var/kv,bytes=50GiB"}}'

Each object of LMCache is one object of the tier: a load returns the stored bytes, or is a miss. The tier evicts
by its own budget, without LMCache's quotas by salt. Written for the `L2AdapterInterface` of LMCache 0.5.6.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from blockyard import InvalidArgument
from blockyard.engine_versions import LMCACHE
from blockyard.signatures import engine_imports

from . import TierAdapter

with engine_imports(LMCACHE, __name__):
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

#: Seconds between two polls for results.
_POLL_SECONDS = 0.0005
_STORE, _LOOKUP, _LOAD = range(3)


class BlockyardL2(L2AdapterInterface):
    """LMCache's adapter of a tier. Thread-safe; only `close` blocks.

    Args:
        params: place, the tier as after `serve --tier`, without write=; and fingerprint of the weights, if they can
            change under the same model name.
        l1_memory_desc: ignored.

    Raises:
        InvalidArgument: `params` has other keys or values.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        place, unknown = params.get("place"), sorted(set(params) - {"place", "fingerprint"})
        if unknown:
            raise InvalidArgument(f"adapter_params has {unknown[0]!r}; only place and fingerprint are allowed")
        if not isinstance(place, str) or not place:
            raise InvalidArgument(f"place is {place!r}; it must name a tier, like file:/var/kv,bytes=50GiB")
        super().__init__()
        self._adapter = TierAdapter(place, engine="lmcache", fingerprint=params.get("fingerprint", ""))
        self._signals = [create_event_notifier() for _ in range(3)]
        self._changed = threading.Condition()
        self._is_closed = False
        self._last = 0
        #: Tasks by the adapter's tickets, lookups that continue, and results of tasks that ended, by kind.
        self._running: dict[int, tuple[int, int, list[Any]]] = {}
        self._lookups: dict[int, tuple[list[Any], list[bytes], int, Any]] = {}
        self._results: tuple[dict[int, Any], dict[int, Any], dict[int, Any]] = ({}, {}, {})
        self._thread = threading.Thread(target=self._work, name="blockyard L2", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """Return the file descriptor that is readable when stores have ended."""
        return int(self._signals[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the file descriptor that is readable when lookups have ended."""
        return int(self._signals[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        """Return the file descriptor that is readable when loads have ended."""
        return int(self._signals[_LOAD].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to store objects, all or none. Existing ones are not written again."""
        return self._submit(_STORE, keys, objects)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to load objects. Those that are verified count."""
        return self._submit(_LOAD, keys, objects)

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Start to look up objects. Nothing is locked: an object deleted in between is a miss."""
        parts = {group: _layout_of(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        coded = [_key_bytes(key, parts.get(key.object_group_id, "")) for key in keys]
        with self._changed:
            self._last += 1
            self._lookups[self._last] = list(keys), coded, 0, Bitmap(len(keys))
            self._changed.notify()
            return self._last

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, since nothing was locked."""

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that ended since the last call."""
        with self._changed:
            found = dict(self._results[_STORE])
            self._results[_STORE].clear()
        return found

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return, once, which objects of a lookup are present; None while it runs."""
        with self._changed:
            return self._results[_LOOKUP].pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        """Return, once, which objects of a load were loaded; None while it runs."""
        with self._changed:
            return self._results[_LOAD].pop(task_id, None)

    def get_usage(self) -> Any:
        """Return the bytes of all objects known to be in the tier. The budget is the tier's own."""
        return AdapterUsage(self._adapter.tier.stats().object_bytes, 0)

    def report_status(self) -> dict[str, Any]:
        """Return the tier's health and statistics."""
        stats = self._adapter.tier.stats()
        return {
            "is_healthy": self._thread.is_alive() and not (stats.is_store_failing or stats.is_load_failing),
            "type": type(self).__name__,
            "place": self._adapter.tier.name,
            "num_objects": stats.num_objects,
            "object_bytes": stats.object_bytes,
            "load_misses": {cause.value: count for cause, count in stats.load_misses.items()},
            "store_failures": {cause.value: count for cause, count in stats.store_failures.items()},
        }

    def close(self) -> None:
        """End the threads, fail what waits, and wait up to ten seconds for the backend's current operations."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._adapter.close()
        self._thread.join(1.0)
        for signal in self._signals:
            signal.close()

    def _submit(self, kind: int, keys: list[Any], objects: Sequence[Any]) -> int:
        coded = [
            _key_bytes(key, _layout_of(each.get_shapes(), each.get_dtypes()))
            for key, each in zip(keys, objects, strict=True)
        ]
        buffers = [memoryview(each.byte_array).cast("B") for each in objects]
        with self._changed:
            self._last += 1
            self._running[self._adapter.submit(kind == _LOAD, coded, buffers)] = kind, self._last, list(keys)
            self._changed.notify()
            return self._last

    def _work(self) -> None:
        """Collect results while anything runs, and notify LMCache of them."""
        while True:
            with self._changed:
                if self._is_closed and not self._running:
                    return
                self._changed.wait(_POLL_SECONDS if self._running or self._lookups else None)
                calls = [*self._collect_transfers(), *self._collect_lookups()]
            for call, *arguments in calls:
                call(*arguments)

    def _collect_transfers(self) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        for result in self._adapter.take_results():
            kind, task, keys = self._running.pop(result.ticket)
            if kind == _STORE:
                is_whole = all(result.good)
                self._results[_STORE][task] = L2StoreResult(is_whole, result.num_bytes if is_whole else 0)
                if is_whole:
                    calls.append((self._notify_keys_stored, keys, [result.num_bytes // len(keys)] * len(keys)))
            else:
                bits = Bitmap(len(keys))
                for position in (at for at, is_good in enumerate(result.good) if is_good):
                    bits.set(position)
                self._results[_LOAD][task] = bits
            self._signals[kind].notify()
        return calls

    def _collect_lookups(self) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        for task, (keys, coded, position, bits) in list(self._lookups.items()):
            is_final = True
            while position < len(keys) and is_final:
                found = self._adapter.longest_prefix(coded[position:])
                for known in range(position, position + found.num_found):
                    bits.set(known)
                position, is_final = position + found.num_found, found.is_final
                position += is_final  # skip the absent one
            if is_final or self._is_closed:
                del self._lookups[task]
                self._results[_LOOKUP][task] = bits
                hits = [key for number, key in enumerate(keys) if bits.test(number)]
                calls.append((self._notify_keys_accessed, hits))
                self._signals[_LOOKUP].notify()
            else:
                self._lookups[task] = keys, coded, position, bits
        return calls


def _layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Return the layout of an object's bytes. It is part of the name, so that other layouts miss."""
    return json.dumps([[list(shape) for shape in shapes], [str(dtype) for dtype in dtypes]])


def _key_bytes(key: Any, layout: str) -> bytes:
    """Return all fields of a key as bytes."""
    fields = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout, key.chunk_hash.hex()]
    return json.dumps(fields).encode()
