"""Everything a manager is made of, as plain values, so that "nothing changed" can be proved and not only believed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, KVCacheManager
from blockyard.named import NamedPool

#: Room that calls work in and leave unspecified; nothing reads it before it is written again.
SCRATCH = {
    "hashes",
    "_found",
    "first_pending",
    "_mark",
    "_last_mark",
    "_reached",
    "_one",
    "_idle_run",
    # How far a search need not look again: where a call is undone it knows less than before, and never too much.
    "last_empty",
    "num_empty",
    "_slides_at",
    "_ended_run",
    "_entry",
    "_target",
    "_transfers",
    "_num_found",
    "_beginning",
    "_slot_room",
    "_num_slots",
    "_slow",
    "_late",
    "_num_slow",
    "_served",
    "_starts",
    "_filled",
    "_filled_blocks",
    "_filled_parents",
    "_one_hash",
    "_batch_epoch",
    "_batch_handles",
    "_batch_rows",
    "actor",
    "running",
    "num_lookups",
    "_name",
    "_spelled",
    "_one_state",
    "_marks",
    "_num_marks",
    "_decisions",
    # Of the waiting requests.
    *("_hash", "_num_runs", "num_steps"),
    # Their last answers, with the versions of the cache for which they hold, and arrivals that wait no longer.
    *("asked_index", "asked_sequences", "num_missing", "num_joining", "service", "_arrivals"),
}
#: Packages whose objects are looked into: ours, and eviction policies of the tests.
WALKED = ("blockyard", "blockyard_testing", "tests")
SCALARS = (int, float, str, bool, bytes, type(None), tuple, range)
#: Most values are of these classes and need no call.
EXACT_SCALARS = frozenset(SCALARS)


def snapshot(whole: KVCacheManager | BlockPool | NamedPool, path: str = "") -> dict[str, Any]:
    """Return all attributes of the object and of its parts, by their path from it, which begins with `path`."""
    found: dict[str, Any] = {}
    _walk(path, whole, found, set())
    return found


def _walk(path: str, value: Any, found: dict[str, Any], seen: set[int]) -> None:
    kind = type(value)
    if issubclass(kind, SCALARS):
        found[path] = value
    elif issubclass(kind, dict):
        found[path] = list(value)
        for key, item in value.items():
            _walk(f"{path}[{key!r}]", item, found, seen)
    elif issubclass(kind, list):
        found[path] = len(value)
        for index, item in enumerate(value):
            if type(item) in EXACT_SCALARS:
                found[f"{path}[{index}]"] = item
            else:
                _walk(f"{path}[{index}]", item, found, seen)
    elif kind.__name__.startswith("vec"):
        found[path] = list(value)
    elif issubclass(kind, np.ndarray):
        found[path] = value.tolist()
    elif issubclass(kind, CacheConfig):
        found[path] = value
    elif issubclass(kind, BaseException):
        found[path] = repr(value)
    elif kind.__module__.partition(".")[0] not in WALKED:
        raise TypeError(f"{path} is a {kind}; say how to compare it")
    elif id(value) not in seen:
        seen.add(id(value))
        for name in _attributes(value):
            item = getattr(value, name)
            if type(item) in EXACT_SCALARS:
                found[f"{path}.{name}"] = item
            elif not callable(item):
                _walk(f"{path}.{name}", item, found, seen)


def _attributes(value: Any) -> Iterable[str]:
    """Return the names of state and of what is computed from it, without methods and scratch room."""
    of_class = _attributes_of_class(type(value))
    own = getattr(value, "__dict__", None)
    return of_class if not own else dict.fromkeys((*of_class, *(name for name in own if _is_compared(name))))


@cache
def _attributes_of_class(kind: type) -> tuple[str, ...]:
    """Thousands of snapshots are of the same few classes, and `dir` takes longer than all else."""
    return tuple(name for name in dir(kind) if _is_compared(name) and not callable(getattr(kind, name)))


def _is_compared(name: str) -> bool:
    return not name.startswith("__") and name not in SCRATCH


@contextmanager
def refused(
    whole: KVCacheManager | BlockPool | NamedPool, *errors: Any, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """What is done meanwhile raises one of these errors, and changes nothing."""
    before = snapshot(whole)
    with pytest.raises(errors if len(errors) > 1 else errors[0], match=match) as caught:
        yield caught
    assert snapshot(whole) == before
    whole.check()
