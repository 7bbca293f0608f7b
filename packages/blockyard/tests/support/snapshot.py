"""Everything a manager is made of, as plain values, so that "nothing changed" can be proved and not only believed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
}
#: Packages whose objects are looked into: ours, and eviction policies of the tests.
WALKED = ("blockyard", "blockyard_testing", "tests")
SCALARS = (int, float, str, bool, bytes, type(None), tuple, range)


def snapshot(whole: KVCacheManager | BlockPool | NamedPool) -> dict[str, Any]:
    """All attributes of the object and of what it is made of, by their path from it."""
    found: dict[str, Any] = {}
    _walk("", whole, found, set())
    return found


def _walk(path: str, value: Any, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, SCALARS):
        found[path] = value
    elif isinstance(value, dict):
        found[path] = list(value)
        for key, item in value.items():
            _walk(f"{path}[{key!r}]", item, found, seen)
    elif isinstance(value, list):
        found[path] = len(value)
        for index, item in enumerate(value):
            _walk(f"{path}[{index}]", item, found, seen)
    elif type(value).__name__.startswith("vec"):
        found[path] = list(value)
    elif isinstance(value, np.ndarray):
        found[path] = value.tolist()
    elif isinstance(value, CacheConfig):
        found[path] = value
    elif isinstance(value, BaseException):
        found[path] = repr(value)
    elif type(value).__module__.partition(".")[0] not in WALKED:
        raise TypeError(f"{path} is a {type(value)}; say how to compare it")
    elif id(value) not in seen:
        seen.add(id(value))
        for name in _attributes(value):
            _walk(f"{path}.{name}", getattr(value, name), found, seen)


def _attributes(value: Any) -> list[str]:
    """State, and what is computed from it; no methods and no scratch room."""
    names = [name for name in dir(value) if not name.startswith("__") and name not in SCRATCH]
    return [name for name in names if not callable(getattr(value, name))]


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
