"""The other ranks, as rank 0 sees them: a connection to each, and where they come from.

`StartedPeers` are processes that rank 0 starts on this machine: they end when it does, however that comes.
`TorchrunPeers` were started by torchrun, each with the same command: they find rank 0 through torchrun's store.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from blockyard.arguments import reason, require_int
from blockyard.errors import RankError
from blockyard.sizing import MAX_RANKS, Shard
from blockyard.wire import ConnectionLost, SocketConnection, pack

from ..model import quiet_transformers

_END_SECONDS = 2.0
#: For all ranks to load their model and come.
_MEETING_SECONDS = 1800
_GREETING_SECONDS = 10.0
#: Connections that have not said yet who they are.
_MOST_STRANGERS = 256
_TOKEN_BYTES = 32
_RANK_BYTES = 4
_ADDRESS_KEY = "rank 0"
#: The packages that another rank imports.
_PACKAGES = ("blockyard_engine", "blockyard_tiers", "blockyard")
#: What a process does before it has imported anything large. Ctrl-C in a terminal reaches all processes, a service
#: manager's SIGTERM too: rank 0 alone decides what becomes of it. And rank 0 may end while this one still imports,
#: before it reads its connection.
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
from blockyard_engine.ranks.follower import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank other than 0. process: of its own making, if rank 0 started it."""

    rank: int
    connection: SocketConnection
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Return what errors call it."""
        return f"rank {self.rank}" if self.process is None else f"rank {self.rank} (process {self.process.pid})"

    def how_it_ended(self) -> str:
        """A sentence, after its connection has closed. Waits a moment for a process to be gone."""
        if self.process is None:
            return f"{self.name} has ended"
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} does not answer any more"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}"

    def end(self, seconds: float) -> None:
        """Close the connection, and see that a started process is gone: it is killed if it needs longer."""
        self.connection.close()
        if self.process is None:
            return
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@runtime_checkable
class Peers(Protocol):
    """Where the other ranks come from.

    size: ranks in all. is_local: whether all run on this machine.
    """

    size: int
    is_local: bool

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:
        """Return the other ranks, in order, told which model it is about if they need to be. Raises `RankError`."""

    def store(self) -> Any:
        """Return a store of torch.distributed that all ranks reach."""

    def clean_up(self) -> None:
        """Remove what was only needed to begin. A second call does nothing."""


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
                try:
                    peer.connection.send_bytes(pack("start", {**start, "rank": peer.rank, "device": place}))
                except ConnectionLost as error:
                    raise RankError(peer.how_it_ended()) from error
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
        """Return a file that the ranks find each other by."""
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
    return Peer(rank, SocketConnection(ours), process)


def _environment() -> dict[str, str]:
    """Return this process's environment, in which a child finds the same packages, wherever they are."""
    origins = [spec.origin for name in _PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    folders = dict.fromkeys(str(Path(origin).resolve().parents[1]) for origin in origins)
    paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """Which rank of how many this process is. local_rank: among those on this machine, which are local_size.

    attempt: how often torchrun has started the ranks again.
    """

    shard: Shard
    local_rank: int
    local_size: int
    address: str
    attempt: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunRank | None:
        """Read the variables that torchrun sets; None where they are not there, or there is one rank."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        size = int(environment["WORLD_SIZE"])
        return cls(
            Shard(int(environment["RANK"]), size),
            int(environment["LOCAL_RANK"]),
            int(environment["LOCAL_WORLD_SIZE"]),
            environment["MASTER_ADDR"],
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def is_local(self) -> bool:
        """Return whether all ranks run on this machine."""
        return self.local_size == self.shard.size

    @property
    def host(self) -> str:
        """Return where rank 0 is reached."""
        return "127.0.0.1" if self.is_local else self.address

    def store(self) -> Any:
        """Return torchrun's store. Raises `RankError` if it cannot be reached."""
        try:
            store, _, _ = next(dist.rendezvous("env://"))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"torchrun's store could not be reached: {reason(error)}") from error
        return dist.PrefixStore(f"blockyard/{self.attempt}", store)

    def connect(self) -> tuple[SocketConnection, Any]:
        """Return a connection to rank 0, of this rank, which is another; and torchrun's store. Raises `RankError`."""
        store = self.store()
        port, token = store.get(_ADDRESS_KEY).decode().split()
        try:
            connection = socket.create_connection((self.host, int(port)), _GREETING_SECONDS)
        except OSError as error:
            raise RankError(f"rank {self.shard.rank} could not reach rank 0: {error}") from error
        connection.settimeout(None)
        connection.sendall(bytes.fromhex(token) + self.shard.rank.to_bytes(_RANK_BYTES, "little"))
        return SocketConnection(connection), store


