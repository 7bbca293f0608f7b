"""The base of all tiers: bounded queues, worker threads, circuit breakers and statistics."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np

from blockyard.arguments import printable, require_int, require_number, shown
from blockyard.errors import InvalidArgument, InvariantError

from .circuit_breaker import CircuitBreaker
from .header import PAGE_BYTES, BadObject, Header, checksum_of, require_whole
from .index import ObjectIndex
from .tier import (
    BACKEND_FAILURES,
    BAD_OBJECT,
    MAX_OBJECT_BYTES,
    Cause,
    FirstMatch,
    Prefix,
    TierStats,
    Transfer,
    TransferResult,
    require_data,
    require_name,
    require_names,
    require_num_bytes,
)

_log = logging.getLogger(__name__)
#: Names per query of the backend, and absent names that are remembered.
_NAMES_PER_QUERY = 256
_MAX_ABSENT = 4096
#: Kinds of operations, each with its own circuit breaker; lookups use that of loads.
_LOADS, _STORES, _DROPS = "loads", "stores", "drops"


class BackendError(Exception):
    """The backend did not carry out an operation. `cause` says why; the text is the backend's own."""

    def __init__(self, cause: Cause, text: object = "") -> None:
        super().__init__(str(text))
        self.cause = cause


@dataclass(slots=True, eq=False)
class ActiveTransfer:
    """A transfer that waits or runs, with its buffers as bytes.

    Attributes:
        parts: for each object, the buffers of its payload.
        lengths: payload bytes of each object.
        num_bytes: payload bytes of all objects.
        begun: time at which it started to run; 0 while it waits.
        backend_state: whatever the backend keeps from one object of a load to the next.
        known_header: header of its only object, if it came with the object.
    """

    transfer: Transfer
    is_load: bool
    parts: list[list[memoryview]]
    since: float
    begun: float = 0.0
    backend_state: Any = None
    known_header: Header | None = None
    lengths: list[int] = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [len(parts[0]) if len(parts) == 1 else sum(len(part) for part in parts) for parts in self.parts]
        self.num_bytes = sum(self.lengths)

    def header(self, position: int) -> Header:
        """Return the header under which an object is stored. O(bytes)."""
        if self.known_header is not None:
            return self.known_header
        transfer, parts = self.transfer, self.parts[position]
        names = (transfer.names[position], transfer.digests[position], transfer.layout)
        return Header(*names, self.lengths[position], checksum_of(parts))

    def pieces(self, position: int) -> list[bytes | memoryview]:
        """Return the bytes of a whole object, page and payload, as a list of buffers. O(bytes)."""
        return [self.header(position).to_page(), *self.parts[position]]

    def require(self, position: int, header: Header) -> None:
        """Raise `BadObject` unless this is the header of the requested object."""
        transfer = self.transfer
        header.require(transfer.names[position], transfer.digests[position], transfer.layout, self.lengths[position])

    def fill(self, position: int, data: memoryview) -> None:
        """Verify a whole object and copy its payload into the buffer. O(bytes). Raises `BadObject`."""
        header = Header.from_page(bytes(data[:PAGE_BYTES]))
        self.require(position, header)
        header.require_payload([data[PAGE_BYTES:]])
        first = len(data) - self.lengths[position]
        for part in self.parts[position]:
            part[:] = data[first : first + len(part)]
            first += len(part)


