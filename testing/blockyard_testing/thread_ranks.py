"""The ranks of an engine as threads of this process: real sockets, a real process group, no start of a process.

What a process of its own is needed for (its end at any moment) is tested with processes.
"""

from __future__ import annotations

import copy
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from blockyard.errors import BlockyardError
from blockyard.sizing import Shard
from blockyard.storage import KVCache, MoveLists, SlotLists, StateSlots
from blockyard.wire import ConnectionLost, SocketConnection, pack
from blockyard_engine.ranks.follower import Follower
from blockyard_engine.ranks.group import CollectiveError
from blockyard_engine.ranks.peers import Peer
from blockyard_engine.runner import ForwardBatch

from .patience import PATIENCE_SECONDS


class ThreadFollower(Follower):
    """A follower that ends its thread and not the process, and remembers its tensors and what it was told to do.

    before_step: called before each step, with its number from 0; it may raise, or change `steps`.
    """

    kv_cache: KVCache
    slots: StateSlots | None
    before_step: Callable[[int], None] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[tuple[list[MoveLists | SlotLists], ForwardBatch | None]] = []

    def serve(self, *arguments: Any) -> Any:
        try:
            super().serve(*arguments)
        except SystemExit:
            pass
        except Exception as error:
            why = str(error) if isinstance(error, BlockyardError) else f"failed: {type(error).__name__}: {error}"
            failure = {"why": why, "is_consequence": isinstance(error, CollectiveError)}
            with suppress(ConnectionLost):
                self._connection.send_bytes(pack("failed", failure))
        self._connection.close()

    def carry_out(
        self, kv_cache: KVCache, runner: Any, moves: list[MoveLists | SlotLists], batch: ForwardBatch | None
    ) -> None:
        if self.before_step is not None:
            self.before_step(len(self.steps))
        self.kv_cache, self.slots = kv_cache, runner.slots
        self.steps.append((moves, batch))
        super().carry_out(kv_cache, runner, moves, batch)


class ThreadPeers:
    """`Peers` for an engine: rank i runs models[i - 1], or a copy of rank 0's model where there are none."""

    is_local = True

    def __init__(self, size: int, models: list[Any] | None = None, block_sizes: list[int] | None = None) -> None:
        self.size = size
        self._models = models
        self._block_sizes = block_sizes
        self._folder = tempfile.TemporaryDirectory()
        self.followers: list[ThreadFollower] = []
        self.threads: list[threading.Thread] = []
        #: What a process would have printed at its end.
        self.ends: list[str] = []

    def connect(self, model: Any, block_size: int, max_model_len: int | None) -> list[Peer]:
        models = self._models or [copy.deepcopy(model) for _ in range(1, self.size)]
        block_sizes = self._block_sizes or [block_size] * (self.size - 1)
        peers = []
        for rank, own, size in zip(range(1, self.size), models, block_sizes, strict=True):
            ours, theirs = socket.socketpair()
            follower = ThreadFollower(
                SocketConnection(theirs), Shard(rank, self.size), self.store(), end=self.ends.append
            )
            thread = threading.Thread(target=follower.serve, args=(own, size, max_model_len), daemon=True)
            thread.start()
            self.followers.append(follower)
            self.threads.append(thread)
            peers.append(Peer(rank, SocketConnection(ours)))
        return peers

    def store(self) -> Any:
        return dist.FileStore(str(Path(self._folder.name) / "store"), self.size)

    def clean_up(self) -> None:
        """The folder goes with this object: stores may still be open."""

    def require_ended(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
