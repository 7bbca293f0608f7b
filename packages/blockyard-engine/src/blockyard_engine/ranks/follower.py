"""A rank other than 0: it joins, then carries out the steps that rank 0 sends, until one of them ends.

`main` is the program of a process that rank 0 started, `follow` the rest of one that torchrun started.
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

from ..borrowing import BorrowedModel
from ..model import load_model
from ..moves import carry_out, lists_of
from ..probe import learn_shape
from ..runner import ForwardBatch, ModelRunner
from ..tiering import fingerprint_of
from .group import CollectiveError, ProcessGroup
from .joining import CacheSettings, agreed_bytes, identity_of, join, require_shareable
from .peers import TorchrunRank

if TYPE_CHECKING:
    from .sharing import RankCopies

#: For rank 0's end, or its word, to arrive before a sum that broke off because of it is reported.
_CAUSE_SECONDS = 0.3
#: Why a rank ends that no one told to.
GONE = "rank 0 has ended"


def end_process(why: str, status: int = 1) -> NoReturn:
    """End this process now, whatever its threads do, with a sentence if there is one."""
    if why:
        sys.stderr.write(f"blockyard: {why}\n")  # at once: print would write twice where nothing is buffered
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Inbox:
    """Reads what rank 0 says, in a thread, so that its end ends this process at any moment: also inside a step.

    The thread answers "ping" by itself: what does not answer is stopped, or cut off. end: called with a reason where
    rank 0 is gone, or says that all must end.
    """

    def __init__(self, connection: SocketConnection, end: Callable[[str], None]) -> None:
        self._connection = connection
        self._end = end
        self._messages: queue.SimpleQueue[Message | RankError] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="blockyard-rank-0", daemon=True).start()

    def expect(self, *kinds: str) -> Message:
        """Return the next message, of these kinds. Raises `SystemExit` where rank 0 ends, `RankError` for another."""
        message = self._messages.get()
        if isinstance(message, RankError):
            raise message
        if message.kind == "close":
            raise SystemExit(0)
        if message.kind not in kinds:
            raise RankError(f"got {message.kind!r} of rank 0 instead of {' or '.join(map(repr, kinds))}")
        return message

    def _read(self) -> None:
        try:
            while self._take(Message.of(self._connection.recv_bytes())):
                pass
        except (InvalidArgument, HandoffError) as error:
            self._messages.put(RankError(f"got what cannot be read: {error}"))
        except ConnectionLost:
            self._end(GONE)
            self._messages.put(Message.of(pack("close")))

    def _take(self, message: Message) -> bool:
        """Pass a message on; says whether more may come."""
        if message.kind == "ping":
            self._connection.send_bytes(pack("pong"))
            return True
        if message.kind == "close" and (why := message.fields.get("why")):
            self._end(str(why))
        self._messages.put(message)
        return message.kind != "close"


class Follower:
    """A rank on its way from a model to its last step.

    store: of torch.distributed, where the ranks meet. is_local: whether all run on this machine. end: what ends the
    process, with a sentence or none.
    """

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
        """Serve until rank 0 ends, and end the process. What fails here is told to rank 0."""
        try:
            self.serve(model, block_size, max_model_len)
        except SystemExit:
            end_process("", 0)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Tell rank 0 what went wrong here, and end the process."""
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
        """Join, and carry out steps. Raises `SystemExit` where rank 0 ends, and what fails here."""
        borrowed = BorrowedModel(model)
        shape = learn_shape(borrowed, max_model_len)
        identity = identity_of(borrowed, shape, block_size)
        self._connection.send_bytes(pack("hello", identity))
        welcome = self._inbox.expect("welcome").fields
        require_shareable(borrowed, shape, self._shard, welcome["interleave"])
        group = ProcessGroup(self._shard, self._store, borrowed.device, self._is_local, welcome["step_seconds"])
        del model  # the whole is not needed any more
        borrowed, shape = join(borrowed, shape, self._shard, welcome["interleave"], group, welcome["is_tried"])
        settings = CacheSettings(**self._inbox.expect("settings").fields)
        config, kv_cache, runner = settings.make(borrowed, shape, group)
        self._connection.send_bytes(pack("ready"))
        receiver = PlanReceiver(config, "it", agreed_bytes(identity))
        copies: RankCopies | None = None
        while True:
            message = self._inbox.expect("step", "swap", "rows", "copy")
            if message.kind == "rows":
                copies = self._share(message, borrowed, kv_cache, runner)
                continue
            if message.kind == "copy" and copies is not None:
                copies.carry_out(message)
                continue
            plan = read_plan(receiver, message)
            batch = None
            if isinstance(plan, StepPlan) and len(plan.rows) > 0:
                # No rank but 0 needs logits.
                batch = ForwardBatch.of(plan, config.layer_groups, np.zeros(len(plan.rows), np.int64))
            self.carry_out(kv_cache, runner, lists_of(plan), batch)

    def _share(self, message: Message, borrowed: BorrowedModel, kv_cache: KVCache, runner: ModelRunner) -> RankCopies:
        """Map the rows that rank 0 keeps objects of tiers in, and say which weights are computed with here."""
        from .sharing import RankCopies

        def say(number: int) -> None:
            self._connection.send_bytes(pack("copied", number=number))

        copies = RankCopies(message.fields, self._shard.rank, kv_cache, runner.slots, say)
        self._connection.send_bytes(pack("shares", {"weights": fingerprint_of(borrowed.model)["weights"]}))
        return copies

    def carry_out(
        self, kv_cache: KVCache, runner: ModelRunner, moves: list[MoveLists | SlotLists], batch: ForwardBatch | None
    ) -> None:
        """Carry out a plan: move blocks and states, then compute if there is something to."""
        for each in moves:
            carry_out(each, kv_cache, runner.slots)
        if batch is not None:
            runner.compute(batch)


def read_plan(receiver: PlanReceiver, message: Message) -> SwapPlan:
    """Return the plan of a message. Raises `RankError` unless it follows those before, and is one of this cache."""
    try:
        return receiver.from_bytes(message)
    except DivergedRank as error:
        raise RankError(f"diverged: {error}") from error
    except InvalidArgument as error:
        raise RankError(f"got step {message.number}, which cannot be carried out: {error}") from error


def follow(rank: TorchrunRank, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
    """Be a rank of torchrun's that is not 0, until rank 0 ends; then the process ends. Raises `RankError`."""
    connection, store = rank.connect()
    Follower(connection, rank.shard, store, rank.is_local).run(model, block_size, max_model_len)


def main(descriptor: int) -> None:
    """Follow over the socket that was handed down as `descriptor`."""
    os.set_inheritable(descriptor, False)
    connection = SocketConnection(socket.socket(fileno=descriptor))
    try:
        start = Message.of(connection.recv_bytes()).require("start").fields
    except ConnectionLost:
        end_process("", 0)  # rank 0 gave up before it began
    torch.set_num_threads(start["num_threads"])
    shard = Shard(start["rank"], start["size"])
    follower = Follower(connection, shard, dist.FileStore(start["store"], shard.size), end=_end)
    try:
        model, _ = load_model(start["path"], getattr(torch, start["dtype"]), start["device"])
    except BaseException as error:
        follower.fail(error)
    follower.run(model, start["block_size"], start["max_model_len"])


def _end(why: str) -> None:
    """End the process. What rank 0 had to say it says itself, unless it is gone."""
    end_process(why if why.endswith(GONE) else "")