class TorchrunPeers:
    """`Peers` of rank 0 under torchrun."""

    def __init__(self, rank: TorchrunRank) -> None:
        self.size = rank.shard.size
        self.is_local = rank.is_local
        self._rank = rank
        self._store: Any = None

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:  # noqa: ARG002
        """Wait for the other ranks, which load the model themselves. Raises `RankError` naming those that do not come.

        A rank that connects must know a secret, which is in torchrun's store.
        """
        self._store = self._rank.store()
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((self._rank.host, 0), backlog=self.size) as server:
            self._store.set(_ADDRESS_KEY, f"{server.getsockname()[1]} {token.hex()}")
            return _greeted(server, token, self.size)

    def store(self) -> Any:
        """Return torchrun's own."""
        return self._store

    def clean_up(self) -> None:
        """Nothing is left behind."""


def _greeted(server: socket.socket, token: bytes, size: int) -> list[Peer]:
    """Wait for the ranks, each of which says the secret and its number; strangers keep none of them waiting."""
    ranks: dict[int, SocketConnection] = {}
    with selectors.DefaultSelector() as waiting:
        server.setblocking(False)
        waiting.register(server, selectors.EVENT_READ)
        deadline = time.monotonic() + _MEETING_SECONDS
        try:
            while len(ranks) < size - 1:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in ranks)
                if time.monotonic() > deadline:
                    raise RankError(f"no word of rank {missing} for {_MEETING_SECONDS} s")
                for key, _ in waiting.select(1.0):
                    if key.fileobj is server:
                        _admit(server, waiting)
                    else:
                        _hear(key, waiting, ranks, token, size)
                for greeting in _greetings(waiting):
                    if time.monotonic() > greeting.deadline:
                        greeting.refuse(waiting)
        finally:
            for greeting in _greetings(waiting):
                greeting.refuse(waiting)
    return [Peer(rank, ranks[rank]) for rank in sorted(ranks)]


@dataclass
class _Greeting:
    """A connection was made that has still to send the secret and a rank."""

    connection: socket.socket
    deadline: float
    said: bytes = b""

    def refuse(self, waiting: selectors.BaseSelector) -> None:
        """Close the connection."""
        waiting.unregister(self.connection)
        self.connection.close()


def _greetings(waiting: selectors.BaseSelector) -> list[_Greeting]:
    """List who is still to say who it is, the longest there first."""
    return [key.data for key in waiting.get_map().values() if key.data is not None]


def _admit(server: socket.socket, waiting: selectors.BaseSelector) -> None:
    """Accept a connection; where strangers take all places, the one that has waited longest is closed."""
    try:
        connection, _ = server.accept()
    except OSError:  # it has gone already
        return
    connection.setblocking(False)
    if len(greetings := _greetings(waiting)) >= _MOST_STRANGERS:
        greetings[0].refuse(waiting)
    greeting = _Greeting(connection, time.monotonic() + _GREETING_SECONDS)
    waiting.register(connection, selectors.EVENT_READ, greeting)


def _hear(
    key: selectors.SelectorKey,
    waiting: selectors.BaseSelector,
    ranks: dict[int, SocketConnection],
    token: bytes,
    size: int,
) -> None:
    """Take in a part of a greeting, and when it is whole the rank, or close the connection."""
    greeting = key.data
    if key.fd != greeting.connection.fileno():  # refused a moment ago
        return
    try:
        part = greeting.connection.recv(_TOKEN_BYTES + _RANK_BYTES - len(greeting.said))
    except BlockingIOError:
        return
    except OSError:
        part = b""
    greeting.said += part
    if part and len(greeting.said) < _TOKEN_BYTES + _RANK_BYTES:
        return
    rank = _rank_of(greeting.said, token, size)
    if not part or rank is None or rank in ranks:
        greeting.refuse(waiting)
    else:
        waiting.unregister(greeting.connection)
        greeting.connection.setblocking(True)
        ranks[rank] = SocketConnection(greeting.connection)


def _rank_of(greeting: bytes, token: bytes, size: int) -> int | None:
    """Read which rank this is; None for one that does not know the secret."""
    if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
        return None
    rank = int.from_bytes(greeting[_TOKEN_BYTES:], "little")
    return rank if 0 < rank < size else None