class WorkingTier:
    """A `Tier` with worker threads over a backend. Subclasses implement the backend's operations.

    Args:
        name: the address.
        index: the known objects, and the budget.
        num_threads: transfers that run at once.
        max_transfers: transfers that may wait or run, stores and loads together.
        max_waiting_bytes: bytes that may wait or run.
        slow_seconds: a transfer that runs longer opens the circuit breaker.
        absent_seconds: for how long the answer "not present" is trusted.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        index: ObjectIndex,
        num_threads: int = 2,
        max_transfers: int = 256,
        max_waiting_bytes: int = 2**30,
        slow_seconds: float = 10.0,
        absent_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = printable(name)
        self._index = index
        self._max_transfers = require_int("max_transfers", max_transfers, 1, 2**20)
        self._max_waiting_bytes = require_int("max_waiting_bytes", max_waiting_bytes, 1, 2**50)
        self._slow_seconds = slow_seconds
        self._absent_seconds = absent_seconds
        self._clock = clock
        #: An RLock, since `with` enters and leaves it without a Python frame that Ctrl-C could interrupt.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._loads: deque[ActiveTransfer] = deque()
        self._stores: deque[ActiveTransfer] = deque()
        #: Names to delete, and whether only after a recheck finds them bad.
        self._drops: deque[tuple[list[bytes], bool]] = deque()
        #: Names of waiting drops. Only the threads change the index: Ctrl-C could interrupt a caller halfway.
        self._dropped: set[bytes] = set()
        #: Names to look up, and whether up to the first present one instead of the first absent one.
        self._lookups: deque[tuple[list[bytes], bool]] = deque()
        self._queried: set[bytes] = set()
        self._absent: dict[bytes, float] = {}
        self._running: dict[int, ActiveTransfer] = {}
        self._ids: set[int] = set()
        self._waiting_bytes = 0
        self._results: list[TransferResult] = []
        self._stats = TierStats()
        #: By thread: the kind of its operation, since when, and the names that it deletes.
        self._busy: dict[int, tuple[str, float, frozenset[bytes]]] = {}
        self._all_hang = False
        self._breakers = {kind: CircuitBreaker() for kind in (_LOADS, _STORES, _DROPS)}
        self._is_closed = False
        count = require_int("num_threads", num_threads, 1, 64)
        self._threads = [threading.Thread(target=self._work, name=f"tier {name}", daemon=True) for _ in range(count)]

    def _start(self) -> None:
        """Start the threads. A subclass calls it at the end of its `__init__`."""
        _started.add(self)
        for thread in self._threads:
            thread.start()

    # The backend's operations, for subclasses. Each raises `BackendError` if the backend itself fails.

    def _write(self, active: ActiveTransfer, positions: list[int]) -> None:
        """Store these objects of a transfer, all or none: if one fails, delete those already written."""
        written: list[bytes] = []
        try:
            for position in positions:
                self._put_pieces(active.transfer.names[position], active.pieces(position))
                written.append(active.transfer.names[position])
        except BackendError:
            with suppress(BackendError):
                self._remove(written)
            raise

    def _put_pieces(self, name: bytes, pieces: Sequence[bytes | memoryview]) -> None:
        self._put(name, b"".join(pieces))

    def _read(self, active: ActiveTransfer, position: int) -> None:
        """Load an object into its buffer. Raises `BadObject` for a miss."""
        raise NotImplementedError

    def _end_read(self, active: ActiveTransfer) -> None:
        """Release `active.backend_state`; called once after the objects of a load."""

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        """Return the payload bytes of each object in the backend, up to the first that is absent."""
        raise NotImplementedError

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return the position of the first object that is present, and a list with its bytes; an empty list if none is.

        This default asks once per name. Backends that answer about many names at once override it.
        """
        for position, name in enumerate(names):
            if sizes := self._sizes([name]):
                return position, sizes
        return len(names), []

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        """Read an object for `get`."""
        raise NotImplementedError

    def _put(self, name: bytes, data: bytes) -> None:
        """Write a whole object."""
        raise NotImplementedError

    def _remove(self, names: Sequence[bytes]) -> None:
        """Delete these objects; absent ones are ignored."""
        raise NotImplementedError

    def _remove_bad(self, names: Sequence[bytes]) -> None:
        """Delete those of these objects that are useless, for `remove_bad`."""
        bad = [name for name in names if self._is_bad(name)]
        with self._lock:
            self._index.forget(bad)
        self._remove(bad)

    def _is_bad(self, name: bytes) -> bool:
        try:
            header = Header.from_page(self._get(name, PAGE_BYTES))
            require_whole(memoryview(self._get(name, PAGE_BYTES + header.length + 1)), name)
        except BadObject as error:
            return error.cause in BAD_OBJECT
        return False

    def _tidy(self) -> None:
        """Do occasional maintenance; called between transfers."""

    # For tools, which may block: the objects in the backend, whole and unverified.

    def names(self) -> Iterator[bytes]:
        """Yield the names of all objects in the backend, of all layouts. Raises `BackendError`."""
        raise NotImplementedError

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole object, page and payload, or its first bytes, unverified.

        Raises `InvalidArgument`, `BadObject` or `BackendError`.
        """
        require_name("name", name)
        require_num_bytes(num_bytes)
        return self._get(name, num_bytes)

    def objects(self) -> Iterator[tuple[bytes, Callable[[int | None], bytes]]]:
        """Yield each object's name, and a function that reads it as `get` does, valid until the next object.

        Raises `BackendError`.
        """
        for name in self.names():
            yield name, partial(self.get, name)

    def put(self, name: bytes, data: bytes) -> None:
        """Write a whole object. Raises `InvalidArgument` or `BackendError`."""
        require_name("name", name)
        require_data(data)
        self._put(name, data)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete these objects; absent ones are ignored. Raises `InvalidArgument` or `BackendError`."""
        require_names("names", names)
        self._remove(names)

    def remove_bad(self, names: Sequence[bytes]) -> None:
        """Read these objects again, and delete those that are useless to everyone. O(bytes).

        The first read may have gone wrong, or another engine may have replaced the object. Raises `InvalidArgument` or
        `BackendError`.
        """
        require_names("names", names)
        self._remove_bad(names)

    # The interface `Tier`, which documents these methods.

    def store(self, transfer: Transfer) -> Cause | None:
        return self._submit(transfer, False)

    def load(self, transfer: Transfer) -> Cause | None:
        return self._submit(transfer, True)

    def _submit(self, transfer: Transfer, is_load: bool) -> Cause | None:
        if not isinstance(transfer, Transfer):
            raise InvalidArgument(f"transfer is {shown(transfer)}; it must be a Transfer")
        active = ActiveTransfer(
            transfer, is_load, [_pieces(at, item, is_load) for at, item in enumerate(transfer.buffers)], 0.0
        )
        size = active.num_bytes
        with self._lock:
            if transfer.id in self._ids:
                raise InvalidArgument(f"id is {transfer.id}, which a running transfer has; use another id")
            active.since = self._clock()
            self._watch(active.since)
            cause = self._refusal(is_load, size, active.since)
            if cause is not None:
                self._stats.refusals[cause] += 1
                return cause
            queue = self._loads if is_load else self._stores
            try:
                self._ids.add(transfer.id)
                self._waiting_bytes += size
                queue.append(active)
            except BaseException:  # Ctrl-C: undo the call
                self._ids.discard(transfer.id)
                if queue and queue[-1] is active:
                    queue.pop()
                self._waiting_bytes = sum(each.num_bytes for each in self._active())
                raise
            self._changed.notify()
        return None

    def _refusal(self, is_load: bool, num_bytes: int, now: float) -> Cause | None:
        if self._is_closed:
            return Cause.CLOSED
        if not is_load and num_bytes > self._index.max_bytes:
            return Cause.FULL
        if len(self._ids) >= self._max_transfers or (
            self._ids and self._waiting_bytes + num_bytes > self._max_waiting_bytes
        ):
            return Cause.QUEUE_FULL
        return Cause.CIRCUIT_OPEN if self._all_hang or self._breakers[_kind(is_load)].refuses(now) else None

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        require_names("names", names)
        with self._lock:
            found = self._index.prefix(names)
            if self._dropped:
                found = next((at for at in range(found) if names[at] in self._dropped), found)
            if found == len(names) or self._is_closed:
                return Prefix(found, True)
            return Prefix(found, not self._query(names[found : found + _NAMES_PER_QUERY], False))

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        require_names("names", names)
        with self._lock:
            for at, name in enumerate(names):
                if name in self._index and name not in self._dropped:
                    return FirstMatch(at, True)
                if not self._is_closed and self._query(names[at : at + _NAMES_PER_QUERY], True):
                    return FirstMatch(at, False)
        return FirstMatch(len(names), True)

    def _query(self, names: Sequence[bytes], is_sparse: bool) -> bool:
        """Queue a lookup of names unless one is queued; return whether an answer will come."""
        name, now = names[0], self._clock()
        if name in self._queried:
            return True
        is_trusted = self._absent.get(name, now - self._absent_seconds) + self._absent_seconds > now
        if is_trusted or len(self._lookups) >= self._max_transfers or self._breakers[_LOADS].is_paused(now):
            return False
        self._lookups.append((list(names), is_sparse))
        self._queried.add(name)
        self._changed.notify()
        return True

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        require_names("names", names)
        with self._lock:
            now = self._clock()
            self._watch(now)
            cause = Cause.CLOSED if self._is_closed else None
            if cause is None and len(self._drops) >= self._max_transfers:
                cause = Cause.QUEUE_FULL
            if cause is None and self._breakers[_DROPS].is_paused(now):
                cause = Cause.CIRCUIT_OPEN
            if cause is not None:
                self._stats.refusals[cause] += 1
                return cause
            self._drops.append((list(names), False))  # first, so that no name stays hidden if Ctrl-C comes in between
            self._dropped.update(names)
            self._changed.notify()
        return None

    def take_results(self) -> list[TransferResult]:
        with self._lock:
            self._watch(self._clock())
            results, self._results = self._results, []
        return results

    def stats(self) -> TierStats:
        with self._lock:
            stats = copy.deepcopy(self._stats)
            stats.num_evicted, stats.num_objects = self._index.num_evicted, len(self._index)
            stats.object_bytes = self._index.num_bytes
            stats.num_waiting, stats.waiting_bytes = len(self._ids), self._waiting_bytes
            now = self._clock()
            stats.longest_seconds = max((now - active.begun for active in self._running.values()), default=0.0)
            stats.is_store_failing = self._breakers[_STORES].is_open()
            stats.is_load_failing = self._breakers[_LOADS].is_open()
        return stats

    def close(self, timeout: float = 10.0) -> bool:
        timeout = min(require_number("timeout", timeout), threading.TIMEOUT_MAX / 2)
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            for queue in (self._loads, self._stores):
                self._fail_all(queue, Cause.CLOSED)
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin_in_child(self) -> None:
        """Close the tier's copy in a forked child: it has no threads, and the transfers are its parent's."""
        self._lock = threading.RLock()  # a thread may have held the other one
        self._changed = threading.Condition(self._lock)
        self._is_closed = True
        self._index = self._index.make_empty()
        for queue in (self._loads, self._stores, self._drops, self._lookups, self._dropped):
            queue.clear()
        self._ids.clear()
        self._running.clear()
        self._busy.clear()
        self._results.clear()
        self._waiting_bytes = 0

    def check(self) -> None:
        """Raise `InvariantError` unless the index is sound and transfers and bytes are counted right. O(objects)."""
        with self._lock:
            self._index.check()
            transfers = self._active()
            if self._ids != {active.transfer.id for active in transfers}:
                raise InvariantError("tier: the ids in use are not those of the active transfers")
            num_bytes = sum(active.num_bytes for active in transfers)
            if self._waiting_bytes != num_bytes:
                raise InvariantError(f"tier: waiting bytes are {self._waiting_bytes}, transfers have {num_bytes}")

    def _active(self) -> list[ActiveTransfer]:
        return [*self._loads, *self._stores, *self._running.values()]

    # The threads.

    def _work(self) -> None:
        while True:
            try:
                with self._lock:
                    self._note_idle()
                    while not self._has_work():
                        if self._is_closed:
                            return
                        self._changed.wait()
                    action = self._next()
                action()
                self._tidy()
            except Exception:  # if the thread ended, transfers would stay without a result
                with suppress(Exception):
                    _log.exception("tier %s: a thread continues after an error", self.name)

    def _has_work(self) -> bool:
        return bool(self._loads or self._lookups or self._drops) or self._may_store()

    def _may_store(self) -> bool:
        """Return whether a store waits and none of its objects is being deleted."""
        return bool(self._stores) and all(
            names.isdisjoint(self._stores[0].transfer.names) for _, _, names in self._busy.values()
        )

    def _note_idle(self) -> None:
        """Note that this thread is idle; if it deleted objects, a store may have waited for that."""
        if self._busy.pop(get_ident(), (_LOADS,))[0] == _DROPS:
            self._changed.notify_all()

    def _next(self) -> Callable[[], None]:
        """Return the next action: deletions first, then loads, for which requests wait, then lookups and stores."""
        now = self._clock()
        if self._drops:
            action: Callable[[], None] = partial(self._drop_all, *self._drops[0])
            if self._drops[0][0]:
                self._busy[get_ident()] = _DROPS, now, frozenset(self._drops[0][0])
            self._drops.popleft()  # last: without memory the action stays in its queue
            return action
        if self._lookups and not self._loads:
            action = partial(self._answer, *self._lookups[0])
            self._busy[get_ident()] = _LOADS, now, frozenset()
            self._lookups.popleft()
            return action
        queue = self._loads or self._stores
        action, active = partial(self._run, queue[0]), queue[0]
        active.begun = now
        self._busy[get_ident()] = _kind(active.is_load), now, frozenset()
        self._running[active.transfer.id] = active
        queue.popleft()
        return action

    def _run(self, active: ActiveTransfer) -> None:
        try:
            self._run_to_end(active)
        except BaseException:  # no memory for the result
            with self._lock:
                self._running.pop(active.transfer.id, None)
                if active.is_load and active.transfer.id in self._ids:
                    _clear_all(active)
                self._mend()
            raise

    def _run_to_end(self, active: ActiveTransfer) -> None:
        try:
            causes = self._load_all(active) if active.is_load else self._store_all(active)
        except Exception as error:
            _log.exception("tier %s: transfer %d", self.name, active.transfer.id)
            if active.is_load:
                _clear_all(active)
            cause = error.cause if isinstance(error, (BackendError, BadObject)) else Cause.UNREACHABLE
            causes = dict.fromkeys(range(len(active.parts)), cause)
        with self._lock:
            del self._running[active.transfer.id]
            self._note_idle()
            self._note_health(_kind(active.is_load), not BACKEND_FAILURES.isdisjoint(causes.values()))
            self._end(active, causes)
        if causes and set(causes.values()) != {Cause.ABSENT}:
            summary = ", ".join(f"{count} {cause.value}" for cause, count in Counter(causes.values()).items())
            kind = "load" if active.is_load else "store"
            _log.warning(
                "tier %s: %s transfer %d of %d objects: %s",
                self.name,
                kind,
                active.transfer.id,
                len(active.parts),
                summary,
            )

    def _load_all(self, active: ActiveTransfer) -> dict[int, Cause]:
        """Load the objects of a transfer; return the causes of those that failed."""
        causes: dict[int, Cause] = {}
        names = active.transfer.names
        try:
            for position, name in enumerate(names):
                try:
                    self._read(active, position)
                except BadObject as error:
                    causes[position] = self._missed(name, error.cause)
        except BackendError as error:
            _log.warning("tier %s: %s", self.name, error)
            causes.update(dict.fromkeys(range(position, len(names)), error.cause))
        finally:
            self._end_read(active)
        if causes:
            _clear_all(active)
        else:
            with self._lock:
                self._index.add(names, active.lengths)
                self._index.use(names)
        return causes

    def _missed(self, name: bytes, cause: Cause) -> Cause:
        """Forget an absent object, and queue a bad one for a recheck and deletion."""
        with self._lock:
            was_known = name in self._index
            self._index.forget([name])
            if cause in BAD_OBJECT and len(self._drops) < self._max_transfers:
                self._drops.append(([name], True))
                self._changed.notify()
        return Cause.GONE if cause is Cause.ABSENT and was_known else cause

    def _store_all(self, active: ActiveTransfer) -> dict[int, Cause]:
        """Store the objects of a transfer that are absent. If that fails, return the cause for each object."""
        names = active.transfer.names
        with self._lock:
            new = [position for position, name in enumerate(names) if name not in self._index]
            evicted = self._index.evict(sum(active.lengths[position] for position in new))
        try:
            if evicted:
                self._remove(evicted)
            if new:
                self._write(active, new)
        except BackendError as error:
            _log.warning("tier %s: %s", self.name, error)
            return dict.fromkeys(range(len(names)), error.cause)
        with self._lock:
            evicted = self._index.add(
                [names[position] for position in new], [active.lengths[position] for position in new]
            )
            self._index.use(names)
            for name in names:
                self._absent.pop(name, None)
        self._delete(evicted)
        return {}

    def _answer(self, names: list[bytes], is_sparse: bool) -> None:
        """Query the backend about names, and note the answer."""
        try:
            self._note_answer(names, is_sparse)
        finally:
            with self._lock:
                self._note_idle()
                self._queried.discard(names[0])
                # All answers count from now; otherwise the first would expire before the last is read.
                self._absent.update({name: self._clock() for name in names if name in self._absent})

    def _note_answer(self, names: list[bytes], is_sparse: bool) -> None:
        """Query the backend up to the first absent name, or (`is_sparse`) up to the first present one."""
        sizes: list[int] = []
        absent = names[:1]  # also if the backend fails: it is not queried for a while
        is_failing = False
        try:
            if is_sparse:
                position, sizes = self._first(names)
                absent, names = names[:position], names[position:]
            else:
                sizes = self._sizes(names)
                absent = names[len(sizes) : len(sizes) + 1]
        except BackendError as error:
            is_failing = True
            _log.warning("tier %s: %s", self.name, error)
        except Exception:  # otherwise the caller would wait for an answer forever
            is_failing = True
            _log.exception("tier %s: a lookup of %d objects", self.name, len(names))
        with self._lock:
            evicted = self._index.add(names[: len(sizes)], sizes)
            for name in absent:
                self._absent.pop(name, None)
                self._absent[name] = self._clock()
            while len(self._absent) > _MAX_ABSENT:
                del self._absent[next(iter(self._absent))]
            if is_failing:  # a lookup is no trial, so its success does not close the breaker
                self._note_health(_LOADS, True)
        self._delete(evicted)

    def _delete(self, names: list[bytes], is_suspect: bool = False) -> None:
        """Delete objects unless deletions are failing: a later lookup finds the rest. is_suspect: recheck first."""
        with self._lock:
            if not names or self._breakers[_DROPS].refuses(self._clock()):
                return
        is_failing = False
        try:
            (self.remove_bad if is_suspect else self.remove)(names)
        except BackendError as error:
            is_failing = True
            _log.warning("tier %s: %d objects were not deleted: %s", self.name, len(names), error)
        with self._lock:
            self._note_health(_DROPS, is_failing)

    def _drop_all(self, names: list[bytes], is_suspect: bool) -> None:
        try:
            with self._lock:
                self._index.forget([] if is_suspect else names)
                self._dropped.difference_update(names)
            self._delete(names, is_suspect)
        finally:
            with self._lock:
                self._dropped.difference_update(names)
                self._note_idle()

    # Health; under the lock.

    def _watch(self, now: float) -> None:
        """Open the breaker of operations that hang, and fail the transfers that wait for them.

        If every thread hangs, everything fails. Also wakes threads whose notification was cut off by Ctrl-C.
        """
        if self._has_work():
            self._changed.notify_all()
        hanging = [(kind, begun) for kind, begun, _ in self._busy.values() if now - begun > self._slow_seconds]
        for kind, begun in hanging:
            if not self._breakers[kind].is_open():
                self._breakers[kind].fail(now, at_once=True)
                _log.warning("tier %s: one of %s takes %.1f s; the circuit breaker opens", self.name, kind, now - begun)
        self._all_hang = len(hanging) == len(self._threads)
        for kind, queue in ((_LOADS, self._loads), (_STORES, self._stores)):
            if self._all_hang or (self._breakers[kind].is_open() and len(self._busy) == len(self._threads)):
                self._fail_all(queue, Cause.CIRCUIT_OPEN)

    def _note_health(self, kind: str, is_failing: bool) -> None:
        breaker = self._breakers[kind]
        if not is_failing:
            if breaker.succeed():
                _log.warning("tier %s: %s work again", self.name, kind)
        elif breaker.fail(self._clock()):
            _log.warning("tier %s: %s fail; the circuit breaker opens", self.name, kind)

    def _fail_all(self, queue: deque[ActiveTransfer], cause: Cause) -> None:
        try:
            while queue:
                active = queue.popleft()
                self._end(active, dict.fromkeys(range(len(active.parts)), cause))
        except BaseException:  # Ctrl-C, or no memory
            self._mend()
            raise

    def _mend(self) -> None:
        """Count the transfers again, and report those that an interrupted call lost as failed."""
        active, reported = self._active(), {result.id for result in self._results}
        ids = {each.transfer.id for each in active}
        for number in self._ids - ids - reported:
            self._results.append(TransferResult(number, {0: Cause.CLOSED}, 0, 0.0))
        self._ids = ids
        self._waiting_bytes = sum(each.num_bytes for each in active)

    def _end(self, active: ActiveTransfer, causes: dict[int, Cause]) -> None:
        now, stats, size = self._clock(), self._stats, active.num_bytes
        self._results.append(TransferResult(active.transfer.id, causes, size, now - active.since))
        self._ids.discard(active.transfer.id)
        self._waiting_bytes -= size
        seconds = now - active.begun if active.begun else 0.0
        done = 0 if causes else len(active.parts)
        if active.is_load:
            stats.load_misses.update(causes.values())
            stats.num_loaded, stats.loaded_bytes = stats.num_loaded + done, stats.loaded_bytes + (size if done else 0)
            stats.load_seconds += seconds
        else:
            stats.store_failures.update(causes.values())
            stats.num_stored, stats.stored_bytes = stats.num_stored + done, stats.stored_bytes + (size if done else 0)
            stats.store_seconds += seconds


