"""A rank's share of a model: the same modules, of which the planned ones have some rows or columns.

The plan is that of the model's config (`base_model_tp_plan`), as far as it is linear. What it does not name, or asks
for in another way (experts of a mixture), is whole on every rank. A layer split by its outputs needs no communication;
the one behind it, split by its inputs, sums over the ranks once (Megatron-LM, Shoeybi et al., 2019).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from blockyard.errors import ModelError
from blockyard.sizing import Shard

from .group import RankGroup

COLUMNS = "colwise"
ROWS = "rowwise"
COLUMNS_GATHERED = "colwise_gather_output"
ROWS_OF_WHOLE = "rowwise_split_input"
_STYLES = (COLUMNS, ROWS, COLUMNS_GATHERED, ROWS_OF_WHOLE)
_QUERY_HEADS = ("num_heads", "num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model: of queries, and of keys and values."""

    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, model: Any, num_kv_heads: int) -> Heads:
        """Take it of a model that was seen to keep num_kv_heads heads of keys."""
        config = model.config.get_text_config(decoder=True)
        return cls(int(config.num_attention_heads), num_kv_heads)


class ModelShard:
    """`model` shared out: a copy whose split layers are a rank's own, and whose other weights are the model's.

    has_own_heads: whether its attention keeps the rank's heads alone; if not, all of them. The model is left as it is.
    Raises `ModelError` for a model without a plan, or with a planned layer that is not a plain linear one,
    `InvalidArgument` for more ranks than attention heads.
    """

    def __init__(self, model: Any, heads: Heads, shard: Shard, group: RankGroup) -> None:
        self.model = _with_same_weights(model)
        self.has_own_heads = False
        self._heads = heads
        self._shard = shard
        self._group = group
        require_splittable(model, heads, shard)
        for name, module, style in planned_modules(self.model):
            self._replace(name, self._split(name, module, style))

    def _split(self, name: str, whole: torch.nn.Linear, style: str) -> torch.nn.Linear:
        own = self._own(name, whole, style)
        if style == COLUMNS:
            return split_outputs(whole, own)
        if style == COLUMNS_GATHERED:
            shards = [Shard(rank, self._shard.size) for rank in range(self._shard.size)]
            return gathered(whole, own, [len(each.part(whole.out_features)) for each in shards], self._group)
        return summed(whole, own, self._group, style == ROWS_OF_WHOLE)

    def _own(self, name: str, whole: torch.nn.Linear, style: str) -> range:
        """Return which features this rank has of the split side: whole heads in attention, single ones elsewhere."""
        number = whole.out_features if style in (COLUMNS, COLUMNS_GATHERED) else whole.in_features
        if style in (COLUMNS_GATHERED, ROWS_OF_WHOLE) or not is_of_attention(name):
            return self._shard.part(number)
        queries = self._shard.query_heads(self._heads.num_heads, self._heads.num_kv_heads)
        if is_of_kv(name):
            kept = self._shard.kv_heads(self._heads.num_kv_heads)
            return _features(name, number, kept, self._heads.num_kv_heads)
        self._tell_heads(name.rpartition(".")[0], queries)
        return _features(name, number, queries, self._heads.num_heads)

    def _tell_heads(self, name: str, queries: range) -> None:
        """Some attention modules read the number of their heads."""
        attention = self.model.base_model.get_submodule(name)
        num_kept = len(self._shard.kv_heads(self._heads.num_kv_heads))
        self.has_own_heads = True
        told = {**dict.fromkeys(_QUERY_HEADS, len(queries)), **dict.fromkeys(_KV_HEADS, num_kept)}
        told["num_key_value_groups"] = len(queries) // num_kept
        for field, value in told.items():
            if isinstance(getattr(attention, field, None), int):
                setattr(attention, field, value)

    def _replace(self, name: str, module: torch.nn.Module) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.base_model.get_submodule(parent), leaf, module)


def require_splittable(model: Any, heads: Heads, shard: Shard) -> None:
    """Raise what `ModelShard` raises for a model that ranks cannot share. O(modules).

    Each rank asks before it meets the others, so that none waits for one that has refused.
    """
    planned = list(planned_modules(model))
    for name, module, _ in planned:
        if type(module) is not torch.nn.Linear:
            raise ModelError(f"{name} is a {type(module).__name__}; only plain linear layers are split over ranks")
    if not planned:
        raise ModelError(f"{type(model).__name__} cannot be split over ranks: its plan splits no linear layer")
    if any(is_of_attention(name) for name, _, _ in planned):
        shard.query_heads(heads.num_heads, heads.num_kv_heads)


def _features(name: str, number: int, heads: range, num_heads: int) -> range:
    size, rest = divmod(number, num_heads)
    if rest:
        raise ModelError(f"{name} has {number} features, which are not {num_heads} heads of one size")
    return range(heads.start * size, heads.stop * size)


def _with_same_weights(model: Any) -> Any:
    """Return a copy of the modules over the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def planned_modules(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, module and style of each module that is split: names begin at the model's base. O(modules).

    Raises `ModelError` if the config has no plan.
    """
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"{type(model).__name__} cannot be split over ranks: its config has no base_model_tp_plan")
    for name, module in list(model.base_model.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", name))
        if style in _STYLES:
            yield name, module, style


def is_of_attention(name: str) -> bool:
    """Return whether a module of this name is a part of attention, where heads are split and not single features."""
    return any("attn" in part or "attention" in part for part in name.split("."))


def is_of_kv(name: str) -> bool:
    """Return whether a part of attention computes keys or values."""
    return name.rpartition(".")[2] in ("k_proj", "v_proj", "key_proj", "value_proj")


def split_outputs(whole: torch.nn.Linear, own: range) -> torch.nn.Linear:
    """Return a layer that computes some of the outputs of `whole`; its weights are a copy of theirs."""
    bias = None if whole.bias is None else whole.bias[own.start : own.stop]
    return _filled(torch.nn.Linear, whole.weight[own.start : own.stop], bias)


class GatheredLinear(torch.nn.Linear):  # type: ignore[misc]  # torch's modules are Any to mypy
    """Computes some of the outputs, and takes the others from the other ranks."""

    group: RankGroup
    #: Outputs of each rank.
    counts: list[int]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return all outputs, on every rank."""
        return self.group.all_gather(super().forward(given), self.counts)


class SummedLinear(torch.nn.Linear):  # type: ignore[misc]
    """Computes all outputs from some of the inputs, and sums them over the ranks."""

    group: RankGroup
    #: Which inputs to take of those that it is given; None where it is given its own alone.
    taken: range | None
    #: Added once, behind the sum.
    whole_bias: torch.Tensor | None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return all outputs, on every rank."""
        own = given if self.taken is None else given[..., self.taken.start : self.taken.stop]
        total = self.group.all_reduce(super().forward(own))
        return total if self.whole_bias is None else total + self.whole_bias


def gathered(whole: torch.nn.Linear, own: range, counts: list[int], group: RankGroup) -> GatheredLinear:
    """Return a `GatheredLinear` in place of `whole`. own: outputs of this rank; counts: how many each has."""
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
