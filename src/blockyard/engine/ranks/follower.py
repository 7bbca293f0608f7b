"""A rank other than 0: it joins, then carries out the steps that rank 0 sends, until one of them ends."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import BlockyardError, RankError
from ...sizing import Shard
from ...storage import KVCache, MoveLists
from ..borrowing import BorrowedModel
from ..probe import learn_shape
from ..reasons import reason
from ..runner import ForwardBatch, ModelRunner
from .channel import Channel, ChannelClosed, Kind
from .group import CollectiveError, ProcessGroup
from .identity import agreed_bytes, identity_of
from .joining import join
from .settings import CacheSettings
from .step_message import StepReceiver

#: For rank 0's end, or its word, to arrive before a sum that broke off because of it is reported.
_CAUSE_SECONDS = 0.3
#: Why a rank ends that no one told to.
GONE = "rank 0 has ended"


def end_process(why: str, status: int = 1) -> NoReturn:
    """End this process now, whatever its threads do, with a sentence if there is one."""
    if why:
        print(f"blockyard: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Inbox:
    """Reads what rank 0 says, in a thread, so that its end ends this process at any moment: also inside a step.

    end: called with a reason where rank 0 is gone, or says that all must end.
    """

    def __init__(self, channel: Channel, end: Callable[[str], None]) -> None:
        self._channel = channel
        self._end = end
        self._messages: queue.SimpleQueue[tuple[Kind, bytearray]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="blockyard-rank-0", daemon=True).start()

    def expect(self, kind: Kind) -> bytearray:
        """The next message, of this kind. Raises `SystemExit` where rank 0 ends, `RankError` for another."""
        found, body = self._messages.get()
        if found is Kind.CLOSE:
            raise SystemExit(0)
        if found is not kind:
            raise RankError(f"got {found.name} of rank 0 instead of {kind.name}")
        return body

    def _read(self) -> None:
        try:
            while True:
                kind, body = self._channel.receive()
                if kind is Kind.CLOSE and body:
                    self._end(body.decode(errors="replace"))
                self._messages.put((kind, body))
                if kind is Kind.CLOSE:
                    return
        except ChannelClosed:
            self._end(GONE)
            self._messages.put((Kind.CLOSE, bytearray()))


class Follower:
    """A rank on its way from a model to its last step.

    store: of torch.distributed, where the ranks meet. is_local: whether all run on this machine. end: what ends the
    process, with a sentence or none.
    """

    def __init__(
        self,
        channel: Channel,
        shard: Shard,
        store: Any,
        is_local: bool = True,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._channel = channel
        self._shard = shard
        self._store = store
        self._is_local = is_local
        self._end = end
        self._inbox = Inbox(channel, lambda why: end(f"rank {shard.rank} ends: {why}"))

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
            self._channel.send_json(Kind.FAILED, {"why": why, "is_consequence": is_consequence})
        except ChannelClosed:
            end_process(f"rank {self._shard.rank} ends: {why}")
        end_process("")

    def serve(self, model: Any, block_size: int, max_model_len: int | None) -> NoReturn:
        """Join, and carry out steps. Raises `SystemExit` where rank 0 ends, and what fails here."""
        borrowed = BorrowedModel(model)
        shape = learn_shape(borrowed, max_model_len)
        identity = identity_of(borrowed, shape, block_size)
        self._channel.send_json(Kind.HELLO, identity)
        welcome = json.loads(bytes(self._inbox.expect(Kind.WELCOME)))
        group = ProcessGroup(self._shard.rank, self._shard.size, self._store, borrowed.device, self._is_local)
        del model  # the whole is not needed any more
        borrowed, shape = join(borrowed, shape, self._shard, welcome["interleave"], group, welcome["is_tried"])
        settings = CacheSettings(**json.loads(bytes(self._inbox.expect(Kind.SETTINGS))))
        config, kv_cache, runner = settings.make(borrowed, shape, group)
        self._channel.send(Kind.READY)
        receiver = StepReceiver(agreed_bytes(identity), config)
        while True:
            moves, batch = receiver.from_bytes(self._inbox.expect(Kind.STEP))
            self.carry_out(kv_cache, runner, moves, batch)

    def carry_out(
        self, kv_cache: KVCache, runner: ModelRunner, moves: list[MoveLists], batch: ForwardBatch | None
    ) -> None:
        """Carry out a step: move blocks, then compute if there is something to."""
        for each in moves:
            kv_cache.start_moves(each)
        if batch is not None:
            runner.compute(batch)
