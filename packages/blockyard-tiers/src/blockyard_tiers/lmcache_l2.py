"""Blockyard's tiers are LMCache's second level by its configuration alone:

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "blockyard_tiers.lmcache_l2",
        "class_name": "BlockyardL2", "adapter_params": {"place": "file:/var/kv,bytes=50GiB"}}'

An object of LMCache is one of ours: what it loads is what it stored, or a miss. The tier evicts by its own budget;
LMCache's quotas by salt do not reach into it. Written for the `L2AdapterInterface` of LMCache 0.5.6.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from blockyard import InvalidArgument
from blockyard.engine_versions import LMCACHE
from blockyard.signatures import engine_imports

from . import TierDoor

with engine_imports(LMCACHE, __name__):
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

#: Seconds between two looks at what has ended.
_LOOK_SECONDS = 0.0005
_STORE, _LOOKUP, _LOAD = range(3)


class BlockyardL2(L2AdapterInterface):
    """This is a tier behind LMCache's door; calls come from several threads, and none waits but `close`.

    params: place, as after `serve --tier` without write=; fingerprint, of the weights, where the model's name does not
    tell them. Raises `InvalidArgument` for other values.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        place, unknown = params.get("place"), sorted(set(params) - {"place", "fingerprint"})
        if unknown:
            raise InvalidArgument(f"adapter_params has {unknown[0]!r}; it takes place and fingerprint")
        if not isinstance(place, str) or not place:
            raise InvalidArgument(f"place is {place!r}; it must name a tier, like file:/var/kv,bytes=50GiB")
        super().__init__()
        self._door = TierDoor(place, engine="lmcache", fingerprint=params.get("fingerprint", ""))
        self._signals = [create_event_notifier() for _ in range(3)]
        self._changed = threading.Condition()
        self._is_closed = False
        self._last = 0
        #: Tasks by the door's tickets; lookups that go on; and what came of tasks that ended, by kind.
        self._running: dict[int, tuple[int, int, list[Any]]] = {}
        self._lookups: dict[int, tuple[list[Any], list[bytes], int, Any]] = {}
        self._results: tuple[dict[int, Any], dict[int, Any], dict[int, Any]] = ({}, {}, {})
        self._thread = threading.Thread(target=self._work, name="blockyard L2", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """Returns the file that is readable when stores have ended."""
        return int(self._signals[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Returns the file that is readable when lookups have ended."""
        return int(self._signals[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        """Returns the file that is readable when loads have ended."""
        return int(self._signals[_LOAD].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store objects, all or none of them; those that are there already are not written again."""
        return self._submit(_STORE, keys, objects)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to load objects; those that are right count."""
        return self._submit(_LOAD, keys, objects)

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begin to ask which objects are there. Nothing is locked: a load of what has gone meanwhile is a miss."""
        parts = {group: _layout_of(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        coded = [_coded(key, parts.get(key.object_group_id, "")) for key in keys]
        with self._changed:
            self._last += 1
            self._lookups[self._last] = list(keys), coded, 0, Bitmap(len(keys))
            self._changed.notify()
            return self._last

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Returns the stores that ended since the last call."""
        with self._changed:
            found = dict(self._results[_STORE])
            self._results[_STORE].clear()
        return found

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Returns, once, which objects of a lookup are there; None while it runs."""
        with self._changed:
            return self._results[_LOOKUP].pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        """Returns, once, which objects of a load are right; None while it runs."""
        with self._changed:
            return self._results[_LOAD].pop(task_id, None)

    def get_usage(self) -> Any:
        """Returns the bytes of all objects that are known to be in the place; the budget is the tier's own."""
        return AdapterUsage(self._door.tier.stats().object_bytes, 0)

    def report_status(self) -> dict[str, Any]:
        """Returns the tier's health and figures."""
        stats = self._door.tier.stats()
        return {
            "is_healthy": self._thread.is_alive() and not (stats.is_store_open or stats.is_load_open),
            "type": type(self).__name__,
            "place": self._door.tier.name,
            "num_objects": stats.num_objects,
            "object_bytes": stats.object_bytes,
            "load_misses": {cause.value: count for cause, count in stats.load_misses.items()},
            "store_failures": {cause.value: count for cause, count in stats.store_failures.items()},
        }

    def close(self) -> None:
        """End the threads, and what waits; waits up to ten seconds for what the place does at the moment."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._door.close()
        self._thread.join(1.0)
        for signal in self._signals:
            signal.close()

    def _submit(self, kind: int, keys: list[Any], objects: Sequence[Any]) -> int:
        coded = [
            _coded(key, _layout_of(each.get_shapes(), each.get_dtypes()))
            for key, each in zip(keys, objects, strict=True)
        ]
        buffers = [memoryview(each.byte_array).cast("B") for each in objects]
        with self._changed:
            self._last += 1
            self._running[self._door.begin(kind == _LOAD, coded, buffers)] = kind, self._last, list(keys)
            self._changed.notify()
            return self._last

    def _work(self) -> None:
        """Look what has ended while anything runs, and tell of it."""
        while True:
            with self._changed:
                if self._is_closed and not self._running:
                    return
                self._changed.wait(_LOOK_SECONDS if self._running or self._lookups else None)
                told = [*self._ended(), *self._looked_up()]
            for tell, *arguments in told:
                tell(*arguments)

    def _ended(self) -> list[tuple[Any, ...]]:
        told: list[tuple[Any, ...]] = []
        for ended in self._door.ended():
            kind, task, keys = self._running.pop(ended.ticket)
            if kind == _STORE:
                is_whole = all(ended.good)
                self._results[_STORE][task] = L2StoreResult(is_whole, ended.num_bytes if is_whole else 0)
                if is_whole:
                    told.append((self._notify_keys_stored, keys, [ended.num_bytes // len(keys)] * len(keys)))
            else:
                bits = Bitmap(len(keys))
                for place in (place for place, is_good in enumerate(ended.good) if is_good):
                    bits.set(place)
                self._results[_LOAD][task] = bits
            self._signals[kind].notify()
        return told

    def _looked_up(self) -> list[tuple[Any, ...]]:
        told: list[tuple[Any, ...]] = []
        for task, (keys, coded, place, bits) in list(self._lookups.items()):
            is_final = True
            while place < len(keys) and is_final:
                found = self._door.known(coded[place:])
                for known in range(place, place + found.num_found):
                    bits.set(known)
                place, is_final = place + found.num_found, found.is_final
                place += is_final  # that one is not there
            if is_final or self._is_closed:
                del self._lookups[task]
                self._results[_LOOKUP][task] = bits
                hits = [key for number, key in enumerate(keys) if bits.test(number)]
                told.append((self._notify_keys_accessed, hits))
                self._signals[_LOOKUP].notify()
            else:
                self._lookups[task] = keys, coded, place, bits
        return told


def _layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """Returns what the bytes of an object mean; a part of its name, so that another layout is a miss."""
    return json.dumps([[list(shape) for shape in shapes], [str(dtype) for dtype in dtypes]])


def _coded(key: Any, layout: str) -> bytes:
    """Returns all that a key says, as bytes."""
    fields = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout, key.chunk_hash.hex()]
    return json.dumps(fields).encode()
