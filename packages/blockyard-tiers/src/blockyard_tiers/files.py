"""A folder is a tier: a file holds an object, nothing is started, and several engines may use it at once.

    <folder>/objects/<first 2 hex digits>/<32 hex digits of the name>     page and payload
    <folder>/new/<random>                                                 what is being written

A file is written under `new` and renamed, so it is whole or absent; a crash of the machine may still tear it, and the
checksum finds that. A writer holds an flock on the file under `new`, which the kernel takes from the dead: what
has no lock there was left by a process that was killed, and is removed. There is no other lock, and no index on disk:
names, sizes and times of last use are the folder's own, and are read at the start, in the background. Until then, and
for what other engines store, the folder is asked about the names that are wanted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_bool, require_int, require_path
from blockyard.errors import InvalidArgument

from .file_io import read_into, write_all
from .header import PAGE_BYTES, BadObject, Header
from .index import ObjectIndex
from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause
from .worker import PlaceError, Task, WorkingTier

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
#: Jobs between two looks at one of the 256 folders, for what others stored or removed.
_JOBS_A_LOOK = 64
#: Folders of objects that a load has open at once.
_MOST_FOLDERS = 64
#: Objects that are noted at once, so that other threads run between.
_A_GO = 2048


class FileTier(WorkingTier):
    """Objects as plain files of a folder, which is made where it is missing; several engines may use it at once.

    max_bytes: the budget of payloads; the objects that `eviction_policy` names go where it is reached. Each engine
    keeps the budget for all that it knows to be in the folder. reads_folder: False where it need know only what it is
    asked about, as a tool. more: see `WorkingTier`.
    Raises `InvalidArgument` where the folder cannot be made or is no folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        eviction_policy: str = "lru",
        reads_folder: bool = True,
        **more: Any,
    ) -> None:
        budget = require_int("max_bytes", max_bytes, 1, 2**60)
        self._root = require_path("folder", folder).resolve()
        reads_folder = require_bool("reads_folder", reads_folder)
        try:
            with self._folders() as folders:
                folders.of("objects", makes=True)
                folders.of("new", makes=True)
        except OSError as error:
            raise InvalidArgument(f"folder is {str(folder)!r}; it cannot be used: {error.strerror}") from None
        self._num_looks = -1 if reads_folder else 0
        super().__init__(f"file:{folder}", ObjectIndex(budget, 2**26, eviction_policy), **more)
        self._remove_leftovers()
        if reads_folder:
            self._drops.append(([], False))  # has a thread look into the folder at once
        self._start()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Tells errors of the system by their causes."""
        try:
            yield
        except OSError as error:
            cause = Cause.FULL if error.errno in _FULL else Cause.UNREACHABLE
            raise PlaceError(Cause.DENIED if error.errno in _DENIED else cause, error) from None

    def _folders(self) -> _Folders:
        return _Folders(self._root)

    # Writing.

    def _write(self, task: Task, positions: list[int]) -> None:
        with self._errors():
            try:
                self._write_once(task, positions)
            except (FileNotFoundError, BlockingIOError):
                # Another engine's start came between a file and its lock, or the folder went.
                self._write_once(task, positions)

    def _write_once(self, task: Task, positions: list[int]) -> None:
        names = [task.job.names[position] for position in positions]
        written: list[tuple[str, int]] = []
        published = 0
        with self._folders() as folders:
            try:
                for position in positions:
                    written.append(_new_file(folders, task.pieces(position)))
                for name, (temporary, _) in zip(names, written, strict=True):
                    _publish(folders, temporary, name)
                    published += 1
            except OSError:
                with suppress(PlaceError):
                    self.remove(names[:published])
                raise
            finally:
                _end_files(folders, written)

    # Reading.

    def _read(self, task: Task, position: int) -> None:
        if position % _MOST_FOLDERS == 0:
            self._let_go(task)
            task.held = self._folders()
        file, size = self._open(task.held, task.job.names[position])
        try:
            with self._errors():
                header = Header.from_page(os.read(file, PAGE_BYTES))
                task.require(position, header)
                if size != PAGE_BYTES + header.length:
                    raise BadObject(Cause.TRUNCATED)
                read_into(task.parts[position], file, PAGE_BYTES)
                header.require_payload(task.parts[position])
                with suppress(OSError):
                    os.utime(file)  # the order of last use, for the next start
        finally:
            os.close(file)

    def _let_go(self, task: Task) -> None:
        if task.held is not None:
            task.held.close()

    def _open(self, folders: _Folders, name: bytes) -> tuple[int, int]:
        """Open an object's file; returns its size too. Raises `BadObject` where there is none, or something else."""
        key, above = name.hex(), -1
        try:
            above = folders.of("objects")
            file = os.open(key, _READ, dir_fd=folders.of("objects", key[:2]))
        except FileNotFoundError:
            raise BadObject(Cause.ABSENT) from None
        except OSError as error:
            if above >= 0 and error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EISDIR):
                raise BadObject(Cause.DAMAGED) from None
            with self._errors():
                raise
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise BadObject(Cause.DAMAGED)
        return file, found.st_size

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        sizes: list[int] = []
        with self._errors(), self._folders() as folders, suppress(FileNotFoundError, NotADirectoryError):
            for key in (name.hex() for name in names):
                found = os.stat(key, dir_fd=folders.of("objects", key[:2]), follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    break
                sizes.append(max(found.st_size - PAGE_BYTES, 0))
        return sizes

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        with self._errors(), self._folders() as folders:
            for place, key in enumerate(name.hex() for name in names):
                with suppress(FileNotFoundError, NotADirectoryError):
                    found = os.stat(key, dir_fd=folders.of("objects", key[:2]), follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        return place, [max(found.st_size - PAGE_BYTES, 0)]
        return len(names), []

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these files; those that are not there are no error. Raises `PlaceError`."""
        with self._errors(), self._folders() as folders:
            for key in (name.hex() for name in names):
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(key, dir_fd=folders.of("objects", key[:2]))

    # Looking around.

    def _tidy(self) -> None:
        """Look into all folders once, and then into one after another, for what others stored or removed."""
        with self._lock:
            self._num_looks += 1
            number = self._num_looks
        if number == 0:
            self._look_at_all()
        elif number % _JOBS_A_LOOK == 0:
            names, sizes, _ = self._listed(f"{number // _JOBS_A_LOOK % 256:02x}")
            with self._lock:
                evicted = self._index.add(names, sizes)
            self._clear(evicted)

    def _look_at_all(self) -> None:
        """Note what is in the folder, in the order of last use, in an index beside: the one in use is not held up."""
        listed = [self._listed(f"{key:02x}") for key in range(256)]
        order = np.argsort(np.concatenate([times for _, _, times in listed]), kind="stable")
        names = [name for each, _, _ in listed for name in each]
        with self._lock:
            known = set(self._index.items()[0])  # these come last, in their own order
        sizes = [size for _, each, _ in listed for size in each]
        index, evicted = self._index.empty(), []
        for first in range(0, len(order), _A_GO):
            some = [place for place in order[first : first + _A_GO].tolist() if names[place] not in known]
            evicted += index.add([names[place] for place in some], [sizes[place] for place in some])
        with self._lock:
            evicted += index.add(*self._index.items())
            self._index = index
        self._clear(evicted)

    def _listed(self, key: str) -> tuple[list[bytes], list[int], npt.NDArray[np.int64]]:
        """Reads the names, sizes and times of last use of one folder's objects; none where it cannot be read."""
        found: list[tuple[bytes, os.stat_result]] = []
        with suppress(OSError):
            found += self._entries(key)
        sizes = [max(each.st_size - PAGE_BYTES, 0) for _, each in found]
        return [name for name, _ in found], sizes, _times([each for _, each in found])

    def _entries(self, key: str) -> Iterator[tuple[bytes, os.stat_result]]:
        """Goes over the names and figures of a folder's objects; what has another name or is no file is passed over."""
        with self._folders() as folders, os.scandir(folders.of("objects", key)) as entries:
            for entry in entries:
                name = _name_of(entry.name, key)
                if name is not None:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield name, found

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed left under `new`: it has no lock."""
        with suppress(OSError), self._folders() as folders:
            folder = folders.of("new")
            for name in os.listdir(folder):
                with suppress(OSError):
                    file = os.open(name, _READ, dir_fd=folder)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                    finally:
                        os.close(file)

    # For tools.

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects. Raises `PlaceError`."""
        for key in range(256):
            with self._folders() as folders:
                names = self._names_in(folders, f"{key:02x}")
            yield from names

    def _names_in(self, folders: _Folders, key: str) -> list[bytes]:
        """Returns the names of a folder's objects in the order in which a disk reads them; none of a missing one."""
        found = []
        with self._errors(), suppress(FileNotFoundError), os.scandir(folders.of("objects", key)) as entries:
            for entry in entries:
                name = _name_of(entry.name, key)
                if name is not None and entry.is_file(follow_symlinks=False):
                    found.append((entry.inode(), name))
        return [name for _, name in sorted(found)]

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole file or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        with self._folders() as folders:
            return self._got(folders, name, num_bytes)

    def _got(self, folders: _Folders, name: bytes, num_bytes: int | None) -> bytes:
        opened, size = self._open(folders, name)
        with self._errors(), open(opened, "rb", buffering=0) as file:
            if num_bytes is not None:
                return file.read(num_bytes)
            if size > PAGE_BYTES + MAX_OBJECT_BYTES:
                raise BadObject(Cause.TRUNCATED)
            return file.readall()

    def objects(self) -> Iterator[tuple[bytes, Callable[[int | None], bytes]]]:
        """Goes over all objects, and opens each folder once. See `WorkingTier.objects`."""
        for key in range(256):
            with self._folders() as folders:
                for name in self._names_in(folders, f"{key:02x}"):
                    yield name, partial(self._got, folders, name)

    def put(self, name: bytes, data: bytes) -> None:
        """Write a whole file. Raises `PlaceError`."""
        with self._errors(), self._folders() as folders:
            temporary, file = _new_file(folders, [data])
            try:
                _publish(folders, temporary, name)
            finally:
                _end_files(folders, [(temporary, file)])


class _Folders:
    """Opens the folders of a tier while a call lasts: each once, from the one above it, and none through a link.

    They are not kept for longer: others may remove and make them again.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folders; they are opened anew where one is asked for."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def of(self, *path: str, makes: bool = False) -> int:
        """Returns an open folder, as "new", or "objects" and two hex digits. Raises `OSError` where it is none."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = self._opened(path, makes)
        return found

    def _opened(self, path: tuple[str, ...], makes: bool) -> int:
        if not path and makes:
            self._root.mkdir(parents=True, exist_ok=True)
        if not path:
            return os.open(self._root, _FOLDER)
        above = self.of(*path[:-1], makes=makes)
        try:
            return os.open(path[-1], _FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not makes:
                raise
            with suppress(FileExistsError):
                os.mkdir(path[-1], dir_fd=above)
            return os.open(path[-1], _FOLDER, dir_fd=above)


def _new_file(folders: _Folders, pieces: Sequence[bytes | memoryview]) -> tuple[str, int]:
    """Write a file under `new`; returns its name and its open descriptor, which holds the lock."""
    name = os.urandom(NAME_BYTES).hex()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(name, flags, 0o666, dir_fd=folders.of("new", makes=True))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(file, pieces)
    except BaseException:
        _end_files(folders, [(name, file)])
        raise
    return name, file


def _publish(folders: _Folders, temporary: str, name: bytes) -> None:
    key = name.hex()
    os.rename(temporary, key, src_dir_fd=folders.of("new"), dst_dir_fd=folders.of("objects", key[:2], makes=True))


def _end_files(folders: _Folders, files: list[tuple[str, int]]) -> None:
    """Close files, and remove those that were not renamed."""
    for name, file in files:
        with suppress(OSError):
            os.unlink(name, dir_fd=folders.of("new"))
        os.close(file)


def _times(found: list[os.stat_result]) -> npt.NDArray[np.int64]:
    """Returns times of last use; those beyond the years 1677 and 2262, which a file may have, are the ends."""
    return np.array([min(max(each.st_mtime_ns, -(2**63)), 2**63 - 1) for each in found], np.int64)


def _name_of(text: str, key: str) -> bytes | None:
    """Reads the name in a file's name; None for anything but 32 small hex digits that begin with its folder's."""
    if len(text) != 2 * NAME_BYTES or not text.startswith(key):
        return None
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if name.hex() == text else None
