"""Collective operations of one engine's ranks, in their own process group."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import torch
import torch.distributed as dist

from blockyard.arguments import reason
from blockyard.errors import ModelError, RankError
from blockyard.sizing import Shard

#: Seconds that a rank waits for another within a step before it counts as dead.
STEP_SECONDS = 300


class RankGroup(Protocol):
    """Collectives that layers use. Every rank makes the same calls in the same order."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, on every rank; may overwrite the argument."""

    def all_gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along the last dimension; rank i has counts[i] elements there."""


class CollectiveError(RankError):
    """A collective failed, most likely because another rank ended."""


class ProcessGroup:
    """`RankGroup` by torch.distributed: gloo for tensors on the CPU, NCCL for CUDA.

    The ranks meet in `store`, use only loopback if all are local, and wait for each other at most `seconds`.
    """

    def __init__(self, shard: Shard, store: Any, device: torch.device, is_local: bool, seconds: float) -> None:
        make = _nccl if device.type == "cuda" else _gloo
        self._device = device
        try:
            self._group = make(store, shard, is_local, datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            raise CollectiveError(f"could not meet the other ranks: {reason(error)}") from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.contiguous()
        self._run(lambda: self._group.allreduce([whole]))
        return whole

    def all_gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        widest = max(counts)
        own = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in counts]
        self._run(lambda: self._group.allgather([parts], [own]))
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], dim=-1)

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        own = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._run(lambda: self._group.allreduce([own], options))
        return int(own.item())

    def _run(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise CollectiveError(f"a sum over the ranks failed: {reason(error)}") from error


def _gloo(store: Any, shard: Shard, is_local: bool, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    if is_local:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard, is_local: bool, timeout: datetime.timedelta) -> Any:  # noqa: ARG001  # it finds its way
    if not dist.is_nccl_available():
        raise ModelError("several ranks on CUDA need NCCL, which this build of torch does not have; use one rank")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
