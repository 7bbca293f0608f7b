"""Rank 0: the engine's own process, which alone schedules, manages blocks and samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from blockyard.arguments import reason, require_int
from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument, RankError
from blockyard.groups import MAX_GROUP_BLOCK_SIZE, LayerGroup
from blockyard.sizing import MAX_RANKS, KVCacheSpec, Shard
from blockyard.steps import PlanSender
from blockyard.storage import KVCache
from blockyard.wire import pack

from ..borrowing import BorrowedModel
from ..memory.account import EngineMemory
from ..moves import MoveQueue
from ..runner import ForwardBatch, ModelRunner, StepRunner
from ..shape import KVShape
from . import group
from .group import CollectiveError, ProcessGroup
from .joining import CacheSettings, agreed_bytes, identity_of, is_affordable, join, require_same, require_shareable
from .peers import Peers, StartedPeers
from .watch import PeerWatch

if TYPE_CHECKING:
    from blockyard_tiers import Blocks, IsDone, States


class Ranks:
    """The ranks of an engine, from rank 0's side. They exist when it does, and have ended after `close`.

    peers: the others; None for an engine that is alone: then no rank is told, and none can be lost. interleave: 0
    where ranks share heads and features; else they share tokens, as many neighbouring ones at a time.

    Once all are ready (`lead`) it carries out steps together with them: the interface of `ModelRunner`.
    """

    def __init__(
        self, peers: Peers | None, interleave: int, model: Any, block_size: int, max_model_len: int | None
    ) -> None:
        self._peers = peers
        self._interleave = interleave
        self._watch = PeerWatch([] if peers is None else peers.connect(model, block_size, max_model_len))
        self._group: ProcessGroup
        self._agreed = b""
        self._num_copies = 0
        self._sender: PlanSender
        self._runner: ModelRunner

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return 1 if self._peers is None else self._peers.size

    @property
    def lost(self) -> str | None:
        """Return why ranks are lost; None while they are there."""
        return self._watch.lost

    def require_servable(self, shape: KVShape) -> None:
        """Raise `InvalidArgument` for a model that several ranks cannot share."""
        if self._peers is None:
            return
        name, size, heads = "context_parallel" if self._interleave else "tensor_parallel", self.size, shape.num_kv_heads
        if shape.index is not None:
            raise InvalidArgument(
                f"{name} is {size} for a model whose layers keep index keys, which ranks do not share; it must be 1"
            )
        if shape.states is not None and not self._interleave and heads > size and heads % size:
            raise InvalidArgument(
                f"{name} is {size} for a hybrid model of {heads} KV heads; it must divide them, so that a state takes "
                f"equally many blocks on each rank"
            )

    def join(self, borrowed: BorrowedModel, shape: KVShape, block_size: int) -> tuple[BorrowedModel, KVShape]:
        """Return this rank's share of a model, tried together with the others.

        Raises `RankError` where ranks disagree or one is lost, and what `joining.join` raises.
        """
        if self._peers is None:
            return borrowed, shape
        own = identity_of(borrowed, shape, block_size)
        for peer, hello in zip(self._watch.peers, self._watch.await_all("hello"), strict=True):
            require_same(peer.rank, hello.fields, own)
        self._agreed = agreed_bytes(own)
        is_tried = is_affordable(borrowed)
        seconds = group.STEP_SECONDS
        welcome = {"is_tried": is_tried, "interleave": self._interleave, "step_seconds": seconds}
        self._watch.send_all(pack("welcome", welcome))
        shard = Shard(0, self._peers.size)
        require_shareable(borrowed, shape, shard, self._interleave)
        try:
            meeting = (shard, self._peers.store(), borrowed.device, self._peers.is_local, seconds)
            self._group = self._watch.unless_lost(lambda: ProcessGroup(*meeting))
            return join(borrowed, shape, shard, self._interleave, self._group, is_tried)
        except CollectiveError as error:
            raise self._watch.blame(error) from error

    def settle(self, settings: CacheSettings) -> None:
        """Tell the others what cache to make."""
        self._watch.send_all(pack("settings", asdict(settings)))

    def agree(self, config: CacheConfig, memory: EngineMemory, spec: KVCacheSpec) -> tuple[CacheConfig, EngineMemory]:
        """Return the config and the sum with as many blocks as fit on every rank."""
        if self._peers is None:
            return config, memory
        try:
            num_blocks = self._group.least(config.num_blocks)
        except CollectiveError as error:
            raise self._watch.blame(error) from error
        config = replace(config, num_blocks=num_blocks)
        self._sender = PlanSender(config, self._agreed)
        return config, replace(memory, kv_bytes=num_blocks * spec.bytes_per_block)

    def lead(self, runner: ModelRunner) -> StepRunner:
        """A runner for all ranks, with rank 0's own in it, once all can take steps. Raises `RankError`."""
        self._runner = runner
        if self._peers is None:
            return runner
        self._watch.await_all("ready")
        self._peers.clean_up()
        return self

    def require_all(self) -> None:
        """Raise `RankError` if ranks are lost."""
        self._watch.require_all()

    def require_one_machine(self, what: str) -> None:
        """Raise `InvalidArgument` where ranks cannot share memory, for what needs that."""
        if self._peers is None:
            return
        if not self._peers.is_local:
            raise InvalidArgument(f"{what} need all ranks on one machine; of {self._peers.size} some are on others")
        if not hasattr(os, "memfd_create"):
            raise InvalidArgument(f"{what} need one rank on {sys.platform}; several share memory as Linux has it")

    def objects(self, kv_cache: KVCache, shape: KVShape, buffer_bytes: int) -> tuple[Blocks, States | None, list[str]]:
        """Return blocks and states of all ranks, for tiers, and digests of the weights that other ranks compute with.

        Raises `InvalidArgument` for buffers of less than two objects, and `RankError`. O(weights).
        """
        from blockyard_tiers import KVBlocks, StateObjects

        slots = self._runner.slots
        if self._peers is None:
            blocks = KVBlocks(kv_cache, buffer_bytes)
            return blocks, None if slots is None else StateObjects(blocks, slots), []
        from .sharing import ObjectParts, RankBlocks, RankStates, new_rows, part_of

        parts = ObjectParts(kv_cache, shape, self._peers.size)
        rows = new_rows(kv_cache, parts, buffer_bytes)
        num_rows, row_bytes = rows.tensor.shape
        given = {"path": rows.path, "num_rows": num_rows, "row_bytes": row_bytes, "firsts": parts.firsts}
        self._watch.send_all(pack("rows", given))
        weights = [str(said.fields["weights"]) for said in self._watch.await_all("shares")]
        rows.close_path()
        own = part_of(kv_cache, rows.tensor, parts.firsts[0])
        states = None if slots is None else RankStates(StateObjects(own, slots), self._ask)
        return RankBlocks(own, rows.tensor, parts, self._ask), states, weights

    def _ask(self, what: str, rows: Sequence[int], blocks: npt.NDArray[np.int32], slot: int = 0) -> IsDone:
        """Have the other ranks make a copy behind all that they were sent; `sharing.Ask`."""
        self._num_copies = number = self._num_copies + 1
        fields = {"what": what, "slot": slot, "shape": blocks.shape}
        with suppress(RankError):  # the next step raises it
            self._watch.send_all(pack("copy", fields, [np.array(rows, np.int32), blocks.ravel()], number))
        return lambda: self._watch.have_said("copied", number)

    def tell(self, call: Callable[[str], None]) -> None:
        """Have `call` told why, in a thread of its own, when ranks are lost; at once if they are."""
        self._watch.tell(call)

    def silence(self) -> str | None:
        """Return why no step can be made now, asked of every rank; None while all answer."""
        return self._watch.silence()

    def close(self) -> None:
        """End the other ranks. A second call does nothing."""
        if self._peers is not None:
            self._watch.close()
            self._peers.clean_up()

    # Steps.

    @property
    def attention_backend(self) -> str:
        """Return the name of the backend that was chosen."""
        return self._runner.attention_backend

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """Does as `ModelRunner`. Raises `RankError` where a rank is lost.

        A step that breaks off here ends the others too, since they are in the middle of it.
        """
        self._send(moves, batch)
        try:
            return self._runner.run(batch, moves)
        except CollectiveError as error:
            raise self._watch.blame(error) from error
        except BaseException as error:
            self._watch.lose(f"a step broke off on rank 0: {type(error).__name__}: {reason(error)}")
            raise

    def carry_out(self, moves: MoveQueue) -> None:
        """Does as `ModelRunner`, on every rank that is left."""
        if moves.plans and self.lost is None:
            self._send(moves, None)
        self._runner.carry_out(moves)

    def _send(self, moves: MoveQueue, batch: ForwardBatch | None) -> None:
        """Send a step to the others, moves first. Raises `RankError` if one is lost. O(bytes * ranks)."""
        self.require_all()
        run = None if batch is None else batch.plan
        try:
            messages = [self._sender.to_bytes(plan, moves_only=True) for plan in moves.plans if plan is not run]
            if batch is not None and run is not None:
                messages.append(self._sender.to_bytes(run, token_ids=batch.token_ids))
        except BaseException as error:
            self._watch.lose(f"a step could not be sent: {type(error).__name__}: {reason(error)}")
            raise
        for message in messages:
            self._watch.send_all(message)


def ranks_of(
    tensor_parallel: object,
    context_parallel: object,
    context_interleave: int,
    model: Any,
    block_size: int,
    max_model_len: int | None,
) -> Ranks:
    """Return the ranks that an engine is told to have, numbers or `Peers`, started."""
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
    return Ranks(None, 0, model, block_size, max_model_len)


def _named(tensor_parallel: object, context_parallel: object) -> list[tuple[str, object]]:
    return [("tensor_parallel", tensor_parallel), ("context_parallel", context_parallel)]


def _peers(name: str, asked: object) -> Peers:
    return asked if isinstance(asked, Peers) else StartedPeers(require_int(name, asked, 1, MAX_RANKS))


@contextmanager
def ended_on_error(ranks: Ranks) -> Iterator[None]:
    """End the other ranks if what is done meanwhile raises."""
    try:
        yield
    except BaseException:
        ranks.close()
        raise
