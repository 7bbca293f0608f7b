"""Rank 0: the engine's own process, which alone schedules, manages blocks and samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...arguments import require_int
from ...config import CacheConfig
from ...errors import InvalidArgument
from ...groups import MAX_GROUP_BLOCK_SIZE, LayerGroup
from ...sizing import KVCacheSpec, Shard
from ...sizing.shards import MAX_RANKS
from ..borrowing import BorrowedModel
from ..memory.account import EngineMemory
from ..moves import MoveQueue
from ..reasons import reason
from ..runner import ForwardBatch, ModelRunner, StepRunner
from ..shape import ModelShape
from .channel import Kind
from .group import CollectiveError, ProcessGroup
from .identity import agreed_bytes, identity_of, require_same
from .joining import is_affordable, join
from .peers import Peers
from .processes import StartedPeers
from .settings import CacheSettings
from .step_message import StepSender
from .watch import PeerWatch


class OneRank:
    """An engine that is alone: the interface of `Ranks`, without anybody to tell."""

    lost: str | None = None

    def join(self, borrowed: BorrowedModel, shape: ModelShape, block_size: int) -> tuple[BorrowedModel, ModelShape]:
        """The whole model."""
        del block_size
        return borrowed, shape

    def settle(self, settings: CacheSettings) -> None:
        """No rank is told."""

    def agree(self, config: CacheConfig, memory: EngineMemory, spec: KVCacheSpec) -> tuple[CacheConfig, EngineMemory]:
        """As they are."""
        del spec
        return config, memory

    def lead(self, runner: ModelRunner) -> StepRunner:
        """The runner alone."""
        return runner

    def require_all(self) -> None:
        """No rank is missing."""

    def tell(self, call: Callable[[str], None]) -> None:
        """No rank can be lost."""

    def close(self) -> None:
        """No rank is to be ended."""


class Ranks:
    """The ranks of an engine, from rank 0's side. They exist when it does, and have ended after `close`.

    interleave: 0 where they share heads and features; else they share tokens, as many neighbouring ones at a time.
    """

    def __init__(self, peers: Peers, interleave: int, model: Any, block_size: int, max_model_len: int | None) -> None:
        self.size = peers.size
        self._peers = peers
        self._interleave = interleave
        self._watch = PeerWatch(peers.connect(model, block_size, max_model_len))
        self._group: ProcessGroup
        self._agreed = b""
        self._sender: StepSender

    @property
    def watch(self) -> PeerWatch:
        """Who is there."""
        return self._watch

    @property
    def lost(self) -> str | None:
        """Why ranks are lost; None while they are there."""
        return self._watch.lost

    def join(self, borrowed: BorrowedModel, shape: ModelShape, block_size: int) -> tuple[BorrowedModel, ModelShape]:
        """This rank's share of a model, tried together with the others.

        Raises `RankError` where ranks disagree or one is lost, and what `joining.join` raises.
        """
        own = identity_of(borrowed, shape, block_size)
        for peer, body in zip(self._watch.peers, self._watch.await_all(Kind.HELLO), strict=True):
            require_same(peer.rank, json.loads(body), own)
        self._agreed = agreed_bytes(own)
        is_tried = is_affordable(borrowed)
        welcome = {"is_tried": is_tried, "interleave": self._interleave}
        self._watch.send_all(Kind.WELCOME, json.dumps(welcome).encode())
        try:
            store = self._peers.store()
            self._group = ProcessGroup(0, self.size, store, borrowed.device, self._peers.is_local)
            return join(borrowed, shape, Shard(0, self.size), self._interleave, self._group, is_tried)
        except CollectiveError as error:
            raise self._watch.blame(error) from error

    def settle(self, settings: CacheSettings) -> None:
        """Tell the others what cache to make."""
        self._watch.send_all(Kind.SETTINGS, json.dumps(settings.to_json()).encode())

    def agree(self, config: CacheConfig, memory: EngineMemory, spec: KVCacheSpec) -> tuple[CacheConfig, EngineMemory]:
        """The config and the sum with as many blocks as fit on every rank."""
        try:
            num_blocks = self._group.least(config.num_blocks)
        except CollectiveError as error:
            raise self._watch.blame(error) from error
        kv_bytes = num_blocks * spec.bytes_per_block
        config = replace(config, num_blocks=num_blocks)
        self._sender = StepSender(self._agreed, config)
        return config, replace(memory, kv_bytes=kv_bytes)

    def lead(self, runner: ModelRunner) -> StepRunner:
        """A runner for all ranks, around rank 0's own, once all can take steps. Raises `RankError`."""
        self._watch.await_all(Kind.READY)
        self._peers.clean_up()
        return LeadingRunner(runner, self)

    def require_all(self) -> None:
        """Raise `RankError` if ranks are lost."""
        self._watch.require_all()

    def tell(self, call: Callable[[str], None]) -> None:
        """Have `call` told why, in a thread of its own, when ranks are lost; at once if they are."""
        self._watch.tell(call)

    def send(self, moves: MoveQueue, batch: ForwardBatch | None) -> None:
        """Send a step to the others. Raises `RankError` if one is lost. O(bytes * ranks)."""
        self.require_all()
        try:
            message = self._sender.to_bytes(moves.plans, batch)
        except BaseException as error:
            self._watch.lose(f"a step could not be sent: {type(error).__name__}: {reason(error)}")
            raise
        self._watch.send_all(Kind.STEP, message)

    def close(self) -> None:
        """End the other ranks. A second call does nothing."""
        self._watch.close()
        self._peers.clean_up()


