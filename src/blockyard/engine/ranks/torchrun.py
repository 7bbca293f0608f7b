"""Ranks that torchrun started, each with the same command: they find rank 0 through torchrun's store."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from ...errors import RankError
from ...sizing import Shard
from ..reasons import reason
from .channel import Channel
from .follower import Follower
from .peers import Peer

#: For all ranks to load their model and come.
_MEETING_SECONDS = 1800
_GREETING_SECONDS = 10.0
_TOKEN_BYTES = 32
_RANK_BYTES = 4
_ADDRESS_KEY = "rank 0"


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
        """As the variables that torchrun sets say; None where they are not there, or there is one rank."""
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
        """Whether all ranks run on this machine."""
        return self.local_size == self.shard.size

    @property
    def host(self) -> str:
        """Where rank 0 is reached."""
        return "127.0.0.1" if self.is_local else self.address

    def store(self) -> Any:
        """torchrun's store. Raises `RankError` if it cannot be reached."""
        try:
            store, _, _ = next(dist.rendezvous("env://"))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"torchrun's store could not be reached: {reason(error)}") from error
        return dist.PrefixStore(f"blockyard/{self.attempt}", store)

    def follow(self, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
        """Be this rank, which is not 0, until rank 0 ends; then the process ends. Raises `RankError`."""
        store = self.store()
        port, token = store.get(_ADDRESS_KEY).decode().split()
        try:
            connection = socket.create_connection((self.host, int(port)), _GREETING_SECONDS)
        except OSError as error:
            raise RankError(f"rank {self.shard.rank} could not reach rank 0: {error}") from error
        connection.settimeout(None)
        connection.sendall(bytes.fromhex(token) + self.shard.rank.to_bytes(_RANK_BYTES, "little"))
        Follower(Channel(connection), self.shard, store, self.is_local).run(model, block_size, max_model_len)


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
        """torchrun's own."""
        return self._store

    def clean_up(self) -> None:
        """Nothing is left behind."""


def _greeted(server: socket.socket, token: bytes, size: int) -> list[Peer]:
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + _MEETING_SECONDS
    while len(channels) < size - 1:
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in channels)
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise RankError(f"no word of rank {missing} for {_MEETING_SECONDS} s") from error
        rank = _rank_of(connection, token, size)
        if rank is None or rank in channels:
            connection.close()
        else:
            channels[rank] = Channel(connection)
    return [Peer(rank, channels[rank]) for rank in sorted(channels)]


def _rank_of(connection: socket.socket, token: bytes, size: int) -> int | None:
    """Which rank this is; None for a connection that does not know the secret."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        greeting = connection.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    connection.settimeout(None)
    if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
        return None
    rank = int.from_bytes(greeting[_TOKEN_BYTES:], "little")
    return rank if 0 < rank < size else None
