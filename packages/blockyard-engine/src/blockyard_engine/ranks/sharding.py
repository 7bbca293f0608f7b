"""A tensor parallel rank's share of a model: a copy whose planned modules have only some rows or columns.

The plan is the model config's `base_model_tp_plan`, as far as it is linear. Modules that it does not name or handles
differently (experts of a mixture) are whole on every rank. A layer split by outputs needs no communication; the next
one, split by inputs, sums over the ranks once (Megatron-LM, Shoeybi et al., 2019).
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
    """Numbers of attention heads of a model: of queries, and of keys and values."""

    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, model: Any, num_kv_heads: int) -> Heads:
        """Return the heads of a model with `num_kv_heads` heads of keys and values."""
        config = model.config.get_text_config(decoder=True)
        return cls(int(config.num_attention_heads), num_kv_heads)


class ModelShard:
    """A rank's copy of a model: split layers have its part, all other weights are shared with the model.

    The model itself does not change. Raises `ModelError` for a model without a plan, or with a planned layer that is
    not plain linear, and `InvalidArgument` for more ranks than attention heads.

    Attributes:
        model: the copy.
        has_own_heads: whether its attention has only the rank's heads, else all.
    """

    def __init__(self, model: Any, heads: Heads, shard: Shard, group: RankGroup) -> None:
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        #: A copy of the modules over the same parameters and buffers.
        self.model = copy.deepcopy(model, shared)
        self.has_own_heads = False
        self._heads = heads
        self._shard = shard
        self._group = group
        require_splittable(model, heads, shard)
        for name, module, style in planned_modules(self.model):
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.base_model.get_submodule(parent), leaf, self._split(name, module, style))

    def _split(self, name: str, whole: torch.nn.Linear, style: str) -> torch.nn.Linear:
        own = self._own(name, whole, style)
        if style == COLUMNS:
            return split_outputs(whole, own)
        if style == COLUMNS_GATHERED:
            shards = [Shard(rank, self._shard.size) for rank in range(self._shard.size)]
            return make_gathered(whole, own, [len(each.part(whole.out_features)) for each in shards], self._group)
        return make_summed(whole, own, self._group, style == ROWS_OF_WHOLE)

    def _own(self, name: str, whole: torch.nn.Linear, style: str) -> range:
        """Return the rank's features on the split side: whole heads in attention, single features elsewhere."""
        number = whole.out_features if style in (COLUMNS, COLUMNS_GATHERED) else whole.in_features
        if style in (COLUMNS_GATHERED, ROWS_OF_WHOLE) or not is_of_attention(name):
            return self._shard.part(number)
        queries = self._shard.query_heads(self._heads.num_heads, self._heads.num_kv_heads)
        if is_of_kv(name):
            kept = self._shard.kv_heads(self._heads.num_kv_heads)
            return _features(name, number, kept, self._heads.num_kv_heads)
        self._set_heads(name.rpartition(".")[0], queries)
        return _features(name, number, queries, self._heads.num_heads)

    def _set_heads(self, name: str, queries: range) -> None:
        """Set the numbers of heads that some attention modules read."""
        attention = self.model.base_model.get_submodule(name)
        num_kept = len(self._shard.kv_heads(self._heads.num_kv_heads))
        self.has_own_heads = True
        values = {**dict.fromkeys(_QUERY_HEADS, len(queries)), **dict.fromkeys(_KV_HEADS, num_kept)}
        values["num_key_value_groups"] = len(queries) // num_kept
        for field, value in values.items():
            if isinstance(getattr(attention, field, None), int):
                setattr(attention, field, value)


def require_splittable(model: Any, heads: Heads, shard: Shard) -> None:
    """Raise as `ModelShard` for a model that ranks cannot share. O(modules).

    Each rank checks this before it meets the others, so that none waits for one that has failed.
    """
    planned = list(planned_modules(model))
    for name, module, _ in planned:
        if type(module) is not torch.nn.Linear:
            raise ModelError(f"{name} is a {type(module).__name__}; only plain linear layers can be split over ranks")
    if not planned:
        raise ModelError(f"{type(model).__name__} cannot be split over ranks: its plan splits no linear layer")
    if any(is_of_attention(name) for name, _, _ in planned):
        shard.query_heads(heads.num_heads, heads.num_kv_heads)


def _features(name: str, number: int, heads: range, num_heads: int) -> range:
    size, rest = divmod(number, num_heads)
    if rest:
        raise ModelError(f"{name} has {number} features; they must divide into {num_heads} heads of equal size")
    return range(heads.start * size, heads.stop * size)


def planned_modules(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield name, module and style of each module to split; names are relative to the base model. O(modules).

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
    """Return whether a module is part of attention, where whole heads are split, by its name."""
    return any("attn" in part or "attention" in part for part in name.split("."))


def is_of_kv(name: str) -> bool:
    """Return whether a part of attention computes keys or values."""
    return name.rpartition(".")[2] in ("k_proj", "v_proj", "key_proj", "value_proj")


def split_outputs(whole: torch.nn.Linear, own: range) -> torch.nn.Linear:
    """Return a layer that computes some of the outputs of `whole`, with a copy of their weights."""
    bias = None if whole.bias is None else whole.bias[own.start : own.stop]
    return _filled(torch.nn.Linear, whole.weight[own.start : own.stop], bias)


class GatheredLinear(torch.nn.Linear):  # type: ignore[misc]  # torch's modules are Any to mypy
    """Computes some of the outputs, and gathers the others from the other ranks."""

    group: RankGroup
    #: Outputs of each rank.
    counts: list[int]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return all outputs, on every rank."""
        return self.group.all_gather(super().forward(given), self.counts)


class SummedLinear(torch.nn.Linear):  # type: ignore[misc]
    """Computes all outputs from some of the inputs, and sums them over the ranks."""

    group: RankGroup
    #: Inputs to use of those it receives; None if it receives only its own.
    taken: range | None
    #: Bias, added once after the sum.
    whole_bias: torch.Tensor | None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return all outputs, on every rank."""
        own = given if self.taken is None else given[..., self.taken.start : self.taken.stop]
        total = self.group.all_reduce(super().forward(own))
        return total if self.whole_bias is None else total + self.whole_bias


def make_gathered(whole: torch.nn.Linear, own: range, counts: list[int], group: RankGroup) -> GatheredLinear:
    """Return a `GatheredLinear` that replaces `whole`. own: outputs of this rank; counts: outputs of each rank."""
    bias = None if whole.bias is None else whole.bias[own.start : own.stop]
    made: GatheredLinear = _filled(GatheredLinear, whole.weight[own.start : own.stop], bias)
    made.group, made.counts = group, counts
    return made


def make_summed(whole: torch.nn.Linear, own: range, group: RankGroup, is_given_all: bool) -> SummedLinear:
    """Return a `SummedLinear` that replaces `whole`. own: inputs of this rank.

    `is_given_all` tells whether it receives all inputs, not only its own.
    """
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
