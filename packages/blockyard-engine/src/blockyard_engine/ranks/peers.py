"""The other ranks, as rank 0 sees them: their processes, and a connection to each.

`StartedPeers` are processes that rank 0 starts on this machine; they end when it does, in any case. `TorchrunPeers`
were started by torchrun, each with the same command, and find rank 0 through torchrun's store.
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
#: Seconds for all ranks to load their model and connect.
_MEETING_SECONDS = 1800
_GREETING_SECONDS = 10.0
#: Limit of the connections that have not identified themselves.
_MAX_UNIDENTIFIED = 256
_TOKEN_BYTES = 32
_RANK_BYTES = 4
_ADDRESS_KEY = "rank 0"
#: The packages that another rank imports.
_PACKAGES = ("blockyard_engine", "blockyard_tiers", "blockyard")
#: Start of a rank's process, before large imports. Ctrl-C in a terminal and a service manager's SIGTERM reach all
#: processes, but only rank 0 reacts. A thread watches rank 0 until the connection is read.
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
    """A rank other than 0, and its process if rank 0 started it."""

    rank: int
    connection: SocketConnection
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Name of the rank in errors."""
        return f"rank {self.rank}" if self.process is None else f"rank {self.rank} (process {self.process.pid})"

    def how_it_ended(self) -> str:
        """Return how the rank ended, after its connection has closed. Waits a moment for its process."""
        if self.process is None:
            return f"{self.name} has ended"
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} no longer answers"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}"

    def end(self, seconds: float) -> None:
        """Close the connection, and wait for a started process; kill it if it takes longer."""
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
    """Source of the other ranks.

    Attributes:
        size: number of ranks, rank 0 included.
        is_local: whether all ranks run on this machine.
    """

    size: int
    is_local: bool

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:
        """Return the other ranks, in order; send them the model's location if they need it. Raises `RankError`."""

    def store(self) -> Any:
        """Return a store of torch.distributed that all ranks can reach."""

    def clean_up(self) -> None:
        """Remove files that were needed only during the start. A second call does nothing."""


class StartedPeers:
    """Processes of rank 0, which load the model from `path`; without one, the model is saved to a temporary folder.

    Raises `InvalidArgument` for a size outside its limits.
    """

    is_local = True

    def __init__(self, size: object, path: str | Path | None = None) -> None:
        self.size = require_int("tensor_parallel", size, 1, MAX_RANKS)
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:
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
                target = f"{device}:{peer.rank}" if device == "cuda" else device
                try:
                    peer.connection.send_bytes(pack("start", {**start, "rank": peer.rank, "device": target}))
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
        return dist.FileStore(self._store_path, self.size)

    def clean_up(self) -> None:
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
    """Return this process's environment, with the paths of the imported packages."""
    origins = [spec.origin for name in _PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    folders = dict.fromkeys(str(Path(origin).resolve().parents[1]) for origin in origins)
    paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """Rank of this process under torchrun.

    Attributes:
        shard: number of this rank, and of all ranks.
        local_rank: number among the ranks on this machine.
        local_size: number of ranks on this machine.
        address: host of rank 0.
        attempt: how often torchrun has restarted the ranks.
    """

    shard: Shard
    local_rank: int
    local_size: int
    address: str
    attempt: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunRank | None:
        """Read torchrun's variables; return None without them."""
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
        """True if all ranks run on this machine."""
        return self.local_size == self.shard.size

    @property
    def host(self) -> str:
        """Host to reach rank 0."""
        return "127.0.0.1" if self.is_local else self.address

    def store(self) -> Any:
        """Return torchrun's store. Raises `RankError` if it cannot be reached."""
        try:
            store, _, _ = next(dist.rendezvous("env://"))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"torchrun's store could not be reached: {reason(error)}") from error
        return dist.PrefixStore(f"blockyard/{self.attempt}", store)

    def connect(self) -> tuple[SocketConnection, Any]:
        """Connect this rank to rank 0; return the connection and torchrun's store. Raises `RankError`."""
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
        """Wait for the other ranks, which load the model themselves. Raises `RankError` naming missing ones.

        A rank must send a secret, which it reads from torchrun's store.
        """
        self._store = self._rank.store()
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((self._rank.host, 0), backlog=self.size) as server:
            self._store.set(_ADDRESS_KEY, f"{server.getsockname()[1]} {token.hex()}")
            return _greeted(server, token, self.size)

    def store(self) -> Any:
        return self._store

    def clean_up(self) -> None: ...


def _greeted(server: socket.socket, token: bytes, size: int) -> list[Peer]:
    """Wait until all ranks have sent the secret and their number; other connections do not delay them."""
    ranks: dict[int, SocketConnection] = {}
    with selectors.DefaultSelector() as waiting:
        server.setblocking(False)
        waiting.register(server, selectors.EVENT_READ)
        deadline = time.monotonic() + _MEETING_SECONDS
        try:
            while len(ranks) < size - 1:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in ranks)
                if time.monotonic() > deadline:
                    raise RankError(f"rank {missing} did not connect within {_MEETING_SECONDS} s")
                for key, _ in waiting.select(1.0):
                    if key.fileobj is server:
                        _admit(server, waiting)
                    else:
                        _read_greeting(key, waiting, ranks, token, size)
                for greeting in _greetings(waiting):
                    if time.monotonic() > greeting.deadline:
                        greeting.refuse(waiting)
        finally:
            for greeting in _greetings(waiting):
                greeting.refuse(waiting)
    return [Peer(rank, ranks[rank]) for rank in sorted(ranks)]


@dataclass
class _Greeting:
    """A connection that has not identified itself yet."""

    connection: socket.socket
    deadline: float
    said: bytes = b""

    def refuse(self, waiting: selectors.BaseSelector) -> None:
        waiting.unregister(self.connection)
        self.connection.close()


def _greetings(waiting: selectors.BaseSelector) -> list[_Greeting]:
    return [key.data for key in waiting.get_map().values() if key.data is not None]


def _admit(server: socket.socket, waiting: selectors.BaseSelector) -> None:
    """Accept a connection; at the limit, close the oldest unidentified one."""
    try:
        connection, _ = server.accept()
    except OSError:  # the client is already gone
        return
    connection.setblocking(False)
    if len(greetings := _greetings(waiting)) >= _MAX_UNIDENTIFIED:
        greetings[0].refuse(waiting)
    greeting = _Greeting(connection, time.monotonic() + _GREETING_SECONDS)
    waiting.register(connection, selectors.EVENT_READ, greeting)


def _read_greeting(
    key: selectors.SelectorKey,
    waiting: selectors.BaseSelector,
    ranks: dict[int, SocketConnection],
    token: bytes,
    size: int,
) -> None:
    """Read more of a greeting; when it is complete, add the rank or close the connection."""
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
    if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
        return None
    rank = int.from_bytes(greeting[_TOKEN_BYTES:], "little")
    return rank if 0 < rank < size else None
