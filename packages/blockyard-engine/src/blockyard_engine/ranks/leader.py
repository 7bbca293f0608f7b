"""Rank 0: the engine's own process, which schedules, manages blocks and samples for all ranks."""

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

from ..memory.account import EngineMemory
from ..moves import MoveQueue
from ..patching import PatchedModel
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
    """The ranks of an engine, from rank 0's side; they end with `close`.

    After `shared_runner` it carries out steps together with them, with the interface of `StepRunner`. An engine of one
    rank has no `peers`. `interleave` is 0 for tensor parallel ranks; for context parallel ranks, the consecutive tokens
    on one rank.
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
        """Number of ranks."""
        return 1 if self._peers is None else self._peers.size

    @property
    def failure(self) -> str | None:
        """Why the ranks have ended; None while they run."""
        return self._watch.failure

    def require_servable(self, shape: KVShape) -> None:
        """Raise `InvalidArgument` for a model that several ranks cannot share."""
        if self._peers is None:
            return
        name, size, heads = "context_parallel" if self._interleave else "tensor_parallel", self.size, shape.num_kv_heads
        if shape.index is not None:
            raise InvalidArgument(
                f"{name} is {size} for a model with index keys, which cannot be shared between ranks; it must be 1"
            )
        if shape.states is not None and not self._interleave and heads > size and heads % size:
            raise InvalidArgument(
                f"{name} is {size} for a hybrid model of {heads} KV heads; it must divide them, so that a state takes "
                f"equally many blocks on each rank"
            )

    def join(self, patched: PatchedModel, shape: KVShape, block_size: int) -> tuple[PatchedModel, KVShape]:
        """Return this rank's share of a model, tested together with the other ranks.

        Raises `RankError` if ranks disagree or one has ended, and as `joining.join`.
        """
        if self._peers is None:
            return patched, shape
        own = identity_of(patched, shape, block_size)
        for peer, hello in zip(self._watch.peers, self._watch.await_all("hello"), strict=True):
            require_same(peer.rank, hello.fields, own)
        self._agreed = agreed_bytes(own)
        is_tried = is_affordable(patched)
        seconds = group.STEP_SECONDS
        welcome = {"is_tried": is_tried, "interleave": self._interleave, "step_seconds": seconds}
        self._watch.send_all(pack("welcome", welcome))
        shard = Shard(0, self._peers.size)
        require_shareable(patched, shape, shard, self._interleave)
        try:
            meeting = (shard, self._peers.store(), patched.device, self._peers.is_local, seconds)
            self._group = self._watch.run_unless_lost(lambda: ProcessGroup(*meeting))
            return join(patched, shape, shard, self._interleave, self._group, is_tried)
        except CollectiveError as error:
            raise self._watch.failure_after(error) from error

    def send_settings(self, settings: CacheSettings) -> None:
        """Send the sizes of the cache to the other ranks."""
        self._watch.send_all(pack("settings", asdict(settings)))

    def agree_on_size(
        self, config: CacheConfig, memory: EngineMemory, spec: KVCacheSpec
    ) -> tuple[CacheConfig, EngineMemory]:
        """Return config and memory use with as many blocks as fit on every rank."""
        if self._peers is None:
            return config, memory
        try:
            num_blocks = self._group.least(config.num_blocks)
        except CollectiveError as error:
            raise self._watch.failure_after(error) from error
        config = replace(config, num_blocks=num_blocks)
        self._sender = PlanSender(config, self._agreed)
        return config, replace(memory, kv_bytes=num_blocks * spec.bytes_per_block)

    def shared_runner(self, runner: ModelRunner) -> StepRunner:
        """Return a runner for all ranks, with rank 0's own inside, once all are ready. Raises `RankError`."""
        self._runner = runner
        if self._peers is None:
            return runner
        self._watch.await_all("ready")
        self._peers.clean_up()
        return self

    def require_all(self) -> None:
        """Raise `RankError` if a rank has ended."""
        self._watch.require_all()

    def require_one_machine(self, what: str) -> None:
        """Raise `InvalidArgument` if the ranks cannot share memory, which `what` needs."""
        if self._peers is None:
            return
        if not self._peers.is_local:
            raise InvalidArgument(
                f"{what} need all {self._peers.size} ranks on one machine, but some run on other machines"
            )
        if not hasattr(os, "memfd_create"):
            raise InvalidArgument(
                f"{what} on {self._peers.size} ranks need Linux's memfd; on {sys.platform} use 1 rank"
            )

    def objects(self, kv_cache: KVCache, shape: KVShape, buffer_bytes: int) -> tuple[Blocks, States | None, list[str]]:
        """Return the blocks and states of all ranks, for tiers, and digests of the other ranks' weights. O(weights).

        Raises `RankError`, and `InvalidArgument` if the buffers hold fewer than two objects.
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
        states = None if slots is None else RankStates(StateObjects(own, slots), self._request_copy)
        return RankBlocks(own, rows.tensor, parts, self._request_copy), states, weights

    def _request_copy(self, what: str, rows: Sequence[int], blocks: npt.NDArray[np.int32], slot: int = 0) -> IsDone:
        """Let the other ranks make a copy after all earlier messages (`sharing.RequestCopy`)."""
        self._num_copies = number = self._num_copies + 1
        fields = {"what": what, "slot": slot, "shape": blocks.shape}
        with suppress(RankError):  # the next step will raise it
            self._watch.send_all(pack("copy", fields, [np.array(rows, np.int32), blocks.ravel()], number))
        return lambda: self._watch.has_received("copied", number)

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call `call` with the reason, in a thread, once a rank has ended; at once if one has already ended."""
        self._watch.on_failure(call)

    def ping(self) -> str | None:
        """Ask every rank for a sign of life; return why no step is possible now, or None if all answer."""
        return self._watch.ping()

    def close(self) -> None:
        """End the other ranks. A second call does nothing."""
        if self._peers is not None:
            self._watch.close()
            self._peers.clean_up()

    # Steps.

    @property
    def attention_backend(self) -> str:
        """Name of the chosen attention backend."""
        return self._runner.attention_backend

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """Run a step on all ranks. Raises `RankError` if one has ended.

        A failure here ends the other ranks too, since they are in the middle of the step.
        """
        self._send(moves, batch)
        try:
            return self._runner.run(batch, moves)
        except CollectiveError as error:
            raise self._watch.failure_after(error) from error
        except BaseException as error:
            self._watch.fail(f"a step failed on rank 0: {type(error).__name__}: {reason(error)}")
            raise

    def carry_out(self, moves: MoveQueue) -> None:
        """Carry out block moves on every rank that is left."""
        if moves.plans and self.failure is None:
            self._send(moves, None)
        self._runner.carry_out(moves)

    def _send(self, moves: MoveQueue, batch: ForwardBatch | None) -> None:
        """Send a step to the other ranks, moves first. Raises `RankError` if one has ended. O(bytes * ranks)."""
        self.require_all()
        run = None if batch is None else batch.plan
        try:
            messages = [self._sender.to_bytes(plan, moves_only=True) for plan in moves.plans if plan is not run]
            if batch is not None and run is not None:
                messages.append(self._sender.to_bytes(run, token_ids=batch.token_ids))
        except BaseException as error:
            self._watch.fail(f"a step could not be sent: {type(error).__name__}: {reason(error)}")
            raise
        for message in messages:
            self._watch.send_all(message)