class LeadingRunner:
    """Carries out steps together with the other ranks: the interface of `ModelRunner`, around rank 0's own."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    @property
    def attention_backend(self) -> str:
        """The name of the backend that was chosen."""
        return self._runner.attention_backend

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """As `ModelRunner`. Raises `RankError` where a rank is lost.

        A step that breaks off here ends the others too, since they are in the middle of it.
        """
        self._ranks.send(moves, batch)
        watch = self._ranks.watch
        try:
            return self._runner.run(batch, moves)
        except CollectiveError as error:
            raise watch.blame(error) from error
        except BaseException as error:
            watch.lose(f"a step broke off on rank 0: {type(error).__name__}: {reason(error)}")
            raise

    def carry_out(self, moves: MoveQueue) -> None:
        """As `ModelRunner`, on every rank that is left."""
        if moves.plans and self._ranks.lost is None:
            self._ranks.send(moves, None)
        self._runner.carry_out(moves)


def ranks_of(
    tensor_parallel: object,
    context_parallel: object,
    context_interleave: int,
    model: Any,
    block_size: int,
    max_model_len: int | None,
) -> Ranks | OneRank:
    """The ranks that an engine is told to have, numbers or `Peers`, started."""
    tensor, context = (_peers(*asked) for asked in _named(tensor_parallel, context_parallel))
    if tensor.size > 1 and context.size > 1:
        raise InvalidArgument(
            f"tensor_parallel is {tensor.size} and context_parallel is {context.size}; ranks share heads or tokens"
        )
    require_int("block_size", block_size, 1, MAX_GROUP_BLOCK_SIZE)
    LayerGroup(block_size * context.size, shards=context.size, interleave=context_interleave)
    if tensor.size > 1:
        return Ranks(tensor, 0, model, block_size, max_model_len)
    if context.size > 1:
        return Ranks(context, context_interleave, model, block_size, max_model_len)
    return OneRank()


def _named(tensor_parallel: object, context_parallel: object) -> list[tuple[str, object]]:
    return [("tensor_parallel", tensor_parallel), ("context_parallel", context_parallel)]


def _peers(name: str, asked: object) -> Peers:
    return asked if isinstance(asked, Peers) else StartedPeers(require_int(name, asked, 1, MAX_RANKS))


@contextmanager
def ended_on_error(ranks: Ranks | OneRank) -> Iterator[None]:
    """End the other ranks if what is done meanwhile raises."""
    try:
        yield
    except BaseException:
        ranks.close()
        raise
