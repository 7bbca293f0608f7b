"""The program of ranks other than 0: join rank 0, then carry out its steps until either rank ends.

Rank 0 starts a process that runs `main`; a process of torchrun calls `follow`.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from blockyard import StepPlan
from blockyard.arguments import reason
from blockyard.errors import BlockyardError, DivergedRank, HandoffError, InvalidArgument, RankError
from blockyard.sizing import Shard
from blockyard.steps import PlanReceiver, SwapPlan
from blockyard.storage import KVCache, MoveLists, SlotLists
from blockyard.wire import ConnectionLost, Message, SocketConnection, pack

from ..model import load_model
from ..moves import carry_out, move_lists
from ..patching import PatchedModel
from ..probe import learn_shape
from ..runner import ForwardBatch, ModelRunner
from ..tiering import model_fingerprint
from .group import CollectiveError, ProcessGroup
from .joining import CacheSettings, agreed_bytes, identity_of, join, require_shareable
from .peers import TorchrunRank

if TYPE_CHECKING:
    from .sharing import RankCopies

#: Seconds to wait before a broken collective is reported: rank 0's end, which may have caused it, arrives first.
_CAUSE_SECONDS = 0.3
#: Reason of a rank that ends because rank 0 is gone.
GONE = "rank 0 has ended"


def end_process(why: str, status: int = 1) -> NoReturn:
    """End this process at once, even if threads run, and print the sentence if one is given."""
    if why:
        sys.stderr.write(f"blockyard: {why}\n")  # one write: an unbuffered print makes two
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Inbox:
    """Reads rank 0's messages in a thread, so that this process ends with rank 0 at any time, even within a step.

    The thread also answers "ping", so a process that does not answer is stopped or cut off. `end` is called with the
    reason if rank 0 is gone or tells all ranks to end.
    """

    def __init__(self, connection: SocketConnection, end: Callable[[str], None]) -> None:
        self._connection = connection
        self._end = end
        self._messages: queue.SimpleQueue[Message | RankError] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="blockyard-rank-0", daemon=True).start()

    def expect(self, *kinds: str) -> Message:
        """Return the next message, of one of these kinds.

        Raises `SystemExit` if rank 0 ends, and `RankError` for another message.
        """
        message = self._messages.get()
        if isinstance(message, RankError):
            raise message
        if message.kind == "close":
            raise SystemExit(0)
        if message.kind not in kinds:
            raise RankError(f"got {message.kind!r} from rank 0 instead of {' or '.join(map(repr, kinds))}")
        return message

    def _read(self) -> None:
        try:
            while self._take(Message.of(self._connection.recv_bytes())):
                pass
        except (InvalidArgument, HandoffError) as error:
            self._messages.put(RankError(f"got a message that cannot be read: {error}"))
        except ConnectionLost:
            self._end(GONE)
            self._messages.put(Message.of(pack("close")))

    def _take(self, message: Message) -> bool:
        """Queue a message; return whether more may follow."""
        if message.kind == "ping":
            self._connection.send_bytes(pack("pong"))
            return True
        if message.kind == "close" and (why := message.fields.get("why")):
            self._end(str(why))
        self._messages.put(message)
        return message.kind != "close"


class Follower:
    """A rank from joining to its last step. `store` is where the ranks meet, `end` ends the process."""

    def __init__(
        self,
        connection: SocketConnection,
        shard: Shard,
        store: Any,
        is_local: bool = True,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._connection = connection
        self._shard = shard
        self._store = store
        self._is_local = is_local
        self._end = end
        self._inbox = Inbox(connection, lambda why: end(f"rank {shard.rank} ends: {why}"))

    def run(self, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
        """Serve until rank 0 ends, then end the process. Failures are reported to rank 0."""
        try:
            self.serve(model, block_size, max_model_len)
        except SystemExit:
            end_process("", 0)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error to rank 0 and end the process."""
        is_consequence = isinstance(error, CollectiveError)
        if is_consequence:
            time.sleep(_CAUSE_SECONDS)
        why = str(error) if isinstance(error, BlockyardError) else f"failed: {type(error).__name__}: {reason(error)}"
        try:
            self._connection.send_bytes(pack("failed", {"why": why, "is_consequence": is_consequence}))
        except ConnectionLost:
            end_process(f"rank {self._shard.rank} ends: {why}")
        end_process("")

    def serve(self, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
        """Join and carry out steps. Raises `SystemExit` when rank 0 ends, and errors of this rank."""
        patched = PatchedModel(model)
        shape = learn_shape(patched, max_model_len)
        identity = identity_of(patched, shape, block_size)
        self._connection.send_bytes(pack("hello", identity))
        welcome = self._inbox.expect("welcome").fields
        require_shareable(patched, shape, self._shard, welcome["interleave"])
        group = ProcessGroup(self._shard, self._store, patched.device, self._is_local, welcome["step_seconds"])
        del model  # free the whole model
        patched, shape = join(patched, shape, self._shard, welcome["interleave"], group, welcome["is_tried"])
        settings = CacheSettings(**self._inbox.expect("settings").fields)
        config, kv_cache, runner = settings.make(patched, shape, group)
        self._connection.send_bytes(pack("ready"))
        receiver = PlanReceiver(config, "it", agreed_bytes(identity))
        copies: RankCopies | None = None
        while True:
            message = self._inbox.expect("step", "swap", "rows", "copy")
            if message.kind == "rows":
                copies = self._share(message, patched, kv_cache, runner)
                continue
            if message.kind == "copy" and copies is not None:
                copies.carry_out(message)
                continue
            plan = read_plan(receiver, message)
            batch = None
            if isinstance(plan, StepPlan) and len(plan.rows) > 0:
                # Only rank 0 needs logits.
                batch = ForwardBatch.of(plan, config.layer_groups, np.zeros(len(plan.rows), np.int64))
            self.carry_out(kv_cache, runner, move_lists(plan), batch)

    def _share(self, message: Message, patched: PatchedModel, kv_cache: KVCache, runner: ModelRunner) -> RankCopies:
        """Map rank 0's rows for objects of tiers, and send a digest of this rank's weights."""
        from .sharing import RankCopies

        def confirm(number: int) -> None:
            self._connection.send_bytes(pack("copied", number=number))

        copies = RankCopies(message.fields, self._shard.rank, kv_cache, runner.slots, confirm)
        self._connection.send_bytes(pack("shares", {"weights": model_fingerprint(patched.model)["weights"]}))
        return copies

    def carry_out(
        self, kv_cache: KVCache, runner: ModelRunner, moves: list[MoveLists | SlotLists], batch: ForwardBatch | None
    ) -> None:
        """Move blocks and states of a plan, then compute the batch, if there is one."""
        for each in moves:
            carry_out(each, kv_cache, runner.slots)
        if batch is not None:
            runner.compute(batch)


def read_plan(receiver: PlanReceiver, message: Message) -> SwapPlan:
    """Return the plan in a message.

    Raises `RankError` if it does not follow the last plan, or does not fit this cache.
    """
    try:
        return receiver.from_bytes(message)
    except DivergedRank as error:
        raise RankError(f"diverged: {error}") from error
    except InvalidArgument as error:
        raise RankError(f"got step {message.number}, which cannot be carried out: {error}") from error


def follow(rank: TorchrunRank, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
    """Run as one of torchrun's ranks other than 0 until rank 0 ends; then end the process.

    Raises `RankError`.
    """
    connection, store = rank.connect()
    Follower(connection, rank.shard, store, rank.is_local).run(model, block_size, max_model_len)


def main(descriptor: int) -> None:
    """Run as a rank over the inherited socket `descriptor`."""
    os.set_inheritable(descriptor, False)
    connection = SocketConnection(socket.socket(fileno=descriptor))
    try:
        start = Message.of(connection.recv_bytes()).require("start").fields
    except ConnectionLost:
        end_process("", 0)  # rank 0 ended before it sent the start
    torch.set_num_threads(start["num_threads"])
    shard = Shard(start["rank"], start["size"])

    def end(why: str) -> None:
        # Rank 0 prints the reason itself, unless it is gone.
        end_process(why if why.endswith(GONE) else "")

    follower = Follower(connection, shard, dist.FileStore(start["store"], shard.size), end=end)
    try:
        model, _ = load_model(start["path"], getattr(torch, start["dtype"]), start["device"])
    except BaseException as error:
        follower.fail(error)
    follower.run(model, start["block_size"], start["max_model_len"])