def start_ranks(
    tensor_parallel: object,
    context_parallel: object,
    context_interleave: int,
    model: Any,
    block_size: int,
    max_model_len: int | None,
) -> Ranks:
    """Start the ranks of an engine, given as numbers or `Peers`."""
    tensor = _peers("tensor_parallel", tensor_parallel)
    context = _peers("context_parallel", context_parallel)
    if tensor.size > 1 and context.size > 1:
        raise InvalidArgument(
            f"tensor_parallel is {tensor.size} and context_parallel is {context.size}; one of them must be 1"
        )
    require_int("block_size", block_size, 1, MAX_GROUP_BLOCK_SIZE)
    LayerGroup(block_size * context.size, shards=context.size, interleave=context_interleave)
    if tensor.size > 1:
        return Ranks(tensor, 0, model, block_size, max_model_len)
    if context.size > 1:
        return Ranks(context, context_interleave, model, block_size, max_model_len)
    return Ranks(None, 0, model, block_size, max_model_len)


def _peers(name: str, value: object) -> Peers:
    return value if isinstance(value, Peers) else StartedPeers(require_int(name, value, 1, MAX_RANKS))


@contextmanager
def closing_on_error(ranks: Ranks) -> Iterator[None]:
    """End the other ranks if the `with` block raises."""
    try:
        yield
    except BaseException:
        ranks.close()
        raise
