"""A tier in a folder: one file per object, no server, shared by several engines.

    <folder>/objects/<first 2 hex digits>/<32 hex digits of the name>     page and payload
    <folder>/new/<random>                                                 a file that is being written

A file is written under `new` and renamed, so it is complete or absent. A crash of the machine may still tear it, which
the checksum detects. A writer holds an flock on its file under `new`, which the kernel releases if the process dies:
unlocked files there are leftovers of killed processes and are deleted. There is no other lock, and no index on disk:
names, sizes and times of last use are read from the folder in the background after the start. Until then, and for
objects of other engines, the folder is queried about the requested names.
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
from .worker import ActiveTransfer, BackendError, WorkingTier

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
#: Transfers between two scans of one of the 256 folders.
_TRANSFERS_PER_SCAN = 64
#: Folders that a load has open at once.
_MAX_FOLDERS = 64
#: Objects added to an index in one call, so that other threads run in between.
_OBJECTS_PER_CALL = 2048


class FileTier(WorkingTier):
    """Keeps objects as files in a folder, which is created if needed. Several engines may share it.

    Args:
        folder: the folder.
        max_bytes: budget of payload bytes. Each engine applies it to all objects that it knows to be in the folder.
        eviction_policy: chooses the objects to delete when the budget is reached.
        reads_folder: False to know only the names that are looked up, as for a tool.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: the folder cannot be created, or is not a folder.
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
            raise InvalidArgument(f"folder is {str(folder)!r}, which cannot be used: {error.strerror}") from None
        self._num_tidied = -1 if reads_folder else 0
        super().__init__(f"file:{folder}", ObjectIndex(budget, 2**26, eviction_policy), **more)
        self._remove_leftovers()
        if reads_folder:
            self._drops.append(([], False))  # lets a thread scan the folder at once
        self._start()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the system as `BackendError`."""
        try:
            yield
        except OSError as error:
            cause = Cause.FULL if error.errno in _FULL else Cause.UNREACHABLE
            raise BackendError(Cause.DENIED if error.errno in _DENIED else cause, error) from None

    def _folders(self) -> _Folders:
        return _Folders(self._root)

    # Writing.

    def _write(self, active: ActiveTransfer, positions: list[int]) -> None:
        with self._errors():
            try:
                self._write_once(active, positions)
            except (FileNotFoundError, BlockingIOError):
                # Another engine started before the file was locked and deleted it, or the folder was removed.
                self._write_once(active, positions)

    def _write_once(self, active: ActiveTransfer, positions: list[int]) -> None:
        names = [active.transfer.names[position] for position in positions]
        written: list[tuple[str, int]] = []
        published = 0
        with self._folders() as folders:
            try:
                for position in positions:
                    written.append(_new_file(folders, active.pieces(position)))
                for name, (temporary, _) in zip(names, written, strict=True):
                    _publish(folders, temporary, name)
                    published += 1
            except OSError:
                with suppress(BackendError):
                    self._remove(names[:published])
                raise
            finally:
                _end_files(folders, written)

    # Reading.

    def _read(self, active: ActiveTransfer, position: int) -> None:
        if position % _MAX_FOLDERS == 0:
            self._end_read(active)
            active.backend_state = self._folders()
        file, size = self._open(active.backend_state, active.transfer.names[position])
        try:
            with self._errors():
                header = Header.from_page(os.read(file, PAGE_BYTES))
                active.require(position, header)
                if size != PAGE_BYTES + header.length:
                    raise BadObject(Cause.TRUNCATED)
                read_into(active.parts[position], file, PAGE_BYTES)
                header.require_payload(active.parts[position])
                with suppress(OSError):
                    os.utime(file)  # the time of last use, for the next start
        finally:
            os.close(file)

    def _end_read(self, active: ActiveTransfer) -> None:
        if active.backend_state is not None:
            active.backend_state.close()

    def _open(self, folders: _Folders, name: bytes) -> tuple[int, int]:
        """Open an object's file, and return its size too. Raises `BadObject` if it is absent or not a regular file."""
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
            for position, key in enumerate(name.hex() for name in names):
                with suppress(FileNotFoundError, NotADirectoryError):
                    found = os.stat(key, dir_fd=folders.of("objects", key[:2]), follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        return position, [max(found.st_size - PAGE_BYTES, 0)]
        return len(names), []

    def _remove(self, names: Sequence[bytes]) -> None:
        with self._errors(), self._folders() as folders:
            for key in (name.hex() for name in names):
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(key, dir_fd=folders.of("objects", key[:2]))

    # Scanning the folder.

    def _tidy(self) -> None:
        """Scan all folders once, and then one after another, for objects that others stored or removed."""
        with self._lock:
            self._num_tidied += 1
            number = self._num_tidied
        if number == 0:
            self._scan_all()
        elif number % _TRANSFERS_PER_SCAN == 0:
            names, sizes, _ = self._scan(f"{number // _TRANSFERS_PER_SCAN % 256:02x}")
            with self._lock:
                evicted = self._index.add(names, sizes)
            self._delete(evicted)

    def _scan_all(self) -> None:
        """Read the folder, in the order of last use, into a second index, so that the current one is not blocked."""
        scanned = [self._scan(f"{key:02x}") for key in range(256)]
        order = np.argsort(np.concatenate([times for _, _, times in scanned]), kind="stable")
        names = [name for each, _, _ in scanned for name in each]
        with self._lock:
            known = set(self._index.items()[0])  # these are added last, in their own order
        sizes = [size for _, each, _ in scanned for size in each]
        index, evicted = self._index.make_empty(), []
        for first in range(0, len(order), _OBJECTS_PER_CALL):
            new = [at for at in order[first : first + _OBJECTS_PER_CALL].tolist() if names[at] not in known]
            evicted += index.add([names[at] for at in new], [sizes[at] for at in new])
        with self._lock:
            evicted += index.add(*self._index.items())
            self._index = index
        self._delete(evicted)

    def _scan(self, key: str) -> tuple[list[bytes], list[int], npt.NDArray[np.int64]]:
        """Return names, sizes and times of last use of one folder's objects; nothing if it cannot be read."""
        found: list[tuple[bytes, os.stat_result]] = []
        with suppress(OSError):
            found += self._entries(key)
        sizes = [max(each.st_size - PAGE_BYTES, 0) for _, each in found]
        return [name for name, _ in found], sizes, _times([each for _, each in found])

    def _entries(self, key: str) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield names and file status of a folder's objects; other entries are skipped."""
        with self._folders() as folders, os.scandir(folders.of("objects", key)) as entries:
            for entry in entries:
                name = _name_of(entry.name, key)
                if name is not None:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield name, found

    def _remove_leftovers(self) -> None:
        """Delete the unlocked files that killed processes left under `new`."""
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
        for key in range(256):
            with self._folders() as folders:
                names = self._names_in(folders, f"{key:02x}")
            yield from names

    def _names_in(self, folders: _Folders, key: str) -> list[bytes]:
        """Return the names of a folder's objects in disk order; none if the folder is missing."""
        found = []
        with self._errors(), suppress(FileNotFoundError), os.scandir(folders.of("objects", key)) as entries:
            for entry in entries:
                name = _name_of(entry.name, key)
                if name is not None and entry.is_file(follow_symlinks=False):
                    found.append((entry.inode(), name))
        return [name for _, name in sorted(found)]

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        with self._folders() as folders:
            return self._read_file(folders, name, num_bytes)

    def _read_file(self, folders: _Folders, name: bytes, num_bytes: int | None) -> bytes:
        opened, size = self._open(folders, name)
        with self._errors(), open(opened, "rb", buffering=0) as file:
            if num_bytes is not None:
                return file.read(num_bytes)
            if size > PAGE_BYTES + MAX_OBJECT_BYTES:
                raise BadObject(Cause.TRUNCATED)
            return file.readall()

    def objects(self) -> Iterator[tuple[bytes, Callable[[int | None], bytes]]]:
        for key in range(256):
            with self._folders() as folders:
                for name in self._names_in(folders, f"{key:02x}"):
                    yield name, partial(self._read_file, folders, name)

    def _put(self, name: bytes, data: bytes) -> None:
        with self._errors(), self._folders() as folders:
            temporary, file = _new_file(folders, [data])
            try:
                _publish(folders, temporary, name)
            finally:
                _end_files(folders, [(temporary, file)])


class _Folders:
    """The open folders of a tier during one call: each is opened once, from its parent, and never through a link.

    They are not kept open longer, since other processes may remove and recreate them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folders. They are opened again on demand."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def of(self, *path: str, makes: bool = False) -> int:
        """Return the descriptor of a folder, such as "new", or "objects" and two hex digits. Raises `OSError`."""
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
    """Write a file under `new`; return its name and its open descriptor, which holds the lock."""
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
    """Close files, and delete those that were not renamed."""
    for name, file in files:
        with suppress(OSError):
            os.unlink(name, dir_fd=folders.of("new"))
        os.close(file)


def _times(found: list[os.stat_result]) -> npt.NDArray[np.int64]:
    """Return the times of last use, limited to the years 1677 to 2262 that fit into 64 bits."""
    return np.array([min(max(each.st_mtime_ns, -(2**63)), 2**63 - 1) for each in found], np.int64)


def _name_of(text: str, key: str) -> bytes | None:
    """Return the name in a file's name; None unless it is 32 lower-case hex digits that begin with its folder's."""
    if len(text) != 2 * NAME_BYTES or not text.startswith(key):
        return None
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if name.hex() == text else None