_started: weakref.WeakSet[WorkingTier] = weakref.WeakSet()


def _begin_all_in_child() -> None:
    for tier in list(_started):
        tier._begin_in_child()


os.register_at_fork(after_in_child=_begin_all_in_child)


def _kind(is_load: bool) -> str:
    return _LOADS if is_load else _STORES


def _clear_all(active: ActiveTransfer) -> None:
    """Fill the buffers of a failed load with zeros. Allocates no memory."""
    for part in (part for parts in active.parts for part in parts):
        np.frombuffer(part, np.uint8).fill(0)


def _is_plain(item: memoryview) -> bool:
    """Return whether this is an object's payload in one piece."""
    return item.format == "B" and item.ndim == 1 and item.c_contiguous and 0 < len(item) <= MAX_OBJECT_BYTES


def _pieces(position: int, item: object, is_load: bool) -> list[memoryview]:
    """Return the parts of a buffer as bytes. Raises `InvalidArgument` for other values and for read-only loads."""
    if isinstance(item, memoryview) and _is_plain(item) and not (is_load and item.readonly):
        return [item]
    pieces: list[Any] = list(item) if isinstance(item, (list, tuple)) else [item]
    found = []
    for each in pieces:
        try:
            view = memoryview(each).cast("B")
        except (TypeError, ValueError, BufferError):
            raise InvalidArgument(f"buffers[{position}] is {shown(each)}; it must be contiguous bytes") from None
        if is_load and view.readonly:
            raise InvalidArgument(f"buffers[{position}] is read-only; a load writes to it: pass a writable buffer")
        if len(view) > 0:
            found.append(view)
    size = sum(len(view) for view in found)
    if not 0 < size <= MAX_OBJECT_BYTES:
        raise InvalidArgument(f"buffers[{position}] has {size} bytes; an object has 1 to {MAX_OBJECT_BYTES}")
    return found
