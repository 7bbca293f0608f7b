"""All tiers have this in common: queues with bounds, threads that do the work, causes, circuits and figures."""

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

from .circuit import Circuit
from .header import PAGE_BYTES, BadObject, Header, checksum_of, require_whole
from .index import ObjectIndex
from .tier import (
    BAD_OBJECT,
    ILL_PLACE,
    MAX_OBJECT_BYTES,
    Cause,
    First,
    Job,
    Outcome,
    Prefix,
    TierStats,
    require_names,
)

_log = logging.getLogger(__name__)
#: Names that a place is asked about at once, and answers "no" that are remembered.
_MOST_ASKED = 256
_MOST_ABSENT = 4096
#: What is asked of a place, each with a circuit of its own; questions go by that of loads.
_LOADS, _STORES, _DROPS = "loads", "stores", "drops"


class PlaceError(Exception):
    """A place did not do what it was asked; `cause` says why, the text what it said."""

    def __init__(self, cause: Cause, text: object = "") -> None:
        super().__init__(str(text))
        self.cause = cause


@dataclass(slots=True, eq=False)
class Task:
    """A task is a job with its buffers as bytes, as a place sees it. parts: the pieces of each object's payload, of
    `lengths` bytes; num_bytes: of all."""

    job: Job
    is_load: bool
    parts: list[list[memoryview]]
    since: float
    begun: float = 0.0
    #: What the place keeps from one object of a load to the next.
    held: Any = None
    #: Of its one object, where the object came with it.
    known_header: Header | None = None
    lengths: list[int] = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [len(parts[0]) if len(parts) == 1 else sum(len(part) for part in parts) for parts in self.parts]
        self.num_bytes = sum(self.lengths)

    def length(self, position: int) -> int:
        """Returns the bytes of one payload."""
        return self.lengths[position]

    def header(self, position: int) -> Header:
        """Returns the header under which an object is stored. O(bytes)."""
        if self.known_header is not None:
            return self.known_header
        job, parts = self.job, self.parts[position]
        names = (job.names[position], job.tokens[position], job.layout)
        return Header(*names, self.length(position), checksum_of(parts))

    def pieces(self, position: int) -> list[bytes | memoryview]:
        """Returns the bytes of a whole object, page and payload. O(bytes)."""
        return [self.header(position).to_page(), *self.parts[position]]

    def require(self, position: int, header: Header) -> None:
        """Raise `BadObject` unless this is the header of the object that is wanted."""
        job = self.job
        header.require(job.names[position], job.tokens[position], job.layout, self.length(position))

    def fill(self, position: int, data: memoryview) -> None:
        """Verify a whole object and copy its payload into the buffer. O(bytes). Raises `BadObject`."""
        header = Header.from_page(bytes(data[:PAGE_BYTES]))
        self.require(position, header)
        header.require_payload([data[PAGE_BYTES:]])
        first = len(data) - self.length(position)
        for part in self.parts[position]:
            part[:] = data[first : first + len(part)]
            first += len(part)


