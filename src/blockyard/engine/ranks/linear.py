"""Linear layers of which a rank has some rows or columns (Megatron-LM, Shoeybi et al., 2019).

A layer split by its outputs needs no communication; the one behind it, split by its inputs, sums over the ranks once.
"""

from __future__ import annotations

from typing import Any

import torch

from .group import RankGroup


def split_outputs(whole: torch.nn.Linear, own: range) -> torch.nn.Linear:
    """A layer that computes some of the outputs of `whole`; its weights are a copy of theirs."""
    bias = None if whole.bias is None else whole.bias[own.start : own.stop]
    return _filled(torch.nn.Linear, whole.weight[own.start : own.stop], bias)


class GatheredLinear(torch.nn.Linear):  # type: ignore[misc]  # torch's modules are Any to mypy
    """Computes some of the outputs, and takes the others from the other ranks."""

    group: RankGroup
    #: Outputs of each rank.
    counts: list[int]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """All outputs, on every rank."""
        return self.group.all_gather(super().forward(given), self.counts)


class SummedLinear(torch.nn.Linear):  # type: ignore[misc]
    """Computes all outputs from some of the inputs, and sums them over the ranks."""

    group: RankGroup
    #: Which inputs to take of those that it is given; None where it is given its own alone.
    taken: range | None
    #: Added once, behind the sum.
    whole_bias: torch.Tensor | None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """All outputs, on every rank."""
        own = given if self.taken is None else given[..., self.taken.start : self.taken.stop]
        total = self.group.all_reduce(super().forward(own))
        return total if self.whole_bias is None else total + self.whole_bias


def gathered(whole: torch.nn.Linear, own: range, counts: list[int], group: RankGroup) -> GatheredLinear:
    """A `GatheredLinear` in place of `whole`. own: outputs of this rank; counts: how many each has."""
    bias = None if whole.bias is None else whole.bias[own.start : own.stop]
    made: GatheredLinear = _filled(GatheredLinear, whole.weight[own.start : own.stop], bias)
    made.group, made.counts = group, counts
    return made


def summed(whole: torch.nn.Linear, own: range, group: RankGroup, is_given_all: bool) -> SummedLinear:
    """A `SummedLinear` in place of `whole`. own: inputs of this rank. is_given_all: whether it is given all inputs."""
    made: SummedLinear = _filled(SummedLinear, whole.weight[:, own.start : own.stop], None)
    made.group, made.taken = group, own if is_given_all else None
    made.whole_bias = whole.bias
    return made


def _filled(kind: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    with torch.device("meta"):
        made = kind(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = _copy(weight)
    if bias is not None:
        made.bias = _copy(bias)
    return made


def _copy(part: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(part.detach().clone(), requires_grad=False)
