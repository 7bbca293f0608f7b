"""The other ranks, as rank 0 sees them: a channel to each, and how one ended."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .channel import Channel

_END_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank other than 0. process: of its own making, if rank 0 started it."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes] | None = None

    def how_it_ended(self) -> str:
        """A sentence, after its channel has closed. Waits a moment for a process to be gone."""
        if self.process is None:
            return f"rank {self.rank} has ended"
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.process.pid}) does not answer any more"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"

    def end(self, seconds: float) -> None:
        """Close the channel, and see that a started process is gone: it is killed if it needs longer."""
        self.channel.close()
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
        """The other ranks, in order, told which model it is about if they need to be. Raises `RankError`."""

    def store(self) -> Any:
        """A store of torch.distributed that all ranks reach."""

    def clean_up(self) -> None:
        """Remove what was only needed to begin. A second call does nothing."""
