"""Finds and ends every process of a fleet, even if the command was killed.

Ray starts about ten processes; if their parent is killed with SIGKILL, two of them stay forever (Ray 2.60). So the
command starts this file as a separate process that waits for the command to end, for whatever reason. It imports
nothing else of the package. A process belongs to a fleet if it has the fleet's mark in its environment, or an open
file in the fleet's folder. Needs Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

#: Environment variable that marks a fleet's processes.
MARK = "BLOCKYARD_FLEET"
_ROUNDS, _PAUSE = 100, 0.1


class CleanupProcess:
    """A process that ends all others of a fleet and removes its folder when this one ends or calls `close`."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # not in the terminal's group, which gets Ctrl-C
        )

    def close(self, timeout: float = 20.0) -> None:
        """End the fleet's processes. A second call does nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


def processes(mark: str, folder: str, spared: set[int]) -> list[int]:
    """Return the processes of a fleet. O(processes of this machine and their open files)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) not in spared and _belongs(Path("/proc") / entry, mark, folder):
            found.append(int(entry))
    return found


def _belongs(process: Path, mark: str, folder: str) -> bool:
    try:
        if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        files = os.listdir(process / "fd")
    except OSError:  # it has ended or belongs to another user
        return False
    for file in files:
        with suppress(OSError):
            if os.readlink(process / "fd" / file).startswith(f"{folder}/"):
                return True
    return False


def end(mark: str, folder: str, spared: set[int]) -> list[int]:
    """Kill the processes of a fleet, retrying for ten seconds; return those that remain."""
    left = processes(mark, folder, spared)
    for _ in range(_ROUNDS):
        if not left:
            break
        for process in left:
            _kill(process, mark, folder)
        time.sleep(_PAUSE)
        left = processes(mark, folder, spared)
    return left


def _kill(process: int, mark: str, folder: str) -> None:
    """Kill a process if it still belongs to the fleet: process ids are reused."""
    with suppress(OSError):
        handle = os.pidfd_open(process)
        try:
            if _belongs(Path("/proc") / str(process), mark, folder):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main(mark: str, folder: str, command: str) -> None:
    """Wait until the command ends or calls `close`, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(mark, folder, {os.getpid(), int(command)})
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