class WorkingTier:
    """A working tier is a `Tier` over a place, which subclasses write, read, ask and clear by the methods below.

    num_threads: how many jobs run at once. max_jobs, max_waiting_bytes: that wait or run, of stores and loads together.
    slow_seconds: a job that runs longer opens the circuit. absent_seconds: how long "not there" is believed.
    """

    def __init__(
        self,
        name: str,
        index: ObjectIndex,
        num_threads: int = 2,
        max_jobs: int = 256,
        max_waiting_bytes: int = 2**30,
        slow_seconds: float = 10.0,
        absent_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = printable(name)
        self._index = index
        self._max_jobs = require_int("max_jobs", max_jobs, 1, 2**20)
        self._max_waiting_bytes = require_int("max_waiting_bytes", max_waiting_bytes, 1, 2**50)
        self._slow_seconds = slow_seconds
        self._absent_seconds = absent_seconds
        self._clock = clock
        #: `with` takes and leaves it in no frame of Python, in which Ctrl-C would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        #: Names, and whether they go only where a second look finds them bad.
        self._drops: deque[tuple[list[bytes], bool]] = deque()
        #: Names of drops that wait. The threads alone change the index: Ctrl-C in a caller would leave it half done.
        self._dropped: set[bytes] = set()
        #: Names, and whether all up to the first that is there are wanted, and not all before the first that is not.
        self._questions: deque[tuple[list[bytes], bool]] = deque()
        self._asked: set[bytes] = set()
        self._absent: dict[bytes, float] = {}
        self._running: dict[int, Task] = {}
        self._ids: set[int] = set()
        self._waiting_bytes = 0
        self._outcomes: list[Outcome] = []
        self._stats = TierStats()
        #: What the threads are at, by thread, since when, and the names that it removes.
        self._busy: dict[int, tuple[str, float, frozenset[bytes]]] = {}
        self._all_hang = False
        self._circuits = {kind: Circuit() for kind in (_LOADS, _STORES, _DROPS)}
        self._is_closed = False
        count = require_int("num_threads", num_threads, 1, 64)
        self._threads = [threading.Thread(target=self._work, name=f"tier {name}", daemon=True) for _ in range(count)]

    def _start(self) -> None:
        """Start the threads; the last line of a subclass's `__init__`."""
        _started.add(self)
        for thread in self._threads:
            thread.start()

    # What a subclass says of its place. Each raises `PlaceError` where the place fails as a whole.

    def _write(self, task: Task, positions: list[int]) -> None:
        """Store these objects of a task, all or none of them: where one fails, those before it are removed again."""
        written: list[bytes] = []
        try:
            for position in positions:
                self._put_pieces(task.job.names[position], task.pieces(position))
                written.append(task.job.names[position])
        except PlaceError:
            with suppress(PlaceError):
                self.remove(written)
            raise

    def _put_pieces(self, name: bytes, pieces: Sequence[bytes | memoryview]) -> None:
        self.put(name, b"".join(pieces))

    def _read(self, task: Task, position: int) -> None:
        """Load an object into its buffer. Raises `BadObject` for a miss."""
        raise NotImplementedError

    def _let_go(self, task: Task) -> None:
        """End what `_read` left in `task.held`; called once all objects of a load were read, or are not read."""

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        """Returns the bytes of each object in the place, up to the first that is not there."""
        raise NotImplementedError

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return the position of the first object that is in the place, and its bytes; none after all names.

        One question a name; a place that answers about many at once does it in one.
        """
        for place, name in enumerate(names):
            if sizes := self._sizes([name]):
                return place, sizes
        return len(names), []

    def _tidy(self) -> None:
        """Do what is to be done now and then; called between jobs."""

    # For tools, which may wait: what is in the place, and whole objects as they are.

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects in the place, of all layouts. Raises `PlaceError`."""
        raise NotImplementedError

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole object, page and payload, or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        raise NotImplementedError

    def objects(self) -> Iterator[tuple[bytes, Callable[[int | None], bytes]]]:
        """Goes over all objects: the name, and what reads it as `get` does until the next one. Raises `PlaceError`."""
        for name in self.names():
            yield name, partial(self.get, name)

    def put(self, name: bytes, data: bytes) -> None:
        """Write a whole object. Raises `PlaceError`."""
        raise NotImplementedError

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these objects; those that are not there are no error. Raises `PlaceError`."""
        raise NotImplementedError

    def remove_bad(self, names: Sequence[bytes]) -> None:
        """Removes those of these objects that are useless to all, as another look finds. O(bytes). Raises `PlaceError`.

        What was found first may have been the answer to another question, or is no longer there.
        """
        bad = [name for name in names if self._is_bad(name)]
        with self._lock:
            self._index.forget(bad)
        self.remove(bad)

    def _is_bad(self, name: bytes) -> bool:
        try:
            header = Header.from_page(self.get(name, PAGE_BYTES))
            require_whole(memoryview(self.get(name, PAGE_BYTES + header.length + 1)), name)
        except BadObject as error:
            return error.cause in BAD_OBJECT
        return False

    # The calls of a `Tier`; they are documented there.

    def store(self, job: Job) -> Cause | None:
        """Take a job to store objects. See `Tier.store`."""
        return self._take(job, False)

    def load(self, job: Job) -> Cause | None:
        """Take a job to load objects. See `Tier.load`."""
        return self._take(job, True)

    def _take(self, job: Job, is_load: bool) -> Cause | None:
        if not isinstance(job, Job):
            raise InvalidArgument(f"job is {shown(job)}; it must be a Job")
        task = Task(job, is_load, [_pieces(place, item, is_load) for place, item in enumerate(job.buffers)], 0.0)
        size = task.num_bytes
        with self._lock:
            if job.id in self._ids:
                raise InvalidArgument(f"id is {job.id}, the id of a job that runs; each has its own")
            task.since = self._clock()
            self._watch(task.since)
            cause = self._refusal(is_load, size, task.since)
            if cause is not None:
                self._stats.refused[cause] += 1
                return cause
            queue = self._loads if is_load else self._stores
            try:
                self._ids.add(job.id)
                self._waiting_bytes += size
                queue.append(task)
            except BaseException:  # Ctrl-C: it is as if it had not been called
                self._ids.discard(job.id)
                if queue and queue[-1] is task:
                    queue.pop()
                self._waiting_bytes = sum(each.num_bytes for each in self._tasks())
                raise
            self._changed.notify()
        return None

    def _refusal(self, is_load: bool, num_bytes: int, now: float) -> Cause | None:
        if self._is_closed:
            return Cause.CLOSED
        if not is_load and num_bytes > self._index.max_bytes:
            return Cause.FULL
        if len(self._ids) >= self._max_jobs or (
            self._ids and self._waiting_bytes + num_bytes > self._max_waiting_bytes
        ):
            return Cause.QUEUE_FULL
        return Cause.CIRCUIT_OPEN if self._all_hang or self._circuits[_kind(is_load)].refuses(now) else None

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        """Say how many names are known. See `Tier.longest_prefix`."""
        require_names("names", names)
        with self._lock:
            found = self._index.prefix(names)
            if self._dropped:
                found = next((place for place in range(found) if names[place] in self._dropped), found)
            if found == len(names) or self._is_closed:
                return Prefix(found, True)
            return Prefix(found, not self._is_asked(names[found : found + _MOST_ASKED], False))

    def first_of(self, names: Sequence[bytes]) -> First:
        """Say which name is the first that is known. See `Tier.first_of`."""
        require_names("names", names)
        with self._lock:
            for place, name in enumerate(names):
                if name in self._index and name not in self._dropped:
                    return First(place, True)
                if not self._is_closed and self._is_asked(names[place : place + _MOST_ASKED], True):
                    return First(place, False)
        return First(len(names), True)

    def _is_asked(self, names: Sequence[bytes], is_sparse: bool) -> bool:
        """Ask the place about names of which the first is not known, unless it was; say whether an answer will come."""
        name, now = names[0], self._clock()
        if name in self._asked:
            return True
        believed = self._absent.get(name, now - self._absent_seconds) + self._absent_seconds > now
        if believed or len(self._questions) >= self._max_jobs or self._circuits[_LOADS].rests(now):
            return False
        self._questions.append((list(names), is_sparse))
        self._asked.add(name)
        self._changed.notify()
        return True

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        """Forget objects and have them removed. See `Tier.drop`."""
        require_names("names", names)
        with self._lock:
            now = self._clock()
            self._watch(now)
            cause = Cause.CLOSED if self._is_closed else None
            if cause is None and len(self._drops) >= self._max_jobs:
                cause = Cause.QUEUE_FULL
            if cause is None and self._circuits[_DROPS].rests(now):
                cause = Cause.CIRCUIT_OPEN
            if cause is not None:
                self._stats.refused[cause] += 1
                return cause
            self._dropped.update(names)
            self._drops.append((list(names), False))
            self._changed.notify()
        return None

    def finished(self) -> list[Outcome]:
        """Take the outcomes so far. See `Tier.finished`."""
        with self._lock:
            self._watch(self._clock())
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def stats(self) -> TierStats:
        """Copy the figures. See `Tier.stats`."""
        with self._lock:
            stats = copy.deepcopy(self._stats)
            stats.num_evicted, stats.num_objects = self._index.num_evicted, len(self._index)
            stats.object_bytes = self._index.num_bytes
            stats.num_waiting, stats.waiting_bytes = len(self._ids), self._waiting_bytes
            now = self._clock()
            stats.longest_seconds = max((now - task.begun for task in self._running.values()), default=0.0)
            stats.is_store_open = self._circuits[_STORES].is_open()
            stats.is_load_open = self._circuits[_LOADS].is_open()
        return stats

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads. See `Tier.close`."""
        timeout = min(require_number("timeout", timeout), threading.TIMEOUT_MAX / 2)
        with self._lock:
            self._is_closed = True
            for queue in (self._loads, self._stores):
                self._fail_all(queue, Cause.CLOSED)
            self._changed.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin_in_child(self) -> None:
        """A forked child has no threads: its copy of the tier is closed, and the jobs are its parent's."""
        self._lock = threading.RLock()  # a thread may have held the other one
        self._changed = threading.Condition(self._lock)
        self._is_closed = True
        self._index = self._index.empty()
        for queue in (self._loads, self._stores, self._drops, self._questions, self._dropped):
            queue.clear()
        self._ids.clear()
        self._running.clear()
        self._busy.clear()
        self._outcomes.clear()
        self._waiting_bytes = 0

    def check(self) -> None:
        """Raise `InvariantError` unless the index is sound, and what waits or runs is counted right. O(objects)."""
        with self._lock:
            self._index.check()
            tasks = self._tasks()
            if self._ids != {task.job.id for task in tasks}:
                raise InvariantError("tier: the ids in use are not those of the jobs that wait or run")
            if self._waiting_bytes != sum(task.num_bytes for task in tasks):
                raise InvariantError(f"tier: {self._waiting_bytes} bytes are counted for the jobs that wait or run")

    def _tasks(self) -> list[Task]:
        return [*self._loads, *self._stores, *self._running.values()]

    # The threads.

    def _work(self) -> None:
        while True:
            with self._lock:
                self._rest()
                while not self._has_work():
                    if self._is_closed:
                        return
                    self._changed.wait()
                action = self._next()
            try:
                action()
                self._tidy()
            except Exception:  # a thread that ended would leave jobs without an outcome
                _log.exception("tier %s: a thread goes on after an error", self.name)

    def _has_work(self) -> bool:
        return bool(self._loads or self._questions or self._drops) or self._may_store()

    def _may_store(self) -> bool:
        """Say whether there is a store, and none of its objects is just being removed."""
        return bool(self._stores) and all(
            names.isdisjoint(self._stores[0].job.names) for _, _, names in self._busy.values()
        )

    def _rest(self) -> None:
        """This thread is at nothing any more; where it removed objects, a store may have waited for that."""
        if self._busy.pop(get_ident(), (_LOADS,))[0] == _DROPS:
            self._changed.notify_all()

    def _next(self) -> Callable[[], None]:
        """Takes what comes next: drops, then loads, for which requests wait, then questions and stores."""
        now = self._clock()
        if self._drops:
            dropped = self._drops.popleft()
            if dropped[0]:
                self._busy[get_ident()] = _DROPS, now, frozenset(dropped[0])
            return lambda: self._drop_all(*dropped)
        if self._questions and not self._loads:
            question = self._questions.popleft()
            self._busy[get_ident()] = _LOADS, now, frozenset()
            return lambda: self._answer(*question)
        task = (self._loads or self._stores).popleft()
        task.begun = now
        self._running[task.job.id] = task
        self._busy[get_ident()] = _kind(task.is_load), now, frozenset()
        return lambda: self._run(task)

    def _run(self, task: Task) -> None:
        try:
            causes = self._load_all(task) if task.is_load else self._store_all(task)
        except Exception as error:
            _log.exception("tier %s: job %d", self.name, task.job.id)
            if task.is_load:
                _clear_all(task)
            causes = dict.fromkeys(range(len(task.parts)), self._cause_of(error))
        with self._lock:
            del self._running[task.job.id]
            self._rest()
            self._note_health(_kind(task.is_load), not ILL_PLACE.isdisjoint(causes.values()))
            self._end(task, causes)
        if causes and set(causes.values()) != {Cause.ABSENT}:
            told = ", ".join(f"{count} {cause.value}" for cause, count in Counter(causes.values()).items())
            what = "load" if task.is_load else "store"
            _log.warning("tier %s: %s job %d of %d objects: %s", self.name, what, task.job.id, len(task.parts), told)

    def _cause_of(self, error: Exception) -> Cause:
        return error.cause if isinstance(error, (PlaceError, BadObject)) else Cause.UNREACHABLE

    def _load_all(self, task: Task) -> dict[int, Cause]:
        """Load each object of a task; returns the causes of those that miss."""
        causes: dict[int, Cause] = {}
        names = task.job.names
        try:
            for position, name in enumerate(names):
                try:
                    self._read(task, position)
                except BadObject as error:
                    causes[position] = self._missed(name, error.cause)
        except PlaceError as error:
            _log.warning("tier %s: %s", self.name, error)
            causes.update(dict.fromkeys(range(position, len(names)), error.cause))
        finally:
            self._let_go(task)
        if causes:
            _clear_all(task)
        else:
            with self._lock:
                self._index.add(names, [task.length(position) for position in range(len(names))])
                self._index.use(names)
        return causes

    def _missed(self, name: bytes, cause: Cause) -> Cause:
        """Note that an object is not there; one that is useless to all is removed, after the job."""
        with self._lock:
            was_known = name in self._index
            self._index.forget([name])
            if cause in BAD_OBJECT and len(self._drops) < self._max_jobs:
                self._drops.append(([name], True))
                self._changed.notify()
        return Cause.GONE if cause is Cause.ABSENT and was_known else cause

    def _store_all(self, task: Task) -> dict[int, Cause]:
        """Store the objects of a task that are not there; returns why none of them was stored, for each."""
        names = task.job.names
        with self._lock:
            new = [position for position, name in enumerate(names) if name not in self._index]
            evicted = self._index.evict(sum(task.length(position) for position in new))
        try:
            if evicted:
                self.remove(evicted)
            if new:
                self._write(task, new)
        except PlaceError as error:
            _log.warning("tier %s: %s", self.name, error)
            return dict.fromkeys(range(len(names)), error.cause)
        with self._lock:
            evicted = self._index.add([names[position] for position in new], [task.length(each) for each in new])
            self._index.use(names)
            for name in names:
                self._absent.pop(name, None)
        self._clear(evicted)
        return {}

    def _answer(self, names: list[bytes], is_sparse: bool) -> None:
        """Ask the place about names, and note what it says."""
        try:
            self._note_answer(names, is_sparse)
        finally:
            with self._lock:
                self._rest()
                self._asked.discard(names[0])
                # An answer is of one moment: else its beginning is forgotten before its end is read, where places wait.
                self._absent.update({name: self._clock() for name in names if name in self._absent})

    def _note_answer(self, names: list[bytes], is_sparse: bool) -> None:
        """Ask about names up to the first that is not there, or (is_sparse) up to the first that is."""
        sizes: list[int] = []
        absent = names[:1]  # also if the place fails: it is left alone for a while
        is_ill = False
        try:
            if is_sparse:
                place, sizes = self._first(names)
                absent, names = names[:place], names[place:]
            else:
                sizes = self._sizes(names)
                absent = names[len(sizes) : len(sizes) + 1]
        except PlaceError as error:
            is_ill = True
            _log.warning("tier %s: %s", self.name, error)
        except Exception:  # the caller would wait for an answer forever
            is_ill = True
            _log.exception("tier %s: a question about %d objects", self.name, len(names))
        with self._lock:
            evicted = self._index.add(names[: len(sizes)], sizes)
            for name in absent:
                self._absent.pop(name, None)
                self._absent[name] = self._clock()
            while len(self._absent) > _MOST_ABSENT:
                del self._absent[next(iter(self._absent))]
            if is_ill:  # an answer closes no circuit: it is no trial
                self._note_health(_LOADS, True)
        self._clear(evicted)

    def _clear(self, names: list[bytes], is_suspect: bool = False) -> None:
        """Remove objects, unless removing has failed of late: what stays is found again. is_suspect: `remove_bad`."""
        with self._lock:
            if not names or self._circuits[_DROPS].refuses(self._clock()):
                return
        is_ill = False
        try:
            (self.remove_bad if is_suspect else self.remove)(names)
        except PlaceError as error:
            is_ill = True
            _log.warning("tier %s: %d objects were not removed: %s", self.name, len(names), error)
        with self._lock:
            self._note_health(_DROPS, is_ill)

    def _drop_all(self, names: list[bytes], is_suspect: bool) -> None:
        with self._lock:
            self._index.forget([] if is_suspect else names)
            self._dropped.difference_update(names)
        try:
            self._clear(names, is_suspect)
        finally:
            with self._lock:
                self._rest()

    # Health; under the lock.

    def _watch(self, now: float) -> None:
        """Open the circuit of what hangs, and let go of the jobs that wait behind it; all of them where each thread
        hangs. Wake threads that a Ctrl-C kept from being woken."""
        if self._has_work():
            self._changed.notify_all()
        hanging = [(kind, begun) for kind, begun, _ in self._busy.values() if now - begun > self._slow_seconds]
        for kind, begun in hanging:
            if not self._circuits[kind].is_open():
                self._circuits[kind].failed(now, at_once=True)
                _log.warning("tier %s: one of %s takes %.1f s; the circuit opens", self.name, kind, now - begun)
        self._all_hang = len(hanging) == len(self._threads)
        for kind, queue in ((_LOADS, self._loads), (_STORES, self._stores)):
            if self._all_hang or (self._circuits[kind].is_open() and len(self._busy) == len(self._threads)):
                self._fail_all(queue, Cause.CIRCUIT_OPEN)

    def _note_health(self, kind: str, is_ill: bool) -> None:
        circuit = self._circuits[kind]
        if not is_ill:
            if circuit.succeeded():
                _log.warning("tier %s: %s work again", self.name, kind)
        elif circuit.failed(self._clock()):
            _log.warning("tier %s: %s fail; the circuit opens", self.name, kind)

    def _fail_all(self, queue: deque[Task], cause: Cause) -> None:
        while queue:
            task = queue.popleft()
            self._end(task, dict.fromkeys(range(len(task.parts)), cause))

    def _end(self, task: Task, causes: dict[int, Cause]) -> None:
        now, stats, size = self._clock(), self._stats, task.num_bytes
        self._ids.discard(task.job.id)
        self._waiting_bytes -= size
        self._outcomes.append(Outcome(task.job.id, causes, size, now - task.since))
        seconds = now - task.begun if task.begun else 0.0
        done = 0 if causes else len(task.parts)
        if task.is_load:
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


def _clear_all(task: Task) -> None:
    """Write zeros into all buffers of a load that failed: what was read of others' bytes goes. It takes no memory."""
    for part in (part for parts in task.parts for part in parts):
        np.frombuffer(part, np.uint8).fill(0)


def _is_plain(item: memoryview) -> bool:
    """Says whether these are the bytes of an object, in one piece."""
    return item.format == "B" and item.ndim == 1 and item.c_contiguous and 0 < len(item) <= MAX_OBJECT_BYTES


def _pieces(place: int, item: object, is_load: bool) -> list[memoryview]:
    """Returns the pieces of a buffer as bytes. Raises `InvalidArgument` for what is none, or cannot be written."""
    if isinstance(item, memoryview) and _is_plain(item) and not (is_load and item.readonly):
        return [item]
    pieces: list[Any] = list(item) if isinstance(item, (list, tuple)) else [item]
    found = []
    for each in pieces:
        try:
            view = memoryview(each).cast("B")
        except (TypeError, ValueError, BufferError):
            raise InvalidArgument(f"buffers[{place}] is {shown(each)}; contiguous bytes are needed") from None
        if is_load and view.readonly:
            raise InvalidArgument(f"buffers[{place}] is read-only; a load writes it")
        if len(view) > 0:
            found.append(view)
    size = sum(len(view) for view in found)
    if not 0 < size <= MAX_OBJECT_BYTES:
        raise InvalidArgument(f"buffers[{place}] has {size} bytes; an object has 1 to {MAX_OBJECT_BYTES}")
    return found
