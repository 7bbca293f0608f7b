"""Ranks that rank 0 starts as processes of its own, on this machine: they end when it does, however that comes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...arguments import require_int
from ...errors import RankError
from ...sizing.shards import MAX_RANKS
from ..model import quiet_transformers
from ..reasons import reason
from .channel import Channel, Kind
from .peers import Peer

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
#: What a process does before it has imported anything large. Ctrl-C in a terminal reaches all processes, a service
#: manager's SIGTERM too: rank 0 alone decides what becomes of it. And rank 0 may end while this one still imports,
#: before it reads its channel.
_PROGRAM = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
parent = os.getppid()
def watch():
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(1)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
from blockyard.engine.ranks.worker import main
main(int(sys.argv[1]))
"""


class StartedPeers:
    """size - 1 processes, which load the model themselves.

    path: the model's folder or file; None for the model as it is in memory, which is saved to a folder for a while.
    Raises `InvalidArgument` for a size outside its limits.
    """

    is_local = True

    def __init__(self, size: object, path: str | Path | None = None) -> None:
        self.size = require_int("tensor_parallel", size, 1, MAX_RANKS)
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:
        """Start the processes; they load the model meanwhile."""
        self._folder = tempfile.TemporaryDirectory(prefix="blockyard-ranks-")
        peers: list[Peer] = []
        try:
            for rank in range(1, self.size):
                peers.append(_started(rank))
            start = {
                "path": _saved(model, self._folder.name) if self._path is None else str(Path(self._path).resolve()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "size": self.size,
                "block_size": block_size,
                "max_model_len": max_model_len,
                "num_threads": max(1, torch.get_num_threads() // self.size),
                "store": self._store_path,
            }
            device = next(model.parameters()).device.type
            for peer in peers:
                place = f"{device}:{peer.rank}" if device == "cuda" else device
                peer.channel.send_json(Kind.START, {**start, "rank": peer.rank, "device": place})
        except BaseException:
            for peer in peers:
                peer.end(0)
            self.clean_up()
            raise
        return peers

    @property
    def _store_path(self) -> str:
        assert self._folder is not None, "connect comes first"
        return str(Path(self._folder.name) / "store")

    def store(self) -> Any:
        """A file that the ranks find each other by."""
        return dist.FileStore(self._store_path, self.size)

    def clean_up(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._folder is not None:
            self._folder.cleanup()


def _saved(model: Any, folder: str) -> str:
    path = Path(folder) / "model"
    with quiet_transformers():
        try:
            model.save_pretrained(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise RankError(f"the model could not be saved for the other ranks: {reason(error)}") from error
    return str(path)


def _started(rank: int) -> Peer:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(number)],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            env=_environment(),
        )
    return Peer(rank, Channel(ours), process)


def _environment() -> dict[str, str]:
    """This process's, in which a child finds the same package as this one did, wherever that was."""
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
